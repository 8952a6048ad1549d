"""What a run leaves behind: lines, files, the long table; whole or not there, always equal."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import lab
from lab import records
from lab.errors import LabError
from lab.records import ANSWERS, COLUMNS, METRICS, RESULT, Writer

LABELS = {
    "run_key": "k",
    "study": "s",
    "stage": "evaluation",
    "recipe": "grpo",
    "condition": "",
    "config_hash": "c",
    "task": "reverse",
    "seed": 9000,
}


def at(update: int, rollout: int = 0) -> dict[str, int]:
    return {
        "update": update,
        "rollout": rollout,
        "generated_tokens": 10 * rollout,
        "trained_tokens": 100 * update,
    }


# -- lines


def test_numbers_come_back_to_the_last_bit(tmp_path: Path) -> None:
    """Shortest round-trip form; NaN and the infinities are words, as JSON has none.

    Wrong: rounding, `NaN` in a line that no strict parser reads, a metric that is left out.
    """
    given = {
        "a": 0.1 + 0.2,
        "b": 1 / 3,
        "tiny": 5e-324,
        "n": math.nan,
        "i": math.inf,
        "j": -math.inf,
    }
    Writer(tmp_path).moment("rollout", at(1), given)
    (moment,) = records.moments(tmp_path)
    assert repr(moment.metrics) == repr(given)
    assert (moment.at, moment.counters) == ("rollout", at(1))
    text = (tmp_path / METRICS).read_text()
    assert "0.30000000000000004" in text

    def refused(word: str) -> Any:
        raise AssertionError(word)

    json.loads(text, parse_constant=refused)


def test_answers_are_kept_as_they_are(tmp_path: Path) -> None:
    """A response may hold anything, line ends included: still a line each."""
    rows = [{"response": "a\nb\u2028\x85\x1c", "score": None}, {"response": "ü", "score": 1.0}]
    writer = Writer(tmp_path)
    writer.answers(at(0, 3), rows)
    lines = [json.loads(x) for x in (tmp_path / ANSWERS).read_text().split("\n")[:-1]]
    assert lines == [{"rollout": 3, **row} for row in rows]
    assert writer.lines() == {METRICS: 0, ANSWERS: 2}


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_torn_line_is_refused(tmp_path: Path, cut: int) -> None:
    """Wrong: read as the end of the run: a killed run's curve would look complete."""
    writer = Writer(tmp_path)
    for update in range(3):
        writer.moment("update", at(update), {"loss": 0.5})
    writer.flush()
    file = tmp_path / METRICS
    file.write_text(file.read_text()[:-cut])
    if cut == 1:  # the line is whole without its end
        assert len(list(records.moments(tmp_path))) == 3
        return
    with pytest.raises(LabError, match=r"metrics\.jsonl, line 3 is torn"):
        list(records.moments(tmp_path))


def test_cutting_back_to_a_checkpoint(tmp_path: Path) -> None:
    """A torn line behind the checkpoint goes too, and the next one begins on a line of its own."""
    writer = Writer(tmp_path)
    for update in range(3):
        writer.moment("update", at(update), {"loss": update})
    kept = writer.lines()
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"at": "upd')
    writer.cut(kept)
    writer.moment("update", at(3), {"loss": 3})
    writer.flush()
    assert [m.metrics["loss"] for m in records.moments(tmp_path)] == [0, 1, 2, 3]


def test_updates_wait_for_their_rollout(tmp_path: Path) -> None:
    """Written together, in order; a run that ends in mid-rollout loses none of them."""
    writer = Writer(tmp_path)
    writer.moment("update", at(1), {"loss": 1})
    assert not (tmp_path / METRICS).exists()
    writer.moment("rollout", at(1, 1), {"reward": 2})
    assert [m.at for m in records.moments(tmp_path)] == ["update", "rollout"]
    writer.moment("update", at(2, 1), {"loss": 3})
    writer.data(RESULT, {"status": "diverged"})
    assert [m.at for m in records.moments(tmp_path)] == ["update", "rollout", "update"]


def test_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="holds no run"):
        list(records.moments(tmp_path))
    with pytest.raises(LabError, match="No such file"):
        records.read_json(tmp_path / RESULT)
    (tmp_path / RESULT).write_text("{")
    with pytest.raises(LabError, match="is not JSON"):
        records.read_json(tmp_path / RESULT)


def test_json_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """Wrong: the old file truncated before the new one is complete."""
    file = tmp_path / "x.json"
    records.write_json(file, {"b": math.inf, "a": 1})
    assert file.read_text() == '{\n "b": Infinity,\n "a": 1\n}\n'
    with pytest.raises(TypeError):
        records.write_json(file, {"a": object()})
    assert records.read_json(file) == {"b": math.inf, "a": 1}


# -- one folder, one writer


def _run(folder: Path, status: str = "ok") -> Path:
    writer = Writer(folder)
    writer.moment("eval", at(0), {"score": 0.5})
    writer.data(RESULT, {"status": status})
    return folder


def test_the_second_writer_discards_its_copy(tmp_path: Path) -> None:
    """C2: both made the same run; the first one's folder stays as it is, nothing is left over."""
    final = tmp_path / "runs" / "key"
    records.finish(_run(tmp_path / "one"), final)
    (final / "mine").write_text("first")
    records.finish(_run(tmp_path / "two"), final)
    assert (final / "mine").read_text() == "first"
    assert sorted(f.name for f in tmp_path.iterdir()) == ["runs"]
    assert [f.name for f in (tmp_path / "runs").iterdir()] == ["key"]


def test_a_place_that_holds_something_else_is_not_overwritten(tmp_path: Path) -> None:
    final = tmp_path / "key"
    final.mkdir()
    (final / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        records.finish(_run(tmp_path / "one"), final)
    assert records.finished(tmp_path / "one")
    assert not records.finished(final)


# -- the long table


def test_updates_stand_as_the_mean_of_their_rollout(tmp_path: Path) -> None:
    """D1, C2: two rollouts of two updates and one with one; a NaN is no number to average.

    loss (1 + 2)/2 = 1.5 at update 2; (4 + 8)/2 = 6 at update 4; 16 at update 5. `ev` NaN, .5: .5;
    NaN, NaN: NaN. The last rollout has no line of its own: the run diverged in it.
    """
    writer = Writer(tmp_path)
    writer.moment("eval", at(0), {"score": 0.25})
    for n, (loss, ev) in enumerate(
        [(1, math.nan), (2, 0.5), (4, math.nan), (8, math.nan), (16, 1)], 1
    ):
        writer.moment("update", at(n, (n - 1) // 2), {"loss": loss, "ev": ev})
        if n in (2, 4):
            writer.moment("rollout", at(n, n // 2), {"reward": n / 8})
    writer.data(RESULT, {"status": "diverged"})
    table = records.run_table(tmp_path, LABELS)
    assert tuple(table.columns) == COLUMNS
    rows = [tuple(r) for r in table[["split", "metric", "update", "rollout", "value"]].to_numpy()]
    nan = math.nan
    assert repr(rows) == repr(
        [
            ("eval", "score", 0, 0, 0.25),
            ("train", "loss", 2, 0, 1.5),
            ("train", "ev", 2, 0, 0.5),
            ("train", "reward", 2, 1, 0.25),
            ("train", "loss", 4, 1, 6.0),
            ("train", "ev", 4, 1, nan),
            ("train", "reward", 4, 2, 0.5),
            ("train", "loss", 5, 2, 16.0),
            ("train", "ev", 5, 2, 1.0),
        ]
    )
    assert set(table["status"]) == {"diverged"}
    assert table["trained_tokens"].tolist() == [100 * r[2] for r in rows]
    assert {n: table[n].unique().tolist() for n in LABELS} == {n: [v] for n, v in LABELS.items()}


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([math.inf, 1.0], math.inf),
        ([-math.inf, math.nan], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([1e16, 1.0, -1e16], 1 / 3),  # summed exactly, in any order
    ],
)
def test_a_mean_of_anything_is_a_number(tmp_path: Path, values: list[float], mean: float) -> None:
    """D4: a diverged run stays in the table. Wrong: an exception from `math.fsum`."""
    writer = Writer(tmp_path)
    for n, x in enumerate(values):
        writer.moment("update", at(n), {"x": x})
    writer.data(RESULT, {"status": "ok"})
    table = records.run_table(tmp_path, LABELS)
    assert repr(table["value"].tolist()) == repr([mean])


#: Labels that look like numbers or like nothing.
ODD = {"run_key": "0123", "config_hash": "1e5", "condition": "", "recipe": "nan", "task": "NA"}


def _table() -> pd.DataFrame:
    rows = [
        {
            **LABELS,
            **ODD,
            "split": "eval",
            **at(n, n),
            "metric": "score",
            "value": x,
            "status": "ok",
        }
        for n, x in enumerate([0.1 + 0.2, math.nan, math.inf, -math.inf, 5e-324, 1 / 3])
    ]
    return pd.DataFrame(rows)[list(COLUMNS)]


@pytest.mark.parametrize("name", ["runs.csv.gz", "runs.csv"])
def test_equal_tables_are_equal_files(tmp_path: Path, name: str, monkeypatch: Any) -> None:
    """Written twice, a day apart, elsewhere, by two processes: the same bytes; and read back, the
    same numbers.

    Wrong: gzip's time stamp or file name, line ends of the platform, an empty cell for infinity;
    a hash `1e5` read as 100000, a condition `""` or a recipe `nan` as a gap that grouping drops.
    """
    one, two = tmp_path / name, tmp_path / "other" / name
    two.parent.mkdir()
    records.write_table(_table(), one)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 86400)
    monkeypatch.setattr(os, "getpid", lambda: 7)
    records.write_table(_table(), two)
    assert one.read_bytes() == two.read_bytes()
    read = records.read_table(one)
    assert repr(read["value"].tolist()) == repr(_table()["value"].tolist())
    assert read["update"].tolist() == list(range(6))
    assert read["seed"].tolist() == [9000] * 6
    for label, word in ODD.items():
        assert read[label].tolist() == [word] * 6, label
    assert [f.name for f in two.parent.iterdir()] == [name]


def test_a_table_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no such table"):
        records.read_table(tmp_path / "runs.csv")
    with gzip.open(tmp_path / "runs.csv.gz", "wt") as file:
        file.write(",".join(c for c in COLUMNS if c != "seed") + "\n")
    with pytest.raises(LabError, match="has no column 'seed'"):
        records.read_table(tmp_path / "runs.csv.gz")


def test_nothing_is_pickled() -> None:
    """Reading a record or a checkpoint must run nobody's code. Wrong: torch.save, torch.load."""
    words = re.compile(r"\b(pickle|torch\.save|torch\.load|joblib|shelve|marshal)\b")
    root = Path(str(lab.__file__)).parent
    found = [
        (file.name, line)
        for file in root.rglob("*.py")
        for line in file.read_text().splitlines()
        if words.search(line) and "no pickle" not in line
    ]
    assert found == []
    assert (root / "checkpoint.py").is_file()
