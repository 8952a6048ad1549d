"""Tasks small enough to be seen through: a bandit, and a chain of dependent actions."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from typing import ClassVar

from lab.task.base import Example, Task, check_range


@dataclass(frozen=True, kw_only=True)
class Bandit(Task):
    """One prompt, one token: pull an arm.

    Arm a pays 1, arm b pays 0, and the others are evenly spaced between them: c, d, ... pay
    1/(K-1), 2/(K-1), ..., (K-2)/(K-1). Three arms pay (1, 0, .5). Anything else pays 0. An arm
    ends the response, so a response is one token. With one prompt, both splits are the same.
    """

    name: ClassVar[str] = "bandit"
    shared_prompts: ClassVar[bool] = True
    isolates: ClassVar[str] = "advantage, normalize"
    control: ClassVar[str] = (
        "arms = 2: there is one log-odds to move, "
        "so at matched gradient norm every advantage moves it alike"
    )

    arms: int = 3

    def __post_init__(self) -> None:
        check_range("arms", self.arms, 2, len(string.ascii_lowercase))

    @property
    def rewards(self) -> dict[str, float]:
        """What each arm pays."""
        middle = (k / (self.arms - 1) for k in range(1, self.arms - 1))
        return dict(zip(self.stops, (1.0, 0.0, *middle), strict=True))

    def example(self, rng: random.Random) -> Example:
        return Example(prompt=">", answer="a")

    def score(self, example: Example, response: str) -> float:
        return self.rewards.get(response, 0.0)

    def responses(self) -> list[str]:
        return list(self.stops)

    @property
    def stops(self) -> str:
        return string.ascii_lowercase[: self.arms]

    @property
    def characters(self) -> str:
        return ">" + self.stops

    @property
    def budget(self) -> int:
        return 1


@dataclass(frozen=True, kw_only=True)
class Chain(Task):
    """Count on in letters: each right action follows from the policy's own action before it.

    The prompt is `stride>start`, and the right next letter is always the one before it plus the
    stride, modulo the number of symbols: of eight, `3>a` goes on d g b e (0, 3, 6, 9 - 8, 4). The
    start stands last, so the first transition looks like all others. The policy itself ends the
    response after `length` letters, with an end token.

    Terminal: 1 if all letters are right and none follows. Dense: 1/length for each letter that is
    right *after the letter that the policy wrote before it*, so one wrong letter costs one
    transition and the rest can still be earned. A response that ends early has earned what it
    has. One letter too many takes all of it back, at that letter; so both forms give 1 to the
    same response.
    """

    name: ClassVar[str] = "chain"
    warm_start: ClassVar[float] = 0.15
    isolates: ClassVar[str] = "advantage"
    control: ClassVar[str] = (
        "length = 1: one action earns the whole reward, so dense and terminal are the same"
    )

    length: int = 4
    symbols: int = 8
    dense: bool = False

    def __post_init__(self) -> None:
        check_range("length", self.length, 1, 32)
        check_range("symbols", self.symbols, 3, 10)  # a stride is one digit, one of two or more

    def example(self, rng: random.Random) -> Example:
        stride, start = rng.randrange(1, self.symbols), rng.randrange(self.symbols)
        right = [(start + stride * t) % self.symbols for t in range(1, self.length + 1)]
        return Example(
            prompt=f"{stride}>{self._letters[start]}",
            answer="".join(self._letters[k] for k in right),
        )

    def score(self, example: Example, response: str) -> float:
        if not self.dense:
            return float(response == example.answer)
        if len(response) > self.length:
            return 0.0
        return sum(self._right(example, response)) / self.length

    def token_rewards(self, example: Example, response: str) -> list[float] | None:
        if not self.dense:
            return None
        right = self._right(example, response[: self.length])
        rewards = [r / self.length for r in right]
        extra = len(response) - self.length
        return rewards if extra <= 0 else [*rewards, 0.0 - sum(rewards), *[0.0] * (extra - 1)]

    def _right(self, example: Example, response: str) -> list[bool]:
        """Whether each letter is the right one after the letter before it."""
        stride, start = example.prompt.split(">")
        follower = dict(zip(self._letters, self._turned(int(stride)), strict=True))
        before = start + response[:-1]
        return [follower.get(a) == b for a, b in zip(before, response, strict=False)]

    def _turned(self, stride: int) -> str:
        return self._letters[stride:] + self._letters[:stride]

    @property
    def _letters(self) -> str:
        return string.ascii_lowercase[: self.symbols]

    @property
    def characters(self) -> str:
        return string.digits[1 : self.symbols] + ">" + self._letters

    @property
    def budget(self) -> int:
        return self.length + 1
