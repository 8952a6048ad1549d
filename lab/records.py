"""What a run leaves behind: write, read. pandas for the long table, no torch.

A run's folder holds ``run.json`` (what it was), ``metrics.jsonl`` (a line a moment: update,
rollout, eval), ``pulls.json`` (the objective's weight curve), ``answers.jsonl`` (sampled answers
of each evaluation), ``result.json`` (how it ended) and ``time.json``, which alone holds what
differs between two executions of one run. A folder is written under another name and renamed, so
it is whole or not there.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lab.errors import LabError

COUNTERS = ("update", "rollout", "generated_tokens", "trained_tokens")
STATUSES = ("ok", "diverged", "crashed", "killed")
#: Columns of the long table: a row a number.
COLUMNS = (
    *("run_key", "study", "stage", "recipe", "condition", "config_hash", "task", "seed", "split"),
    *COUNTERS,
    *("metric", "value", "status"),
)
_WORDS = (
    *("run_key", "study", "stage", "recipe", "condition", "config_hash", "task", "split"),
    *("metric", "status"),
)
METRICS, ANSWERS, RUN, RESULT = "metrics.jsonl", "answers.jsonl", "run.json", "result.json"
PULLS, TIME = "pulls.json", "time.json"


@dataclass(frozen=True)
class Moment:
    """One line of metrics.

    Attributes:
        at: update, rollout or eval.
        counters: updates, rollouts and tokens so far.
        metrics: name -> number.
    """

    at: str
    counters: Mapping[str, int]
    metrics: Mapping[str, float]


class Writer:
    """Appends to a run's folder.

    Args:
        folder: made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._waiting: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)

    def moment(self, at: str, counters: Mapping[str, int], metrics: Mapping[str, float]) -> None:
        """A line of metrics, in the order given; floats in shortest round-trip form."""
        line = {"at": at, **counters, "metrics": {n: _number(x) for n, x in metrics.items()}}
        self._waiting.append(json.dumps(line, allow_nan=False) + "\n")
        if at != "update":
            self.flush()

    def answers(self, counters: Mapping[str, int], rows: Iterable[Mapping[str, Any]]) -> None:
        """Sampled answers of an evaluation."""
        lines = [json.dumps({"rollout": counters["rollout"], **row}) + "\n" for row in rows]
        with (self.folder / ANSWERS).open("a", encoding="utf-8") as file:
            file.writelines(lines)

    def data(self, name: str, data: Mapping[str, Any]) -> None:
        """A JSON file, replaced as a whole, after the lines that were said before it."""
        self.flush()
        write_json(self.folder / name, data)

    def lines(self) -> dict[str, int]:
        """How many lines each growing file has: what a checkpoint remembers."""
        self.flush()
        return {n: len(_lines(self.folder / n)) for n in (METRICS, ANSWERS)}

    def cut(self, lines: Mapping[str, int]) -> None:
        """Back to a checkpoint's number of lines: what was written after it is made again."""
        self._waiting.clear()
        for name, count in lines.items():
            kept = _lines(self.folder / name)[:count]
            (self.folder / name).write_text("".join(kept), encoding="utf-8")

    def flush(self) -> None:
        """Write the updates' lines, which wait for the end of their rollout."""
        if self._waiting:
            with (self.folder / METRICS).open("a", encoding="utf-8") as file:
                file.writelines(self._waiting)
            self._waiting.clear()


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []


def _number(x: float) -> float | str:
    """JSON has no NaN and no infinity: they are words."""
    return float(x) if math.isfinite(x) else str(float(x))


def write_json(file: Path, data: Any) -> None:
    """A JSON file, written beside, flushed and renamed."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8") as handle:
        json.dump(data, handle, indent=1, allow_nan=True)
        handle.write("\n")
        handle.flush()
        os.fsync(handle.fileno())
    beside.replace(file)


def read_json(file: Path) -> Any:
    """A JSON file.

    Raises:
        LabError: if it is not there or is none.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise LabError(f"{file}: {e.strerror}") from None
    except ValueError as e:
        raise LabError(f"{file} is not JSON: {e}") from None


def finish(written: Path, final: Path) -> None:
    """Move a whole run folder to its place; where another writer was first, discard this one."""
    final.parent.mkdir(parents=True, exist_ok=True)
    for file in written.rglob("*"):  # a checkpoint is a folder inside
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
    try:
        written.rename(final)
    except OSError:
        if not (final / RESULT).exists():
            raise
        shutil.rmtree(written)


def finished(folder: Path) -> bool:
    """Whether a run's folder is whole."""
    return (folder / RESULT).is_file()


def moments(folder: Path) -> Iterator[Moment]:
    """A run's metrics, line by line.

    Raises:
        LabError: if there are none, or a line is torn.
    """
    file = folder / METRICS
    if not file.is_file():
        raise LabError(f"{folder} holds no run: there is no {METRICS}")
    for number, line in enumerate(_lines(file), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            raise LabError(f"{file}, line {number} is torn") from None
        metrics = {n: float(x) for n, x in row["metrics"].items()}
        yield Moment(row["at"], {c: row[c] for c in COUNTERS}, metrics)


def run_table(folder: Path, labels: Mapping[str, Any]) -> pd.DataFrame:
    """A run as rows of the long table: evaluations, rollouts, and updates averaged by rollout.

    A number of an update stands as the mean over the rollout's updates, at the counters of the
    last of them; split is `train` for those and for a rollout's own numbers, `eval` for held-out
    ones.

    Args:
        folder: the run's.
        labels: run_key, study, stage, recipe, condition, config_hash, task, seed.
    """
    status = read_json(folder / RESULT)["status"]
    rows: list[tuple[Any, ...]] = []
    within: dict[str, list[float]] = {}
    last: Mapping[str, int] = {}
    for moment in moments(folder):
        if moment.at == "update":
            last = moment.counters
            for name, value in moment.metrics.items():
                within.setdefault(name, []).append(value)
            continue
        if within:
            rows += [("train", *last.values(), n, mean(xs)) for n, xs in within.items()]
            within = {}
        split = "eval" if moment.at == "eval" else "train"
        rows += [(split, *moment.counters.values(), n, x) for n, x in moment.metrics.items()]
    if within:
        rows += [("train", *last.values(), n, mean(xs)) for n, xs in within.items()]
    names = ("split", *COUNTERS, "metric", "value")
    columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    # a column at a time is three times as quick as labels put on afterwards
    same = {name: [value] * len(rows) for name, value in {**labels, "status": status}.items()}
    return pd.DataFrame({**same, **columns}, columns=list(COLUMNS))


def mean(values: list[float]) -> float:
    """The mean of the numbers that are any; NaN for none, and for infinities of both signs."""
    known = [x for x in values if not math.isnan(x)]
    if not all(math.isfinite(x) for x in known):
        return sum(known)
    return math.fsum(known) / len(known) if known else math.nan


def write_table(table: pd.DataFrame, file: Path) -> None:
    """The long table as CSV; gzipped without time or name, so equal tables are equal files."""
    beside = file.with_name(f".{os.getpid()}.{file.name}")
    content = table.to_csv(index=False, lineterminator="\n").encode()
    beside.write_bytes(gzip.compress(content, mtime=0) if file.suffix == ".gz" else content)
    beside.replace(file)


def read_table(file: Path) -> pd.DataFrame:
    """The long table of a CSV file.

    Raises:
        LabError: if it is not there, or a column is missing.
    """
    if not file.is_file():
        raise LabError(f"{file}: no such table")
    # words stay words: a hash of digits is no number, an empty condition and a recipe `nan` no gap
    words = dict.fromkeys((*_WORDS, "value"), str)
    table = read_csv(file, words)
    missing = [c for c in COLUMNS if c not in table.columns]
    if missing:
        raise LabError(f"{file} has no column {missing[0]!r}")
    table["value"] = exact(table["value"])
    return table[list(COLUMNS)]


def read_csv(file: Path, types: Any) -> pd.DataFrame:
    """A CSV file of the lab; nothing in it stands for a gap.

    Raises:
        LabError: if it is torn.
    """
    try:
        return pd.read_csv(file, dtype=types, keep_default_na=False)
    except (EOFError, OSError, ValueError, zlib.error) as e:
        raise LabError(f"{file} is torn ({' '.join(str(e).split())}): take it away") from None


def exact(words: Iterable[str]) -> list[float]:
    """Numbers to the last bit, as pandas' own reader does not have them; an empty one is NaN."""
    return [float(x) if x else math.nan for x in words]
