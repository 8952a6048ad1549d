"""What the updates did along a run: KL, gradients, entropy, length, tokens without an advantage."""

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
    DASHES,
    INK,
    PERCENT,
    Drawing,
    Room,
    Sheet,
    colours,
    cross,
    keys,
    legend_room,
    marks,
    recipes,
    titled,
    titles,
)
from lab.plots.series import Band
from lab.results import Results
from lab.tables.scores import label

#: The smallest share of the largest number that a logarithmic axis shows.
DECADES = 1e4


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
        handles.append(cross())
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
        method="A number of updates is the mean over those of a rollout that were observed. Thick "
        f"lines: the mean over {series.counted(ns)} a recipe and condition; thin: every run. A "
        f"failed run counts up to its end, a cross.{missing}",
        read=words[1],
        figure=sheet.figure,
        data=pd.concat(parts, ignore_index=True),
    )


def _trace(
    results: Results, ax: Axes, row: Row, condition: str, found: pd.DataFrame
) -> list[pd.DataFrame]:
    """Every run thin, their mean thick; a t-interval of a share or a norm would leave its range."""
    of, mark, parts = colours(results), marks(results), []
    for recipe in recipes(results):
        rows = series.arm(found, recipe, condition)
        if rows.empty:
            continue
        series.draw_runs(ax, rows, "value", of[recipe], 0.2)
        band = Band.over(rows, "rollout", "value")
        every = max(1, len(band.x) // 5)
        marked: Any = {"marker": mark[recipe], "ms": 4.5, "markevery": (every // 2, every)}
        ax.plot(band.x, band.mean, color=of[recipe], lw=1.8, zorder=3, **marked)
        labels = {"recipe": recipe, "condition": condition, "metric": row.metric}
        runs = rows[["seed", "status", "x", "value"]].rename(columns={"seed": "run"})
        parts += [band.frame(run="mean", **labels), runs.assign(**labels)]
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
        first.set_ylim((0, max(high, 0.01)) if row.share else (low, high))
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
            "Top: KL(old) = KL(sampling policy || policy that is being updated), the staleness "
            "of a rollout: mean of e^-d - 1 + d, d = old_logp - logp. Bottom: KL(ref) = "
            "KL(sampling policy || frozen starting weights): mean of old_logp - ref_logp, which "
            "is kl_old_k1 + kl_ref_k1. Both in nats per token on a logarithmic axis of their "
            "own; what is not above 0, as KL(ref) of the first rollout, is not drawn.",
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
            "the norm that it is clipped to; a norm of 0, of a batch without any advantage, is "
            "not drawn. Bottom: share of updates that were clipped.",
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
