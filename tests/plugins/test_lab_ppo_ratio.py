"""The token ratio: its value, its slope, and what it corrects (ACCEPTANCE E)."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from cases import PI, F, Q, bench, f64, gradient, ragged
from hypothesis import given, settings
from lab_ppo import token
from torch import Tensor

from lab import ratio
from lab.errors import LabError
from lab.loss import evaluate
from lab.shelf import Shelf, installed

near = functools.partial(pytest.approx, rel=0, abs=1e-12)


@ratio
def inverted(logp, old_logp):
    """The behaviour policy in the numerator."""
    return (old_logp - logp).exp()


@ratio
def both_attached(logp, old_logp):
    """Numerator and denominator move together."""
    return (logp - logp + (old_logp - old_logp)).exp()


@ratio
def detached(logp, old_logp):
    """The right value, no slope."""
    return (logp - old_logp).exp().detach()


@ratio
def constant_one(logp):
    """A literal 1."""
    return torch.ones_like(logp)


@pytest.fixture(scope="module")
def wrong() -> Shelf:
    return Shelf.installed((inverted, both_attached, detached, constant_one))


@settings(max_examples=20, deadline=None)
@given(ragged())
def test_a_fresh_batch_has_one_gradient(batch: dict[str, Any]) -> None:
    """D5, E9, R1: ratio rules need a second update to differ; the loss is no measure of it."""
    batch = {**batch, "logp": batch["old_logp"], "advantages": batch["values"]}
    specs = [{"surrogate": "reinforce", "ratio": "none"}, {}, {"surrogate": "ppo_clip"}]
    specs += [{"surrogate": s} for s in ("sapo", {"name": "cispo", "cap": 1.0, "floor": 1.0})]
    specs += [{"surrogate": "ppo_clip", "wrap": "dual_clip"}]
    first, *others = (gradient(bench(installed(), s), batch)[1] for s in specs)
    rows = batch["mask"].sum(1).count_nonzero()
    want = -torch.where(batch["mask"] > 0, batch["values"], 0) / rows
    for g in (first, *others):
        tolerance = 1e-12 if g.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(g, want, rtol=tolerance, atol=0)


def test_a_loss_of_zero_is_no_stillstand(shelf: Shelf) -> None:
    """R1: A (1, -1) at r 1: loss -(1 - 1)/2 = 0, pulls (1, -1), gradient -(1, -1)/2."""
    batch = {"logp": f64([-1], [-1]), "old_logp": f64([-1], [-1]), "mask": f64([1], [1])}
    loss, g = gradient(bench(shelf, surrogate="ppo_clip"), {**batch, "advantages": f64([1], [-1])})
    assert float(loss) == 0
    assert g.tolist() == [[-0.5], [0.5]]


def expected(shelf: Shelf, name: str, pi: Any, behaviour: Any, f: Any) -> tuple[float, list[float]]:
    """E_behaviour[ratio f] over all answers, and its gradient by the logits of pi."""
    logits = f64(*pi).log().requires_grad_()
    n = len(behaviour)
    logp = logits.log_softmax(0)[:n, None]
    weight = f64(*behaviour)[:, None]
    given = {"old_logp": weight.log(), "advantages": f64(*f)[:n, None], "mask": 0 * weight + 1}
    out = evaluate(bench(shelf, ratio=name), logp=logp, shares=weight, **given)
    return -float(out.loss.detach()), torch.autograd.grad(-out.loss, logits)[0].tolist()


def test_the_ratio(wrong: Shelf) -> None:
    """E1, E3, E7: .13/.10 = 1.3; E_q[(pi/q) f] = E_pi[f] = .5 + .2 * .5, given support."""
    r = token(f64([0.13]).log(), f64([0.10]).log())
    assert float(r) == near(1.3)
    assert float(r.log()) == pytest.approx(0.262364, rel=0, abs=5e-7)
    value, slope = expected(wrong, "token", PI, Q, F)
    assert value == near(0.6)
    assert slope == near((0.5 * 0.4, 0.3 * -0.6, 0.2 * -0.1))  # pi (f - J)
    # sum q^2/pi f = .2 * .2/.5 * 1 + .5 * .5/.2 * .5 = .705
    assert expected(wrong, "inverted", PI, Q, F)[0] == near(0.08 + 0.625)
    kept = (0.625, 0.375)  # top-2 of pi: 5/8, 3/8; the third answer is never seen
    assert expected(wrong, "token", PI, kept, (1, 1))[0] == near(0.5 + 0.3)
    assert expected(wrong, "token", PI, kept, F)[0] == near(0.5)


def test_a_ratio_of_one_has_a_slope(wrong: Shelf) -> None:
    """E2, E6: at the behaviour policy, a = 0: onehot - pi; three ways to lose it."""

    def slope(name: str) -> list[float]:
        value, s = expected(wrong, name, PI, PI, (1 / 0.5, 0, 0))  # pi(0) * 1/pi(0): r alone
        assert value == near(1)
        return s

    assert slope("token") == near((1 - 0.5, -0.3, -0.2))
    assert slope("both_attached") == near((0, 0, 0))
    logp = f64([0.0]).requires_grad_()
    assert not detached(logp, logp.detach()).requires_grad
    assert not constant_one(logp).requires_grad
    for name in ("detached", "constant_one"):  # so the bench does not even take them
        with pytest.raises(LabError, match="no gradient flows"):
            bench(wrong, ratio=name)


def test_each_minibatch_step_is_an_update(shelf: Shelf) -> None:
    """E5: after a step on sample 0, sample 1's ratio has left 1; re-scoring old hides it."""
    logits, old = f64(*PI).log().requires_grad_(), f64(*PI).log()
    b, cell = bench(shelf, surrogate="ppo_clip"), f64([1])

    def ratio_of(a: int, against: Tensor) -> tuple[float, Tensor]:
        given = {"logp": logits.log_softmax(0)[a].reshape(1, 1), "advantages": cell, "mask": cell}
        out = evaluate(b, **given, old_logp=against[a].reshape(1, 1))
        return float(out.ratio.detach()), torch.autograd.grad(out.loss, logits)[0]

    fresh, g = ratio_of(0, old)
    logits = (logits - 0.1 * g).detach().requires_grad_()
    # p_k e^(.1 ((k = 0) - p_k)), normalised
    z = [p * math.exp(0.1 * ((k == 0) - p)) for k, p in enumerate(PI)]
    assert (fresh, ratio_of(1, old)[0]) == near((1, z[1] / sum(z) / 0.3))
    rescored = logits.log_softmax(0).detach()  # the mutant: old follows the policy
    assert ratio_of(1, rescored)[0] == near(1)
    assert z[1] / sum(z) / 0.3 != near(1)
