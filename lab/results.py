"""A study's results folder: what was planned, what is there, as tables. No torch.

The folder holds ``study.json`` (the frozen study and the plan), ``runs/<key>/`` (a folder a run),
and what is made of them: ``runs.csv.gz`` (the long table), ``pulls.csv``, ``tables/``,
``figures/``, ``report.html``. A committed reference has no run folders: the rows of its
``runs.csv.gz`` stand for them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lab import records
from lab.errors import LabError

STUDY, RUNS, TABLE, CURVES = "study.json", "runs", "runs.csv.gz", "pulls.csv"


@dataclass(frozen=True)
class Results:
    """What a results folder says.

    Attributes:
        folder: the folder.
        study: the frozen study: name, hash, scale, question, task, metric, margin, alpha, floor,
            optimum, recipes (name -> description), conditions, contrasts, budget, plan.
        table: the long table of the planned runs that are finished (lab.records.COLUMNS).
        pulls: recipe, condition, sign, ratio, pull: each objective's weight curve.
        runs: a row a planned run: run_key, recipe, condition, seed, status (ok, diverged, crashed,
            killed, missing), failure.
    """

    folder: Path
    study: Mapping[str, Any]
    table: pd.DataFrame
    pulls: pd.DataFrame
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
        chosen = (self.table["metric"] == name) & (self.table["split"] == split)
        return self.table[chosen]


def load(folder: Path) -> Results:
    """What a results folder holds now.

    Raises:
        LabError: if it is none, or one of its files is torn.
    """
    if not (folder / STUDY).is_file():
        raise LabError(f"{folder} is no results folder: there is no {STUDY}")
    study = records.read_json(folder / STUDY)
    old = records.read_table(folder / TABLE) if (folder / TABLE).is_file() else None
    curves = pd.read_csv(folder / CURVES) if (folder / CURVES).is_file() else None
    tables, pulls, rows = [], [], []
    for planned in study["plan"]:
        key, place = planned["run_key"], folder / RUNS / planned["run_key"]
        labels = {**planned, "study": study["hash"], "stage": "evaluation", "task": _task(study)}
        status, failure = "missing", ""
        if records.finished(place):
            result = records.read_json(place / records.RESULT)
            status, failure = result["status"], _failure(result)
            tables.append(records.run_table(place, labels))
            pulls.append(_curve(place, planned))
        elif old is not None and (rows_of := old[old["run_key"] == key]).size:
            status = str(rows_of["status"].iloc[0])
            tables.append(rows_of.assign(**labels)[list(records.COLUMNS)])
        rows.append({**planned, "status": status, "failure": failure})
    table = pd.concat(tables) if tables else pd.DataFrame(columns=list(records.COLUMNS))
    curve = pd.concat([*([curves] if curves is not None else []), *pulls]) if pulls else curves
    if curve is None:
        curve = pd.DataFrame(columns=["recipe", "condition", "sign", "ratio", "pull"])
    curve = curve.drop_duplicates(["recipe", "condition", "sign", "ratio"], keep="last")
    runs = pd.DataFrame(rows)
    return Results(folder, study, table.reset_index(drop=True), curve, runs)


def write(results: Results) -> None:
    """The long table and the weight curves, beside the run folders they come from."""
    records.write_table(results.table, results.folder / TABLE)
    records.write_table(results.pulls, results.folder / CURVES)


def _task(study: Mapping[str, Any]) -> str:
    return str(study["task"]["name"])


def _failure(result: Mapping[str, Any]) -> str:
    failure = result.get("failure") or {}
    named = [failure.get("component") or failure.get("hook"), failure.get("statistic")]
    return ": ".join(str(x) for x in named if x)


def _curve(place: Path, planned: Mapping[str, Any]) -> pd.DataFrame:
    if not (place / records.PULLS).is_file():  # a run that crashed before it began
        return pd.DataFrame(columns=["recipe", "condition", "sign", "ratio", "pull"])
    data = records.read_json(place / records.PULLS)
    parts = [
        pd.DataFrame({"sign": sign, "ratio": data["ratio"], "pull": data[name]})
        for name, sign in (("positive", 1), ("negative", -1))
    ]
    chosen = {n: planned[n] for n in ("recipe", "condition")}
    return pd.concat(parts).assign(**chosen)[["recipe", "condition", "sign", "ratio", "pull"]]
