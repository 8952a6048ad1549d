"""Section H of the acceptance list, its gradients: what each KL estimator really pulls towards.

pi = (.5, .3, .2), ref = q = (.2, .3, .5), beta 1, gradients by the logits. Rewards are 0, so what
is left of the loss is the KL, wherever it enters; every answer stands once and weighs its chance,
so an expectation is exact. The targets are derivatives of the enumerated KL itself.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from cases import PI, Q, bench, f64
from hypothesis import given, settings
from torch import Tensor

from lab import kl_loss
from lab.loss import Evaluation, evaluate
from lab.shelf import Shelf

MU = (0.4, 0.4, 0.2)


def near(got: Any, want: Any, atol: float = 1e-12) -> None:
    got, want = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (got, want))
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


@kl_loss
def swapped(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Mutant: k3 with pi and ref exchanged (rlhf-book's kl3)."""
    return (logp - ref_logp).expm1() - (logp - ref_logp)


@kl_loss
def signed(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Mutant: k3 with the sign of a gain."""
    return -((ref_logp - logp).expm1() + logp - ref_logp)


@kl_loss
def k1_penalty(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Mutant: k1 as a loss."""
    return logp - ref_logp


@kl_loss
def clamped(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Mutant: k3 clamped at 10, as verl, OpenRLHF, NeMo, SkyRL and others have it."""
    return ((ref_logp - logp).expm1() + logp - ref_logp).clamp(max=10)


@kl_loss
def sequence_scaled(logp: Tensor, old_logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """Mutant: k3 times the row's ratio (TRL with a sequence-level ratio)."""
    row = ((logp - old_logp) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    return row.exp() * ((ref_logp - logp).expm1() + logp - ref_logp)


@kl_loss
def reward_form(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """The KL of a reward, written as a loss: sg(k1) log pi."""
    return (logp - ref_logp).detach() * logp


@kl_loss
def attached_reward(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Mutant: the same without the stop-gradient."""
    return (logp - ref_logp) * logp


OWN = (swapped, signed, k1_penalty, clamped, sequence_scaled, reward_form, attached_reward)


@functools.cache
def shelf_with_mutants() -> Shelf:
    return Shelf.installed(OWN)


@functools.cache
def bench_of(kl: str, surrogate: str) -> Any:
    return bench(shelf_with_mutants(), kl=json.loads(kl), surrogate=surrogate, ratio="token")


def expected(
    kl: Any, *, pi: Any = PI, ref: Any = Q, sampler: Any = None, surrogate: str = "reinforce"
) -> tuple[Evaluation, Tensor]:
    """The evaluation and the expected gradient of the loss, samples from pi or from a sampler."""
    z = f64(*pi).log().requires_grad_()
    mu = f64(*(pi if sampler is None else sampler))[:, None]
    out = evaluate(
        bench_of(json.dumps(kl), surrogate),
        logp=z.log_softmax(0)[:, None],
        old_logp=mu.log(),
        ref_logp=f64(*ref).log()[:, None],
        rewards=torch.zeros(len(mu)).double(),
        mask=torch.ones_like(mu),
        shares=mu,
    )
    if not out.loss.requires_grad:
        return out, torch.zeros_like(z)
    return out, torch.autograd.grad(out.loss, z)[0]


def slope_of(objective: Callable[[Tensor], Tensor], pi: Any = PI) -> Tensor:
    """The gradient by the logits of a function of the probabilities."""
    z = f64(*pi).log().requires_grad_()
    return torch.autograd.grad(objective(z.softmax(0)), z)[0]


def reverse(pi: Any = PI, ref: Any = Q) -> Tensor:
    """grad KL(pi || ref)."""
    return slope_of(lambda p: (p * (p.log() - f64(*ref).log())).sum(), pi)


def forward(pi: Any = PI, ref: Any = Q) -> Tensor:
    """grad KL(ref || pi) = pi - ref."""
    return slope_of(lambda p: -(f64(*ref) * p.log()).sum(), pi)


def test_the_targets() -> None:
    near(reverse(), (0.320702, -0.082466, -0.238236), 5e-7)
    near(forward(), (0.5 - 0.2, 0.0, 0.2 - 0.5))


K1 = tuple(math.log(p / q) for p, q in zip(PI, Q, strict=True))  # (.916291, 0, -.916291)


def loss(estimator: str, weight: str = "none", beta: float = 1.0) -> dict[str, Any]:
    return {
        "name": "in_loss",
        "estimator": estimator,
        "beta": beta,
        "weight": weight,
        "allow_wrong": True,
    }


def reward(estimator: str, **more: Any) -> dict[str, Any]:
    return {
        "name": "in_reward",
        "estimator": estimator,
        "beta": 1.0,
        "allow_wrong": True,
        **more,
    }


# --- H4-H6, and the table of ALGORITHMS section 6 ------------------------------------------------

MEANS = {
    "k1": 0.5 * K1[0] + 0.2 * K1[2],  # .3 log 2.5 = .274887 = KL(pi || ref)
    "k2": 0.7 * K1[0] ** 2 / 2,  # .293856
    "k3": 0.3 * math.log(2.5),  # sum pi (ref/pi - 1) = 0, so KL again
    "abs": 0.7 * K1[0],
    "k1+": 0.3 * math.log(2.5),
    "k3+": 0.3 * math.log(2.5),
}


@pytest.mark.parametrize("estimator", MEANS)
def test_h_values(estimator: str) -> None:
    """E[value] is the KL for k1, k3 and their straight-through forms; k2's is biased."""
    out, _ = expected(loss(estimator))
    near((f64(*PI)[:, None] * out.kl).sum(), MEANS[estimator])
    near(MEANS["k1"], 0.274887, 5e-7)
    near(MEANS["k2"], 0.293856, 5e-7)


def in_the_reward(k: Callable[[Tensor], Tensor]) -> Tensor:
    """E[k grad log pi]: the gradient of sum pi sg(k)."""
    return slope_of(lambda p: (p * k(p.detach().log() - f64(*Q).log())).sum())


EXPECTED: dict[tuple[str, str], tuple[Tensor, tuple[float, ...]]] = {
    ("k1", "loss"): (0 * reverse(), (0, 0, 0)),
    ("k2", "loss"): (reverse(), (0.320702, -0.082466, -0.238236)),
    ("k3", "loss"): (forward(), (0.3, 0, -0.3)),
    ("k1+", "loss"): (reverse(), (0.320702, -0.082466, -0.238236)),
    ("k3+", "loss"): (reverse(), (0.320702, -0.082466, -0.238236)),
    # sign(d) = (1, 0, -1) with mean .3: pi (sign - .3)
    ("abs", "loss"): (f64(0.5 * 0.7, 0.3 * -0.3, 0.2 * -1.3), (0.35, -0.09, -0.26)),
    ("k1", "reward"): (reverse(), (0.320702, -0.082466, -0.238236)),
    ("k2", "reward"): (in_the_reward(lambda d: d**2 / 2), (0.062969, -0.088157, 0.025188)),
    ("k3", "reward"): (reverse() - forward(), (0.020702, -0.082466, 0.061764)),
    ("k1+", "reward"): (reverse(), (0.320702, -0.082466, -0.238236)),
    ("k3+", "reward"): (reverse() - forward(), (0.020702, -0.082466, 0.061764)),
    ("k1", "live"): (reverse(), (0.320702, -0.082466, -0.238236)),
    ("k2", "live"): (
        reverse() + in_the_reward(lambda d: d**2 / 2),
        (0.383671, -0.170623, -0.213048),
    ),
    ("k3", "live"): (reverse(), (0.320702, -0.082466, -0.238236)),
}


@pytest.mark.parametrize(("estimator", "where"), EXPECTED)
def test_h4_to_h6_expected_gradients(estimator: str, where: str) -> None:
    """Kills: "an unbiased value has an unbiased gradient"."""
    exact, printed = EXPECTED[estimator, where]
    kl = reward(estimator) if where == "reward" else loss(estimator, where.replace("loss", "none"))
    _, got = expected(kl)
    near(got, exact)
    near(got, printed, 1e-6)  # six digits, of two numbers added


def test_how_far_k3_is_off() -> None:
    """In the loss cosine .969, norm 1.04 times; in the reward .26 times, cosine -.03."""
    cosine = torch.nn.functional.cosine_similarity
    for kl, norm, cos in ((loss("k3"), 1.04, 0.969), (reward("k3"), 0.26, -0.03)):
        _, got = expected(kl)
        near(got.norm() / reverse().norm(), norm, 5e-3)
        near(cosine(got, reverse(), dim=0), cos, 5e-4)


def test_abs_does_not_vanish_at_the_reference() -> None:
    """pi = softmax(log ref + .01 (1, 0, -1)): 138 times too large. Kills: abs as a penalty."""
    pi = (f64(*Q).log() + 0.01 * f64(1, 0, -1)).softmax(0).tolist()
    _, got = expected(loss("abs"), pi=pi)
    near(got.norm() / reverse(pi).norm(), 138, 0.5)


# --- H8: samples of an older policy --------------------------------------------------------------

PLAIN = {  # samples from MU, no weight: sum mu_a k'(a) s_a
    "k1": (-0.1, 0.1, 0.0),  # mu - pi
    "k2": (0.274887, -0.054977, -0.219910),
    "k3": (0.27, 0.018, -0.288),
}


@pytest.mark.parametrize("sampler", [MU, (0.4, 0.35, 0.25)])
def test_h8_what_is_exact_off_policy(sampler: tuple[float, ...]) -> None:
    """Live r with k1 or k3, detached r with k2, k1+, k3+. Kills: r missing or wrongly attached."""
    for estimator, weight in (
        *(("k1", "live"), ("k3", "live"), ("k1", "live_sequence"), ("k3", "live_sequence")),
        *(("k2", "detached"), ("k1+", "detached"), ("k3+", "detached")),
    ):
        near(expected(loss(estimator, weight), sampler=sampler)[1], reverse())
    near(expected(loss("k3", "detached"), sampler=sampler)[1], forward())
    near(expected(loss("k1", "detached"), sampler=sampler)[1], (0, 0, 0))
    wrong = expected(loss("k2", "live"), sampler=sampler)[1]
    near(wrong, (0.383671, -0.170623, -0.213048), 1e-6)
    near((wrong - reverse()).norm() / reverse().norm(), 0.27, 5e-3)


@pytest.mark.parametrize("estimator", PLAIN)
def test_h8_no_weight(estimator: str) -> None:
    mu, pi = f64(*MU), f64(*PI)
    slope = {"k1": f64(1, 1, 1), "k2": f64(*K1), "k3": 1 - f64(*Q) / pi}[estimator]
    _, got = expected(loss(estimator), sampler=MU)
    near(got, mu * slope - pi * (mu * slope).sum())  # sum_a mu_a k'_a (onehot_a - pi)
    near(got, PLAIN[estimator], 1e-6)


def test_h8_a_cost_frozen_with_the_rollout_pulls_by_the_old_policy() -> None:
    """log(old/ref) instead of log(pi/ref), .30 off at old (.4,.35,.25); k1 in the loss drifts."""
    old = (0.4, 0.35, 0.25)
    _, got = expected(reward("k1"), sampler=old, surrogate="ppo_unclipped")
    frozen = f64(*old).log() - f64(*Q).log()
    near(got, slope_of(lambda p: (p * frozen).sum()))
    near((got - reverse()).norm() / reverse().norm(), 0.30, 5e-3)
    near(expected(loss("k1"), sampler=old)[1], (-0.1, 0.05, 0.05))  # old - pi


# --- H10, K8 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [1.0, 0.05])
def test_h10_both_is_twice(beta: float) -> None:
    """k1 in the reward and k2 in the loss, one beta: 2 beta grad KL. Kills: a shared halving."""
    _, got = expected({"name": "both", "beta": beta})
    near(got, 2 * beta * reverse())
    _, half = expected(loss("k2", beta=beta))
    near(half, beta * reverse())


def test_k8_a_step_along_it_comes_nearer() -> None:
    """KL alone, one logit step .5: .274887 to .197900. Kills the sign: .363477."""

    def after(kl: Any) -> float:
        pi = (f64(*PI).log() - 0.5 * expected(kl)[1]).softmax(0)
        return float((pi * (pi.log() - f64(*Q).log())).sum())

    assert after(loss("k2")) == pytest.approx(0.197900, abs=5e-7)
    assert after(reward("k1")) == pytest.approx(0.197900, abs=5e-7)
    assert after({"name": "signed"}) > 0.274887
    up = (f64(*PI).log() + 0.5 * reverse()).softmax(0)
    near((up * (up.log() - f64(*Q).log())).sum(), 0.363477, 5e-7)


# --- mutants -------------------------------------------------------------------------------------


def h6_value(kl: Any) -> None:
    near((f64(*PI)[:, None] * expected(kl)[0].kl).sum(), 0.3 * math.log(2.5))


def h6_gradient(kl: Any) -> None:
    near(expected(kl)[1], forward())


def h4_gradient(kl: Any) -> None:
    near(expected(kl)[1], reverse())


def h8_gradient(kl: Any) -> None:
    near(expected(kl, sampler=MU)[1], (0.27, 0.018, -0.288))


def k12_slope(kl: Any) -> None:
    """An answer at log(ref/pi) = 3 has slope 1 - e^3 = -19.085537; in expectation pi - ref."""
    rare = 0.9 * math.exp(-3)
    out, got = expected(kl, pi=(rare, 1 - rare), ref=(0.9, 0.1))
    near(out.kl[0, 0], math.exp(3) - 1 - 3, 1e-10)
    near(got, (rare - 0.9, 0.9 - rare))


CONTROLS = [
    *((loss("k3"), c) for c in (h6_value, h6_gradient, h8_gradient, k12_slope)),
    *((kl, h4_gradient) for kl in (loss("k2"), reward("k1"), {"name": "reward_form"})),
]


@pytest.mark.parametrize(("kl", "check"), CONTROLS)
def test_the_right_forms_pass(kl: Any, check: Callable[[Any], None]) -> None:
    check(kl)


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        ("swapped", h6_value),
        ("swapped", h6_gradient),
        ("signed", h6_gradient),
        ("k1_penalty", h4_gradient),
        ("attached_reward", h4_gradient),
        ("clamped", k12_slope),
        ("sequence_scaled", h8_gradient),
    ],
)
def test_their_mutants_are_killed(mutant: str, check: Callable[[Any], None]) -> None:
    with pytest.raises(AssertionError):
        check({"name": mutant})
    if mutant in ("clamped", "sequence_scaled"):  # near the reference, on-policy: the right value
        h6_value({"name": mutant})


def test_what_the_swapped_one_is() -> None:
    """k3 of the wrong side: mean .355113 = chi2 - KL, gradient half of chi2's."""
    out, got = expected({"name": "swapped"})
    near((f64(*PI)[:, None] * out.kl).sum(), 0.355113, 5e-7)
    near(got, slope_of(lambda p: (p**2 / f64(*Q)).sum() / 2))  # (.435, -.189, -.246)
    near(got, (0.435, -0.189, -0.246))


# --- any policies --------------------------------------------------------------------------------

three = st.lists(st.floats(0.05, 1.0), min_size=3, max_size=3).map(
    lambda w: tuple(x / sum(w) for x in w)
)


@settings(deadline=None, max_examples=15)
@given(pi=three, ref=three, mu=three)
def test_the_identities_hold_for_any_policies(pi: Any, ref: Any, mu: Any) -> None:
    """pi now, ref the reference, mu the sampler: what section 6 calls exact is exact."""
    there, back = reverse(pi, ref), forward(pi, ref)
    both = {"name": "both", "beta": 1.0}
    for kl, sampler, want in (
        (loss("k1"), None, 0 * there),
        (loss("k2"), None, there),
        (loss("k3"), None, back),
        (reward("k1"), None, there),
        (reward("k3"), None, there - back),
        (both, None, 2 * there),
        (loss("k1", "live"), mu, there),
        (loss("k3", "live"), mu, there),
        (loss("k2", "detached"), mu, there),
        (loss("k3", "detached"), mu, back),
    ):
        got = expected(kl, pi=pi, ref=ref, sampler=sampler)[1]
        near(got, want, 1e-11)
