"""The core loop: one run, from its settings to its folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab import checkpoint, heldout, records, warm
from lab.bench import Bench
from lab.collect import Collector, Rollout, numbers
from lab.errors import LabError
from lab.identity import environment, run_key
from lab.loss import pull_curve
from lab.records import Writer
from lab.roles import Roles
from lab.rollout import prepare
from lab.settings import Spec
from lab.shelf import Plugin, Shelf
from lab.step import Step
from lab.streams import Streams
from lab.task import Task, build, record
from lab.update import DivergedError, KLStop, not_finite, update

#: Ratios at which a run records its objective's pull: .1 to 10, evenly in the logarithm.
CURVE = tuple(10 ** (i / 40) for i in range(-40, 41))


@dataclass(frozen=True)
class Prepared:
    """A run with its components wired and its task built: cheap, no model yet.

    Attributes:
        spec: what it is.
        bench: its recipe.
        task: its task.
        key: its run key.
    """

    spec: Spec
    bench: Bench
    task: Task
    key: str


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        key: its run key.
        folder: where it is.
        status: ok or diverged.
        counters: updates, rollouts, generated and trained tokens.
        final: the numbers of its last evaluation.
        failure: of a diverged run: update, hook, component, statistic.
    """

    key: str
    folder: Path
    status: str
    counters: Mapping[str, int]
    final: Mapping[str, float]
    failure: Mapping[str, Any] | None = None


def prepared(spec: Spec, shelf: Shelf) -> Prepared:
    """Wire a run and find its key.

    Raises:
        LabError: for anything that is wrong with its recipe, task or observers.
    """
    bench = Bench(spec.recipe, shelf, spec.observers)
    task = build(spec.task.name, spec.task.settings, shelf)
    return Prepared(spec, bench, task, run_key(spec, bench, task))


def run(
    spec: Spec,
    folder: Path,
    plugins: Iterable[Plugin] = (),
    progress: Callable[[float], None] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Result:
    """Run one run into a folder; where it holds a checkpoint of this run, go on from there.

    Args:
        spec: what to run.
        folder: its own; made if it is not there.
        plugins: files beside the installed plugins.
        progress: told the share of the budget that is spent, once per rollout.
        say: told what takes long.

    Raises:
        LabError: for a mistake in the settings, and for a folder that holds another run.
    """
    return train(prepared(spec, Shelf.installed(plugins)), folder, progress, say)


def train(
    this: Prepared,
    folder: Path,
    progress: Callable[[float], None] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Result:
    """The same for a run that is wired already; a Prepared is used once."""
    # part of what a run is: its key says so, and two threads a process are slower than one
    torch.set_num_threads(1)
    return _Training(this, Writer(folder), say).go(progress)


@dataclass
class _Training:
    """One run on its way."""

    this: Prepared
    writer: Writer
    say: Callable[[str], None]
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(records.COUNTERS, 0))
    seconds: dict[str, float] = field(default_factory=dict)
    final: dict[str, float] = field(default_factory=dict)

    def go(self, progress: Callable[[float], None] | None) -> Result:
        spec, bench = self.this.spec, self.this.bench
        if done := self._earlier():
            return done
        self.streams = Streams(record(self.this.task), spec.seed)
        target = spec.settings.warm_start
        target = self.this.task.warm_start if target is None else target
        with self._timed("start"):
            policy, start = warm.start(
                spec.settings.model, self.this.task, target, self.streams, self.say
            )
        self._declare()
        self.roles = Roles.of(policy, bench)
        self.collector = Collector(bench, self.this.task, self.roles, self.streams)
        if not self._resumed():
            self.writer.cut(dict.fromkeys(self.writer.lines(), 0))
            self.writer.moment("start", self.counters, vars(start))
        failure = None
        try:
            if not self.final:
                self._evaluate()
            while self._spent() < 1:
                self._rollout()
                if progress is not None:
                    progress(min(1.0, self._spent()))
        except DivergedError as e:
            failure = {
                "update": self.counters["update"],
                "hook": e.hook,
                "component": e.component,
                "statistic": e.statistic,
            }
        return self._finish(failure)

    def _earlier(self) -> Result | None:
        """The result that the folder holds already, or None."""
        folder, key = self.writer.folder, self.this.key
        known = folder / records.RUN
        if known.is_file() and records.read_json(known)["key"] != key:
            raise LabError(
                f"{folder} holds another run (other settings, code or versions); give another --out"
            )
        if records.finished(folder):
            return Result(key, folder, **records.read_json(folder / records.RESULT))
        return None

    def _declare(self) -> None:
        """Write what the run is, once its start is there: a mistake claims no folder."""
        bench = self.this.bench
        self.writer.data(
            records.RUN,
            {
                "key": self.this.key,
                "spec": self.this.spec.data(),
                "record": bench.record(),
                "interval": bench.interval,
                "bounds": bench.bounds,
                "environment": environment(),
            },
        )
        curve = {n: pull_curve(bench, CURVE, a) for n, a in (("positive", 1.0), ("negative", -1.0))}
        self.writer.data(records.PULLS, {"ratio": CURVE, **curve})

    def _spent(self) -> float:
        return self.this.spec.settings.budget.spent(
            {
                **self.counters,
                "updates": self.counters["update"],
                "rollouts": self.counters["rollout"],
            }
        )

    def _rollout(self) -> None:
        number = self.counters["rollout"]
        now = self.this.bench.now
        now.progress = self._spent()
        now.key = (self.streams.task, self.streams.seed, number)
        with self._timed("sampling"):
            with _from_finite_weights():
                rollout = self.collector.collect(number, check=number == 0)
            self.counters["generated_tokens"] += rollout.generated_tokens
            step = self._prepared(rollout.step)
        with self._timed("updates"):
            made = self._updates(number, rollout, step)
        self.this.bench.remember(step)
        self.counters["rollout"] += 1
        said = numbers(rollout, step) | {"updates": float(made)}
        seen = self.this.bench.observe("rollout", step)
        self.writer.moment("rollout", self.counters, said | seen)
        every = self.this.spec.settings.eval_every
        if self.counters["rollout"] % every == 0 or self._spent() >= 1:
            self._evaluate()
        self._checkpoint()

    def _prepared(self, step: Step) -> Step:
        """The rollout's side of the objective; the first hook that is not finite ends the run."""
        bench = self.this.bench

        def refuse_infinite(hook: str, result: Tensor) -> None:
            if not bool(torch.isfinite(result).all()):
                raise not_finite(bench, hook, result)

        bench.watch = refuse_infinite
        try:
            return prepare(bench, step)
        finally:
            bench.watch = None

    def _updates(self, number: int, rollout: Rollout, step: Step) -> int:
        """E x M updates on one rollout, fewer where kl_stop says so; how many were made."""
        loop, bench = self.this.spec.recipe.loop, self.this.bench
        warming = bench.has_critic and number < loop.critic_warmup
        made, every = 0, self.this.spec.settings.observe_every
        for epoch in range(loop.epochs):
            for index in self._minibatches(step, number * loop.epochs + epoch):
                bench.now.key = (self.streams.task, self.streams.seed, self.counters["update"])
                try:
                    samples = rollout.scored.samples
                    look = self.counters["update"] % every == 0
                    out = update(bench, self.roles, samples, step, index, warming, look)
                except KLStop:
                    return made
                made += 1
                self.counters["update"] += 1
                self.counters["trained_tokens"] += out.tokens
                self.writer.moment("update", self.counters, out.metrics)
        return made

    def _minibatches(self, step: Step, number: int) -> list[Tensor]:
        """The rows in a fresh order, split; whole groups where a component of the update asks."""
        generator = self.streams.torch("order", number)
        many = self.this.spec.recipe.loop.minibatches
        group = step["group"]
        if not self._groups_stay():
            parts = torch.randperm(len(group), generator=generator).tensor_split(many)
        else:
            ids = torch.unique(group)
            order = ids[torch.randperm(len(ids), generator=generator)].tensor_split(many)
            parts = tuple(torch.isin(group, some).nonzero().squeeze(1) for some in order)
        return [p for p in parts if len(p)]

    def _groups_stay(self) -> bool:
        per = self.this.bench.option("normalize", "per")
        late = {"surrogate", "kl_loss", "extra_loss", "aggregate"}
        late |= {"normalize"} if per == "minibatch" else set()
        return any(
            "group" in b.component.inputs or b.declares("needs_group") > 1
            for b in self.this.bench.everything
            if b.component.hook in late
        )

    def _evaluate(self) -> None:
        settings = self.this.spec.settings
        with self._timed("evaluation"), _from_finite_weights():
            found = heldout.evaluate(
                self.this.bench,
                self.this.task,
                self.roles,
                self.streams,
                settings.eval_prompts,
                self.counters["rollout"],
            )
        self.final = found.metrics
        self.writer.moment("eval", self.counters, found.metrics)
        self.writer.answers(self.counters, found.answers)

    def _checkpoint(self) -> None:
        every = self.this.spec.settings.checkpoint_every
        if not every or self.counters["rollout"] % every or self._spent() >= 1:
            return
        state = {
            "key": self.this.key,
            "counters": self.counters,
            "memory": {k: dict(v) for k, v in self.this.bench.now.memory.items()},
            "final": self.final,
            "lines": self.writer.lines(),
        }
        checkpoint.save(self.writer.folder, self.roles, state)

    def _resumed(self) -> bool:
        state = checkpoint.load(self.writer.folder, self.roles)
        if state is None:
            return False
        if state["key"] != self.this.key:
            raise LabError(
                f"{self.writer.folder} holds the checkpoint of another run; give another --out"
            )
        self.say(f"going on after rollout {state['counters']['rollout']}")
        self.counters = state["counters"]
        self.final = state["final"]
        self.this.bench.now.memory.update(state["memory"])
        self.writer.cut(state["lines"])
        return True

    def _finish(self, failure: dict[str, Any] | None) -> Result:
        status = "diverged" if failure else "ok"
        body: dict[str, Any] = {
            "status": status,
            "counters": self.counters,
            "final": self.final,
            "failure": failure,
        }
        self.writer.data(records.TIME, {"seconds": self.seconds})
        self.writer.data(records.RESULT, body)
        return Result(self.this.key, self.writer.folder, **body)

    def _timed(self, what: str) -> _Clock:
        return _Clock(self.seconds, what)


@contextmanager
def _from_finite_weights() -> Iterator[None]:
    """Sampling from weights whose logits are not finite: the run has diverged in its last step."""
    try:
        yield
    except RuntimeError as e:
        if "probability tensor" not in str(e):  # torch.multinomial's complaint
            raise
        raise DivergedError("sampling", "", "the policy's probabilities are not finite") from None


@dataclass
class _Clock:
    """Adds the seconds spent inside to a total."""

    seconds: dict[str, float]
    what: str
    began: float = 0.0

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        spent = time.perf_counter() - self.began
        self.seconds[self.what] = self.seconds.get(self.what, 0.0) + spent
