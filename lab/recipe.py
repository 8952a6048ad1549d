"""A recipe: an algorithm as data, one component per slot, and the loop's settings.

A recipe's table may start from a named one (``base``). Over a base, over a recipe (a study's
overrides) and on the command line (``--set``) one rule holds, that of `merge`: a slot that names a
component is replaced, a slot that gives only parameters changes those of the component it has.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lab.errors import LabError, nearest, one_of
from lab.hookspecs import SLOTS
from lab.overrides import Spec, merge, parse_set
from lab.shelf import Shelf
from lab.spaces import Space, Trial

Positive = Annotated[int, Field(ge=1)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Use(_Model):
    """A component in a slot: its name, and its parameters and slot options as given."""

    name: str
    settings: dict[str, Any] = {}

    def spec(self) -> Spec:
        """As it stands in a recipe's table."""
        return {"name": self.name, **self.settings}


class Loop(_Model):
    """What is not the objective. Defaults are the lab's, for a small model."""

    group_size: Positive = Field(default=8, description="responses a prompt")
    prompts: Positive = Field(default=16, description="prompts a rollout")
    epochs: Positive = Field(default=4, description="passes over a rollout")
    minibatches: Positive = Field(default=4, description="updates a pass")
    lag: Annotated[int, Field(ge=0)] = Field(
        default=0, description="age of the behaviour policy, rollouts"
    )
    temperature: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="sampling temperature"
    )
    top_k: Annotated[int, Field(ge=0)] = Field(
        default=0, description="sample from the k likeliest tokens; 0: all"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="sample from the likeliest tokens of this mass; 1: all"
    )
    lr: Annotated[float, Field(gt=0)] = Field(default=1e-4, description="learning rate")
    optimizer: Literal["adamw", "sgd"] = Field(
        default="adamw", description="sgd shows gradient scale"
    )
    max_grad_norm: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="global clip; 0: off"
    )
    anchor: Literal["old", "rollout"] = Field(
        default="old", description="what the ratio is against"
    )
    kl_stop: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="stop a rollout's updates; 0: off"
    )
    critic_warmup: Annotated[int, Field(ge=0)] = Field(
        default=0, description="rollouts for the critic alone"
    )
    critic_coef: Annotated[float, Field(ge=0)] = Field(
        default=0.5, description="weight of the critic's loss"
    )
    critic: Literal["own", "shared"] = Field(
        default="own", description="a backbone of its own, or the policy's"
    )


class Recipe(_Model):
    """An algorithm. Slots left empty: no component (`ratio`, the critic's: their defaults)."""

    name: str
    doc: str = ""
    advantage: Use
    surrogate: Use
    aggregate: Use
    ratio: Use | None = None
    kl: Use | None = None
    normalize: Use | None = None
    critic_target: Use | None = None
    critic_loss: Use | None = None
    filter: tuple[Use, ...] = ()
    shape: tuple[Use, ...] = ()
    extra: tuple[Use, ...] = ()
    wrap: tuple[Use, ...] = ()
    length_weighted: bool = False
    loop: Loop = Loop()
    source: dict[str, str] = {}

    @classmethod
    def of(
        cls, spec: Mapping[str, Any], name: str, shelf: Shelf, sets: Iterable[str] = ()
    ) -> Recipe:
        """The recipe of a table, its base and overrides applied.

        Args:
            spec: what stands in the TOML table.
            name: what it is called in tables and errors.
            shelf: where `base` is looked up.
            sets: overrides as on the command line, ``surrogate.cap=3``.

        Raises:
            LabError: for an unknown or missing slot, an unknown key, a value of the wrong type.
        """
        merged = _flatten(dict(spec), name, shelf, ())
        for one in (sets := list(sets)):
            merged = merge(merged, parse_set(one), f"--set {one}")
        if sets:
            merged = _derived(merged, name, f"with {', '.join(sets)}")
        for slot, s in SLOTS.items():
            if s.required and not merged.get(slot):
                raise LabError(f"recipe {name!r} has no {slot}")
        body = {k: _typed(k, v) for k, v in merged.items()}
        try:
            return cls.model_validate({"name": name, **body})
        except ValidationError as e:
            raise LabError(f"recipe {name!r}: {first_error(e, cls)}") from None

    def spec(self) -> Spec:
        """The recipe as plain data, as it would stand in TOML (without its base)."""
        out: Spec = {"doc": self.doc}
        for slot, s in SLOTS.items():
            value = getattr(self, slot)
            if value:
                out[slot] = [u.spec() for u in value] if s.many else value.spec()
        out |= {"length_weighted": self.length_weighted, "loop": self.loop.model_dump()}
        return out | {"source": dict(self.source)}

    def uses(self) -> Iterator[tuple[str, Use]]:
        """Each filled slot and its component, in the order of a run; a list slot entry by entry."""
        for slot, s in SLOTS.items():
            value = getattr(self, slot)
            for use in value if s.many else (value,):
                if use is not None and use.name != "none":
                    yield slot, use

    def override(self, changes: Mapping[str, Any], shelf: Shelf, where: str = "override") -> Recipe:
        """The same recipe with changes over it, by the rule of `merge`."""
        return Recipe.of(merge(self.spec(), changes, where), self.name, shelf)


def load(
    given: str | Path | Mapping[str, Any] | Recipe, shelf: Shelf, sets: Iterable[str] = ()
) -> Recipe:
    """A recipe by name, from a TOML file (``FILE.toml`` or ``FILE.toml:NAME``), or from a table.

    Raises:
        LabError: if there is no such recipe, or it is not valid.
    """
    if isinstance(given, Recipe):
        return Recipe.of(given.spec(), given.name, shelf, sets)
    if isinstance(given, Mapping):
        return Recipe.of(given, "given", shelf, sets)
    file, name = _split_file(str(given))
    if file is None:
        return Recipe.of(shelf.recipe(name), name, shelf, sets)
    tables = _read_toml(file)
    if not name and len(tables) != 1:
        raise LabError(
            f"{file} holds {len(tables)} recipes ({one_of(tables)}); name one: {file}:NAME"
        )
    name = name or next(iter(tables))
    if name not in tables:
        raise LabError(
            f"{file}: no recipe {name!r}.{nearest(name, tables)} It has {one_of(tables)}"
        )
    return Recipe.of(_with_local_bases(tables, name, file), name, shelf, sets)


def spaces(recipe: Recipe, shelf: Shelf) -> dict[str, Space]:
    """Every search space that the recipe's components bring, by the path that `--set` takes."""
    found: dict[str, Space] = {}
    for slot, use in recipe.uses():
        path = f"{slot}.{use.name}" if SLOTS[slot].many else slot
        for component in shelf.find(slot, use.name):
            found |= {f"{path}.{n}": p.space for n, p in component.params.items() if p.space}
    return found


def suggest(
    trial: Trial, recipe: Recipe, shelf: Shelf, only: Iterable[str] | None = None
) -> Recipe:
    """The recipe with a trial's values for its components' own search spaces.

    Args:
        trial: any tuner's trial with Optuna's ``suggest_*`` methods.
        only: paths to draw, as in `spaces`; all of them when left out.

    Raises:
        LabError: for a path that is no search space of the recipe.
    """
    known = spaces(recipe, shelf)
    paths = list(known if only is None else only)
    for path in paths:
        if path not in known:
            raise LabError(
                f"recipe {recipe.name!r} has no search space {path!r}.{nearest(path, known)} "
                f"It has {one_of(known)}"
            )
    for path in paths:
        value = known[path].suggest(trial, path)
        changes: Any = value
        for key in reversed(path.split(".")):
            changes = {key: changes}
        recipe = recipe.override(changes, shelf, path)
    return recipe


def first_error(e: ValidationError, model: type[BaseModel]) -> str:
    """pydantic's first complaint in one line, with the nearest name for an unknown key."""
    error = e.errors(include_url=False)[0]
    path = ".".join(str(p) for p in error["loc"])
    if error["type"] == "extra_forbidden":
        *parents, key = error["loc"]
        for parent in parents:
            field = model.model_fields[str(parent)].annotation
            if isinstance(field, type) and issubclass(field, BaseModel):
                model = field
        known = model.model_fields
        return f"unknown key {path!r}.{nearest(key, known)} It has {', '.join(known)}"
    message = error["msg"][0].lower() + error["msg"][1:]
    return f"{path} = {error['input']!r}: {message}"


def _flatten(spec: Spec, name: str, shelf: Shelf, seen: tuple[str, ...]) -> Spec:
    base = spec.pop("base", None)
    if base is None:
        return merge({}, spec, f"recipe {name!r}")
    if base in seen:
        raise LabError(
            f"recipe {name!r}: base goes round in a circle: {' -> '.join((*seen, base))}"
        )
    if isinstance(base, Mapping):  # a recipe of the same file
        below = _flatten(dict(base), name, shelf, seen)
    else:
        below = _flatten(dict(shelf.recipe(str(base))), str(base), shelf, (*seen, str(base)))
    merged = merge(below, spec, f"recipe {name!r}")
    if "doc" in spec:
        return merged
    changed = [key for key in spec if key != "source"]
    what = f"with its own {', '.join(changed)}" if changed else ""
    own = dict(spec.get("source", {}))
    merged = _derived(merged, base if isinstance(base, str) else "its base", what)
    return {**merged, "source": {**merged.get("source", {}), **own}} if own else merged


def _derived(spec: Spec, base: str, what: str) -> Spec:
    """What is changed is no longer the base: neither its description nor its paper."""
    source = {path: s for path, s in spec.get("source", {}).items() if path != "recipe"}
    return {**spec, "doc": f"{base} {what}".strip(), "source": source}


def _typed(key: str, value: Any) -> Any:
    if key not in SLOTS:
        return value
    if SLOTS[key].many:
        return tuple(_use(key, v) for v in value)
    return None if value is None else _use(key, value)


def _use(slot: str, spec: Mapping[str, Any]) -> Spec:
    settings = dict(spec)
    name = settings.pop("name")
    if not isinstance(name, str):
        raise LabError(f"{slot}: name = {name!r}; a component's name is a string")
    return {"name": name, "settings": settings}


def _split_file(given: str) -> tuple[Path | None, str]:
    head, colon, name = given.partition(".toml:")
    if colon:
        return Path(head + ".toml"), name
    return (Path(given), "") if given.endswith(".toml") else (None, given)


def toml_of(file: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        LabError: if it is not there, or is none.
    """
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise LabError(f"{file}: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise LabError(f"{file} is not TOML: {e}") from None


def _read_toml(file: Path) -> dict[str, Any]:
    data = toml_of(file)
    for key in data:
        if key != "recipe":
            raise LabError(
                f"{file}: unknown table [{key}].{nearest(key, ['recipe'])} "
                "A recipe file holds [recipe.NAME]"
            )
    tables = data.get("recipe", {})
    if (
        not isinstance(tables, Mapping)
        or not tables
        or not all(isinstance(t, Mapping) for t in tables.values())
    ):
        raise LabError(f"{file}: no table [recipe.NAME]")
    return dict(tables)


def _with_local_bases(
    tables: Mapping[str, Any], name: str, file: Path, seen: tuple[str, ...] = ()
) -> Spec:
    """A recipe's table; a base that the same file holds stands in it as a table."""
    if name in seen:
        raise LabError(f"{file}: base goes round in a circle: {' -> '.join((*seen, name))}")
    spec = dict(tables[name])
    base = spec.get("base")
    if isinstance(base, str) and base in tables and base != name:
        spec["base"] = _with_local_bases(tables, base, file, (*seen, name))
    return spec
