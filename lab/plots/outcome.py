"""What came out: final scores by recipe, and the declared contrasts."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from lab.plots import series
from lab.plots.canvas import (
    DASHES,
    GREY,
    INK,
    PALE,
    Drawing,
    Room,
    Sheet,
    colours,
    cross,
    dark,
    recipes,
    titled,
    titles,
)
from lab.results import Results
from lab.stats import mean_interval
from lab.tables.scores import PLAIN, judged, reference, scores
from lab.verdict import Judged

#: Where the dots of one row lie beside each other, as shares of its height.
LANES = 0.36


def final_scores(results: Results) -> Drawing | None:
    """F2: a dot a run and the interval of the mean, by recipe."""
    table = scores(results)
    if table.empty:
        return None
    names, conditions = recipes(results), results.study["conditions"]
    title = "Final held-out score: every run, and the mean with its interval"
    room = Room(0.34 + 0.36 * len(names), left=_room(names), titles=titles(conditions))
    sheet = Sheet.of(title, 1, len(conditions), room, "all")
    start, parts = reference(table), []
    for ax, condition in zip(sheet.axes[0], conditions, strict=True):
        for place, recipe in enumerate(names):
            rows = series.arm(table, recipe, condition)
            if len(rows):
                parts.append(_row(ax, place, rows, colours(results)[recipe]))
        ax.axvline(start, color=GREY, lw=0.9, ls=DASHES, zorder=1)
        titled(ax, condition)
        _rows_of(ax, names, [dark(colours(results)[r]) for r in names])
    sheet.below("final held-out score")
    data = pd.concat(parts, ignore_index=True)
    failed = bool((table["status"] != "ok").any())
    sheet.legend(_keys("a run", "mean, 95 % t-interval", "starting policy", failed))
    n = series.counted(int(x) for x in data["n"].dropna())
    return Drawing(
        name="final_scores",
        title=title,
        shows="Final held-out score: the mean over the last tenth of a run's evaluations. A dot is "
        "a run, a cross a run that failed; the diamond is the mean over runs. Dashed: the "
        "starting policy.",
        method=f"Bar: 95 % t-interval of the mean over {n} a recipe and condition; none below 3 "
        "runs. Failed runs count, with the floor at every evaluation that they did not reach.",
        read="Dots of one seed belong together across recipes, so overlapping bars do not show a "
        "tie, nor the larger mean a winner: the contrasts decide.",
        figure=sheet.figure,
        data=data,
    )


def _row(ax: Axes, place: int, rows: pd.DataFrame, colour: str) -> pd.DataFrame:
    """An arm's dots, one lane a seed, and its interval."""
    final = [float(x) for x in rows["final"]]
    lanes = _lanes(place, len(final))
    for ok, mark in ((True, "o"), (False, "x")):
        chosen = [i for i, s in enumerate(rows["status"]) if (s == "ok") == ok]
        dots: dict[str, Any] = {"color": colour, "ls": "", "marker": mark, "ms": 4.2}
        dots |= {"alpha": 0.55, "mew": 0} if ok else {"mew": 1.4}
        ax.plot([final[i] for i in chosen], [lanes[i] for i in chosen], **dots)
    shown = mean_interval(final)
    few = len(final) < series.FEW
    if not few:
        ax.plot([shown.low, shown.high], [place, place], color=INK, lw=1.6, zorder=4)
    ax.plot([shown.mean], [place], marker="D", ms=5, color=INK, zorder=5)
    kept = rows[["recipe", "condition", "seed", "status", "start", "final"]]
    ends = {"low": math.nan, "high": math.nan} if few else {"low": shown.low, "high": shown.high}
    head = {n: rows[n].iloc[0] for n in ("recipe", "condition")}
    mean = pd.DataFrame([{**head, "seed": "mean", "final": shown.mean, **ends, "n": len(final)}])
    return pd.concat([kept, mean])


def _lanes(place: int, n: int) -> list[float]:
    return [place + LANES * ((i + 0.5) / n - 0.5) * 2 * 0.8 for i in range(n)]


def _rows_of(ax: Axes, names: list[str], colour: list[str]) -> None:
    """A row a name, from top to bottom."""
    ax.set_ylim(len(names) - 0.45, -0.55)
    ax.set_yticks(range(len(names)), names)
    # of panels that share the axis, only the first has any
    for text, ink in zip(ax.get_yticklabels(), colour, strict=False):
        text.set_color(ink)
        text.set_fontsize(9)
    ax.grid(True, axis="x")
    ax.grid(False, axis="y")
    ax.margins(x=0.04)


def _room(names: list[str]) -> float:
    return 0.35 + 0.078 * max(len(n) for n in names)


def _keys(dot: str, mean: str, line: str, failed: bool) -> list[Line2D]:
    keys = [
        Line2D([], [], color=GREY, marker="o", lw=0, ms=4.2, mew=0, label=dot),
        Line2D([], [], color=INK, marker="D", ms=5, lw=1.6, label=mean),
        Line2D([], [], color=GREY, lw=0.9, ls=DASHES, label=line),
    ]
    return [*keys, cross("a failed run")] if failed else keys


def contrasts(results: Results) -> Drawing | None:
    """J, with the difference itself: each declared contrast, its interval and its word."""
    declared, verdicts = results.study["contrasts"], judged(results)
    if not verdicts:
        return None
    named = any(c["condition"] != PLAIN for c in declared)
    names = [f"{c['a']} - {c['b']}" + (f",  {c['condition']}" if named else "") for c in declared]
    title = "Difference of final scores, first recipe minus second"
    room = Room(height=0.3 + 0.4 * len(names), left=_room(names), right=1.25, titles=0.08)
    sheet = Sheet.of(title, 1, 1, room)
    ax, margin = sheet.axes[0, 0], float(results.study["margin"])
    ax.axvspan(-margin, margin, color=PALE, lw=0, zorder=0)
    ax.axvline(0, color=GREY, lw=1, zorder=1)
    rows = []
    for place, (contrast, judge) in enumerate(zip(declared, verdicts, strict=True)):
        rows += _contrast(ax, place, contrast, judge)
    _rows_of(ax, names, [INK] * len(names))
    sheet.below("difference of normalised score")
    level = f"{100 * (1 - results.study['alpha']):g} %"
    band = Line2D([], [], color=PALE, lw=8, label=f"smaller than the margin, ±{margin:g}")
    sheet.legend([*_keys("a seed", f"mean, {level} t-interval", "", False)[:2], band])
    return Drawing(
        name="contrasts",
        title=title,
        shows="Each comparison that the study declared before its runs: a dot is the difference of "
        "two runs of one seed, the diamond its mean, the word the verdict. Unit: normalised "
        "score, in which 0 is the starting policy and 1 the best possible. Shaded: "
        f"differences too small to matter, up to {margin:g} either way.",
        method=f"Bar: {level} t-interval over {series.counted(j.n for j in verdicts)} of each "
        "recipe, paired by seed, not adjusted for the number of contrasts; the verdicts are. "
        "No bar where the two do not differ at all, or below 3 pairs.",
        read="Better or worse: the adjusted test and the interval exclude 0. Equivalent: the "
        "difference is shown to lie within the shaded band. Inconclusive: neither; more seeds "
        "would be needed.",
        figure=sheet.figure,
        data=pd.DataFrame(rows),
    )


def _contrast(ax: Axes, place: int, contrast: Any, judge: Judged) -> list[dict[str, Any]]:
    x, y = judge.contrast.x, judge.contrast.y
    seeds = sorted(x)
    d = [x[s] - y[s] for s in seeds]
    ax.plot(d, _lanes(place, len(d)), "o", color=GREY, alpha=0.6, ms=3.6, mew=0)
    shown = judge.difference
    if not math.isnan(shown.low):
        ax.plot([shown.low, shown.high], [place, place], color=INK, lw=1.6, zorder=4)
    ax.plot([shown.mean], [place], marker="D", ms=5, color=INK, zorder=5)
    ax.annotate(
        judge.word or "no verdict",
        (1.015, place),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=9,
        fontweight="bold" if judge.word in ("better", "worse", "equivalent") else "normal",
    )
    head = dict(contrast)
    dots = [{**head, "seed": s, "difference": v} for s, v in zip(seeds, d, strict=True)]
    ends = {"low": shown.low, "high": shown.high, "n": judge.n, "verdict": judge.word}
    return [*dots, {**head, "seed": "mean", "difference": shown.mean, **ends}]
