"""The sampler is not the trainer: truncated importance weights (ALGORITHMS W1, ACCEPTANCE F).

rho = exp(old - rollout). Every wrong implementation that a number is there to kill stands in
`MUTANTS` and is run.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from cases import PI, bench, f64, ragged
from hypothesis import given, settings

from lab import surrogate
from lab.bench import Bench
from lab.errors import LabError
from lab.loss import evaluate
from lab.recipe import Recipe, Use
from lab.shelf import Shelf, installed

near = functools.partial(pytest.approx, rel=0, abs=1e-12)


@surrogate(wrapper=True)
def inverted(old_logp, rollout_logp, *, cap=2.0, floor=0.0):
    """The sampler over the trainer."""
    gain = yield
    return (rollout_logp - old_logp).exp().clamp(floor, cap) * gain


@surrogate(wrapper=True)
def current_over_rollout(logp, rollout_logp, *, cap=2.0, floor=0.0):
    """The current policy in the numerator: counts the token ratio twice."""
    gain = yield
    return (logp - rollout_logp).exp().detach().clamp(floor, cap) * gain


@surrogate(wrapper=True)
def weight_attached(logp, old_logp, rollout_logp, *, cap=2.0, floor=0.0):
    """A weight of the right value that moves with the policy."""
    gain = yield
    rho = (old_logp + logp - logp.detach() - rollout_logp).exp()
    return rho.clamp(floor, cap) * gain


@surrogate(wrapper=True)
def uncapped(old_logp, rollout_logp, *, cap=2.0, floor=0.0):
    """Not truncated."""
    gain = yield
    return (old_logp - rollout_logp).exp() * gain


@surrogate(wrapper=True)
def floor_ignored(old_logp, rollout_logp, *, cap=2.0, floor=0.0):
    """Truncated from above only."""
    gain = yield
    return (old_logp - rollout_logp).exp().clamp(max=cap) * gain


@surrogate(wrapper=True)
def masked(old_logp, rollout_logp, *, cap=2.0, floor=0.0):
    """Drops what it should cap (IcePop's rule)."""
    gain = yield
    rho = (old_logp - rollout_logp).exp()
    return torch.where((rho >= floor) & (rho <= cap), rho * gain, 0 * gain)


@surrogate(wrapper=True, corrects="rollout")
def another_correction(old_logp, rollout_logp):
    """No mutant: a second component that corrects for the sampler."""
    gain = yield
    return (old_logp - rollout_logp).exp() * gain


MUTANTS = (inverted, current_over_rollout, weight_attached, uncapped, floor_ignored, masked)


@pytest.fixture(scope="module")
def wrong() -> Shelf:
    return Shelf.installed((*MUTANTS, another_correction))


RHO = (0.4, 0.5, 1.0, 1.6, 4.0)


def five_tokens(shelf: Shelf, name: str, r: float = 1.1, a: float = 1.0) -> Any:
    """Tokens with rho .4, .5, 1, 1.6, 4 at ratio r, weighed into [.5, 2]."""
    old = f64([-1.0] * 5)
    b = bench(shelf, wrap=[{"name": name, "cap": 2.0, "floor": 0.5}])
    batch = {"old_logp": old, "rollout_logp": old - f64(RHO).log(), "logp": old + math.log(r)}
    return evaluate(b, **batch, advantages=0 * old + a, mask=0 * old + 1)


#: clamp(rho, .5, 2) * 1.1 * A.
WANT = [w * 1.1 for w in (0.5, 0.5, 1.0, 1.6, 2.0)]


def test_the_weight_multiplies_value_and_pull(shelf: Shelf) -> None:
    for a in (1.0, -2.0):
        out = five_tokens(shelf, "token_tis", a=a)
        assert out.surrogate[0].tolist() == near([a * x for x in WANT])
        assert out.pull[0].tolist() == near([a * x for x in WANT])


@pytest.mark.parametrize("mutant", [f.__name__ for f in MUTANTS])
def test_five_tokens_kill(wrong: Shelf, mutant: str) -> None:
    assert five_tokens(wrong, mutant).pull[0].tolist() != near(WANT)


def clip(r: float, a: float) -> float:
    return (r if r <= 1.2 else 0.0) if a > 0 else (r if r >= 0.8 else 0.0)


WEIGHTS = {
    "ppo_unclipped": lambda r, a: r,
    "ppo_clip": clip,
    "cispo": lambda r, a: min(r, 5.0),
}


@settings(max_examples=30, deadline=None)
@given(ragged(), st.sampled_from(sorted(WEIGHTS)), st.sampled_from((1.02, 2.0)))
def test_pull_is_its_formula(batch: dict[str, Any], name: str, cap: float) -> None:
    """clamp(rho, .97, cap) w(r, sign A) A, whatever it surrounds."""
    a = batch["values"].round()  # 0, +-1, +-2 ..
    spec = {"surrogate": name, "wrap": {"name": "token_tis", "cap": cap, "floor": 0.97}}
    out = evaluate(bench(installed(), spec), **{**batch, "advantages": a})
    logp, old, rollout = (batch[n].double() for n in ("logp", "old_logp", "rollout_logp"))
    cells = zip(
        *(x.flatten().tolist() for x in (logp - old, old - rollout, a, batch["mask"])), strict=True
    )
    want = [
        m * min(max(math.exp(y), 0.97), cap) * WEIGHTS[name](math.exp(x), s) * s
        for x, y, s, m in cells
    ]
    rtol = 1e-12 if a.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(out.pull.double(), f64(want).reshape(a.shape), rtol=rtol, atol=0)


def test_nothing_trains_the_weight(shelf: Shelf) -> None:
    leaves = {n: f64([-1.0, -2.0]).requires_grad_() for n in ("logp", "old_logp", "rollout_logp")}
    out = evaluate(
        bench(shelf, wrap="token_tis"), **leaves, advantages=f64([1, 1]), mask=f64([1, 1])
    )
    grads = torch.autograd.grad(out.loss, list(leaves.values()), allow_unused=True)
    assert grads[0] is not None
    assert grads[1:] == (None, None)


def test_the_lists_order_is_the_order(shelf: Shelf) -> None:
    """W21: r 6, A -1, rho .5. max(-6, -3) * .5, flat; or max(-6 * .5, -3): on the edge, inside."""
    old = f64([-3.0])
    batch = {"old_logp": old, "rollout_logp": old - math.log(0.5), "logp": old + math.log(5.9)}
    for wrap, value, pull in (
        (["dual_clip", "token_tis"], -3 * 0.5, 0),
        (["token_tis", "dual_clip"], -5.9 * 0.5, -5.9 * 0.5),
    ):
        b = bench(shelf, surrogate="ppo_clip", wrap=wrap)
        out = evaluate(b, **batch, advantages=f64([-1]), mask=f64([1]))
        assert (float(out.surrogate), float(out.pull)) == near((value, pull))


def test_one_correction_at_a_time(wrong: Shelf) -> None:
    with pytest.raises(LabError, match="both correct for the sampler"):
        bench(wrong, wrap=["token_tis", "another_correction"])
    with pytest.raises(LabError, match="anchor"):
        bench(wrong, wrap="token_tis", loop={"anchor": "rollout"})


def test_a_missing_anchor_is_an_error(shelf: Shelf) -> None:
    """S8: never silently the stock objective."""
    x = f64([0.0])
    with pytest.raises(LabError, match="rollout_logp"):
        evaluate(bench(shelf, wrap="token_tis"), logp=x, old_logp=x, advantages=x, mask=x + 1)


@pytest.mark.parametrize(
    "parameters",
    [{"cap": x} for x in (0.0, -1.0, math.nan)]
    + [{"floor": x} for x in (-0.1, 2.1, math.nan)]  # above the default cap 2
    + [{"cap": 1.0, "floor": 1.1}],
    ids=str,
)
def test_illegal_parameters(shelf: Shelf, parameters: dict[str, float]) -> None:
    with pytest.raises(LabError):
        bench(shelf, wrap={"name": "token_tis", **parameters})


def seen(behaviour: Any, scored: Any) -> tuple[list[float], dict[str, float]]:
    """Token ratios of what was scored to what was sampled, and what `weights` records of them."""
    recipe = Recipe.of({"base": "reinforce", "ratio": "token"}, "test", installed())
    b = Bench(recipe, installed(), [Use(name="weights")])
    n = len(behaviour)
    step = {"logp": f64(*scored)[:n, None].log(), "old_logp": f64(*behaviour)[:, None].log()}
    step["mask"] = torch.ones_like(step["logp"])
    r = (step["logp"] - step["old_logp"]).exp()[:, 0].tolist()
    return r, b.observe("update", step)


def test_a_temperature_left_out_shows_in_tokens_not_in_the_mean() -> None:
    """F3: T = .6 samples from p^(1/.6), normalised; scoring at T = 1 keeps the mean ratio 1."""
    power = [p ** (1 / 0.6) for p in PI]
    tempered = [p / sum(power) for p in power]
    assert tempered == pytest.approx((0.608280, 0.259630, 0.132090), rel=0, abs=5e-7)
    r, numbers = seen(tempered, PI)
    assert r == near([p / q for p, q in zip(PI, tempered, strict=True)])
    assert r == pytest.approx((0.821990, 1.155489, 1.514119), rel=0, abs=5e-7)
    assert sum(q * x for q, x in zip(tempered, r, strict=True)) == near(1)  # deaf to the mistake
    assert (numbers["ratio_min"], numbers["ratio_max"]) == near((min(r), max(r)))


def test_a_truncated_sampler_leaves_the_kept_mass_in_every_ratio() -> None:
    """F4, R4, W22: top-2 of pi keeps .8, top-p .85 of (.6, .3, .1) keeps .9, on each token."""
    for pi, kept in ((PI, 0.5 + 0.3), ((0.6, 0.3, 0.1), 0.6 + 0.3)):
        behaviour = [p / kept for p in pi[:2]]
        r, numbers = seen(behaviour, pi)
        assert r == near((kept, kept))
        assert numbers["ratio_mean"] == near(kept)
        assert numbers["ratio_ess"] == near(1)  # equal ratios: no alarm either
        assert seen(behaviour, behaviour)[0] == near((1, 1))  # re-scored on that support
