"""Studies whose runs take a fraction of a second, and what runs them inside this process."""

from __future__ import annotations

import copy
import functools
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lab import identity, records
from lab import study as studies
from lab.execute import Job, Limits, Outcome
from lab.execute.local import ONE_THREAD, run_one
from lab.protocol import Study, resolve
from lab.shelf import Shelf, installed

#: Two recipes, 2 seeds of 2 rollouts of 2 x 4 rows; nothing is taught first.
TINY: Mapping[str, Any] = {
    "study": {
        "question": "Does the cap matter?",
        "task": {"name": "bandit", "arms": 3},
        "eval_every": 1,
        "eval_prompts": 8,
        "warm_start": 0.0,
    },
    "all": {"loop": {"prompts": 2, "group_size": 4, "epochs": 1, "minibatches": 2}},
    "recipe": {"grpo": {"base": "grpo", "kl": "none"}, "cispo": {"base": "cispo"}},
    "contrast": [{"a": "cispo", "b": "grpo"}],
    "scale": {"smoke": {"seeds": 2, "rollouts": 2}, "small": {"seeds": 3, "rollouts": 2}},
}
#: The same as a file, with room for more.
FILE = """
[study]
question = "Does the cap matter?"
task = {{name = "{task}"{settings}}}
eval_every = {every}
eval_prompts = 8
warm_start = 0.0

[all.loop]
prompts = 2
group_size = 4
epochs = 1
minibatches = 2

[recipe.grpo]
base = "grpo"
kl = "none"

[recipe.cispo]
base = "cispo"

[[contrast]]
a = "cispo"
b = "grpo"

[scale.smoke]
seeds = {seeds}
rollouts = {rollouts}

[scale.small]
seeds = 3
rollouts = {rollouts}
"""


def file(place: Path, rollouts: int = 2, seeds: int = 2, task: str = "bandit", **more: str) -> Path:
    """A study file, tiny.toml."""
    every = max(1, rollouts // 2)
    values = {"task": task, "settings": "", "every": every, "seeds": seeds, "rollouts": rollouts}
    path = place / "tiny.toml"
    path.write_text(FILE.format(**{**values, **more}), encoding="utf-8")
    return path


def plugin(place: Path, text: str, name: str = "mine.py") -> Path:
    """A plugin file."""
    path = place / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def table(path: str = "", value: Any = None, given: Mapping[str, Any] = TINY) -> dict[str, Any]:
    """The tiny study's tables; at a path, another value, or none where it is `DROP`."""
    data: dict[str, Any] = copy.deepcopy(dict(given))
    if path:
        *parents, last = path.split(".")
        place = data
        for parent in parents:
            place = place.setdefault(parent, {})
        if value is DROP:
            place.pop(last)
        else:
            place[last] = value
    return data


DROP = object()


def study(path: str = "", value: Any = None, shelf: Shelf | None = None) -> Study:
    """The tiny study, with one thing changed."""
    return resolve(table(path, value), "tiny", shelf or installed())


def planned(shelf: Shelf, path: str = "", value: Any = None, scale: str = "smoke") -> studies.Plan:
    """The plan of the tiny study, with one thing changed."""
    if not path:
        return _as_it_stands(shelf, scale)
    return studies.plan(study(path, value, shelf), scale, shelf)


@functools.cache
def of_five_seeds(shelf: Shelf) -> list[studies.Planned]:
    """The runs of both recipes at five seeds."""
    return planned(shelf, "scale.smoke.seeds", 5).runs


@functools.cache
def _as_it_stands(shelf: Shelf, scale: str) -> studies.Plan:
    return studies.plan(study(shelf=shelf), scale, shelf)


def keys(made: studies.Plan) -> list[str]:
    """Its run keys, in order."""
    return [r.key for r in made.runs]


@dataclass
class Told:
    """A console that remembers."""

    lines: list[str] = field(default_factory=list)
    steps: list[tuple[int, int, str]] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, done: int, of: int, text: str) -> None:
        self.steps.append((done, of, text))


#: What an executor does with a job: the outcomes that it delivers for it.
Act = Callable[[Job], Sequence[Outcome]]


def make(job: Job) -> list[Outcome]:
    """The run itself, in this process."""
    return [run_one(job)]


def paper(job: Job) -> list[Outcome]:
    """The folder of a run that nobody ran: its score is a digit of its key."""
    if not records.finished(job.folder / job.key):
        writer = records.Writer(job.folder / f".{job.key}.{os.getpid()}.{os.getpid()}")
        counters = dict.fromkeys(records.COUNTERS, 0)
        evaluated = {**dict.fromkeys(studies.EVALUATED, 0.0), "score": int(job.key[0], 16) / 16}
        for rollout in range(3):
            writer.moment("eval", {**counters, "rollout": rollout}, evaluated)
        writer.data(records.TIME, {"seconds": {"start": 2.0, "sampling": 1.0, "updates": 1.0}})
        body = {"status": "ok", "counters": {**counters, "rollout": 2}, "final": evaluated}
        writer.data(records.RESULT, {**body, "failure": None})
        records.finish(writer.folder, job.folder / job.key)
    return [Outcome(job.key, "ok", attempt=job.attempt)]


class Here:
    """An executor without processes.

    Args:
        act: what becomes of a job: a folder on paper, when left out.
    """

    def __init__(self, act: Act = paper) -> None:
        self.act = act
        self.queue: list[Job] = []
        self.submitted: list[Job] = []
        self.cancelled = False

    def submit(self, job: Job) -> None:
        self.queue.append(job)
        self.submitted.append(job)

    def poll(self, seconds: float) -> Iterator[Outcome]:
        assert self.queue, "waiting for an outcome that never comes"
        yield from self.act(self.queue.pop(0))

    def cancel(self) -> None:
        self.cancelled = True


def local(limits: Limits) -> Here:
    """Takes the place of the pool."""
    return Here(make)


def drive(
    plan: studies.Plan, folder: Path, executor: Any, workers: int = 2, plugins: Sequence[str] = ()
) -> Told:
    """Run a plan as `lab run` does, with an executor of one's own; what the console was told."""
    told = Told()
    studies.claim(plan, folder)
    studies.Driver(plan, folder, executor, tuple(plugins), told, workers).run()
    return told


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nothing lands in the home directory, and the environment is as it was."""
    place = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAB_CACHE", str(place))
        for name in ONE_THREAD:
            patch.setenv(name, "1")
        patch.setattr(identity, "version", functools.cache(identity.version))  # it reads files
        yield place


def lines_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its bytes, but for times."""
    files = [f for f in sorted(folder.rglob("*")) if f.is_file() and f.name != "time.json"]
    return {str(f.relative_to(folder)): f.read_bytes() for f in files}
