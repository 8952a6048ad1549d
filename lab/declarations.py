"""What a component may declare of itself: read once, with its parameters, and checked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lab.errors import LabError, one_of
from lab.hooks import Declared

#: Declaration -> what is due; each may also be a function of the component's parameters.
DUE = {
    "needs_group": "a whole number of rows, at least 1,",
    "sequence_level": "true or false",
    "whole_batch": "true or false",
    "corrects": "'rollout' or none",
    "bounds": "a function of the parameters that returns (low, high), low at most high,",
}


def check(declared: Declared, parameters: Iterable[str], where: str) -> None:
    """What can be told before any parameter has a value.

    Raises:
        LabError: naming the declaration, what was given and what was due.
    """
    every = {*parameters, *declared.fixed}
    for name in (*DUE, "remember"):
        found = getattr(declared, name)
        if callable(found):
            _check_names(name, found, every, where)
        elif name == "remember" and found is not None:
            raise LabError(f"{where}: remember={found!r}; a function fn(memory, step) was due")
        elif name == "bounds" and found is not None:
            raise LabError(f"{where}: bounds={found!r}; {DUE[name]} was due")
        elif name in DUE:
            _check_value(name, found, where)
    exempt = declared.exempt
    reasons = exempt.items() if isinstance(exempt, Mapping) else [(exempt, None)]
    if not all(isinstance(x, str) and x for row in reasons for x in row):
        raise LabError(f"{where}: exempt={exempt!r}; a mapping from property to reason was due")


def resolve(declared: Declared, name: str, values: Mapping[str, Any], where: str) -> Any:
    """A declaration at these parameters.

    Raises:
        LabError: if it is a function that fails or returns what is not due.
    """
    found = getattr(declared, name)
    if not callable(found):
        return found
    try:
        result = call_by_name(found, {**declared.fixed, **values})
    except Exception as e:
        raise LabError(f"{where}: {name} raised {type(e).__name__}: {e}") from e
    _check_value(name, result, where)
    return result


def call_by_name(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call a function with those of the values that it names."""
    return function(**{n: values[n] for n in inspect.signature(function).parameters if n in values})


def _check_names(name: str, found: Callable[..., Any], every: set[str], where: str) -> None:
    asked = list(inspect.signature(found).parameters.values())
    if name == "remember":
        positional = [p for p in asked if p.kind is not p.KEYWORD_ONLY]
        if len(positional) != 2:
            raise LabError(f"{where}: remember takes (memory, step), then parameters after '*'")
        asked = [p for p in asked if p.kind is p.KEYWORD_ONLY]
    for p in asked:
        if p.name not in every:
            raise LabError(
                f"{where}: {name} names {p.name!r}, no parameter of it; it has {one_of(every)}"
            )


def _check_value(name: str, value: Any, where: str) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    right = {
        "needs_group": whole and value >= 1,
        "sequence_level": isinstance(value, bool),
        "whole_batch": isinstance(value, bool),
        "corrects": value in (None, "rollout"),
        "bounds": value is None or _is_interval(value),
    }[name]
    if not right:
        raise LabError(f"{where}: {name}={value!r}; {DUE[name]} was due")


def _is_interval(value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    low, high = value
    numbers = all(x is None or (isinstance(x, int | float) and not math.isnan(x)) for x in value)
    return numbers and (low is None or high is None or low <= high)
