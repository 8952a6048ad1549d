"""One component as the shelf sees it: its hook, inputs, parameters and declarations, all read off
the function's signature and its mark.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from lab import declarations
from lab.errors import LabError, nearest, one_of
from lab.hooks import MARK, Declared
from lab.hookspecs import OPTIONS, RESERVED, SLOT_OF, inputs
from lab.spaces import Choice, Float, Int, Space

REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class Param:
    """A hyperparameter: its type, its default (REQUIRED where there is none), its search space."""

    type: Any
    default: Any
    space: Space | None

    def coerce(self, value: Any, where: str) -> Any:
        """The value in the parameter's type. "none" stands for None, which TOML cannot say."""
        optional = type(None) in get_args(self.type) or self.type is type(None)
        if optional and isinstance(value, str) and value.lower() == "none":
            return None
        if isinstance(value, list) and get_origin(self.type) is tuple:
            value = tuple(value)  # TOML has arrays only
        if isinstance(value, float) and math.isnan(value):
            raise LabError(f"{where}={value!r} is not a number")
        try:
            adapter = TypeAdapter(self.type, config=ConfigDict(strict=True))
            return adapter.validate_python(value)
        except ValidationError:
            raise LabError(f"{where}={value!r} is not {type_name(self.type)}") from None

    def __str__(self) -> str:
        return type_name(self.type) + (f" {self.space}" if self.space else "")


@dataclass(frozen=True, eq=False)
class Component:
    """One function on one hook, as found in a plugin."""

    declared: Declared
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    reserved: tuple[str, ...]
    params: Mapping[str, Param]
    plugin: str

    @property
    def name(self) -> str:
        return self.declared.name

    @property
    def hook(self) -> str:
        return self.declared.hook

    @property
    def slot(self) -> str:
        """The slot that it fills; observers stand in the study's list."""
        return "wrap" if self.declared.wrapper else SLOT_OF.get(self.hook, self.hook)

    @property
    def doc(self) -> str:
        """The first docstring line: its row in `lab plugins`."""
        return (inspect.getdoc(self.function) or "").split("\n")[0]

    def __str__(self) -> str:
        return f"{self.slot} {self.name!r}"

    def bind(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Every parameter's value: those given, checked against their types, and the defaults."""
        for name in given:
            if name not in self.params:
                known = {*self.params, *(o.name for o in OPTIONS.get(self.hook, ()))}
                raise LabError(
                    f"{self} has no parameter {name!r}; it has {one_of(self.params)}."
                    f"{nearest(name, known)}"
                )
        values = {
            n: p.coerce(given[n], f"{self}: {n}") for n, p in self.params.items() if n in given
        }
        for name, p in self.params.items():
            if name not in values and p.default is REQUIRED:
                raise LabError(f"{self} needs a value for {name} ({p})")
            values.setdefault(name, p.default)
        return values

    def declaration(self, name: str, values: Mapping[str, Any]) -> Any:
        """A declaration at these parameters."""
        return declarations.resolve(self.declared, name, values, f"{self}")


def type_name(kind: Any) -> str:
    """A type as a person would write it: ``float``, ``float | None``, ``'std' or 'none'``."""
    if get_origin(kind) is not None and str(kind).startswith("typing.Literal"):
        return " or ".join(repr(a) for a in get_args(kind))
    return getattr(kind, "__name__", str(kind)) if get_origin(kind) is None else str(kind)


def describe(function: Callable[..., Any], plugin: str) -> Component:
    """The component that a marked function is.

    Raises:
        LabError: for an input that the hook does not have, an input with a default, a collector of
            arguments, a default outside its search space, a taken name, a bad declaration.
    """
    declared: Declared = getattr(function, MARK)
    where = f"{plugin}: {declared.name}"
    parameters = inspect.signature(function).parameters.values()
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    taken = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
    for p in parameters:
        _check_argument(p, declared.hook, where)
    _check_generator(function, declared, where)
    hints = _hints(function, keywords, where)
    params = {p.name: _param(p, hints, where) for p in keywords if p.name not in RESERVED}
    for option in OPTIONS.get(declared.hook, ()):
        if option.name in params:
            raise LabError(
                f"{where}: {option.name!r} is an option of the slot; rename the parameter"
            )
    if "name" in params:
        raise LabError(
            f"{where}: 'name' is a component's own key in a recipe; rename the parameter"
        )
    component = Component(
        declared=declared,
        function=function,
        inputs=taken,
        reserved=tuple(p.name for p in keywords if p.name in RESERVED),
        params=params,
        plugin=plugin,
    )
    if not component.doc:
        raise LabError(f"{where}: no docstring; its first line is the row in `lab plugins`")
    declarations.check(declared, params, where)
    return component


def _check_argument(p: inspect.Parameter, hook: str, where: str) -> None:
    if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
        raise LabError(f"{where}: {p} collects arguments; name each input and hyperparameter")
    if p.kind is p.KEYWORD_ONLY:
        return
    if p.default is not p.empty:
        raise LabError(
            f"{where}: {p.name!r} has a default but is not keyword-only; "
            "put hyperparameters after '*'"
        )
    if p.name not in inputs(hook):
        hint = nearest(p.name, inputs(hook))
        raise LabError(
            f"{where}: {p.name!r} is no input of {hook}.{hint} "
            f"It may take {', '.join(inputs(hook))}; hyperparameters go after '*'"
        )


def _check_generator(function: Callable[..., Any], declared: Declared, where: str) -> None:
    yields = inspect.isgeneratorfunction(function)
    if declared.wrapper and not yields:
        raise LabError(
            f"{where}: a wrapper yields once, `result = yield`, and returns the new result"
        )
    if yields and not declared.wrapper:
        raise LabError(
            f"{where}: it yields, so it is a wrapper; say @{declared.hook}(wrapper=True)"
        )


def _hints(
    function: Callable[..., Any], keywords: list[inspect.Parameter], where: str
) -> dict[str, Any]:
    """The hyperparameters' types only: an input's annotation may name what is not imported."""
    namespace = inspect.unwrap(function).__globals__
    hints: dict[str, Any] = {}
    for p in keywords:
        if p.annotation is p.empty or p.name in RESERVED:
            continue
        holder = types.SimpleNamespace(__annotations__={p.name: p.annotation})
        try:
            hints |= get_type_hints(holder, globalns=namespace, include_extras=True)
        except Exception as e:
            raise LabError(f"{where}: {p.name}: {p.annotation!r} cannot be read: {e}") from e
    return hints


def _param(p: inspect.Parameter, hints: Mapping[str, Any], where: str) -> Param:
    hint = hints.get(p.name, Any if p.default in (None, p.empty) else type(p.default))
    found = [m for m in getattr(hint, "__metadata__", ()) if isinstance(m, (Float, Int, Choice))]
    if len(found) > 1:
        raise LabError(f"{where}: {p.name} has {len(found)} search spaces; one is due")
    param = Param(
        getattr(hint, "__origin__", hint) if found else hint, p.default, (*found, None)[0]
    )
    try:
        TypeAdapter(param.type)
    except PydanticUserError:
        kind = type_name(param.type)
        raise LabError(f"{where}: {p.name}: {kind} is no type that a recipe could hold") from None
    if p.default is REQUIRED:
        return param
    param.coerce(p.default, f"{where}: default {p.name}")
    outside = param.space is not None and p.default is not None and p.default not in param.space
    if outside:
        raise LabError(
            f"{where}: default {p.name}={p.default!r} lies outside its search space {param.space!r}"
        )
    return param
