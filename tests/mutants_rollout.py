"""Wrong components of the rollout's hooks, one planted mistake each (see mutants.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import lab
from lab import spread, to_go

# --- P1, P3, P17, P20: form, junk, precision, inputs ----------------------------------------------


@lab.advantage
def one_column(rewards: Tensor) -> Tensor:
    """[B,1] for [B,T]: it broadcasts to the right numbers, in a bench."""
    return rewards[:, None]


@lab.kl_reward
def upcast(old_logp: Tensor, ref_logp: Tensor) -> Tensor:
    """float64 for float32."""
    return old_logp.double() - ref_logp.double()


@lab.shape_reward
def upcast_lengths(lengths: Tensor, budget: int) -> Tensor:
    """float64 whatever the rest has; no input tells."""
    return -lengths.double() / budget


@lab.advantage
def with_grad(rewards: Tensor, mask: Tensor) -> Tensor:
    """An advantage with a graph of its own."""
    with torch.enable_grad():
        return spread(rewards.clone().requires_grad_() * 1, mask)


@lab.normalize
def unmasked_mean(advantages: Tensor) -> Tensor:
    """The mean over pads, too."""
    return advantages - advantages.mean()


@lab.advantage
def one_pass_variance(rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """E[x^2] - E[x]^2."""
    mean, square = lab.group_mean(rewards, group), lab.group_mean(rewards**2, group)
    std = (square - mean**2).clamp(min=0).sqrt()
    return spread((rewards - mean) / (std + 1e-6), mask)


@lab.shape_reward
def rewards_in_place(rewards: Tensor) -> Tensor:
    """The caller's tensor edited."""
    return rewards.sub_(0.5)


# --- P5: rows and ids ----------------------------------------------------------------------------


@lab.advantage
def by_position(rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """Groups as equal stretches of rows."""
    size = -(-len(rewards) // len(group.unique()))
    return spread(rewards - lab.group_mean(rewards, torch.arange(len(rewards)) // size), mask)


@lab.advantage
def consecutive(rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """A new group wherever the id changes."""
    turn = torch.cat([group[:1] * 0, (group[1:] != group[:-1]).long()])
    return spread(rewards - lab.group_mean(rewards, turn.cumsum(0)), mask)


@lab.advantage
def first_id(rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """The group with the smallest id counts double."""
    return spread(rewards * (1 + (group == group.min())), mask)


@lab.advantage
def against_the_row_before(rewards: Tensor, mask: Tensor) -> Tensor:
    """The neighbour as baseline."""
    return spread(rewards - rewards.roll(1), mask)


# --- P12, P13: groups ----------------------------------------------------------------------------


def _each(rewards: Tensor, group: Tensor, how: Any) -> Tensor:
    out = torch.zeros_like(rewards)
    for i in group.unique():
        out[group == i] = how(rewards[group == i])
    return out


@lab.advantage
def residue(rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """A plain mean and a std of its rounding error."""
    deviation = _each(rewards, group, lambda r: r - r.mean())
    std = _each(rewards, group, lambda r: ((r - r.mean()) ** 2).mean().sqrt())
    return spread(deviation / (std + 1e-9), mask)


@lab.advantage
def nan_alone(rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """0/0 in a group of one."""
    std = _each(rewards, group, lambda r: (((r - r.mean()) ** 2).sum() / (len(r) - 1)).sqrt())
    return spread((rewards - lab.group_mean(rewards, group)) / (std + 1e-6), mask)


@lab.advantage
def raw_alone(rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """A group of one keeps its raw reward."""
    return spread(rewards - lab.sibling_mean(rewards, group), mask)


# --- P14, P15: time ------------------------------------------------------------------------------


@lab.advantage
def decays_on_gaps(token_rewards: Tensor, mask: Tensor, *, gamma: float = 0.9) -> Tensor:
    """Every column is a step."""
    total, columns = torch.zeros_like(token_rewards[:, 0]), []
    for t in reversed(range(mask.shape[1])):
        total = token_rewards[:, t] * mask[:, t] + gamma * total
        columns.append(total)
    return torch.stack(columns[::-1], 1)


@lab.advantage
def first_column_pays(token_rewards: Tensor, mask: Tensor) -> Tensor:
    """The position in the tensor in place of that in the row."""
    return to_go(token_rewards, mask) / (1 + torch.arange(mask.shape[1]))


def _residuals(token_rewards: Tensor, values: Tensor, mask: Tensor, end: Tensor) -> Tensor:
    on, following, columns = mask.bool(), end, []
    for t in reversed(range(mask.shape[1])):
        columns.append(token_rewards[:, t] + following - values[:, t])
        following = torch.where(on[:, t], values[:, t], following)
    return torch.stack(columns[::-1], 1)


@lab.advantage
def never_bootstraps(token_rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """A cut is taken for an end."""
    return _residuals(token_rewards, values, mask, torch.zeros_like(values[:, 0]))


@lab.advantage
def guesses_from_the_width(token_rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """A row that fills the width is taken for a cut one."""
    return _residuals(token_rewards, values, mask, values[:, -1] * mask[:, -1])


@lab.advantage
def one_bootstrap_for_all(
    token_rewards: Tensor, values: Tensor, bootstrap: Tensor, mask: Tensor
) -> Tensor:
    """A cut row's future reaches the others."""
    return _residuals(token_rewards, values, mask, bootstrap.mean().expand_as(bootstrap))
