"""Batches for tests: small ones by hand, ragged ones at random, junk for the masked positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor

from lab.bench import Bench
from lab.recipe import Recipe
from lab.shelf import Shelf

PI = (0.5, 0.3, 0.2)
F = (1.0, 0.0, 0.5)
Q = (0.2, 0.3, 0.5)
#: What may stand off the mask without changing anything.
JUNK = (0.0, 1.0, -200.0, 1e30, torch.inf, -torch.inf, torch.nan)
#: A recipe whose every slot is the plainest there is, to be changed slot by slot.
PLAIN = {
    "advantage": "reinforce",
    "ratio": "token",
    "surrogate": "ppo_unclipped",
    "aggregate": "sequence_sum",
}
PER_TOKEN = (
    *("logp", "old_logp", "rollout_logp", "ref_logp", "values", "old_values", "entropy"),
    "token_rewards",
)


def f64(*numbers: Any) -> Tensor:
    """A float64 tensor; numbers make one of [2], a list of two numbers one of [1,2]."""
    return torch.tensor(numbers, dtype=torch.float64)


def bench(shelf: Shelf, spec: Mapping[str, Any] | None = None, **slots: Any) -> Bench:
    """A bench of PLAIN with some slots changed."""
    return Bench(Recipe.of({**PLAIN, **(spec or {}), **slots}, "test", shelf), shelf)


def tokens(ratios: Any, advantages: Any, **more: Any) -> dict[str, Tensor]:
    """Rows of one token each, with these ratios to the old policy and these advantages."""
    r = torch.as_tensor(ratios, dtype=torch.float64).reshape(-1, 1)
    a = torch.as_tensor(advantages, dtype=torch.float64).reshape(-1, 1).expand_as(r).clone()
    old = torch.full_like(r, -2.0)
    return {
        "logp": (old + r.log()).requires_grad_(),
        "old_logp": old,
        "rollout_logp": old,
        "advantages": a,
        "mask": torch.ones_like(r),
        **more,
    }


@st.composite
def ragged(
    draw: st.DrawFn,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64),
    group_sizes: tuple[int, int] = (1, 16),
    gaps: bool = True,
) -> dict[str, Tensor]:
    """A whole batch: every input of `evaluate`, ragged rows with gaps, unequal groups.

    Ratios lie between .3 and 3 and 1e-3 away from the usual edges, rewards take few values (so
    some groups are constant), every row has a token, truncated rows have a bootstrap.
    """
    dtype = draw(st.sampled_from(dtypes))
    sizes = draw(st.lists(st.integers(*group_sizes), min_size=1, max_size=3))
    rows, width = sum(sizes), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    mask = (torch.arange(width) < lengths[:, None]).double()
    if gaps and draw(st.booleans()):
        hole = torch.rand(rows, width, generator=generator) < 0.3
        hole[torch.arange(rows), lengths - 1] = False
        mask = torch.where(hole, 0.0, mask)
    old = -0.05 - normal(rows, width).abs()
    grid = f64(0.3, 0.55, 0.9, 0.97, 1.0, 1.04, 1.12, 1.45, 2.2, 3.0)
    pick = torch.randint(0, len(grid), (rows, width), generator=generator)
    rewards = f64(0.0, 1.0, 0.3, -0.5)[torch.randint(0, 4, (rows,), generator=generator)]
    cut = torch.rand(rows, generator=generator) < 0.3
    group = torch.repeat_interleave(
        torch.randperm(9, generator=generator)[: len(sizes)], torch.tensor(sizes)
    )
    order = torch.randperm(rows, generator=generator)
    batch = {
        "logp": old + grid[pick].log(),
        "old_logp": old,
        "rollout_logp": old + 0.05 * normal(rows, width),
        "ref_logp": old + 0.3 * normal(rows, width),
        "values": normal(rows, width),
        "old_values": normal(rows, width),
        "entropy": normal(rows, width).abs(),
        "rewards": rewards,
        "bootstrap": normal(rows),
        "mask": mask,
    }
    out: dict[str, Any] = {n: x.to(dtype) for n, x in batch.items()}
    out |= {"group": group[order], "truncated": cut, "stop_reason": torch.where(cut, 2, 0)}
    return {**out, "budget": 8}


def with_junk(batch: Mapping[str, Any], junk: float) -> dict[str, Any]:
    """The same batch with junk in every per-token input off the mask."""
    on = batch["mask"].bool()
    return {
        n: torch.where(on, x.detach(), torch.full_like(x, junk)) if n in PER_TOKEN else x
        for n, x in batch.items()
    }


def gradient(bench: Bench, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The loss and its gradient by logp."""
    from lab.loss import evaluate

    logp = batch["logp"].detach().clone().requires_grad_()
    loss = evaluate(bench, **{**batch, "logp": logp}).loss
    return loss.detach(), torch.autograd.grad(loss, logp)[0]
