"""The KL components one by one: values, what is refused, what leaves a run alone.

H1, H2, H7, H9, H14, ALGORITHMS K3, K10, K12, K14, PITFALLS K4, K5, K7, K9. Beside it: expected
gradients (test_lab_kl_gradients.py), credit and states (_sequences), adaptive beta (_adaptive).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import hypothesis.strategies as st
import lab_kl
import pytest
import torch
from cases import JUNK, PI, PLAIN, Q, bench, f64, gradient, ragged, with_junk
from hypothesis import given, settings
from torch import Tensor

from lab import LabError, listing
from lab.loss import evaluate, load
from lab.shelf import Shelf, installed

ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+")
WEIGHTS = ("none", "live", "live_sequence", "detached")


def near(got: Any, want: Any, atol: float = 1e-12) -> None:
    got, want = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (got, want))
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


def raw(
    d: float | Tensor, estimator: str, weight: str = "none", ratio: float = 1.0
) -> tuple[Tensor, Tensor]:
    """in_loss itself on one token with d = logp - ref: value and slope."""
    logp = torch.as_tensor(d, dtype=torch.float64) if isinstance(d, float) else d
    logp = logp.reshape(1, -1).clone().requires_grad_()
    old = logp.detach() - math.log(ratio)
    value = lab_kl.in_loss(
        logp, old, torch.zeros_like(old), torch.ones_like(old), estimator=estimator, beta=1.0,
        weight=weight, allow_wrong=True,
    )  # fmt: skip
    return value.detach()[0], torch.autograd.grad(value.sum(), logp)[0][0]


# --- values and slopes ---------------------------------------------------------------------------

LOG2 = math.log(2)


@pytest.mark.parametrize(
    ("estimator", "weight", "value", "slope"),
    [
        ("k1", "none", LOG2, 1.0),  # .693147
        ("k2", "none", LOG2**2 / 2, LOG2),  # .240227
        ("k3", "none", 0.5 - 1 + LOG2, 1 - 0.5),  # .193147, 1 - ref/pi
        ("abs", "none", LOG2, 1.0),
        ("k1+", "none", LOG2, LOG2),
        ("k3+", "none", 0.5 - 1 + LOG2, LOG2),
        ("k1", "live", LOG2, 1 + LOG2),  # 1.693147
        ("k3", "live", 0.5 - 1 + LOG2, LOG2),  # k3 + (1 - ref/pi) = k1
        ("k2", "live", LOG2**2 / 2, LOG2 + LOG2**2 / 2),
        ("k2", "detached", LOG2**2 / 2, LOG2),
        ("k3", "live_sequence", 0.5 - 1 + LOG2, LOG2),
    ],
)
def test_h9_one_token(estimator: str, weight: str, value: float, slope: float) -> None:
    """pi .5, ref .25. Kills: an estimator under another's name, a weight wrongly attached."""
    got, moved = raw(LOG2, estimator, weight)
    near(got, [value])
    near(moved, [slope])


@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_weight_multiplies(weight: str) -> None:
    """r = 1.5, k2 of d = .4: .08 r; slope d (no r), r (d + d^2/2) live, r d detached."""
    got, slope = raw(0.4, "k2", weight, ratio=1.5)
    near(got, [0.08 * (1 if weight == "none" else 1.5)])
    live = 1.5 * (0.4 + 0.08)
    near(slope, [{"none": 0.4, "detached": 0.6}.get(weight, live)])


def test_the_sequence_weight_is_the_geometric_mean_of_the_row_s_tokens(shelf: Shelf) -> None:
    """log r (.1, -.3, ., .5), mean .3/3 = .1 with an observation of 7 between and a pad behind.

    Value e^.1 d^2/2, slope e^.1 (d_t + sum_u d_u^2/2 / 3). Kills: a mean over the padded width.
    """
    mask = f64([1, 1, 0, 1, 0])
    old, d = -mask - 1, f64([0.2, 0.4, 9.0, -0.6, 9.0])
    logp = old + f64([0.1, -0.3, 7.0, 0.5, 7.0])
    kl = {"name": "in_loss", "estimator": "k2", "beta": 1.0, "weight": "live_sequence"}
    rows = {"logp": logp, "old_logp": old, "ref_logp": logp - d, "mask": mask,
            "advantages": 0 * mask}  # fmt: skip
    spec = bench(shelf, kl=kl)
    near(evaluate(spec, **rows).kl, math.exp(0.1) * mask * d**2 / 2)
    total = (0.2**2 + 0.4**2 + 0.6**2) / 2
    near(gradient(spec, rows)[1], math.exp(0.1) * mask * (d + total / 3))


def test_h1_h7_a_token_s_log_ratio_may_be_negative(shelf: Shelf) -> None:
    """log(pi/ref) = (.916291, 0, -.916291), P(negative) = .2. Kills: a clamp at 0 of k1."""
    logp, ref = f64(*PI).log()[:, None], f64(*Q).log()[:, None]
    kl = {"name": "in_loss", "estimator": "k1", "beta": 1.0, "allow_wrong": True}
    out = evaluate(
        bench(shelf, kl=kl), logp=logp, old_logp=logp, ref_logp=ref, mask=torch.ones_like(logp),
        rewards=f64(0, 0, 0),
    )  # fmt: skip
    near(out.kl[:, 0], (math.log(2.5), 0.0, -math.log(2.5)))
    near(math.log(2.5), 0.916291, 5e-7)
    near((f64(*PI) * (out.kl[:, 0] < 0)).sum(), 0.2)


def test_k12_no_dead_zone() -> None:
    """k3's slope is 1 - e^x however far x = log(ref/pi); clamped at 10 it is 0 beyond 2.610869."""
    edge = 2.610869
    near(math.exp(edge) - 1 - edge, 10, 1e-5)
    for x, printed in ((2.6, -12.46), (3.0, -19.085537), (50.0, 1 - math.exp(50))):
        value, slope = raw(-x, "k3")
        near(slope, [1 - math.exp(x)], abs(1e-15 * math.exp(x)) + 1e-12)
        near(slope, [printed], 5e-3 if x == 2.6 else 5e-7 * max(1, math.exp(x - 3)))
        mutant = (-torch.tensor([-x]).double()).requires_grad_()
        held = (mutant.expm1() - mutant).clamp(max=10)  # verl, OpenRLHF, NeMo, SkyRL, ...
        flat = torch.autograd.grad(held.sum(), mutant)[0]
        assert bool(flat == 0) is (x > edge)
        near(raw(-x, "k3+")[1], [-x])
        assert float(value) > 0


def test_k7_far_away_in_float32_is_infinite_not_nan_and_not_held() -> None:
    """x = 200: a run can see that it diverged. Kills: a silent clamp, and NaN from a later one."""
    value, slope = raw(torch.tensor([-200.0]), "k3")
    assert value.dtype == torch.float32
    assert float(value) == math.inf
    assert float(slope) == -math.inf
    assert float(raw(torch.tensor([-200.0]), "k3+")[1]) == -200.0


@settings(deadline=None, max_examples=25)
@given(d=st.floats(-5, 5))
def test_k5_k3_is_never_negative_and_right_near_the_reference(d: float) -> None:
    """Kills: exp(-d) - 1 + d in float32, which loses every digit of d^2/2."""
    exact = math.expm1(-d) + d
    assert float(raw(d, "k3")[0]) >= 0
    near(raw(d, "k3")[0], [exact], 1e-12)
    small = torch.tensor([d * 1e-4])
    value = d * 1e-4
    series = value**2 / 2 - value**3 / 6
    near(raw(small, "k3")[0], [series], 1e-11 + 4e-8 * abs(value))
    mutant = (-torch.tensor(3e-4)).exp() - 1 + torch.tensor(3e-4)
    assert abs(float(mutant) - 4.5e-8) > 5e-9


# --- K10: what does not penalise is refused ------------------------------------------------------


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_k10_in_the_reward_only_k1(shelf: Shelf, estimator: str) -> None:
    kl = {"name": "in_reward", "estimator": estimator}
    if estimator == "k1":
        bench(shelf, kl=kl)
    else:
        with pytest.raises(LabError, match=r"kl 'in_reward': estimator=.*allow_wrong = true"):
            bench(shelf, kl=kl)
    bench(shelf, kl={**kl, "allow_wrong": True})


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_k10_in_the_loss_k1_and_abs_take_a_live_weight(
    shelf: Shelf, estimator: str, weight: str
) -> None:
    kl = {"name": "in_loss", "estimator": estimator, "weight": weight}
    if estimator in ("k1", "abs") and weight in ("none", "detached"):
        with pytest.raises(LabError, match=r"kl 'in_loss': estimator=.*allow_wrong = true"):
            bench(shelf, kl=kl)
    else:
        bench(shelf, kl=kl)
    bench(shelf, kl={**kl, "allow_wrong": True})


@pytest.mark.parametrize("allow_wrong", [False, True])
def test_allow_wrong_permits_and_changes_nothing_else(shelf: Shelf, allow_wrong: bool) -> None:
    logp = f64([-1.0, -2.0])
    batch = {"logp": logp, "old_logp": logp, "ref_logp": 2 * logp, "mask": logp.sign().abs(),
             "rewards": f64(1)}  # fmt: skip
    for kl in ({"name": "in_loss", "estimator": "k2"}, {"name": "in_reward"}):
        plain = gradient(bench(shelf, kl=kl), batch)
        said = gradient(bench(shelf, kl={**kl, "allow_wrong": allow_wrong}), batch)
        assert all(torch.equal(a, b) for a, b in zip(plain, said, strict=True))


@pytest.mark.parametrize("name", ["in_reward", "in_loss", "both", "adaptive", "adaptive_in_loss"])
def test_a_negative_beta_is_refused(shelf: Shelf, name: str) -> None:
    for beta in (-0.1, math.nan):
        with pytest.raises(LabError, match=rf"kl '{name}': beta="):
            bench(shelf, kl={"name": name, "beta": beta})


@pytest.mark.parametrize(
    ("kl", "match"),
    [
        ({"name": "adaptive", "target": 0.0}, r"target=0.0"),
        ({"name": "adaptive_in_loss", "horizon": -1.0}, r"horizon=-1.0"),
        ({"name": "adaptive_in_loss", "estimator": "k1"}, r"estimator='k1'"),
        ({"name": "adaptive", "per": "batch"}, r"per='batch'"),
        ({"name": "in_loss", "estimator": "k4"}, r"estimator='k4'"),
        ({"name": "both", "estimator": "k1"}, r"no parameter 'estimator'"),
    ],
)
def test_other_values_are_refused_when_built(shelf: Shelf, kl: Any, match: str) -> None:
    with pytest.raises(LabError, match=match):
        bench(shelf, kl=kl)


# --- H2, H14, K14: the switches are independent --------------------------------------------------

EVERY: tuple[dict[str, Any], ...] = (
    *({"name": "in_loss", "estimator": e, "weight": w, "allow_wrong": True}
      for e, w in (*((e, "none") for e in ESTIMATORS), *(("k3", w) for w in WEIGHTS[1:]))),
    *({"name": "in_reward", "credit": c, "when": w}
      for c, w in (("to_go", "before"), ("sequence", "before"), ("own", "after"),
                   ("to_go", "after"), ("sequence", "after"))),
    {"name": "in_reward", "credit": "own", "when": "after", "centre": True},
    {"name": "both"},
    {"name": "adaptive"},
    {"name": "adaptive_in_loss"},
)  # fmt: skip


@pytest.fixture(scope="module")
def batch() -> dict[str, Any]:
    """Two groups of two ragged rows with a gap, ratios away from 1, a reference beside the old."""
    mask = f64([1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1])
    wave = torch.arange(16).double().reshape(4, 4)
    old = -1 - 0.1 * wave
    return {
        "logp": old + 0.4 * torch.sin(wave),
        "old_logp": old,
        "rollout_logp": old + 0.1 * torch.cos(wave),
        "ref_logp": old + 0.3 * torch.cos(2 * wave),
        "rewards": f64(1, 0, 0.5, -1),
        "group": torch.tensor([4, 4, 2, 2]),
        "mask": mask,
        "budget": 4,
    }


@pytest.mark.parametrize("recipe", [PLAIN, {"base": "grpo"}], ids=["plain", "grpo"])
@pytest.mark.parametrize("kl", EVERY, ids=str)
def test_h14_beta_0_is_the_recipe_without_kl(
    batch: dict[str, Any], recipe: dict[str, Any], kl: dict[str, Any]
) -> None:
    """Bit for bit. Kills: a KL that leaks past its beta, a branch on `kl` that changes the rest."""
    with_zero, without = (load({**recipe, "kl": k}) for k in ({**kl, "beta": 0.0}, "none"))
    assert not without.has_reference
    for a, b in zip(gradient(with_zero, batch), gradient(without, batch), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(
        evaluate(with_zero, **batch).advantages, evaluate(without, **batch).advantages
    )


def test_h2_two_anchors_and_a_switch_apart_from_the_clip(shelf: Shelf) -> None:
    """A flat token keeps its KL pull; `old` moves the ratio alone, `ref` the KL alone."""
    spec = bench(
        shelf, surrogate="ppo_clip", kl={"name": "in_loss", "estimator": "k2", "beta": 0.5}
    )
    logp, one = f64([0.0]), f64([1.0])

    def pulls(old: float, ref: float) -> tuple[float, float]:
        rows = {"logp": logp, "old_logp": f64([old]), "ref_logp": f64([ref]), "mask": one,
                "advantages": 2 * one}  # fmt: skip
        out = evaluate(spec, **rows)
        return float(out.pull), float(gradient(spec, rows)[1]) + float(out.pull)

    flat, kl = pulls(-math.log(1.3), -0.6)
    assert flat == 0.0
    assert kl == pytest.approx(0.5 * 0.6, abs=1e-12)  # beta d
    inside, same = pulls(-math.log(1.1), -0.6)
    assert (inside, same) == pytest.approx((1.1 * 2, 0.3), abs=1e-12)
    assert pulls(-math.log(1.1), 0.2) == pytest.approx((2.2, 0.5 * -0.2), abs=1e-12)


@pytest.mark.parametrize(
    "kl",
    [
        {"name": "in_loss", "estimator": "k3"},
        {"name": "in_loss", "estimator": "k3", "weight": "live"},
        {"name": "in_loss", "estimator": "k2", "weight": "detached"},
    ],
    ids=str,
)
def test_k14_no_wrapper_and_no_ratio_level_touches_the_kl(
    shelf: Shelf, batch: dict[str, Any], kl: dict[str, Any]
) -> None:
    """Kills: k3 times the sequence ratio (TRL), times the rollout weight (ms-swift) (K4)."""
    base = {"kl": kl, "surrogate": "ppo_clip", "aggregate": "sequence_mean"}
    want = evaluate(bench(shelf, base), **batch).kl

    def slope_of_kl(other: dict[str, Any]) -> Tensor:
        whole, rest = (
            gradient(bench(shelf, {**base, **other, "kl": k}), batch)[1] for k in (kl, "none")
        )
        return whole - rest

    plain = slope_of_kl({})
    for other in (
        {"ratio": "sequence"},
        {"ratio": "none", "surrogate": "reinforce"},
        {"wrap": ["token_tis", {"name": "dual_clip", "c": 2.0}]},
    ):
        assert torch.equal(evaluate(bench(shelf, {**base, **other}), **batch).kl, want)
        near(slope_of_kl(other), plain)


def test_k3_k9_both_stands_on_two_hooks_and_says_2_beta(shelf: Shelf) -> None:
    """Kills: a penalty taken twice unawares: only `both` does, and every table shows it."""
    spec = bench(shelf, kl={"name": "both", "beta": 0.03})
    assert spec.get("kl_reward")
    assert spec.get("kl_loss")
    assert "2 beta = 0.06" in listing.recipe_text(spec)
    for name in ("in_reward", "in_loss", "adaptive", "adaptive_in_loss"):
        alone = bench(shelf, kl=name)
        assert bool(alone.get("kl_reward")) is not bool(alone.get("kl_loss"))
        assert "2 beta" not in listing.recipe_text(alone)


@functools.cache
def every(which: int) -> Any:
    return bench(installed(), kl=EVERY[which])


@settings(deadline=None, max_examples=25)
@given(batch=ragged(), junk=st.sampled_from(JUNK), which=st.integers(0, len(EVERY) - 1))
def test_p3_junk_off_the_mask_changes_nothing(
    batch: dict[str, Any], junk: float, which: int
) -> None:
    """Bit for bit, in both precisions. Kills: a reduction that multiplies by the mask."""
    spec = every(which)
    clean, dirty = (gradient(spec, b) for b in (with_junk(batch, 0.0), with_junk(batch, junk)))
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])
