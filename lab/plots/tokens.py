"""What the objective does to single tokens: outside against flat, and the pull at each ratio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

from lab.plots import series
from lab.plots.canvas import (
    DASHES,
    GREY,
    INK,
    PERCENT,
    Drawing,
    Room,
    Sheet,
    colours,
    recipes,
)
from lab.plots.series import Band
from lab.results import Results
from lab.tables.scores import label

SIGNS = {"_positive": "A > 0", "_negative": "A < 0"}
#: How each share is drawn: its dashes and its width.
SHARES: Mapping[str, tuple[Any, float]] = {
    "outside": ("-", 1.0),
    "flat": ("-", 2.4),
    "capped": ((0, (1.2, 1.2)), 2.0),
}
#: Of capped tokens, the mean share from which on there are any: fewer lie on a bound by chance.
SEEN = 1e-5
LINES = ("-", (0, (5, 2)), (0, (1.2, 1.2)))


def clipping(results: Results) -> Drawing | None:
    """B: outside, flat and capped, by sign of the advantage, a column a recipe."""
    found = {
        (share, side): series.of_metric(results, share + side) for share in SHARES for side in SIGNS
    }
    if not any(len(rows) for rows in found.values()):
        return None
    names, conditions = recipes(results), results.study["conditions"]
    title = "Tokens outside the ratio interval, and tokens without a gradient"
    places = [(c, side) for c in conditions for side in SIGNS]
    room = Room(height=1.15 if len(places) > 2 else 1.6, left=1.0, columns=0.16, rows=0.2)
    sheet = Sheet.of(title, len(places), len(names), room, "all")
    parts: list[pd.DataFrame] = []
    for i, (condition, side) in enumerate(places):
        for j, recipe in enumerate(names):
            ax = sheet.axes[i, j]
            for share, (dashes, width) in SHARES.items():
                rows = series.arm(found[share, side], recipe, condition)
                if rows.empty or (share == "capped" and rows["value"].mean() < SEEN):
                    continue
                band = Band.over(rows, "rollout", "value")
                colour = GREY if share == "outside" else colours(results)[recipe]
                band.draw(ax, colour, width, ls=dashes)
                parts.append(band.frame(recipe=recipe, condition=condition, metric=share + side))
    sheet.head(names, colours(results))
    sheet.side([series.where(condition, SIGNS[side]) for condition, side in places])
    _percent(sheet)
    sheet.below(series.NAMES[series.axis(results)], counts=True)
    sheet.legend(
        [
            Line2D([], [], color=GREY if n == "outside" else INK, ls=d, lw=w, label=n)
            for n, (d, w) in SHARES.items()
        ]
    )
    n = series.counted(int(x) for part in parts for x in part["n"])
    return Drawing(
        name="clipping",
        title=title,
        shows="Share of the tokens of each sign of advantage A. Outside: the ratio lies outside "
        "the recipe's declared interval (outside [.8, 1.2] where it declares none). Flat: the "
        "token's pull is exactly 0, it has no gradient. Capped: beyond a declared bound and "
        "held there, with a gradient; not drawn where no token ever is.",
        method=f"Each point: the mean over a rollout's observed updates, then over {n}. Band: 95 % "
        "t-interval over runs. Tokens with A = 0 are in none of these shares: see the next "
        "figure.",
        read="Outside and flat are different numbers. A clip makes flat only the tokens outside on "
        "the side that the advantage pushes to; a cap makes none flat; a recipe without a bound "
        "has tokens outside and none flat.",
        figure=sheet.figure,
        data=pd.concat(parts, ignore_index=True),
    )


def _percent(sheet: Sheet) -> None:
    first = sheet.axes[0, 0]
    first.yaxis.set_major_formatter(PERCENT)
    first.set_ylim(0, max(0.01, first.get_ylim()[1]))
    for ax in sheet.axes.flat:
        ax.set_xlim(left=0)


def pulls(results: Results) -> Drawing | None:
    """A: the pull on a token by its ratio, for both signs of the advantage."""
    curves = results.pulls
    if curves.empty:
        return None
    names = [r for r in recipes(results) if (curves["recipe"] == r).any()]
    title = "Pull on a token by its ratio"
    room = Room(height=1.75, left=0.95, columns=0.16, rows=0.25)
    sheet = Sheet.of(title, 2, len(names), room)
    drawn = []
    for j, recipe in enumerate(names):
        groups = _groups(curves[curves["recipe"] == recipe], results.study["conditions"])
        for i, sign in enumerate((1, -1)):
            ax = sheet.axes[i, j]
            _frame(ax, results, recipe, sign)
            for line, (where, rows) in zip(LINES, groups, strict=False):
                own = rows[rows["sign"] == sign].sort_values("ratio")
                colour = colours(results)[recipe]
                ax.plot(own["ratio"], own["pull"], color=colour, lw=2.2, ls=line, zorder=3)
                drawn.append(own.assign(condition=where))
    sheet.head(names, colours(results))
    sheet.side([f"pull at\nA = {unit}" for unit in ("+1", "-1")])
    sheet.below("ratio")
    sheet.legend(
        [
            Line2D([], [], color=INK, lw=2.2, label="the recipe"),
            Line2D([], [], color=GREY, lw=1, ls=DASHES, label="ratio times A, without any bound"),
            Patch(color="#dde8f0", label="declared ratio interval"),
        ]
    )
    return Drawing(
        name="pulls",
        title=title,
        shows="How hard one token moves its own log-probability, by the ratio of its probability "
        "now to that when it was sampled: the derivative of the surrogate with respect to log p "
        "at A = +1 and A = -1, of a single token. Shaded: the interval that the recipe declares.",
        method="Computed by automatic differentiation of each recipe's own components at 81 "
        "ratios from 0.1 to 10, before any run: no sampling, no interval. Where a curve depends "
        "on the condition, the conditions differ in their dashes. Axes end at 5.4 times A.",
        read="At 0 the token has no gradient. A curve that stays away from 0 outside the shaded "
        "interval still learns from stale tokens; one that grows with the ratio has nothing to "
        "hold it.",
        figure=sheet.figure,
        data=pd.concat(drawn, ignore_index=True),
    )


def _groups(curves: pd.DataFrame, conditions: list[str]) -> list[tuple[str, pd.DataFrame]]:
    """The curves of a recipe that differ, each with the conditions that share it."""
    found: dict[tuple[float, ...], tuple[list[str], pd.DataFrame]] = {}
    for condition in conditions:
        own = curves[curves["condition"] == condition].sort_values(["sign", "ratio"])
        if len(own):
            shape = tuple(float(x) for x in own["pull"])
            found.setdefault(shape, ([], own))[0].append(condition)
    return [(", ".join(where), own) for where, own in found.values()]


def _frame(ax: Axes, results: Results, recipe: str, sign: int) -> None:
    """Axis, declared interval, and what the bare ratio would do."""
    ax.set_xscale("log")
    ax.set_xlim(0.1, 10)
    ax.set_xticks([0.2, 1, 5])
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    bounds = results.study["bounds"]
    declared = {tuple(bounds.get(label(recipe, c)) or ()) for c in results.study["conditions"]}
    for pair in declared:
        low, high = pair or (None, None)
        if low is not None or high is not None:
            ax.axvspan(low or 0.1, high or 10, color="#dde8f0", lw=0, zorder=0)
    ax.axhline(0, color=GREY, lw=0.8, zorder=1)
    grid = [10 ** (i / 20) for i in range(-20, 21)]
    ax.plot(grid, [sign * r for r in grid], color=GREY, lw=1, ls=DASHES, zorder=2)
    ax.set_ylim((-0.4, 5.4) if sign > 0 else (-5.4, 0.4))
