"""Search spaces: what lies inside, where a component is tried, what a tuner is asked."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lab.errors import LabError
from lab.spaces import Choice, Float, Int


class Recorder:
    """A trial that writes down what it is asked, and answers with the lower end."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        self.asked.append(("float", name, low, high, log))
        return low

    def suggest_int(self, name: str, low: int, high: int, *, log: bool = False) -> int:
        self.asked.append(("int", name, low, high, log))
        return low

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        self.asked.append(("categorical", name, tuple(choices)))
        return choices[-1]


@pytest.mark.parametrize(
    ("space", "inside", "outside"),
    [
        # both ends belong to it; True is no number although bool is an int; NaN compares with none
        (Float(0.5, 4.0), (0.5, 4.0, 1, 2.5), (0.49, 4.01, math.nan, math.inf, True, "1", None)),
        # a whole float is no int: it would reach range() or a Literal as 2.0
        (Int(1, 3), (1, 2, 3), (0, 4, 2.0, True, "2", None)),
        (Choice("std", "none", None), ("std", "none", None), ("Std", "", 0)),
    ],
    ids=["Float", "Int", "Choice"],
)
def test_the_ends_are_inside_and_look_alikes_are_not(space: Any, inside: Any, outside: Any) -> None:
    assert [x for x in inside if x not in space] == []
    assert [x for x in outside if x in space] == []


@pytest.mark.parametrize("kind", [Float, Int])
@pytest.mark.parametrize(("low", "high"), [(2, 1), (1, 1)])
def test_a_range_without_room_is_refused(kind: Any, low: int, high: int) -> None:
    with pytest.raises(LabError, match=rf"{kind.__name__}\({low}, {high}\): low must lie below"):
        kind(low, high)


@pytest.mark.parametrize("kind", [Float, Int])
@pytest.mark.parametrize("low", [0, -1])
def test_a_log_range_that_touches_zero_is_refused(kind: Any, low: int) -> None:
    with pytest.raises(LabError, match="a log range starts above 0"):
        kind(low, 3, log=True)
    assert low in kind(low, 3)  # without log it is fine


@pytest.mark.parametrize(("low", "high"), [(math.nan, 1), (0, math.nan), (0, math.inf)])
def test_a_range_that_no_tuner_can_draw_from_is_refused(low: float, high: float) -> None:
    """An infinite end passes silently until the first trial of a study fails in the tuner."""
    with pytest.raises(LabError, match=r"Float\("):
        Float(low, high)


@pytest.mark.parametrize(
    ("kind", "low", "high"), [(Float, "a", "b"), (Float, 0, "b"), (Int, 1.5, 3), (Int, True, 3)]
)
def test_an_end_of_another_type_is_refused_in_our_words(kind: Any, low: Any, high: Any) -> None:
    """Otherwise a TypeError while the plugin is imported, or a crash when its row is printed."""
    with pytest.raises(LabError, match=kind.__name__):
        kind(low, high)


@pytest.mark.parametrize("options", [(), ("std",), (["std", "none"],)])
def test_a_choice_of_one_is_refused(options: tuple[Any, ...]) -> None:
    """The list in place of the options is the usual slip: it is one option."""
    with pytest.raises(LabError, match="needs at least two options"):
        Choice(*options)


def test_probes_are_both_ends_and_the_middle_of_the_scale() -> None:
    assert Float(1.0, 4.0).probes() == (1.0, 2.5, 4.0)  # (1 + 4) / 2
    assert Float(1.0, 4.0, log=True).probes() == (1.0, 2.0, 4.0)  # sqrt(1 * 4)
    assert Int(1, 4).probes() == (1, 2, 4)  # round(2.5), to even
    assert Int(1, 1000, log=True).probes() == (1, 32, 1000)  # round(sqrt(1000)) = round(31.6)
    assert Choice("a", "b", "c").probes() == ("a", "b", "c")  # every branch


@given(
    low=st.integers(1, 10**6),
    width=st.integers(1, 10**6),
    kind=st.sampled_from([Float, Int]),
    log=st.booleans(),
)
def test_every_probe_lies_in_its_space(low: int, width: int, kind: Any, log: bool) -> None:
    """A rounding that leaves the range would try a component where its author never said."""
    space = kind(low, low + width, log=log)
    assert all(p in space for p in space.probes())


@pytest.mark.parametrize(
    ("space", "asked"),
    [
        (Float(0.5, 4.0, log=True), ("float", "tau", 0.5, 4.0, True)),
        (Float(0.5, 4.0), ("float", "tau", 0.5, 4.0, False)),
        (Int(1, 8, log=True), ("int", "tau", 1, 8, True)),
        (Choice("std", None), ("categorical", "tau", ("std", None))),
    ],
)
def test_suggest_asks_the_trial_with_the_whole_space(space: Any, asked: tuple[Any, ...]) -> None:
    """A forgotten log or a swapped end tunes another space than the one that is shown."""
    trial = Recorder()
    answer = space.suggest(trial, "tau")
    assert trial.asked == [asked]
    assert answer == (0.5 if asked[0] == "float" else 1 if asked[0] == "int" else None)


def test_spaces_read_as_a_person_writes_them() -> None:
    assert str(Float(0.5, 4.0, log=True)) == "0.5..4 log"
    assert str(Float(1e-4, 0.3)) == "0.0001..0.3"
    assert str(Int(1, 8)) == "1..8"
    assert str(Choice("std", None, 2)) == "std|None|2"


def test_equal_spaces_are_equal_and_unequal_ones_are_not() -> None:
    """A kl name may stand on two hooks only with equal parameters, spaces included."""
    assert Float(0.5, 4.0) == Float(0.5, 4)
    assert Float(1, 4) != Float(1, 4, log=True)
    assert Float(1, 4) != Int(1, 4)
    assert Choice("a", "b") == Choice("a", "b")
    assert Choice("a", "b") != Choice("b", "a")
    assert len({Float(1, 2), Float(1, 2), Choice("a", "b")}) == 2  # usable as keys
