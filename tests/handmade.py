"""Batches and benches by hand for the rollout's and the loss's tests."""

from __future__ import annotations

from typing import Any

import torch
from cases import PLAIN, f64
from torch import Tensor

import lab
from lab.bench import Bench
from lab.recipe import Recipe
from lab.shelf import Shelf, installed
from lab.step import complete

CENTRED = {"name": "group", "scale": "none"}
GAE = {"name": "gae", "gamma": 1.0, "lam": 0.95}


def bench(*plugins: Any, **slots: Any) -> Bench:
    shelf = Shelf.installed(plugins) if plugins else installed()
    return Bench(Recipe.of({**PLAIN, **slots}, "test", shelf), shelf)


def batch(mask: Tensor, **more: Any) -> Any:
    """A step with one group, a policy that has not moved, and nobody cut."""
    rows = mask.shape[0]
    given = {
        "logp": -mask,
        "old_logp": -mask,
        "ref_logp": -mask,
        "mask": mask,
        "group": torch.zeros(rows, dtype=torch.int64),
        "stop_reason": torch.zeros(rows, dtype=torch.int64),
        "budget": 8,
    }
    return complete({**given, **more})


def rows_of_one(*rewards: float, **more: Any) -> Any:
    return batch(torch.ones(len(rewards), 1, dtype=torch.float64), rewards=f64(*rewards), **more)


def close(got: Tensor, want: Any, tolerance: float = 1e-12) -> None:
    due = torch.as_tensor(want, dtype=torch.float64)
    torch.testing.assert_close(got, due, rtol=0, atol=tolerance)


def spies(seen: list[tuple[str, Any]]) -> list[Any]:
    """A component on each rollout hook that notes what it was given; each adds to the rewards."""

    @lab.keep(name="spy")
    def spy_keep(rewards: Tensor) -> Tensor:
        """See the rewards."""
        seen.append(("keep", rewards))
        return rewards > -100

    @lab.shape_reward(name="spy")
    def spy_shape(rewards: Tensor) -> Tensor:
        """Add 10."""
        seen.append(("shape_reward", rewards))
        return rewards + 10

    @lab.kl_reward(name="spy")
    def spy_kl(old_logp: Tensor) -> Tensor:
        """Cost 100 a token."""
        seen.append(("kl_reward", old_logp))
        return torch.full_like(old_logp, 100)

    @lab.advantage(name="spy")
    def spy_advantage(rewards: Tensor, token_rewards: Tensor) -> Tensor:
        """Each token's reward."""
        seen.append(("advantage", rewards))
        return token_rewards

    @lab.critic_target(name="spy")
    def spy_target(advantages: Tensor, values: Tensor) -> Tensor:
        """Raw advantage plus value."""
        seen.append(("critic_target", advantages))
        return advantages + values

    @lab.normalize(name="spy")
    def spy_normalize(advantages: Tensor) -> Tensor:
        """Take 1000 off."""
        seen.append(("normalize", advantages))
        return advantages - 1000

    return [spy_keep, spy_shape, spy_kl, spy_advantage, spy_target, spy_normalize]
