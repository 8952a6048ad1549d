"""One run from Python and from the command line: where it goes, what it is made of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from small_studies import Told, cache, lines_of, plugin  # noqa: F401

import lab
from lab import records, single
from lab.errors import LabError

#: As small as a run can be.
SMALL: dict[str, Any] = {"budget": {"rollouts": 2}, "eval_every": 1, "eval_prompts": 4}
LOOP = {"prompts": 2, "group_size": 2, "epochs": 1, "minibatches": 1}
RECIPE = {"base": "grpo", "kl": "none", "loop": LOOP}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def go(**more: Any) -> Any:
    return lab.run(RECIPE, "bandit", **{"settings": SMALL, **more})


def test_a_run_from_python(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its folder says task, recipe, seed and key; nothing is printed."""
    result = go(seed=3)
    assert result.status == "ok"
    assert result.folder == Path("runs") / f"bandit-given-3-{result.key[:8]}"
    assert records.finished(result.folder)
    assert result.counters["rollout"] == 2
    assert set(result.final) >= {"score", "exact_score"}
    assert capsys.readouterr() == ("", "")
    run = records.read_json(result.folder / records.RUN)
    assert (run["key"], run["spec"]["stage"], run["spec"]["seed"]) == (result.key, "train", 3)


def test_a_second_call_finds_it_finished(here: Path) -> None:
    """Wrong: trained again, over what was there."""
    first = go()
    file = first.folder / records.METRICS
    os.utime(file, (1, 1))
    assert go() == first
    assert file.stat().st_mtime == 1


def test_a_folder_of_another_run_is_refused(here: Path) -> None:
    """Whatever differs: here the seed. Nothing of it is touched."""
    go(out="mine")
    before = lines_of(here / "mine")
    with pytest.raises(LabError, match=r"^mine holds another run .*; give another --out$"):
        go(out="mine", seed=1)
    assert lines_of(here / "mine") == before


def test_checkpoints_are_kept_by_default(here: Path) -> None:
    """A run alone is resumed from one; those of a study are short, and many."""
    spec = records.read_json(go().folder / records.RUN)["spec"]
    assert spec["settings"]["checkpoint_every"] == single.CHECKPOINT_EVERY == 10
    often = go(settings={**SMALL, "checkpoint_every": 1}, out="often").folder
    assert (often / "checkpoint").is_dir()


def test_observers_and_plugins_are_those_that_are_named(here: Path) -> None:
    path = plugin(
        here,
        '''
        from lab import observe

        @observe
        def rows(mask):
            """Rows: ``rows``."""
            return {"rows": float(len(mask))}
        ''',
    )
    folder = go(observers=["rows"], plugins=[path]).folder
    updates = [m for m in records.moments(folder) if m.at == "update"]
    assert [m.metrics["rows"] for m in updates] == [4.0, 4.0]
    assert all("ratio_mean" not in m.metrics for m in updates)


def test_a_console_is_told_the_share_of_the_budget(here: Path) -> None:
    told = Told()
    go(console=told)
    assert told.steps == [(50, 100, ""), (100, 100, "")]


def test_a_recipe_of_a_file_has_a_folder_without_a_colon(here: Path) -> None:
    """A colon is no character of a file's name on every system."""
    (here / "r.toml").write_text(
        '[recipe."o:ne"]\nbase = "grpo"\nloop = {prompts = 2}\n[recipe.two]\nbase = "ppo"\n'
    )
    result = lab.run("r.toml:o:ne", {"name": "bandit", "arms": 4}, settings=SMALL)
    assert result.folder.name == f"bandit-o-ne-0-{result.key[:8]}"
    run = records.read_json(result.folder / records.RUN)
    assert run["spec"]["task"] == {"name": "bandit", "arms": 4}


def train(*sets: str, **more: Any) -> Path:
    """As `lab train` calls it."""
    usual = [f"loop.{n}={x}" for n, x in LOOP.items()]
    usual += ["run.budget.rollouts=1", "run.eval_prompts=4"]
    chosen = {"recipe": "cispo", "task": "bandit", "seed": 0, "out": None, "plugins": ()}
    return single.train(**{**chosen, "sets": [*usual, *sets], "console": Told(), **more})


def test_values_go_where_their_path_says(here: Path) -> None:
    """recipe < --set; task.* sets the task up, run.* the run, anything else the recipe."""
    folder = train("surrogate.cap=2.5", "task.arms=4", "run.model=tiny", "run.budget.updates=9")
    spec = records.read_json(folder / records.RUN)["spec"]
    assert spec["recipe"]["surrogate"]["cap"] == 2.5
    assert spec["task"] == {"name": "bandit", "arms": 4}
    assert spec["settings"]["model"] == "tiny"
    budget = {k: v for k, v in spec["settings"]["budget"].items() if v is not None}
    assert budget == {"rollouts": 1, "updates": 9}  # what is reached first ends it


MISTAKES: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "recipe": ({"recipe": "cipso"}, [], "no recipe 'cipso'. Did you mean 'cispo'?"),
    "task": ({"task": "bandti"}, [], "no task 'bandti'. Did you mean 'bandit'?"),
    "its setting": ({}, ["task.arm=3"], "task 'bandit' has no setting 'arm'; it has arms. Did you"),
    "a run's": ({}, ["run.modl=tiny"], "run: unknown setting 'modl'. Did you mean 'model'?"),
    "a budget's": ({}, ["run.budget.rolouts=3"], "'budget.rolouts'. Did you mean 'rollouts'?"),
    "its type": ({}, ["run.eval_prompts=x"], "eval_prompts = 'x'"),
    "a slot": ({}, ["surogate.cap=3"], "unknown slot 'surogate'. Did you mean 'surrogate'?"),
    "model": ({}, ["run.model=nanoo"], "no model 'nanoo'. Did you mean 'nano'?"),
    "seed": ({"seed": -1}, [], "seed = -1"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(here: Path, what: str) -> None:
    """Not even a word on the console: the error is the only line that a person gets."""
    more, sets, said = MISTAKES[what]
    told = Told()
    with pytest.raises(LabError) as caught:
        train(*sets, console=told, **more)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (told.lines, told.steps) == ([], [])
    if what != "model":  # which is loaded when the run has its folder
        assert list(here.iterdir()) == []
