"""The entropy bonus."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from lab import Float, extra_loss


@extra_loss(name="entropy")
def entropy_bonus(
    entropy: Tensor, *, coef: Annotated[float, Float(1e-4, 0.1, log=True)] = 0.001
) -> Tensor:
    """-coef H_t: the bonus for an undecided policy (1707.06347 eq. 9; Williams & Peng 1991).

    H is that of the sampling temperature's distribution, live: the gradient flows through it.
    """
    return -coef * entropy
