"""Section H over several tokens and rows: where a KL cost is taken off, and to which tokens.

H11-H13, N13 and N14, ALGORITHMS K1, K5, K11, K13, K14, PITFALLS K4, K5, K10. `credited` is the
cost's way to the advantage in plain Python.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from cases import PI, PLAIN, F, bench, f64, ragged
from hypothesis import given, settings
from torch import Tensor

from lab import LabError, kl_reward
from lab.bench import Bench
from lab.loss import evaluate
from lab.shelf import Shelf, installed

Rows = list[list[float]]


def near(got: Any, want: Any, atol: float = 1e-12) -> None:
    got, want = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (got, want))
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


@functools.cache
def bench_of(advantage: str, when: str, credit: str, beta: float, centre: bool = False) -> Bench:
    scale = {"std0": {"name": "group", "eps": 0.0}, "centred": {"name": "group", "scale": "none"}}
    options = {"when": when, "credit": credit, "centre": centre}
    return bench(
        installed(),
        advantage=scale.get(advantage, advantage),
        ratio="none",
        surrogate="reinforce",
        kl={"name": "in_reward", "beta": beta, **options},
    )


def of_rows(costs: tuple[float, ...], rewards: tuple[float, ...], spec: Bench) -> Tensor:
    """Advantages of rows of one token with these log-ratios of old to ref."""
    old, ones = -torch.ones(len(costs), 1).double(), torch.ones(len(costs), 1).double()
    out = evaluate(
        spec, logp=old, old_logp=old, ref_logp=old - f64(*costs)[:, None], mask=ones,
        rewards=f64(*rewards), group=torch.zeros(len(costs)).long(),
    )  # fmt: skip
    return out.advantages[:, 0]


# --- before or after the group's statistics ------------------------------------------------------


def standardised(values: list[float]) -> list[float]:
    return [(v - statistics.mean(values)) / statistics.stdev(values) for v in values]


def check_h11(when: str) -> None:
    """R (1,0,0,1), KL (.2,.1,.3,.4), beta .1: (S - .1 KL) normalised, or S normalised - .1 KL."""
    kl, rewards = (0.2, 0.1, 0.3, 0.4), (1.0, 0.0, 0.0, 1.0)
    got = of_rows(kl, rewards, bench_of("std0", when, "sequence", 0.1))
    if when == "before":
        near(got, standardised([s - 0.1 * k for s, k in zip(rewards, kl, strict=True)]))
        near(got, (0.883341, -0.848357, -0.883341, 0.848357), 5e-7)
    else:
        near(got, [z - 0.1 * k for z, k in zip(standardised([*rewards]), kl, strict=True)])
        near(got, (0.846025, -0.876025, -0.896025, 0.826025), 5e-7)


@pytest.mark.parametrize("when", ["before", "after"])
def test_h11_the_order_is_named(when: str) -> None:
    """Kills: a cost that meets the std in one order under the name of the other."""
    check_h11(when)


def test_k11_and_its_constant_rewards() -> None:
    """S (1,0,0,0), costs (.2,.1,0,.1): and with equal rewards `before` blows the costs up."""
    kl, one = (0.2, 0.1, 0.0, 0.1), (1.0, 0.0, 0.0, 0.0)
    before, after = (bench_of("std0", w, "sequence", 1.0) for w in ("before", "after"))
    got = of_rows(kl, one, before)
    near(got, standardised([0.8, -0.1, 0.0, -0.1]))
    near(got, (1.491, -0.574, -0.344, -0.574), 5e-4)  # ALGORITHMS prints -.573 for -.57354
    near(of_rows(kl, one, after), (1.5 - 0.2, -0.5 - 0.1, -0.5, -0.5 - 0.1))
    # -(.2,.1,0,.1) less its mean -.1, over std sqrt(.02/3): (-1.2247, 0, 1.2247, 0)
    zero = (0.0,) * 4
    near(of_rows(kl, zero, before), (-math.sqrt(1.5), 0, math.sqrt(1.5), 0))


def test_k11_after_leaves_a_dead_group_its_plain_cost() -> None:
    """All rewards 0, `after`: (-.2,-.1,0,-.1), not NaN from a std of 0."""
    spec = bench_of("std0", "after", "sequence", 1.0)
    near(of_rows((0.2, 0.1, 0.0, 0.1), (0.0,) * 4, spec), (-0.2, -0.1, 0, -0.1))


def test_k11_a_cost_equal_in_the_group_cancels_before() -> None:
    """Kills: "the penalty acts whatever its place" (also G10)."""
    before, after = (bench_of("centred", w, "sequence", 1.0) for w in ("before", "after"))
    near(of_rows((0.7,) * 4, (1, 0, 0, 1), before), (0.5, -0.5, -0.5, 0.5))
    near(of_rows((0.7,) * 4, (1, 0, 0, 1), after), (-0.2, -1.2, -1.2, -0.2))


@pytest.mark.parametrize("credit", ["sequence", "to_go"])
def test_k10_the_cost_reaches_group_estimators(credit: str) -> None:
    """(1,0,0,1) - .1 (.2,.1,.3,.4), centred: mean .475. Kills: a coefficient that does nothing."""
    spec = bench_of("centred", "before", credit, 0.1)
    got = of_rows((0.2, 0.1, 0.3, 0.4), (1, 0, 0, 1), spec)
    near(got, (0.505, -0.485, -0.505, 0.485))


# --- credit --------------------------------------------------------------------------------------


def credited(cost: list[float], mask: list[float], credit: str) -> list[float]:
    """What each token pays, `after`."""
    on = [t for t, m in enumerate(mask) if m]
    return [
        0.0 if not m else
        {"own": cost[t], "sequence": sum(cost[k] for k in on),
         "to_go": sum(cost[k] for k in on if k >= t)}[credit]
        for t, m in enumerate(mask)
    ]  # fmt: skip


def paid(batch: dict[str, Any], credit: str, centre: bool, beta: float) -> Rows:
    """Reward-to-go less its KL cost, in plain Python: what the advantages must be."""
    mask, score = batch["mask"].tolist(), batch["rewards"].tolist()
    cost = (beta * (batch["old_logp"] - batch["ref_logp"])).tolist()
    due = [credited(c, m, credit) for c, m in zip(cost, mask, strict=True)]
    mean = 0.0
    if centre:
        mean = statistics.mean(
            d for row, on in zip(due, mask, strict=True) for d, m in zip(row, on, strict=True) if m
        )
    return [
        [s - (d - mean) if m else 0.0 for d, m in zip(row, on, strict=True)]
        for s, row, on in zip(score, due, mask, strict=True)
    ]


CASES = [
    *(("before", credit, False) for credit in ("to_go", "sequence")),
    *(("after", c, k) for c in ("to_go", "own", "sequence") for k in (False, True)),
]


@settings(deadline=None, max_examples=30)
@given(batch=ragged(), case=st.sampled_from(CASES))
def test_credit_against_plain_python(batch: dict[str, Any], case: tuple[str, str, bool]) -> None:
    """Ragged rows with gaps, both precisions: every legal combination of the slot's options."""
    when, credit, centre = case
    out = evaluate(bench_of("reinforce", when, credit, 0.5, centre), **batch)
    loose = 1e-12 if batch["mask"].dtype == torch.float64 else 1e-5
    near(out.advantages, paid(batch, credit, centre, 0.5), loose)


def test_k5_centred_own_cost() -> None:
    """A_t += beta (batch mean k1 - k1_t): rows of 1 and 2 tokens, costs .3 / .6, .0, mean .3."""
    mask = f64([1, 0], [1, 1])
    old = -mask
    out = evaluate(
        bench_of("reinforce", "after", "own", 2.0, True),
        logp=old, old_logp=old, ref_logp=old - f64([0.3, 9.0], [0.6, 0.0]), mask=mask,
        rewards=f64(1, -1),
    )  # fmt: skip
    near(out.advantages, [[1 + 2 * (0.3 - 0.3), 0], [-1 + 2 * (0.3 - 0.6), -1 + 2 * (0.3 - 0.0)]])


def test_n13_n14_token_rewards_are_the_score_less_the_costs() -> None:
    """Score 1 on the last token, beta .1, costs 1, 2, 4 with an observation between: gamma .5.

    R = (-.1, -.2, ., 1 - .4): to go (-.1 - .1 + .15, -.2 + .3, ., .6). Kills: a cost on an
    observation (its junk 50), a score on it, a cost that is not detached.
    """
    mask = f64([1, 1, 0, 1])
    old, ref = -mask.clone(), (-mask - f64([1, 2, 50, 4])).requires_grad_()
    spec = bench(
        installed(),
        advantage={"name": "reinforce", "gamma": 0.5},
        kl={"name": "in_reward", "beta": 0.1, "credit": "to_go", "when": "before"},
    )
    out = evaluate(spec, logp=old, old_logp=old, ref_logp=ref, mask=mask, rewards=f64(1))
    near(out.advantages, [[-0.1 + 0.5 * (-0.2 + 0.5 * 0.6), -0.2 + 0.5 * 0.6, 0, 0.6]])
    # handed over attached, old and now one tensor: still a constant, pull A at ratio 1
    logp = old.clone().requires_grad_()
    loss = evaluate(spec, logp=logp, old_logp=logp, ref_logp=ref, mask=mask, rewards=f64(1)).loss
    slope, leak = torch.autograd.grad(loss, (logp, ref), allow_unused=True)
    near(slope, -out.advantages)
    assert leak is None


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("advantage", ["std0", "centred", "rloo"])
def test_k7_an_infinite_cost_is_not_swallowed(when: str, advantage: str) -> None:
    """ref -inf on one token: the advantages say so. Kills: a scale that takes NaN for a 0."""
    spec = bench_of(advantage, when, "sequence", 1.0)
    assert not bool(of_rows((math.inf, 0.1, 0.0, 0.1), (1, 0, 0, 1), spec).isfinite().all())


def test_the_cost_comes_before_the_normalisation() -> None:
    """`after` stands between advantage and normalize: whitening sees the costs."""
    spec = bench(
        installed(),
        normalize={"name": "whiten", "eps": 0.0},
        kl={"name": "in_reward", "beta": 1.0, "when": "after"},
    )
    got = of_rows((0.2, 0.1, 0.3, 0.4), (1, 0, 0, 1), spec)
    near(got, standardised([0.8, -0.1, -0.3, 0.6]))


@pytest.mark.parametrize("option", [{"credit": "own"}, {"centre": True}])
def test_what_goes_with_after_only(option: dict[str, Any]) -> None:
    with pytest.raises(LabError, match=r"goes with when = 'after' only"):
        bench(installed(), kl={"name": "in_reward", "when": "before", **option})


# --- H12, K13: the states that a policy visits ---------------------------------------------------


def tree(spec: Any, first: float, second: tuple[float, float]) -> tuple[float, Tensor]:
    """KL and the KL term's gradient by the first token's two logits, uniform reference.

    Four answers of two tokens, each with its chance; the second token's chances are constants.
    """
    z = f64(math.log(1 - first), math.log(first)).requires_grad_()
    answers = list(itertools.product((0, 1), repeat=2))
    chance_1 = [second[a] if b else 1 - second[a] for a, b in answers]
    logp = torch.stack((z.log_softmax(0)[[a for a, _ in answers]], f64(*chance_1).log()), 1)
    ref = torch.full((4, 2), math.log(0.5), dtype=torch.float64)
    chance = logp.detach().sum(1, keepdim=True).exp()
    out = evaluate(
        bench(installed(), ratio="none", surrogate="reinforce", kl=spec),
        logp=logp, old_logp=logp.detach(), ref_logp=ref, mask=torch.ones_like(ref),
        rewards=torch.zeros(4).double(), shares=chance.expand(4, 2),
    )  # fmt: skip
    value = float((chance * (logp - ref)).sum().detach())
    return value, torch.autograd.grad(out.loss, z)[0]


def enumerated(first: float, second: tuple[float, float]) -> Tensor:
    """The derivative of KL = KL(first token) + sum_a pi(a) KL(second | a), by the same logits."""

    def of(p: float) -> float:
        return p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p))

    z = f64(math.log(1 - first), math.log(first)).requires_grad_()
    pi = z.softmax(0)
    kl = (pi * (2 * pi).log()).sum() + (pi * f64(of(second[0]), of(second[1]))).sum()
    return torch.autograd.grad(kl, z)[0]


TO_GO = {"name": "in_reward", "beta": 1.0, "credit": "to_go", "when": "before"}
OWN = {"name": "in_reward", "beta": 1.0, "credit": "own", "when": "after"}
K2 = {"name": "in_loss", "estimator": "k2", "beta": 1.0}


@pytest.mark.parametrize(
    ("first", "second", "full", "held"),
    [
        (0.8, (0.5, 0.8), 0.252646, 0.221807),  # H12
        (0.6, (0.5, 0.8), 0.1436, 0.0973),  # K13
    ],
)
def test_h12_and_k13(first: float, second: Any, full: float, held: float) -> None:
    """In the reward with its rest of the row: the whole gradient. A token alone: states held.

    Kills: "a per-token KL loss is the KL of the sequence"; a cost credited to its own token only.
    """
    exact = enumerated(first, second)
    digits = 5e-7 if full > 0.2 else 5e-5
    near(exact, (-full, full), digits)
    after = {**TO_GO, "when": "after"}
    for spec in (TO_GO, after, {**TO_GO, "credit": "sequence"}, {**after, "credit": "sequence"}):
        near(tree(spec, first, second)[1], exact)
    # p (1 - p) log(p / (1 - p)): the second token's part is missing
    own = first * (1 - first) * math.log(first / (1 - first))
    near(own, held, digits)
    for spec in (OWN, K2, {**OWN, "centre": True}):
        near(tree(spec, first, second)[1], (-own, own))
    with pytest.raises(AssertionError):  # the mutant that H12 is there for
        near(tree(K2, first, second)[1], exact)
    if first == 0.8:
        assert tree(K2, first, second)[0] == pytest.approx(0.346941, abs=5e-7)


def test_h13_small_steps_accumulate() -> None:
    """Ascent on the rewards, lr .5, from pi = ref: KL(old||new) and KL(new||ref) by the step.

    Kills: "each step is small, so the policy stays near". A step's KL falls, the sum grows.
    """
    logits, seen = f64(*PI).log(), {}
    spec = bench(installed(), ratio="none", surrogate="reinforce")
    for step in range(1, 41):
        z = logits.requires_grad_()
        logp = z.log_softmax(0)[:, None]
        pi = logp.detach().exp()
        out = evaluate(spec, logp=logp, rewards=f64(*F), mask=torch.ones_like(pi), shares=pi)
        logits = (z - 0.5 * torch.autograd.grad(out.loss, z)[0]).detach()
        new = logits.log_softmax(0)
        seen[step] = (
            float((pi[:, 0] * (logp.detach()[:, 0] - new)).sum()),
            float((new.exp() * (new - f64(*PI).log())).sum()),
        )
    want = {1: (0.003473, 0.003438), 10: (0.000881, 0.178124), 40: (0.000022, 0.479512)}
    for step, numbers in want.items():
        assert seen[step] == pytest.approx(numbers, abs=5.1e-7)


# --- mutants of the placement --------------------------------------------------------------------


@kl_reward(name="flipped")
def flipped(old_logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Mutant: rewards drift (rlhf-book's kl1 = ref - old)."""
    return ref_logp - old_logp


@kl_reward(name="row_mean")
def row_mean(old_logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """Mutant: the mean over the row for the sum (K5: log-ratios .1, lengths 1, 9)."""
    return (old_logp - ref_logp) / mask.sum(1, keepdim=True)


@pytest.mark.parametrize("mutant", ["in_reward", "flipped", "row_mean"])
def test_k5_k15_a_sequence_cost_is_the_sum(mutant: str) -> None:
    """Token log-ratio .1, lengths 1 and 9: costs .1 and .9 off the score. H1: tokens add up."""
    shelf = Shelf.installed([flipped, row_mean])
    mask = (torch.arange(9) < torch.tensor([[1], [9]])).double()
    kl: dict[str, Any] = {"name": mutant, "credit": "sequence"}
    spec = bench(shelf, {**PLAIN, "kl": kl | ({"beta": 1.0} if mutant == "in_reward" else {})})
    out = evaluate(
        spec, logp=-mask, old_logp=-mask, ref_logp=-mask - 0.1, mask=mask, rewards=f64(0, 0)
    )
    right = torch.allclose(out.advantages[:, 0], f64(-0.1, -0.9), rtol=0, atol=1e-12)
    assert right is (mutant == "in_reward")
