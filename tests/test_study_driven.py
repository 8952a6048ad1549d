"""Driving a study: what becomes of its runs, whatever is delivered, and how long it takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from small_studies import Here, Told, cache, drive, keys, make, paper, planned, plugin, table  # noqa: F401

from lab import results
from lab import study as studies
from lab.errors import LabError
from lab.execute import Job, Outcome
from lab.execute.cost import Cost, minutes
from lab.protocol import resolve
from lab.settings import Budget, Settings
from lab.shelf import Shelf
from lab.study import Plan, plan

# -- outcomes


Fate = Callable[[Job, int], Sequence[Outcome]]


def driven(made: Plan, folder: Path, fate: Fate, tests: bool = False) -> tuple[Told, Counter[str]]:
    """Drive a plan where the first run meets its fate and the others are made.

    Args:
        made: the plan.
        folder: its results.
        fate: from the job and how often it has come, what is delivered.
        tests: whether the short runs before the study meet it too.
    """
    count: Counter[str] = Counter()

    def act(job: Job) -> Sequence[Outcome]:
        if job.key != keys(made)[0] or (job.folder != folder / results.RUNS and not tests):
            return paper(job)
        count[job.key] += 1
        return fate(job, count[job.key])

    return drive(made, folder, Here(act)), count


def failed(job: Job, error: str = "ValueError: no") -> Outcome:
    return Outcome(job.key, "failed", error, attempt=job.attempt)


def killed(job: Job) -> Outcome:
    return Outcome(job.key, "killed", "memory", attempt=job.attempt)


#: What becomes of a run -> how often it is begun, and the status that it has at the end.
FATES: dict[str, tuple[Fate, int, str]] = {
    "fails twice": (lambda job, n: [failed(job)], 2, "crashed"),
    "fails once": (lambda job, n: [failed(job)] if n == 1 else paper(job), 2, "ok"),
    "killed thrice": (lambda job, n: [killed(job)], 3, "missing"),
    "killed twice": (lambda job, n: [killed(job)] if n < 3 else paper(job), 3, "ok"),
    # one exception is no result, whatever else befell the run
    "killed, fails, works": (
        lambda job, n: [[killed(job)], [failed(job)]][n - 1] if n < 3 else paper(job),
        3,
        "ok",
    ),
    "fails, killed, fails": (
        lambda job, n: [killed(job)] if n == 2 else [failed(job)],
        3,
        "crashed",
    ),
    "ok twice": (lambda job, n: [*paper(job), *paper(job)], 1, "ok"),
    "ok, and late a kill": (lambda job, n: [*paper(job), killed(job), failed(job)], 1, "ok"),
    # one failure, told twice, is one
    "a failure told twice": (lambda job, n: [failed(job)] * 2 if n == 1 else paper(job), 2, "ok"),
    "a kill told four times": (lambda job, n: [killed(job)] * 4 if n == 1 else paper(job), 2, "ok"),
    "an old failure again": (
        lambda job, n: [failed(job)] if n == 1 else [Outcome(job.key, "failed", "x"), *paper(job)],
        2,
        "ok",
    ),
    "of others": (lambda job, n: [Outcome("f" * 64, "ok"), *paper(job)], 1, "ok"),
    "ok, and no folder": (
        lambda job, n: [Outcome(job.key, "ok", attempt=n)] if n == 1 else paper(job),
        2,
        "ok",
    ),
}


@pytest.mark.parametrize("what", FATES)
def test_what_becomes_of_a_run(shelf: Shelf, tmp_path: Path, what: str) -> None:
    """D4 and C4: an executor delivers twice, late and in any order; the other three runs are ok."""
    fate, begun, status = FATES[what]
    made, folder = planned(shelf), tmp_path / "out"
    told, count = driven(made, folder, fate)
    found = results.load(folder)
    ends = dict(zip(found.runs["run_key"], found.runs["status"], strict=True))
    assert ends == {**dict.fromkeys(keys(made), "ok"), keys(made)[0]: status}
    assert count[keys(made)[0]] == begun
    assert sorted(p.name for p in (folder / results.RUNS).iterdir()) == sorted(
        k for k in keys(made) if ends[k] != "missing"
    )
    last = {"ok": "", "crashed": "1 crashed", "missing": "1 killed"}[status]
    assert told.steps[-1] == (4, 4, last)


def test_a_killed_run_is_no_result_and_the_next_call_makes_it(shelf: Shelf, tmp_path: Path) -> None:
    """Wrong: `killed` recorded as an end, so that a full disk decides a study."""
    made = planned(shelf)
    driven(made, tmp_path, lambda job, n: [killed(job)])
    assert [r.key for r in made.pending(tmp_path)] == [keys(made)[0]]
    drive(made, tmp_path, Here())
    assert results.load(tmp_path).counts == {"ok": 4}


def test_a_crash_is_said_counted_and_shown(shelf: Shelf, tmp_path: Path) -> None:
    made = planned(shelf)
    told, _ = driven(made, tmp_path, lambda job, n: [failed(job)])
    assert told.lines.count(f"run {keys(made)[0][:8]} failed: ValueError: no") == 2
    found = results.load(tmp_path)
    assert (found.complete, found.counts) == (True, {"ok": 3, "crashed": 1})
    (row,) = found.runs[found.runs["status"] == "crashed"].to_dict("records")
    assert row["failure"] == "ValueError: no"
    assert "crashed   1" in "\n".join(results.state(tmp_path))


# -- the estimate


def cost(**changes: Any) -> Cost:
    each = {"rollouts": 1.0, "updates": 16.0, "generated_tokens": 40.0, "trained_tokens": 160.0}
    whole = {"start": 3.0, "rollout": 2.0, "evaluation": 0.5, "each": each}
    return Cost(**{**whole, "evaluated": frozenset(["score"]), **changes})


@pytest.mark.parametrize(
    ("budget", "seconds"),
    [
        (Budget(rollouts=10), 10 * 2 + (1 + 10 / 5) * 0.5),
        (Budget(updates=160), 10 * 2 + (1 + 10 / 5) * 0.5),
        (Budget(generated_tokens=200), 5 * 2 + (1 + 5 / 5) * 0.5),
        (Budget(trained_tokens=800, rollouts=10), 5 * 2 + (1 + 5 / 5) * 0.5),  # what ends it first
    ],
)
def test_the_seconds_of_a_run(shelf: Shelf, budget: Budget, seconds: float) -> None:
    """From what a rollout takes of each counter."""
    spec = planned(shelf).runs[0].spec
    settings = Settings(budget=budget, eval_every=5)
    assert cost().seconds(spec.model_copy(update={"settings": settings})) == pytest.approx(seconds)


def driver(made: Plan, executor: Any, workers: int) -> studies.Driver:
    return studies.Driver(made, Path(), executor, (), Told(), workers)


def test_the_estimate_of_a_study(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 runs of 2 rollouts and 3 evaluations, and a start for each of 2 seeds, on 2 workers:
    (4 (2*2 + 3*.5) + 2*3) / 2 = 14. Wrong: a start for each run; workers that have nothing to do.
    """
    made = planned(shelf)
    monkeypatch.setattr(studies, "measure", lambda *given: {False: cost()})
    assert driver(made, None, 2).estimate(made.runs) == pytest.approx(14)
    assert driver(made, None, 8).estimate(made.runs[:1]) == pytest.approx(2 * 2 + 3 * 0.5 + 3)
    monkeypatch.setattr(studies, "measure", lambda *given: {})
    assert math.isnan(driver(made, None, 2).estimate(made.runs))


def test_it_is_measured(shelf: Shelf, tmp_path: Path) -> None:
    """Short runs of their own, elsewhere; one for recipes with a critic, one for those without."""
    data = table("recipe.ppo", {"base": "ppo"})
    data["scale"]["smoke"]["rollouts"] = 50
    made = plan(resolve(data, "t", shelf), "smoke", shelf)
    executor = Here()
    seconds = driver(made, executor, 2).estimate(made.runs)
    assert 0 < seconds < 600
    assert len(executor.submitted) == 2
    assert {j.spec["settings"]["budget"]["rollouts"] for j in executor.submitted} == {2}
    assert not any(j.folder.exists() for j in executor.submitted)


def test_a_study_runs_whether_or_not_it_could_be_measured(shelf: Shelf, tmp_path: Path) -> None:
    made = planned(shelf, "scale.smoke.rollouts", 3)

    def act(job: Job) -> Sequence[Outcome]:
        return paper(job) if job.folder == tmp_path / results.RUNS else [killed(job)]

    told = drive(made, tmp_path, Here(act))
    assert told.lines[1] == "about an unknown time for 4 runs on 2 workers"
    assert results.load(tmp_path).complete
    assert (minutes(89.4), minutes(600)) == ("89 s", "10 min")


def test_a_mistake_in_the_first_run_ends_the_study(shelf: Shelf, tmp_path: Path) -> None:
    """Wrong: what a person can mend, recorded as the crash of every run."""
    made = planned(shelf)

    def act(job: Job) -> Sequence[Outcome]:
        return [Outcome(job.key, "failed", "the warm start reached .1", mistake=True)]

    with pytest.raises(LabError, match=r"^the warm start reached \.1$"):
        drive(made, tmp_path, Here(act))
    assert list((tmp_path / results.RUNS).iterdir()) == []


def test_a_metric_of_an_observer_is_looked_for_in_the_first_run(
    shelf: Shelf, tmp_path: Path
) -> None:
    """What an observer records is known when it has been called, not before."""
    file = plugin(
        tmp_path,
        '''
        from lab import observe

        @observe(at="eval")
        def mine(rewards):
            """The best reward: ``best``."""
            return {"best": float(rewards.max())}
        ''',
    )
    more = Shelf.installed([file])
    for metric, works in (("best", True), ("bets", False)):
        data = table("study.metric", metric)
        data["study"]["observers"] = ["mine"]
        data["recipe"].pop("cispo")
        data["contrast"] = []
        data["scale"]["smoke"]["seeds"] = 1
        made = plan(resolve(data, "t", more), "smoke", more)
        folder = tmp_path / metric
        if works:
            drive(made, folder, Here(make), plugins=[str(file)])
            assert len(results.load(folder).metric("best", "eval")) == 3  # at 0, 1 and 2
            continue
        with pytest.raises(LabError, match=r"metric 'bets' stands in no evaluation\. Did you mean"):
            drive(made, folder, Here(make), plugins=[str(file)])
