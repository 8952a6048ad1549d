"""What `lab tasks` and `lab show` print: all there is, in 80 columns; and JSON for machines."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_studies import cache  # noqa: F401
from test_single import LOOP, SMALL

import lab
from lab import records, showing
from lab import study as studies
from lab.errors import LabError
from lab.execute import Job
from lab.records import Writer
from lab.shelf import Shelf
from lab.task import describe


def narrow(text: str) -> str:
    """It fits a terminal of 80 columns, and has no codes in it."""
    assert max(map(len, text.splitlines())) <= 80
    assert all(c.isprintable() or c == "\n" for c in text)
    return text


# -- tasks


def test_every_task_is_listed_with_its_settings(shelf: Shelf) -> None:
    text = narrow(showing.tasks_text(shelf))
    lines = [line.split() for line in text.splitlines()]
    for name, task in shelf.names("tasks").items():
        assert any(w[:1] == [name] for w in lines)
        for knob, value in describe(task())["settings"].items():
            assert f"{knob} = {str(value).lower()}" in text


def test_one_task_at_given_settings(shelf: Shelf) -> None:
    """The example, the longest answer and the rest are those of these settings."""
    text = narrow(showing.task_text("addition", {"digits": 3, "reversed": False}, shelf))
    rows = {line[2:16].strip(): line[16:].strip() for line in text.splitlines() if line[:2] == "  "}
    assert text.startswith("addition: Add two numbers")
    assert rows["settings"] == "digits = 3, reversed = false"
    left, right = rows["prompt"].rstrip(">").split("+")
    assert len(left) == len(right) == 3
    assert rows["right answer"] == f"{int(left) + int(right):04d}"
    assert rows["budget"].startswith("5 ")  # four digits and the end token
    assert (rows["characters"], rows["optimum"], rows["version"]) == ("+0123456789>", "1", "1")


def test_tasks_for_machines(shelf: Shelf) -> None:
    every = json.loads(showing.tasks_json(shelf, None, {}))
    assert set(every) == set(shelf.names("tasks"))
    one = json.loads(showing.tasks_json(shelf, "sort", {"digits": 4}))
    assert one == {
        **every["sort"],
        **{k: one[k] for k in ("settings", "prompt", "answer", "budget")},
    }
    assert (one["settings"], one["budget"]) == ({"digits": 4}, 5)


def test_a_task_that_is_not_there(shelf: Shelf) -> None:
    for show in (showing.task_text, lambda n, s, shelf: showing.tasks_json(shelf, n, s)):
        with pytest.raises(LabError, match=r"no task 'srt'\. Did you mean 'sort'\?"):
            show("srt", {}, shelf)


# -- a run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    recipe = {"base": "grpo", "kl": "none", "loop": LOOP}
    folder = tmp_path_factory.mktemp("shown") / "run"
    return lab.run(recipe, {"name": "bandit", "arms": 4}, settings=SMALL, out=folder).folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """The same, to be spoiled."""
    return Path(shutil.copytree(run, tmp_path / "run"))


def test_a_run_is_shown_with_all_that_it_left(run: Path) -> None:
    """What it was, how it ended, first and last evaluation, the last rollout, the answers."""
    text = narrow(showing.run_text(run))
    lines = text.splitlines()
    assert lines[0] == "given on bandit arms=4, seed 0, model nano: ok"
    assert lines[1].startswith("2 updates, 2 rollouts, ")
    assert "  advantage: group (baseline=mean, scale=std" in text
    evaluations = [m for m in records.moments(run) if m.at == "eval"]
    assert len(evaluations) == 3  # at 0, 1 and 2: the first and the last are shown
    for name, last in evaluations[-1].metrics.items():
        row = next(line.split() for line in lines if line.split()[:1] == [name])
        assert row == [name, f"{evaluations[0].metrics[name]:.4g}", f"{last:.4g}"]
    for at in (0, 2):
        assert f"answers after {at} rollouts: prompt, response, score, how it ended" in lines
    assert "answers after 1 rollouts" not in text
    answers = [json.loads(x) for x in (run / records.ANSWERS).read_text().splitlines()]
    assert sum(line.startswith("  >  ") for line in lines) == sum(
        a["rollout"] != 1 for a in answers
    )


def test_the_last_rollout_is_averaged(copy: Path) -> None:
    """Two updates of rollout 1 with .5 and 1: .75; the update before is none of it."""
    writer = Writer(copy)
    counters = dict.fromkeys(records.COUNTERS, 0)
    for rollout, value in ((7, 9.0), (8, 0.5), (8, 1.0), (8, math.nan)):
        writer.moment("update", {**counters, "rollout": rollout}, {"mine": value})
    writer.flush()
    text = showing.run_text(copy)
    assert [line.split() for line in text.splitlines() if "mine" in line] == [["mine", "0.75"]]
    assert "grad_norm" not in text  # of an earlier rollout


def test_a_run_under_way(copy: Path) -> None:
    """Without a result; then without an evaluation; then before its first line."""
    (copy / records.RESULT).unlink()
    text = narrow(showing.run_text(copy))
    assert text.splitlines()[0].endswith(": under way")
    assert "held out: at the start, at the end" in text
    (copy / records.METRICS).write_text("")
    (copy / records.ANSWERS).unlink()
    text = showing.run_text(copy)
    assert "held out" not in text
    assert "the last updates" not in text
    (copy / records.METRICS).unlink()
    assert showing.run_text(copy) == text
    assert json.loads(showing.run_json(copy))["moments"] == []


def test_a_run_that_diverged_names_the_culprit(copy: Path) -> None:
    result = records.read_json(copy / records.RESULT)
    failure = {
        "update": 5,
        "hook": "surrogate",
        "component": "mine",
        "statistic": "3 are not finite",
    }
    records.write_json(copy / records.RESULT, {**result, "status": "diverged", "failure": failure})
    first = " ".join(narrow(showing.run_text(copy)).split())
    assert ": diverged (5; surrogate; mine; 3 are not finite) " in first


def test_a_run_that_crashed_before_it_began(run: Path, tmp_path: Path) -> None:
    """It has no record, no evaluation and no answer; what it raised is there."""
    spec = records.read_json(run / records.RUN)["spec"]
    studies.crashed(Job("k" * 64, spec, tmp_path), "RuntimeError: out of memory")
    text = narrow(showing.run_text(tmp_path / ("k" * 64)))
    assert "crashed (RuntimeError: out of memory)" in " ".join(text.split())
    assert "0 updates, 0 rollouts" in text
    data = json.loads(showing.run_json(tmp_path / ("k" * 64)))
    assert data["result"]["status"] == "crashed"


def test_what_a_model_writes_moves_no_cursor(copy: Path) -> None:
    """A sampled escape sequence is text. A long answer is shown whole, in its column."""
    answer = {"rollout": 9, "prompt": "a\tb>", "score": None, "stop_reason": "length"}
    response = "\x1b[2J\nx\u2028" + "é" * 50
    Writer(copy).answers({"rollout": 9}, [{**answer, "response": response}])
    text = narrow(showing.run_text(copy))
    assert "  a\\tb>" in text
    assert r"\x1b[2J\nx\u2028" in text
    assert text.count("é") == 50
    assert "none  length" in text


def test_a_run_for_machines(run: Path, copy: Path) -> None:
    """Strict JSON: `NaN` is Python's own dialect, and every other reader fails on it."""
    data = json.loads(showing.run_json(run), parse_constant=pytest.fail)
    assert set(data) == {"run", "result", "moments", "answers"}
    moments = list(records.moments(run))
    assert [m["at"] for m in data["moments"]] == [m.at for m in moments]
    assert data["moments"][-1]["metrics"] == moments[-1].metrics
    assert data["result"]["final"] == moments[-1].metrics
    counters = dict.fromkeys(records.COUNTERS, 0)
    Writer(copy).moment("eval", counters, {"score": math.nan, "other": -math.inf})
    changed: Any = json.loads(showing.run_json(copy), parse_constant=pytest.fail)
    assert changed["moments"][-1]["metrics"] == {"score": "nan", "other": "-inf"}


@pytest.mark.parametrize("show", [showing.run_text, showing.run_json])
def test_no_run(tmp_path: Path, show: Any) -> None:
    with pytest.raises(LabError, match=r"holds no run: there is no run\.json"):
        show(tmp_path)
    with pytest.raises(LabError, match=r"nothing holds no run"):
        show(tmp_path / "nothing")
    (tmp_path / records.RUN).write_text("{")
    with pytest.raises(LabError, match=r"run\.json is not JSON"):
        show(tmp_path)
