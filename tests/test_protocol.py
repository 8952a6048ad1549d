"""A study file: what it resolves to, what its hash stands for, and each mistake in one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from small_studies import DROP, FILE, TINY, cache, file, plugin, study, table  # noqa: F401

from lab.errors import LabError
from lab.protocol import PLAIN, Head, Study, find, read, resolve
from lab.settings import Budget
from lab.shelf import Shelf

FIRST = Path(__file__).parent.parent / "studies" / "first.toml"


@pytest.fixture(scope="module")
def first(shelf: Shelf) -> Study:
    return read(FIRST, shelf)


def flat(data: Any, path: str = "") -> dict[str, Any]:
    """Nested tables as path -> value."""
    if not isinstance(data, dict):
        return {path: data}
    return {k: v for key, x in data.items() for k, v in flat(x, f"{path}.{key}").items()}


# -- the study that ships


def test_the_first_study_is_six_recipes_at_two_learning_rates(first: Study) -> None:
    """6 recipes x 2 conditions = 12 arms; at `small` 12 x 8 = 96 runs of 40 rollouts.

    Wrong: a condition that replaces the recipes, a contrast per condition that multiplies.
    """
    recipes = ["ppo", "cispo", "reinforce", "grpo", "grpo_kl_reward", "grpo_kl_loss"]
    assert first.conditions == ("lr 1e-4", "lr 3e-4")
    arms = [(a.recipe.name, a.condition) for a in first.arms]
    assert arms == [(r, c) for c in first.conditions for r in recipes]
    assert len(first.contrasts) == 6
    assert [c.name for c in first.contrasts][:2] == ["ppo - grpo, lr 1e-4", "ppo - grpo, lr 3e-4"]
    assert list(first.scales) == ["smoke", "small", "full"]
    counts = {s: sum(len(specs) for _, specs in first.specs(s)) for s in first.scales}
    assert counts == {"smoke": 24, "small": 96, "full": 144}
    budgets = {s: next(first.specs(s))[1][0].settings.budget for s in first.scales}
    assert budgets == {
        s: Budget(rollouts=n) for s, n in (("smoke", 4), ("small", 40), ("full", 80))
    }


def test_every_arm_has_its_loop_from_the_study(first: Study) -> None:
    """4 epochs x 4 minibatches, one batch, whatever a recipe's own paper used.

    Wrong: `[all]` below a recipe, or taken by those alone that say nothing of it.
    """
    loops = [a.recipe.loop for a in first.arms]
    assert {(loop.epochs, loop.minibatches) for loop in loops} == {(4, 4)}
    assert len({(loop.prompts, loop.group_size, loop.lag, loop.optimizer) for loop in loops}) == 1
    rates = {"lr 1e-4": 1e-4, "lr 3e-4": 3e-4}
    assert [loop.lr for loop in loops] == [rates[a.condition] for a in first.arms]


def test_the_conditions_differ_in_the_learning_rate_alone(first: Study) -> None:
    """Wrong: a second change hidden in a condition, and a comparison that is of both."""
    half = len(first.arms) // 2
    for a, b in zip(first.arms[:half], first.arms[half:], strict=True):
        left, right = flat(a.recipe.model_dump()), flat(b.recipe.model_dump())
        assert a.recipe.name == b.recipe.name
        assert {k for k in left | right if left.get(k) != right.get(k)} == {".loop.lr"}


def test_the_kl_is_at_one_place_an_arm(first: Study) -> None:
    """none, off the reward, in the loss: the question's second half."""
    kl = {a.recipe.name: a.recipe.kl for a in first.arms}
    named = {n: u and u.name for n, u in kl.items() if n.startswith("grpo")}
    assert named == {"grpo": None, "grpo_kl_reward": "in_reward", "grpo_kl_loss": "in_loss"}
    betas = [u.settings["beta"] for n, u in kl.items() if u is not None and "_kl_" in n]
    assert betas == [0.05, 0.05]


# -- what a study resolves to


def test_what_is_left_out_has_the_values_of_the_guide() -> None:
    """studies/README.md states them."""
    head = study().head
    assert (head.metric, head.margin, head.alpha, head.floor) == ("score", 0.02, 0.05, 0.0)
    assert (head.model, study().conditions) == ("nano", (PLAIN,))
    assert study().contrasts[0].name == "cispo - grpo"


def test_a_study_goes_over_a_recipe_and_a_condition_over_both(shelf: Shelf) -> None:
    """recipe < [all] < condition; a parameter alone changes that of the component in place."""
    data = table("recipe.cispo", {"base": "cispo", "surrogate": {"cap": 2.0}, "loop": {"lr": 1.0}})
    data["all"]["loop"]["lr"] = 2.0
    data["condition"] = {"a": {}, "b": {"loop": {"lr": 3.0}, "surrogate": {"name": "ppo_clip"}}}
    data["contrast"] = []
    arms = {(a.recipe.name, a.condition): a.recipe for a in resolve(data, "t", shelf).arms}
    assert [arms["cispo", c].loop.lr for c in "ab"] == [2.0, 3.0]
    assert arms["cispo", "a"].surrogate.settings["cap"] == 2.0
    assert arms["cispo", "b"].surrogate.name == "ppo_clip"


def test_a_recipe_of_a_plugin_is_inherited(shelf: Shelf, tmp_path: Path) -> None:
    idea = plugin(
        tmp_path,
        """
        from lab import recipes

        @recipes
        def mine():
            return {"mine": {"base": "grpo", "doc": "Mine.", "surrogate": {"eps_high": 0.3}}}
        """,
    )
    made = study("recipe.cispo", {"base": "mine"}, Shelf.installed([idea]))
    (arm,) = [a for a in made.arms if a.recipe.name == "cispo"]
    assert arm.recipe.surrogate.settings["eps_high"] == 0.3
    with pytest.raises(LabError, match="no recipe 'mine'"):
        study("recipe.cispo", {"base": "mine"}, shelf)


def test_the_seeds_are_those_of_the_evaluation() -> None:
    """R3: 9000 and up, the same for every arm, whatever else a study declares."""
    for scale, n in (("smoke", 2), ("small", 3)):
        for _, specs in study().specs(scale):
            assert [s.seed for s in specs] == list(range(9000, 9000 + n))
            assert {s.stage for s in specs} == {"evaluation"}
    last = study("scale.smoke.seeds", 1000)
    assert next(last.specs("smoke"))[1][-1].seed == 9999


# -- the hash


CHANGES: dict[str, tuple[str, Any]] = {
    "the question": ("study.question", "Does it?"),
    "the task": ("study.task", {"name": "chain"}),
    "a setting of the task": ("study.task", {"name": "bandit", "arms": 4}),
    "the metric": ("study.metric", "length"),
    "the margin": ("study.margin", 0.03),
    "alpha": ("study.alpha", 0.01),
    "the floor": ("study.floor", -1.0),
    "the model": ("study.model", "tiny"),
    "the warm start": ("study.warm_start", 0.5),
    "the observers": ("study.observers", ["clipping"]),
    "how often observers look": ("study.observe_every", 2),
    "how often is evaluated": ("study.eval_every", 2),
    "on how many prompts": ("study.eval_prompts", 9),
    "a parameter": ("recipe.cispo.surrogate", {"cap": 3.0}),
    "a recipe's name": ("recipe", {"grpo": TINY["recipe"]["grpo"], "cispo": {"base": "dapo"}}),
    "one recipe more": ("recipe.ppo", {"base": "ppo"}),
    "what all share": ("all.loop.epochs", 3),
    "a condition": ("condition", {PLAIN: {"loop": {"lr": 1.0}}}),
    "one condition more": ("condition", {PLAIN: {}, "lr 1": {"loop": {"lr": 1.0}}}),
    "no contrast": ("contrast", []),
    "the contrast the other way": ("contrast", [{"a": "grpo", "b": "cispo"}]),
}


def test_the_hash_changes_with_all_that_is_declared() -> None:
    """Wrong: a hash of the file's name, of the arms alone, of what a run sees (the margin and the
    contrasts decide the verdict and change no run), or of the task's name without its settings.
    """
    named = {path.removeprefix("study.") for path, _ in CHANGES.values() if "study." in path}
    assert named == set(Head.model_fields)  # none is forgotten here
    hashes = {what: study(path, value).hash for what, (path, value) in CHANGES.items()}
    hashes["nothing"] = study().hash
    same = [(a, b) for a in hashes for b in hashes if a < b and hashes[a] == hashes[b]]
    assert same == []
    assert all(re.fullmatch("[0-9a-f]{16}", h) for h in hashes.values())


def test_the_order_of_the_contrasts_is_declared(shelf: Shelf) -> None:
    """A report lists them in order, and its first sentence is the first one's."""
    data = table("recipe.ppo", {"base": "ppo"})
    pair = [{"a": "cispo", "b": "grpo"}, {"a": "ppo", "b": "grpo"}]
    there = resolve({**data, "contrast": pair}, "t", shelf).hash
    assert there != resolve({**data, "contrast": pair[::-1]}, "t", shelf).hash


def test_a_version_of_the_task_is_declared(monkeypatch: pytest.MonkeyPatch, shelf: Shelf) -> None:
    """Results of another version of a task are no results of this study."""
    before = study().hash
    monkeypatch.setattr(shelf.names("tasks")["bandit"], "version", 99)
    assert study().hash != before


SAME: dict[str, tuple[str, Any]] = {
    "a scale": ("scale.full", {"seeds": 9, "rollouts": 7}),
    "another scale": ("scale", {"other": {"seeds": 1}}),
    "a recipe's doc": ("recipe.cispo.doc", "Another word for it."),
    "a default said aloud": ("study.margin", 0.02),
    "an int for a float": ("study.floor", 0),
    "the one condition by its name": ("condition", {PLAIN: {}}),
}


@pytest.mark.parametrize("what", SAME)
def test_the_hash_does_not_depend_on(what: str) -> None:
    """DESIGN section 5: a larger scale extends the folder of a smaller one."""
    assert study(*SAME[what]).hash == study().hash


def test_comments_and_layout_are_not_hashed(shelf: Shelf, tmp_path: Path) -> None:
    """Wrong: a hash of the file's bytes: a typo mended in a comment would orphan every run."""
    path = file(tmp_path)
    before = read(path, shelf).hash
    path.write_text(f"# A remark.\n\n{path.read_text()}\n# The end.\n", encoding="utf-8")
    assert read(path, shelf).hash == before


# -- mistakes


MISTAKES: dict[str, tuple[str, Any, list[str]]] = {
    "table": ("scales", {}, ["unknown table [scales]. Did you mean 'scale'? It has all, cond"]),
    "key": ("study.marign", 0.1, ["[study]: unknown key 'marign'. Did you mean 'margin'?"]),
    "no study": ("study", DROP, ["study 'tiny' has no table [study]"]),
    "no recipe": ("recipe", {}, ["has no table [recipe]"]),
    "no scale": ("scale", DROP, ["has no table [scale]"]),
    "scale of a word": ("scale", 3, ["has no table [scale]"]),
    "empty condition": ("condition", {}, ["has no table [condition]"]),
    "no question": ("study.question", DROP, ["question", "required"]),
    "question": ("study.question", 3, ["question = 3", "string"]),
    "margin": ("study.margin", 1.5, ["margin = 1.5", "less than 1"]),
    "margin of none": ("study.margin", float("nan"), ["margin = nan"]),
    "alpha": ("study.alpha", 0.0, ["alpha = 0.0", "greater than 0"]),
    "floor": ("study.floor", float("nan"), ["floor = nan", "finite number"]),
    "prompts": ("study.eval_prompts", 0, ["eval_prompts = 0", "greater than or equal to 1"]),
    "warm start": ("study.warm_start", 1.0, ["warm_start = 1.0", "less than 1"]),
    "task": ("study.task", "bandti", ["no task 'bandti'. Did you mean 'bandit'?"]),
    "task without a name": ("study.task", {"arms": 3}, ["task: {'arms': 3}; a name or a table"]),
    "setting": ("study.task", {"name": "bandit", "arm": 3}, ["no setting 'arm'", "'arms'?"]),
    "value": ("study.task", {"name": "bandit", "arms": "x"}, ["arms='x' is not int"]),
    "recipe of a word": ("recipe.ppo", 3, ["recipe 'ppo': 3; a table was due"]),
    "base": ("recipe.ppo", {"base": "ppoo"}, ["no recipe 'ppoo'. Did you mean 'ppo'?"]),
    "slot": ("recipe.ppo", {"base": "ppo", "surogate": "x"}, ["unknown slot 'surogate'. Did yo"]),
    "all": ("all.loop", {"lrr": 1.0}, ["unknown key 'loop.lrr'. Did you mean 'lr'?"]),
    "all of a word": ("all", 3, ["[all]: 3; a table was due"]),
    "condition": ("condition", {"x": {"lop": {}}}, ["condition 'x'", "'lop'. Did you mean 'loop'"]),
    "condition of a word": ("condition", {"x": 3}, ["condition 'x': 3; a table was due"]),
    "a contrast": ("contrast", {"a": "cispo"}, ["contrasts are written [[contrast]]"]),
    "half a contrast": ("contrast", [{"a": "cispo"}], ["contrast 1", "b = ", "required"]),
    "its key": ("contrast", [{"a": "grpo", "b": "cispo", "at": 1}], ["contrast 1: unknown key 'a"]),
    "its recipe": (
        "contrast",
        [{"a": "gpro", "b": "cispo"}],
        ["contrast 1: no recipe 'gpro'. Did"],
    ),
    "itself": ("contrast", [{"a": "grpo", "b": "grpo"}], ["contrast 1: 'grpo' against itself"]),
    "its condition": (
        "contrast",
        [{"a": "grpo", "b": "cispo", "condition": "as gven"}],
        ["contrast 1: no condition 'as gven'. Did you mean 'as given'?"],
    ),
    "twice": (
        "contrast",
        [{"a": "grpo", "b": "cispo"}, {"a": "cispo", "b": "grpo"}],
        ["contrast 2: cispo - grpo is contrast 1 again"],
    ),
    "no seed": ("scale.smoke.seeds", 0, ["scale 'smoke': seeds = 0", "greater than or equal to 1"]),
    "seeds beyond 9999": ("scale.smoke.seeds", 1001, ["seeds = 1001", "1000"]),
    "no rollout": ("scale.smoke.rollouts", 0, ["scale 'smoke': rollouts = 0"]),
    "scale's key": ("scale.smoke.rollout", 1, ["unknown key 'rollout'. Did you mean 'rollouts'?"]),
    "scale of a number": ("scale.smoke", 3, ["scale 'smoke': 3; a table was due"]),
    "observer": ("study.observers", [3], ["observers", "3"]),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_one_clear_line(what: str) -> None:
    """Wrong: a traceback, pydantic's own page, an unknown key that is dropped in silence."""
    path, value, words = MISTAKES[what]
    with pytest.raises(LabError) as caught:
        study(path, value)
    line = str(caught.value)
    assert [w for w in words if w not in line] == [], line
    assert "\n" not in line
    assert len(line) < 300


def test_a_scale_that_is_not_declared() -> None:
    with pytest.raises(LabError, match=r"no scale 'smal'\. Did you mean 'small'\? It has small, "):
        next(study().specs("smal"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[study\n", "is not TOML: "),
        (b'[study]\nquestion = "\xff"\n', "is not TOML: "),
        (b"", r"has no table \[study\]"),
        (FILE.encode() * 2, "is not TOML: "),
    ],
    ids=["torn", "not UTF-8", "empty", "twice"],
)
def test_a_file_that_is_no_study(shelf: Shelf, tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "s.toml"
    path.write_bytes(content)
    with pytest.raises(LabError, match=words):
        read(path, shelf)


def test_a_study_that_is_not_there(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"no\.toml: No such file"):
        read(tmp_path / "no.toml", shelf)
    with pytest.raises(
        LabError, match=r"no study 'frist'\. Did you mean 'first'\? Available: first"
    ):
        find("frist", [FIRST.parent])
    assert find("first", [tmp_path, FIRST.parent]) == FIRST
    (tmp_path / "dir.toml").mkdir()
    with pytest.raises(LabError, match=r"dir\.toml: "):
        read(tmp_path / "dir.toml", shelf)
