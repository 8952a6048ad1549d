"""CISPO: a capped, detached weight on log p (ACCEPTANCE I, PITFALLS S1, S2, S5).

Every wrong implementation that a number is there to kill stands in `MUTANTS` and is run.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from cases import PI, F, Q, bench, f64, ragged, tokens
from hypothesis import given, settings

from lab import surrogate
from lab.errors import LabError
from lab.loss import evaluate, load, pull_curve
from lab.shelf import Shelf, installed

near = functools.partial(pytest.approx, rel=0, abs=1e-12)
OPEN = {"name": "cispo", "cap": "none", "floor": "none"}
CAP12 = {"name": "cispo", "cap": 1.2}
CAP12_FLOOR8 = {"name": "cispo", "cap": 1.2, "floor": 0.8}


@surrogate
def attached(ratio, logp, advantages):
    """The weight moves with the policy: the product rule adds a term."""
    return ratio.clamp(max=1.2) * advantages * logp


@surrogate
def attached_uncapped(ratio, logp, advantages):
    """The same without a cap, as in I4."""
    return ratio * advantages * logp


@surrogate
def no_logp(ratio, advantages):
    """The log-prob factor forgotten: a capped token has no pull."""
    return ratio.clamp(max=1.2) * advantages


@surrogate
def cap_is_eps(ratio, logp, advantages, *, eps=0.2):
    """PPO's epsilon taken as the cap."""
    return ratio.clamp(max=eps).detach() * advantages * logp


@surrogate
def floor_active(ratio, logp, advantages):
    """A lower bound where none was asked for."""
    return ratio.clamp(0.8, 1.2).detach() * advantages * logp


@surrogate
def ppos_sign_rule(ratio, logp, advantages):
    """The cap for good tokens only."""
    return torch.where(advantages > 0, ratio.clamp(max=1.2), ratio).detach() * advantages * logp


MUTANTS = (attached, attached_uncapped, no_logp, cap_is_eps, floor_active, ppos_sign_rule)


@pytest.fixture(scope="module")
def wrong() -> Shelf:
    return Shelf.installed(MUTANTS)


def four_pulls(shelf: Shelf, spec: Any) -> list[float]:
    """Pulls on (A, r) = (2, 1.3), (2, .7), (-2, .7), (-2, 1.3), from old log p = -2."""
    batch = tokens((1.3, 0.7, 0.7, 1.3), (2, 2, -2, -2))
    return evaluate(bench(shelf, surrogate=spec), **batch).pull[:, 0].tolist()


#: I5: 1.2 * 2 (PPO-Clip: 0), .7 * 2, and the same for a negative advantage.
I5 = (1.2 * 2, 0.7 * 2, -0.7 * 2, -1.2 * 2)


def test_a_capped_token_keeps_its_pull(shelf: Shelf) -> None:
    assert four_pulls(shelf, CAP12) == near(I5)
    # lifted to .8 * 2
    assert four_pulls(shelf, CAP12_FLOOR8) == near((1.2 * 2, 0.8 * 2, -0.8 * 2, -1.2 * 2))


@pytest.mark.parametrize(
    ("mutant", "pulls"),
    [
        # below the cap r A (1 + log p), log p = -2 + log .7; above it 1.2 A: the clamp is flat
        ("attached", (2.4, 1.4 * (math.log(0.7) - 1), -1.4 * (math.log(0.7) - 1), -2.4)),
        ("no_logp", (0, 1.4, -1.4, 0)),
        ("cap_is_eps", (0.4, 0.4, -0.4, -0.4)),
        ("floor_active", (2.4, 1.6, -1.6, -2.4)),
        ("ppos_sign_rule", (2.4, 1.4, -1.4, -2.6)),
    ],
)
def test_four_cases_kill(wrong: Shelf, mutant: str, pulls: Any) -> None:
    assert four_pulls(wrong, mutant) == near(pulls)
    assert four_pulls(wrong, mutant) != near(I5)


def derivatives(shelf: Shelf, spec: Any) -> tuple[float, float, float]:
    """Value, slope, curvature in log p at r = .13/.10, A = 2."""
    logp = f64([0.13]).log().requires_grad_()
    given = {"old_logp": f64([0.10]).log(), "advantages": f64([2]), "mask": f64([1])}
    out = evaluate(bench(shelf, surrogate=spec), logp=logp, **given)
    (first,) = torch.autograd.grad(out.surrogate.sum(), logp, create_graph=True)
    second = torch.autograd.grad(first, logp)[0] if first.requires_grad else 0
    assert float(out.pull) == near(float(first.detach()))
    return float(out.surrogate.detach()), float(first.detach()), float(second)


def test_stop_gradient_identity(wrong: Shelf) -> None:
    """I1, I4: sg(r) A log p has the slope of r A, not its value, nor its curvature."""
    r_a, logp = 1.3 * 2, math.log(0.13)
    assert derivatives(wrong, "ppo_unclipped") == near((r_a, r_a, r_a))
    assert derivatives(wrong, OPEN) == near((r_a * logp, r_a, 0))  # -5.304574, 2.6, 0
    # product rule: r A (1 + log p) = -2.704574, then r A (2 + log p) = -.104574
    leaked = (r_a * logp, r_a * (1 + logp), r_a * (2 + logp))
    assert derivatives(wrong, "attached_uncapped") == near(leaked)
    assert derivatives(wrong, "attached_uncapped")[1] != near(r_a)


def test_values_are_not_comparable(shelf: Shelf) -> None:
    """C4 of the pitfalls, S5: r = 1, A = 1, p = .13: surrogate 1 or log .13, both pull 1."""
    batch = {"logp": f64([0.13]).log(), "advantages": f64([1]), "mask": f64([1])}
    batch["old_logp"] = batch["logp"]
    for spec, value in (("ppo_clip", 1), ("cispo", math.log(0.13))):  # -2.040221
        out = evaluate(bench(shelf, surrogate=spec), **batch)
        assert (float(out.surrogate), float(out.pull)) == near((value, 1))


def expected(shelf: Shelf, spec: Any, f: Any = F) -> tuple[float, list[float]]:
    """Samples from q, enumerated: E_q[pull] and the expected gradient by the logits of pi."""
    logits = f64(*PI).log().requires_grad_()
    q = f64(*Q)[:, None]
    given = {"old_logp": q.log(), "advantages": f64(*f)[:, None], "mask": 0 * q + 1}
    logp = logits.log_softmax(0)[:, None]
    out = evaluate(bench(shelf, surrogate=spec), logp=logp, shares=q, **given)
    gradient = torch.autograd.grad(-out.loss, logits)[0].tolist()
    return float((q * out.pull).sum()), gradient


def test_the_cap_biases(shelf: Shelf) -> None:
    """I3, I6: weights .5/.2, .3/.3, .2/.5 = 2.5, 1, .4; capped at 1.2 the mean of w f drops."""
    value, gradient = expected(shelf, OPEN)
    assert value == near(0.2 * 2.5 * 1 + 0.5 * 0.4 * 0.5)  # .6
    assert gradient == near((0.5 * 0.4, 0.3 * -0.6, 0.2 * -0.1))  # pi (f - .6)
    value, gradient = expected(shelf, CAP12)
    assert value == near(0.2 * 1.2 * 1 + 0.5 * 0.4 * 0.5)  # .34
    # .24 (.5, -.3, -.2) + .1 (-.5, -.3, .8)
    assert gradient == near((0.12 - 0.05, -0.072 - 0.03, -0.048 + 0.08))


def test_the_cap_does_not_bound_the_gradient(shelf: Shelf) -> None:
    """I7: A times 1000, gradient times 1000."""
    small, large = (expected(shelf, CAP12, [s * x for x in F])[1] for s in (1, 1000))
    assert [x / 1000 for x in large] == near(small)


COLUMNS = (0.5, 0.8, 1, 1.1, 1.28, 1.5, 2, 6, 10, 30)


@pytest.mark.parametrize("a", [1.0, -1.0, 2.5])
@pytest.mark.parametrize(
    ("spec", "row"),
    [
        ("cispo", (0.5, 0.8, 1, 1.1, 1.28, 1.5, 2, 5, 5, 5)),  # [0, 5] is the default
        ({"name": "cispo", "cap": 5.0, "floor": 0.0}, (0.5, 0.8, 1, 1.1, 1.28, 1.5, 2, 5, 5, 5)),
        (CAP12_FLOOR8, (0.8, 0.8, 1, 1.1, 1.2, 1.2, 1.2, 1.2, 1.2, 1.2)),
        (CAP12, (0.5, 0.8, 1, 1.1, 1.2, 1.2, 1.2, 1.2, 1.2, 1.2)),
        (OPEN, COLUMNS),
    ],
)
def test_pull_table(shelf: Shelf, spec: Any, row: tuple[float, ...], a: float) -> None:
    """ALGORITHMS section 4: the weight is continuous, so an edge has one value from both sides."""
    got = pull_curve(bench(shelf, surrogate=spec), COLUMNS, a)
    assert got == [pytest.approx(w * a, rel=1e-13, abs=0) for w in row]


def test_the_recipe_has_cispos_signature() -> None:
    """S3, on the acceptance list's columns."""
    for a in (1, -1):
        assert pull_curve(load("cispo"), (0.5, 1, 2, 10), a) == near((a * 0.5, a, a * 2, a * 5))


@settings(max_examples=30, deadline=None)
@given(ragged(), st.sampled_from((None, 1.0, 1.3, 5.0)), st.sampled_from((None, 0.0, 0.5, 1.0)))
def test_pull_is_its_formula(batch: dict[str, Any], cap: float | None, floor: float | None) -> None:
    """clip(r, floor, cap) A; the value is that times log p, and 0 off the mask."""
    spec = {"name": "cispo", "cap": cap, "floor": floor}
    a = batch["values"].round()  # 0, +-1, +-2 ..
    out = evaluate(bench(installed(), surrogate=spec), **{**batch, "advantages": a})
    low, high = floor or 0.0, math.inf if cap is None else cap
    cells = zip(
        (batch["logp"].double() - batch["old_logp"].double()).flatten().tolist(),
        a.flatten().tolist(),
        batch["mask"].flatten().tolist(),
        strict=True,
    )
    want = f64([min(max(math.exp(x), low), high) * s * m for x, s, m in cells]).reshape(a.shape)
    rtol = 1e-12 if a.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(out.pull.double(), want, rtol=rtol, atol=0)
    value = want * batch["logp"].double()
    torch.testing.assert_close(out.surrogate.double(), value, rtol=rtol, atol=0)


@pytest.mark.parametrize(
    ("spec", "interval"),
    [
        (CAP12, (None, 1.2)),
        (CAP12_FLOOR8, (0.8, 1.2)),
        ("cispo", (None, 5.0)),
        (OPEN, (None, None)),
    ],
    ids=str,
)
def test_the_interval_is_declared(shelf: Shelf, spec: Any, interval: Any) -> None:
    """I5, S2: tables print an interval of the ratio, never an epsilon."""
    assert bench(shelf, surrogate=spec).interval == interval


@pytest.mark.parametrize("parameters", [{"cap": x} for x in (0.2, 0.999, 0.0, -1.0, math.nan)] + [
    {"floor": x} for x in (1.001, -0.1, math.nan)
], ids=str)  # fmt: skip
def test_illegal_parameters(shelf: Shelf, parameters: dict[str, float]) -> None:
    """TRL's default [0, .2] would pull .2 A at r = 1 (S2): refused."""
    with pytest.raises(LabError):
        bench(shelf, surrogate={"name": "cispo", **parameters})
