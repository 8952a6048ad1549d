"""A study file, read, checked and frozen: what is compared, how often, what will be asked of it.

Everything that a verdict depends on is declared here before a run starts. The hash of it, taken
without the scale, stands on every artefact; a results folder belongs to one hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from lab.errors import LabError, nearest, one_of
from lab.identity import digest
from lab.recipe import Recipe, Use, toml_of
from lab.settings import OBSERVERS, SEEDS, Budget, Settings, Spec, checked, use_of, with_changes
from lab.shelf import Shelf
from lab.task import build
from lab.task import record as task_record

TABLES = ("study", "recipe", "all", "condition", "contrast", "scale")
#: The condition of a study that names none.
PLAIN = "as given"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Contrast(_Model):
    """One question with a verdict: is `a` better than `b`?"""

    a: str
    b: str
    condition: str = PLAIN

    @property
    def name(self) -> str:
        """As tables print it."""
        where = "" if self.condition == PLAIN else f", {self.condition}"
        return f"{self.a} - {self.b}{where}"


class Scale(_Model):
    """How large: evaluation seeds, and the budget of each run."""

    seeds: Annotated[int, Field(ge=1, le=1000)]
    rollouts: Annotated[int, Field(ge=1)] | None = None
    updates: Annotated[int, Field(ge=1)] | None = None
    generated_tokens: Annotated[int, Field(ge=1)] | None = None
    trained_tokens: Annotated[int, Field(ge=1)] | None = None
    eval_every: Annotated[int, Field(ge=1)] | None = None
    eval_prompts: Annotated[int, Field(ge=1)] | None = None

    def changes(self) -> dict[str, Any]:
        """What it changes of a run's settings."""
        given = self.model_dump(exclude={"seeds"}, exclude_none=True)
        budget = {n: given.pop(n) for n in Budget.model_fields if n in given}
        return {**given, **({"budget": budget} if budget else {})}


class Head(_Model):
    """The table [study]."""

    question: str
    task: dict[str, Any] | str
    metric: str = "score"
    margin: Annotated[float, Field(gt=0, lt=1)] = 0.02
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    floor: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    model: str = "nano"
    eval_every: Annotated[int, Field(ge=1)] = 2
    eval_prompts: Annotated[int, Field(ge=1)] = 256
    observe_every: Annotated[int, Field(ge=1)] = 1
    warm_start: float | None = None
    observers: list[dict[str, Any] | str] = list(OBSERVERS)


@dataclass(frozen=True)
class Arm:
    """A recipe under one condition: what has a run for every seed."""

    recipe: Recipe
    condition: str


@dataclass(frozen=True)
class Study:
    """A study file, resolved.

    Attributes:
        name: the file's.
        head: its table [study].
        task: the task as used.
        arms: every recipe under every condition.
        contrasts: the declared ones, in order: multiplicity counts these.
        scales: name -> scale.
        settings: of its runs, but for the scale.
        observers: what records.
        hash: of all of it but the scales.
    """

    name: str
    head: Head
    task: Use
    arms: tuple[Arm, ...]
    contrasts: tuple[Contrast, ...]
    scales: Mapping[str, Scale]
    settings: Settings
    observers: tuple[Use, ...]
    frozen: Mapping[str, Any]

    @property
    def hash(self) -> str:
        """Of all that was declared but the scales; it stamps every artefact."""
        return digest(dict(self.frozen), 16)

    @property
    def conditions(self) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(dict.fromkeys(arm.condition for arm in self.arms))

    def specs(self, scale: str) -> Iterator[tuple[Arm, list[Spec]]]:
        """Each arm with its runs at a scale, one an evaluation seed.

        Raises:
            LabError: if the study declares no such scale.
        """
        if scale not in self.scales:
            raise LabError(
                f"study {self.name!r} has no scale {scale!r}.{nearest(scale, self.scales)} "
                f"It has {one_of(self.scales)}"
            )
        chosen = self.scales[scale]
        settings = with_changes(self.settings, chosen.changes(), f"scale {scale!r}")
        first = SEEDS["evaluation"].start
        for arm in self.arms:
            yield (
                arm,
                [
                    Spec(
                        recipe=arm.recipe,
                        task=self.task,
                        seed=seed,
                        settings=settings,
                        observers=self.observers,
                        stage="evaluation",
                    )
                    for seed in range(first, first + chosen.seeds)
                ],
            )


def read(given: str | Path, shelf: Shelf, folders: Iterable[Path] = ()) -> Study:
    """A study by name or file.

    Args:
        given: ``first``, or a path that ends in .toml.
        shelf: where its recipes and task are.
        folders: where named studies are.

    Raises:
        LabError: if there is none, it is not TOML, or anything in it is not valid.
    """
    file = find(str(given), folders)
    return resolve(toml_of(file), file.stem, shelf)


def find(given: str, folders: Iterable[Path]) -> Path:
    """The file of a study.

    Raises:
        LabError: if there is none, with the nearest name.
    """
    if given.endswith(".toml"):
        return Path(given)
    known = {f.stem: f for folder in folders for f in sorted(folder.glob("*.toml"))}
    if given not in known:
        raise LabError(
            f"no study {given!r}.{nearest(given, known)} Available: {one_of(known)}; "
            "or give a file that ends in .toml"
        )
    return known[given]


def resolve(data: Mapping[str, Any], name: str, shelf: Shelf) -> Study:
    """A study from its tables.

    Raises:
        LabError: for an unknown table or key (with the nearest name), a recipe or task that is not
            valid, a contrast of what is not there.
    """
    where = f"study {name!r}"
    for key in data:
        if key not in TABLES:
            raise LabError(
                f"{where}: unknown table [{key}].{nearest(key, TABLES)} It has {one_of(TABLES)}"
            )
    for key in ("study", "recipe", "scale", *(("condition",) if "condition" in data else ())):
        if not isinstance(data.get(key), Mapping) or not data[key]:
            raise LabError(f"{where} has no table [{key}]")
    head: Head = checked(Head, data["study"], f"{where}, [study]")
    task = use_of(head.task, f"{where}, task")
    built = build(task.name, task.settings, shelf)
    settings = with_changes(Settings(), head.model_dump(include=set(Settings.model_fields)), where)
    observers = tuple(use_of(o, f"{where}, observers") for o in head.observers)
    arms = tuple(_arms(data, where, shelf))
    contrasts = tuple(
        _contrast(c, arms, f"{where}, contrast {i}")
        for i, c in enumerate(_list(data.get("contrast", []), where), start=1)
    )
    _each_once(contrasts, where)
    scales: dict[str, Scale] = {
        n: checked(Scale, _table(s, f"{where}, scale {n!r}"), f"{where}, scale {n!r}")
        for n, s in data["scale"].items()
    }
    frozen = {
        "head": head.model_dump(),
        "task": task_record(built),
        "arms": [[a.recipe.name, a.condition, plain(a.recipe)] for a in arms],
        "contrasts": [c.model_dump() for c in contrasts],
    }
    return Study(name, head, task, arms, contrasts, scales, settings, observers, frozen)


def plain(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe changes a run: neither its description nor its sources."""
    return {k: v for k, v in recipe.spec().items() if k not in ("doc", "source")}


def _arms(data: Mapping[str, Any], where: str, shelf: Shelf) -> Iterator[Arm]:
    conditions = data.get("condition", {PLAIN: {}})
    shared = _table(data.get("all", {}), f"{where}, [all]")
    for condition, changes in conditions.items():
        _table(changes, f"{where}, condition {condition!r}")
        for name, spec in data["recipe"].items():
            recipe = Recipe.of(_table(spec, f"{where}, recipe {name!r}"), name, shelf)
            doc, source = recipe.doc, recipe.source
            if shared:
                recipe = recipe.override(shared, shelf, f"{where}, [all]")
            if changes:
                recipe = recipe.override(changes, shelf, f"{where}, condition {condition!r}")
            yield Arm(recipe.model_copy(update={"doc": doc, "source": source}), condition)


def _contrast(given: Any, arms: Iterable[Arm], where: str) -> Contrast:
    made: Contrast = checked(Contrast, _table(given, where), where)
    names = {a.recipe.name for a in arms}
    conditions = {a.condition for a in arms}
    for name in (made.a, made.b):
        if name not in names:
            raise LabError(
                f"{where}: no recipe {name!r}.{nearest(name, names)} It has {one_of(names)}"
            )
    if made.condition not in conditions:
        raise LabError(
            f"{where}: no condition {made.condition!r}.{nearest(made.condition, conditions)} "
            f"It has {one_of(conditions)}"
        )
    if made.a == made.b:
        raise LabError(f"{where}: {made.a!r} against itself")
    return made


def _each_once(contrasts: Sequence[Contrast], where: str) -> None:
    """A question asked twice, either way round, would count twice in the multiplicity."""
    asked: dict[tuple[frozenset[str], str], int] = {}
    for i, c in enumerate(contrasts, start=1):
        first = asked.setdefault((frozenset((c.a, c.b)), c.condition), i)
        if first != i:
            raise LabError(f"{where}, contrast {i}: {c.name} is contrast {first} again")


def _table(given: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise LabError(f"{where}: {given!r}; a table was due")
    return given


def _list(given: Any, where: str) -> list[Any]:
    if not isinstance(given, list):
        raise LabError(f"{where}: contrasts are written [[contrast]]")
    return given
