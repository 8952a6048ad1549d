"""SAPO: a smooth gate in place of the clip, steeper for negative advantages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from torch import Tensor

from lab import Float, recipes, surrogate

Temperature = Annotated[float, Float(0.5, 4.0, log=True)]


@surrogate
def sapo(
    ratio: Tensor, advantages: Tensor, *, tau_pos: Temperature = 1.0, tau_neg: Temperature = 1.05
) -> Tensor:
    """4/tau sigmoid(tau (r - 1)) A, tau by the sign of A: the pull fades with distance (SAPO).

    Pull 4 p (1 - p) r A with p = sigmoid(tau (r - 1)), so A at r = 1 for any tau. 2511.20347.
    """
    if not tau_pos > 0 or not tau_neg > 0:
        raise ValueError(f"tau_pos={tau_pos}, tau_neg={tau_neg}; both are positive")
    positive = torch.full_like(advantages, tau_pos)
    tau = torch.where(advantages > 0, positive, torch.full_like(advantages, tau_neg))
    return (tau * (ratio - 1)).sigmoid() * 4 / tau * advantages


@recipes
def named() -> Mapping[str, Mapping[str, Any]]:
    return {
        "sapo": {
            "doc": "Group advantage, token ratio through a soft gate, mean of row means.",
            "advantage": {
                "name": "group",
                "baseline": "mean",
                "scale": "std",
                "ddof": 1,
                "eps": 1e-6,
            },
            "ratio": "token",
            "surrogate": {"name": "sapo", "tau_pos": 1.0, "tau_neg": 1.05},
            "aggregate": "sequence_mean",
            "source": {
                "recipe": "2511.20347",
                "advantage.baseline": "2511.20347",
                "advantage.scale": "2511.20347",
                "advantage.ddof": "verl's default; 2511.20347 gives none",
                "advantage.eps": "verl's default; 2511.20347 gives none",
                "surrogate.tau_pos": "2511.20347",
                "surrogate.tau_neg": "2511.20347",
            },
        },
    }
