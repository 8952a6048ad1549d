"""REINFORCE: the score function, no baseline, no ratio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lab import advantage, recipes, surrogate, to_go


@advantage(name="reinforce")
def reward_to_go(token_rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """The discounted reward from each token on, no baseline.

    A_t = sum_{k >= t} gamma^(k-t) R_k (Sutton & Barto, 2nd ed., section 13.3, without its gamma^t).
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma={gamma}; it lies in [0, 1]")
    return to_go(token_rewards, mask, gamma)


@surrogate(name="reinforce")
def score_function(logp: Tensor, advantages: Tensor) -> Tensor:
    """A log p: pull A whatever the ratio; unbiased for fresh samples only (Williams 1992)."""
    return advantages * logp


@recipes
def named() -> Mapping[str, Mapping[str, Any]]:
    return {
        "reinforce": {
            "doc": "The unbiased estimator: reward to go, no baseline, summed over the sequence.",
            "advantage": {"name": "reinforce", "gamma": 1.0},
            "ratio": "none",
            "surrogate": "reinforce",
            "aggregate": "sequence_sum",
            "loop": {"epochs": 1, "minibatches": 1},
            "source": {
                "recipe": "Williams 1992 section 5 (episodic REINFORCE), baseline 0",
                "loop.epochs": "1: without a ratio only a fresh rollout is unbiased",
                "loop.minibatches": "1: without a ratio only a fresh rollout is unbiased",
                "advantage.gamma": "1: the outcome's return is not discounted over tokens",
            },
        },
    }
