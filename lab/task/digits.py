"""Tasks on digits: copy, reverse, sort, add. The right answer is unique, and its length is fixed.

A prompt ends in `>`. The policy ends its answer with an end token; the answer alone scores 1, and
anything before or after it, a missing zero included, makes that 0.
"""

from __future__ import annotations

import abc
import random
import string
from dataclasses import dataclass
from typing import ClassVar

from lab.task.base import Example, Task, check_range

LONGEST = 32


@dataclass(frozen=True, kw_only=True)
class Digits(Task):
    """A task on digits that are drawn evenly and independently of each other."""

    warm_start: ClassVar[float] = 0.15
    isolates: ClassVar[str] = "ratio, surrogate"
    control: ClassVar[str] = (
        "loop.lag = 0 and one update per rollout: every ratio is 1, "
        "so surrogates that differ only away from 1 have one gradient"
    )

    digits: int = 5

    def __post_init__(self) -> None:
        check_range("digits", self.digits, 1, LONGEST)

    def example(self, rng: random.Random) -> Example:
        given = self._number(rng)
        return Example(prompt=f"{given}>", answer=self.solve(given))

    def _number(self, rng: random.Random) -> str:
        return "".join(rng.choices(string.digits, k=self.digits))

    @abc.abstractmethod
    def solve(self, given: str) -> str:
        """The right answer."""

    @property
    def characters(self) -> str:
        return string.digits + ">"

    @property
    def budget(self) -> int:
        return self.digits + 1


@dataclass(frozen=True, kw_only=True)
class Copy(Digits):
    """Repeat the digits: `38291>` asks for 38291."""

    name: ClassVar[str] = "copy"

    def solve(self, given: str) -> str:
        return given


@dataclass(frozen=True, kw_only=True)
class Reverse(Digits):
    """Write the digits backwards: `38291>` asks for 19283."""

    name: ClassVar[str] = "reverse"

    def solve(self, given: str) -> str:
        return given[::-1]


@dataclass(frozen=True, kw_only=True)
class Sort(Digits):
    """Write the digits in order, smallest first: `382914>` asks for 123489."""

    name: ClassVar[str] = "sort"

    digits: int = 6

    def solve(self, given: str) -> str:
        return "".join(sorted(given))


@dataclass(frozen=True, kw_only=True)
class Addition(Digits):
    """Add two numbers; `reversed` writes the sum's lowest digit first: `58+67>` asks for 521.

    Numbers have `digits` digits and the sum has one more, with leading zeros where needed
    (`07+05>` asks for 210): every prompt and every answer has one length. Lowest digit first is
    the order of carrying, which small models learn. `12+34` and `34+12` are two prompts, and
    either may be held out alone.
    """

    name: ClassVar[str] = "addition"

    digits: int = 2
    reversed: bool = True

    def example(self, rng: random.Random) -> Example:
        given = f"{self._number(rng)}+{self._number(rng)}"
        return Example(prompt=f"{given}>", answer=self.solve(given))

    def solve(self, given: str) -> str:
        total = sum(int(number) for number in given.split("+"))
        answer = f"{total:0{self.digits + 1}d}"
        return answer[::-1] if self.reversed else answer

    @property
    def characters(self) -> str:
        return "+" + super().characters

    @property
    def budget(self) -> int:
        return self.digits + 2
