"""One rollout: prompts, responses, scores, and the tensors that the objective starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.bench import Bench
from lab.errors import LabError
from lab.hookspecs import StopReason
from lab.policy import Policy
from lab.roles import Roles
from lab.samples import Samples
from lab.step import Step, complete
from lab.streams import Streams
from lab.task import Example, Task
from lab.tokens import Sampling
from lab.tools import group_std, masked_mean


@dataclass(frozen=True)
class Scored:
    """Responses with what the verifier said: B rows.

    Attributes:
        examples: the prompt of each row.
        texts: each response up to its end.
        samples: the tokens.
        rewards: [B] the verifier's score.
        token_rewards: [B,T] where the task rewards single steps; None otherwise.
        group: [B] which prompt each row answers.
    """

    examples: list[Example]
    texts: list[str]
    samples: Samples
    rewards: Tensor
    token_rewards: Tensor | None
    group: Tensor

    def rows(self, index: Tensor) -> Scored:
        """Some of the rows, in that order."""
        chosen = index.tolist()
        dense = None if self.token_rewards is None else self.token_rewards[index]
        return Scored(
            [self.examples[i] for i in chosen],
            [self.texts[i] for i in chosen],
            self.samples.rows(index),
            self.rewards[index],
            dense,
            self.group[index],
        )


@dataclass(frozen=True)
class Rollout:
    """A rollout ready for `lab.rollout.prepare`.

    Attributes:
        scored: its rows.
        sampled: every row that was sampled and scored for it: more where a filter refills.
        step: the tensors by name.
        generated_tokens: response tokens sampled for it, those of refused groups included.
        unscored: rows that left because the verifier gave no score.
        batches: batches sampled: more than one where a filter refills.
        rescored: the largest |log ratio| of the re-scoring check; None where it was not made.
    """

    scored: Scored
    sampled: Scored
    step: Step
    generated_tokens: int
    unscored: int
    batches: int
    rescored: float | None


@dataclass(frozen=True)
class Collector:
    """Makes rollouts of one run."""

    bench: Bench
    task: Task
    roles: Roles
    streams: Streams

    @property
    def sampling(self) -> Sampling:
        """What tokens are drawn from."""
        loop = self.bench.recipe.loop
        return Sampling(loop.temperature, loop.top_k, loop.top_p)

    def collect(self, number: int, check: bool) -> Rollout:
        """The rollout of that number.

        A filter that refills samples until the batch is full, within its cap. Where no group at
        all counts, the rollout is the last batch: the filter refuses its rows, and nothing pulls.

        Args:
            number: from 0 on; prompts and sampling depend on it and the seed alone.
            check: score it again first, and refuse where that differs (no update has been made).

        Raises:
            LabError: if the re-scoring differs, or no row has a score.
        """
        behaviour = self.roles.behaviour()
        loop = self.bench.recipe.loop
        kept: list[Scored] = []
        sampled: list[Scored] = []
        groups = generated = unscored = batches = 0
        while batches < self._most_batches():
            part = self._sampled(behaviour, number, batches)
            generated += int(part.samples.mask.sum())
            part, left = _with_scores(part, self._least_rows())
            unscored += left
            sampled.append(part)
            part = part.rows(self._wanted(part))
            batches += 1
            room = loop.prompts - groups
            part, found = _first_groups(part, room)
            groups += found
            kept.append(part)
            if groups >= loop.prompts:
                break
        if not any(len(p.samples) for p in sampled):
            raise LabError(f"rollout {number}: none of the {unscored} rows has a score")
        scored = _joined(kept) if groups else [p for p in sampled if len(p.samples)][-1]
        difference = self._check(scored.samples, behaviour) if check else None
        step = self.step(scored)
        return Rollout(scored, _joined(sampled), step, generated, unscored, batches, difference)

    def step(self, scored: Scored) -> Step:
        """The tensors of a rollout by name."""
        samples, temperature = scored.samples, self.bench.recipe.loop.temperature
        given: dict[str, Any] = {
            # the sampler's own numbers, in float32 the same as a forward pass of the same weights
            "logp": samples.logp,
            "old_logp": samples.logp,
            "rollout_logp": samples.logp,
            "rewards": scored.rewards,
            "token_rewards": scored.token_rewards,
            "group": scored.group,
            "mask": samples.mask,
            "stop_reason": samples.stop_reason,
            "budget": self.task.budget,
        }
        with torch.no_grad():
            if self.roles.reference is not None:
                given["ref_logp"] = self.roles.reference.score(samples, temperature).logp
            values = self.roles.values(samples, temperature)
            if values is not None:
                given["old_values"], given["bootstrap"] = values
        return complete(given)

    def _sampled(self, behaviour: Policy, number: int, batch: int) -> Scored:
        purpose = f".refill{batch}" if batch else ""
        loop = self.bench.recipe.loop
        examples = self.task.draw(
            "train", self.streams.python(f"prompts{purpose}", number), loop.prompts
        )
        samples = behaviour.sample(
            [e.prompt for e in examples],
            loop.group_size,
            self.task.budget,
            self.sampling,
            self.streams.torch(f"sampling{purpose}", number),
            behaviour.stop_ids(self.task.stops),
        )
        group = torch.arange(loop.prompts).repeat_interleave(loop.group_size)
        rows = [examples[i] for i in group.tolist()]
        return scored_by(self.task, behaviour, rows, samples, group + batch * loop.prompts)

    def _most_batches(self) -> int:
        entries = [b for b in self.bench.get("keep") if b.options["refill"]]
        return max([1, *(int(b.options["refill_cap"]) for b in entries)])

    def _wanted(self, part: Scored) -> Tensor:
        """Rows of the groups that count as full for a refilling filter; all rows without one."""
        if self._most_batches() == 1 or not len(part.samples):
            return torch.arange(len(part.samples))
        rows = self.bench.keep(self.step(part)).rows
        ids = torch.unique(part.group[rows])
        return torch.isin(part.group, ids).nonzero().squeeze(1)

    def _least_rows(self) -> int:
        return max([1, *(int(b.declares("needs_group")) for b in self.bench.bound)])

    def _check(self, samples: Samples, behaviour: Policy) -> float:
        from lab.tokens import check_rescored

        with torch.no_grad():
            again = behaviour.score(samples, self.sampling.temperature).logp
        return check_rescored(
            samples.logp, again, samples.mask, behaviour.limit, behaviour.causes()
        )


def scored_by(
    task: Task, policy: Policy, examples: Sequence[Example], samples: Samples, group: Tensor
) -> Scored:
    """Responses with the task's scores; a row without a score carries NaN."""
    texts = policy.texts(samples)
    pairs = list(zip(examples, texts, strict=True))
    scores = [task.score(e, t) for e, t in pairs]
    rewards = torch.tensor([torch.nan if s is None else float(s) for s in scores])
    dense = [task.token_rewards(e, t) for e, t in pairs]
    token_rewards = None
    if dense and dense[0] is not None:
        token_rewards = torch.zeros_like(samples.mask)
        for row, (steps, text) in enumerate(zip(dense, texts, strict=True)):
            written = zip(samples.ids[row].tolist(), samples.mask[row].tolist(), strict=True)
            # an end token has no text
            place = [t for t, (i, on) in enumerate(written) if on and policy.tokenizer.decode([i])]
            if len(place) != len(text):
                raise LabError(
                    f"task {task.name} rewards single characters; the model's tokenizer does not "
                    "write one token a character"
                )
            token_rewards[row, torch.tensor(place, dtype=torch.long)] = torch.tensor(steps)
    return Scored(list(examples), texts, samples, rewards, token_rewards, group)


def _with_scores(part: Scored, least: int) -> tuple[Scored, int]:
    """Rows with a score, of groups that are still large enough; and how many rows left."""
    has = ~part.rewards.isnan()
    if bool(has.all()):
        return part, 0
    ids, counts = torch.unique(part.group[has], return_counts=True)
    has &= torch.isin(part.group, ids[counts >= least])
    return part.rows(has.nonzero().squeeze(1)), int((~has).sum())


def _first_groups(part: Scored, most: int) -> tuple[Scored, int]:
    ids = torch.unique(part.group)
    if len(ids) <= most:
        return part, len(ids)
    inside = torch.isin(part.group, ids[:most])
    return part.rows(inside.nonzero().squeeze(1)), most


def _joined(parts: Sequence[Scored]) -> Scored:
    if len(parts) == 1:
        return parts[0]
    dense = [p.token_rewards for p in parts if p.token_rewards is not None]
    return Scored(
        [e for p in parts for e in p.examples],
        [t for p in parts for t in p.texts],
        Samples.joined([p.samples for p in parts]),
        torch.cat([p.rewards for p in parts]),
        torch.cat(dense) if dense else None,
        torch.cat([p.group for p in parts]),
    )


def numbers(rollout: Rollout, step: Step) -> dict[str, float]:
    """Numbers of a rollout, before its updates.

    Over every sampled row with a score, those that a refilling filter sent away included:
    ``reward``: mean score of the answers; ``reward_std``: its population std; ``response_length``:
    mean tokens, the end token included; ``response_truncated``: share of rows cut at the limit;
    ``zero_variance``: share of groups whose rewards are all equal; ``kept``: share of rows that
    the updates use.

    ``unscored``: rows that left for want of a score; ``batches``: batches sampled;
    ``advantage_abs``: mean |A| over the updates' tokens, as the surrogate sees it.
    """
    rows = rollout.sampled
    rewards, samples = rows.rewards, rows.samples
    ids, first = _first_rows(rows.group)
    spread = group_std(rewards, rows.group, 0)
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
        "response_length": float(samples.mask.sum(1).mean()),
        "response_truncated": float((samples.stop_reason == int(StopReason.LENGTH)).float().mean()),
        "zero_variance": float((spread[first] == 0).sum()) / max(1, len(ids)),
        "kept": float((step["mask"].sum(1) > 0).sum()) / len(samples),
        "unscored": float(rollout.unscored),
        "batches": float(rollout.batches),
        "advantage_abs": float(masked_mean(step["advantages"].abs(), step["mask"])),
    }


def _first_rows(group: Tensor) -> tuple[Tensor, Tensor]:
    ids, index = torch.unique(group, return_inverse=True)
    first = torch.full_like(ids, len(group)).scatter_reduce(
        0, index, torch.arange(len(group)), "amin"
    )
    return ids, first
