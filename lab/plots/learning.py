"""What a run recorded, along its way: the held-out score, and what the updates did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from lab.plots import series
from lab.plots.canvas import (
    GREY,
    INK,
    PERCENT,
    Drawing,
    Room,
    Sheet,
    colours,
    end_labels,
    keys,
    legend_room,
    marks,
    recipes,
)
from lab.plots.series import Band
from lab.results import Results
from lab.tables.scores import PLAIN, evaluations, label, reference, scores

DASHES = (0, (4, 3))
#: The smallest share of the largest number that a logarithmic axis shows.
DECADES = 1e5
CROSS = Line2D([], [], color=GREY, marker="x", lw=0, ms=6, mew=1.5, label="a run failed here")


def titles(conditions: Sequence[str]) -> float:
    """Room for the panels' titles, in inches: a study that names no condition has none."""
    return 0.08 if list(conditions) == [PLAIN] else Room().titles


def titled(ax: Axes, condition: str) -> None:
    """A panel's condition, where the study names any."""
    if condition != PLAIN:
        ax.set_title(condition, fontweight="bold")


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
            series.draw_runs(ax, rows[rows["reached"]], "score", of[recipe])
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
        shows="Mean score of fresh answers to held-out prompts, one an answer, each evaluation as "
        "it was measured, without smoothing. "
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
    return [*lines, CROSS] if failed else lines


def _runs(rows: pd.DataFrame) -> pd.DataFrame:
    shown = rows[["recipe", "condition", "seed", "x", "score", "status", "reached"]]
    return shown.rename(columns={"score": "value", "seed": "run"})


@dataclass(frozen=True)
class Row:
    """A row of panels: one number.

    Attributes:
        metric: its name in the records.
        text: what its axis says.
        log: whether the axis is logarithmic.
        share: whether it is a share, shown in percent.
        line: setting of the loop that is drawn as a line across.
        plus: another number of the records that is added to it.
    """

    metric: str
    text: str
    log: bool = False
    share: bool = False
    line: str = ""
    plus: str = ""


def traces(
    results: Results, name: str, title: str, rows: Sequence[Row], words: tuple[str, str]
) -> Drawing | None:
    """Numbers of training, a row of panels each, by condition; a mean line a recipe."""
    found = {row.metric: series.of_metric(results, row.metric, row.plus) for row in rows}
    kept = [row for row in rows if len(found[row.metric])]
    if not kept:
        return None
    conditions = results.study["conditions"]
    handles: list[Any] = keys(results)
    for setting in [row.line for row in kept if row.line]:
        values = sorted({v for c in conditions for v in _limits(results, setting, c)})
        text = f"{setting} {', '.join(f'{v:g}' for v in values)}"
        handles += [Line2D([], [], color=INK, lw=1, ls=DASHES, label=text)] if values else []
    if any((part["status"] != "ok").any() for part in found.values()):
        handles.append(CROSS)
    room = Room(legend=legend_room(handles), titles=titles(conditions))
    sheet = Sheet.of(title, len(kept), len(conditions), room)
    parts: list[pd.DataFrame] = []
    for i, row in enumerate(kept):
        for ax, condition in zip(sheet.axes[i], conditions, strict=True):
            parts += _trace(results, ax, row, condition, found[row.metric])
            if i == 0:
                titled(ax, condition)
        sheet.axes[i][0].set_ylabel(row.text)
        _scaled(sheet.axes[i], row)
    sheet.below(series.axis_label(results), counts=True)
    sheet.legend(handles)
    ns = [int(n) for part in parts if "n" in part for n in part["n"]]
    left = [row.metric for row in rows if row not in kept]
    missing = f" Not recorded: {', '.join(left)}." if left else ""
    return Drawing(
        name=name,
        title=title,
        shows=words[0],
        method="Each point: the mean over a rollout's updates (or of the rollout), then over "
        f"{series.counted(ns)} a recipe and condition. Band: 95 % t-interval over runs. A "
        f"failed run is in the mean up to its end, a cross.{missing}",
        read=words[1],
        figure=sheet.figure,
        data=pd.concat(parts, ignore_index=True),
    )


def _trace(
    results: Results, ax: Axes, row: Row, condition: str, found: pd.DataFrame
) -> list[pd.DataFrame]:
    of, mark, parts = colours(results), marks(results), []
    for recipe in recipes(results):
        rows = series.arm(found, recipe, condition)
        if rows.empty:
            continue
        failed = rows[rows["status"] != "ok"]
        series.draw_runs(ax, failed, "value", of[recipe])
        band = Band.over(rows, "rollout", "value")
        every = max(1, len(band.x) // 5)
        band.draw(
            ax,
            of[recipe],
            1.6,
            log=row.log,
            marker=mark[recipe],
            ms=4,
            markevery=(every // 2, every),
        )
        parts.append(band.frame(recipe=recipe, condition=condition, metric=row.metric))
        ends = failed.groupby("seed").tail(1)[["recipe", "condition", "seed", "x", "value"]]
        parts += [ends.assign(metric=row.metric, status="failed")] if len(ends) else []
    for value in _limits(results, row.line, condition):
        ax.axhline(value, color=INK, lw=1, ls=DASHES, zorder=1)
    return parts


def _limits(results: Results, setting: str, condition: str) -> list[float]:
    """The values above 0 that a setting of the loop has in a condition."""
    loops: Mapping[str, Mapping[str, float]] = results.study["loops"]
    found = [loops.get(label(r, condition), {}).get(setting) for r in recipes(results)]
    return sorted({float(x) for x in found if x})


def _scaled(axes: Sequence[Axes], row: Row) -> None:
    for ax in axes:
        ax.set_xlim(left=0)
        ax.margins(x=0.02)
    first = axes[0]
    if row.log:
        first.set_yscale("log", nonpositive="mask")
        low, high = first.get_ylim()
        first.set_ylim(max(low, high / DECADES), high)
        first.yaxis.set_major_locator(
            LogLocator(subs=(1.0, 2.0, 5.0) if high < 50 * low else (1.0,))
        )
        first.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        first.yaxis.set_minor_formatter(NullFormatter())
    else:
        low, high = first.get_ylim()
        first.set_ylim(0 if low > -0.05 * high else low, max(high, 0.01 if row.share else high))
    if row.share:
        first.yaxis.set_major_formatter(PERCENT)


def kl(results: Results) -> Drawing | None:
    """F3: KL(old) and KL(ref), an axis each."""
    return traces(
        results,
        "kl",
        "How far the policy moves: within a rollout, and from where it started",
        [
            Row("kl_old_k3", "KL(old), nats a token", log=True),
            Row("kl_ref_k1", "KL(ref), nats a token", log=True, plus="kl_old_k1"),
        ],
        (
            "Top: KL(old), of the policy that sampled the rollout from the policy that is being "
            "updated: staleness, estimated by the mean of e^-d - 1 + d, d = old_logp - logp. "
            "Bottom: KL(ref), of the policy that sampled the rollout from the frozen starting "
            "weights, estimated by the mean of old_logp - ref_logp (kl_old_k1 + kl_ref_k1). In "
            "nats per token, each on a logarithmic axis of its own; what is not above 0, as "
            "KL(ref) of the first rollout, is not drawn.",
            "The two answer different questions and are never on one axis. Clipping speaks about "
            "the first; a KL penalty acts on the second.",
        ),
    )


def length(results: Results) -> Drawing | None:
    """F3: response length and truncation."""
    return traces(
        results,
        "length",
        "How long answers are, and how many are cut at the limit",
        [
            Row("response_length", "tokens an answer"),
            Row("response_truncated", "answers cut", share=True),
        ],
        (
            "Top: mean tokens of a sampled training answer, the end token included. Bottom: share "
            "of answers cut at the length limit.",
            "Where many answers are cut, the limit takes part in the score, and verdicts say so.",
        ),
    )


def entropy(results: Results) -> Drawing | None:
    """F3: entropy."""
    return traces(
        results,
        "entropy",
        "How undecided the policy still is",
        [Row("entropy", "entropy, nats a token")],
        (
            "Entropy of the next token over the whole vocabulary, mean over tokens, in nats.",
            "Near 0 the policy answers always the same: it explores no more, and can learn no "
            "more. A rise with a falling score is decay.",
        ),
    )


def gradient_norm(results: Results) -> Drawing | None:
    """F3: gradient norm before clipping."""
    return traces(
        results,
        "gradient_norm",
        "How large gradients are before clipping, and how often they are clipped",
        [
            Row("grad_norm", "gradient norm", log=True, line="max_grad_norm"),
            Row("grad_clipped", "updates clipped", share=True),
        ],
        (
            "Top: global norm of the policy's gradient before it is clipped, logarithmic; dashed: "
            "the norm that it is clipped to. Bottom: share of updates that were clipped.",
            "Where nearly every update is clipped, the norm sets the step and the objective's "
            "scale does not matter.",
        ),
    )


def no_advantage(results: Results) -> Drawing | None:
    """Tokens that have nothing to be flat about, apart from those that are."""
    return traces(
        results,
        "no_advantage",
        "Tokens without an advantage",
        [
            Row("no_advantage", "tokens with A = 0", share=True),
            Row("zero_variance", "groups of equal rewards", share=True),
        ],
        (
            "Top: share of tokens whose advantage is exactly 0: the update cannot use them. They "
            "are no part of outside, flat or capped. Bottom: share of groups whose answers all "
            "have the same reward, where a group baseline leaves nothing.",
            "A rise means that each rollout teaches less.",
        ),
    )
