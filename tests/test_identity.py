"""What makes a run that run: everything that can change its numbers, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small import SIGNAL, spec

from lab import identity
from lab.errors import LabError
from lab.recipe import Recipe, Use
from lab.settings import Budget, Spec
from lab.shelf import Shelf
from lab.task import Chain
from lab.train import prepared


def key(shelf: Shelf, given: Any = "grpo", **more: Any) -> str:
    return prepared(spec(given, **more), shelf).key


CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "a parameter": ({"surrogate": {"eps_high": 0.3}}, {}),
    "a component": ({"surrogate": "cispo"}, {}),
    "an option": ({"normalize": {"name": "whiten", "per": "minibatch"}}, {}),
    "its default": ({"normalize": {"name": "whiten"}}, {}),
    "an aggregate of a slot": ({"kl": {"aggregate": "token_mean"}}, {}),
    "a wrapper": ({"wrap": ["dual_clip"]}, {}),
    "another wrapper": ({"wrap": [{"name": "dual_clip", "c": 4.0}]}, {}),
    "the learning rate": ("grpo", {"loop": {"lr": 2e-4}}),
    "the seed": ("grpo", {"seed": 2}),
    "a task setting": ("grpo", {"task": Use(name="chain", settings={"length": 3})}),
    "a task": ("grpo", {"task": Use(name="reverse")}),
    "the budget": ("grpo", {"rollouts": 3}),
    "its unit": ("grpo", {"budget": Budget(updates=2)}),
    "the warm start": ("grpo", {"warm_start": 0.1}),
    "the evaluations": ("grpo", {"eval_every": 1}),
    "the held-out prompts": ("grpo", {"eval_prompts": 8}),
    "the observers": ("grpo", {"observers": ("clipping",)}),
    "the model": ("grpo", {"model": "tiny"}),
}


def test_every_change_is_another_run(shelf: Shelf) -> None:
    """C1: two runs of one key are taken for each other, and the second never runs."""
    keys = {name: key(shelf, given, **more) for name, (given, more) in CHANGES.items()}
    keys["none"] = key(shelf)
    same = [(a, b) for a in keys for b in keys if a < b and keys[a] == keys[b]]
    assert same == []
    assert all(len(k) == 64 and set(k) <= set("0123456789abcdef") for k in keys.values())


def test_what_changes_no_number_is_the_same_run(shelf: Shelf) -> None:
    """A recipe under two names, described or sourced otherwise, a parameter written out that has
    that value anyway, a stage, and how often a checkpoint is kept.
    """
    base = spec(seed=9000)
    same = prepared(base, shelf).key
    assert prepared(spec(seed=9000), shelf).key == same
    assert key(shelf, seed=9000, checkpoint_every=2) == same
    body = base.recipe.spec()
    named = Recipe.of({**body, "doc": "Other words.", "source": {}}, "mine", shelf)
    assert prepared(base.model_copy(update={"recipe": named}), shelf).key == same
    given = {"base": "grpo", "surrogate": {"name": "ppo_clip", "eps_low": 0.2}}  # eps_high: default
    assert key(shelf, given, seed=9000) == same
    staged = Spec(**{**{n: getattr(base, n) for n in Spec.model_fields}, "stage": "evaluation"})
    assert prepared(staged, shelf).key == same
    explicit = Use(name="chain", settings={**SIGNAL.settings})
    assert key(shelf, seed=9000, task=explicit) == same


def test_another_version_of_a_task_is_another_run(shelf: Shelf, monkeypatch: Any) -> None:
    before = key(shelf)
    monkeypatch.setattr(Chain, "version", 2)
    assert key(shelf) != before


IDEA = '''
from lab import surrogate

def helper(x):
    return {factor} * x

@surrogate
def mine(ratio, advantages):
    """r A, scaled."""
    return helper(ratio * advantages)
'''


def of_file(file: Path, text: str, given: Any) -> str:
    file.write_text(text)
    return prepared(spec(given, plugins=[file]), Shelf.installed([file])).key


def test_a_plugins_source_is_part_of_it(tmp_path: Path) -> None:
    """A helper's number too, though the component's own text is the same.

    Wrong: the name of the file, its time, or the component's function alone.
    """
    one, given = tmp_path / "idea.py", {"surrogate": "mine"}
    first = of_file(one, IDEA.format(factor=1), given)
    assert of_file(one, IDEA.format(factor=2), given) != first
    assert of_file(one, IDEA.format(factor=1), given) == first
    # line ends of another system, another place: the same code
    elsewhere = tmp_path / "b" / "idea.py"
    elsewhere.parent.mkdir()
    assert of_file(elsewhere, IDEA.format(factor=1), given) == first
    one.write_bytes(IDEA.format(factor=1).encode().replace(b"\n", b"\r\n"))
    assert prepared(spec(given, plugins=[one]), Shelf.installed([one])).key == first


def test_a_plugin_that_the_recipe_does_not_name_is_no_part_of_it(
    tmp_path: Path, shelf: Shelf
) -> None:
    """Nothing installed changes a run unless the recipe names it."""
    assert of_file(tmp_path / "idea.py", IDEA.format(factor=1), "grpo") == key(shelf)


def test_an_observers_source_is_part_of_it(tmp_path: Path) -> None:
    text = '''
from lab import observe

@observe
def mine(mask):
    """A number."""
    return {{"mine": {number}.0}}
'''
    keys = []
    for number in (1, 2):
        file = tmp_path / "idea.py"
        file.write_text(text.format(number=number))
        made = spec("grpo", plugins=[file], observers=("mine",))
        keys.append(prepared(made, Shelf.installed([file])).key)
    assert keys[0] != keys[1]


def test_a_model_folder_is_its_content(tmp_path: Path, shelf: Shelf) -> None:
    """Wrong: its path: new weights under an old name would be taken for a finished run, and one
    model in two places for two.
    """
    assert identity.model_hash("nano") == "nano"
    assert identity.model_hash("owner/name") == "owner/name"
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.model", "merges.txt"):
        (folder / name).write_bytes(b"1")
    first, run = identity.model_hash(str(folder)), key(shelf, model=str(folder))
    moved = folder.rename(tmp_path / "moved")
    assert identity.model_hash(str(moved)) == first
    assert key(shelf, model=str(moved)) == run
    for file in sorted(moved.iterdir()):
        file.write_bytes(b"2")
        assert identity.model_hash(str(moved)) != first, file.name
        assert key(shelf, model=str(moved)) != run
        file.write_bytes(b"1")
    assert identity.model_hash(str(moved)) == first
    (moved / "README.md").write_text("words")
    assert identity.model_hash(str(moved)) == first


@pytest.mark.parametrize(
    ("what", "value"),
    [("core_hash", "edited"), ("version", "9.9"), ("LIBRARIES", ("torch", "pluggy"))],
)
def test_code_and_libraries_are_part_of_it(
    shelf: Shelf, monkeypatch: Any, what: str, value: Any
) -> None:
    before = key(shelf)
    monkeypatch.setattr(identity, what, value if what == "LIBRARIES" else lambda *given: value)
    assert key(shelf) != before


def test_the_core_is_every_file_that_can_change_a_run(tmp_path: Path, monkeypatch: Any) -> None:
    """Wrong: a list of files that a new one is missing from; a report's edit that repeats runs."""
    for name in ("train.py", "new_room.py", "cli.py", "records.py", "task/base.py", "study.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1\n")
    monkeypatch.setattr(identity, "__file__", str(tmp_path / "identity.py"))

    def core() -> str:
        return getattr(identity.core_hash, "__wrapped__", identity.core_hash)()

    first = core()
    for name in ("train.py", "new_room.py", "records.py", "task/base.py"):
        (tmp_path / name).write_text("2\n")
        assert core() != first, name
        (tmp_path / name).write_text("1\r\n")
        assert core() == first, name
    for name in ("cli.py", "study.py"):
        (tmp_path / name).write_text("2\n")
        assert core() == first, name


def test_a_key_needs_a_valid_run(shelf: Shelf) -> None:
    with pytest.raises(LabError, match="no task 'chian'"):
        key(shelf, task=Use(name="chian"))
    with pytest.raises(LabError, match="no observe 'cliping'"):
        key(shelf, observers=("cliping",))


def test_equal_data_is_one_text() -> None:
    """Wrong: keys in the order of their insertion, floats in another form than JSON's."""
    assert identity.canonical({"b": 0.1, "a": [1]}) == identity.canonical({"a": [1], "b": 0.1})
    assert identity.canonical({"a": 1}) != identity.canonical({"a": 1.5})
    assert identity.digest({}) == identity.digest({})
    assert len(identity.digest({}, 16)) == 16
