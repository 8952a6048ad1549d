"""Corrections for a sampler whose probabilities are not the trainer's."""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated

from torch import Tensor

from lab import Float, surrogate


@surrogate(wrapper=True, corrects="rollout")
def token_tis(
    old_logp: Tensor,
    rollout_logp: Tensor,
    *,
    cap: Annotated[float, Float(1.0, 10.0, log=True)] = 2.0,
    floor: float = 0.0,
) -> Generator[None, Tensor, Tensor]:
    """Times clamp(exp(old - rollout), floor, cap) a token: truncated importance sampling.

    Cap 2 as in verl, SkyRL, slime and open-instruct. The weight is a constant: both log-probs are
    the rollout's, so nothing in it moves with the policy.
    """
    if not cap > 0 or not 0 <= floor <= cap:
        raise ValueError(f"floor={floor}, cap={cap}; 0 <= floor <= cap and cap positive")
    gain = yield
    return (old_logp - rollout_logp).exp().clamp(floor, cap) * gain
