"""Recipes from TOML files, and the search spaces that a recipe's components bring."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from lab.bench import Bench
from lab.errors import LabError
from lab.loss import evaluate
from lab.loss import load as build
from lab.recipe import Recipe, load, spaces, suggest
from lab.shelf import Shelf
from lab.spaces import Choice, Float, Int

TWO = """
    [recipe.first]
    doc = "The first."
    base = "grpo"
    surrogate = {name = "cispo", cap = 3.0}

    [recipe.first.loop]
    lr = 1e-3

    [recipe.second]
    base = "first"
    surrogate = {cap = 4.0}
    wrap = ["token_tis", {name = "dual_clip", c = 2}]
    """


def write(folder: Path, text: str, name: str = "file.toml") -> Path:
    file = folder / name
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    return file


def test_the_table_of_the_design_is_read_as_it_stands(tmp_path: Path, shelf: Shelf) -> None:
    """Every key of DESIGN section 3: a renamed one would break what people have written."""
    file = write(
        tmp_path,
        """
        [recipe.mine]
        base = "grpo"
        advantage = {name = "group", scale = "none"}
        surrogate = {name = "cispo", cap = 3.0}
        aggregate = "token_mean"
        kl = {name = "in_reward", estimator = "k1", beta = 0.02, credit = "to_go", when = "before"}
        wrap = ["token_tis", {name = "dual_clip", c = 3.0}]

        [recipe.mine.loop]
        group_size = 8
        prompts = 16
        epochs = 4
        minibatches = 4
        lag = 0
        temperature = 1.0
        lr = 1e-4
        optimizer = "adamw"
        max_grad_norm = 1.0
        anchor = "old"
        kl_stop = 0.0
        critic_warmup = 0
        critic_coef = 0.5
        """,
    )
    recipe = load(str(file), shelf)
    assert recipe.name == "mine"
    assert recipe.kl is not None
    assert recipe.kl.settings["beta"] == 0.02
    bench = Bench(recipe, shelf)
    assert bench.option("kl_reward", "when") == "before"
    assert [b.component.name for b in bench.bound if b.slot == "wrap"] == ["token_tis", "dual_clip"]


def test_one_recipe_needs_no_name_and_several_do(tmp_path: Path, shelf: Shelf) -> None:
    file = write(tmp_path, TWO)
    with pytest.raises(LabError, match=r"file\.toml holds 2 recipes \(first, second\); name one: "):
        load(file, shelf)
    assert load(f"{file}:first", shelf).surrogate.spec() == {"name": "cispo", "cap": 3.0}
    with pytest.raises(LabError, match=r"no recipe 'frist'\. Did you mean 'first'\? It has first,"):
        load(f"{file}:frist", shelf)
    one = write(tmp_path, '[recipe.only]\nbase = "ppo"\n', "one.toml")
    assert load(one, shelf).name == "only"
    assert load(one, shelf).advantage == load("ppo", shelf).advantage


def test_a_base_may_stand_in_the_same_file(tmp_path: Path, shelf: Shelf) -> None:
    second = load(f"{write(tmp_path, TWO)}:second", shelf)
    assert second.surrogate.spec() == {"name": "cispo", "cap": 4.0}
    assert second.loop.lr == 1e-3  # the first's, over grpo's
    assert second.kl == load("grpo", shelf).kl
    assert second.doc == "its base with its own surrogate, wrap"  # not the base's own words
    assert [u.spec() for u in second.wrap] == [{"name": "token_tis"}, {"name": "dual_clip", "c": 2}]


def test_a_recipe_of_a_built_ins_name_may_start_from_it(tmp_path: Path, shelf: Shelf) -> None:
    """`[recipe.ppo] base = "ppo"` is the natural way to change it, and no circle."""
    text = '[recipe.ppo]\nbase = "ppo"\nloop = {lr = 1.0}\n[recipe.x]\nbase = "ppo"\n'
    file = write(tmp_path, text)
    assert load(f"{file}:ppo", shelf).loop.lr == 1.0
    assert load(f"{file}:x", shelf).loop.lr == 1.0  # the file's own stands before the built-in
    assert load("ppo", shelf).loop.lr == 1e-4


def test_bases_of_a_file_that_go_round_are_refused(tmp_path: Path, shelf: Shelf) -> None:
    text = "".join(f'[recipe.{a}]\nbase = "{b}"\n' for a, b in ("ab", "bc", "ca"))
    with pytest.raises(LabError, match=r"base goes round in a circle: a -> b -> c -> a"):
        load(f"{write(tmp_path, text)}:a", shelf)


def test_sets_go_over_a_file(tmp_path: Path, shelf: Shelf) -> None:
    recipe = load(
        f"{write(tmp_path, TWO)}:second", shelf, ["surrogate.cap=9", "wrap.dual_clip.c=7"]
    )
    assert recipe.surrogate.settings["cap"] == 9
    assert recipe.wrap[1].settings == {"c": 7}


WRONG = {
    "no TOML": ("[recipe.a\n", r"file\.toml is not TOML: .*line 1"),
    "twice": ("[recipe.a]\n[recipe.a]\n", r"file\.toml is not TOML: .*recipe"),
    "empty": ("", r"file\.toml: no table \[recipe\.NAME\]"),
    "no name": ('[recipe]\nsurrogate = "cispo"\n', r"file\.toml: no table \[recipe\.NAME\]"),
    "a number": ("recipe = 3\n", r"file\.toml: no table \[recipe\.NAME\]"),
    "a list": ("[[recipe]]\nx = 1\n", r"file\.toml: no table \[recipe\.NAME\]"),
    "other table": ("[recipes.a]\n", r"unknown table \[recipes\]\. Did you mean 'recipe'\?"),
    "other key": (
        "[recipe.a]\nsurogate = 'x'",
        "unknown slot 'surogate'. Did you mean 'surrogate'",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_in_a_file_is_said_in_one_line(
    tmp_path: Path, shelf: Shelf, what: str
) -> None:
    text, line = WRONG[what]
    with pytest.raises(LabError, match=line) as error:
        load(write(tmp_path, text), shelf)
    assert len(str(error.value).splitlines()) == 1


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, shelf: Shelf) -> None:
    with pytest.raises(LabError, match=r"missing\.toml: No such file"):
        load(tmp_path / "missing.toml", shelf)
    with pytest.raises(LabError, match=r"missing\.toml: No such file"):
        load(f"{tmp_path / 'missing.toml'}:mine", shelf)
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(LabError, match=r"folder\.toml: Is a directory"):
        load(tmp_path / "folder.toml", shelf)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(LabError, match=r"bytes\.toml is not TOML"):
        load(tmp_path / "bytes.toml", shelf)


def test_evaluate_and_load_take_a_file(tmp_path: Path, shelf: Shelf) -> None:
    file = write(tmp_path, TWO)
    assert build(f"{file}:first").recipe == load(f"{file}:first", shelf)
    with pytest.raises(LabError, match="logp"):
        evaluate(f"{file}:first")


# -- search spaces

SPACED = '''
    from typing import Annotated
    from lab import Choice, Float, Int, kl_loss, kl_reward, surrogate

    @surrogate
    def mine(
        ratio,
        advantages,
        *,
        tau: Annotated[float, Float(0.5, 4.0, log=True)] = 1.0,
        steps: Annotated[int, Int(1, 8)] = 2,
        kind: Annotated[str, Choice("soft", "hard")] = "soft",
        fixed: float = 1.0,
    ):
        """One with three spaces and a number of its own."""
        if not 0 < fixed:
            raise ValueError(f"fixed={fixed}; it is positive")
        return tau * steps * ratio * advantages
    '''


@pytest.fixture
def spaced(tmp_path: Path) -> Shelf:
    file = tmp_path / "idea.py"
    file.write_text(textwrap.dedent(SPACED), encoding="utf-8")
    return Shelf.installed([file])


class Fixed:
    """A trial that gives what it was told to, and knows what it was asked for."""

    def __init__(self, **values: Any) -> None:
        self.values = {name.replace("__", "."): x for name, x in values.items()}
        self.asked: list[str] = []

    def _give(self, name: str, *_: Any, **__: Any) -> Any:
        self.asked.append(name)
        return self.values[name]

    suggest_float = suggest_int = suggest_categorical = _give


def recipe_of(shelf: Shelf, **spec: Any) -> Recipe:
    table = {"advantage": "group", "surrogate": "mine", "aggregate": "token_mean", **spec}
    return Recipe.of(table, "mine", shelf)


def test_spaces_go_by_the_path_that_set_takes(spaced: Shelf) -> None:
    """A list's entry by its name: two wrappers may each have a `c`."""
    recipe = recipe_of(spaced, wrap=["dual_clip", "token_tis"], kl="both")
    found = spaces(recipe, spaced)
    assert found == {
        "kl.beta": Float(1e-4, 0.3, log=True),  # once, though the name stands on two hooks
        "advantage.baseline": Choice("mean", "loo"),
        "advantage.scale": Choice("std", "none", "batch"),
        "surrogate.tau": Float(0.5, 4.0, log=True),
        "surrogate.steps": Int(1, 8),
        "surrogate.kind": Choice("soft", "hard"),
        "wrap.dual_clip.c": Float(1.5, 10.0),
        "wrap.token_tis.cap": Float(1.0, 10.0, log=True),
    }
    for path, space in found.items():
        value = space.probes()[0]
        given = f'"{value}"' if isinstance(value, str) else value
        assert load(recipe, spaced, [f"{path}={given}"]) != recipe


def test_an_empty_slot_brings_no_space(spaced: Shelf) -> None:
    assert not [p for p in spaces(recipe_of(spaced, kl="none"), spaced) if p.startswith("kl")]


def test_suggest_draws_every_space_and_leaves_the_rest(spaced: Shelf) -> None:
    recipe = recipe_of(
        spaced, advantage="reinforce", surrogate={"name": "mine", "fixed": 2.0}, wrap=["dual_clip"]
    )
    trial = Fixed(
        surrogate__tau=0.7, surrogate__steps=5, surrogate__kind="hard", wrap__dual_clip__c=4.5
    )
    tuned = suggest(trial, recipe, spaced)
    assert sorted(trial.asked) == sorted(trial.values)
    assert tuned.surrogate.settings == {"fixed": 2.0, "tau": 0.7, "steps": 5, "kind": "hard"}
    assert tuned.wrap[0].settings == {"c": 4.5}
    assert recipe.surrogate.settings == {"fixed": 2.0}
    Bench(tuned, spaced)  # what was drawn is legal


def test_suggest_draws_only_what_is_asked(spaced: Shelf) -> None:
    trial = Fixed(surrogate__steps=5)
    tuned = suggest(trial, recipe_of(spaced), spaced, only=["surrogate.steps"])
    assert trial.asked == ["surrogate.steps"]
    assert tuned.surrogate.settings == {"steps": 5}
    nothing = suggest(Fixed(), recipe_of(spaced), spaced, only=[])
    assert nothing == recipe_of(spaced)


def test_suggest_refuses_what_is_no_space(spaced: Shelf) -> None:
    """`fixed` has none, and a misspelt path must not pass as 'nothing to draw'."""
    line = "recipe 'mine' has no search space 'surrogate.tua'. Did you mean 'surrogate.tau'? It has"
    with pytest.raises(LabError, match=re.escape(line)):
        suggest(Fixed(), recipe_of(spaced), spaced, only=["surrogate.tua"])
    with pytest.raises(LabError, match=r"no search space 'surrogate\.fixed'"):
        suggest(Fixed(), recipe_of(spaced), spaced, only=["surrogate.fixed"])


def test_a_suggested_number_has_no_paper(spaced: Shelf) -> None:
    """What a tuner drew is no longer what the source says."""
    recipe = recipe_of(
        spaced,
        surrogate={"name": "mine", "tau": 1.0, "steps": 3},
        source={"surrogate.tau": "a paper", "surrogate.steps": "a paper"},
    )
    tuned = suggest(Fixed(surrogate__tau=2.0), recipe, spaced, only=["surrogate.tau"])
    assert set(tuned.source) == {"surrogate.steps"}
