"""What was run, where, and which runs failed."""

from __future__ import annotations

from typing import Any

import pandas as pd

from lab.results import Results
from lab.stats import wilson
from lab.tables.scores import arms, ended, label, scores
from lab.tables.table import Table, each, interval_text, lean, number, plain, weights

#: What study.json declares, in the order in which one reads it.
DECLARED = (
    *("name", "scale", "hash", "task", "model", "metric", "optimum", "floor", "margin", "alpha"),
    *("budget", "eval_every", "eval_prompts", "observe_every", "seeds"),
)


def failure_rates(results: Results) -> Table:
    """How many of each arm's runs failed."""
    runs = ended(results)
    rows = []
    for recipe, condition in arms(results):
        own = runs[(runs["recipe"] == recipe) & (runs["condition"] == condition)]
        failed = int((own["status"] != "ok").sum())
        if len(own):
            share = wilson(failed, len(own))
            numbers = {"n": len(own), "failed": failed, "share": share.mean}
            ends = {"low": share.low, "high": share.high}
            rows.append({"recipe": recipe, "condition": condition, **numbers, **ends})
    names = ["recipe", "condition", "n", "failed", "share", "low", "high"]
    data = pd.DataFrame(rows, columns=names)
    text = data[["recipe", "condition"]].assign(
        runs=data["n"].astype(str),
        failed=data["failed"].astype(str),
        share=each(data, interval_text, "share", "low", "high"),
    )
    note = "Share with Wilson's 95 % interval. A failed run is a result: none is left out."
    return Table("failure_rates", "Failures by recipe", data, lean(text), note)


def failures(results: Results) -> Table:
    """Each run that diverged or crashed: when, and what was not finite."""
    runs = ended(results)
    scored = scores(results).set_index(["recipe", "condition", "seed"])["updates"]
    rows = [
        {
            **{n: r[n] for n in ("recipe", "condition", "seed", "status")},
            "update": scored[r["recipe"], r["condition"], r["seed"]],
            "cause": r["failure"],
        }
        for r in runs[runs["status"] != "ok"].to_dict("records")
    ]
    names = ["recipe", "condition", "seed", "status", "update", "cause"]
    data = pd.DataFrame(rows, columns=names)
    text = data.rename(columns={"update": "after updates"})
    return Table("failures", "Failed runs", data, lean(text.astype(str)))


def hyperparameters(results: Results) -> Table:
    """What each recipe ran with: components, weight interval, loop settings."""
    study = results.study
    rows: list[dict[str, Any]] = []
    for recipe, condition in arms(results):
        here = label(recipe, condition)
        low, high = study["bounds"].get(here) or (None, None)
        head = {"recipe": recipe, "condition": condition}
        head["components"] = study["choices"].get(recipe, "")
        bounds = {"weight_low": low, "weight_high": high}
        rows.append({**head, **bounds, **study["loops"].get(here, {})})
    data = pd.DataFrame(rows)
    fixed = ("recipe", "condition", "components", "weight_low", "weight_high")
    loop = [c for c in data.columns if c not in fixed]
    varied = [c for c in loop if data[c].astype(str).nunique() > 1]
    shared = ", ".join(f"{c} {plain(data[c].iloc[0])}" for c in loop if c not in varied)
    text = pd.DataFrame(
        {
            **{n: data[n] for n in ("recipe", "condition", "components")},
            "weight interval": [weights(r["weight_low"], r["weight_high"]) for r in rows],
            **{c: [plain(x) for x in data[c]] for c in varied},
        }
    )
    note = "Components: advantage, ratio, surrogate, aggregation, then KL and what else there is. "
    note += "Weight interval: the ratios between which a token's weight is neither clipped nor "
    note += f"capped. Of every recipe: {shared}." if shared else "capped."
    return Table("hyperparameters", "What was run", data, lean(text), note)


def environment(results: Results) -> Table:
    """The study's declarations and where its runs ran."""
    study = results.study
    flat = {n: study[n] for n in DECLARED if n in study} | dict(study["environment"])
    data = pd.DataFrame({"name": list(flat), "value": [plain(x) for x in flat.values()]})
    return Table("environment", "Declared and used", data, data)


def by_run(results: Results) -> Table:
    """A row a run: where it started, where it ended."""
    data = scores(results)
    text = data[["recipe", "condition"]].assign(
        seed=data["seed"].astype(str),
        status=data["status"],
        start=[number(x, 0.01) for x in data["start"]],
        final=[number(x, 0.01) for x in data["final"]],
        normalised=[number(x, 0.01) for x in data["normalised"]],
    )
    return Table("scores", "Every run", data, lean(text))
