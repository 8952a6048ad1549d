"""Filters and reward shaping, and DAPO, which is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from torch import Tensor

from lab import Float, StopReason, keep, recipes, shape_reward


@keep
def zero_variance(rewards: Tensor, group: Tensor) -> Tensor:
    """Keep the groups whose raw rewards differ; others teach nothing (2503.14476 eq. 11)."""
    same = group[:, None] == group[None, :]
    differs = rewards[:, None] != rewards[None, :]
    return (same & differs).any(1)


@keep
def overlong(truncated: Tensor) -> Tensor:
    """Drop the rows that were cut at the length limit (DAPO 2503.14476 section 3.4).

    It may leave one row of a group: with a group advantage say ``stats = "all"``, or
    ``singleton = "zero"`` there.
    """
    return ~truncated


@shape_reward
def soft_overlong(
    rewards: Tensor,
    lengths: Tensor,
    budget: int,
    *,
    length: int | None = None,
    cache: float | None = None,
) -> Tensor:
    """Take up to 1 off answers in the last stretch before the limit (DAPO 2503.14476 eq. 13).

    With limit L (`length`, or the configured budget where it is None) and stretch c (`cache`, in
    tokens; a fifth of L where it is None, which is 4096 of 20480): 0 up to L - c, then
    ((L - c) - n)/c down to -1 at L, and -1 beyond.
    """
    limit = budget if length is None else length
    stretch = limit / 5 if cache is None else cache
    if limit < 1:
        raise ValueError(f"length={length}; a number of tokens, at least 1, or none")
    if not 0 < stretch <= limit:
        raise ValueError(f"cache={cache}; it is positive and at most the limit of {limit} tokens")
    # counted from the limit, so that it is exactly 1 there: the group's std would divide a residue
    return rewards - ((lengths.to(rewards.dtype) - limit) / stretch + 1).clamp(0, 1)


@shape_reward
def no_eos_penalty(
    rewards: Tensor, stop_reason: Tensor, *, penalty: Annotated[float, Float(0.1, 2.0)] = 1.0
) -> Tensor:
    """Take a penalty off answers that ended without EOS, by stop reason.

    Subtracted, as in TRL's PPO; the N+ details (2403.17031) set the score to -1 instead.
    A stop string and a cut both count: neither generated an EOS. Never told by a token's id, which
    fails where pad and EOS share one.
    """
    if not penalty >= 0:
        raise ValueError(f"penalty={penalty}; it is at least 0")
    return rewards - penalty * (stop_reason != StopReason.EOS).to(rewards.dtype)


@recipes
def named() -> Mapping[str, Mapping[str, Any]]:
    paper = "2503.14476"
    return {
        "dapo": {
            "doc": "Clip-higher, dynamic sampling, mean over tokens, soft length penalty.",
            "filter": [{"name": "zero_variance", "refill": True}],
            "shape": [{"name": "soft_overlong", "cache": "none"}],
            "advantage": {
                "name": "group",
                "baseline": "mean",
                "scale": "std",
                "ddof": 1,
                "eps": 1e-6,
            },
            "ratio": "token",
            "surrogate": {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.28},
            "aggregate": "token_mean",
            "source": {
                "recipe": f"{paper} eq. 8",
                "filter.zero_variance.refill": f"{paper} section 3.2, dynamic sampling",
                "shape.soft_overlong.cache": f"{paper} section 4.1: 4096 of 20480, a fifth",
                "advantage.baseline": f"{paper} eq. 9",
                "advantage.scale": f"{paper} eq. 9",
                "advantage.ddof": f"verl's default; {paper} gives none",
                "advantage.eps": f"verl's default; {paper} gives none",
                "surrogate.eps_low": f"{paper} section 4.1",
                "surrogate.eps_high": f"{paper} section 4.1",
            },
        },
    }
