"""The report of a study: one file that needs nothing else, and whose first screen answers."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from lab import plots, results, tables
from lab.report import words
from lab.results import Results
from lab.tables import Table, terms
from lab.tables.scores import PLAIN, arms

HERE = Path(__file__).parent
FILE = "report.html"
#: Answers shown of each arm, and the characters of each.
SHOWN, LONGEST = 3, 400
#: Figures that stand with a table; the others follow in a part of their own.
PLACED = ("final_scores", "learning_curves", "contrasts")
#: Recorded numbers that the figures and verdicts use.
METRICS = (
    *("score", "reward", "response_length", "response_truncated", "zero_variance"),
    *("outside", "flat", "capped", "no_advantage", "kl_old_k1", "kl_old_k3", "kl_ref_k1"),
    *("entropy", "grad_norm", "grad_clipped"),
)
#: Columns of tables that explain themselves.
PLAIN_COLUMNS = ("recipe", "condition", "seed", "status", "name", "value", "study", "run_key")


@dataclass(frozen=True)
class Picture:
    """A figure as the report shows it."""

    name: str
    title: str
    source: str
    shows: str
    method: str
    read: str
    width: int
    height: int

    @property
    def alt(self) -> str:
        """What the picture is, for who cannot see it."""
        return f"{self.title}. {self.shows}"


def rebuild(folder: Path) -> Path:
    """Everything that a results folder's runs give: long table, tables, figures, report.

    Raises:
        LabError: if it is no results folder.
    """
    found = results.load(folder)
    results.write(found)
    tables.write(found)
    plots.draw(found)
    return write(found)


def write(found: Results) -> Path:
    """The report, from the results and the figures that `plots.draw` has left beside them."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pictures = _pictures(found)
    made = {table.name: table for table in tables.every(found)}
    html = environment.get_template("report.html.jinja").render(
        study=found.study,
        answer=words.answer(found),
        facts=words.facts(found),
        css=(HERE / "report.css").read_text(encoding="utf-8"),
        tables=made,
        pictures=pictures,
        rest=[p for p in pictures.values() if p.name not in PLACED],
        recipes=_recipes(found),
        answers=_answers(found),
        named=found.study["conditions"] != [PLAIN],
        words=terms.WORDS,
        columns=_columns(made.values()),
        metrics={n: terms.metrics()[n] for n in METRICS},
        stamp=tables.stamp(found),
    )
    file = found.folder / FILE
    file.write_text(html, encoding="utf-8")
    return file


def _pictures(found: Results) -> dict[str, Picture]:
    """Name -> figure, of those that are there and of this study."""
    folder = found.folder / plots.FOLDER
    out = {}
    for name in [make.__name__ for make in plots.FIGURES]:
        about, svg = folder / f"{name}.json", folder / f"{name}.svg"
        if not about.is_file() or not svg.is_file():
            continue
        said: dict[str, Any] = json.loads(about.read_text(encoding="utf-8"))
        if said["study"]["hash"] != found.study["hash"]:
            continue
        code = base64.b64encode(svg.read_bytes()).decode("ascii")
        across, down = said["inches"]
        out[name] = Picture(
            name=name,
            source=f"data:image/svg+xml;base64,{code}",
            width=round(100 * across),
            height=round(100 * down),
            **{n: said[n] for n in ("title", "shows", "method", "read")},
        )
    return out


def _recipes(found: Results) -> list[tuple[str, str]]:
    """Name and description of each recipe that has one, in the order of the study."""
    names = dict.fromkeys(p["recipe"] for p in found.study["plan"])
    docs = {n: found.study["recipes"].get(n, "") for n in names}
    return [(n, doc) for n, doc in docs.items() if doc not in ("", n)]


def _answers(found: Results) -> list[dict[str, Any]]:
    """Some answers of each arm's first seed, at the first and at the last evaluation."""
    rows = []
    for recipe, condition in arms(found):
        kept = found.answers
        own = kept[(kept["recipe"] == recipe) & (kept["condition"] == condition)]
        if own.empty:
            continue
        moments = [own[own["rollout"] == at] for at in (own["rollout"].min(), own["rollout"].max())]
        first, last = (m.head(SHOWN).to_dict("records") for m in moments)
        head = {"recipe": recipe, "condition": condition, "seed": int(own["seed"].iloc[0])}
        pairs = [
            {"prompt": _short(a["prompt"]), "start": _said(a), "end": _said(b)}
            for a, b in zip(first, last, strict=False)
        ]
        rows.append({**head, "rollout": int(own["rollout"].max()), "pairs": pairs})
    return rows


def _said(row: dict[str, Any]) -> dict[str, str]:
    score = row["score"]
    none = score is None or pd.isna(score)
    return {
        "text": _short(row["response"]),
        "score": "none" if none else f"{score:g}",
        "end": "cut at the limit" if row["stop_reason"] == "length" else "",
    }


def _short(text: Any) -> str:
    text = str(text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} \u2026"


def _columns(made: Any) -> dict[str, str]:
    """Definitions of the columns of these tables, where they need one."""
    known: list[Table] = list(made)
    names = dict.fromkeys(c for table in known for c in table.data.columns)
    return {n: terms.COLUMNS[n] for n in names if n in terms.COLUMNS and n not in PLAIN_COLUMNS}
