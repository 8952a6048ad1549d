"""What a task is: prompts and a verifier, as text. Tokens, sampling and tensors are the core's.

A task of one's own is a frozen dataclass, and its fields are its difficulty knobs::

    @dataclass(frozen=True, kw_only=True)
    class Shout(Task):
        "Repeat a word in capitals."
        name: ClassVar[str] = "shout"
        letters: int = 4

        def example(self, rng: random.Random) -> Example:
            word = "".join(rng.choices("abc", k=self.letters))
            return Example(prompt=f"{word}>", answer=word.upper())

        @property
        def characters(self) -> str:
            return ">ABCabc"

        @property
        def budget(self) -> int:
            return self.letters + 1
"""

from __future__ import annotations

import abc
import hashlib
import random
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, get_args

from lab.errors import LabError, nearest

Split: TypeAlias = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = get_args(Split)
#: Examples in a row that may fall into the other split before this one counts as empty.
TRIES = 10_000


@dataclass(frozen=True)
class Example:
    """A prompt and one right answer; a task whose verifier needs more makes a subclass of it."""

    prompt: str  # what the policy reads
    answer: str  # what a supervised warm start learns; the verifier may accept others


@dataclass(frozen=True, kw_only=True)
class Task(abc.ABC):
    """Prompts and a verifier. The fields of a subclass are its settings: int, float, bool or str.

    An illegal setting is for `__post_init__` to refuse (`raise ValueError`).

    Attributes:
        name: the task's name in a study, and the name under which `@tasks` returns the class.
        version: raised when prompts, answers or scores change; it is part of a run's identity.
        warm_start: the accuracy to which the supervised warm start goes; 0: none is needed.
        optimum: the mean score of the best policy.
        shared_prompts: there are too few prompts to hold any out: both splits are all of them.
        isolates: the slots whose components this task tells apart.
        control: the setting at which recipes that differ in these slots only must tie.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    warm_start: ClassVar[float] = 0.0
    optimum: ClassVar[float] = 1.0
    shared_prompts: ClassVar[bool] = False
    isolates: ClassVar[str] = ""
    control: ClassVar[str] = ""

    @abc.abstractmethod
    def example(self, rng: random.Random) -> Example:
        """One example of either split, from this generator's draws alone."""

    @property
    @abc.abstractmethod
    def characters(self) -> str:
        """Every character that a prompt or a right answer may hold, sorted, each once."""

    @property
    @abc.abstractmethod
    def budget(self) -> int:
        """The most tokens that a response may have, its end token included."""

    @property
    def stops(self) -> str:
        """Characters after which a response ends by itself, without an end token."""
        return ""

    def score(self, example: Example, response: str) -> float | None:
        """The score of a response, in [0, 1]; by default 1 for the answer and 0 for all else.

        The response is the text before the end token; a stop character is part of it. None: the
        verifier has none, so the row leaves the rollout, and is counted.
        """
        return float(response == example.answer)

    def token_rewards(self, example: Example, response: str) -> list[float] | None:
        """One reward for each character of the response, which sum to its score.

        None: the whole score is earned at the end.
        """
        return None

    def responses(self) -> list[str] | None:
        """Every response that can earn anything, where they can be listed: all others score 0.

        So J = sum of pi(response) score(response) over them is exact. None: too many.
        """
        return None

    def draw(self, split: Split, rng: random.Random, n: int) -> list[Example]:
        """Examples of one split, with replacement; the first k do not depend on n.

        A prompt belongs to one split whatever the generator, the settings or the process (see
        `split_of`), so nothing held out is ever trained on, at other settings either.

        Raises:
            LabError: if there is no such split, or no example falls into it.
        """
        if split not in SPLITS:
            raise LabError(
                f"task {self.name!r}: no split {split!r}.{nearest(split, SPLITS)} "
                f"Available: {', '.join(SPLITS)}"
            )
        return [self._one(split, rng) for _ in range(n)]

    def _one(self, split: Split, rng: random.Random) -> Example:
        for _ in range(TRIES):
            example = self.example(rng)
            if not isinstance(example, Example):
                raise LabError(
                    f"task {self.name!r}: example returned {type(example).__name__} "
                    "where an Example was due"
                )
            if self.shared_prompts or self.split_of(example.prompt) == split:
                return example
        raise LabError(
            f"task {self.name!r}: {TRIES} examples in a row and none is {split}: too few prompts. "
            "Choose settings with more, or declare shared_prompts = True"
        )

    def split_of(self, prompt: str) -> Split:
        """The split of a prompt: a quarter is held out, by a hash of name, version and prompt."""
        key = f"{self.name}/{self.version}/{prompt}"
        digest = hashlib.sha256(key.encode()).hexdigest()  # hash() differs between processes
        return "held_out" if int(digest, 16) % 4 == 0 else "train"


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Refuse a setting outside low..high by ValueError."""
    if not low <= value <= high:
        raise ValueError(f"{name}={value} lies outside {low}..{high}")
