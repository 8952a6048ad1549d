"""Held-out evaluation: fresh samples at temperature 1, over the whole vocabulary."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch

from lab.bench import Bench
from lab.collect import Scored, scored_by
from lab.hookspecs import StopReason
from lab.policy import Policy
from lab.roles import Roles
from lab.step import Step, complete
from lab.streams import Streams
from lab.task import Example, Task
from lab.tokens import Sampling

#: Rows a forward pass: a large evaluation must not need more memory than a rollout.
CHUNK = 512
#: Answers of each evaluation that are kept to be read.
SHOWN = 8


@dataclass(frozen=True)
class HeldOut:
    """What an evaluation found.

    Attributes:
        metrics: its numbers.
        answers: the first rows, to be read: prompt, response, score, how it ended.
    """

    metrics: dict[str, float]
    answers: list[dict[str, Any]]


def evaluate(
    bench: Bench, task: Task, roles: Roles, streams: Streams, prompts: int, number: int
) -> HeldOut:
    """One answer to each held-out prompt, at temperature 1.

    The prompts are the same at each evaluation of a run (and of every run of that seed and task);
    the samples are fresh. ``score`` is the mean over prompts: prompts are nested in a run, and
    runs are what intervals count. Rows without a score count 0, and ``unscored`` says their share.

    Args:
        bench: whose observers of this moment record.
        task: its held-out prompts.
        roles: whose policy answers.
        streams: the run's.
        prompts: how many.
        number: of the evaluation: the rollouts so far.
    """
    examples = task.draw("held_out", streams.python("held_out"), prompts)
    generator = streams.torch("evaluation", number)
    sums: dict[str, float] = {}
    first: Scored | None = None
    for start in range(0, prompts, CHUNK):
        part = examples[start : start + CHUNK]
        scored = _sampled(roles.policy, task, part, generator)
        sums = {n: sums.get(n, 0.0) + x for n, x in _sums(scored).items()}
        first = first or scored
    assert first is not None
    metrics = {n: x / prompts for n, x in sums.items()}
    exact = exact_score(roles.policy, task)
    if exact is not None:
        metrics["exact_score"] = exact
    return HeldOut(metrics | bench.observe("eval", _step(first)), _answers(first))


@torch.no_grad()
def _sampled(
    policy: Policy, task: Task, examples: list[Example], generator: torch.Generator
) -> Scored:
    prompts, stops = [e.prompt for e in examples], policy.stop_ids(task.stops)
    samples = policy.sample(prompts, 1, task.budget, Sampling(), generator, stops)
    return scored_by(task, policy, examples, samples, torch.arange(len(examples)))


def _sums(scored: Scored) -> dict[str, float]:
    """Sums over rows.

    ``score``; ``unscored``: rows without one; ``length``: tokens, the end token included;
    ``truncated``: rows cut at the limit; ``sampled_nll``: -log p of the sampled answer, whose mean
    estimates the entropy of whole answers.
    """
    samples = scored.samples
    found = {
        "score": scored.rewards.nan_to_num(0.0).sum(),
        "unscored": scored.rewards.isnan().sum(),
        "length": samples.mask.sum(),
        "truncated": (samples.stop_reason == int(StopReason.LENGTH)).sum(),
        "sampled_nll": -samples.logp.sum(),
    }
    return {n: float(x) for n, x in found.items()}


def _step(scored: Scored) -> Step:
    """What observers of an evaluation see: its first rows."""
    samples = scored.samples
    return complete(
        {
            "logp": samples.logp,
            "rewards": scored.rewards.nan_to_num(0.0),
            "group": scored.group,
            "mask": samples.mask,
            "stop_reason": samples.stop_reason,
        }
    )


@torch.no_grad()
def exact_score(policy: Policy, task: Task) -> float | None:
    """J, summed over every response of a task that can be enumerated: no sample in it.

    Of the tasks that have one prompt; None for the others.
    """
    every = task.responses()
    if every is None or not task.shared_prompts:
        return None
    (example,) = task.draw("held_out", Streams({}, 0).python("exact"), 1)
    given = policy.given([example.prompt] * len(every), every, task.budget, task.stops)
    p = policy.score(given, temperature=1.0).logp.double().sum(1).exp()
    scores = [task.score(example, response) for response in every]
    return float(sum(float(q) * (s or 0.0) for q, s in zip(p, scores, strict=True)))


def _answers(scored: Scored) -> list[dict[str, Any]]:
    """The first rows, to be read."""
    rows = zip(
        scored.examples,
        scored.texts,
        scored.rewards.tolist(),
        scored.samples.stop_reason.tolist(),
        strict=True,
    )
    return [
        {
            "prompt": e.prompt,
            "response": text,
            "score": None if math.isnan(reward) else reward,
            "stop_reason": StopReason(reason).name.lower(),
        }
        for e, text, reward, reason in itertools.islice(rows, SHOWN)
    ]
