"""Masked and grouped reductions that estimators share.

All of them are gap-aware (only mask-1 tokens count), group by id (never by position) and exact
for constants: the mean of equal numbers is that number and their deviation from it is exactly 0,
also in float32. A plain mean leaves a residue there, which a later division by its own standard
deviation turns into large advantages (eight rewards of .3 in float32: .0289 in place of 0). So
each reduction takes the smallest value off first. Every std names its ddof and has two passes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The sum of x over mask-1 tokens: a scalar, or along `dim`; junk off the mask is left out."""
    kept = torch.where(mask.bool(), x, torch.zeros_like(x))
    return kept.sum() if dim is None else kept.sum(dim, keepdim=keepdim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The mean of x over mask-1 tokens: a scalar, or along `dim`; 0 where there is no token."""
    if not x.numel():
        return masked_sum(x, mask, dim, keepdim)  # zeros of the right shape
    count = mask.sum() if dim is None else mask.sum(dim, keepdim=True)
    smallest = _smallest(x, mask.bool())
    low = smallest.amin() if dim is None else smallest.amin(dim, keepdim=True)
    low = torch.where(count > 0, low, torch.zeros_like(low))
    mean = low + masked_sum(x - low, mask, dim, keepdim=True) / count.clamp(min=1)
    return mean if dim is None or keepdim else mean.squeeze(dim)


def _smallest(x: Tensor, on: Tensor) -> Tensor:
    # detached for a smaller graph; the gradient is the mean's either way: 1/n + (1 - n/n) dlow
    return torch.where(on, x, torch.full_like(x, torch.inf)).detach()


def masked_var(x: Tensor, mask: Tensor, ddof: int) -> Tensor:
    """The two-pass variance of x over mask-1 tokens, divided by N - ddof; 0 for N <= ddof."""
    centred = torch.where(mask.bool(), x - masked_mean(x, mask), torch.zeros_like(x))
    return masked_sum(centred * centred, mask) / (mask.sum() - ddof).clamp(min=1)


def group_index(group: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's group as 0, 1, ... and the number of rows in it: [B], [B]; ids: any integers."""
    _, index, count = torch.unique(group, return_inverse=True, return_counts=True)
    return index, count[index]


def group_mean(x: Tensor, group: Tensor) -> Tensor:
    """The mean of x [B] over the rows with the same id, given to each row: [B]."""
    index, count = group_index(group)
    low = _group_min(x, index)
    return low + _group_sum(x - low, index) / count


def sibling_mean(x: Tensor, group: Tensor) -> Tensor:
    """The mean of x [B] over the *other* rows with the same id: [B]; 0 where there is none."""
    index, count = group_index(group)
    low = _group_min(x, index)
    others = low + (_group_sum(x - low, index) - (x - low)) / (count - 1).clamp(min=1)
    return torch.where(count > 1, others, torch.zeros_like(others))


def group_std(x: Tensor, group: Tensor, ddof: int) -> Tensor:
    """The two-pass std of x [B] in its group, with n - ddof, for each row: [B]; 0 for n <= ddof."""
    index, count = group_index(group)
    centred = x - group_mean(x, group)
    return (_group_sum(centred * centred, index) / (count - ddof).clamp(min=1)).sqrt()


def _group_sum(x: Tensor, index: Tensor) -> Tensor:
    sums = x.new_zeros(index.numel()).index_add(0, index, x)
    return sums[index]


def _group_min(x: Tensor, index: Tensor) -> Tensor:
    low = x.new_zeros(index.numel()).scatter_reduce(0, index, x, "amin", include_self=False)
    return low[index]


def to_go(x: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """The discounted sum of x from each token on: [B,T].

    Only mask-1 tokens count and discount; a gap carries the running sum through, so a row with
    observations equals the same row without them.
    """
    on = mask.bool()
    total = x.new_zeros(x.shape[0])
    columns = []
    for t in reversed(range(x.shape[1])):
        total = torch.where(on[:, t], x[:, t] + gamma * total, total)
        columns.append(total)
    return torch.stack(columns[::-1], 1) if columns else torch.zeros_like(x)


def at_last_token(x: Tensor, mask: Tensor) -> Tensor:
    """x [B] on each row's last mask-1 token, 0 elsewhere: [B,T]; none on a row without tokens."""
    on = mask.bool()
    if not mask.numel():
        return torch.zeros_like(mask)
    position = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(on, position, -1).amax(1, keepdim=True)
    return torch.where(on & (position == last), x[:, None], x.new_zeros(()))


def spread(x: Tensor, mask: Tensor) -> Tensor:
    """x [B] on each of its row's mask-1 tokens, 0 elsewhere: [B,T]."""
    return torch.where(mask.bool(), x[:, None], x.new_zeros(()))
