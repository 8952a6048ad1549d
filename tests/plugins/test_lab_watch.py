"""What is recorded of an update: outside, flat, capped; KL(old); weights; the critic.

Every wrong implementation that a number is there to kill stands in `MUTANTS` and is run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from cases import JUNK, PI, PLAIN, f64, ragged, tokens, with_junk
from hypothesis import given, settings
from lab_watch import kl_old

from lab import masked_mean, observe, surrogate
from lab.bench import Bench
from lab.loss import evaluate, observed
from lab.recipe import Recipe, Use
from lab.shelf import Shelf, installed
from lab.step import complete

near = functools.partial(pytest.approx, rel=0, abs=1e-12)
WATCHED = ("clipping", "kl_old", "kl_ref", "entropy", "weights", "critic")
PPO = {"surrogate": "ppo_clip"}
CISPO = {"surrogate": {"name": "cispo", "cap": 1.2}}


def rates(hit, among, **more):
    return {"outside": float(hit[among].double().mean()), **more}


@observe
def flat_is_outside(logp, old_logp, advantages, mask):
    """The symmetric rule: |r - 1| > eps counts as without gradient."""
    far = ((logp - old_logp).exp() - 1).abs() > 0.2
    return rates(far, mask > 0, flat=float(far[(mask > 0) & (advantages != 0)].double().mean()))


@observe
def no_advantage_is_flat(logp, old_logp, pull, mask):
    """A token with A = 0 taken as clipped away."""
    far = ((logp - old_logp).exp() - 1).abs() > 0.2
    return rates(far, mask > 0, flat=float((pull == 0)[mask > 0].double().mean()))


@observe
def padding_counts(logp, old_logp, pull, advantages):
    """Means over [B,T]."""
    far = ((logp - old_logp).exp() - 1).abs() > 0.2
    flat = (pull == 0) & (advantages != 0)
    return rates(far, far | True, flat=float(flat.double().mean()))


@observe
def mean_of_row_means(logp, old_logp, pull, advantages, mask):
    """Rows weigh alike, whatever their length."""
    far = ((logp - old_logp).exp() - 1).abs() > 0.2
    flat = (pull == 0) & (advantages != 0)
    rows = [masked_mean(x.double(), mask, 1).mean() for x in (far, flat)]
    return {"outside": float(rows[0]), "flat": float(rows[1])}


@observe
def closed_from_outside(logp, old_logp, pull, advantages, mask, interval):
    """A token on the edge counts as outside."""
    r, (low, high) = (logp - old_logp).exp(), interval
    return rates((r <= low) | (r >= high), mask > 0, flat=0.0)


@surrogate
def always_1_2(logp, advantages):
    """No mutant: pulls 1.2 A at any ratio, and declares no interval."""
    return 1.2 * advantages * logp


@observe
def reversed_kl(logp, old_logp, mask):
    """pi and old exchanged."""
    return kl_old(old_logp, logp, mask)


@observe
def capped_weights(logp, old_logp):
    """The weights after the cap only (C3)."""
    r = (logp - old_logp).exp().clamp(max=5)
    ess = float(r.sum() ** 2 / (r.numel() * (r**2).sum()))
    return {"ratio_mean": float(r.mean()), "ratio_ess": ess}


@observe
def after_the_clamp(values, old_values, mask, *, c=0.2):
    """The value's move measured once it is clamped: never beyond c."""
    moved = (values - old_values).clamp(-c, c)
    return {"value_clipped": float((moved.abs() > c)[mask > 0].double().mean())}


CLIPS = (flat_is_outside, no_advantage_is_flat, padding_counts, mean_of_row_means)
MUTANTS = (*CLIPS, closed_from_outside, reversed_kl, capped_weights, after_the_clamp)


@pytest.fixture(scope="module")
def wrong() -> Shelf:
    return Shelf.installed((*MUTANTS, always_1_2))


def watch(shelf: Shelf, name: str, spec: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
    """What one observer records of an update by a recipe."""
    b = Bench(Recipe.of({**PLAIN, **spec}, "test", shelf), shelf, [Use(name=name)])
    return b.observe("update", observed(b, complete(batch), evaluate(b, **batch)))


#: (A, r): outside 4/4; flat the first and third; at A = 0 neither; and three tokens of padding.
FOUR = tokens((1.3, 0.7, 0.7, 1.3, 1.3), (2, 2, -2, -2, 0))


def padded_rows() -> dict[str, Any]:
    """D1's four tokens as a row of one and a row of three, a fifth with A = 0, and padding."""
    mask = f64([1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0])
    r = f64([1.3, 3, 3, 1, 1, 1], [0.7, 0.7, 1.3, 1.0, 1, 1])
    a = f64([2, 1, 1, 1, 1, 1], [2, -2, -2, 0, 1, 1])
    return {"logp": r.log(), "old_logp": 0 * r, "advantages": a, "mask": mask}


def test_outside_and_flat_are_two_numbers(shelf: Shelf) -> None:
    """D3, D6, C1: outside 4/4, flat 2/4, each half of its sign's; A = 0 is counted apart, 1/5."""
    for batch in (FOUR, padded_rows()):
        numbers = watch(shelf, "clipping", PPO, batch)
        assert numbers == near({
            "outside": 1, "outside_positive": 1, "outside_negative": 1,
            "flat": 2 / 4, "flat_positive": 1 / 2, "flat_negative": 1 / 2,
            # (-2, 1.3) pulls -2.6, not held at 1.2 * -2
            "capped": 0, "capped_positive": 0, "capped_negative": 0,
            "no_advantage": 1 / 5,
        })  # fmt: skip


@pytest.mark.parametrize("mutant", [f.__name__ for f in CLIPS])
def test_outside_and_flat_kill(wrong: Shelf, mutant: str) -> None:
    got = watch(wrong, mutant, PPO, padded_rows())
    assert (got["outside"], got["flat"]) != near((1, 0.5))


@pytest.mark.parametrize(
    ("floor", "outside", "capped"),
    # [.., 1.2]: the tokens at 1.3, pulls +-2.4; [.8, 1.2]: those at .7 too, pulls +-1.6
    [("none", 2 / 4, 2 / 4), (0.8, 1, 1)],
)
def test_capped_is_not_flat(shelf: Shelf, floor: Any, outside: float, capped: float) -> None:
    """I5: the same four tokens under CISPO: none is flat."""
    spec = {"surrogate": {"name": "cispo", "cap": 1.2, "floor": floor}}
    numbers = watch(shelf, "clipping", spec, FOUR)
    assert (numbers["outside"], numbers["flat"], numbers["capped"]) == near((outside, 0, capped))
    assert numbers["capped_positive"] == numbers["capped_negative"] == near(capped)


def test_dual_clip_makes_flat_tokens(shelf: Shelf) -> None:
    """A = -1 at r = 2 pulls, at 6 not: outside both, flat one, of one sign."""
    spec = {**PPO, "wrap": "dual_clip"}
    numbers = watch(shelf, "clipping", spec, tokens((2, 6, 1), ([-1], [-1], [1])))
    assert (numbers["outside"], numbers["flat"]) == near((2 / 3, 1 / 3))
    assert (numbers["flat_positive"], numbers["flat_negative"]) == near((0, 1 / 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_edge_is_inside(wrong: Shelf, dtype: torch.dtype) -> None:
    """D11: the interval [1, 1] and r = e^0 = 1 exactly: neither outside nor capped nor flat."""
    spec = {"surrogate": {"name": "cispo", "cap": 1.0, "floor": 1.0}}
    x = torch.full((2, 3), -1.5, dtype=dtype)
    batch = {"logp": x, "old_logp": x, "advantages": x, "mask": x * 0 + 1}
    numbers = watch(wrong, "clipping", spec, batch)
    assert (numbers["outside"], numbers["flat"], numbers["capped"]) == (0, 0, 0)
    assert watch(wrong, "closed_from_outside", spec, batch)["outside"] == 1
    beyond = {**batch, "logp": torch.nextafter(x, 0 * x)}
    assert watch(wrong, "clipping", spec, beyond)["outside"] == 1
    assert watch(wrong, "clipping", spec, beyond)["capped"] == 1


def test_undeclared_intervals_are_the_comparisons(shelf: Shelf) -> None:
    """Without bounds of its own a surrogate is measured in [.8, 1.2]; nothing is held there."""
    for spec in ({}, {"surrogate": "sapo"}, {"surrogate": "reinforce", "ratio": "none"}):
        numbers = watch(shelf, "clipping", spec, FOUR)
        assert (numbers["outside"], numbers["flat"], numbers["capped"]) == near((1, 0, 0))


def test_nothing_is_held_where_nothing_is_declared(wrong: Shelf) -> None:
    """DESIGN: capped is held at the component's *declared* bound; [.8, 1.2] only compares."""
    spec = {"surrogate": "always_1_2", "ratio": "none"}
    numbers = watch(wrong, "clipping", spec, tokens((2, 3), 1))
    assert (numbers["outside"], numbers["capped"]) == near((1, 0))


def test_outside_is_told_by_the_recipes_own_ratio(shelf: Shelf) -> None:
    """DESIGN: the token ratio counts only where the slot is `none`; flat lies within outside.

    Rows (1.3, 1/1.3) and (1.3, 1.3), clip [.8, 1.2]: geometric means 1, inside, and 1.3, flat.
    """
    spec = {**PPO, "ratio": "sequence", "aggregate": "sequence_mean"}
    old = f64([-2, -2], [-2, -2])
    batch = {"logp": old + f64([1.3, 1 / 1.3], [1.3, 1.3]).log(), "old_logp": old}
    batch |= {"advantages": 0 * old + 1, "mask": 0 * old + 1}
    numbers = watch(shelf, "clipping", spec, batch)
    assert (numbers["outside"], numbers["flat"]) == near((2 / 4, 2 / 4))


@settings(max_examples=30, deadline=None)
@given(ragged(), st.sampled_from((0.8, 0.95)), st.sampled_from((1.1, 1.2)))
def test_rates_are_counts(batch: dict[str, Any], low: float, high: float) -> None:
    """C2: hits over tokens of the whole batch with A != 0; flat lies within outside."""
    batch = {**batch, "advantages": batch["values"].round()}
    slot = {"name": "ppo_clip", "eps_low": 1 - low, "eps_high": high - 1}
    numbers = watch(installed(), "clipping", {"surrogate": slot}, batch)
    on = batch["mask"] > 0
    r = (batch["logp"].double() - batch["old_logp"].double())[on].exp().tolist()
    cells = list(zip(r, batch["advantages"][on].tolist(), strict=True))
    for side, signs in (("", (1, -1)), ("_positive", (1,)), ("_negative", (-1,))):
        mine = [(q, a) for q, a in cells if a * signs[0] > 0 or a * signs[-1] > 0]
        n = max(1, len(mine))
        assert numbers[f"outside{side}"] == near(sum(not low <= q <= high for q, _ in mine) / n)
        flat = sum((a > 0 and q > high) or (a < 0 and q < low) for q, a in mine)
        assert numbers[f"flat{side}"] == near(flat / n)
        assert numbers[f"flat{side}"] <= numbers[f"outside{side}"]
    assert numbers["no_advantage"] == near(sum(a == 0 for _, a in cells) / len(cells))


@pytest.mark.parametrize("name", ["clipping", "kl_old", "weights"])
def test_before_any_update_all_is_quiet(shelf: Shelf, name: str) -> None:
    """N7: the first minibatch of fresh samples."""
    batch = {**padded_rows(), "logp": padded_rows()["old_logp"]}
    numbers = watch(shelf, name, PPO, batch)
    quiet = {"ratio_mean": 1, "ratio_min": 1, "ratio_max": 1, "ratio_ess": 1, "no_advantage": 1 / 5}
    assert numbers == {n: quiet.get(n, 0) for n in numbers}


def test_three_estimates_of_kl_old(shelf: Shelf) -> None:
    """N19: r 1.3: d = -log 1.3; d, d^2/2, r - 1 - log r; k1 may be negative, k3 not (K5)."""
    d = -math.log(1.3)
    numbers = watch(shelf, "kl_old", {}, tokens(1.3, 1))
    want = {"kl_old_k1": d, "kl_old_k2": d * d / 2, "kl_old_k3": 1.3 - 1 + d}
    assert numbers == near(want)
    rounded = {"kl_old_k1": -0.262364, "kl_old_k2": 0.034418, "kl_old_k3": 0.037636}
    assert want == pytest.approx(rounded, rel=0, abs=5e-7)


def test_k3_does_not_cancel() -> None:
    """In float32 e^-d - 1 + d has error 6e-8 at d = 1e-4, where k3 is d^2/2 = 5e-9."""
    x = torch.full((1, 1), 1e-4)
    got = kl_old(0 * x, x, x * 0 + 1)["kl_old_k3"]
    assert got == pytest.approx(5e-9, rel=5e-3, abs=0)
    assert float((-x).exp() - 1 + x) != pytest.approx(5e-9, rel=5e-3, abs=0)


@pytest.mark.parametrize(
    ("lr", "kl", "outside"), [(0.5, 0.003473, 0), (5, 0.298069, 3), (50, 7.206860, 3)]
)
def test_a_single_step_may_be_far(wrong: Shelf, lr: float, kl: float, outside: int) -> None:
    """D5, D10: from pi along (.2, -.18, -.02); ten samples as pi has them: 5, 3, 2.

    Their mean of k1 and of k3 is KL(old||new) itself, and no other's.
    """
    z = [math.log(p) + lr * g for p, g in zip(PI, (0.2, -0.18, -0.02), strict=True)]
    total = math.log(sum(map(math.exp, z)))
    new = [x - total for x in z]
    exact = sum(p * (math.log(p) - x) for p, x in zip(PI, new, strict=True))
    assert exact == pytest.approx(kl, rel=0, abs=5e-7)
    rows = torch.repeat_interleave(torch.arange(3), torch.tensor([5, 3, 2]))
    batch = {"logp": f64(*new)[rows, None], "old_logp": f64(*PI).log()[rows, None]}
    batch |= {"advantages": f64(1, 0, 0.5)[rows, None] + 1, "mask": f64(*[1] * 10)[:, None]}
    numbers = watch(wrong, "kl_old", PPO, batch)
    assert (numbers["kl_old_k1"], numbers["kl_old_k3"]) == near((exact, exact))
    turned = watch(wrong, "reversed_kl", PPO, batch)
    assert turned["kl_old_k1"] == near(-exact)
    assert turned["kl_old_k3"] != near(exact)
    assert watch(wrong, "clipping", PPO, batch)["outside"] == near(outside / 3)


def test_raw_weights(wrong: Shelf) -> None:
    """C3: ratios (.5, 1, 6), cap 5: raw mean 2.5 (used 2.166667), a third capped."""
    spec, batch = {"surrogate": "cispo"}, tokens((0.5, 1, 6), 1)
    numbers = watch(wrong, "weights", spec, batch)
    ess = 7.5**2 / (3 * (0.25 + 1 + 36))
    assert numbers == near({
        "ratio_mean": 7.5 / 3, "ratio_min": 0.5, "ratio_max": 6, "ratio_ess": ess
    })  # fmt: skip
    used = evaluate(Bench(Recipe.of({**PLAIN, **spec}, "test", wrong), wrong), **batch).pull
    assert float(used.mean()) == near((0.5 + 1 + 5) / 3)
    assert watch(wrong, "clipping", spec, batch)["capped"] == near(1 / 3)
    mutant = watch(wrong, "capped_weights", spec, batch)
    assert mutant["ratio_mean"] != near(2.5)
    assert mutant["ratio_ess"] != near(ess)
    # ALGORITHMS S8: (2, 1, 1, 0) has 16/(4 * 6); e^-60 stands for the 0
    almost = tokens((2, 1, 1, math.exp(-60)), 1)
    assert watch(wrong, "weights", spec, almost)["ratio_ess"] == near(4**2 / (4 * 6))


@settings(max_examples=25, deadline=None)
@given(ragged(), st.sampled_from(JUNK), st.sampled_from(WATCHED))
def test_padding_changes_no_number(batch: dict[str, Any], junk: float, name: str) -> None:
    """M6, P3: bit for bit, with sentinels, infinities and NaN off the mask."""
    batch = {**batch, "advantages": batch["values"]}
    spec = {**CISPO, "advantage": "gae"}
    numbers = watch(installed(), name, spec, batch)
    assert repr(watch(installed(), name, spec, with_junk(batch, junk))) == repr(numbers)


def test_no_token_no_number_that_is_not_finite(shelf: Shelf) -> None:
    """G15."""
    batch = {**padded_rows(), "mask": 0 * padded_rows()["mask"]}
    batch |= dict.fromkeys(("values", "ref_logp", "entropy"), batch["logp"])
    batch |= {"truncated": torch.tensor([False, False])}
    for name in WATCHED:
        spec = {**PPO, "advantage": "gae"}
        assert all(math.isfinite(x) for x in watch(shelf, name, spec, batch).values())


CRITIC = {"advantage": "gae", "critic_loss": {"name": "clipped", "c": 0.2}}


def critic(shelf: Shelf, values: Any, old: Any, returns: Any, name: str = "critic") -> Any:
    """What is recorded of a critic; three tokens of padding hold other numbers."""
    logp, v, o, r = (f64([*x, 7.0, 8.0, -9.0]) for x in ([0.0] * len(values), values, old, returns))
    mask = f64([*[1] * len(values), 0, 0, 0])
    batch = {"logp": logp, "old_logp": logp, "advantages": logp, "mask": mask}
    return watch(shelf, name, CRITIC, {**batch, "values": v, "old_values": o, "returns": r})


def test_the_value_clip_is_counted_from_the_unclipped_move(wrong: Shelf) -> None:
    """N18, T4: V_old (.5, .5), V (.9, .6), range .2: half; measured after the clamp it is 0."""
    given = ([0.9, 0.6], [0.5, 0.5], [1, 1])
    assert critic(wrong, *given)["value_clipped"] == near(1 / 2)
    assert critic(wrong, *given, name="after_the_clamp")["value_clipped"] == 0


@pytest.mark.parametrize(
    ("v", "want"),
    [
        # variances with sum of squares 5 about 2.5: 1 - (.01 + .01 + .04 + .04)/5
        ([1.1, 1.9, 3.2, 3.8], 1 - 0.1 / 5),
        ([2.5, 2.5, 2.5, 2.5], 0),
        ([4, 3, 2, 1], 1 - (9 + 1 + 1 + 9) / 5),  # -3
        ([6, 7, 8, 9], 1),  # and MSE 25: the means beside it say so
    ],
)
def test_explained_variance(shelf: Shelf, v: list[float], want: float) -> None:
    """C18: of the rollout's values; L7, C7: the targets' scale stands beside it."""
    numbers = critic(shelf, [0, 0, 0, 0], v, [1, 2, 3, 4])
    assert numbers["explained_variance"] == near(want)
    assert numbers["return_mean"] == near(2.5)
    assert numbers["return_std"] == near(math.sqrt(5 / 4))
    assert numbers["value_mean"] == near(sum(v) / 4)


def test_explained_variance_of_a_constant_is_undefined(shelf: Shelf) -> None:
    """C18: Var(R) = 0, also where .3 + .3 + .3 is not .9."""
    assert math.isnan(critic(shelf, [0] * 3, [0.1, 0.2, 0.3], [0.3] * 3)["explained_variance"])
