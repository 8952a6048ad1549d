"""Figures of made studies: which numbers they draw, and that equal results are equal files."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from studies_made import Made

from lab import plots, results
from lab.plots import canvas, learning, outcome, series, tokens, traces
from lab.plots.canvas import COLOURS, Drawing, legend_rows, style
from lab.results import Results
from lab.stats import mean_interval
from lab.tables.scores import evaluations, judged, scores

ONE = "as given"
TWO = ("lr 1e-4", "lr 3e-4")
FAILS = {("ppo", ONE, 9000): 3}
SUFFIXES = [".svg", ".png", ".csv", ".json"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Results]:
    """A made study, written once and loaded."""
    known: dict[str, Results] = {}

    def make(**what: Any) -> Results:
        name = repr(what)
        if name not in known:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "fsync", lambda descriptor: None)
                folder = Made(**what).write(tmp_path_factory.mktemp("study"))
                known[name] = results.load(folder)
        return known[name]

    return make


def drawn(make: Callable[[Results], Drawing | None], study: Results) -> Drawing:
    with style():
        made = make(study)
    assert made is not None
    return made


@pytest.mark.slow
def test_equal_results_are_equal_files_and_nothing_global_moves(made: Any) -> None:
    """A date, a random id, a person's own style or a jitter would make each drawing another."""
    study = made(seeds=3, diverged=FAILS)
    before = dict(matplotlib.rcParams)
    files = plots.draw(study)
    assert [f.suffix for f in files] == SUFFIXES * 10
    first = {f.name: f.read_bytes() for f in files}
    with matplotlib.rc_context({"font.size": 22, "axes.ymargin": 0.3}):
        np.random.seed(7)
        assert {f.name: f.read_bytes() for f in plots.draw(study)} == first
    assert dict(matplotlib.rcParams) == before
    about = json.loads(first["learning_curves.json"])
    assert about["study"] == {"name": "made", "scale": "small", "hash": "0123456789abcdef"}
    assert about["run_keys"] == sorted(study.runs["run_key"])
    assert about["n"] == {"runs": 6, "planned": 6}
    assert set(about["versions"]) == {"matplotlib", "seaborn", "pandas", "numpy"}
    assert all(len(about[part]) > 40 for part in ("shows", "method", "read"))
    here = str(study.folder).encode()
    assert not [name for name, data in first.items() if here in data]


def test_the_learning_curves_show_every_run_and_the_mean_with_the_floor(made: Any) -> None:
    """A mean of survivors rises when a run diverges."""
    study = made(seeds=3, diverged=FAILS)
    data = drawn(learning.learning_curves, study).data
    own = evaluations(study)
    for seed in (9000, 9001):
        shown = data[(data["recipe"] == "ppo") & (data["run"] == seed)]
        expected = own[(own["recipe"] == "ppo") & (own["seed"] == seed)]
        assert list(shown["value"]) == list(expected["score"])
    mean = data[(data["recipe"] == "ppo") & (data["run"] == "mean")]
    at_end = own[(own["recipe"] == "ppo") & (own["rollout"] == 4)]["score"]
    assert at_end.iloc[0] == 0.0
    interval = mean_interval(list(at_end))
    assert mean[["x", "mean", "low", "high", "n"]].iloc[-1].tolist() == [
        *(4.0, interval.mean, interval.low, interval.high, 3),
    ]


def test_the_x_axis_is_what_the_budget_limits(made: Any) -> None:
    """By updates, recipes that make fewer of them would seem to stop early."""
    study = made(seeds=1, contrasts=())
    sheet = drawn(learning.learning_curves, study).figure
    assert sheet.axes[0].get_xlabel() == "rollouts (of 2 updates each)"
    by_tokens = made(seeds=1, contrasts=(), budget={"generated_tokens": 400})
    drawing = drawn(learning.learning_curves, by_tokens)
    assert drawing.figure.axes[0].get_xlabel() == "generated tokens"
    assert drawing.data["x"].max() == 400
    # 50 tokens an update, 2 updates a rollout: the first rollout ends at 100
    assert series.of_metric(by_tokens, "entropy")["x"].min() == 100


def test_a_failed_run_is_drawn_to_its_end(made: Any) -> None:
    """Carried on to the end of the budget it would look alive."""
    study = made(seeds=3, diverged=FAILS)
    data = drawn(traces.entropy, study).data
    own = data[(data["recipe"] == "ppo") & (data["run"] == 9000)]
    assert list(own["x"]) == [1.0, 2.0, 3.0]
    mean = data[(data["recipe"] == "ppo") & (data["run"] == "mean")].set_index("x")
    assert [mean["n"][x] for x in (1.0, 2.0, 3.0, 4.0)] == [3, 3, 3, 2]
    at_4 = data[(data["recipe"] == "ppo") & (data["x"] == 4.0) & (data["run"] != "mean")]
    assert mean["mean"][4.0] == pytest.approx(at_4["value"].mean())


def test_two_kls_never_share_an_axis(made: Any) -> None:
    """They differ by orders of magnitude, and mean two things."""
    study = made(conditions=TWO, seeds=3, contrasts=())
    drawing = drawn(traces.kl, study)
    labels = [ax.get_ylabel() for ax in drawing.figure.axes]
    assert [text.split(",")[0] for text in labels if text] == ["KL(old)", "KL(ref)"]
    assert len(labels) == 4
    # KL(ref) on samples of the policy that is measured: old - logp + logp - ref
    table = study.table[(study.table["rollout"] == 3) & (study.table["recipe"] == "ppo")]
    sums = {m: table[table["metric"] == m]["value"] for m in ("kl_old_k1", "kl_ref_k1")}
    data = drawing.data[(drawing.data["metric"] == "kl_ref_k1") & (drawing.data["x"] == 4)]
    data = data[(data["recipe"] == "ppo") & (data["condition"] == TWO[0])]
    data = data[data["run"] == "mean"]
    expected = (sums["kl_old_k1"].iloc[:3].sum() + sums["kl_ref_k1"].iloc[:3].sum()) / 3
    assert data["mean"].item() == pytest.approx(expected, rel=1e-12)


def test_what_was_not_recorded_is_not_drawn_and_not_left_from_before(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty panel reads as zero; a figure of last week as one of these runs."""
    shares = [n + s for n in ("outside", "flat", "capped") for s in ("", *tokens.SIGNS)]
    study = made(seeds=1, contrasts=(), omitted=(*shares, "kl_ref_k1", "entropy"))
    folder = study.folder / plots.FOLDER
    folder.mkdir()
    for name in ("clipping.svg", "entropy.json", "mine.svg"):
        (folder / name).write_text("old")
    some = (outcome.contrasts, tokens.clipping, traces.entropy, traces.kl)
    monkeypatch.setattr(plots, "FIGURES", some)
    assert {f.stem for f in plots.draw(study)} == {"kl"}
    assert {f.stem for f in folder.iterdir()} == {"kl", "mine"}
    drawing = drawn(traces.kl, study)
    assert len(drawing.figure.axes) == 1
    assert "Not recorded: kl_ref_k1." in drawing.method


def test_an_unfinished_study_has_no_figure_of_verdicts(made: Any) -> None:
    """Verdict words in a picture are verdicts."""
    missing = {("ppo", "lr 1e-4", 9000), *(("grpo", "lr 3e-4", 9000 + i) for i in range(2))}
    study = made(conditions=TWO, seeds=2, missing=missing, contrasts=[("ppo", "grpo", TWO[0])])
    assert outcome.contrasts(study) is None
    data = drawn(outcome.final_scores, study).data
    assert data[data["seed"] == "mean"]["n"].tolist() == [1, 2, 2]
    assert data["low"].isna().all()


def test_the_contrasts_are_those_that_were_judged(made: Any) -> None:
    """Dots by recipe in place of by seed would be other differences."""
    study = made(finals={("ppo", ONE): [0.5 + i / 100 for i in range(8)]})
    (judge,) = judged(study)
    drawing = drawn(outcome.contrasts, study)
    mean = drawing.data[drawing.data["seed"] == "mean"]
    assert mean["difference"].item() == judge.difference.mean
    assert mean["verdict"].item() == judge.word == "better"
    x, y = judge.contrast.x, judge.contrast.y
    dots = drawing.data[drawing.data["seed"] != "mean"]
    assert dots["difference"].tolist() == [x[s] - y[s] for s in sorted(x)]
    assert "better" in [text.get_text() for text in drawing.figure.axes[0].texts]


@pytest.mark.parametrize("n", [1, 2])
def test_few_runs_have_no_band(made: Any, n: int) -> None:
    """A band of two runs is 12.7 standard errors wide."""
    data = drawn(learning.learning_curves, made(seeds=n, contrasts=())).data
    assert data["low"].isna().all()


def test_a_pull_is_drawn_once_where_conditions_agree(made: Any) -> None:
    """Two equal curves would hide each other; two that differ must both be seen."""
    study = made(conditions=TWO, seeds=1, contrasts=())
    data = drawn(tokens.pulls, study).data
    assert set(data["condition"]) == {"lr 1e-4, lr 3e-4"}
    other = study.pulls.copy()
    other.loc[other["condition"] == TWO[1], "pull"] *= 2
    changed = Results(study.folder, study.study, study.table, other, study.answers, study.runs)
    data = drawn(tokens.pulls, changed).data
    assert set(data["condition"]) == set(TWO)
    assert len(data) == 2 * 2 * 2 * 81  # recipes, signs, conditions, ratios


def test_it_draws_eight_recipes_under_three_conditions(made: Any) -> None:
    """Names stay within the picture, and each recipe has a colour of its own."""
    names = tuple(f"a_recipe_of_long_name_{i}" for i in range(8))
    study = made(
        recipes=names, conditions=("a", "b", "c"), seeds=1, rollouts=2, updates=2, contrasts=()
    )
    assert len(set(canvas.colours(study).values())) == len(set(canvas.marks(study).values())) == 8
    assert legend_rows(canvas.keys(study)) == 2
    for make in (learning.learning_curves, traces.entropy):
        figure = drawn(make, study).figure
        figure.canvas.draw()
        box = figure.bbox
        texts = [t for ax in figure.axes for t in ax.texts] + figure.texts
        texts += [t for legend in figure.legends for t in legend.get_texts()]
        for text in texts:
            at = text.get_window_extent()
            inside = box.x0 <= at.x0 < at.x1 <= box.x1, box.y0 <= at.y0 < at.y1 <= box.y1
            assert inside == (True, True), text.get_text()


#: Linear RGB as those see it who lack the green or the red cone (Machado et al. 2009, severity 1).
SIGHT = {
    "all": np.eye(3),
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                 [-0.011820, 0.042940, 0.968881]],
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
               [-0.003882, -0.048116, 1.051998]],
}  # fmt: skip


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_are_told_apart(sight: str) -> None:
    """Two lines of one colour are one line; 10 is several just noticeable differences."""
    lab = [_lab(colour, np.array(SIGHT[sight])) for colour in COLOURS]
    gaps = {
        (a, b): float(np.linalg.norm(x - y))
        for (a, x), (b, y) in itertools.combinations(zip(COLOURS, lab, strict=True), 2)
    }
    assert min(gaps.values()) > 10, min(gaps, key=gaps.__getitem__)


def _lab(colour: str, sight: Any) -> Any:
    """CIELAB of a colour as somebody sees it."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(sight @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ linear / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_text_in_a_colour_can_be_read() -> None:
    """Yellow names on white cannot."""
    for colour in COLOURS:
        rgb = np.array(to_rgb(canvas.dark(colour)))
        assert 1.05 / (canvas._luminance(rgb) + 0.05) >= 4.5


def test_scores_in_a_figure_are_the_scores_of_the_tables(made: Any) -> None:
    study = made(seeds=3, diverged=FAILS)
    data = drawn(outcome.final_scores, study).data
    dots = data[data["seed"] != "mean"].reset_index(drop=True)
    expected = scores(study)[["recipe", "condition", "seed", "status", "start", "final"]]
    pd.testing.assert_frame_equal(dots[list(expected)], expected, check_dtype=False)
    assert not math.isnan(data["final"].sum())
