"""Section A of the acceptance list: the score function and its baselines, every answer enumerated.

An estimator's expectation is exact here: each answer stands once and weighs its probability, or
the batch holds each answer as often as it comes. `Way` is one way to make the estimator, the
shelf's own or a mutant's: every check passes for the first and fails for the second.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import lab_reinforce
import pytest
import torch
from cases import PI, F, bench, f64, ragged
from hypothesis import given, settings
from torch import Tensor

from lab import LabError, surrogate
from lab.bench import Bench
from lab.loss import Evaluation, evaluate
from lab.shelf import Shelf, installed

GRADIENT = (0.2, -0.18, -0.02)  # pi (f - J), J = .5 * 1 + .3 * 0 + .2 * .5 = .6


def near(got: Any, want: Any, atol: float = 1e-12) -> None:
    got, want = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (got, want))
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


@surrogate
def attached(logp: Tensor, advantages: Tensor) -> Tensor:
    """Mutant: the weight is worth A and moves with the policy."""
    return advantages * (logp - logp.detach()).exp() * logp


@surrogate
def flipped(logp: Tensor, advantages: Tensor) -> Tensor:
    """Mutant: the loss handed over as the objective."""
    return -advantages * logp


@surrogate
def reported_as_objective(logp: Tensor, advantages: Tensor) -> Tensor:
    """Mutant: the right gradient with the value A, so that the loss reads -J."""
    return advantages * (logp - logp.detach()).exp()


@functools.cache
def bench_of(surrogate: str, plugins: tuple[Any, ...] = (), gamma: float = 1.0) -> Bench:
    shelf = Shelf.installed(plugins) if plugins else installed()
    advantage = {"name": "reinforce", "gamma": gamma}
    return bench(shelf, ratio="none", surrogate=surrogate, advantage=advantage)


@dataclass(frozen=True)
class Way:
    surrogate: str = "reinforce"
    plugins: tuple[Any, ...] = ()
    weight: Callable[[Tensor], Tensor] = field(default=lambda pi: pi)
    weigh: Callable[[Tensor], Tensor] = field(default=lambda advantages: advantages)

    def enumerate(self, logits: Tensor, advantages: Tensor) -> Evaluation:
        """Every answer once, as rows of one token, with its weight as its share."""
        logp = logits.log_softmax(0)[:, None]
        return evaluate(
            bench_of(self.surrogate, self.plugins),
            logp=logp,
            advantages=self.weigh(advantages)[:, None],
            mask=torch.ones_like(logp),
            shares=self.weight(logits.softmax(0).detach())[:, None],
        )

    def ascent(self, logits: Tensor, advantages: Tensor) -> Tensor:
        return torch.autograd.grad(-self.enumerate(logits, advantages).loss, logits)[0]


def logits_of(pi: tuple[float, ...] = PI) -> Tensor:
    return f64(*pi).log().requires_grad_()


def scores() -> Tensor:
    """Row a: grad log pi_a = onehot_a - pi."""
    return torch.eye(3, dtype=torch.float64) - f64(*PI)


def a8_two_answers(way: Way) -> None:
    """dJ/dz = +-p(1 - p): .5 * .5, .3 * .7, .1 * .9."""
    for p, slope in ((0.5, 0.25), (0.3, 0.21), (0.1, 0.09)):
        near(way.ascent(logits_of((p, 1 - p)), f64(1, 0)), (slope, -slope))


def a9_three_answers(way: Way) -> None:
    near(way.ascent(logits_of(), f64(*F)), GRADIENT)
    near(way.ascent(logits_of(), f64(1, 1, 1)), (0.0, 0.0, 0.0))  # E[grad log pi] = 0


def a10_baselines(way: Way) -> None:
    for b in (-3.0, 0.0, 0.6, 10.0):
        near(way.ascent(logits_of(), f64(*F) - b), GRADIENT)


def a11_one_answer(way: Way) -> None:
    """L = -A log p_0: dL/dz_k = A (p_k - 1[k = 0]) = A (.5 - 1, .3, .2) (A6)."""
    for a in (1.0, -1.0):
        out = Way(way.surrogate, way.plugins, lambda pi: f64(1, 0, 0), way.weigh)
        near(-out.ascent(logits_of(), a * f64(1, 1, 1)), a * f64(-0.5, 0.3, 0.2))


def a12_value(way: Way) -> None:
    """The loss is -sum pi f log pi = -(.5 log .5 + .1 log .2) = .507517, not -J = -.6."""
    loss = way.enumerate(logits_of(), f64(*F)).loss
    near(loss, -(0.5 * math.log(0.5) + 0.2 * 0.5 * math.log(0.2)))
    near(loss, 0.507517, atol=5e-7)


CHECKS = (a8_two_answers, a9_three_answers, a10_baselines, a11_one_answer, a12_value)
THIRD = (0.25 / 3, -0.15, 0.2 / 3)
#: name -> mutant, the check that kills it, what it makes of f in place of GRADIENT
MUTANTS: Mapping[str, tuple[Way, Any, tuple[float, ...]]] = {
    # (1 * .5 + .5 * -.5, 1 * -.3 + .5 * -.3, 1 * -.2 + .5 * .8)
    "no pi weight": (Way(weight=torch.ones_like), a9_three_answers, (0.25, -0.45, 0.2)),
    "mean over actions": (
        Way(weight=lambda pi: torch.full_like(pi, 1 / 3)),
        a9_three_answers,
        THIRD,
    ),
    "sign": (Way("flipped", (flipped,)), a11_one_answer, (-0.2, 0.18, 0.02)),
    # GRADIENT less .5 * 1 * (.5, -.3, -.2)
    "action-dependent baseline": (
        Way(weigh=lambda a: a - f64(1, 0, 0)),
        a10_baselines,
        (-0.05, -0.03, 0.08),
    ),
    # the std of (1, 0, .5) with ddof 1 is .5, so everything doubles
    "batch-std scaling": (
        Way(weigh=lambda a: a / (a.std() + 1e-30)),
        a9_three_answers,
        (0.4, -0.36, -0.04),
    ),
    # product rule: weight f (1 + log pi); E = sum_a pi_a f_a (1 + log pi_a) s_a
    "attached weight": (
        Way("attached", (attached,)),
        a11_one_answer,
        tuple((f64(*PI) * f64(*F) * (1 + f64(*PI).log()) @ scores()).tolist()),
    ),
    "loss reported as -J": (
        Way("reported_as_objective", (reported_as_objective,)),
        a12_value,
        GRADIENT,
    ),
}


@pytest.mark.parametrize("check", CHECKS)
def test_the_shelf_own_estimator(check: Callable[[Way], None]) -> None:
    check(Way())


@pytest.mark.parametrize("name", MUTANTS)
def test_its_mutants_are_killed(name: str) -> None:
    way, check, gives = MUTANTS[name]
    near(way.ascent(logits_of(), f64(*F)), gives)
    with pytest.raises(AssertionError):
        check(way)


def test_a1_the_gradient_in_p_is_one() -> None:
    """J = p, dJ/dp = p * 1/p * 1 = 1. Kills: a weight or a score of another parametrisation."""
    for chance in (0.2, 0.5, 0.9):
        p = torch.tensor(chance, dtype=torch.float64, requires_grad=True)
        logp = torch.stack((p, 1 - p)).log()[:, None]
        out = evaluate(
            bench_of("reinforce"),
            logp=logp,
            rewards=f64(1, 0),
            mask=torch.ones_like(logp),
            shares=logp.detach().exp(),
        )
        near(torch.autograd.grad(-out.loss, p)[0], 1.0)


def test_a3_no_gradient_into_the_weight_or_the_scorer() -> None:
    """Kills: an actor loss that trains what weighs it, or the scorer through a sampled id."""
    weight = f64([2.0], [-1.0]).requires_grad_()
    scorer = f64(1.0, 0.5).requires_grad_()
    logp = f64([-1.0], [-2.0]).requires_grad_()
    plain = bench_of("reinforce")
    for given_ in ({"advantages": weight}, {"rewards": scorer[torch.tensor([0, 1])]}):
        evaluate(plain, logp=logp, mask=torch.ones(2, 1).double(), **given_).loss.backward()
    assert weight.grad is None
    assert scorer.grad is None
    near(logp.grad, [[-(2.0 + 1.0) / 2], [-(-1.0 + 0.5) / 2]])  # -(A) / B of both losses
    # the mutant: the same loss with its weight attached has a gradient there, log p / B
    (leak,) = torch.autograd.grad(-(weight * logp).mean(), weight)
    near(leak, [[0.5], [1.0]])


def test_a4_the_variance_is_least_at_b_star_not_at_the_value() -> None:
    """Trace of the one-sample covariance, from the pulls: 7.4742, .1662, .0438, 56.4062; .032419.

    Kills: "the value function is the variance minimiser".
    """
    pi, f, square = f64(*PI), f64(*F), (scores() ** 2).sum(1)  # |s|^2 = .38, .78, .98

    def trace(b: float) -> float:
        pull = Way().enumerate(logits_of(), f - b).pull[:, 0]
        return float((pi * pull**2 * square).sum() - (f64(*GRADIENT) ** 2).sum())

    for b, want in ((-3.0, 7.4742), (0.0, 0.1662), (0.6, 0.0438), (10.0, 56.4062)):
        assert trace(b) == pytest.approx(want, abs=1e-12)
    # b* = E[|s|^2 f] / E[|s|^2] = (.19 * 1 + .196 * .5) / (.19 + .234 + .196)
    best = 0.288 / 0.62
    assert best == pytest.approx(0.464516, abs=5e-7)
    assert trace(best) == pytest.approx(0.032419, abs=5e-7)
    assert all(trace(best + d) > trace(best) for d in (-1e-3, 1e-3, 0.6 - best))


def test_a5_reward_8_is_good_or_bad_by_the_value() -> None:
    """8 - 7 = +1, 8 - 9 = -1. Kills: a raw reward as weight."""
    for value, want in ((7.0, 1.0), (9.0, -1.0)):
        out = evaluate(
            bench(installed(), advantage={"name": "gae", "lam": 1.0}),
            logp=f64([-1.0]),
            old_logp=f64([-1.0]),
            mask=f64([1.0]),
            rewards=f64(8.0),
            values=f64([value]),
            truncated=torch.tensor([False]),
        )
        near(out.advantages, [[want]])


def test_a13_the_score_of_a_mean_is_not_the_mean_of_the_scores() -> None:
    """h(x) = sigmoid(4x - 2) on 0 and 1, p = .3. Kills: scoring the mean embedding."""
    h = [1 / (1 + math.exp(2)), 1 / (1 + math.exp(-2))]
    p = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    logp = torch.stack((1 - p, p)).log()[:, None]
    out = evaluate(
        bench_of("reinforce"),
        logp=logp,
        rewards=f64(*h),
        mask=torch.ones_like(logp),
        shares=logp.detach().exp(),
    )
    slope = float(torch.autograd.grad(-out.loss, p)[0])
    assert slope == pytest.approx(h[1] - h[0], abs=1e-12)
    assert slope == pytest.approx(0.761594, abs=5e-7)
    assert 0.7 * h[0] + 0.3 * h[1] == pytest.approx(0.347681, abs=5e-7)
    of_mean = 1 / (1 + math.exp(-(4 * 0.3 - 2)))
    assert of_mean == pytest.approx(0.310026, abs=5e-7)
    # 4 h (1 - h): the article's .855639
    assert 4 * of_mean * (1 - of_mean) == pytest.approx(0.855639, abs=5e-7)


#: First token 0 ends the answer; after 1 a second token comes. Every conditional chance is 1/2, so
#: four rows hold each answer as often as it comes: (0) twice, (1,0), (1,1).
TREE_MASK = ((1, 0), (1, 0), (1, 1), (1, 1))
TREE_REWARDS = (0.3, 0.3, -1.0, 2.0)


def tree_gradient(recipe: Mapping[str, Any] | str) -> Tensor:
    z = f64(0, 0).requires_grad_()  # logits of 1 against 0, first token and second
    one, zero = torch.nn.functional.logsigmoid(z), torch.nn.functional.logsigmoid(-z)
    first = torch.stack((zero[0], zero[0], one[0], one[0]))
    second = torch.stack((zero[1], zero[1], zero[1], one[1]))
    out = evaluate(
        recipe,
        logp=torch.stack((first, second), 1),
        mask=f64(*TREE_MASK),
        rewards=f64(*TREE_REWARDS),
    )
    return torch.autograd.grad(-out.loss, z)[0]


def test_a2_a_response_s_logp_is_the_sum_of_its_tokens() -> None:
    """J = (1-a) .3 + a ((1-b) (-1) + b 2): dJ/dz by hand at a = b = 1/2. The recipe by name.

    a' = 1/4 * (.5 * -1 + .5 * 2 - .3) = .05, b' = .5 * 1/4 * (2 + 1) = .375.
    """
    near(tree_gradient("reinforce"), (0.05, 0.375))


def test_a2_kills_a_mean_over_the_row() -> None:
    """1/(n_i B) halves the long answers: not even parallel to grad J. Alone: 1/N is 2/3 of 1/B.

    First logit: 1/4 * (.5 (-1 + 2)/2 - .3) = -.0125, the wrong sign; second half of .375.
    """
    near(tree_gradient({"base": "reinforce", "aggregate": "sequence_mean"}), (-0.0125, 0.1875))
    token_mean = tree_gradient({"base": "reinforce", "aggregate": "token_mean"})
    near(token_mean, (2 / 3 * 0.05, 2 / 3 * 0.375))  # N = 6, B = 4, on this batch


def test_the_recipe_on_a_batch_with_the_answers_as_often_as_they_come() -> None:
    """Rows 5 : 3 : 2, share 1/10 each: A9 through the recipe's own aggregate. Kills: no 1/B."""
    logits = logits_of()
    answer = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    logp = logits.log_softmax(0)[answer][:, None]
    out = evaluate("reinforce", logp=logp, mask=torch.ones_like(logp), rewards=f64(*F)[answer])
    near(torch.autograd.grad(-out.loss, logits)[0], GRADIENT)
    assert torch.equal(out.share, torch.full_like(out.share, 1 / 10))
    assert out.ratio is None  # nobody reads one, so none is made


def to_go_by_hand(rewards: list[float], mask: list[float], gamma: float) -> list[float]:
    """The mask tokens alone, as if nothing stood between them."""
    at = [t for t, m in enumerate(mask) if m]
    out = [0.0] * len(mask)
    for i, t in enumerate(at):
        out[t] = sum(gamma ** (k - i) * rewards[at[k]] for k in range(i, len(at)))
    return out


def test_reward_to_go_decays_over_policy_tokens_only() -> None:
    """1 at the end, gamma .5, mask 1,1,0,0,1: (.25, .5, 1), not (.0625, .125, 1)."""
    mask = f64([1, 1, 0, 0, 1])
    spec = bench(installed(), advantage={"name": "reinforce", "gamma": 0.5})
    out = evaluate(spec, logp=-mask, old_logp=-mask, mask=mask, rewards=f64(1))
    near(out.advantages, [[0.25, 0.5, 0, 0, 1]])
    last = f64([1, 1, 0])  # an observation at the end takes no reward
    out = evaluate(spec, logp=-last, old_logp=-last, mask=last, rewards=f64(1))
    near(out.advantages, [[0.5, 1, 0]])


@pytest.mark.parametrize("gamma", [1.5, -0.1])
def test_a_discount_outside_0_to_1_is_refused(gamma: float) -> None:
    with pytest.raises(LabError, match=rf"advantage 'reinforce': gamma={gamma}"):
        bench_of("reinforce", gamma=gamma)


def by_position(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Mutant: decays over every column, tokens or not."""
    t = torch.arange(mask.shape[1])
    decay = gamma ** (t[None, :] - t[:, None]).clamp(min=0) * (t[None, :] >= t[:, None])
    return mask * ((rewards * mask) @ decay.to(mask).T)


def whole_return(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Mutant: every token takes the whole row's return."""
    return by_position(rewards, mask, gamma=gamma)[:, :1] * mask


@pytest.mark.parametrize("mutant", [by_position, whole_return])
def test_reward_to_go_kills(mutant: Any) -> None:
    rewards, mask = f64([0.5, 0, 0, 0, 1]), f64([1, 1, 0, 0, 1])
    want = to_go_by_hand(rewards[0].tolist(), mask[0].tolist(), 0.5)
    near(lab_reinforce.reward_to_go(rewards, mask, gamma=0.5)[0] * mask[0], want)
    with pytest.raises(AssertionError):
        near(mutant(rewards, mask, gamma=0.5)[0], want)


@settings(deadline=None, max_examples=25)
@given(batch=ragged(), gamma=st.sampled_from((1.0, 0.9, 0.5, 0.0)), seed=st.integers(0, 1000))
def test_reward_to_go_against_plain_python(batch: dict[str, Any], gamma: float, seed: int) -> None:
    """Ragged rows with gaps, a reward on every token, both precisions."""
    mask = batch["mask"]
    noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed)).to(mask)
    rows = {"logp": batch["logp"], "mask": mask, "token_rewards": noise * mask}
    out = evaluate(bench_of("reinforce", gamma=gamma), **rows)
    want = [
        to_go_by_hand(r, m, gamma)
        for r, m in zip((noise * mask).tolist(), mask.tolist(), strict=True)
    ]
    near(out.advantages, want, 1e-12 if mask.dtype == f64().dtype else 1e-5)
    assert torch.equal(out.pull, out.advantages)  # pull A whatever the ratio (P8, P9)


@settings(deadline=None, max_examples=25)
@given(
    logits=st.lists(st.floats(-3, 3), min_size=2, max_size=6),
    baseline=st.floats(-10, 10),
    seed=st.integers(0, 1000),
)
def test_the_enumerated_gradient_and_the_estimator_agree(
    logits: list[float], baseline: float, seed: int
) -> None:
    """Any softmax, any rewards, any action-independent baseline: E[estimator] = grad J."""
    z = f64(*logits).requires_grad_()
    rewards = torch.randn(len(logits), generator=torch.Generator().manual_seed(seed)).double()
    (exact,) = torch.autograd.grad((z.softmax(0) * rewards).sum(), z)
    near(Way().ascent(z, rewards - baseline), exact, 1e-12 * (1 + abs(baseline)))


def test_the_pull_is_the_advantage_whatever_the_ratio() -> None:
    """P9's first row: 1, 1, 1, 1 and -1. Kills: a ratio that sneaks into the score function."""
    ratios = f64([0.5], [1.0], [2.0], [10.0])
    for a in (1.0, -1.0):
        rows = {"old_logp": 0 * ratios - 5, "mask": 0 * ratios + 1, "advantages": 0 * ratios + a}
        out = evaluate(bench_of("reinforce"), logp=ratios.log() - 5, **rows)
        assert torch.equal(out.pull, out.advantages)
