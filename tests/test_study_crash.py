"""`lab run` as a process: killed in the middle, interrupted, and called again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from small_studies import Here, cache, drive, file, lines_of, make  # noqa: F401

from lab import records, results, tables
from lab.protocol import read
from lab.shelf import installed
from lab.study import Plan, plan

pytestmark = pytest.mark.slow
LAB = Path(sys.executable).with_name("lab")


@contextlib.contextmanager
def running(study: Path, out: Path) -> Iterator[subprocess.Popen[str]]:
    """`lab run` at the scale smoke with one worker, in a session of its own; ended at the end."""
    command = [str(LAB), "run", str(study), "--scale", "smoke", "--workers", "1", "--out", str(out)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, start_new_session=True, cwd=study.parent, **streams)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def until(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for it while the process lives."""
    end = time.monotonic() + 240
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def alive(session: int) -> list[str]:
    """The processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = stat.read_text(encoding="utf-8").rpartition(")")
            state, _, _, its, *_ = rest.split()
            if int(its) == session and state != "Z":
                found.append(name)
    return found


def whole(out: Path) -> dict[str, int]:
    """The finished runs with the moment of their result, to the nanosecond."""
    found = (out / results.RUNS).glob(f"*/{records.RESULT}")
    return {f.parent.name: f.stat().st_mtime_ns for f in found if not f.parent.name.startswith(".")}


@dataclass
class Story:
    """A study that is killed with all its processes, and called again.

    Attributes:
        made: what it plans.
        out: its folder.
        before: what was finished when it was killed.
        half: folders that were not whole then.
        ended: the second call's exit code, standard output and standard error.
    """

    made: Plan
    out: Path
    before: dict[str, int] = field(default_factory=dict)
    half: list[Path] = field(default_factory=list)
    ended: tuple[int, str, str] = (1, "", "")


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    place = tmp_path_factory.mktemp("story")
    study = file(place, rollouts=8)
    out = place / "out"
    runs = out / results.RUNS
    told = Story(plan(read(study, installed()), "smoke", installed()), out)
    with running(study, out) as first:
        until(lambda: bool(whole(out)) and any(runs.glob(f".*/{records.METRICS}")), first)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    told.before, told.half = whole(out), list(runs.glob(".*"))
    with running(study, out) as second:
        output = second.communicate(timeout=300)
        told.ended = (second.returncode, *output)
    return told


def test_the_second_call_makes_what_is_missing(story: Story) -> None:
    """E2. It was killed in the middle: something was finished, something was half written.

    Wrong: all of it made again, half a folder taken for a run, half a folder left.
    """
    assert 0 < len(story.before) < 4
    assert story.half
    code, out, err = story.ended
    assert (code, out) == (0, f"{story.out / 'report.html'}\n"), err
    assert f"4 runs, {len(story.before)} finished; measuring" in err
    after = whole(story.out)
    assert set(after) == {r.key for r in story.made.runs}
    assert {k: after[k] for k in story.before} == story.before
    assert list((story.out / results.RUNS).glob(".*")) == []


def test_nothing_shows_that_it_was_interrupted(story: Story, tmp_path: Path) -> None:
    """The long table and every table are those of a study that ran at once, byte for byte."""
    drive(story.made, tmp_path, Here(make))
    results.write(results.load(tmp_path))
    tables.write(results.load(tmp_path))
    made = [f for f in sorted(tmp_path.rglob("*")) if f.suffix in (".gz", ".csv", ".md")]
    names = [str(f.relative_to(tmp_path)) for f in made]
    assert {"runs.csv.gz", "ends.csv", "pulls.csv", "tables/contrasts.csv"} <= set(names)
    assert [n for n in names if (story.out / n).read_bytes() != (tmp_path / n).read_bytes()] == []
    assert lines_of(story.out / results.RUNS) == lines_of(tmp_path / results.RUNS)


def test_lines_of_a_pipe_are_plain(story: Story) -> None:
    """Progress goes to stderr, without control characters; stdout holds the result alone."""
    _, _, err = story.ended
    lines = err.splitlines()
    assert lines[1].startswith("about ")
    assert any(line.startswith("4 of 4 runs") for line in lines)
    assert lines[-1] == "writing tables, figures and the report"
    assert "\x1b" not in err
    assert "\r" not in err
    assert max(map(len, lines)) <= 80


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are counted in /proc")
# long: a worker that is still importing multiprocessing may print a traceback of its own
@pytest.mark.long
def test_an_interrupt_says_what_is_kept(tmp_path: Path) -> None:
    """Ctrl-C, as a terminal sends it, to every process: one line, 130, nobody left, nothing half.

    Wrong: a traceback of the driver or of a worker, exit code 1, a worker that goes on for hours.
    """
    out = tmp_path / "out"
    with running(file(tmp_path, rollouts=1000), out) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert first == "4 runs, 0 finished; measuring how long they take\n"
        until(lambda: len(alive(process.pid)) > 1, process)  # a worker has been started
        os.killpg(process.pid, signal.SIGINT)
        output, error = process.communicate(timeout=60)
        left = alive(process.pid)
    said = "lab: stopped; finished runs are kept, and the same command goes on with the others\n"
    assert (process.returncode, output, error) == (130, "", said)
    assert left == []
    assert list((out / results.RUNS).iterdir()) == []
