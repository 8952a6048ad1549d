"""CISPO: the importance weight is capped and detached, so no token loses its pull."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from torch import Tensor

from lab import Float, recipes, surrogate


@surrogate(bounds=lambda floor, cap: (floor, cap))
def cispo(
    ratio: Tensor,
    logp: Tensor,
    advantages: Tensor,
    *,
    cap: Annotated[float | None, Float(1.0, 10.0, log=True)] = 5.0,
    floor: float | None = None,
) -> Tensor:
    """sg(clip(r, floor, cap)) A log p: beyond the cap a token keeps pull cap A (CISPO).

    The bounds are an interval of the ratio; None: that side is inactive. MiniMax-M1 2506.13585
    eqs. 4-5, which leave the floor inactive and the cap undisclosed; cap 5 is one of the three
    (4, 5, 8) that ScaleRL (2510.13786) finds alike.
    """
    if cap is not None and not cap >= 1:
        raise ValueError(
            f"cap={cap}; below 1 it would hold back fresh tokens too, so it is at least 1"
        )
    if floor is not None and not 0 <= floor <= 1:
        raise ValueError(f"floor={floor}; it lies in [0, 1]")
    weight = ratio if cap is None and floor is None else ratio.clamp(floor, cap)
    # the weight is a constant: attached, the product rule would add A log p dr and train it
    return weight.detach() * advantages * logp


@recipes
def named() -> Mapping[str, Mapping[str, Any]]:
    return {
        "cispo": {
            "doc": "Group advantage, capped detached weight on log p, mean over tokens.",
            "advantage": {
                "name": "group",
                "baseline": "mean",
                "scale": "std",
                "ddof": 1,
                "eps": 1e-6,
            },
            "ratio": "token",
            "surrogate": {"name": "cispo", "cap": 5.0, "floor": "none"},
            "aggregate": "token_mean",
            "source": {
                "recipe": "2506.13585 eqs. 4-5",
                "advantage.baseline": "2506.13585 section 3.1",
                "advantage.scale": "2506.13585 section 3.1",
                "advantage.ddof": "verl's default; 2506.13585 gives none",
                "advantage.eps": "verl's default; 2506.13585 gives none",
                "surrogate.cap": "ScaleRL 2510.13786: 4, 5, 8 alike; 2506.13585 gives none",
                "surrogate.floor": "2506.13585 section 3.1: no lower bound",
            },
        },
    }
