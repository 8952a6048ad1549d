"""The figures of a study. Each leaves a picture twice (svg, png), its numbers, and its caption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lab.plots import learning, outcome, tokens, traces
from lab.plots.canvas import Drawing, save, style
from lab.results import Results

FOLDER = "figures"
#: In the order of the report; each makes nothing where its numbers were not recorded.
FIGURES: tuple[Callable[[Results], Drawing | None], ...] = (
    outcome.contrasts,
    outcome.final_scores,
    learning.learning_curves,
    tokens.clipping,
    traces.no_advantage,
    traces.kl,
    traces.gradient_norm,
    traces.entropy,
    traces.length,
    tokens.pulls,
)


def draw(results: Results) -> list[Path]:
    """Draw every figure into ``figures/``; one that cannot be made is not left from before.

    Returns:
        The files: svg, png, csv, json of each figure.
    """
    folder = results.folder / FOLDER
    folder.mkdir(exist_ok=True)
    files: list[Path] = []
    for make in FIGURES:
        for old in folder.glob(f"{make.__name__}.*"):
            old.unlink()
        with style():
            drawing = make(results)
            if drawing is not None:
                files += save(drawing, results, folder)
    return files
