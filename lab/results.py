"""A study's results folder: what was planned, what is there, as tables. No torch.

The folder holds ``study.json`` (the frozen study and the plan), ``runs/<key>/`` (a folder a run),
and what is made of them: ``runs.csv.gz`` (the long table), ``ends.csv`` (how each run ended),
``pulls.csv``, ``answers.json``, ``tables/``, ``figures/``, ``report.html``. A committed reference
has no run folders: those four files stand for them.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lab import records
from lab.errors import LabError, nearest, one_of

STUDY, RUNS, TABLE, CURVES = "study.json", "runs", "runs.csv.gz", "pulls.csv"
ENDS, ANSWERS = "ends.csv", "answers.json"
#: What names a run inside a study: one key stands in two arms that are one recipe by two names.
PLACE = ("recipe", "condition", "seed")
CURVE = ("recipe", "condition", "sign", "ratio", "pull")
ANSWER = (*PLACE, "rollout", "prompt", "response", "score", "stop_reason")


@dataclass(frozen=True, eq=False)  # by identity, so that what is made of it can be kept
class Results:
    """What a results folder says.

    Attributes:
        folder: the folder.
        study: the frozen study: name, hash, scale, question, task, metric, margin, alpha, floor,
            optimum, recipes (name -> description), conditions, contrasts, budget, plan.
        table: the long table of the planned runs that are finished (lab.records.COLUMNS).
        pulls: recipe, condition, sign, ratio, pull: each objective's weight curve.
        answers: of each arm's first seed, those of its first and last evaluation: recipe,
            condition, seed, rollout, prompt, response, score, stop_reason.
        runs: a row a planned run: run_key, recipe, condition, seed, status (ok, diverged, crashed,
            killed, missing), failure.
    """

    folder: Path
    study: Mapping[str, Any]
    table: pd.DataFrame
    pulls: pd.DataFrame
    answers: pd.DataFrame
    runs: pd.DataFrame

    @property
    def complete(self) -> bool:
        """Whether every planned run has ended."""
        return not (self.runs["status"] == "missing").any()

    @functools.cached_property
    def counts(self) -> dict[str, int]:
        """How many planned runs have each status."""
        found = self.runs["status"].value_counts()
        return {str(n): int(c) for n, c in found.items()}

    def metric(self, name: str, split: str) -> pd.DataFrame:
        """The rows of one number: a row a run and moment."""
        return self._parts.get((name, split), self.table.iloc[:0])

    @functools.cached_property
    def _parts(self) -> dict[Any, pd.DataFrame]:
        """The table by metric and split: it is long, and asked often."""
        return dict(iter(self.table.groupby(["metric", "split"], sort=False)))


def load(folder: Path) -> Results:
    """What a results folder holds now.

    Raises:
        LabError: if it is none, or one of its files is torn.
    """
    if not (folder / STUDY).is_file():
        raise LabError(f"{folder} is no results folder: there is no {STUDY}")
    study = records.read_json(folder / STUDY)
    old = _Old.of(folder)
    tables, pulls, rows = [], [old.pulls], []
    answers: list[dict[str, Any]] = []
    for planned in study["plan"]:
        place = folder / RUNS / planned["run_key"]
        labels = {**planned, "study": study["hash"], "stage": "evaluation", "task": _task(study)}
        first = planned["seed"] == study["seeds"][0]
        if records.finished(place):
            result = records.read_json(place / records.RESULT)
            status, failure = result["status"], _failure(result)
            tables.append(records.run_table(place, labels))
            pulls.append(_curve(place, planned))
            answers += _answers(place, planned) if first else []
        else:
            status, failure, kept = old.run(planned)
            tables.append(kept.assign(**labels)[list(records.COLUMNS)])
            answers += old.answers_of(planned)
        rows.append({**planned, "status": status, "failure": failure})
    curve = _joined(pulls, CURVE).drop_duplicates(list(CURVE[:-1]), keep="last", ignore_index=True)
    shown = pd.DataFrame(answers, columns=list(ANSWER))
    table = _joined(tables, records.COLUMNS)
    return Results(folder, study, table, curve, shown, pd.DataFrame(rows))


def _joined(parts: Sequence[pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
    known = [p for p in parts if len(p)]
    if not known:
        return pd.DataFrame(columns=list(columns))
    return pd.concat(known, ignore_index=True)


@dataclass(frozen=True)
class _Old:
    """What an earlier `write` has left, for the runs whose folders are gone."""

    table: pd.DataFrame
    ends: Mapping[tuple[str, ...], tuple[str, str]]
    pulls: pd.DataFrame
    answers: Sequence[dict[str, Any]]

    @classmethod
    def of(cls, folder: Path) -> _Old:
        table = pd.DataFrame(columns=list(records.COLUMNS))
        if (folder / TABLE).is_file():
            table = records.read_table(folder / TABLE)
        ends = {}
        if (folder / ENDS).is_file():
            kept: Any = records.read_csv(folder / ENDS, str)
            ends = {_arm(r): (r["status"], r["failure"]) for r in kept.to_dict("records")}
        pulls = pd.DataFrame(columns=list(CURVE))
        if (folder / CURVES).is_file():
            pulls = records.read_csv(folder / CURVES, {**dict.fromkeys(CURVE, str), "sign": int})
            pulls = pulls.assign(**{n: records.exact(pulls[n]) for n in ("ratio", "pull")})
        answers = records.read_json(folder / ANSWERS) if (folder / ANSWERS).is_file() else []
        return cls(table, ends, pulls, answers)

    def run(self, planned: Mapping[str, Any]) -> tuple[str, str, pd.DataFrame]:
        """Status, failure and rows of a planned run: `missing` and none where it never ended."""
        rows = self.table
        for name in ("run_key", "recipe", "condition"):
            rows = rows[rows[name] == planned[name]]
        found = str(rows["status"].iloc[0]) if len(rows) else "missing"
        status, failure = self.ends.get(_arm(planned), (found, ""))
        return status, failure, rows

    def answers_of(self, planned: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [row for row in self.answers if all(row[n] == planned[n] for n in PLACE)]


def _arm(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[n]) for n in ("run_key", "recipe", "condition"))


def write(results: Results) -> None:
    """The long table and the weight curves, beside the run folders they come from."""
    records.write_table(results.table, results.folder / TABLE)
    records.write_table(results.pulls, results.folder / CURVES)
    ended = results.runs[results.runs["status"] != "missing"]
    records.write_table(ended[["run_key", *PLACE, "status", "failure"]], results.folder / ENDS)
    records.write_json(results.folder / ANSWERS, results.answers.to_dict("records"))


def _task(study: Mapping[str, Any]) -> str:
    return str(study["task"]["name"])


def _failure(result: Mapping[str, Any]) -> str:
    failure = result.get("failure") or {}
    named = [failure.get("component") or failure.get("hook"), failure.get("statistic")]
    return ": ".join(str(x) for x in named if x)


def _curve(place: Path, planned: Mapping[str, Any]) -> pd.DataFrame:
    if not (place / records.PULLS).is_file():  # a run that crashed before it began
        return pd.DataFrame(columns=list(CURVE))
    data = records.read_json(place / records.PULLS)
    rows = [
        (planned["recipe"], planned["condition"], sign, ratio, pull)
        for name, sign in (("positive", 1), ("negative", -1))
        for ratio, pull in zip(data["ratio"], data[name], strict=True)
    ]
    return pd.DataFrame(rows, columns=list(CURVE))


def _answers(place: Path, planned: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The answers of a run's first and last evaluation."""
    file = place / records.ANSWERS
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    rows = [{**{n: planned[n] for n in PLACE}, **json.loads(line)} for line in lines]
    ends = {rows[0]["rollout"], rows[-1]["rollout"]} if rows else set()
    return [row for row in rows if row["rollout"] in ends]


def folders(given: str | None) -> list[Path]:
    """The results folders of a name (results/NAME) or path; of all that are here when left out.

    Raises:
        LabError: if there is none.
    """
    if given is None:
        found = sorted(p.parent for p in Path("results").glob(f"*/{STUDY}"))
        if not found:
            raise LabError("no results here: lab run STUDY makes some in results/")
        return found
    for folder in (Path(given), Path("results") / given):
        if (folder / STUDY).is_file():
            return [folder]
    known = [p.parent.name for p in Path("results").glob(f"*/{STUDY}")]
    raise LabError(
        f"no results of {given!r}.{nearest(given, known)} There are {one_of(known)}; "
        "or give a results folder"
    )


def unfinished(runs: Path) -> Iterator[tuple[Path, bool]]:
    """Folders of runs that are not whole, and whether the driver of each is alive."""
    for left in runs.glob(".*.*.*"):
        driver = left.name.split(".")[-2]
        if left.is_dir():
            yield left, not driver.isdigit() or _alive(int(driver))


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def state(folder: Path) -> Iterator[str]:
    """How far a results folder is, line by line."""
    found = load(folder)
    counts = found.counts
    ended = sum(c for n, c in counts.items() if n != "missing")
    yield (
        f"{found.study['name']} ({found.study['scale']}, hash {found.study['hash']}): "
        f"{ended} of {len(found.runs)} runs"
    )
    for name in ("ok", "diverged", "crashed", "missing"):
        if counts.get(name):
            yield f"  {name:<9} {counts[name]}"
    under_way = sum(alive for _, alive in unfinished(folder / RUNS))
    if under_way:
        yield f"  under way {under_way}"
    whole = [p for p in (folder / RUNS).glob("*/") if not p.name.startswith(".")]
    newest = max((p.stat().st_mtime for p in whole), default=0.0)
    if newest and ended < len(found.runs):
        yield f"  the last one ended {(time.time() - newest) / 60:.0f} min ago"
