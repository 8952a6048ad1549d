"""What a run is made of, as data: recipe, task, seed, model, budget, evaluation.

A run is the unit of replication: one recipe, one task, one seed, one configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lab.errors import LabError, nearest, one_of
from lab.overrides import parse_set
from lab.recipe import Recipe, Use, first_error
from lab.shelf import Shelf

Positive = Annotated[int, Field(ge=1)]
#: The observers of a run that names none.
OBSERVERS = ("clipping", "kl_old", "kl_ref", "weights", "entropy", "critic")
#: Which seeds belong to which stage: a run whose stage and seed disagree is refused.
SEEDS: Mapping[str, range] = {
    "tuning": range(1000, 2000),
    "selection": range(2000, 3000),
    "evaluation": range(9000, 10000),
}


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Budget(_Model):
    """When a run ends: at the first of these that is reached."""

    rollouts: Positive | None = Field(default=None, description="rollouts trained on")
    updates: Positive | None = Field(default=None, description="optimiser steps")
    generated_tokens: Positive | None = Field(default=None, description="response tokens sampled")
    trained_tokens: Positive | None = Field(
        default=None, description="response tokens in updates, counted at each use"
    )

    @model_validator(mode="after")
    def _something(self) -> Budget:
        if not self.declared():
            raise ValueError(f"a budget names one of {', '.join(Budget.model_fields)}")
        return self

    def declared(self) -> dict[str, int]:
        """Counter -> its limit."""
        return {n: v for n, v in self.model_dump().items() if v is not None}

    def spent(self, counters: Mapping[str, int]) -> float:
        """The share of the budget that is spent: the largest of its counters'."""
        return max(counters[n] / limit for n, limit in self.declared().items())


class Settings(_Model):
    """What is not the recipe: the same for every recipe that is compared."""

    model: str = Field(default="nano", description="nano, tiny, small, a directory or a hub id")
    budget: Budget = Field(default=Budget(rollouts=40), description="when a run ends")
    eval_every: Positive = Field(default=2, description="rollouts between evaluations")
    eval_prompts: Positive = Field(default=256, description="held-out prompts, one answer each")
    observe_every: Positive = Field(
        default=1, description="updates between two looks of the observers"
    )
    warm_start: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        default=None, description="accuracy of the supervised start; none: the task's"
    )
    checkpoint_every: Annotated[int, Field(ge=0)] = Field(
        default=0, description="rollouts between checkpoints; 0: none"
    )


class Spec(_Model):
    """A run: one recipe, task, seed and configuration."""

    recipe: Recipe
    task: Use
    seed: Annotated[int, Field(ge=0)]
    settings: Settings = Settings()
    observers: tuple[Use, ...] = tuple(Use(name=n) for n in OBSERVERS)
    stage: Literal["train", "tuning", "selection", "evaluation"] = "train"

    @model_validator(mode="after")
    def _seed_of_its_stage(self) -> Spec:
        allowed = SEEDS.get(self.stage)
        if allowed is not None and self.seed not in allowed:
            raise ValueError(
                f"seed {self.seed} is none of stage {self.stage!r}, whose seeds are "
                f"{allowed.start}-{allowed.stop - 1}"
            )
        return self

    def data(self) -> dict[str, Any]:
        """The run as plain data, from which `of` makes it again."""
        return {
            "recipe": {"name": self.recipe.name, **self.recipe.spec()},
            "task": self.task.spec(),
            "seed": self.seed,
            "settings": self.settings.model_dump(),
            "observers": [u.spec() for u in self.observers],
            "stage": self.stage,
        }

    @classmethod
    def of(cls, data: Mapping[str, Any], shelf: Shelf) -> Spec:
        """The run of plain data.

        Raises:
            LabError: for what is not valid in it.
        """
        spec = dict(data["recipe"])
        name = spec.pop("name")
        body = {
            "recipe": Recipe.of(spec, name, shelf),
            "task": use_of(data["task"], "task"),
            "seed": data["seed"],
            "settings": settings_of(data["settings"]),
            "observers": tuple(use_of(o, "observers") for o in data["observers"]),
            "stage": data["stage"],
        }
        made: Spec = checked(cls, body, "run")
        return made


def checked(model: Any, body: Mapping[str, Any], where: str) -> Any:
    """A pydantic model of a table; its first complaint in one line.

    Raises:
        LabError: for an unknown key (with the nearest name) or a value of the wrong type.
    """
    try:
        return model.model_validate(body)
    except ValidationError as e:
        error = e.errors(include_url=False)[0]
        if error["type"] == "value_error":
            raise LabError(f"{where}: {error['msg'].removeprefix('Value error, ')}") from None
        raise LabError(f"{where}: {first_error(e, model)}") from None


def settings_of(table: Mapping[str, Any], where: str = "settings") -> Settings:
    """Settings from a table; `budget` is a table of its own.

    Raises:
        LabError: for an unknown key or a value of the wrong type.
    """
    made: Settings = checked(Settings, table, where)
    return made


def use_of(given: Any, where: str) -> Use:
    """A name with settings, from a word or a table.

    Raises:
        LabError: for anything else.
    """
    spec = {"name": given} if isinstance(given, str) else given
    if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
        raise LabError(f"{where}: {given!r}; a name or a table with a name was due")
    return Use(name=spec["name"], settings={k: v for k, v in spec.items() if k != "name"})


def split_sets(sets: Iterable[str]) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """``--set`` values by where they go: the recipe's, the task's (task.*), the run's (run.*)."""
    recipe: list[str] = []
    task: dict[str, Any] = {}
    run: dict[str, Any] = {}
    for one in sets:
        table = parse_set(one)
        (first,) = table
        if first not in ("task", "run"):
            recipe.append(one)
            continue
        if not isinstance(table[first], Mapping):
            raise LabError(f"--set {one}: {first} has settings: {first}.NAME=VALUE")
        target = task if first == "task" else run
        for name, value in table[first].items():
            known = target.get(name)
            if isinstance(known, Mapping) and isinstance(value, Mapping):
                value = {**known, **value}  # noqa: PLW2901  # two settings of one table
            target[name] = value
    return recipe, task, run


def with_changes(base: Settings, changes: Mapping[str, Any], where: str) -> Settings:
    """Settings with some replaced; a budget's counters replace the whole budget.

    Raises:
        LabError: for an unknown key or a value of the wrong type.
    """
    for key in changes:
        if key not in Settings.model_fields:
            raise LabError(
                f"{where}: unknown setting {key!r}.{nearest(key, Settings.model_fields)} "
                f"It has {one_of(Settings.model_fields)}"
            )
    return settings_of({**base.model_dump(), **changes}, where)
