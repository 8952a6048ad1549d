"""Runs that take a fraction of a second, and the parts that they are made of."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab import records, warm
from lab.bench import Bench
from lab.collect import Collector, Rollout
from lab.policy import Policy
from lab.recipe import Recipe, Use, load
from lab.records import Moment
from lab.roles import Roles
from lab.rollout import prepare
from lab.settings import Budget, Settings, Spec
from lab.shelf import Shelf, installed
from lab.step import Step
from lab.streams import Streams
from lab.task import Task, build, record
from lab.train import Result, prepared, train
from lab.update import Updated, update

LOOP = {"prompts": 4, "group_size": 4, "epochs": 2, "minibatches": 2}
#: Random weights earn something on it, so there is a gradient from the first rollout on.
SIGNAL = Use(name="chain", settings={"dense": True, "symbols": 3, "length": 3})
#: Random weights earn nothing on it: four digits in order.
SILENT = Use(name="reverse", settings={"digits": 4})
ONE_UPDATE = {"epochs": 1, "minibatches": 1}
SGD = {"optimizer": "sgd", "lr": 0.1, "max_grad_norm": 0.0}


def shelf_of(plugins: Iterable[Any] = ()) -> Shelf:
    """The installed shelf, with these components or files beside it."""
    if any(isinstance(p, Path) for p in plugins):
        return Shelf.installed(plugins)  # a file may have changed
    return _kept(tuple(plugins)) if plugins else installed()


@functools.lru_cache(maxsize=8)
def _kept(plugins: tuple[Any, ...]) -> Shelf:
    return Shelf.installed(plugins)


def recipe(given: Any = "grpo", plugins: Iterable[Any] = (), **loop: Any) -> Recipe:
    """A recipe by name, or a table over `grpo`, in a loop of 4 x 4 rows and 2 x 2 updates."""
    shelf = shelf_of(plugins)
    if isinstance(given, Mapping):
        given = load({"base": "grpo", **given}, shelf)
    return load(given, shelf).override({"loop": {**LOOP, **loop}}, shelf)


def spec(
    given: Any = "grpo",
    *,
    plugins: Iterable[Any] = (),
    task: Use = SIGNAL,
    seed: int = 1,
    observers: Iterable[str] | None = None,
    loop: Mapping[str, Any] | None = None,
    rollouts: int = 2,
    **settings: Any,
) -> Spec:
    """A run of two rollouts, no warm start, 16 held-out prompts."""
    chosen: dict[str, Any] = {"budget": Budget(rollouts=rollouts), "eval_every": 100}
    chosen |= {"warm_start": 0.0, "eval_prompts": 16, **settings}
    more: dict[str, Any] = {}
    if observers is not None:
        more["observers"] = tuple(Use(name=n) for n in observers)
    made = recipe(given, plugins, **(loop or {}))
    return Spec(recipe=made, task=task, seed=seed, settings=Settings(**chosen), **more)


def go(folder: Path, given: Any = "grpo", *, plugins: Iterable[Any] = (), **more: Any) -> Result:
    """Run a small run into a folder."""
    return train(prepared(spec(given, plugins=plugins, **more), shelf_of(plugins)), folder)


def moments(folder: Path, at: str) -> list[Moment]:
    """A run's lines of one kind."""
    return [m for m in records.moments(folder) if m.at == at]


def series(folder: Path, at: str, name: str) -> list[float]:
    """One number over a run."""
    return [m.metrics[name] for m in moments(folder, at)]


@dataclass(frozen=True)
class Parts:
    """What a run is made of, to be moved by hand."""

    bench: Bench
    task: Task
    streams: Streams
    roles: Roles
    collector: Collector

    @classmethod
    def of(
        cls,
        given: Any = "grpo",
        *,
        plugins: Iterable[Any] = (),
        task: Use | Task = SIGNAL,
        seed: int = 1,
        observers: Iterable[str] = (),
        **loop: Any,
    ) -> Parts:
        """The parts of a small run, before its first rollout."""
        shelf = shelf_of(plugins)
        bench = Bench(recipe(given, plugins, **loop), shelf, [Use(name=n) for n in observers])
        made = build(task.name, task.settings, shelf) if isinstance(task, Use) else task
        streams = Streams(record(made), seed)
        roles = Roles.of(warm.start("nano", made, 0.0, streams)[0], bench)
        return cls(bench, made, streams, roles, Collector(bench, made, roles, streams))

    def rollout(self, number: int = 0) -> tuple[Rollout, Step]:
        """A rollout, and its tensors after the rollout's hooks."""
        rollout = self.collector.collect(number, check=number == 0)
        return rollout, prepare(self.bench, rollout.step)

    def update(
        self, rollout: Rollout, step: Step, rows: Iterable[int] = (), warming: bool = False
    ) -> Updated:
        """One optimiser step on some rows, all of them where none are given."""
        index = torch.tensor(list(rows) or range(len(step["group"])))
        return update(self.bench, self.roles, rollout.scored.samples, step, index, warming)

    def weights(self) -> Tensor:
        """The policy's weights, in one vector of their own."""
        return flat(self.roles.policy)


def flat(policy: Policy) -> Tensor:
    """A policy's weights in one vector of their own."""
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()])


def gradients(policy: Policy) -> Tensor:
    """A policy's gradients in one vector; 0 where there is none."""
    every = policy.model.parameters()
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in every]
    )


def nudge(policy: Policy, by: float = 0.05, seed: int = 0) -> None:
    """Move a policy's weights a little, as updates would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(by * torch.randn(p.shape, generator=generator))
