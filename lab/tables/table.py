"""A table in two forms: full precision for machines, rounded text for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from lab.results import Results
from lab.stats import fmt
from lab.tables.scores import PLAIN, complete, progress
from lab.verdict import p_text

#: What stands where there is nothing to say.
NOTHING = "\u2013"


@dataclass(frozen=True)
class Table:
    """A table, twice.

    Attributes:
        name: of its files.
        title: what it shows.
        data: every number in full precision; its columns are defined in `lab.tables.terms`.
        shown: the same as text, rounded by one rule: two digits of the interval's width.
        note: how to read it.
        bold: of each row, whether the `strong` columns are printed bold.
        strong: those columns.
    """

    name: str
    title: str
    data: pd.DataFrame
    shown: pd.DataFrame
    note: str = ""
    bold: Sequence[bool] = ()
    strong: Sequence[str] = ()

    def rows(self) -> list[list[tuple[str, bool]]]:
        """The shown cells, row by row, with whether each is bold."""
        bold = self.bold or [False] * len(self.shown)
        names = list(self.shown.columns)
        return [
            [(str(row[n]), strong and n in self.strong) for n in names]
            for row, strong in zip(self.shown.to_dict("records"), bold, strict=True)
        ]


def stamp(results: Results) -> str:
    """Which study a table or figure is of, and how much of it there is."""
    study = results.study
    whole = "" if complete(results) else " (unfinished: no verdicts)"
    text = f"Study {study['name']}, scale {study['scale']}, hash {study['hash']}"
    return f"{text}; {progress(results)}{whole}."


def markdown(table: Table, below: str) -> str:
    """A table as Markdown, its title above, its note and a line below."""
    rows = [[_cell(text, bold) for text, bold in row] for row in table.rows()]
    body = pd.DataFrame(rows, columns=table.shown.columns)
    text = body.to_markdown(index=False, disable_numparse=True) if rows else "None."
    parts = [f"## {table.title}", text, table.note, below]
    return "\n\n".join(p for p in parts if p) + "\n"


def _cell(text: str, bold: bool) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return f"**{text}**" if bold else text


def lean(text: pd.DataFrame) -> pd.DataFrame:
    """Without a column of conditions where a study has only one that nobody named."""
    if "condition" in text and set(text["condition"]) <= {PLAIN}:
        return text.drop(columns="condition")
    return text


def each(data: pd.DataFrame, write_row: Callable[..., str], *columns: str) -> list[str]:
    """The text of some columns of each row."""
    return [write_row(*row) for row in data[list(columns)].itertuples(index=False)]


def interval_text(mean: float, low: float, high: float) -> str:
    """``.406 [.381, .431]``; the mean alone where there is no interval."""
    if math.isnan(mean):
        return NOTHING
    if math.isnan(low):
        return fmt(mean, 0.01)
    width = high - low
    return f"{fmt(mean, width)} [{fmt(low, width)}, {fmt(high, width)}]"


def number(value: float, width: float) -> str:
    """A number with the digits of a width; a dash where there is none."""
    return NOTHING if math.isnan(value) else fmt(value, width)


def count(value: float) -> str:
    """A whole number with its thousands apart."""
    return NOTHING if math.isnan(value) else f"{value:,.0f}"


def p_value(value: float, alpha: float) -> str:
    """A p-value, on its side of alpha."""
    return NOTHING if math.isnan(value) else p_text(value, alpha)


def weights(low: float | None, high: float | None) -> str:
    """A weight interval: ``[0.8, 1.2]``, ``up to 5``, ``no bound``."""
    if low is None:
        return "no bound" if high is None else f"up to {high:g}"
    return f"from {low:g}" if high is None else f"[{low:g}, {high:g}]"


def plain(value: Any) -> str:
    """A setting as text; whole numbers without a gap as ``9000-9007``."""
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {plain(v)}" for k, v in value.items()) or NOTHING
    if not isinstance(value, Sequence) or isinstance(value, str):
        return f"{value:g}" if isinstance(value, float) else str(value)
    many = [plain(v) for v in value]
    whole = len(many) > 2 and all(isinstance(v, int) for v in value)
    if whole and list(value) == list(range(value[0], value[0] + len(many))):
        return f"{many[0]}-{many[-1]}"
    return ", ".join(many)
