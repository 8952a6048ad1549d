"""Section K of the acceptance list: group baselines on two actions, exact over all 2^G groups.

Reward 1 for one action, chance p; the estimator is (1/G) sum A_i (x_i - p), eps 0. Every group
stands in the batch once, with its chance over G as the share of its rows, so the gradient of
`evaluate` is the expectation itself. MaxRL is not on the shelf: it is a component of this file.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from math import comb, sqrt
from typing import Any

import pytest
import torch
from cases import bench, f64
from torch import Tensor

from lab import advantage, group_mean, group_std, masked_var, spread
from lab.bench import Bench
from lab.loss import evaluate
from lab.shelf import Shelf


def near(got: Any, want: Any, atol: float = 1e-12) -> None:
    got, want = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (got, want))
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


@advantage
def maxrl(rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """(S - mean)/mean, and 0 where the mean is not positive (2602.02710)."""
    mean = group_mean(rewards, group)
    return spread(torch.where(mean > 0, (rewards - mean) / mean.clamp(min=1e-30), 0 * mean), mask)


@advantage
def ddof_swapped(rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """Mutant of ddof 1: divides by G."""
    return spread(
        (rewards - group_mean(rewards, group)) / (group_std(rewards, group, 0) + 1e-30), mask
    )


@advantage
def own_reward_in_the_mean(rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """Mutant of leave-one-out: the baseline holds the row's own reward."""
    return spread(rewards - group_mean(rewards, group), mask)


@advantage
def by_reshape(rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """Mutant of ddof 1: groups are neighbours."""
    rows = rewards.reshape(len(group.unique()), -1)
    centred = rows - rows.mean(1, keepdim=True)
    return spread((centred / (rows.std(1, keepdim=True) + 1e-30)).reshape(-1), mask)


@advantage
def batch_scaled(rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """Mutant of ddof 1: one std for all groups."""
    std = masked_var(rewards, torch.ones_like(rewards), 1).sqrt()
    return spread((rewards - group_mean(rewards, group)) / std, mask)


@advantage
def undefined_when_dead(rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """Mutant of ddof 1: 0/0 in a group of equal rewards."""
    return spread((rewards - group_mean(rewards, group)) / group_std(rewards, group, 1), mask)


MUTANTS = (ddof_swapped, own_reward_in_the_mean, by_reshape, batch_scaled, undefined_when_dead)


@pytest.fixture(scope="module")
def mutants() -> Shelf:
    return Shelf.installed([maxrl, *MUTANTS])


# --- the exact table -----------------------------------------------------------------------------

ESTIMATORS: dict[str, Any] = {
    "reinforce": "reinforce",
    "loo": "rloo",
    "centred": {"name": "group", "scale": "none"},
    "ddof 0": {"name": "group", "ddof": 0, "eps": 0.0},
    "ddof 1": {"name": "group", "ddof": 1, "eps": 0.0},
    "maxrl": "maxrl",
}


@functools.cache
def bench_of(shelf: Shelf, estimator: str) -> Bench:
    """Built once: the advantage as JSON."""
    return bench(shelf, advantage=json.loads(estimator), ratio="none", surrogate="reinforce")


def exact(shelf: Shelf, estimator: Any, size: int, p: float) -> tuple[float, float]:
    """The estimator's mean and variance over all groups of `size`, by the logit of p."""
    x = f64(*itertools.product((0.0, 1.0), repeat=size))
    hits = x.sum(1)
    chance = p**hits * (1 - p) ** (size - hits)
    z = torch.tensor(p, dtype=torch.float64).logit().requires_grad_()
    taken = x.reshape(-1, 1)
    logp = torch.where(
        taken == 1, torch.nn.functional.logsigmoid(z), torch.nn.functional.logsigmoid(-z)
    )
    out = evaluate(
        bench_of(shelf, json.dumps(estimator)),
        logp=logp,
        mask=torch.ones_like(taken),
        rewards=taken[:, 0],
        group=torch.arange(len(x)).repeat_interleave(size),
        shares=(chance / size).repeat_interleave(size)[:, None],
    )
    mean = float(torch.autograd.grad(-out.loss, z)[0])
    each = (out.pull * (taken - p)).reshape(-1, size).mean(1)
    return mean, float((chance * each**2).sum()) - mean**2


def by_formula(name: str, size: int, p: float) -> float:
    """What the acceptance list gives for the mean, as it stands there."""
    live = p * (1 - p)
    std_0 = sum(
        comb(size, m) * p**m * (1 - p) ** (size - m) * sqrt(m / size * (1 - m / size))
        for m in range(size + 1)
    )
    return {
        "reinforce": live,
        "loo": live,
        "centred": live * (size - 1) / size,
        "ddof 0": std_0,
        "ddof 1": std_0 * sqrt((size - 1) / size),
        "maxrl": (1 - p) - (1 - p) ** size,
    }[name]


TABLE = {  # K2-K5: exact (reinforce and leave-one-out), centred, ddof 0, ddof 1, MaxRL
    (8, 0.5): (0.25, 0.21875, 0.463914, 0.433952, 0.496094),
    (4, 0.25): (0.1875, 0.140625, 0.308443, 0.267120, 0.433594),
    (2, 0.5): (0.25, 0.125, 0.25, 0.176777, 0.25),
    (8, 0.1): (0.09, 0.07875, 0.209492, 0.195962, 0.469533),
}
COLUMN = {"reinforce": 0, "loo": 0, "centred": 1, "ddof 0": 2, "ddof 1": 3, "maxrl": 4}


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize(("size", "p"), TABLE)
def test_k2_to_k5_expected_gradient(mutants: Shelf, name: str, size: int, p: float) -> None:
    """Kills: swapped ddof, an unasked eps, 0/0 in a dead group, the own reward left in."""
    mean, _ = exact(mutants, ESTIMATORS[name], size, p)
    near(mean, by_formula(name, size, p))
    near(mean, TABLE[size, p][COLUMN[name]], atol=6e-7)


VARIANCES = {  # K6
    ("reinforce", 8): 0.0078125,  # p^2 ... (1/8) Var[x (x - .5)] = (1/8) (1/8 - 1/16)
    ("loo", 8): 0.002232,
    ("centred", 8): 0.001709,
    ("ddof 0", 8): 0.003534,
    ("ddof 1", 8): 0.003092,
    ("maxrl", 8): 0.031235,
    ("reinforce", 2): 0.03125,  # (1/2) (1/8 - 1/16)
    ("loo", 2): 0.0625,  # the estimator is 1/2 or 0 with chance 1/2: .125 - .0625
}


@pytest.mark.parametrize(("name", "size"), VARIANCES)
def test_k6_variance(mutants: Shelf, name: str, size: int) -> None:
    """p = .5. A baseline can raise it: at G = 2 leave-one-out has twice reinforce's."""
    _, variance = exact(mutants, ESTIMATORS[name], size, 0.5)
    near(variance, VARIANCES[name, size], atol=6e-7)


@pytest.mark.parametrize(
    ("p", "times"), [(0.02, 2.4070), (0.1, 2.1774), (0.3, 1.8360), (0.5, 1.7358)]
)
def test_k7_the_std_magnifies_rare_rewards(shelf: Shelf, p: float, times: float) -> None:
    """ddof 1, G 8, against the true gradient p(1 - p)."""
    mean, _ = exact(shelf, ESTIMATORS["ddof 1"], 8, p)
    near(mean / (p * (1 - p)), by_formula("ddof 1", 8, p) / (p * (1 - p)))
    near(mean / (p * (1 - p)), times, atol=6e-5)


@pytest.mark.parametrize(
    ("size", "p", "dead"),
    [(8, 0.5, 0.0078125), (4, 0.25, 0.320313), (2, 0.5, 0.5), (8, 0.1, 0.430467)],
)
def test_k_dead_groups(shelf: Shelf, size: int, p: float, dead: float) -> None:
    """p^G + (1 - p)^G of the groups have no advantage, and none of them is NaN."""
    x = f64(*itertools.product((0.0, 1.0), repeat=size))
    chance = p ** x.sum(1) * (1 - p) ** (size - x.sum(1))
    ones = torch.ones(x.numel(), 1, dtype=torch.float64)
    out = evaluate(
        bench_of(shelf, json.dumps(ESTIMATORS["ddof 1"])),
        logp=-ones, mask=ones, rewards=x.reshape(-1),
        group=torch.arange(len(x)).repeat_interleave(size),
    )  # fmt: skip
    still = (out.advantages.reshape(-1, size) == 0).all(1)
    near((chance * still).sum(), p**size + (1 - p) ** size)
    near((chance * still).sum(), dead, atol=6e-7)


# --- K8 and the mutants --------------------------------------------------------------------------


def advantages(
    shelf: Shelf, spec: Any, rewards: Tensor, group: Tensor | list[int] | None = None
) -> Tensor:
    ones = torch.ones_like(rewards)[:, None]
    ids = torch.zeros(len(rewards)).long() if group is None else torch.as_tensor(group)
    out = evaluate(
        bench_of(shelf, json.dumps(spec)),
        logp=-ones, mask=ones, rewards=rewards, group=ids,
    )  # fmt: skip
    return out.advantages[:, 0]


def k8_one_group(shelf: Shelf, spec: Any, name: str) -> None:
    """(1,0,0,1), mean .5: std sqrt(1/3) or 1/2; a sibling mean of 1/3 or 2/3."""
    size = {"ddof 1": 0.5 * sqrt(3), "ddof 0": 1.0, "loo": 2 / 3}[name]
    near(advantages(shelf, spec, f64(1, 0, 0, 1)), (size, -size, -size, size))
    near(size, {"ddof 1": 0.866025, "ddof 0": 1.0, "loo": 0.666667}[name], atol=5e-7)


def k8_two_groups(shelf: Shelf, spec: Any, name: str) -> None:
    """Beside it (5,5,5,-3), mean 3: deviations 2, 2, 2, -6, std sqrt(48/3) = 4 or sqrt(48/4)."""
    a, b, c = {
        "ddof 1": (0.5 * sqrt(3), 2 / 4, -6 / 4),
        "ddof 0": (1.0, 2 / sqrt(12), -6 / sqrt(12)),
        "loo": (2 / 3, 5 - 7 / 3, -3.0 - 5),
    }[name]
    got = advantages(shelf, spec, f64(1, 0, 0, 1, 5, 5, 5, -3), [2, 2, 2, 2, 1, 1, 1, 1])
    near(got, (a, -a, -a, a, b, b, b, c))


def p5_interleaved(shelf: Shelf, spec: Any, name: str) -> None:
    """The same two groups, rows in turns, other ids."""
    a, b, c = {
        "ddof 1": (0.5 * sqrt(3), 2 / 4, -6 / 4),
        "ddof 0": (1.0, 2 / sqrt(12), -6 / sqrt(12)),
        "loo": (2 / 3, 5 - 7 / 3, -3.0 - 5),
    }[name]
    got = advantages(shelf, spec, f64(5, 1, 5, 0, 5, 0, -3, 1), [-9, 70, -9, 70, -9, 70, -9, 70])
    near(got, (b, a, b, -a, b, -a, c, a))


def p12_dead(shelf: Shelf, spec: Any, name: str) -> None:
    """A constant group beside a live one, in float32: exactly 0."""
    for value in (0.1, 0.3, 0.7):
        got = advantages(shelf, spec, torch.tensor([value] * 7 + [0.0, 1.0]), [0] * 7 + [1] * 2)
        assert not got[:7].any(), f"{name}: {got[0]}"
        assert bool(got.isfinite().all())


CHECKS = (k8_one_group, k8_two_groups, p5_interleaved, p12_dead)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", ["ddof 1", "ddof 0", "loo"])
def test_k8_group_advantages(shelf: Shelf, name: str, check: Callable[..., None]) -> None:
    check(shelf, ESTIMATORS[name], name)


@pytest.mark.parametrize(
    ("mutant", "stands_for", "check"),
    [
        ("ddof_swapped", "ddof 1", k8_one_group),
        ("own_reward_in_the_mean", "loo", k8_one_group),
        ("batch_scaled", "ddof 1", k8_two_groups),
        ("by_reshape", "ddof 1", p5_interleaved),
        ("undefined_when_dead", "ddof 1", p12_dead),
    ],
)
def test_k8_kills(mutants: Shelf, mutant: str, stands_for: str, check: Callable[..., None]) -> None:
    """Each mutant passes until the check that is meant for it."""
    for before in CHECKS[: CHECKS.index(check)]:
        before(mutants, mutant, stands_for)
    with pytest.raises(AssertionError):
        check(mutants, mutant, stands_for)


@pytest.mark.parametrize("mutant", ["ddof_swapped", "own_reward_in_the_mean"])
def test_the_table_kills_too(mutants: Shelf, mutant: str) -> None:
    stands_for = {"ddof_swapped": "ddof 1", "own_reward_in_the_mean": "loo"}[mutant]
    mean, _ = exact(mutants, mutant, 4, 0.25)
    assert abs(mean - by_formula(stands_for, 4, 0.25)) > 0.03
