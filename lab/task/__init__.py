"""The built-in tasks, and how a study gets a task by name with its settings.

The package is called `task` as the recipes' module is called `recipe`: `tasks`, like `recipes`, is
the decorator, and a subpackage of that name would take its place as an attribute of `lab`.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any

from lab.errors import LabError, nearest, one_of
from lab.hooks import tasks
from lab.task.base import SPLITS, Example, Split, Task
from lab.task.digits import Addition, Copy, Reverse, Sort
from lab.task.small import Bandit, Chain

if TYPE_CHECKING:
    from lab.shelf import Shelf

__all__ = ["SPLITS", "Example", "Split", "Task", "build", "describe", "record"]

#: The types that a setting may have: what a study's TOML and a run's record can both say.
KINDS: Mapping[str, type | tuple[type, ...]] = {
    "int": int,
    "float": (float, int),
    "bool": bool,
    "str": str,
}


@tasks
def named() -> dict[str, type[Task]]:
    """The tasks that come with the lab."""
    return {task.name: task for task in (Addition, Bandit, Chain, Copy, Reverse, Sort)}


def build(name: str, settings: Mapping[str, Any], shelf: Shelf) -> Task:
    """The task of that name at these settings.

    Raises:
        LabError: if there is no such task or setting (with the nearest name), a value has the
            wrong type or is refused by the task, or a plugin's task is not a proper one.
    """
    found = shelf.names("tasks")
    if name not in found:
        broken = "".join(f"\n  not loaded: {p}: {why}" for p, why in shelf.broken.items())
        raise LabError(
            f"no task {name!r}.{nearest(name, found)} Available: {one_of(found)}{broken}"
        )
    cls = _proper(found[name], name, f"{shelf.plugin_of('tasks', name)}: task {name!r}")
    where, knobs = f"task {name!r}", _knobs(cls)
    for given in settings:
        if given not in knobs:
            raise LabError(
                f"{where} has no setting {given!r}; it has {one_of(knobs)}.{nearest(given, knobs)}"
            )
    for key, knob in knobs.items():
        if key not in settings and knob.default is knob.default_factory is MISSING:
            raise LabError(f"{where} needs a value for {key} ({_kind(knob)})")
    values = {k: _coerce(v, _kind(knobs[k]), f"{where}: {k}") for k, v in settings.items()}
    try:
        return cls(**values)
    except ValueError as e:
        raise LabError(f"{where}: {' '.join(str(e).split())}") from e


def record(task: Task) -> dict[str, Any]:
    """What makes the task this one: its name, version and settings. Part of a run's key."""
    name = getattr(task, "name", None)
    knobs = _knobs(_proper(type(task), name, f"task {name!r}"))  # it need not come from `build`
    settings = {
        k: _coerce(getattr(task, k), _kind(knob), f"task {name!r}: {k}")
        for k, knob in knobs.items()
    }
    return {"name": task.name, "version": task.version, "settings": settings}


def describe(task: Task) -> dict[str, Any]:
    """What there is to know of a task before a run, with one example."""
    example = task.example(random.Random(0))
    return {
        **record(task),
        "doc": (type(task).__doc__ or "").split("\n")[0],
        "prompt": example.prompt,
        "answer": example.answer,
        "characters": task.characters,
        "budget": task.budget,
        "stops": task.stops,
        "optimum": task.optimum,
        "warm_start": task.warm_start,
        "shared_prompts": task.shared_prompts,
        "isolates": task.isolates,
        "control": task.control,
    }


def _proper(cls: Any, name: str | None, where: str) -> type[Task]:
    """The class that a plugin offers as a task, once it is seen to be one."""
    if not (inspect.isclass(cls) and issubclass(cls, Task)):
        raise LabError(f"{where} is {cls!r}; a subclass of lab.Task was due")
    if "__dataclass_fields__" not in vars(cls):
        raise LabError(f"{where}: put @dataclass(frozen=True, kw_only=True) above {cls.__name__}")
    missing = sorted(cls.__abstractmethods__)
    if missing:
        raise LabError(f"{where}: {cls.__name__} does not define {', '.join(missing)}")
    for key, knob in _knobs(cls).items():
        if key in Task.__annotations__:
            raise LabError(f"{where}: {key!r} is no setting; annotate it as ClassVar")
        if _kind(knob) not in KINDS:
            raise LabError(f"{where}: {key} is of type {_kind(knob)}; it may be {one_of(KINDS)}")
    said = getattr(cls, "name", None)
    # a subclass that inherits its name would share the records of another task's runs
    if said is None or said != name:
        raise LabError(f"{where}: {cls.__name__} says name = {said!r}; the two must be equal")
    return cls


def _knobs(cls: type[Task]) -> dict[str, Field[Any]]:
    return {field.name: field for field in fields(cls) if field.init}


def _kind(knob: Field[Any]) -> str:
    """The type of a setting by name; it is text where the module postpones its annotations."""
    if isinstance(knob.type, str):
        return knob.type
    return getattr(knob.type, "__name__", str(knob.type))


def _coerce(value: Any, kind: str, where: str) -> Any:
    """The value in its setting's type: true is no int, 2 is a float, what is not finite is none."""
    fits = isinstance(value, KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))
    if not fits or (kind == "float" and not abs(value) <= sys.float_info.max):
        raise LabError(f"{where}={value!r} is not {kind}")
    return float(value) if kind == "float" else value
