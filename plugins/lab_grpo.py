"""Group baselines: GRPO, RLOO, Dr. GRPO. The siblings' rewards stand in for a critic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from lab import (
    Choice,
    advantage,
    alias,
    group_mean,
    group_std,
    masked_mean,
    masked_var,
    normalize,
    recipes,
    sibling_mean,
    spread,
)


@advantage(needs_group=lambda singleton: 1 if singleton == "zero" else 2)
def group(
    rewards: Tensor,
    group: Tensor,
    mask: Tensor,
    *,
    baseline: Annotated[str, Choice("mean", "loo")] = "mean",
    scale: Annotated[str, Choice("std", "none", "batch")] = "std",
    ddof: Literal[0, 1] = 1,
    eps: float = 1e-6,
    singleton: Literal["refuse", "zero"] = "refuse",
) -> Tensor:
    """(S - baseline of its group) / (scale + eps), spread over the row.

    Baseline: the group's mean, or that of the siblings alone (`loo`). Scale: the group's std, that
    of all rewards of the rollout (`batch`), or none. DeepSeekMath 2402.03300 section 4.1.2 divides
    by the group's std; it gives neither ddof nor eps: 1 and 1e-6 are verl's. Rewards that are
    constant in a group give exactly 0. A group of one is refused, or 0 with ``singleton="zero"``.
    """
    if baseline not in ("mean", "loo"):
        raise ValueError(f"baseline={baseline!r}; it may be mean or loo")
    centred = rewards - (
        group_mean(rewards, group) if baseline == "mean" else sibling_mean(rewards, group)
    )
    alone = (group[:, None] == group[None, :]).sum(1) < 2
    centred = torch.where(alone, torch.zeros_like(centred), centred)
    return spread(_scaled(centred, rewards, group, scale, ddof, eps), mask)


def _scaled(
    centred: Tensor, rewards: Tensor, group: Tensor, scale: str, ddof: int, eps: float
) -> Tensor:
    if not eps >= 0:
        raise ValueError(f"eps={eps}; it is at least 0")
    if scale == "none":
        return centred
    if scale == "std":
        return _divided(centred, group_std(rewards, group, ddof) + eps)
    if scale == "batch":
        std = masked_var(rewards, torch.ones_like(rewards), ddof).sqrt()
        return _divided(centred, std + eps)
    raise ValueError(f"scale={scale!r}; it may be std, none or batch")


def _divided(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, and 0 where the scale is 0: a zero std never divides. NaN stays NaN."""
    return torch.where(scale == 0, torch.zeros_like(x), x / scale)


rloo = alias(
    group,
    "rloo",
    """S less the mean reward of its siblings (RLOO).

    = G/(G-1) (S - group mean). Ahmadian et al. 2402.14740 section 2.3.
    """,
    baseline="loo",
    scale="none",
    ddof=1,  # nothing is divided: without a scale neither of the two does anything
    eps=0.0,
)


@normalize
def batch_std(
    advantages: Tensor, mask: Tensor, *, ddof: Literal[0, 1] = 1, eps: float = 1e-4
) -> Tensor:
    """A / (std over the rows of the row's mean advantage + eps), no shift.

    For centred advantages: without a baseline equal rewards have no std, and are divided by eps.

    The scale of TRL's ``scale_rewards="batch"``, taken of the advantages instead of the rewards.
    """
    row = masked_mean(advantages, mask, 1)
    std = masked_var(row, (mask.sum(1) > 0).to(mask.dtype), ddof).sqrt()
    if not eps >= 0:
        raise ValueError(f"eps={eps}; it is at least 0")
    return _divided(advantages, std + eps)


_R1_BETA = ".001: DeepSeek-R1 as TRL's documentation reports it, and verl's default"
_VERL = "verl's default; 2402.03300 gives none"


_WHOLE_ROW = {"credit": "sequence", "when": "before"}
_FRESH = "1: without a ratio only a fresh rollout is unbiased"
_PPO = "1707.06347 section 6.1, table 1"
_CLIP = {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.2}
_CLIP_SOURCE = {"surrogate.eps_low": _PPO, "surrogate.eps_high": _PPO}


@recipes
def named() -> Mapping[str, Mapping[str, Any]]:
    grpo_group = {"name": "group", "baseline": "mean", "scale": "std", "ddof": 1, "eps": 1e-6}
    return {
        "grpo": {
            "doc": "Group mean and std, token ratio, PPO-Clip, mean of row means, k3 in the loss.",
            "advantage": grpo_group,
            "ratio": "token",
            "surrogate": _CLIP,
            "aggregate": "sequence_mean",
            "kl": {"name": "in_loss", "estimator": "k3", "beta": 0.001, "weight": "none"},
            "source": {
                "recipe": "2402.03300 eqs. 3-4",
                "advantage.baseline": "2402.03300 section 4.1.2",
                "advantage.scale": "2402.03300 section 4.1.2",
                **dict.fromkeys(("advantage.ddof", "advantage.eps"), _VERL),
                **_CLIP_SOURCE,
                "kl.estimator": "2402.03300 eq. 4",
                "kl.beta": _R1_BETA,
                "kl.weight": "2402.03300 eq. 4: no ratio on the KL term",
            },
        },
        "dr_grpo": {
            "doc": "GRPO without its two biases: no std, a constant divisor.",
            "advantage": {"name": "group", "baseline": "mean", "scale": "none"},
            "ratio": "token",
            "surrogate": _CLIP,
            "aggregate": "constant",
            "source": {
                "recipe": "2503.20783 section 3.2",
                "advantage.baseline": "2503.20783 section 3.2",
                "advantage.scale": "2503.20783 section 3.2: no division by the std",
                **_CLIP_SOURCE,
            },
        },
        "rloo": {
            "doc": "Leave-one-out baseline, sequence REINFORCE, k1 taken off the reward.",
            "advantage": "rloo",
            "ratio": "none",
            "surrogate": "reinforce",
            "aggregate": "sequence_sum",
            "kl": {"name": "in_reward", "estimator": "k1", "beta": 0.03, **_WHOLE_ROW},
            "loop": {"group_size": 4, "epochs": 1, "minibatches": 1},
            "source": {
                "recipe": "2402.14740 section 2.3",
                "kl.estimator": "2402.14740 eq. 3",
                "kl.beta": "2402.14740 appendix C, training details",
                "kl.credit": "2402.14740: the whole response is one action",
                "kl.when": "2402.14740: the penalty is part of the reward",
                "loop.epochs": _FRESH,
                "loop.minibatches": _FRESH,
                "loop.group_size": "2402.14740 tries k = 2 and 4",
            },
        },
    }
