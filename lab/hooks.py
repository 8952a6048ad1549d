"""Decorators for component authors: ``@surrogate`` makes a function a component of that hook.

Bare (``@surrogate``) or with declarations (``@ratio(sequence_level=True)``). The function is
returned unchanged: it stays a plain function of tensors that can be called and tested alone.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, overload

from lab.errors import LabError, nearest
from lab.hookspecs import hookimpl

F = TypeVar("F", bound=Callable[..., Any])
MARK = "lab_component"
#: What a recipe can write: a dot would split the path of --set.
NAME = re.compile(r"\w[\w:+-]*")
MOMENTS = ("update", "rollout", "eval")

Bounds: TypeAlias = Callable[..., tuple[float | None, float | None]]
#: ``fn(memory, step, *, ...) -> dict``: keyword-only names are the component's own parameters.
Remember: TypeAlias = Callable[..., Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What a component says of itself; the recipe is checked against it when it is built.

    Every declaration may be a function of the component's parameters, by name.
    """

    hook: str
    name: str
    wrapper: bool = False
    needs_group: int | Callable[..., int] = 1
    sequence_level: bool | Callable[..., bool] = False
    whole_batch: bool | Callable[..., bool] = False
    corrects: str | None | Callable[..., str | None] = None
    bounds: Bounds | None = None
    remember: Remember | None = None
    exempt: Mapping[str, str] = field(default_factory=dict)
    at: str = "update"
    fixed: Mapping[str, Any] = field(default_factory=dict)


DECLARATIONS = tuple(f.name for f in fields(Declared) if f.name not in ("hook", "at", "fixed"))


class Decorator(Protocol):
    """Marks a function as a component of one hook.

    Args:
        name: its name in a recipe; the function's own when left out.
        wrapper: surrounds the hook: a generator that yields once and returns the new result.
        needs_group: the fewest rows that a group must have.
        sequence_level: wants an aggregation that weighs every row alike.
        whole_batch: reads statistics of the optimisation batch, so it is called unsliced.
        corrects: ``"rollout"`` when it already corrects for the sampler (old against rollout).
        bounds: the ratio interval from the parameters by name, ``(low, high)``; None: inactive.
        remember: called by the loop once per rollout; what it returns is the next ``memory``.
        exempt: properties of `lab check` that do not hold for it, each with the reason.
    """

    @overload
    def __call__(self, function: F, /) -> F: ...
    @overload
    def __call__(
        self,
        *,
        name: str | None = None,
        wrapper: bool = False,
        needs_group: int | Callable[..., int] = 1,
        sequence_level: bool | Callable[..., bool] = False,
        whole_batch: bool | Callable[..., bool] = False,
        corrects: str | None | Callable[..., str | None] = None,
        bounds: Bounds | None = None,
        remember: Remember | None = None,
        exempt: Mapping[str, str] = ...,
    ) -> Callable[[F], F]: ...


class ObserveDecorator(Protocol):
    """Marks a function as an observer; ``at``: when it is called, update, rollout or eval."""

    @overload
    def __call__(self, function: F, /) -> F: ...
    @overload
    def __call__(
        self, *, name: str | None = None, at: Literal["update", "rollout", "eval"] = "update"
    ) -> Callable[[F], F]: ...


def _decorator(hook: str, allowed: tuple[str, ...] = DECLARATIONS) -> Any:
    def decorate(function: Any = None, /, **declared: Any) -> Any:
        for given in declared:
            if given not in allowed:
                raise LabError(
                    f"@{hook}({given}=...) is no declaration.{nearest(given, allowed)} "
                    f"There are {', '.join(allowed)}"
                )

        def mark(f: F) -> F:
            chosen = {**declared, "name": declared.get("name", getattr(f, "__name__", None))}
            return _mark(f, Declared(hook=hook, **chosen))

        return mark if function is None else mark(function)

    decorate.__name__ = decorate.__qualname__ = hook
    decorate.__doc__ = f"Make a function a component of the `{hook}` hook (see lab.hookspecs)."
    return decorate


def _mark(f: F, declared: Declared) -> F:
    if not inspect.isfunction(f):
        raise LabError(f"@{declared.hook}: {f!r} is no function; a component is one")
    if not isinstance(declared.name, str) or not NAME.fullmatch(declared.name):
        raise LabError(
            f"@{declared.hook}: name={declared.name!r}; letters, digits, _, -, + and : make a name"
        )
    if declared.name == "none":
        raise LabError(f"@{declared.hook}: the name 'none' is taken: it empties a slot")
    earlier: Declared | None = getattr(f, MARK, None)
    if earlier is not None:
        raise LabError(
            f"{f.__module__}: {f.__name__!r} is a component of {earlier.hook} already, and now of "
            f"{declared.hook}; one function is one component"
        )
    if declared.at not in MOMENTS:
        raise LabError(f"@observe: at={declared.at!r}; it may be {', '.join(MOMENTS)}")
    _refuse_shadowing(f, declared)
    setattr(f, MARK, declared)
    return hookimpl(specname=declared.hook, wrapper=declared.wrapper)(f)


def _refuse_shadowing(f: Callable[..., Any], declared: Declared) -> None:
    """Two components under one function name in one module: Python would keep the second only.

    A module that is loaded again (same file, new ``__spec__``), a notebook cell that is run again
    (another file name) and a prompt (``<stdin>``) may redefine what they defined before.
    """
    earlier = f.__globals__.get(f.__name__)
    old: Declared | None = getattr(earlier, MARK, None)
    same_run = getattr(earlier, "lab_run_of", None) is f.__globals__.get("__spec__")
    setattr(f, "lab_run_of", f.__globals__.get("__spec__"))  # noqa: B010  # F has no such attribute
    if old is None or not same_run or "<locals>" in f.__qualname__:
        return
    here = f.__code__.co_filename
    if earlier.__code__.co_filename == here and not here.startswith("<"):  # type: ignore[union-attr]
        raise LabError(
            f"{f.__module__}: {f.__name__!r} is defined twice ({old.hook} and {declared.hook}), "
            "so the first would be lost; rename one and give it name="
        )


def alias(function: F, name: str, doc: str, /, **fixed: Any) -> F:
    """The same component under another name, with some of its parameters fixed.

    Args:
        function: a component.
        name: the new name in a recipe.
        doc: its docstring; the first line is its row in `lab plugins`.
        fixed: parameters that the alias settles; they are no longer parameters of it.

    Raises:
        LabError: if ``function`` is no component or has no such parameter.
    """
    declared: Declared | None = getattr(function, MARK, None)
    if declared is None:
        raise LabError(
            f"alias {name!r}: {getattr(function, '__name__', function)!r} is no component"
        )
    signature = inspect.signature(function)
    for parameter in fixed:
        if (
            getattr(signature.parameters.get(parameter), "kind", None)
            != inspect.Parameter.KEYWORD_ONLY
        ):
            raise LabError(f"alias {name!r}: {declared.name!r} has no parameter {parameter!r}")

    renamed = _with_fixed(function, fixed, declared.wrapper)
    left = [p for p in signature.parameters.values() if p.name not in fixed]
    renamed.__name__ = renamed.__qualname__ = name
    renamed.__doc__ = doc
    renamed.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]  # PEP 362
    renamed.__module__ = sys._getframe(1).f_globals["__name__"]  # it is of the plugin that says so
    merged = {**declared.__dict__, "name": name, "fixed": {**declared.fixed, **fixed}}
    setattr(renamed, MARK, Declared(**merged))
    return renamed


def _with_fixed(function: F, fixed: Mapping[str, Any], wrapper: bool) -> F:
    @functools.wraps(function)
    def call(*inputs: Any, **parameters: Any) -> Any:
        return function(*inputs, **fixed, **parameters)

    @functools.wraps(function)
    def surround(*inputs: Any, **parameters: Any) -> Any:  # pluggy wants a generator function
        return (yield from function(*inputs, **fixed, **parameters))

    return surround if wrapper else call  # type: ignore[return-value]  # same inputs, fewer parameters


def recipes(function: F) -> F:
    """Mark a function without arguments that returns named recipes."""
    return hookimpl(specname="recipes")(function)


def tasks(function: F) -> F:
    """Mark a function without arguments that returns named tasks."""
    return hookimpl(specname="tasks")(function)


def executors(function: F) -> F:
    """Mark a function without arguments that returns named executors."""
    return hookimpl(specname="executors")(function)


keep: Decorator = _decorator("keep")
shape_reward: Decorator = _decorator("shape_reward")
kl_reward: Decorator = _decorator("kl_reward")
advantage: Decorator = _decorator("advantage")
critic_target: Decorator = _decorator("critic_target")
normalize: Decorator = _decorator("normalize")
ratio: Decorator = _decorator("ratio")
surrogate: Decorator = _decorator("surrogate")
kl_loss: Decorator = _decorator("kl_loss")
extra_loss: Decorator = _decorator("extra_loss")
critic_loss: Decorator = _decorator("critic_loss")
aggregate: Decorator = _decorator("aggregate")
observe: ObserveDecorator = _decorator("observe", ("name", "at"))
