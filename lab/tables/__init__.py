"""What a study found, as numbers: a score a run, a verdict a contrast, and the tables of both."""

from __future__ import annotations

from pathlib import Path

from lab.results import Results
from lab.tables import compared, ran
from lab.tables.scores import evaluations, judged, scores
from lab.tables.table import Table, markdown, stamp

__all__ = ["FOLDER", "Table", "evaluations", "every", "judged", "scores", "stamp", "write"]

FOLDER = "tables"


def every(results: Results) -> list[Table]:
    """All tables, in the order in which one reads them."""
    return [
        compared.comparison(results),
        compared.contrasts(results),
        ran.failure_rates(results),
        ran.failures(results),
        ran.hyperparameters(results),
        ran.environment(results),
        ran.by_run(results),
    ]


def write(results: Results) -> list[Path]:
    """``tables/*.csv`` in full precision and ``tables/*.md`` to be read."""
    folder = results.folder / FOLDER
    folder.mkdir(exist_ok=True)
    files = []
    for table in every(results):
        csv, md = folder / f"{table.name}.csv", folder / f"{table.name}.md"
        stamped = table.data.assign(study=results.study["hash"])
        stamped.to_csv(csv, index=False, lineterminator="\n")
        md.write_text(markdown(table, stamp(results)), encoding="utf-8")
        files += [csv, md]
    return files
