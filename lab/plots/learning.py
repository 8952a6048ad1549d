"""The held-out score along a run."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from lab.plots import series
from lab.plots.canvas import (
    DASHES,
    GREY,
    INK,
    MUTED,
    Drawing,
    Room,
    Sheet,
    colours,
    cross,
    legend_room,
    recipes,
)
from lab.plots.series import Band
from lab.results import Results
from lab.tables.scores import evaluations, reference, scores


def learning_curves(results: Results) -> Drawing | None:
    """F1: held-out score by what the budget counts, every run and the mean."""
    table = evaluations(results)
    if table.empty:
        return None
    table = table.assign(x=table[series.axis(results)])
    names, conditions = recipes(results), results.study["conditions"]
    title = f"Held-out score by {series.NAMES[series.axis(results)]}: every run, and the mean"
    bands = {
        (r, c): Band.over(rows, "number", "score")
        for r in names
        for c in conditions
        if len(rows := series.arm(table, r, c))
    }
    ns = [n for band in bands.values() for n in band.n]
    handles = _keys(ns, len(names) > 1, bool((table["status"] != "ok").any()))
    room = Room(1.7, left=1.1, columns=0.16, rows=0.22, legend=legend_room(handles))
    sheet = Sheet.of(title, len(conditions), len(names), room, "all")
    start = reference(scores(results))
    for i, condition in enumerate(conditions):
        for j, recipe in enumerate(names):
            _panel(results, sheet.axes[i, j], table, bands, (recipe, condition))
            sheet.axes[i, j].axhline(start, color=GREY, lw=0.9, ls=DASHES, zorder=1)
    sheet.head(names, colours(results))
    sheet.side([series.where(c, "held-out\nscore") for c in conditions])
    sheet.below(series.axis_label(results, short=len(names) > 3), counts=True)
    sheet.legend(handles)
    means = [band.frame(recipe=r, condition=c, run="mean") for (r, c), band in bands.items()]
    return Drawing(
        name="learning_curves",
        title=title,
        shows="Mean score of fresh answers to held-out prompts, one answer each; every evaluation "
        "as it was measured, without smoothing. Thin lines: runs, a seed each; a cross where a "
        "run failed. Thick line and band: the mean over runs and its 95 % t-interval. Grey: the "
        "means of the other recipes. Dashed: the starting policy.",
        method=f"Mean and t-interval over {series.counted(ns)} a recipe and condition; no band "
        f"below 3 runs. A failed run counts in the mean with the floor {results.study['floor']:g} "
        "from its end on.",
        read="Where a grey line lies within a band, nothing follows from the order of the two "
        "means: the verdicts compare runs of one seed with each other.",
        figure=sheet.figure,
        data=pd.concat([_runs(table), *means], ignore_index=True),
    )


def _panel(
    results: Results,
    ax: Axes,
    table: pd.DataFrame,
    bands: dict[tuple[str, str], Band],
    arm: tuple[str, str],
) -> None:
    """A recipe under a condition, with the other recipes' means behind it."""
    for (recipe, condition), band in bands.items():
        if condition == arm[1] and recipe != arm[0]:
            ax.plot(band.x, band.mean, color=MUTED, lw=0.9, zorder=1)
    if arm in bands:
        rows, colour = series.arm(table, *arm), colours(results)[arm[0]]
        fade = max(0.35, 0.8 - 0.05 * rows["seed"].nunique())
        series.draw_runs(ax, rows[rows["reached"]], "score", colour, fade)
        bands[arm].draw(ax, colour, zorder=3)
    ax.set_xlim(left=0)
    ax.margins(x=0.02)


def _keys(ns: list[int], others: bool, failed: bool) -> list[Any]:
    band = ", band: 95 % t-interval" if max(ns, default=0) >= series.FEW else ""
    mean = f"mean of {series.counted(ns)}{band}"
    keys = [
        Line2D([], [], color=INK, lw=0.6, label="a run"),
        Line2D([], [], color=INK, lw=2, label=mean),
    ]
    keys += [Line2D([], [], color=MUTED, lw=0.9, label="means of the others")] if others else []
    keys.append(Line2D([], [], color=GREY, lw=0.9, ls=DASHES, label="starting policy"))
    return [*keys, cross()] if failed else keys


def _runs(table: pd.DataFrame) -> pd.DataFrame:
    shown = table[["recipe", "condition", "seed", "x", "score", "status", "reached"]]
    return shown.rename(columns={"score": "value", "seed": "run"})
