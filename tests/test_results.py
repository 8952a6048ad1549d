"""A results folder: what it says while runs are missing, and when their folders are gone."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from studies_made import Made

from lab import records, results
from lab.errors import LabError
from lab.results import ANSWERS, CURVES, ENDS, RUNS, STUDY, TABLE, folders, load, state, write

KEPT = (TABLE, CURVES, ENDS, ANSWERS)
#: Two recipes, two seeds; of the four runs one diverges, one crashes, one has not ended.
MIXED: dict[str, Any] = {
    "seeds": 2,
    "rollouts": 2,
    "diverged": {("ppo", "as given", 9001): 2},
    "crashed": [("grpo", "as given", 9000)],
    "missing": [("grpo", "as given", 9001)],
}


def kept(folder: Path) -> dict[str, bytes]:
    """What a committed result consists of."""
    return {name: (folder / name).read_bytes() for name in KEPT}


def same(a: pd.DataFrame, b: pd.DataFrame) -> bool:
    """Equal to the last bit, whatever the order of the rows and the kind of the columns."""

    def rows(table: pd.DataFrame) -> list[str]:
        return sorted(repr(list(row)) for row in table.astype(object).itertuples(index=False))

    return list(a.columns) == list(b.columns) and rows(a) == rows(b)


# -- what is there


def test_each_planned_run_has_a_row_and_a_status(tmp_path: Path) -> None:
    """D4: none is dropped. Wrong: rows of finished runs only, so that n shrinks in silence."""
    found = load(Made(**MIXED).write(tmp_path))
    ends = {(r, s): x for r, s, x in found.runs[["recipe", "seed", "status"]].itertuples(False)}
    assert ends == {
        ("ppo", 9000): "ok",
        ("ppo", 9001): "diverged",
        ("grpo", 9000): "crashed",
        ("grpo", 9001): "missing",
    }
    assert found.counts == {"ok": 1, "diverged": 1, "crashed": 1, "missing": 1}
    assert not found.complete
    assert load(Made(seeds=2, rollouts=2).write(tmp_path / "whole")).complete


def test_a_failure_is_named(tmp_path: Path) -> None:
    """TB7: the component (the hook where there is none) and the statistic."""
    found = load(Made(**MIXED).write(tmp_path)).runs.set_index(["recipe", "seed"])["failure"]
    assert found["ppo", 9001] == "ppo: 3 of 96 values are not finite"
    assert found["grpo", 9000] == "no memory left"
    assert found["ppo", 9000] == found["grpo", 9001] == ""


def test_rows_carry_what_d1_asks(tmp_path: Path) -> None:
    found = load(Made(**MIXED).write(tmp_path))
    assert tuple(found.table.columns) == records.COLUMNS
    assert set(found.table["study"]) == {found.study["hash"]}
    assert set(found.table["stage"]) == {"evaluation"}
    assert set(found.table["task"]) == {"sort"}
    of_one = found.table[found.table["run_key"] == found.study["plan"][1]["run_key"]]
    assert set(of_one["status"]) == {"diverged"}
    assert set(of_one["seed"]) == {9001}


def test_a_metric_is_asked_by_split(tmp_path: Path) -> None:
    """`reward` is of training, `score` of held-out prompts; what is in neither has no row."""
    found = load(Made(seeds=2, rollouts=2).write(tmp_path))
    assert len(found.metric("score", "eval")) == 4 * 2  # at 0 and 2
    assert len(found.metric("reward", "train")) == 4 * 2
    assert len(found.metric("score", "train")) == len(found.metric("reward", "eval")) == 0
    assert list(found.metric("nothing", "eval").columns) == list(records.COLUMNS)


def test_answers_are_those_of_each_arms_first_seed(tmp_path: Path) -> None:
    """At its first and last evaluation. Wrong: every evaluation of every run, megabytes of it."""
    made = Made(seeds=2, rollouts=4, missing=[("grpo", "as given", 9000)])
    answers = load(made.write(tmp_path)).answers
    assert {tuple(r) for r in answers[["recipe", "seed", "rollout"]].itertuples(False)} == {
        ("ppo", 9000, 0),
        ("ppo", 9000, 4),
    }
    assert tuple(answers.columns) == results.ANSWER


def test_a_pull_is_kept_once_an_arm(tmp_path: Path) -> None:
    """81 ratios x 2 signs x 2 recipes, though each of an arm's runs has it."""
    pulls = load(Made(seeds=3, rollouts=2).write(tmp_path)).pulls
    assert len(pulls) == 81 * 2 * 2
    at_two = pulls[(pulls["ratio"] == 10 ** (12 / 40)) & (pulls["recipe"] == "ppo")]
    assert at_two.set_index("sign")["pull"].to_dict() == {1: 0.0, -1: -(10 ** (12 / 40))}


def test_a_run_of_another_study_in_the_folder_is_not_counted(tmp_path: Path) -> None:
    """A folder that nobody planned, as of a larger scale: no row."""
    Made(seeds=2, rollouts=2).write(tmp_path)
    before = load(tmp_path)
    place = tmp_path / RUNS
    shutil.copytree(next(place.iterdir()), place / ("f" * 64))
    assert same(load(tmp_path).table, before.table)


# -- when run folders are gone


@pytest.mark.parametrize("conditions", [("as given",), ("0.10", "1e-4"), ("nan", "")])
def test_what_was_written_stands_for_the_run_folders(
    tmp_path: Path, conditions: tuple[str, ...]
) -> None:
    """C3: a committed result says the same, byte for byte, without its run folders.

    Wrong: a condition `0.10` read as the number .1, one called `nan` as nothing, a float that
    comes back with another last digit, a failure that is forgotten.
    """
    change = {
        name: {(r, conditions[-1], s): x for (r, _, s), x in MIXED[name].items()}
        if isinstance(MIXED[name], dict)
        else [(r, conditions[-1], s) for r, _, s in MIXED[name]]
        for name in ("diverged", "crashed", "missing")
    }
    contrasts = [("ppo", "grpo", conditions[0])]
    made = Made(**{**MIXED, **change, "conditions": conditions, "contrasts": contrasts})
    before = load(made.write(tmp_path))
    write(before)
    first = kept(tmp_path)
    shutil.rmtree(tmp_path / RUNS)
    after = load(tmp_path)
    write(after)
    assert kept(tmp_path) == first
    assert same(after.table, before.table)
    assert same(after.pulls, before.pulls)
    assert same(after.answers, before.answers)
    assert same(after.runs, before.runs)
    assert after.counts == before.counts


def test_a_run_folder_goes_over_what_was_written(tmp_path: Path) -> None:
    """The run that was missing has ended meanwhile; the others' folders are gone."""
    write(load(Made(**MIXED).write(tmp_path)))
    shutil.rmtree(tmp_path / RUNS)
    Made(seeds=2, rollouts=2, missing=[("ppo", "as given", s) for s in (9000, 9001)]).write(
        tmp_path
    )
    assert load(tmp_path).counts == {"ok": 3, "diverged": 1}  # grpo's two were made again


def test_two_writes_are_equal_whatever_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal tables are equal files: neither a time nor a process id is in them.

    Wrong: gzip's header, which keeps the name that it was written under (RFC 1952, FNAME).
    """
    found = load(Made(**MIXED).write(tmp_path))
    write(found)
    before = kept(tmp_path)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(time, "time", lambda: 1e9)
    write(found)
    assert kept(tmp_path) == before
    content = gzip.decompress(before[TABLE]).decode().splitlines()
    assert content[0] == ",".join(records.COLUMNS)
    assert len(content) == len(found.table) + 1
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*KEPT, STUDY, RUNS])


def test_a_torn_file_is_one_line(tmp_path: Path) -> None:
    """A disk that was full; by name, so that a person can delete it and build it again."""
    write(load(Made(**MIXED).write(tmp_path)))
    for name in (*KEPT, STUDY):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        if name not in (CURVES, ENDS):  # half of a CSV file is a CSV file
            with pytest.raises(LabError, match=name.replace(".", r"\.")):
                load(tmp_path)
        (tmp_path / name).write_bytes(whole)
    load(tmp_path)


def test_a_torn_run_is_named(tmp_path: Path) -> None:
    found = load(Made(**MIXED).write(tmp_path))
    file = tmp_path / RUNS / found.study["plan"][0]["run_key"] / records.METRICS
    file.write_text(file.read_text()[:-20])
    with pytest.raises(LabError, match=r"metrics\.jsonl, line \d+ is torn"):
        load(tmp_path)


# -- where they are


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_folders_are_found_by_name_and_path(here: Path) -> None:
    for name in ("results/one", "results/two", "elsewhere"):
        Made(seeds=1, rollouts=1).write(here / name)
    (here / "results" / "empty").mkdir()
    one, two = Path("results/one"), Path("results/two")
    assert folders(None) == [one, two]
    assert folders("two") == folders("results/two") == [two]
    assert folders("elsewhere") == [Path("elsewhere")]
    with pytest.raises(
        LabError, match=r"no results of 'tow'\. Did you mean 'two'\? There are one, "
    ):
        folders("tow")
    with pytest.raises(LabError, match="no results of 'empty'"):
        folders("empty")


def test_where_there_are_none(here: Path) -> None:
    with pytest.raises(LabError, match="no results here: lab run STUDY makes some in results/"):
        folders(None)
    with pytest.raises(LabError, match=r"no results of 'x'\. There are none; or give a results fo"):
        folders("x")
    with pytest.raises(LabError, match=r"is no results folder: there is no study\.json"):
        load(here)


# -- how far they are


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., list[str]]:
    def said(**more: Any) -> list[str]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        Made(**{**MIXED, **more}).write(folder)
        for driver in (os.getpid(), os.getpid(), gone):
            (folder / RUNS / f".k{len(list(folder.rglob('*')))}.{driver}.1").mkdir()
        return list(state(folder))

    gone = 2**22 + 1  # beyond the largest process id of Linux
    return said


def test_the_state_of_a_study_under_way(lines: Any) -> None:
    """Wrong: what a dead driver left counted as under way, or as the last run that ended."""
    said = lines()
    assert said[0] == "made (small, hash 0123456789abcdef): 3 of 4 runs"
    assert said[1:5] == [
        "  ok        1",
        "  diverged  1",
        "  crashed   1",
        "  missing   1",
    ]
    assert said[5] == "  under way 2"
    assert said[6] == "  the last one ended 0 min ago"
    assert max(map(len, said)) <= 80


def test_the_state_of_a_whole_study(tmp_path: Path) -> None:
    folder = Made(seeds=2, rollouts=2).write(tmp_path)
    assert list(state(folder)) == [
        "made (small, hash 0123456789abcdef): 4 of 4 runs",
        "  ok        4",
    ]


def test_the_last_one_is_a_whole_one(tmp_path: Path) -> None:
    """Two hours ago, though another run has been begun since."""
    folder = Made(**MIXED).write(tmp_path)
    then = time.time() - 7200
    for run in (folder / RUNS).iterdir():
        os.utime(run, (then, then))
    (folder / RUNS / f".k.{os.getpid()}.1").mkdir()
    assert list(state(folder))[-1] == "  the last one ended 120 min ago"


def test_who_is_alive(tmp_path: Path) -> None:
    """A folder whose name says no driver is left alone: it counts as somebody's."""
    for name in (f".k.{os.getpid()}.1", f".k.{2**22 + 1}.1", ".k.1.1", ".k.me.1", "k.1.1", ".k"):
        (tmp_path / name).mkdir()
    (tmp_path / ".k.2.file").write_text(json.dumps({}))
    found: Iterator[tuple[Path, bool]] = results.unfinished(tmp_path)
    assert {p.name: alive for p, alive in found} == {
        f".k.{os.getpid()}.1": True,
        f".k.{2**22 + 1}.1": False,
        ".k.1.1": True,
        ".k.me.1": True,
    }
