"""The held-out score along a run."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from lab.plots import series
from lab.plots.canvas import (
    DASHES,
    GREY,
    INK,
    Drawing,
    Room,
    Sheet,
    colours,
    cross,
    end_labels,
    recipes,
    titled,
    titles,
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
    conditions, of = results.study["conditions"], colours(results)
    title = f"Held-out score by {series.NAMES[series.axis(results)]}: every run, and the mean"
    widest = max(len(r) for r in recipes(results))
    names = 0.3 + 0.085 * widest
    height = 3.6 if len(conditions) < 3 else 2.9
    room = Room(height, right=names, columns=names + 0.15, titles=titles(conditions))
    sheet = Sheet.of(title, 1, len(conditions), room, "all")
    start = reference(scores(results))
    parts: list[pd.DataFrame] = []
    labelled: list[tuple[Axes, list[tuple[str, float, float, str]]]] = []
    for ax, condition in zip(sheet.axes[0], conditions, strict=True):
        ends: list[tuple[str, float, float, str]] = []
        for recipe in recipes(results):
            rows = series.arm(table, recipe, condition)
            if rows.empty:
                continue
            fade = max(0.25, 0.7 - 0.05 * rows["seed"].nunique())
            series.draw_runs(ax, rows[rows["reached"]], "score", of[recipe], fade)
            band = Band.over(rows, "number", "score")
            band.draw(ax, of[recipe], zorder=3)
            ends.append((recipe, band.x[-1], band.mean[-1], of[recipe]))
            parts += [_runs(rows), band.frame(recipe=recipe, condition=condition, run="mean")]
        titled(ax, condition)
        ax.axhline(start, color=GREY, lw=0.9, ls=DASHES, zorder=1)
        ax.set_xlim(left=0)
        ax.margins(x=0.02)
        labelled.append((ax, ends))
    sheet.axes[0][0].set_ylabel("held-out score")
    sheet.below(series.axis_label(results), counts=True)
    low, high = sheet.axes[0][0].get_ylim()
    sheet.axes[0][0].set_ylim(min(low, 0.0) if low < 0.15 * high else low, high)
    for ax, ends in labelled:
        end_labels(ax, ends, 0.055)
    ns = [int(n) for part in parts if "n" in part for n in part["n"]]
    sheet.legend(_keys(ns, bool((table["status"] != "ok").any())))
    return Drawing(
        name="learning_curves",
        title=title,
        shows="Mean score of fresh answers to held-out prompts, one answer each; every evaluation "
        "as it was measured, without smoothing. "
        "Thin lines: runs, a seed each; a cross where a run failed. Thick lines: mean over runs. "
        "Dashed: the starting policy.",
        method=f"Band: 95 % t-interval of the mean over {series.counted(ns)} a recipe and "
        "condition; none below 3 runs. A failed run counts in the mean with the floor "
        f"{results.study['floor']:g} from its end on.",
        read="Where bands overlap, nothing follows from the order of the means: the verdicts "
        "compare runs of one seed with each other.",
        figure=sheet.figure,
        data=pd.concat(parts, ignore_index=True),
    )


def _keys(ns: Sequence[int], failed: bool) -> list[Line2D]:
    counted = series.counted(ns)
    band = ", band: 95 % t-interval" if max(ns, default=0) >= series.FEW else ""
    lines = [
        Line2D([], [], color=INK, lw=0.6, alpha=0.6, label="a run"),
        Line2D([], [], color=INK, lw=2, label=f"mean of {counted}{band}"),
        Line2D([], [], color=GREY, lw=0.9, ls=DASHES, label="starting policy"),
    ]
    return [*lines, cross()] if failed else lines


def _runs(rows: pd.DataFrame) -> pd.DataFrame:
    shown = rows[["recipe", "condition", "seed", "x", "score", "status", "reached"]]
    return shown.rename(columns={"score": "value", "seed": "run"})
