"""What all figures share: style, colours, panels, and the four files that each leaves."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import seaborn as sns  # type: ignore[import-untyped]  # ships no types
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lab.results import Results
from lab.tables.scores import PLAIN

#: One colour a recipe, in every figure: told apart in the common forms of colour blindness.
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#333333", "#56b4e9", "#8b5a2b"),
)
#: And one mark, for who sees no colour at all.
MARKS = ("o", "s", "^", "D", "v", "P", "X", "p")
INK, GREY, MUTED, PALE = "#222222", "#767676", "#bdbdbd", "#e4e4e4"
WIDTH = 11.0
DPI = 150
DASHES = (0, (4, 3))
#: Shares of 1 as per cent, with no more digits than it takes.
PERCENT = FuncFormatter(lambda share, _: f"{100 * share:.6g}%")
#: Fixed, so that equal results are equal files on any machine with these versions.
RC: Any = {
    "svg.hashsalt": "lab",
    "svg.fonttype": "path",
    "font.family": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.labelsize": 9.0,
    "axes.titlelocation": "left",
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": PALE,
    "grid.linewidth": 0.7,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "xtick.major.size": 3.0,
    "ytick.major.size": 0.0,
    "text.color": INK,
    "text.parse_math": False,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.solid_capstyle": "round",
    "path.simplify": False,
    "savefig.facecolor": "white",
    "figure.dpi": 100,
}


@dataclass(frozen=True)
class Drawing:
    """A figure with what it says of itself.

    Attributes:
        name: of its files.
        title: what is shown.
        shows: the caption's first sentences: what it shows, in which unit.
        method: how the numbers were made: unit of replication, n, intervals.
        read: how to read it.
        figure: drawn.
        data: every number in it.
    """

    name: str
    title: str
    shows: str
    method: str
    read: str
    figure: Figure
    data: pd.DataFrame


@contextmanager
def style() -> Iterator[None]:
    """Inside, figures look alike, whatever the person's own settings are."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**sns.axes_style("ticks"), **RC})
        yield


@dataclass(frozen=True)
class Room:
    """How large the parts of a sheet are, in inches.

    Attributes:
        height: of a panel.
        left: for the labels of the first column.
        right: beside the last one.
        legend: for the legend below the title.
        rows: between rows of panels.
        columns: between columns.
        titles: above the panels, for a title each.
    """

    height: float = 2.1
    left: float = 0.75
    right: float = 0.25
    legend: float = 0.3
    rows: float = 0.3
    columns: float = 0.35
    titles: float = 0.27


@dataclass(frozen=True)
class Sheet:
    """A grid of panels with room for a title and a legend above them.

    Attributes:
        figure: all of it.
        axes: the panels, an array of [rows, columns].
    """

    figure: Figure
    axes: Any

    @classmethod
    def of(cls, title: str, rows: int, columns: int, room: Room, sharey: Any = "row") -> Sheet:
        """A sheet; its x axis is shared by all panels, its y axis as asked: none, row, all."""
        above, below = 0.4 + room.legend + room.titles, 0.55
        total = above + below + rows * room.height + (rows - 1) * room.rows
        figure = Figure(figsize=(WIDTH, total))
        FigureCanvasAgg(figure)
        across = WIDTH - room.left - room.right - (columns - 1) * room.columns
        axes = figure.subplots(
            rows,
            columns,
            squeeze=False,
            sharex=True,
            sharey=sharey,
            gridspec_kw={
                "left": room.left / WIDTH,
                "right": 1 - room.right / WIDTH,
                "top": 1 - above / total,
                "bottom": below / total,
                "hspace": room.rows / room.height,
                "wspace": room.columns * columns / across,
            },
        )
        left, top = 0.15 / WIDTH, 1 - 0.14 / total
        figure.text(left, top, title, fontsize=11, fontweight="bold", ha="left", va="top")
        sns.despine(fig=figure)
        return cls(figure, axes)

    def legend(self, handles: Sequence[Any]) -> None:
        """A row of keys between the title and the panels."""
        height = self.figure.get_figheight()
        self.figure.legend(
            handles=list(handles),
            loc="upper left",
            bbox_to_anchor=(0.1 / WIDTH, 1 - 0.4 / height),
            ncols=math.ceil(len(handles) / legend_rows(handles)),
            handlelength=1.6,
            columnspacing=1.4,
            borderaxespad=0.0,
        )

    def head(self, names: Sequence[str], of: Mapping[str, str]) -> None:
        """A recipe's name over each column, in its colour."""
        for ax, name in zip(self.axes[0], names, strict=True):
            ax.set_title(name, color=dark(of[name]), fontweight="bold")

    def side(self, texts: Sequence[str]) -> None:
        """What a row of panels shows, beside it."""
        for ax, text in zip(self.axes[:, 0], texts, strict=True):
            ax.set_ylabel(text, rotation=0, ha="right", va="center")

    def below(self, text: str, counts: bool = False) -> None:
        """The label of the x axis that all panels share; `counts`: it has whole numbers."""
        for ax in self.axes[-1]:
            ax.set_xlabel(text)
        if counts:
            axis = self.axes[0, 0].xaxis
            wide = self.axes[0, 0].get_position().width * WIDTH
            axis.set_major_locator(MaxNLocator(max(2, min(6, int(wide / 0.45))), integer=True))
            axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))


def legend_rows(handles: Sequence[Any]) -> int:
    """How many rows a legend takes: names stay within the figure."""
    wide = sum(0.55 + 0.078 * len(str(h.get_label())) for h in handles)
    return math.ceil(wide / (WIDTH - 0.2))


def legend_room(handles: Sequence[Any]) -> float:
    """Its height in inches."""
    return 0.08 + 0.21 * legend_rows(handles)


def cross(text: str = "a run failed here") -> Line2D:
    """The key of a failed run."""
    return Line2D([], [], color=GREY, marker="x", lw=0, ms=6, mew=1.5, label=text)


def titles(conditions: Sequence[str]) -> float:
    """Room for the panels' titles, in inches: a study that names no condition has none."""
    return 0.08 if list(conditions) == [PLAIN] else Room().titles


def titled(ax: Axes, condition: str) -> None:
    """A panel's condition, where the study names any."""
    if condition != PLAIN:
        ax.set_title(condition, fontweight="bold")


def colours(results: Results) -> dict[str, str]:
    """Recipe -> its colour, by its place in the study."""
    return dict(zip(recipes(results), _cycled(COLOURS, len(recipes(results))), strict=True))


def marks(results: Results) -> dict[str, str]:
    """Recipe -> its mark."""
    return dict(zip(recipes(results), _cycled(MARKS, len(recipes(results))), strict=True))


def _cycled(values: Sequence[str], n: int) -> list[str]:
    return [values[i % len(values)] for i in range(n)]


def recipes(results: Results) -> list[str]:
    """Their names, in the order of the study."""
    return list(dict.fromkeys(p["recipe"] for p in results.study["plan"]))


def dark(colour: str) -> str:
    """The colour for text on white: darkened until its contrast is 4.5 to 1."""
    rgb = np.array(to_rgb(colour))
    while _luminance(rgb) > (1.05 / 4.5 - 0.05):
        rgb = rgb * 0.97
    return to_hex((float(rgb[0]), float(rgb[1]), float(rgb[2])))


def _luminance(rgb: Any) -> float:
    """Relative luminance, WCAG 2.2."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ np.array([0.2126, 0.7152, 0.0722]))


def keys(results: Results, width: float = 2.0) -> list[Line2D]:
    """A legend's handles: a line and a mark a recipe."""
    of, mark = colours(results), marks(results)
    return [
        Line2D([], [], color=of[r], lw=width, marker=mark[r], ms=5, label=r)
        for r in recipes(results)
    ]


def save(drawing: Drawing, results: Results, folder: Path) -> list[Path]:
    """A figure's four files: svg, png, csv (every number in it), json (what made it)."""
    files = [folder / f"{drawing.name}.{suffix}" for suffix in ("svg", "png", "csv", "json")]
    svg, png, csv, about = files
    buffer = io.BytesIO()
    drawing.figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg.write_bytes(buffer.getvalue())
    drawing.figure.savefig(png, format="png", dpi=DPI)
    drawing.data.to_csv(csv, index=False, lineterminator="\n")
    width, height = drawing.figure.get_size_inches()
    known = results.runs[results.runs["status"] != "missing"]
    data = {
        "name": drawing.name,
        "title": drawing.title,
        "shows": drawing.shows,
        "method": drawing.method,
        "read": drawing.read,
        "inches": [round(float(width), 3), round(float(height), 3)],
        "study": {n: results.study[n] for n in ("name", "scale", "hash")},
        "run_keys": sorted(set(known["run_key"])),
        "n": {"runs": len(known), "planned": len(results.runs)},
        "versions": {n: version(n) for n in ("matplotlib", "seaborn", "pandas", "numpy")},
    }
    about.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return files
