"""Recorded numbers as lines: a line a run, and their mean with its band."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from lab.records import COUNTERS
from lab.results import PLACE, Results
from lab.stats import LARGEST, mean_interval
from lab.tables.scores import LIMITS, PLAIN
from lab.tables.terms import ROLLOUT

#: Below this many runs there is no band.
FEW = 3
#: Below this a sum of two float32 means that cancel is 0.
ROUNDING = 1e-6
#: Of numbers that a reader knows, the plural.
NAMES = {
    "rollout": "rollouts",
    "update": "updates",
    "generated_tokens": "generated tokens",
    "trained_tokens": "trained tokens",
}


def axis(results: Results) -> str:
    """The counter of every x axis: the one that the budget limits, so that all arms end alike."""
    return LIMITS[next(iter(results.study["budget"]))]


def axis_label(results: Results, short: bool = False) -> str:
    """Its name, with what one rollout is where all have the same loop and there is room."""
    name = NAMES[axis(results)]
    if short:
        return name
    loops = results.study["loops"].values()
    each = {(x["epochs"] * x["minibatches"], x.get("kl_stop", 0)) for x in loops}
    if axis(results) != "rollout" or len(each) != 1:
        return name
    ((updates, stop),) = each
    return name if stop else f"{name} (of {updates} {'update' if updates == 1 else 'updates'} each)"


def of_metric(results: Results, metric: str, plus: str = "") -> pd.DataFrame:
    """A number of training: place, status, rollout (counted from 1), x, value; finite ones alone.

    Numbers of updates are means over a rollout's updates; what is not finite is no point.

    Args:
        results: the results.
        metric: its name in the records.
        plus: another one that is added to it, moment by moment.
    """
    rows = results.metric(metric, "train")
    if plus:
        here = [*PLACE, *COUNTERS]
        other = results.metric(plus, "train")[[*here, "value"]]
        rows = rows.merge(other, on=here, suffixes=("", "_plus"))
        total = rows["value"] + rows["value_plus"]
        rows = rows.assign(value=total.where(total.abs() > ROUNDING, 0.0))
    # an update's rollout has not ended yet when it is counted
    first = 0 if metric in ROLLOUT else 1
    rollout = rows["rollout"].astype(int) + first
    x = rollout if axis(results) == "rollout" else rows[axis(results)]
    out = rows[[*PLACE, "status", "value"]].assign(rollout=rollout, x=x.astype(float))
    value = out["value"].astype(float)
    return out[np.isfinite(value) & (value.abs() <= LARGEST)]


@dataclass(frozen=True)
class Band:
    """A mean line: x, mean, low, high, n; low and high are NaN below 3 runs."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    n: list[int]

    @classmethod
    def of(cls, groups: Iterable[tuple[float, list[float]]]) -> Band:
        """The mean of each group of runs, with its t-interval."""
        made = cls([], [], [], [], [])
        for x, values in groups:
            shown = mean_interval(values)
            few = len(values) < FEW
            made.x.append(x)
            made.mean.append(shown.mean)
            made.low.append(math.nan if few else shown.low)
            made.high.append(math.nan if few else shown.high)
            made.n.append(len(values))
        return made

    @classmethod
    def over(cls, rows: pd.DataFrame, by: str, value: str) -> Band:
        """The mean over runs at each step `by`, at the mean of their `x`."""
        groups = rows.groupby(by)
        return cls.of(
            (float(part["x"].mean()), [float(v) for v in part[value]]) for _, part in groups
        )

    def frame(self, **labels: Any) -> pd.DataFrame:
        """As rows of a figure's CSV."""
        points = {"x": self.x, "mean": self.mean, "low": self.low, "high": self.high, "n": self.n}
        return pd.DataFrame(points).assign(**labels)

    def draw(self, ax: Axes, colour: str, width: float = 2.0, **more: Any) -> None:
        """The band, and the mean over it."""
        ax.fill_between(self.x, self.low, self.high, color=colour, alpha=0.16, lw=0)
        ax.plot(self.x, self.mean, color=colour, lw=width, **more)


def draw_runs(ax: Axes, rows: pd.DataFrame, value: str, colour: str, alpha: float) -> None:
    """A thin line a run, to its end; a cross where it failed."""
    for _, run in rows.groupby("seed"):
        ax.plot(run["x"], run[value], color=colour, lw=0.6, alpha=alpha)
    draw_ends(ax, rows[rows["status"] != "ok"], value, colour)


def draw_ends(ax: Axes, failed: pd.DataFrame, value: str, colour: str) -> None:
    """A cross at the last point of each failed run."""
    ends = failed.groupby("seed").tail(1)
    ax.plot(ends["x"], ends[value], "x", color=colour, ms=5, mew=1.4, zorder=5)


def arm(rows: pd.DataFrame, recipe: str, condition: str) -> pd.DataFrame:
    """The rows of an arm."""
    return rows[(rows["recipe"] == recipe) & (rows["condition"] == condition)]


def where(condition: str, text: str) -> str:
    """The label of a row of panels: its condition, where the study names any, and what it shows."""
    return text if condition == PLAIN else f"{condition}\n{text}"


def counted(ns: Iterable[int]) -> str:
    """``8 runs``, ``3 to 8 runs``."""
    many = sorted(set(ns)) or [0]
    if len(many) == 1:
        return f"{many[0]} run{'' if many[0] == 1 else 's'}"
    return f"{many[0]} to {many[-1]} runs"
