"""Runs in processes of this machine: whatever a worker did before, and whatever happens to it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import small_workers
from pebble.pool.base_pool import PoolStatus
from small_studies import (  # noqa: F401
    Here,
    cache,
    drive,
    file,
    keys,
    lines_of,
    make,
    planned,
    plugin,
    table,
)

from lab import records, results
from lab import study as studies
from lab.errors import LabError
from lab.execute import Job, Limits, Outcome, local
from lab.execute.local import Local
from lab.protocol import read, resolve
from lab.shelf import Shelf, installed
from lab.study import plan

#: A surrogate that is honest while the study is planned, and does this in a run's own folder.
TROUBLE = '''
    import os, sys, time
    from pathlib import Path
    import torch
    from lab import surrogate

    @surrogate
    def trouble(ratio, advantages):
        """r A, and trouble."""
        if any(Path({runs!r}).glob(".*")):
            {what}
        return ratio * advantages
    '''


def trouble(place: Path, what: str) -> Job:
    """A job that gets into it."""
    runs = place / "runs"
    path = plugin(place, TROUBLE.format(runs=str(runs), what=what))
    shelf = Shelf.installed([path])
    data = table("recipe", {"mine": {"base": "grpo", "surrogate": "trouble"}})
    data["contrast"] = []
    first = plan(resolve(data, "t", shelf), "smoke", shelf).runs[0]
    return Job(first.key, first.spec.data(), runs, (str(path),))


def quick(place: Path) -> Job:
    """A job that a worker answers at once: its plugin file is not there."""
    return Job("q" * 64, {}, place / "runs", (str(place / "no.py"),))


def outcome(pool: Local, job: Job, within: float = 120) -> Outcome:
    """What becomes of a job."""
    pool.submit(job)
    end = time.monotonic() + within
    while time.monotonic() < end:
        for found in pool.poll(1.0):
            assert found.key == job.key
            return found
    raise AssertionError(f"no outcome of {job.key[:8]}")


def until(what: Callable[[], bool], within: float = 60) -> None:
    """Wait for it."""
    end = time.monotonic() + within
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def workers() -> set[int]:
    return {p.pid for p in multiprocessing.active_children() if p.pid is not None}


# -- the pool alone


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
    """One worker that starts at once, and two seconds for a job."""
    monkeypatch.setattr(local, "_prepare", small_workers.prepare)
    monkeypatch.setattr(local, "run_one", small_workers.act)
    before = workers()
    made = Local(Limits(1, seconds=2))
    yield made
    made.cancel()
    assert workers() == before


def does(what: str, place: Path) -> Job:
    return Job("k" * 64, {"do": what}, place, attempt=2)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("hang", "it passed the time limit of a run"),
        ("exit", "its worker ended (exit code 3)"),
    ],
)
def test_a_worker_that_is_lost_is_replaced(
    light: Local, tmp_path: Path, what: str, why: str
) -> None:
    """Its folder goes with it, and the next job has another worker. Another driver's folder of the
    same run stays.
    """
    others = tmp_path / f".{'k' * 64}.{os.getppid()}.1"
    others.mkdir()
    first = outcome(light, does("answer", tmp_path)).error
    found = outcome(light, does(what, tmp_path))
    assert (found.status, found.error, found.attempt) == ("killed", why, 2)
    assert list(tmp_path.iterdir()) == [others]
    again = outcome(light, does("answer", tmp_path))
    assert again.status == "ok"
    assert again.error != first


def test_a_worker_that_dies_idle_takes_nothing_with_it(light: Local, tmp_path: Path) -> None:
    """At which pebble gives its whole pool up: `All workers expired`.

    Wrong: that exception for every open run of a study (twice: all of them crashed), and a
    traceback at the next submission.
    """
    worker = int(outcome(light, does("answer", tmp_path)).error)
    os.kill(worker, signal.SIGKILL)
    until(lambda: worker not in workers())
    for _ in range(3):  # a job may be lost with the pool: then it was killed, never failed
        found = outcome(light, does("answer", tmp_path))
        if found.status == "ok":
            break
        assert (found.status, found.attempt) == ("killed", 2)
        assert found.error == "a worker ended before it had a job"
    assert found.status == "ok"
    assert int(found.error) != worker


def test_a_worker_that_dies_while_it_starts(light: Local, tmp_path: Path) -> None:
    """As where memory is short. Wrong: every run of the study `failed`, twice, so all crashed."""
    before = workers()
    light.submit(does("answer", tmp_path))
    (worker,) = workers() - before
    os.kill(worker, signal.SIGKILL)
    found: list[Outcome] = []
    until(lambda: bool(found.extend(light.poll(0.1)) or found))
    assert [(o.status, o.error) for o in found] == [("killed", local.NO_POOL)]
    assert outcome(light, does("answer", tmp_path)).status == "ok"


def test_jobs_of_a_pool_that_has_ended_are_not_waited_for(light: Local, tmp_path: Path) -> None:
    """Whatever ended it. Wrong: a study that waits for ever."""
    light.submit(does("hang", tmp_path))
    pool: Any = light._pool
    pool._context.status = PoolStatus.ERROR
    found: list[Outcome] = []
    until(lambda: bool(found.extend(light.poll(0.1)) or found))
    assert [(o.status, o.attempt) for o in found] == [("killed", 2)]
    assert outcome(light, does("answer", tmp_path)).status == "ok"


def test_nothing_is_left_when_a_driver_stops(light: Local, tmp_path: Path) -> None:
    """Neither a process nor a folder of its own; what was queued does not begin."""
    for i in range(3):
        light.submit(Job(f"{i}" * 64, {"do": "hang"}, tmp_path))
    until(lambda: any(tmp_path.glob(".*")))
    light.cancel()
    assert list(tmp_path.iterdir()) == []


def test_a_study_outlives_a_worker(
    light: Local, tmp_path: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E2: SIGKILL in the middle of a run; it is made again, and every run is there."""
    monkeypatch.setattr(studies, "measure", lambda *given: {})
    made = planned(shelf)
    told = drive(made, tmp_path, light, workers=1)
    assert told.lines[2:] == [f"run {keys(made)[0][:8]} killed: its worker ended (exit code -9)"]
    assert sorted(p.name for p in (tmp_path / results.RUNS).iterdir()) == sorted(keys(made))


@pytest.mark.skipif(sys.platform != "linux", reason="the mask of another process is read in /proc")
def test_workers_never_see_an_interrupt(light: Local, tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to all of them: the driver alone answers it.

    Wrong: a traceback of each worker that was still being started.
    """
    before = workers()
    light.submit(does("hang", tmp_path))
    (worker,) = workers() - before
    status = Path(f"/proc/{worker}/status").read_text(encoding="utf-8")
    blocked = next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk"))
    assert int(blocked, 16) >> (signal.SIGINT - 1) & 1


# -- in this process


def test_a_key_that_is_not_the_runs_is_no_result(tmp_path: Path) -> None:
    """A plugin file that is edited under a study: not a crash of the recipe, and nothing kept."""
    first = plan(resolve(table(), "t", installed()), "smoke", installed()).runs[0]
    (found,) = make(Job("f" * 64, first.spec.data(), tmp_path, attempt=2))
    assert (found.status, found.attempt) == ("killed", 2)
    assert found.error == "the code has changed since the study was planned"
    assert list(tmp_path.iterdir()) == []


def test_a_finished_folder_is_not_made_again(tmp_path: Path) -> None:
    """C2. Whatever it ended with is said again."""
    (tmp_path / "k").mkdir()
    records.write_json(tmp_path / "k" / records.RESULT, {"status": "diverged"})
    assert make(Job("k", {}, tmp_path))[0].status == "diverged"
    assert [p.name for p in tmp_path.rglob("*")] == ["k", records.RESULT]


def test_the_errors_of_this_file_are_lines() -> None:
    """What `mistake` says is a LabError's own words, without its class."""
    assert local._line(LabError("no\n  such")) == "no such"
    assert local._line(ValueError("no")) == "ValueError: no"


# -- whole runs


@pytest.fixture(scope="module")
def pool() -> Iterator[Local]:
    """One worker, which all tests below use one after the other."""
    made = Local(Limits(1, seconds=300, gigabytes=6))
    yield made
    made.cancel()
    assert workers() == set()


# -- one result


@pytest.mark.slow
def test_a_run_is_the_same_in_a_fresh_and_in_a_used_worker(pool: Local, tmp_path: Path) -> None:
    """Byte for byte, and in this process too.

    Between the two the worker trains another recipe of that seed and one of another seed. Wrong:
    a generator of the process that is drawn from, a component's memory or a warm start that the
    last run has moved, weights that are shared instead of copied.
    """
    data = table("study.task", {"name": "reverse", "digits": 1})
    data["study"]["warm_start"] = 0.05
    data["recipe"] = {"ppo": {"base": "ppo"}, "cispo": {"base": "cispo"}}
    data["contrast"] = []
    runs = plan(resolve(data, "t", installed()), "smoke", installed()).runs
    jobs = [Job(r.key, r.spec.data(), tmp_path / "one") for r in (runs[0], runs[2], runs[1])]
    for job in jobs:
        assert outcome(pool, job).status == "ok"
    worker = workers()
    again = [Job(job.key, job.spec, tmp_path / "two") for job in jobs[:2]]
    for job in again:
        assert outcome(pool, job).status == "ok"
        make(Job(job.key, job.spec, tmp_path / "here"))
    assert workers() == worker  # it was the same one
    for job in again:
        first, *others = [lines_of(tmp_path / place / job.key) for place in ("one", "two", "here")]
        assert set(first) >= {"metrics.jsonl", "answers.jsonl", "run.json", "result.json"}
        assert [x == first for x in others] == [True, True]
    assert lines_of(tmp_path / "one" / jobs[0].key) != lines_of(tmp_path / "one" / jobs[1].key)


@pytest.mark.slow
def test_a_run_has_one_thread(pool: Local, tmp_path: Path) -> None:
    """Two threads a process are slower than one, and sum in another order."""
    path = plugin(
        tmp_path,
        '''
        import os, torch
        from lab import observe

        @observe
        def machine(logp):
            """Threads of the process: ``threads``, ``omp``, ``mkl``."""
            named = {n: float(os.environ[f"{n.upper()}_NUM_THREADS"]) for n in ("omp", "mkl")}
            return {"threads": float(torch.get_num_threads()), **named}
        ''',
    )
    shelf = Shelf.installed([path])
    made = plan(resolve(table("study.observers", ["machine"]), "t", shelf), "smoke", shelf)
    job = Job(made.runs[0].key, made.runs[0].spec.data(), tmp_path, (str(path),))
    assert outcome(pool, job).status == "ok"
    updates = [m for m in records.moments(tmp_path / job.key) if m.at == "update"]
    seen = {tuple(m.metrics[n] for n in ("threads", "omp", "mkl")) for m in updates}
    assert seen == {(1.0, 1.0, 1.0)}


# -- two drivers


DRIVER = """
import sys
from pathlib import Path
from lab import study
from lab.shelf import installed
from small_studies import Told
chosen = study.find(sys.argv[1], installed())
study.run(chosen, "small", Path(sys.argv[2]), installed(), Told(), 1)
"""


@pytest.mark.slow
def test_two_drivers_run_one_study_at_once(pool: Local, tmp_path: Path) -> None:
    """E5: the same folders, whole, with the bytes that one driver alone makes.

    Wrong: a folder of the other driver swept, one half written, a second result beside the first.
    """
    path, out = file(tmp_path, rollouts=3), tmp_path / "out"
    made = plan(read(path, installed()), "small", installed())
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-W", "error", "-c", DRIVER, str(path), str(out)]
    other = subprocess.Popen(command, env=env, stderr=subprocess.PIPE)
    until(lambda: any((out / results.RUNS).glob(".*")))  # it is at its first run
    drive(made, out, pool, workers=1)
    _, error = other.communicate(timeout=300)
    assert (other.returncode, error) == (0, b"")
    drive(made, tmp_path / "alone", Here(make))
    assert lines_of(out / results.RUNS) == lines_of(tmp_path / "alone" / results.RUNS)
    assert len(list((out / results.RUNS).iterdir())) == 6


# -- trouble


FAILS = {
    "an exception": ('raise RuntimeError("no\\n  such luck")', "RuntimeError: no such luck"),
    "sys.exit": ("sys.exit(0)", "SystemExit: 0"),
    "memory": ("torch.ones(2**32)", "alloc"),  # 16 GB, of the 6 that it may have
}


@pytest.mark.slow
@pytest.mark.parametrize("what", FAILS)
def test_trouble_in_a_component_fails_the_run_alone(pool: Local, tmp_path: Path, what: str) -> None:
    """One line, no folder, and the worker lives. Wrong: sys.exit(0) taken for a good end."""
    code, said = FAILS[what]
    job = trouble(tmp_path, code)
    before = workers()
    found = outcome(pool, job)
    assert (found.status, found.mistake) == ("failed", False)
    assert said in found.error
    assert "\n" not in found.error
    assert list(job.folder.iterdir()) == []
    assert before <= workers()


@pytest.mark.slow
def test_a_mistake_of_a_person_is_told_from_a_failure(pool: Local, tmp_path: Path) -> None:
    found = outcome(pool, quick(tmp_path))
    assert (found.status, found.mistake, found.attempt) == ("failed", True, 1)
    assert found.error.startswith("--plugin ")


@pytest.mark.slow
def test_a_process_that_ends_inside_a_component_was_killed(pool: Local, tmp_path: Path) -> None:
    """os._exit, as where the kernel ends a process. Last of those on this pool: its worker goes."""
    job = trouble(tmp_path, "os._exit(3)")
    found = outcome(pool, job)
    assert (found.status, found.error) == ("killed", "its worker ended (exit code 3)")
    assert list(job.folder.iterdir()) == []
