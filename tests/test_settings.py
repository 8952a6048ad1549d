"""A run as data: what may stand in it, what is refused, and that it comes back the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from small import spec

from lab.errors import LabError
from lab.recipe import Recipe, Use, load
from lab.settings import (
    OBSERVERS,
    SEEDS,
    Budget,
    Settings,
    Spec,
    checked,
    settings_of,
    split_sets,
    use_of,
    with_changes,
)
from lab.shelf import Shelf, installed
from lab.train import prepared

COUNTERS = {"rollouts": 3, "updates": 30, "generated_tokens": 300, "trained_tokens": 3000}


@pytest.mark.parametrize(
    ("limits", "share"),
    [
        ({"rollouts": 6}, 3 / 6),
        ({"updates": 30}, 1.0),
        ({"generated_tokens": 1200}, 300 / 1200),
        ({"trained_tokens": 1500}, 2.0),
        (
            {"rollouts": 6, "updates": 40, "trained_tokens": 30000},
            30 / 40,
        ),  # the first to be reached
    ],
)
def test_a_budget_is_spent_by_its_largest_share(limits: dict[str, int], share: float) -> None:
    """Wrong: the smallest (a run then goes on until every limit is passed), or generated tokens
    counted in place of trained ones.
    """
    assert Budget(**limits).spent(COUNTERS) == share
    assert Budget(**limits).declared() == limits


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ({"eval_promts": 8}, r"unknown key 'eval_promts'\. Did you mean 'eval_prompts'\?"),
        ({"budget": {"rollout": 3}}, r"unknown key 'budget\.rollout'\. Did you mean 'rollouts'\?"),
        ({"budget": {}}, "budget names one of rollouts, updates, generated_tokens, trained_tokens"),
        ({"budget": {"updates": 0}}, r"budget\.updates = 0: input should be greater than"),
        ({"budget": {"updates": 1.5}}, r"budget\.updates = 1\.5"),
        ({"budget": {"updates": True}}, r"budget\.updates = True"),
        ({"warm_start": 1.0}, r"warm_start = 1\.0: input should be less than 1"),
        ({"warm_start": -0.1}, r"warm_start = -0\.1"),
        ({"eval_every": 0}, "eval_every = 0"),
        ({"checkpoint_every": -1}, "checkpoint_every = -1"),
        ({"model": 3}, "model = 3"),
    ],
    ids=str,
)
def test_what_is_no_setting_is_refused(table: dict[str, Any], line: str) -> None:
    """C8 of STYLE: culprit, value, way out; never a traceback of pydantic."""
    with pytest.raises(LabError, match=line) as found:
        settings_of(table)
    assert "\n" not in str(found.value)
    assert str(found.value).startswith("settings: ")


def test_defaults_are_the_documented_ones() -> None:
    """ACCEPTANCE step 6 of a run: at least 256 held-out prompts unless somebody says less."""
    made = settings_of({})
    assert made == Settings()
    assert made.eval_prompts == 256
    assert made.budget.declared() == {"rollouts": 40}
    assert (made.model, made.warm_start, made.checkpoint_every) == ("nano", None, 0)


def test_every_setting_says_what_it_is() -> None:
    fields = {**Settings.model_fields, **Budget.model_fields}
    assert [n for n, f in fields.items() if not f.description] == []


def test_changes_replace_a_budget_as_a_whole() -> None:
    """Wrong: merged counters: a run would end at a limit that nobody gave it any more."""
    base = Settings(budget=Budget(rollouts=5), eval_prompts=32)
    made = with_changes(base, {"budget": {"updates": 7}, "warm_start": 0.5}, "study")
    assert made.budget.declared() == {"updates": 7}
    assert (made.eval_prompts, made.warm_start) == (32, 0.5)
    assert with_changes(base, {}, "study") == base
    line = r"study: unknown setting 'eval_evry'\. Did you mean 'eval_every'\? It has .*budget"
    with pytest.raises(LabError, match=line):
        with_changes(base, {"eval_evry": 1}, "study")


# -- seeds


@pytest.mark.parametrize("stage", SEEDS)
def test_a_stage_has_its_seeds(stage: str) -> None:
    """R3: wrong: a tuning seed among those that are judged: its luck was selected."""
    allowed = SEEDS[stage]
    base = {n: getattr(spec(), n) for n in Spec.model_fields}
    for seed in (allowed.start, allowed.stop - 1):
        assert checked(Spec, {**base, "stage": stage, "seed": seed}, "run").seed == seed
    for seed in (allowed.start - 1, allowed.stop, 1):
        line = f"run: seed {seed} is none of stage '{stage}', whose seeds are {allowed.start}-"
        with pytest.raises(LabError, match=line):
            checked(Spec, {**base, "stage": stage, "seed": seed}, "run")


def test_the_ranges_are_the_protocols() -> None:
    assert {n: (r.start, r.stop - 1) for n, r in SEEDS.items()} == {
        "tuning": (1000, 1999),
        "selection": (2000, 2999),
        "evaluation": (9000, 9999),
    }
    everything = [s for r in SEEDS.values() for s in r]
    assert len(everything) == len(set(everything))


def test_a_run_of_no_stage_takes_any_seed() -> None:
    assert [spec(seed=s).seed for s in (0, 1500, 9000)] == [0, 1500, 9000]
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        spec(seed=-1)


# -- there and back


@pytest.mark.parametrize("name", sorted(installed().names("recipes")))
def test_a_run_comes_back_from_plain_data(name: str, shelf: Shelf) -> None:
    """Through JSON, as an executor and a record pass it on: the same run under the same key.

    Wrong: a slot, an option or a budget that is lost on the way: the run would be another.
    """
    made = spec(name, budget=Budget(updates=7, trained_tokens=100), observers=("clipping",))
    again = Spec.of(json.loads(json.dumps(made.data())), shelf)
    assert again == made
    assert prepared(again, shelf).key == prepared(made, shelf).key


def test_an_override_can_empty_a_slot(shelf: Shelf) -> None:
    """As a study and `--set kl=none` do; the others keep what they have."""
    ppo = load("ppo", shelf)
    without = ppo.override({"kl": "none", "loop": {"lr": 1e-3}}, shelf)
    assert (without.kl, without.normalize) == (None, ppo.normalize)
    assert Recipe.of(without.spec(), "ppo", shelf) == without


def test_data_keeps_parameters_of_observers_and_tasks(shelf: Shelf) -> None:
    made = Spec(
        recipe=Recipe.of(load("ppo", shelf).spec(), "mine", shelf, ["wrap=dual_clip"]),
        task=Use(name="chain", settings={"length": 2}),
        seed=9001,
        observers=(Use(name="critic", settings={"c": 0.5}),),
        stage="evaluation",
    )
    data = json.loads(json.dumps(made.data()))
    assert Spec.of(data, shelf) == made
    assert data["recipe"]["name"] == "mine"
    assert data["observers"] == [{"name": "critic", "c": 0.5}]


def test_a_run_watches_all_that_reports_need_unless_told_otherwise() -> None:
    """L4-L7: entropy, KL(old), KL(ref), outside and flat, the critic."""
    assert [u.name for u in spec().observers] == list(OBSERVERS)
    assert {"clipping", "kl_old", "kl_ref", "entropy", "critic"} <= set(OBSERVERS)


@pytest.mark.parametrize("given", [3, {"digits": 2}, {"name": 3}, None])
def test_a_task_is_a_name_or_a_table_with_one(given: Any) -> None:
    with pytest.raises(LabError, match=r"task: .*; a name or a table with a name was due"):
        use_of(given, "task")


def test_a_word_and_a_table_are_one() -> None:
    assert use_of("copy", "task") == use_of({"name": "copy"}, "task") == Use(name="copy")
    assert use_of({"name": "copy", "digits": 3}, "task") == Use(name="copy", settings={"digits": 3})


# -- the command line


def test_sets_go_where_they_belong() -> None:
    """Wrong: the second setting of one table replaces the first."""
    recipe, task, run = split_sets(
        [
            "surrogate.cap=3",
            "task.digits=4",
            "run.budget.updates=50",
            "loop.lr=3e-4",
            "run.budget.rollouts=9",
            "task.dense=true",
            "run.model=tiny",
        ]
    )
    assert recipe == ["surrogate.cap=3", "loop.lr=3e-4"]
    assert task == {"digits": 4, "dense": True}
    assert run == {"budget": {"updates": 50, "rollouts": 9}, "model": "tiny"}
    assert split_sets([]) == ([], {}, {})


@pytest.mark.parametrize("one", ["task=copy", "run=3"])
def test_a_table_is_no_value(one: str) -> None:
    word = one.partition("=")[0]
    with pytest.raises(LabError, match=rf"--set {one}: {word} has settings: {word}\.NAME=VALUE"):
        split_sets([one])
