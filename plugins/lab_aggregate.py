"""How much a token weighs in the loss: shares [B,T], constants of the optimisation batch.

B counts the rows that keep a token, N the tokens, P the groups: totals of the whole batch, so a
micro-batch adds its slice of the sum and divides by nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lab import aggregate


def _rows(mask: Tensor) -> Tensor:
    return (mask.sum(1) > 0).sum().clamp(min=1)


@aggregate
def token_mean(mask: Tensor) -> Tensor:
    """1/N: the mean over the batch's tokens; a long row weighs more (DAPO 2503.14476 eq. 8)."""
    return mask / mask.sum().clamp(min=1)


@aggregate
def sequence_mean(mask: Tensor) -> Tensor:
    """1/(n_i B): the mean over a row's tokens, then over rows (GRPO 2402.03300 eq. 3)."""
    return mask / (mask.sum(1, keepdim=True).clamp(min=1) * _rows(mask))


@aggregate
def sequence_sum(mask: Tensor) -> Tensor:
    """1/B: the sum over a row's tokens, the mean over rows (the score function's own)."""
    return mask / _rows(mask)


@aggregate
def constant(mask: Tensor, budget: int, *, length: int | None = None) -> Tensor:
    """1/(B length): a constant in place of the row's length (Dr. GRPO 2503.20783 section 3.2).

    `length` is the configured response budget where it is None: never the padded width, which
    would make the gradient depend on the longest row at hand.
    """
    if length is not None and length < 1:
        raise ValueError(f"length={length}; a number of tokens, at least 1, or none")
    return mask / (_rows(mask) * (budget if length is None else length))


@aggregate
def prompt_mean(mask: Tensor, group: Tensor) -> Tensor:
    """1/(N_group P): the mean over a prompt's tokens, then over prompts (ScaleRL 2510.13786)."""
    tokens = mask.sum(1)
    same = (group[:, None] == group[None, :]).to(mask.dtype)
    of_group = same @ tokens
    # each prompt counts once: its kept rows carry 1/(rows of the group) each
    rows = (tokens > 0).to(mask.dtype)
    prompts = torch.where(rows > 0, rows / (same @ rows).clamp(min=1), torch.zeros_like(rows)).sum()
    return mask / (of_group[:, None].clamp(min=1) * prompts.clamp(min=1))
