"""A study planned, claimed, driven: one run a key, failures as results, nothing lost or doubled."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from small_studies import Here, cache, drive, keys, make, of_five_seeds, planned, study, table  # noqa: F401

from lab import records, results
from lab import study as studies
from lab.errors import LabError
from lab.execute import Job
from lab.protocol import resolve
from lab.shelf import Shelf
from lab.study import Plan, plan

# -- the plan


def test_a_run_for_each_arm_and_seed_with_a_key_of_its_own(shelf: Shelf) -> None:
    """2 recipes x 3 seeds = 6; in the order of the study."""
    made = planned(shelf, scale="small")
    places = [(r.recipe, r.spec.seed) for r in made.runs]
    assert places == [(r, s) for r in ("grpo", "cispo") for s in (9000, 9001, 9002)]
    assert len(set(keys(made))) == 6
    assert {r.spec.stage for r in made.runs} == {"evaluation"}


def test_a_larger_scale_holds_the_runs_of_a_smaller_one_of_equal_budget(shelf: Shelf) -> None:
    """Wrong: a key that knows its scale: nothing made at `smoke` would count at `small`."""
    smoke, small = set(keys(planned(shelf))), set(keys(planned(shelf, scale="small")))
    assert smoke < small
    longer = planned(shelf, "scale.small.rollouts", 3, "small")
    assert not smoke & set(keys(longer))  # another budget is another run


def test_what_is_frozen(shelf: Shelf, tmp_path: Path) -> None:
    """study.json alone says what was asked and planned: a report reads nothing else."""
    made = planned(shelf)
    studies.claim(made, tmp_path / "out")
    data = records.read_json(tmp_path / "out" / results.STUDY)
    assert (data["hash"], data["scale"]) == (made.study.hash, "smoke")
    assert data["task"] == {"name": "bandit", "version": 1, "settings": {"arms": 3}}
    assert data["contrasts"] == [{"a": "cispo", "b": "grpo", "condition": "as given"}]
    assert (data["seeds"], data["budget"], data["optimum"]) == ([9000, 9001], {"rollouts": 2}, 1.0)
    assert [row["run_key"] for row in data["plan"]] == keys(made)
    assert set(data["loops"]) == set(data["bounds"]) == {"grpo|as given", "cispo|as given"}
    assert data["loops"]["cispo|as given"]["group_size"] == 4


def test_a_bad_observer_or_metric_is_seen_before_anything_runs(shelf: Shelf) -> None:
    """Wrong: a metric that no run records: every verdict would be missing, after ten minutes."""
    with pytest.raises(LabError, match=r"no observe 'cliping'\. Did you mean 'clipping'\?"):
        planned(shelf, "study.observers", ["cliping"])
    with pytest.raises(
        LabError, match=r"metric 'scor' stands in no evaluation\. Did you mean 'scor"
    ):
        planned(shelf, "study.metric", "scor")
    with pytest.raises(LabError, match="metric 'reward' stands in no evaluation"):
        planned(shelf, "study.metric", "reward")  # of the training rollouts
    planned(shelf, "study.metric", "exact_score")
    data = table("study.metric", "exact_score")
    data["study"]["task"] = "reverse"  # too many answers to sum over
    with pytest.raises(LabError, match="metric 'exact_score' stands in no evaluation"):
        plan(resolve(data, "t", shelf), "smoke", shelf)


@pytest.mark.parametrize("task", ["bandit", "chain"])
def test_the_metrics_that_are_allowed_are_those_of_an_evaluation(
    shelf: Shelf, tmp_path: Path, task: str
) -> None:
    """Wrong: a list here that has lost sight of lab/heldout.py."""
    data = table("study.task", task)
    data["study"]["observers"] = []
    data["scale"]["smoke"]["rollouts"] = 1
    made = plan(resolve(data, "t", shelf), "smoke", shelf)
    (outcome,) = make(Job(keys(made)[0], made.runs[0].spec.data(), tmp_path))
    evaluations = [m for m in records.moments(tmp_path / outcome.key) if m.at == "eval"]
    more = {"exact_score"} if task == "bandit" else set()
    assert set(evaluations[0].metrics) == set(studies.EVALUATED) | more


# -- two arms that are one recipe


def twins(shelf: Shelf) -> Plan:
    """K1: A/A, one recipe under two names, and a third recipe between them."""
    data = table("recipe", {"a": {"base": "grpo"}, "c": {"base": "cispo"}, "b": {"base": "grpo"}})
    data["contrast"] = [{"a": "a", "b": "b"}]
    return plan(resolve(data, "twins", shelf), "smoke", shelf)


def test_one_run_serves_both_arms_of_an_a_a_study(shelf: Shelf, tmp_path: Path) -> None:
    """6 planned, 4 made. Wrong: the run made twice, an arm left without it, a count that never
    reaches its end.
    """
    made = twins(shelf)
    assert keys(made)[:2] == keys(made)[4:]
    executor, folder = Here(), tmp_path / "out"
    told = drive(made, folder, executor)
    counted = Counter(j.key for j in executor.submitted if j.folder == folder / results.RUNS)
    assert counted == Counter(set(keys(made)))
    assert told.lines[0] == "4 runs, 0 finished; measuring how long they take"
    assert told.steps[-1] == (4, 4, "")
    assert made.pending(folder) == []
    found = results.load(folder)
    assert found.complete
    assert found.counts == {"ok": 6}
    scores = {n: t["value"].tolist() for n, t in found.metric("score", "eval").groupby("recipe")}
    assert scores["a"] == scores["b"] != scores["c"]


def test_an_a_a_study_goes_on_from_its_tables(shelf: Shelf, tmp_path: Path) -> None:
    """The rows of a committed table are of both arms too (C3)."""
    made = twins(shelf)
    drive(made, tmp_path, Here())
    results.write(results.load(tmp_path))
    before = (tmp_path / results.TABLE).read_bytes()
    for key in set(keys(made)):
        (tmp_path / results.RUNS / key).rename(tmp_path / f"away-{key}")
    assert made.pending(tmp_path) == []
    results.write(results.load(tmp_path))
    assert (tmp_path / results.TABLE).read_bytes() == before


# -- the order


@pytest.mark.parametrize(("workers", "seeds"), list(itertools.product((1, 2, 3), (1, 2, 4, 5))))
def test_workers_that_begin_together_are_on_different_seeds(
    shelf: Shelf, workers: int, seeds: int
) -> None:
    """Two of one seed would teach one warm start twice, each for itself.

    Seeds in blocks of as many as there are workers: within a block, each `workers` runs in a row
    have as many seeds. Wrong: arm by arm over all seeds (a seed's start is long forgotten when its
    second arm comes), or seed by seed.
    """
    runs = [r for r in of_five_seeds(shelf) if r.spec.seed < 9000 + seeds]
    order = studies.ordered(runs[::-1], workers)
    assert sorted(r.key for r in order) == sorted(r.key for r in runs)
    start = 0
    for block in range(0, seeds, workers):
        size = min(workers, seeds - block)
        now = order[start : start + size * 2]  # two arms
        for i in range(0, len(now), size):
            assert [r.spec.seed for r in now[i : i + size]] == [
                9000 + block + k for k in range(size)
            ]
        start += len(now)


# -- the folder


def test_a_folder_belongs_to_one_study(shelf: Shelf, tmp_path: Path) -> None:
    """Refused with both hashes and the way out; the folder is left as it was."""
    studies.claim(planned(shelf), tmp_path)
    before = (tmp_path / results.STUDY).read_bytes()
    other = planned(shelf, "study.margin", 0.05)
    with pytest.raises(LabError, match="holds the results of another study") as caught:
        studies.claim(other, tmp_path)
    for said in (planned(shelf).study.hash, other.study.hash, "--out", str(tmp_path)):
        assert said in str(caught.value)
    assert (tmp_path / results.STUDY).read_bytes() == before


def test_a_folder_with_something_else_is_refused(shelf: Shelf, tmp_path: Path) -> None:
    """Wrong: results among a person's files."""
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(LabError, match="is not empty and holds no study: give another --out"):
        studies.claim(planned(shelf), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_larger_scale_extends_a_smaller_one(shelf: Shelf, tmp_path: Path) -> None:
    """4 runs at smoke; of the 6 at small, 2 are left to make."""
    drive(planned(shelf), tmp_path / "out", Here())
    executor = Here()
    told = drive(planned(shelf, scale="small"), tmp_path / "out", executor)
    made = {j.key for j in executor.submitted if j.folder == tmp_path / "out" / results.RUNS}
    assert len(made) == 2
    assert told.lines[0].startswith("6 runs, 4 finished; ")
    assert told.steps == [(5, 6, ""), (6, 6, "")]
    assert records.read_json(tmp_path / "out" / results.STUDY)["scale"] == "small"


def test_what_is_finished_does_not_run_again(shelf: Shelf, tmp_path: Path) -> None:
    """C3: as a folder, or as rows of a committed table; a folder that is not whole is none."""
    made = planned(shelf)
    drive(made, tmp_path, Here())
    executor = Here()
    assert drive(made, tmp_path, executor).lines == ["all 4 runs are finished"]
    assert executor.submitted == []
    lost = tmp_path / results.RUNS / keys(made)[1]
    (lost / records.RESULT).unlink()
    assert [r.key for r in made.pending(tmp_path)] == [keys(made)[1]]
    results.write(results.load(tmp_path))  # three of four
    for key in keys(made):
        (tmp_path / results.RUNS / key).rename(tmp_path / f"away-{key}")
    assert [r.key for r in made.pending(tmp_path)] == [keys(made)[1]]


def gone() -> int:
    """The id of a process that has ended."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_only_what_dead_drivers_left_is_swept(shelf: Shelf, tmp_path: Path) -> None:
    """E5: two drivers in one folder. Wrong: all that is half written is removed, and the other
    driver's runs with it; or nothing ever is.
    """
    runs = tmp_path / results.RUNS
    studies.claim(planned(shelf), tmp_path)
    dead, mine, whole = f".k.{gone()}.7", f".k.{os.getpid()}.7", "f" * 64
    others = (f".k.{gone()}.crashed", f".k.{os.getppid()}.9", ".k.1.9", ".notes", "a.b.c.d")
    for name in (dead, mine, whole, *others):
        (runs / name).mkdir()
        (runs / name / records.METRICS).write_text("{}")
    studies.claim(planned(shelf), tmp_path)
    left = {p.name for p in runs.iterdir()}
    assert left == {mine, whole, *others[1:]}


def test_a_run_that_raises_twice_is_a_result(tmp_path: Path) -> None:
    """D4: recorded whole, with what it raised and no number."""
    job = Job("k" * 64, {"seed": 9000}, tmp_path)
    studies.crashed(job, "ValueError: no")
    place = tmp_path / job.key
    assert records.finished(place)
    result = records.read_json(place / records.RESULT)
    assert (result["status"], result["final"]) == ("crashed", {})
    assert result["failure"]["statistic"] == "ValueError: no"
    assert result["counters"] == dict.fromkeys(records.COUNTERS, 0)
    assert [p.name for p in tmp_path.iterdir()] == [job.key]
    assert {m.at for m in records.moments(place)} == {"start"}


def test_a_crash_does_not_take_the_place_of_a_run(tmp_path: Path, shelf: Shelf) -> None:
    """C2: of two drivers, the one that was first is right."""
    made = planned(shelf)
    drive(made, tmp_path, Here())
    job = Job(keys(made)[0], made.runs[0].spec.data(), tmp_path / results.RUNS)
    studies.crashed(job, "ValueError: no")
    assert records.read_json(job.folder / job.key / records.RESULT)["status"] == "ok"
    assert len(list(job.folder.iterdir())) == 4


# -- pairing


def test_two_recipes_of_one_seed_share_the_first_rollout(shelf: Shelf, tmp_path: Path) -> None:
    """R1, bit for bit, as the run folders have it: starting weights, held-out answers, the first
    rollout's rewards. What they differ in shows from the first update on.

    Wrong: streams that hash the recipe or the study; a critic's weights drawn before the policy's.
    """
    data = table("study.task", {"name": "chain", "dense": True, "symbols": 3, "length": 3})
    data["recipe"] = {"grpo": {"base": "grpo"}, "ppo": {"base": "ppo"}}
    data["all"]["loop"] |= {"group_size": 8, "lr": 0.01}
    data["contrast"] = []
    runs = plan(resolve(data, "t", shelf), "smoke", shelf).runs
    for run in runs[:3]:  # grpo at both seeds, ppo at the first
        assert make(Job(run.key, run.spec.data(), tmp_path))[0].status == "ok"
    folders = {(r.recipe, r.spec.seed): tmp_path / r.key for r in runs}

    def of(recipe: str, seed: int) -> list[Any]:
        place = folders[recipe, seed]
        answers = (place / records.ANSWERS).read_text().splitlines()
        moments = list(records.moments(place))
        first, second = [m.metrics for m in moments if m.at == "rollout"]
        names = ("reward", "reward_std", "response_length", "response_truncated", "zero_variance")
        start = [m.metrics for m in moments if m.at in ("start", "eval")][:2]
        shared = [[a for a in answers if json.loads(a)["rollout"] == 0], start]
        return [[*shared, [first[n] for n in names]], [second[n] for n in names]]

    (shared, later), (same, others) = of("grpo", 9000), of("ppo", 9000)
    assert len(shared[0]) == 8
    assert shared == same
    assert later != others
    assert shared != of("grpo", 9001)[0]
