"""PPO's rollout side: GAE, whitening, the critic's targets, the recipe (ACCEPTANCE C).

One episode throughout: R = (0, 0, 1), V = (.2, .4, .5); residual R_t + gamma V_{t+1} - V_t.
Every wrong implementation that a number is there to kill stands in `MUTANTS` and is run.
"""

from __future__ import annotations

import functools
import math
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from cases import JUNK, bench, f64, ragged
from hypothesis import given, settings
from lab_ppo import gae, monte_carlo, whiten

from lab import advantage, critic_target, normalize, to_go
from lab.errors import LabError
from lab.loss import evaluate, load, optimisation_batch
from lab.rollout import prepare
from lab.shelf import Shelf, installed
from lab.step import complete

near = functools.partial(pytest.approx, rel=0, abs=1e-12)
V = (0.2, 0.4, 0.5)
ENDED, CUT = ({"stop_reason": torch.tensor([n]), "bootstrap": f64(0.6)} for n in (0, 2))
PADDED = {
    "token_rewards": f64([0, 0, 1, 0, 0]),
    "values": f64([0.2, 0.4, 0.5, 9, 9]),
    "mask": f64([1, 1, 1, 0, 0]),
}
GAPS = f64([1, 1, 0, 0, 1])
OBSERVED = {
    "token_rewards": f64([0, 0, 0, 0, 1]),
    "values": f64([0.2, 0.4, 9, 9, 0.5]),
    "mask": GAPS,
}
#: An outcome score of 1 and a critic that says 0 everywhere.
SCORED: dict[str, Any] = {"token_rewards": None, "rewards": f64(1)}
SHORT = SCORED | {"values": f64([0, 0, 0])}
LONG = SCORED | {"values": f64([0, 0, 0, 0, 0])}
SCORED_GAPS = LONG | {"mask": GAPS}
LATE_GAPS = SCORED | {"values": f64([0] * 7), "mask": f64([1, 1, 0, 0, 1, 0, 0])}
SHORT_PADDED = LONG | {"mask": f64([1, 1, 1, 0, 0])}

#: item -> gamma, lambda, what differs from the episode, the advantages of the mask tokens.
CASES: dict[str, tuple[float, float, dict[str, Any], tuple[float, ...]]] = {
    "C8": (1.0, 0.9, {}, (0.2 + 0.9 * 0.55, 0.1 + 0.9 * 0.5, 1 - 0.5)),
    "C9 lambda 0": (1.0, 0.0, {}, (0.4 - 0.2, 0.5 - 0.4, 1 - 0.5)),
    "C9 lambda .5": (1.0, 0.5, {}, (0.2 + 0.5 * 0.35, 0.1 + 0.5 * 0.5, 0.5)),
    "C10 lambda .95": (1.0, 0.95, {}, (0.2 + 0.95 * 0.575, 0.1 + 0.95 * 0.5, 0.5)),
    "C10 lambda 1": (1.0, 1.0, {}, (1 - 0.2, 1 - 0.4, 1 - 0.5)),  # return less value
    # residuals .9 * .4 - .2 = .16, .9 * .5 - .4 = .05, .5; decay .9 * .9 = .81
    "C11": (0.9, 0.9, {}, (0.16 + 0.81 * 0.455, 0.05 + 0.81 * 0.5, 0.5)),
    "C11 residuals": (0.9, 0.0, {}, (0.9 * 0.4 - 0.2, 0.9 * 0.5 - 0.4, 0.5)),
    "C12": (1.0, 0.9, CUT, (0.2 + 0.9 * 1.09, 0.1 + 0.9 * 1.1, 1 + 0.6 - 0.5)),
    "C13": (1.0, 1.0, CUT, (1.6 - 0.2, 1.6 - 0.4, 1.6 - 0.5)),  # return 1 + .6
    "C14 ended": (1.0, 0.9, ENDED, (0.695, 0.55, 0.5)),  # the same bootstrap, not read
    "C14 padded": (1.0, 0.9, PADDED, (0.695, 0.55, 0.5)),
    "N17 cut and padded": (1.0, 0.9, {**PADDED, **CUT}, (1.181, 1.09, 1.1)),
    "N10 value 9 at observations": (1.0, 0.9, OBSERVED, (0.695, 0.55, 0.5)),
    "N10": (1.0, 0.5, SCORED_GAPS, (0.5 * 0.5, 0.5, 1)),
    "T1 observations last": (1.0, 0.5, LATE_GAPS, (0.5 * 0.5, 0.5, 1)),
    "N13": (1.0, 0.95, SHORT, (0.95 * 0.95, 0.95, 1)),
    "N13 padded": (1.0, 0.95, SHORT_PADDED, (0.95 * 0.95, 0.95, 1)),
}


def episode(shelf: Shelf, slots: Any, **more: Any) -> Any:
    """The episode through a bench with these slots; None in `more` takes a tensor away."""
    row = {"token_rewards": f64([0, 0, 1]), "values": f64(V), "stop_reason": torch.tensor([0])}
    row |= more
    width = torch.zeros_like(row["values"])
    return evaluate(
        bench(shelf, slots), **{"logp": width, "old_logp": width, "mask": width + 1, **row}
    )


def advantages(shelf: Shelf, estimator: str, item: str) -> list[float]:
    gamma, lam, more, _ = CASES[item]
    out = episode(shelf, {"advantage": {"name": estimator, "gamma": gamma, "lam": lam}}, **more)
    return out.advantages[more.get("mask", f64([1, 1, 1])).bool()].tolist()


@pytest.mark.parametrize("item", CASES)
def test_gae(shelf: Shelf, item: str) -> None:
    assert advantages(shelf, "gae", item) == near(CASES[item][3])


@advantage
def value_now(token_rewards, values, mask, *, gamma=1.0, lam=0.9):
    """V_t for V_{t+1}."""
    return to_go(token_rewards + gamma * values - values, mask, gamma * lam)


@advantage
def discounted_rewards(token_rewards, mask, *, gamma=1.0, lam=0.9):
    """Sums rewards where residuals are due."""
    return to_go(token_rewards, mask, gamma * lam)


@advantage
def cut_is_the_end(token_rewards, values, bootstrap, mask, *, gamma=1.0, lam=0.9):
    """A truncated row taken as terminal."""
    return gae(token_rewards, values, 0 * bootstrap, mask, gamma=gamma, lam=lam)


@advantage
def end_is_a_cut(token_rewards, values, mask, *, gamma=1.0, lam=0.9):
    """A terminal row bootstrapped from its last value."""
    return gae(token_rewards, values, values[:, -1], mask, gamma=gamma, lam=lam)


@advantage
def decays_in_gaps(token_rewards, values, bootstrap, mask, *, gamma=1.0, lam=0.9):
    """Observations taken as steps."""
    return gae(token_rewards, values, bootstrap, 0 * mask + 1, gamma=gamma, lam=lam)


@advantage
def score_one_late(token_rewards, values, bootstrap, mask, *, gamma=1.0, lam=0.9):
    """The score at the first pad."""
    return gamma * lam * gae(token_rewards, values, bootstrap, mask, gamma=gamma, lam=lam)


@critic_target
def from_normalised(values, advantages, mask):
    """Targets from whitened advantages."""
    return whiten(advantages, mask) + values


@normalize
def other_ddof(advantages, mask, *, eps=1e-8):
    """Divides by the other count."""
    return whiten(advantages, mask, ddof=0, eps=eps)


@normalize
def eps_outside(advantages, mask, *, eps=1e-8):
    """Eps beside the std."""
    return (advantages - advantages[mask > 0].mean()) / (advantages[mask > 0].std() + eps)


@normalize
def padding_counts(advantages, *, eps=1e-8):
    """Mean and variance over [B,T]."""
    return (advantages - advantages.mean()) / (advantages.var() + eps).sqrt()


@normalize
def rows_weigh_alike(advantages, mask, *, eps=1e-8):
    """The mean of row means in place of the mean over tokens."""
    mean = ((advantages * mask).sum(1) / mask.sum(1)).mean()
    return (advantages - mean) / (advantages[mask > 0].var() + eps).sqrt()


ESTIMATORS = (value_now, discounted_rewards, cut_is_the_end, end_is_a_cut)
ESTIMATORS += (decays_in_gaps, score_one_late)
WHITENERS = (other_ddof, eps_outside, padding_counts, rows_weigh_alike)
MUTANTS = (*ESTIMATORS, from_normalised, *WHITENERS)


@pytest.fixture(scope="module")
def wrong() -> Shelf:
    return Shelf.installed(MUTANTS)


@pytest.mark.parametrize(
    ("mutant", "item", "numbers"),
    [
        ("value_now", "C9 lambda 0", (0, 0, 1)),  # R_t + V_t - V_t
        ("discounted_rewards", "C8", (0.9 * 0.9, 0.9, 1)),
        ("cut_is_the_end", "C12", (0.695, 0.55, 0.5)),  # C8
        ("end_is_a_cut", "C8", (0.2 + 0.9 * 1, 0.1 + 0.9 * 1, 1 + 0.5 - 0.5)),
        ("decays_in_gaps", "N10", (0.5**4, 0.5**3, 1)),
        ("score_one_late", "N13", (0.95**3, 0.95**2, 0.95)),
    ],
)
def test_gae_kills(wrong: Shelf, mutant: str, item: str, numbers: tuple[float, ...]) -> None:
    got = advantages(wrong, mutant, item)
    assert got == near(numbers)
    assert got != near(CASES[item][3])


@settings(max_examples=40, deadline=None)
@given(ragged(), st.sampled_from((0.9, 1.0)), st.sampled_from((0.0, 0.5, 0.95, 1.0)))
def test_gae_and_targets_are_plain_loops_over_the_compacted_row(batch, gamma, lam) -> None:
    mask = batch["mask"].bool()
    end = torch.where(batch["truncated"], batch["bootstrap"], 0.0).tolist()
    wanted: dict[str, list[float]] = {"raw_plus_values": [], "lambda_return": [], "monte_carlo": []}
    for on, v, score, last in zip(mask, batch["old_values"], batch["rewards"], end, strict=True):
        row = [*v[on].tolist(), last]
        reward = [*[0.0] * (len(row) - 2), float(score)]
        for name, decay in (("raw_plus_values", lam), ("lambda_return", 0.7), ("monte_carlo", 1)):
            trace, targets = 0.0, []
            for k in reversed(range(len(reward))):
                trace = reward[k] + gamma * row[k + 1] - row[k] + gamma * decay * trace
                targets.append(trace + row[k])
            wanted[name] += targets[::-1]
    own = {"lambda_return": {"gamma": gamma, "lam": 0.7}, "monte_carlo": {"gamma": gamma}}
    for name, want in wanted.items():
        target = {"name": name, **own.get(name, {})}
        spec = {"advantage": {"name": "gae", "gamma": gamma, "lam": lam}, "critic_target": target}
        out = evaluate(bench(installed(), spec), **batch)
        atol = 1e-12 if out.returns.dtype == torch.float64 else 1e-5  # sums of at most 7 numbers
        assert out.returns[mask].tolist() == pytest.approx(want, rel=0, abs=atol)
    raw = out.advantages[mask] + batch["old_values"][mask]
    assert raw.tolist() == pytest.approx(wanted["raw_plus_values"], rel=0, abs=atol)


@pytest.mark.parametrize("junk", JUNK)
def test_the_raw_functions_ignore_what_stands_off_the_mask(junk: float) -> None:
    mask = f64([1, 1, 0, 0, 1])
    rewards, values, a = (
        torch.where(mask > 0, f64(x), junk)
        for x in ([0, 0, 0, 0, 1.0], [0.2, 0.4, 0, 0, 0.5], [0.695, 0.55, 0, 0, 0.5])
    )
    on = mask > 0
    assert gae(rewards, values, f64(0), mask, lam=0.9)[on].tolist() == near((0.695, 0.55, 0.5))
    assert monte_carlo(rewards, f64(0.6), mask, gamma=0.5)[on].tolist() == near(
        (0.25 + 0.6 * 0.125, 0.5 + 0.6 * 0.25, 1 + 0.6 * 0.5)
    )
    assert whiten(a, mask)[on].tolist() == near(whitened_by_hand((0.695, 0.55, 0.5), 1))


def whitened_by_hand(a, ddof, eps=1e-8):
    mean = sum(a) / len(a)
    var = sum((x - mean) ** 2 for x in a) / (len(a) - ddof)
    return [(x - mean) / math.sqrt(var + eps) for x in a]


@pytest.mark.parametrize(
    ("ddof", "rounded"),
    [(1, (1.118972, -0.312654, -0.806318)), (0, (1.370455, -0.382921, -0.987534))],
)
def test_whitened_advantages_leave_the_targets(shelf: Shelf, ddof: int, rounded: Any) -> None:
    """C15 (its numbers hold for eps 0), N17: targets bit-equal with `normalize` on and off."""
    slots = {"advantage": {"name": "gae", "lam": 0.9}}
    plain = episode(shelf, slots)
    for eps in (0.0, 1e-8):
        out = episode(shelf, {**slots, "normalize": {"name": "whiten", "ddof": ddof, "eps": eps}})
        want = whitened_by_hand((0.695, 0.55, 0.5), ddof, eps)
        assert out.advantages[0].tolist() == near(want)
        assert want == pytest.approx(rounded, rel=0, abs=5e-7 if eps == 0 else 1.5e-6)
    assert torch.equal(out.returns, plain.returns)
    assert out.returns[0].tolist() == near((0.695 + 0.2, 0.55 + 0.4, 0.5 + 0.5))


def test_targets_kill_normalised_advantages(wrong: Shelf) -> None:
    slots = {"advantage": {"name": "gae", "lam": 0.9}, "critic_target": "from_normalised"}
    got = episode(wrong, slots).returns[0].tolist()
    # C15's numbers plus V: 1.118972 + .2, -.312654 + .4, -.806318 + .5
    assert got == pytest.approx((1.318972, 0.087346, -0.306318), rel=0, abs=5e-7)
    assert got != near((0.895, 0.95, 1))


def test_whitening_an_arithmetic_sequence() -> None:
    """N11: 1.2, 1.3 .. 2.0 has mean 1.6 and sum of squares .01 * 2 * (1 + 4 + 9 + 16) = .6."""
    a = f64([1.2 + 0.1 * k for k in range(9)])
    for ddof, rounded in ((0, -1.549193), (1, -1.460593)):
        first = -0.4 / math.sqrt(0.6 / (9 - ddof) + 1e-8)
        assert first == pytest.approx(rounded, rel=0, abs=5e-7)
        assert float(whiten(a, 0 * a + 1, ddof=ddof)[0, 0]) == near(first)
        kept = whiten(a, 0 * a + 1, ddof=ddof, shift_mean=False)
        assert float(kept[0, 0]) == near(first + 1.6)  # .050807, .139407


def test_whitening_constants_gives_exactly_zero() -> None:
    """G1, G2: a float32 residue over its own std would be large; a zero std never divides."""
    for n in (1, 3, 8):
        a = torch.full((1, n), 0.3)
        for eps in (0.0, 1e-8):
            assert torch.equal(whiten(a, a * 0 + 1, eps=eps), torch.zeros(1, n))
            assert torch.equal(whiten(a, a * 0 + 1, eps=eps, shift_mean=False), a)


@pytest.mark.parametrize("mutant", [f.__name__ for f in WHITENERS])
def test_whiten_kills(wrong: Shelf, mutant: str) -> None:
    """Two rows, (1, pad) and (2, 6): mean 3 over tokens, variance (4 + 1 + 9)/2 = 7, eps .25."""
    want = [(x - 3) / math.sqrt(7 + 0.25) for x in (1, 2, 6)]
    mask = f64([1, 0], [1, 1])

    def whitened(name: str) -> list[float]:
        spec = {"advantage": {"name": "gae", "lam": 0.0}, "normalize": {"name": name, "eps": 0.25}}
        row = {"token_rewards": f64([1, 0], [2, 6]), "values": 0 * mask, "mask": mask}
        out = episode(wrong, spec, **row, stop_reason=torch.tensor([0, 0]))
        return out.advantages[mask > 0].tolist()

    assert whitened("whiten") == near(want)
    assert whitened(mutant) != near(want)


def test_statistics_are_over_the_rollout_or_over_each_minibatch(shelf: Shelf) -> None:
    """N11: two named options; rows (1) and (3) whiten to -+1/sqrt(2), each alone to 0."""
    step = complete({"logp": f64([0], [0]), "mask": f64([1], [1]), "rewards": f64(1, 3)})
    for per, want in (("rollout", (-1, 1)), ("minibatch", (0, 0))):
        b = bench(shelf, normalize={"name": "whiten", "eps": 0.0, "per": per})
        rollout = prepare(b, step)
        for row in (0, 1):
            part = {n: x[row : row + 1] for n, x in rollout.items()}
            seen, _ = optimisation_batch(b, part)
            assert seen["advantages"].tolist() == [[near(want[row] / math.sqrt(2))]]


@pytest.mark.parametrize(
    ("lam", "want"),
    [(0.0, (0.5, 0.6, 1)), (0.9, (0.3 + 0.614, 0.5 + 0.46, 0.6 + 0.4)), (1.0, (1, 1, 1))],
)
def test_a_biased_critic_biases_its_targets_through_the_bootstrap(shelf, lam, want) -> None:
    """C16: V + .1. Residuals .5 - .3, .6 - .5, 1 - .6; at .9: .1 + .36, .2 + .9 * .46 = .614."""
    out = episode(shelf, {"advantage": {"name": "gae", "lam": lam}}, values=f64([0.3, 0.5, 0.6]))
    assert out.returns[0].tolist() == near(want)


def test_targets_hold_the_rollouts_values(shelf: Shelf) -> None:
    """C5: the mutant reads the current critic's values; C19: the actor's loss trains no critic."""
    slots = {"advantage": {"name": "gae", "lam": 0.9}, "critic_loss": "squared"}
    live = f64((0.5, 0.5, 0.5)).requires_grad_()
    logp = torch.zeros_like(live).requires_grad_()
    out = episode(shelf, slots, values=live, old_values=f64(V), logp=logp)
    assert out.returns[0].tolist() == near((0.895, 0.95, 1))
    assert not out.returns.requires_grad
    assert not out.advantages.requires_grad
    assert torch.autograd.grad(out.loss, live, retain_graph=True, allow_unused=True) == (None,)
    out.critic_loss.sum().backward()
    assert live.grad[0].tolist() == near((0.5 - 0.895, 0.5 - 0.95, 0.5 - 1))
    mutant = episode(shelf, slots, values=live)
    # residuals 0, 0, .5: .5 + .81 * .5, .5 + .9 * .5, 1
    assert mutant.returns[0].tolist() == near((0.905, 0.95, 1))


@pytest.mark.parametrize(
    "slot",
    [{"advantage": {"name": "gae", k: x}} for k in ("gamma", "lam") for x in (-0.1, 1.1, math.nan)]
    + [{"critic_target": {"name": "monte_carlo", "gamma": x}} for x in (-0.1, 1.1, math.nan)]
    + [{"critic_target": {"name": "lambda_return", k: 1.1}} for k in ("gamma", "lam")]
    + [{"normalize": {"name": "whiten", "eps": x}} for x in (-1e-8, math.nan)]
    + [{"normalize": {"name": "whiten", "ddof": x}} for x in (2, 0.5)],
    ids=str,
)
def test_illegal_parameters(shelf: Shelf, slot: dict[str, Any]) -> None:
    with pytest.raises(LabError):
        bench(shelf, {"advantage": "gae", **slot})


@settings(max_examples=25, deadline=None)
@given(ragged(dtypes=(torch.float64,)))
def test_the_recipe_is_its_text(batch: Any) -> None:
    """`ppo` by plain Python: k1 cost, GAE(1, .95), whitening, clip .2, mean over all tokens."""
    mask = batch["mask"].bool()
    end = torch.where(batch["truncated"], batch["bootstrap"], 0.0).tolist()
    raw: list[float] = []
    for i, last in enumerate(end):
        on = mask[i]
        value = [*batch["old_values"][i][on].tolist(), last]
        cost = (0.05 * (batch["old_logp"] - batch["ref_logp"]))[i][on].tolist()
        reward = [-x for x in cost]
        reward[-1] += float(batch["rewards"][i])  # they sum to score - beta sum k1
        delta = [r + b - a for r, (a, b) in zip(reward, pairwise(value), strict=True)]
        raw += [sum(0.95 ** (k - t) * delta[k] for k in range(t, len(delta))) for t in
                range(len(delta))]  # fmt: skip
    a = whitened_by_hand(raw, 1) if len(raw) > 1 else [0.0]
    r = (batch["logp"] - batch["old_logp"])[mask].exp().tolist()
    gains = [min(q * x, min(max(q, 0.8), 1.2) * x) for q, x in zip(r, a, strict=True)]
    out = evaluate(load("ppo"), **batch)
    assert out.advantages[mask].tolist() == pytest.approx(a, rel=0, abs=1e-10)  # a std divides
    assert float(out.loss) == pytest.approx(-sum(gains) / len(gains), rel=0, abs=1e-10)
    targets = [x + v for x, v in zip(raw, batch["old_values"][mask].tolist(), strict=True)]
    assert out.returns[mask].tolist() == near(targets)
    moved = zip(batch["values"][mask].tolist(), batch["old_values"][mask].tolist(), strict=True)
    want = [
        max((v - t) ** 2, (min(max(v, o - 0.2), o + 0.2) - t) ** 2) / 2
        for (v, o), t in zip(moved, targets, strict=True)
    ]
    assert out.critic_loss[mask].tolist() == near(want)


def test_the_recipes_loop() -> None:
    """Four epochs, the critic's loss weighed by .1 (TRL 1.12)."""
    loop = load("ppo").recipe.loop
    assert (loop.epochs, loop.critic_coef) == (4, 0.1)
