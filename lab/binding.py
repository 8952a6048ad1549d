"""From a recipe's entry to a hook implementation: a component with its parameters fixed.

pluggy finds the arguments of an implementation by its signature, so each closure here keeps the
component's (``functools.wraps``; ``functools.partial`` would not be found) and a wrapper's closure
is itself a generator function.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lab.component import Component, Param
from lab.errors import ComponentError, LabError, nearest, one_of
from lab.hookspecs import OPTIONS, RETURNS, SPECS, hookimpl, inputs
from lab.recipe import Use
from lab.shelf import Shelf

Implementation: TypeAlias = Callable[..., Any]


@dataclass
class Moment:
    """Where a run stands: what the reserved keywords of a component are filled from.

    Attributes:
        memory: component key -> what it remembers; the loop replaces it once per rollout.
        progress: share of the budget spent, in [0,1].
        key: task, seed and step, from which a component's own random stream is derived.
    """

    memory: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    progress: float = 0.0
    key: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Bound:
    """A component as a recipe uses it: parameters and slot options settled."""

    slot: str
    component: Component
    values: Mapping[str, Any]
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Its key in `Moment.memory` and in a run's record."""
        around = "wrap." if self.component.declared.wrapper else ""
        return f"{around}{self.component.hook}.{self.component.name}"

    def declares(self, name: str) -> Any:
        """A declaration of the component at these parameters."""
        return self.component.declaration(name, self.values)

    def reserved(self, now: Moment) -> dict[str, Any]:
        """The reserved keywords that the component names."""
        out: dict[str, Any] = {}
        if "memory" in self.component.reserved:
            out["memory"] = MappingProxyType(now.memory.get(self.key, {}))
        if "progress" in self.component.reserved:
            out["progress"] = now.progress
        if "rng" in self.component.reserved:
            digest = hashlib.sha256(repr((*now.key, self.key)).encode()).digest()
            out["rng"] = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return out

    def remember(self, now: Moment, step: Mapping[str, Any]) -> None:
        """Let the component's controller replace its memory, once per rollout."""
        fn = self.component.declared.remember
        if fn is None:
            return
        named = [
            p.name for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY
        ]
        parameters = {**self.component.declared.fixed, **self.values}
        memory = MappingProxyType(now.memory.get(self.key, {}))
        try:
            result = fn(memory, step, **{n: parameters[n] for n in named})
        except Exception as e:
            raise _named(self, e, "remember: ") from e
        if not isinstance(result, Mapping):
            what = type(result).__name__
            raise ComponentError(f"{self.component}: remember returned {what}; a mapping was due")
        now.memory[self.key] = dict(result)

    def record(self) -> dict[str, Any]:
        """The choice that it is, for a run's record."""
        c = self.component
        row = {"slot": self.slot, "hook": c.hook, "name": c.name, "plugin": c.plugin}
        return {**row, "parameters": dict(self.values), "options": dict(self.options)}


def resolve(slot: str, use: Use, shelf: Shelf) -> list[Bound]:
    """The component that a recipe's entry names, with every setting found, checked and filled up.

    Raises:
        LabError: if there is no such component, parameter or option, or a value has the wrong type.
    """
    found = shelf.find(slot, use.name)
    options = {o.name: o for c in found for o in _options(c)}
    unknown = [k for k in use.settings if k not in options and k not in found[0].params]
    if unknown:
        has = [*found[0].params, *options]
        raise LabError(
            f"{slot} {use.name!r} has no parameter {unknown[0]!r}; it has {one_of(has)}."
            f"{nearest(unknown[0], has)}"
        )
    given = {k: v for k, v in use.settings.items() if k in found[0].params}
    out = []
    for c in found:
        chosen = {
            o.name: Param(o.type, o.default, None).coerce(use.settings[o.name], f"{c}: {o.name}")
            if o.name in use.settings
            else o.default
            for o in _options(c)
        }
        out.append(Bound(slot, c, c.bind(given), chosen))
    return out


def _options(c: Component) -> tuple[Any, ...]:
    return () if c.declared.wrapper else OPTIONS.get(c.hook, ())


def implement(bound: Sequence[Bound], now: Moment) -> object:
    """A pluggy plugin with one implementation: a component, a wrapper, or a list slot's entries."""
    c = bound[0].component
    if c.declared.wrapper:
        function = _wrapper(bound[0], now)
    elif len(bound) == 1 and c.hook != "observe":
        function = single(bound[0], now)
    else:
        function = _LISTS[c.hook](bound, now)
    return SimpleNamespace(
        implementation=hookimpl(specname=c.hook, wrapper=c.declared.wrapper)(function)
    )


def single(bound: Bound, now: Moment) -> Implementation:
    """The component alone, as an implementation that pluggy can call."""
    f = bound.component.function

    @functools.wraps(f)
    def call(*given: Any) -> Any:
        before = _versions(given)
        try:
            result = f(*given, **bound.values, **bound.reserved(now))
        except (Exception, SystemExit) as e:
            raise _named(bound, e) from e
        _check_unedited(bound, before, _versions(given))
        return checked(result, bound, given)

    return call


def _wrapper(bound: Bound, now: Moment) -> Implementation:
    c = bound.component

    @functools.wraps(c.function)
    def surround(*given: Any) -> Generator[None, Any, Any]:
        before = _versions(given)
        inside = c.function(*given, **bound.values, **bound.reserved(now))
        try:
            next(inside)
        except StopIteration:
            raise ComponentError(f"{c} ended before its yield; a wrapper yields once") from None
        except (Exception, SystemExit) as e:
            raise _named(bound, e) from e
        try:
            result = yield
        finally:
            finished = sys.exc_info()[0] is None
            if not finished:  # what it surrounds has failed
                inside.close()
        result = _sent(bound, inside, result)
        _check_unedited(bound, before, _versions(given))
        return checked(result, bound, given)

    return surround


def _versions(given: Sequence[Any]) -> list[int]:
    """Each tensor's count of in-place changes; inference mode keeps none."""
    if torch.is_inference_mode_enabled():
        return []
    return [x._version if isinstance(x, Tensor) and not x.is_inference() else 0 for x in given]


def _check_unedited(bound: Bound, before: list[int], after: list[int]) -> None:
    for name, old, new in zip(bound.component.inputs, before, after, strict=False):
        if old != new:  # wrappers and later entries see the same tensor
            raise ComponentError(f"{bound.component} changes its input {name} in place")


def _sent(bound: Bound, inside: Generator[None, Any, Any], result: Any) -> Any:
    try:
        inside.send(result)
    except StopIteration as e:
        return e.value
    except (Exception, SystemExit) as e:
        raise _named(bound, e) from e
    inside.close()
    raise ComponentError(f"{bound.component} has a second yield; a wrapper yields once")


def _with_inputs(hook: str, call: Callable[[dict[str, Any]], Any]) -> Implementation:
    """A function with the hook's whole vocabulary, which is how pluggy will call it."""

    @functools.wraps(SPECS[hook])
    def implementation(*given: Any) -> Any:
        return call(dict(zip(inputs(hook), given, strict=True)))

    return implementation


def _entries(bound: Sequence[Bound], now: Moment) -> list[tuple[Implementation, tuple[str, ...]]]:
    return [(single(b, now), b.component.inputs) for b in bound]


def _all_of(bound: Sequence[Bound], now: Moment) -> Implementation:
    entries = _entries(bound, now)

    def call(given: dict[str, Any]) -> Tensor:  # each entry sees all rows
        results = [f(*(given[n] for n in names)) for f, names in entries]
        both: Tensor = functools.reduce(torch.logical_and, results)
        return both

    return _with_inputs(bound[0].component.hook, call)


def _one_after_another(bound: Sequence[Bound], now: Moment) -> Implementation:
    entries = _entries(bound, now)

    def call(given: dict[str, Any]) -> Tensor:  # each entry sees the rewards of the one before
        for f, names in entries:
            given["rewards"] = f(*(given[n] for n in names))
        result: Tensor = given["rewards"]
        return result

    return _with_inputs(bound[0].component.hook, call)


def _sum_of(bound: Sequence[Bound], now: Moment) -> Implementation:
    entries = _entries(bound, now)

    def call(given: dict[str, Any]) -> Tensor:
        results = [f(*(given[n] for n in names)) for f, names in entries]
        total: Tensor = functools.reduce(torch.add, results)
        return total

    return _with_inputs(bound[0].component.hook, call)


_LISTS: Mapping[str, Callable[[Sequence[Bound], Moment], Implementation]] = {
    "keep": _all_of,
    "shape_reward": _one_after_another,
    "extra_loss": _sum_of,
}


def checked(result: Any, bound: Bound, given: Sequence[Any]) -> Any:
    """What a component returned, if it is what its hook is due.

    Raises:
        ComponentError: for None (pluggy would fall through to another implementation), for what
            is no tensor, and for another shape or dtype than the hook's.
    """
    c = bound.component
    if result is None:
        raise ComponentError(f"{c} returned nothing; is there a `return`?")
    if c.hook == "observe":
        return _numbers(result, c)
    kind = RETURNS[c.hook]
    if not isinstance(result, Tensor):
        raise ComponentError(f"{c} returned {type(result).__name__} where a tensor was due")
    due, ndim = ("[B,T]", 2) if kind == "PerToken" else ("[B]", 1)
    like = next((x for x in given if isinstance(x, Tensor) and x.ndim == ndim), None)
    # where no input can tell the shape, the bench does, by the mask
    if like is not None and result.shape != like.shape:
        raise ComponentError(f"{c} returned {_shape(result, given)} where {due} was due")
    floats = [x.dtype for x in given if isinstance(x, Tensor) and x.is_floating_point()]
    wanted = torch.bool if kind == "RowFlag" else (*floats, result.dtype)[0]
    if result.dtype != wanted:
        raise ComponentError(f"{c} returned {result.dtype} where {wanted} was due")
    return result


def _numbers(result: Any, c: Component) -> dict[str, float]:
    if not isinstance(result, Mapping):
        raise ComponentError(f"{c} returned {type(result).__name__} where a mapping was due")
    for name, number in result.items():
        single_number = isinstance(number, int | float) or (
            isinstance(number, Tensor) and number.numel() == 1
        )
        if not isinstance(name, str) or not single_number:
            raise ComponentError(f"{c} records {name!r}: {number!r}; a name and a number were due")
    return {name: float(number) for name, number in result.items()}


def _shape(result: Tensor, given: Sequence[Any]) -> str:
    """A shape in the hook's letters where it can be told, else in numbers."""
    for x in given:
        if isinstance(x, Tensor) and x.ndim == 2 and x.shape[0] != x.shape[1]:
            letters = {x.shape[0]: "B", x.shape[1]: "T"}
            return "[" + ",".join(letters.get(n, str(n)) for n in result.shape) + "]"
    return str(list(result.shape))


def _named(bound: Bound, e: BaseException, what: str = "") -> LabError:
    """An exception of a component as an error that names it; illegal values are ValueErrors."""
    c = bound.component
    text = " ".join(str(e).split())
    if isinstance(e, ComponentError):
        return e
    if isinstance(e, ValueError | LabError):
        return ComponentError(f"{c}: {what}{text}")
    line, trace, file = "", e.__traceback__, inspect.unwrap(c.function).__code__.co_filename
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = f" (line {trace.tb_lineno})"
        trace = trace.tb_next
    return ComponentError(f"{c} of {c.plugin} raised {what}{type(e).__name__}: {text}{line}")
