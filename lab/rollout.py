"""The rollout's side of the objective, once per rollout: tensors in, tensors out.

keep -> shape_reward -> kl_reward -> advantage -> critic_target -> normalize. What comes out is
fixed for all updates on the rollout, and nothing in it has a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lab.bench import Bench
from lab.errors import LabError
from lab.step import Step
from lab.tools import at_last_token, masked_mean, masked_sum, spread, to_go


def prepare(bench: Bench, step: Step) -> Step:
    """The step with `advantages` and, where there is a critic, `returns`; the filters applied.

    `mask` becomes 0 on the rows that a filter refused, `counted` is the mask that the shares count
    (it keeps the rows refused with ``mode = "drop"``). Advantages are normalised here unless the
    slot says ``per = "minibatch"``.
    """
    kept = bench.keep(step)
    rows = kept.stats.nonzero().squeeze(1)
    part = _rows(_shaped(bench, step), rows)
    when = bench.option("kl_reward", "when") if bench.get("kl_reward") else None
    if when == "before":
        part = _paid_before(bench, part)
    raw = bench.advantage(part)
    mask = step["mask"]
    out: Step = {
        **step,
        "mask": mask * kept.rows[:, None].to(mask.dtype),
        "counted": mask * kept.shares[:, None].to(mask.dtype),
    }
    if "rewards" in step:
        rewards = step["rewards"].detach()
        out["shaped_rewards"] = rewards.index_copy(0, rows, part["rewards"])
    if bench.has_critic and "returns" not in step:
        # raw advantages: normalised ones, or those after a KL cost, predict no return
        returns = bench.critic_target({**part, "advantages": raw})
        out["returns"] = torch.zeros_like(mask).index_copy(0, rows, returns)
    advantages = raw - _cost_after(bench, part) if when == "after" else raw
    if bench.option("normalize", "per") == "rollout":
        advantages = bench.normalize({**part, "advantages": advantages})
    out["advantages"] = torch.zeros_like(mask).index_copy(0, rows, advantages)
    return out


def with_rollout_values(step: Step) -> Step:
    """The step as rollout hooks see it: `values` are the rollout's where both are given."""
    return {**step, "values": step["old_values"]} if "old_values" in step else step


def _rows(step: Step, rows: Tensor) -> Step:
    """Some rows of a step, detached: a rollout's numbers train nothing."""
    out: Any = {n: x.detach()[rows] if isinstance(x, Tensor) else x for n, x in step.items()}
    part: Step = out
    return part


def _shaped(bench: Bench, step: Step) -> Step:
    """The step with shaped rewards; a row's change lands on its last mask token."""
    out = with_rollout_values(step)
    if not bench.get("shape_reward"):
        return out
    if "rewards" not in step:
        raise LabError("the recipe shapes rewards, and needs rewards, which were not given")
    rewards = bench.shape_reward(step)
    change = at_last_token(rewards - step["rewards"], step["mask"])
    return {**out, "rewards": rewards, "token_rewards": step["token_rewards"] + change}


def _paid_before(bench: Bench, step: Step) -> Step:
    """The cost taken off the rewards, so that it meets the group's statistics with the score."""
    cost = bench.kl_reward(step)
    total = masked_sum(cost, step["mask"], 1)
    if bench.option("kl_reward", "credit") == "sequence":
        cost = at_last_token(total, step["mask"])
    if "rewards" not in step:
        return step
    rewards, token_rewards = step["rewards"] - total, step["token_rewards"] - cost
    return {**step, "rewards": rewards, "token_rewards": token_rewards}


def _cost_after(bench: Bench, step: Step) -> Tensor:
    """What each token's advantage pays: its own cost, the rest of the row's, or the whole row's."""
    cost, mask = bench.kl_reward(step), step["mask"]
    credit = bench.option("kl_reward", "credit")
    if credit == "to_go":
        cost = to_go(cost, mask)
    elif credit == "sequence":
        cost = spread(masked_sum(cost, mask, 1), mask)
    if bench.option("kl_reward", "centre"):
        # one number for all tokens, whatever they did: a baseline
        cost = cost - masked_mean(cost, mask)
    return torch.where(mask.bool(), cost, torch.zeros_like(cost))
