"""Search spaces that ride on a hyperparameter's annotation.

``tau: Annotated[float, Float(0.5, 4.0, log=True)] = 1.0``. A space is advice for tuning, not the
legal range: an illegal value is for the component to refuse. ``suggest`` asks the trial of any
tuner that has Optuna's ``suggest_*`` methods; nothing here imports one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from lab.errors import LabError


class Trial(Protocol):
    """What a space asks of a tuner's trial (Optuna's names)."""

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float: ...
    def suggest_int(self, name: str, low: int, high: int, *, log: bool = False) -> int: ...
    def suggest_categorical(self, name: str, choices: Any) -> Any: ...


def _check_range(space: Float | Int) -> None:
    kind = type(space).__name__
    for end in (space.low, space.high):
        whole = isinstance(end, int) and not isinstance(end, bool)
        if not (whole or (kind == "Float" and isinstance(end, float) and math.isfinite(end))):
            raise LabError(
                f"{kind}({space.low!r}, {space.high!r}): {end!r} is no finite number of it"
            )
    if not space.low < space.high:
        raise LabError(f"{kind}({space.low}, {space.high}): low must lie below high")
    if space.log and space.low <= 0:
        raise LabError(f"{kind}({space.low}, {space.high}, log=True): a log range starts above 0")


@dataclass(frozen=True)
class Float:
    """A real number in [low, high], drawn evenly or evenly in its logarithm."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        _check_range(self)

    def __contains__(self, x: object) -> bool:
        return _is_number(x) and self.low <= x <= self.high  # type: ignore[operator]  # narrowed above

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}" + (" log" if self.log else "")

    def suggest(self, trial: Trial, name: str) -> float:
        return trial.suggest_float(name, self.low, self.high, log=self.log)

    def probes(self) -> tuple[float, ...]:
        """Both ends and the middle: where a component is tried."""
        middle = (self.low * self.high) ** 0.5 if self.log else (self.low + self.high) / 2
        return self.low, middle, self.high


@dataclass(frozen=True)
class Int:
    """A whole number in [low, high], drawn evenly or evenly in its logarithm."""

    low: int
    high: int
    log: bool = False

    def __post_init__(self) -> None:
        _check_range(self)

    def __contains__(self, x: object) -> bool:
        return isinstance(x, int) and not isinstance(x, bool) and self.low <= x <= self.high

    def __str__(self) -> str:
        return f"{self.low}..{self.high}" + (" log" if self.log else "")

    def suggest(self, trial: Trial, name: str) -> int:
        return trial.suggest_int(name, self.low, self.high, log=self.log)

    def probes(self) -> tuple[int, ...]:
        """Both ends and the middle: where a component is tried."""
        middle = (self.low * self.high) ** 0.5 if self.log else (self.low + self.high) / 2
        return self.low, round(middle), self.high


@dataclass(frozen=True, init=False)
class Choice:
    """One of the options."""

    options: tuple[Any, ...]

    def __init__(self, *options: Any) -> None:
        if len(options) < 2:
            raise LabError(f"Choice{options}: a choice needs at least two options")
        for option in options:
            if not isinstance(option, str | int | float | bool | None):
                raise LabError(
                    f"Choice{options}: {option!r} is no word, number, true, false or none"
                )
        object.__setattr__(self, "options", options)

    def __contains__(self, x: object) -> bool:
        return x in self.options

    def __str__(self) -> str:
        return "|".join(map(str, self.options))

    def suggest(self, trial: Trial, name: str) -> Any:
        return trial.suggest_categorical(name, self.options)

    def probes(self) -> tuple[Any, ...]:
        """Every option: where a component is tried."""
        return self.options


Space: TypeAlias = Float | Int | Choice


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)
