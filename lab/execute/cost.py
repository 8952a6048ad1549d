"""What runs will cost, from one short run of each kind."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import records
from lab.errors import LabError
from lab.execute import Executor, Job
from lab.settings import Budget, Spec
from lab.shelf import Shelf
from lab.train import prepared


@dataclass(frozen=True)
class Cost:
    """Of a run.

    Attributes:
        start: seconds before the first rollout.
        rollout: seconds a rollout with its updates.
        evaluation: seconds.
        each: what a rollout takes of each counter of a budget.
        evaluated: names of the numbers of an evaluation.
    """

    start: float
    rollout: float
    evaluation: float
    each: Mapping[str, float]
    evaluated: frozenset[str]

    @classmethod
    def of(cls, folder: Path) -> Cost | None:
        """From the folder of a short run; None where it did not end."""
        if not (folder / records.TIME).is_file():
            return None
        seconds = records.read_json(folder / records.TIME)["seconds"]
        counters = records.read_json(folder / records.RESULT)["counters"]
        rollouts = max(1, counters["rollout"])
        each = {n: counters[n] / rollouts for n in ("generated_tokens", "trained_tokens")}
        evaluations = [m for m in records.moments(folder) if m.at == "eval"]
        return cls(
            seconds.get("start", 0.0),
            (seconds.get("sampling", 0.0) + seconds.get("updates", 0.0)) / rollouts,
            seconds.get("evaluation", 0.0) / max(1, len(evaluations)),
            {"rollouts": 1.0, "updates": counters["update"] / rollouts, **each},
            frozenset(n for m in evaluations for n in m.metrics),
        )

    def seconds(self, spec: Spec) -> float:
        """Of a run, without its start."""
        declared = spec.settings.budget.declared()
        rollouts = min(limit / max(self.each[n], 1e-9) for n, limit in declared.items())
        rollouts = max(1.0, rollouts)
        evaluations = 1 + rollouts / spec.settings.eval_every
        return rollouts * self.rollout + evaluations * self.evaluation


def measure(
    runs: Mapping[bool, Spec], executor: Executor, plugins: Sequence[str]
) -> dict[bool, Cost]:
    """Make each run with a budget of two rollouts; what did not end is left out.

    Raises:
        LabError: if one fails for what a person can mend: so would the study's runs.
    """
    shelf = Shelf.installed(plugins)
    # workers may still write into the folder when a person interrupts
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        jobs = {kind: _short(spec, Path(name), shelf, plugins) for kind, spec in runs.items()}
        for job in jobs.values():
            executor.submit(job)
        waiting = {job.key for job in jobs.values()}
        while waiting:
            for outcome in executor.poll(60.0):
                if outcome.mistake:
                    raise LabError(outcome.error)
                waiting.discard(outcome.key)
        found = {kind: Cost.of(job.folder / job.key) for kind, job in jobs.items()}
    return {kind: cost for kind, cost in found.items() if cost is not None}


def _short(spec: Spec, folder: Path, shelf: Shelf, plugins: Sequence[str]) -> Job:
    changes: dict[str, Any] = {"budget": Budget(rollouts=2)}
    settings = spec.settings.model_copy(update=changes)
    short = spec.model_copy(update={"settings": settings})
    return Job(prepared(short, shelf).key, short.data(), folder, tuple(plugins))


def minutes(seconds: float) -> str:
    """A time as a person says it; NaN is unknown."""
    if math.isnan(seconds):
        return "an unknown time"
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
