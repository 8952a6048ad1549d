"""What holds for every task: the split, the draws, the contract's bounds, records."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import pytest

import lab
from lab import hooks
from lab.errors import LabError
from lab.shelf import Shelf
from lab.task import SPLITS, Example, Task, base, build, describe, named, record

SHELF = Shelf([lab.task])
ALL = [
    ("addition", {}),
    ("addition", {"digits": 1, "reversed": False}),
    ("addition", {"digits": 32}),
    ("bandit", {}),
    ("bandit", {"arms": 2}),
    ("bandit", {"arms": 26}),
    ("chain", {}),
    ("chain", {"dense": True, "length": 32}),
    ("chain", {"length": 1, "symbols": 3}),
    ("chain", {"symbols": 10}),
    ("copy", {}),
    ("copy", {"digits": 1}),
    ("reverse", {}),
    ("reverse", {"digits": 1}),
    ("sort", {}),
    ("sort", {"digits": 1}),
    ("sort", {"digits": 32}),
]
every = pytest.mark.parametrize(("name", "settings"), ALL, ids=str)
DEFAULTS = [name for name, settings in ALL if not settings]


def made(name: str, **settings: Any) -> Task:
    return build(name, settings, SHELF)


def prompts(examples: Sequence[Example]) -> list[str]:
    return [e.prompt for e in examples]


def test_the_decorator_outlives_the_import_of_the_package() -> None:
    """A subpackage `lab.tasks` would take the decorator's place in `from lab import tasks`."""
    code = "import lab.task, lab; print(lab.tasks.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "lab.hooks\n"
    assert lab.tasks is hooks.tasks


def test_no_module_of_lab_has_the_name_of_an_export() -> None:
    """Importing it would replace the export, and only for those who ask later."""
    modules = {f.stem for f in Path(str(lab.__file__)).parent.iterdir()}
    assert "task" in modules
    assert modules & set(lab.__all__) == set()


def test_the_package_offers_its_tasks_and_nothing_else() -> None:
    """A helper that pluggy takes for a hook would be refused, or be called."""
    assert list(SHELF) == []
    assert SHELF.names("recipes") == SHELF.names("executors") == {}
    assert SHELF.names("tasks") == named()
    assert list(SHELF.names("tasks")) == DEFAULTS


def test_text_takes_no_tensors() -> None:
    """The shelf imports the package to list it: a heavy import would be felt in every command."""
    names = ("torch", "numpy", "pandas", "pydantic")
    code = f"import lab.task, sys; print([m for m in {names} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@every
def test_the_splits_are_disjoint_over_seeds(name: str, settings: dict[str, Any]) -> None:
    """Kills a split by index or by seed: another generator would train on what is held out."""
    task = made(name, **settings)
    seen = {
        split: {p for s in range(5) for p in prompts(task.draw(split, random.Random(s), 60))}
        for split in SPLITS
    }
    assert seen["train"]
    assert seen["held_out"]
    if task.shared_prompts:
        assert seen["train"] == seen["held_out"]
    else:
        assert seen["train"] & seen["held_out"] == set()


def test_a_split_outlives_a_change_of_settings() -> None:
    """Kills settings in the hash: trained at one setting, a held-out prompt of another leaks."""
    plain, turned = made("addition", reversed=False), made("addition", reversed=True)
    train = set(prompts(plain.draw("train", random.Random(0), 4000)))
    held_out = set(prompts(turned.draw("held_out", random.Random(1), 2000)))
    assert train & held_out == set()


def test_the_split_is_the_documented_hash_and_a_quarter_is_held_out() -> None:
    """Pins the split: another hash would move every prompt without a new version."""
    task = made("sort")
    drawn = [f"{k:06d}>" for k in range(4000)]
    due = [int(hashlib.sha256(f"sort/1/{p}".encode()).hexdigest(), 16) % 4 == 0 for p in drawn]
    assert [task.split_of(p) == "held_out" for p in drawn] == due
    # sd of the share = sqrt(.25 * .75 / 4000) = .0068
    assert abs(sum(due) / 4000 - 0.25) < 4 * 0.0068


def test_held_out_prompts_come_in_the_tasks_own_proportions() -> None:
    """Kills a split that is a region (the largest quarter, say): it would be another task."""
    for split in SPLITS:
        drawn = made("copy").draw(split, random.Random(3), 2000)
        first = [int(e.prompt[0]) for e in drawn]
        # mean of a digit 4.5, sd sqrt(8.25 / 2000) = .064; the split itself adds little
        assert abs(sum(first) / 2000 - 4.5) < 5 * 0.064


DRAWN = """
import json, random
from lab.shelf import Shelf
from lab.task import build
import lab.task
shelf = Shelf([lab.task])
print(json.dumps([[e.prompt for e in build(n, {}, shelf).draw(s, random.Random(7), 20)]
                  for n in shelf.names("tasks") for s in ("train", "held_out")]))
"""


def test_another_process_draws_the_same() -> None:
    """Kills hash(): it is salted, so a resumed run would train on held-out prompts."""
    here = [
        prompts(made(n).draw(s, random.Random(7), 20)) for n in SHELF.names("tasks") for s in SPLITS
    ]
    for salt in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": salt}
        done = subprocess.run(
            [sys.executable, "-c", DRAWN], capture_output=True, text=True, check=True, env=env
        )
        assert json.loads(done.stdout) == here


@every
def test_one_seed_draws_the_same_prompts(name: str, settings: dict[str, Any]) -> None:
    """Kills the global generator and a state kept in the task; a longer draw only goes on."""
    task = made(name, **settings)
    random.seed(0)
    untouched = random.getstate()
    first = task.draw("train", random.Random(5), 30)
    assert random.getstate() == untouched
    random.seed(1)
    assert made(name, **settings).draw("train", random.Random(5), 30) == first
    assert task.draw("train", random.Random(5), 10) == first[:10]
    if name != "bandit":
        assert task.draw("train", random.Random(6), 30) != first


@every
def test_characters_and_budget_hold_what_is_drawn(name: str, settings: dict[str, Any]) -> None:
    """Kills a forgotten character and a budget without room for the end token."""
    task = made(name, **settings)
    assert list(task.characters) == sorted(set(task.characters))
    assert set(task.stops) <= set(task.characters)
    drawn = [e for s in SPLITS for e in task.draw(s, random.Random(1), 250)]
    seen = set()
    for e in drawn:
        seen |= {*e.prompt, *e.answer}
        tokens = len(e.answer) + (e.answer[-1] not in task.stops)
        assert tokens <= task.budget
        assert len(e.prompt) == len(drawn[0].prompt)
    assert seen <= set(task.characters)
    if task.responses() is None and task.budget > 2:  # 500 draws reach every one of them
        assert seen == set(task.characters)


@every
def test_scores_lie_in_0_1_and_the_answer_has_1(name: str, settings: dict[str, Any]) -> None:
    """Kills scores of substrings and prefixes: junk before or after the answer earns nothing."""
    task, rng = made(name, **settings), random.Random(2)
    for e in task.draw("train", rng, 40):
        assert task.score(e, e.answer) == task.optimum == 1.0
        for junk in (e.answer + "0", ">" + e.answer, e.answer + e.answer, f" {e.answer}", ""):
            assert task.score(e, junk) == 0.0
        for _ in range(20):
            response = "".join(rng.choices(task.characters, k=rng.randint(0, task.budget + 2)))
            score = task.score(e, response)
            assert isinstance(score, float)
            assert 0.0 <= score <= 1.0
            rewards = task.token_rewards(e, response)
            if rewards is not None:
                assert len(rewards) == len(response)
                assert abs(sum(rewards) - score) < 1e-12


@every
def test_a_record_is_json_and_makes_the_task_again(name: str, settings: dict[str, Any]) -> None:
    """Kills a record without the defaults: a later change of one would be the same run."""
    task = made(name, **settings)
    kept = json.loads(json.dumps(record(task)))
    assert set(kept) == {"name", "version", "settings"}
    assert set(kept["settings"]) == {f.name for f in fields(task)}
    assert kept["settings"].items() >= settings.items()
    assert made(kept["name"], **kept["settings"]) == task


def test_a_description_says_what_a_person_asks_first() -> None:
    described = describe(made("addition"))
    json.dumps(described)
    assert described["name"] == "addition"
    assert described["settings"] == {"digits": 2, "reversed": True}
    assert described["characters"] == "+0123456789>"
    assert (described["budget"], described["stops"]) == (4, "")  # 3 digits and the end token
    assert (described["optimum"], described["warm_start"]) == (1.0, 0.15)
    given, answer = described["prompt"], described["answer"]
    assert int(answer[::-1]) == int(given[:2]) + int(given[3:5])
    assert described["doc"].startswith("Add two numbers")


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_built_in_says_what_it_isolates_and_when_recipes_tie(name: str) -> None:
    """A task without a control cannot be seen to be broken."""
    task = made(name)
    assert task.isolates
    assert task.control
    assert record(task)["version"] == 1


@dataclass(frozen=True, kw_only=True)
class Few(Task):
    """As many prompts as asked for."""

    name: ClassVar[str] = "few"
    prompts: int = 1

    def example(self, rng: random.Random) -> Example:
        return Example(str(rng.randrange(self.prompts)), "x")

    characters = "0123456789x"
    budget = 2


def test_a_split_without_prompts_is_an_error_and_no_endless_loop() -> None:
    """One prompt lies in one split; the other must not be waited for."""
    held = Few().split_of("0")
    (empty,) = set(SPLITS) - {held}
    assert prompts(Few().draw(held, random.Random(0), 2)) == ["0", "0"]
    with pytest.raises(LabError, match=f"'few': {base.TRIES} .* none is {empty}: too few prompts"):
        Few().draw(empty, random.Random(0), 1)
    assert Few().draw(empty, random.Random(0), 0) == []


def test_a_split_of_another_name_is_an_error() -> None:
    """Without the check it would be an empty split, found after all its tries."""
    with pytest.raises(LabError, match=r"'few': no split 'held-out'\. Did you mean 'held_out'\?"):
        Few().draw("held-out", random.Random(0), 1)  # type: ignore[arg-type]  # the mistake
