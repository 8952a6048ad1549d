"""Many runs: a study planned, frozen, run and resumed.

The plan is a function of the study file and the finished runs. A finished run never runs again, so
a second call after a crash goes on where the first one ended.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from lab import policy, records, results
from lab.errors import LabError, nearest, one_of
from lab.execute import Executor, Job, Limits, Outcome
from lab.execute.cost import measure, minutes
from lab.identity import digest, environment, run_key
from lab.protocol import Study, plain, read
from lab.settings import Spec
from lab.shelf import Shelf
from lab.task import build
from lab.train import Prepared, prepared

#: Times that a run is begun: an exception twice is a result, a killed worker is bad luck thrice.
MOST_FAILURES, MOST_KILLS = 2, 3
#: What every evaluation records; the first of them is what a study asks for if it does not say.
EVALUATED = ("score", "unscored", "length", "truncated", "sampled_nll")


class Console(Protocol):
    """Where a study says how far it is."""

    def say(self, text: str) -> None:
        """A line."""
        ...

    def progress(self, done: int, of: int, text: str) -> None:
        """How many runs have ended."""
        ...


@dataclass(frozen=True)
class Planned:
    """A run of a study, with the arm that it belongs to."""

    key: str
    recipe: str
    condition: str
    config_hash: str
    spec: Spec
    critic: bool

    def row(self) -> dict[str, Any]:
        """As it stands in the plan."""
        return {
            "run_key": self.key,
            "recipe": self.recipe,
            "condition": self.condition,
            "config_hash": self.config_hash,
            "seed": self.spec.seed,
        }


@dataclass
class Plan:
    """What a study runs at a scale.

    Attributes:
        study: the study.
        scale: its name.
        runs: every run, in the order of the study.
        data: what `study.json` says.
    """

    study: Study
    scale: str
    runs: list[Planned]
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def keyed(self) -> dict[str, Planned]:
        """The runs by key. Two arms that are one recipe (A/A) have one run a seed."""
        found: dict[str, Planned] = {}
        for r in self.runs:
            found.setdefault(r.key, r)
        return found

    def pending(self, folder: Path) -> list[Planned]:
        """The runs that are not finished, each once: neither as a folder nor in a kept table."""
        table = folder / results.TABLE
        known = set(records.read_table(table)["run_key"]) if table.is_file() else set()
        place = folder / results.RUNS
        fresh = {k: r for k, r in self.keyed.items() if k not in known}
        return [r for key, r in fresh.items() if not records.finished(place / key)]


def plan(study: Study, scale: str, shelf: Shelf) -> Plan:
    """Every run of a study at a scale, with its key; each arm is wired once.

    Raises:
        LabError: if a recipe, the task or an observer is not valid, or the metric is none.
    """
    runs: list[Planned] = []
    more: dict[str, dict[str, Any]] = {"loops": {}, "bounds": {}, "choices": {}, "recipes": {}}
    for arm, specs in study.specs(scale):
        first = prepared(specs[0], shelf)
        _check_metric(study.head.metric, first)
        name, label = arm.recipe.name, f"{arm.recipe.name}|{arm.condition}"
        more["loops"][label] = arm.recipe.loop.model_dump()
        more["bounds"][label] = list(first.bench.bounds)
        more["recipes"][name] = arm.recipe.doc
        more["choices"][name] = _choices(arm.recipe.spec())
        config = digest(plain(arm.recipe), 12)
        for spec in specs:
            key = run_key(spec, first.bench, first.task)
            critic = first.bench.has_critic
            runs.append(Planned(key, name, arm.condition, config, spec, critic))
        optimum = first.task.optimum
    out = Plan(study, scale, runs)
    out.data = _frozen(out, optimum) | more
    return out


def _check_metric(name: str, arm: Prepared) -> None:
    """Refuse a metric that no evaluation records; observers' names are seen in the first run."""
    exact = arm.task.shared_prompts and arm.task.responses() is not None
    if not any(b.component.declared.at == "eval" for b in arm.bench.observers):
        _check_name(name, (*EVALUATED, *(("exact_score",) if exact else ())))


def _check_name(metric: str, known: Collection[str]) -> None:
    if metric not in known:
        raise LabError(
            f"metric {metric!r} stands in no evaluation.{nearest(metric, known)} "
            f"They record {one_of(known)}"
        )


def _frozen(plan: Plan, optimum: float) -> dict[str, Any]:
    head, settings = plan.study.head, plan.runs[0].spec.settings
    return {
        "name": plan.study.name,
        "question": " ".join(head.question.split()),
        "hash": plan.study.hash,
        "scale": plan.scale,
        "metric": head.metric,
        "margin": head.margin,
        "alpha": head.alpha,
        "floor": head.floor,
        "optimum": optimum,
        "task": dict(plan.study.frozen["task"]),
        "model": settings.model,
        "budget": settings.budget.declared(),
        "eval_every": settings.eval_every,
        "eval_prompts": settings.eval_prompts,
        "observe_every": settings.observe_every,
        "conditions": list(plan.study.conditions),
        "contrasts": [c.model_dump() for c in plan.study.contrasts],
        "seeds": sorted({r.spec.seed for r in plan.runs}),
        "environment": environment() | {"lab": version("policy-gradient-lab")},
        "plan": [r.row() for r in plan.runs],
    }


def _choices(spec: Mapping[str, Any]) -> str:
    """A recipe's slots in one line."""
    names = [spec[slot]["name"] for slot in ("advantage", "ratio", "surrogate") if spec.get(slot)]
    names.append(spec["aggregate"]["name"])
    if spec.get("kl"):
        names.append(f"kl {spec['kl']['name']}")
    names += [
        e["name"] for slot in ("filter", "shape", "extra", "wrap") for e in spec.get(slot, [])
    ]
    return " · ".join(names)


def claim(plan: Plan, folder: Path) -> None:
    """Make the results folder this study's: freeze `study.json` in it.

    Raises:
        LabError: if the folder is another study's, or holds something else.
    """
    known = folder / results.STUDY
    if known.is_file():
        other = records.read_json(known)
        if other.get("hash") != plan.study.hash:
            raise LabError(
                f"{folder} holds the results of another study ({other.get('name')}, hash "
                f"{other.get('hash')}; this one is {plan.study.name}, {plan.study.hash}): "
                "give another --out"
            )
    elif folder.is_dir() and any(folder.iterdir()):
        raise LabError(f"{folder} is not empty and holds no study: give another --out")
    (folder / results.RUNS).mkdir(parents=True, exist_ok=True)
    _sweep(folder / results.RUNS)
    records.write_json(known, plan.data)


def _sweep(runs: Path) -> None:
    """Remove what drivers that are gone left half written."""
    for left, alive in results.unfinished(runs):
        if alive:
            continue
        # moved away first: a worker that has outlived its driver must not finish half a folder
        away = left.with_name(f"{left.name.rsplit('.', 1)[0]}.swept{os.getpid()}")
        with contextlib.suppress(OSError):
            left.rename(away)
        shutil.rmtree(away, ignore_errors=True)


@dataclass
class Driver:
    """Runs what is pending of a plan.

    Attributes:
        plan: the plan.
        folder: its results.
        executor: what runs jobs.
        plugins: plugin files of the runs.
        console: told how far it is.
    """

    plan: Plan
    folder: Path
    executor: Executor
    plugins: tuple[str, ...]
    console: Console
    workers: int

    def run(self) -> None:
        """Run all that is pending. Finished runs are kept whatever happens."""
        pending = ordered(self.plan.pending(self.folder), self.workers)
        total = len(self.plan.keyed)
        done = total - len(pending)
        if not pending:
            self.console.say(f"all {total} runs are finished")
            return
        self.console.say(f"{total} runs, {done} finished; measuring how long they take")
        seconds = self.estimate(pending)
        self.console.say(
            f"about {minutes(seconds)} for {len(pending)} runs on {self.workers} workers"
        )
        jobs = {r.key: self._job(r) for r in pending}
        tries: dict[str, list[str]] = {key: [] for key in jobs}
        for job in jobs.values():
            self.executor.submit(job)
        open_keys, counts = set(jobs), {"ok": done}
        while open_keys:
            before = len(open_keys)
            for outcome in self.executor.poll(5.0):
                if outcome.key not in open_keys:
                    continue  # delivered twice
                ended = self._ended(outcome, jobs[outcome.key], tries[outcome.key])
                if ended:
                    open_keys.discard(outcome.key)
                    counts[ended] = counts.get(ended, 0) + 1
            if len(open_keys) < before:
                text = ", ".join(f"{c} {n}" for n, c in counts.items() if n != "ok")
                self.console.progress(total - len(open_keys), total, text)

    def _job(self, run: Planned) -> Job:
        return Job(run.key, run.spec.data(), self.folder / results.RUNS, self.plugins)

    def _ended(self, outcome: Outcome, job: Job, tries: list[str]) -> str:
        """The status that a job has ended with, or nothing where it runs again.

        Args:
            outcome: what an executor has delivered.
            job: as it was submitted first.
            tries: how its attempts ended so far.
        """
        status, error = outcome.status, outcome.error
        if status in ("ok", "diverged", "crashed"):
            if records.finished(job.folder / job.key):
                return status
            status, error = "killed", "it has left no folder"
        if outcome.attempt != len(tries) + 1:
            return ""  # of an attempt that has been answered for
        tries.append(status)
        self.console.say(f"run {job.key[:8]} {status}: {error}")
        most = MOST_KILLS if status == "killed" else MOST_FAILURES
        if tries.count(status) < most:
            self.executor.submit(replace(job, attempt=len(tries) + 1))
            return ""
        if status == "failed":
            crashed(job, error)
            return "crashed"
        return "killed"  # infrastructure: no result, the next call tries again

    def estimate(self, pending: Sequence[Planned]) -> float:
        """Seconds for these runs, from one short run with a critic and one without.

        Raises:
            LabError: if a short run shows a mistake, as a metric that no evaluation records.
        """
        kinds = {r.critic: r.spec for r in reversed(pending)}
        costs = measure(kinds, self.executor, self.plugins)
        if not costs:
            return math.nan
        usual = next(iter(costs.values()))
        for cost in costs.values():
            _check_name(self.plan.study.head.metric, cost.evaluated)
        seeds = len({r.spec.seed for r in pending})
        seconds = seeds * usual.start  # one warm start a seed, then it is cached
        seconds += sum(costs.get(r.critic, usual).seconds(r.spec) for r in pending)
        return seconds / min(self.workers, len(pending))


def ordered(runs: Sequence[Planned], workers: int) -> list[Planned]:
    """Seeds in blocks of as many as there are workers, so that no two teach one warm start."""
    seeds = sorted({r.spec.seed for r in runs})
    place = {seed: (i // max(1, workers), i % max(1, workers)) for i, seed in enumerate(seeds)}
    arms = list(dict.fromkeys((r.recipe, r.condition) for r in runs))
    order = {arm: i for i, arm in enumerate(arms)}
    return sorted(
        runs,
        key=lambda r: (
            place[r.spec.seed][0],
            order[r.recipe, r.condition],
            place[r.spec.seed][1],
        ),
    )


def crashed(job: Job, error: str) -> None:
    """Record a run that raised the same way twice: it is a result, and is counted."""
    beside = job.folder / f".{job.key}.{os.getpid()}.crashed"
    writer = records.Writer(beside)
    counters = dict.fromkeys(records.COUNTERS, 0)
    writer.moment("start", counters, {"crashed": 1.0})
    writer.data(records.RUN, {"key": job.key, "spec": dict(job.spec)})
    failure = {"update": None, "hook": "", "component": "", "statistic": error}
    body = {"status": "crashed", "counters": counters, "final": {}, "failure": failure}
    writer.data(records.RESULT, body)
    records.finish(beside, job.folder / job.key)


def run(
    study: Study,
    scale: str,
    folder: Path,
    shelf: Shelf,
    console: Console,
    workers: int = 0,
    plugins: Sequence[str | Path] = (),
    limits: Limits | None = None,
) -> Plan:
    """Run a study at a scale into a folder; what is finished there already stays.

    Args:
        study: what to run.
        scale: one of its scales.
        folder: its results; another study's is refused.
        shelf: where the recipes' components are.
        console: told how far it is.
        workers: processes; 0: as many as cores.
        plugins: files beside the installed plugins.
        limits: of a worker; the number of workers in it counts when given.

    Raises:
        LabError: for a mistake in the study, and for a folder of another study.
    """
    made = plan(study, scale, shelf)
    _check_model(study, shelf)
    claim(made, folder)
    chosen = limits or Limits(workers or os.cpu_count() or 1)
    executor: Executor = shelf.names("executors")["local"](chosen)
    try:
        files = tuple(str(Path(p).resolve()) for p in plugins)
        Driver(made, folder, executor, files, console, chosen.workers).run()
    finally:
        executor.cancel()
    return made


def _check_model(study: Study, shelf: Shelf) -> None:
    """Load a model once that is no preset: what is wrong with it is wrong in every run."""
    if study.head.model not in policy.PRESETS:
        task = build(study.task.name, study.task.settings, shelf)
        policy.build(study.head.model, task.characters, 0)


def find(given: str, shelf: Shelf) -> Study:
    """A study by file, or by name: of the folder `studies`, or of those that come with the lab.

    Raises:
        LabError: if there is none, or it is not valid.
    """
    package = Path(__file__).parent
    # in a wheel they lie inside the package, in a checkout beside it
    return read(given, shelf, (package.parent / "studies", package / "studies", Path("studies")))
