"""A task by name: third parties' classes, and what is refused in which words."""

from __future__ import annotations

import random
import types
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import lab
from lab.errors import LabError
from lab.shelf import Shelf
from lab.task import Example, Task, base, build, describe, record

SHELF = Shelf([lab.task])


def offering(offered: Any, name: str = "mine") -> Shelf:
    """The built-in tasks and a third party's."""
    plugin = SimpleNamespace(__name__="lab_x", named=lab.tasks(lambda: {name: offered}))
    return Shelf([lab.task, plugin])


@dataclass(frozen=True, kw_only=True)
class Mine(Task):
    """Say one of the bits."""

    name: ClassVar[str] = "mine"
    version: ClassVar[int] = 3
    bits: int
    noise: float = 0.5
    loud: bool = False
    mark: str = ">"
    table: tuple[int, ...] = field(init=False, default=(0, 1))

    def __post_init__(self) -> None:
        if self.noise < 0:
            raise ValueError(f"noise={self.noise} is\nnegative")

    def example(self, rng: random.Random) -> Example:
        given = "".join(rng.choices("01", k=self.bits))
        return Example(given + self.mark, given[0])

    def score(self, example: Example, response: str) -> float:
        return float(len(response) == 1 and response in example.prompt[:-1])

    @property
    def characters(self) -> str:
        return "01" + self.mark

    @property
    def budget(self) -> int:
        return 2


def test_a_third_partys_task_is_built_with_its_settings() -> None:
    """Kills a table of built-ins; what is derived (`init=False`) is no setting and no record."""
    task = build("mine", {"bits": 8, "noise": 2}, offering(Mine))
    assert isinstance(task, Mine)
    settings = {"bits": 8, "noise": 2.0, "loud": False, "mark": ">"}
    assert record(task) == {"name": "mine", "version": 3, "settings": settings}
    assert isinstance(record(task)["settings"]["noise"], float)  # 2 and 2.0 are one run
    assert record(Mine(bits=8, noise=2)) == record(task)
    (example,) = task.draw("held_out", random.Random(0), 1)
    assert task.score(example, example.answer) == 1.0
    assert describe(task)["doc"] == "Say one of the bits."


def test_the_example_of_the_contract_is_a_task() -> None:
    """The docstring that an author copies; its annotations are types, not text."""
    code = (base.__doc__ or "").split("::\n")[1]
    module = types.ModuleType("contract")
    space = {**vars(module), "dataclass": dataclass, "ClassVar": ClassVar, "random": random}
    space |= {"Task": Task, "Example": Example}
    exec(compile("if True:" + code, "contract", "exec", dont_inherit=True), space)
    task = build("shout", {"letters": 2}, offering(space["Shout"], "shout"))
    for example in task.draw("train", random.Random(0), 20):
        assert example.answer == example.prompt[:2].upper()
        assert {*example.prompt, *example.answer} <= set(task.characters)
        assert len(example.answer) + 1 == task.budget == 3
    with pytest.raises(LabError, match="'shout': letters='two' is not int"):
        build("shout", {"letters": "two"}, offering(space["Shout"], "shout"))


def test_a_plugin_file_may_offer_a_task(tmp_path: Path) -> None:
    """Loaded as `--plugin FILE` is: there the annotations are text, ClassVar included."""
    (tmp_path / "idea.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "from lab import tasks\n"
        "from lab.task import Example, Task\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class One(Task):\n"
        "    name: ClassVar[str] = 'one'\n"
        "    shared_prompts: ClassVar[bool] = True\n"
        "    characters: ClassVar[str] = '1>'\n"
        "    budget: ClassVar[int] = 2\n"
        "    knob: float = 1\n"
        "    def example(self, rng):\n"
        "        return Example('>', '1')\n"
        "@tasks\n"
        "def named():\n"
        "    return {'one': One}\n"
    )
    task = build("one", {}, Shelf([lab.task, tmp_path / "idea.py"]))
    assert record(task) == {"name": "one", "version": 1, "settings": {"knob": 1.0}}
    assert task.draw("held_out", random.Random(0), 1) == [Example(">", "1")]


@pytest.mark.parametrize(
    ("name", "settings", "line"),
    [
        ("srot", {}, "no task 'srot'. Did you mean 'sort'? Available: addition, bandit, "),
        ("", {}, "no task ''. Available: addition, bandit, chain, copy, mine, reverse, sort"),
        (
            "sort",
            {"digit": 6},
            "task 'sort' has no setting 'digit'; it has digits. Did you mean 'digits'?",
        ),
        ("sort", {"name": "x"}, "task 'sort' has no setting 'name'; it has digits."),
        ("sort", {"warm_start": 0.5}, "task 'sort' has no setting 'warm_start'"),
        ("sort", {"digits": 0}, "task 'sort': digits=0 lies outside 1..32"),
        ("sort", {"digits": 33}, "task 'sort': digits=33 lies outside 1..32"),
        ("copy", {"digits": -1}, "task 'copy': digits=-1 lies outside 1..32"),
        ("sort", {"digits": "six"}, "task 'sort': digits='six' is not int"),
        ("sort", {"digits": True}, "task 'sort': digits=True is not int"),
        ("sort", {"digits": 6.0}, "task 'sort': digits=6.0 is not int"),
        ("sort", {"digits": None}, "task 'sort': digits=None is not int"),
        ("addition", {"digits": 0}, "task 'addition': digits=0 lies outside 1..32"),
        ("addition", {"reversed": 1}, "task 'addition': reversed=1 is not bool"),
        ("addition", {"reverse": True}, "task 'addition' has no setting 'reverse'; it has digits,"),
        ("chain", {"symbols": 11}, "task 'chain': symbols=11 lies outside 3..10"),
        ("chain", {"symbols": 2}, "task 'chain': symbols=2 lies outside 3..10"),
        ("chain", {"length": 0}, "task 'chain': length=0 lies outside 1..32"),
        ("chain", {"dense": "yes"}, "task 'chain': dense='yes' is not bool"),
        ("bandit", {"arms": 1}, "task 'bandit': arms=1 lies outside 2..26"),
        ("bandit", {"arms": 27}, "task 'bandit': arms=27 lies outside 2..26"),
        ("mine", {}, "task 'mine' needs a value for bits (int)"),
        ("mine", {"bits": 1, "table": ()}, "task 'mine' has no setting 'table'; it has bits, "),
        ("mine", {"bits": 1, "noise": True}, "task 'mine': noise=True is not float"),
        ("mine", {"bits": 1, "noise": "x"}, "task 'mine': noise='x' is not float"),
        ("mine", {"bits": 1, "noise": float("nan")}, "task 'mine': noise=nan is not float"),
        ("mine", {"bits": 1, "noise": float("-inf")}, "task 'mine': noise=-inf is not float"),
        ("mine", {"bits": 1, "noise": 10**400}, "task 'mine': noise=1000"),
        ("mine", {"bits": 1, "mark": 1}, "task 'mine': mark=1 is not str"),
        ("mine", {"bits": 1, "noise": -1}, "task 'mine': noise=-1.0 is negative"),
    ],
)
def test_a_mistake_in_a_study_is_one_line(name: str, settings: dict[str, Any], line: str) -> None:
    """What was given, what is allowed, the nearest name: no KeyError, no TypeError of a class."""
    with pytest.raises(LabError) as error:
        build(name, settings, offering(Mine))
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


def test_a_missing_task_may_be_in_a_plugin_that_did_not_load() -> None:
    shelf = Shelf([lab.task])
    shelf.broken["lab_y"] = "ImportError: no module named 'y'"
    with pytest.raises(LabError, match=r"no task 'y'(.|\n)*not loaded: lab_y: ImportError"):
        build("y", {}, shelf)


class Bare(Mine):
    more: int = 1


@dataclass(frozen=True, kw_only=True)
class Child(Mine):
    """It has its parent's name."""


@dataclass(frozen=True, kw_only=True)
class Empty(Task):
    """Nothing."""

    name: ClassVar[str] = "mine"


@dataclass(frozen=True, kw_only=True)
class Nameless(Task):
    """No name."""

    characters = ">"
    budget = 1

    def example(self, rng: random.Random) -> Example:
        return ">", ""  # type: ignore[return-value]  # a mistake that draw must name


@dataclass(frozen=True, kw_only=True)
class Named(Nameless):
    """Its name is a field."""

    name: str = "mine"  # type: ignore[misc]  # the mistake


@dataclass(frozen=True, kw_only=True)
class Listing(Nameless):
    """A setting that no record can hold."""

    name: ClassVar[str] = "mine"
    words: list[str] = field(default_factory=list)


@pytest.mark.parametrize(
    ("offered", "name", "line"),
    [
        (3, "mine", "task 'mine' is 3; a subclass of lab.Task was due"),
        (dict, "mine", "task 'mine' is <class 'dict'>; a subclass of lab.Task was due"),
        (Mine(bits=1), "mine", "task 'mine' is Mine(bits=1, "),
        (Bare, "mine", "task 'mine': put @dataclass(frozen=True, kw_only=True) above Bare"),
        (Empty, "mine", "task 'mine': Empty does not define budget, characters, example"),
        (Nameless, "mine", "task 'mine': Nameless says name = None; the two must be equal"),
        (Child, "yours", "task 'yours': Child says name = 'mine'; the two must be equal"),
        (Named, "mine", "task 'mine': 'name' is no setting; annotate it as ClassVar"),
        (Listing, "mine", "task 'mine': words is of type list[str]; it may be bool, float, int, "),
    ],
)
def test_what_is_no_proper_task_is_refused_with_its_plugin(
    offered: Any, name: str, line: str
) -> None:
    """Each of these would end in a traceback, or in two tasks under one record."""
    shelf = offering(offered, name)
    with pytest.raises(LabError) as error:
        build(name, {}, shelf)
    assert str(error.value).startswith(f"lab_x: {line}")
    assert build("sort", {}, shelf).name == "sort"  # one bad task takes no other down


def test_two_plugins_with_one_task_are_named() -> None:
    with pytest.raises(LabError, match=r"task 'sort' is offered twice: by lab\.task and by lab_x"):
        offering(Mine, "sort")


def test_an_example_that_is_none_is_named() -> None:
    """A tuple would fail at its attribute, far from the task's author."""

    @dataclass(frozen=True, kw_only=True)
    class Tuple(Nameless):
        name: ClassVar[str] = "tuple"

    with pytest.raises(LabError, match="'tuple': example returned tuple where an Example was due"):
        Tuple().draw("train", random.Random(0), 1)


def test_a_record_of_a_task_that_was_never_built_is_checked_too() -> None:
    """In Python a task may be made directly; its record must not hold what no study could."""
    assert record(Mine(bits=1))["name"] == "mine"
    for task in (Nameless(), Listing()):
        with pytest.raises(LabError, match="task "):
            record(task)
    with pytest.raises(LabError, match=r"task 'mine': bits=1\.5 is not int"):
        record(Mine(bits=1.5))  # type: ignore[arg-type]  # the mistake
