"""Where the pull towards the reference enters, and by which estimator.

d = logp - ref_logp. What an estimator's value means and what its gradient does are two things. On
fresh samples, per token with the visited states held: as a loss, k1 has expected gradient 0, k2
that of KL(pi || ref), k3 that of KL(ref || pi); in the reward, only k1 gives the gradient of
KL(pi || ref) (Schulman 2020, "Approximating KL divergence",
for the values). Forms that do not penalise are refused unless the recipe says ``allow_wrong``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from lab import Float, kl_loss, kl_reward, masked_mean, masked_sum

Beta = Annotated[float, Float(1e-4, 0.3, log=True)]
Estimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+"]
Weight = Literal["none", "live", "live_sequence", "detached"]


def _estimate(d: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d**2
    if estimator == "k3":
        # expm1: near the reference exp(-d) - 1 + d would cancel to nothing in float32
        return (-d).expm1() + d
    if estimator == "abs":
        return d.abs()
    # straight-through: the value of k1 or k3, which estimates the KL, with the gradient of k2
    value, slope = _estimate(d, estimator[:-1]), _estimate(d, "k2")
    return slope + (value - slope).detach()


def _ratio(logp: Tensor, old_logp: Tensor, mask: Tensor, weight: str) -> Tensor:
    log_ratio = logp - old_logp
    if weight == "live_sequence":
        return masked_mean(log_ratio, mask, 1, keepdim=True).exp()
    # "live" pulls through the ratio as well, which makes k1 and k3 exact off-policy; "detached"
    # holds it as a plain importance weight, which makes k2 exact
    return log_ratio.exp() if weight == "live" else log_ratio.exp().detach()


def _check_beta(beta: float) -> None:
    if not beta >= 0:
        raise ValueError(f"beta={beta}; it is at least 0")


def _check_reward(estimator: str, allow_wrong: bool) -> None:
    if estimator != "k1" and not allow_wrong:
        raise ValueError(
            f"estimator={estimator!r} in the reward; take k1, whose gradient there is that of "
            "KL(pi || ref), or say allow_wrong = true"
        )


@kl_reward(exempt={"P7.allow_wrong": "permits only"})
def in_reward(
    old_logp: Tensor,
    ref_logp: Tensor,
    *,
    estimator: Estimator = "k1",
    beta: Beta = 0.05,
    allow_wrong: bool = False,
) -> Tensor:
    """beta k(old || ref) of each token, taken off the reward and frozen with the rollout.

    Ziegler et al. 1909.08593 section 2. With k1 and credit `to_go` or `sequence` its expected
    gradient is that of KL(pi || ref), visited states included, where the advantage is not scaled
    and shares do not depend on length. Under a std of the group (``before``) the cost is scaled
    too: where all rewards are equal beta drops out. Beta .05 as in TRL's PPO and RLOO.
    """
    _check_beta(beta)
    _check_reward(estimator, allow_wrong)
    return beta * _estimate(old_logp - ref_logp, estimator)


@kl_loss(exempt={"P7.allow_wrong": "permits only"})
def in_loss(
    logp: Tensor,
    old_logp: Tensor,
    ref_logp: Tensor,
    mask: Tensor,
    *,
    estimator: Estimator = "k3",
    beta: Beta = 0.001,
    weight: Weight = "none",
    allow_wrong: bool = False,
) -> Tensor:
    """beta k(pi || ref) of each token, a penalty beside the surrogate (GRPO 2402.03300 eq. 4).

    `weight` multiplies it by the token's ratio, live or detached, or the row's live geometric mean.
    Per token, the visited states held: on fresh samples plain k3 pulls by the gradient of
    KL(ref || pi); for KL(pi || ref) on samples of an older policy take k1 or k3 with ``live`` or k2
    with ``detached``. Beta .001: verl; DeepSeek-R1 in TRL's docs.
    """
    _check_beta(beta)
    weighted = weight in ("live", "live_sequence")
    if estimator in ("k1", "abs") and not weighted and not allow_wrong:
        raise ValueError(
            f"estimator={estimator!r} in the loss without a live weight: k1 does not penalise, "
            "abs does not fade near the reference; take k2 or k3, or weight = 'live', "
            "or say allow_wrong = true"
        )
    d = torch.where(mask.bool(), logp - ref_logp, torch.zeros_like(logp))
    penalty = beta * _estimate(d, estimator)
    return penalty if weight == "none" else _ratio(logp, old_logp, mask, weight) * penalty


@kl_reward(name="both")
def both_reward(old_logp: Tensor, ref_logp: Tensor, *, beta: Beta = 0.05) -> Tensor:
    """beta k1 in the reward and beta k2 in the loss: the penalty twice, 2 beta in all.

    On fresh samples the reward half has the gradient of KL(pi || ref), the loss half that of each
    token with the visited states held: the same for rows of one token.
    """
    _check_beta(beta)
    return beta * _estimate(old_logp - ref_logp, "k1")


@kl_loss(name="both")
def both_loss(logp: Tensor, ref_logp: Tensor, *, beta: Beta = 0.05) -> Tensor:
    """The loss half of `both`."""
    _check_beta(beta)
    return beta * _estimate(logp - ref_logp, "k2")


def control(
    memory: Mapping[str, Any],
    step: Mapping[str, Any],
    *,
    beta: float,
    target: float,
    horizon: float,
    per: str,
) -> Mapping[str, Any]:
    """beta <- beta (1 + clip(KL/target - 1, +-.2) n / horizon), n rows (Ziegler et al.'s code).

    1909.08593 section 2.2 has a constant gain K = .1 in place of n / horizon.
    """
    mask = step["mask"]
    tokens = masked_sum(step["old_logp"] - step["ref_logp"], mask)
    rows = int((mask.sum(1) > 0).sum())
    kl = float(tokens) / max(1.0, float(mask.sum()) if per == "token" else float(rows))
    if not math.isfinite(kl):
        raise ValueError(f"the KL is {kl}: the run has diverged")
    error = min(0.2, max(-0.2, kl / target - 1))
    return {"beta": memory.get("beta", beta) * max(0.0, 1 + error * rows / horizon)}


def _check_control(target: float, horizon: float) -> None:
    if not target > 0 or not horizon > 0:
        raise ValueError(f"target={target}, horizon={horizon}; both are positive")


@kl_reward(remember=control)
def adaptive(
    old_logp: Tensor,
    ref_logp: Tensor,
    *,
    memory: Mapping[str, Any],
    beta: Beta = 0.15,
    target: Annotated[float, Float(0.5, 20.0, log=True)] = 6.0,
    horizon: float = 10_000.0,
    per: Literal["sequence", "token"] = "sequence",
) -> Tensor:
    """k1 in the reward with a beta that follows a target KL (1909.08593 section 2.2).

    `beta` is where it starts; `target` is a KL per sequence, or per token by `per`. Once a rollout
    beta grows or shrinks by at most .2 n / horizon of itself, n rows.
    """
    _check_control(target, horizon)
    _check_beta(beta)
    now: float = memory.get("beta", beta)
    return now * _estimate(old_logp - ref_logp, "k1")


@kl_loss(remember=control)
def adaptive_in_loss(
    logp: Tensor,
    ref_logp: Tensor,
    *,
    memory: Mapping[str, Any],
    estimator: Literal["k2", "k3"] = "k3",
    beta: Beta = 0.15,
    target: Annotated[float, Float(0.5, 20.0, log=True)] = 6.0,
    horizon: float = 10_000.0,
    per: Literal["sequence", "token"] = "sequence",
) -> Tensor:
    """k3 (or k2) in the loss with a beta that follows a target KL, as `adaptive`."""
    _check_control(target, horizon)
    _check_beta(beta)
    now: float = memory.get("beta", beta)
    return now * _estimate(logp - ref_logp, estimator)
