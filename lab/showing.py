"""What `lab tasks` and `lab show` print: 80 columns where there is no terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.table import Table

from lab import records
from lab.errors import LabError
from lab.listing import columns, json_text, names_table, render, value_text
from lab.records import Moment
from lab.shelf import Shelf
from lab.task import build, describe

COUNTED = {
    "update": "updates",
    "rollout": "rollouts",
    "generated_tokens": "generated tokens",
    "trained_tokens": "trained tokens",
}


def tasks_text(shelf: Shelf) -> str:
    """Every task with its settings and an example."""
    table = names_table()
    for name in shelf.names("tasks"):
        told = describe(build(name, {}, shelf))
        knobs = ", ".join(f"{k} = {value_text(v)}" for k, v in told["settings"].items())
        example = f"{told['prompt']} -> {told['answer']}"
        table.add_row(
            name, "\n".join([told["doc"], knobs, example]), shelf.plugin_of("tasks", name)
        )
    return render(["tasks, with their settings and an example:", "", table])


def task_text(name: str, settings: Mapping[str, Any], shelf: Shelf) -> str:
    """One task: all there is to know of it before a run."""
    task = build(name, settings, shelf)
    told = describe(task)
    rows = {
        "version": told["version"],
        "settings": ", ".join(f"{k} = {value_text(v)}" for k, v in told["settings"].items()),
        "prompt": told["prompt"],
        "right answer": told["answer"],
        "characters": told["characters"],
        "budget": f"{told['budget']} response tokens, the end token included",
        "stops": told["stops"] or "none: an end token",
        "optimum": value_text(float(told["optimum"])),
        "warm start": _warm(told["warm_start"]),
        "held out": "none: few prompts, shared" if told["shared_prompts"] else "a quarter",
        "isolates": told["isolates"] or "-",
        "control": told["control"] or "-",
    }
    table = columns(2)
    for key, value in rows.items():
        table.add_row(f"  {key}", str(value))
    return render([f"{told['name']}: {told['doc']}", "", table])


def tasks_json(shelf: Shelf, name: str | None, settings: Mapping[str, Any]) -> str:
    """The same for machines."""
    if name is not None:
        return json_text(describe(build(name, settings, shelf)))
    return json_text({n: describe(build(n, {}, shelf)) for n in shelf.names("tasks")})


def run_text(folder: Path) -> str:
    """A run: what it was, how it went, what it answered."""
    if not (folder / records.RUN).is_file():
        raise LabError(f"{folder} holds no run: there is no {records.RUN}")
    run = records.read_json(folder / records.RUN)
    every = list(_moments(folder))
    evaluations = [m for m in every if m.at == "eval"]
    parts: list[Any] = _head(run, folder)
    if evaluations:
        parts += ["", "held out: at the start, at the end", _evaluated(evaluations)]
    if any(m.at == "update" for m in every):
        parts += ["", "the last updates, averaged over the last rollout", _updates(every)]
    return render([*parts, *_answers(folder)])


def run_json(folder: Path) -> str:
    """The same for machines: the record, the result, every moment, every answer."""
    if not (folder / records.RUN).is_file():
        raise LabError(f"{folder} holds no run: there is no {records.RUN}")
    data = {
        "run": records.read_json(folder / records.RUN),
        "result": records.read_json(folder / records.RESULT) if records.finished(folder) else None,
        "moments": [vars(m) for m in _moments(folder)],
        "answers": list(_read_answers(folder)),
    }
    return json_text(data)


def _moments(folder: Path) -> Iterator[Moment]:
    """Of a run that has begun; a run that is being prepared has none yet."""
    return records.moments(folder) if (folder / records.METRICS).is_file() else iter(())


def _evaluated(evaluations: list[Moment]) -> Table:
    table = _numbers()
    for name in dict.fromkeys(n for m in evaluations for n in m.metrics):
        shown = [m.metrics[name] for m in evaluations if name in m.metrics]
        table.add_row(f"  {name}", *(f"{x:.4g}" for x in (shown[0], shown[-1])))
    return table


def _head(run: Mapping[str, Any], folder: Path) -> list[str]:
    spec = run["spec"]
    task = " ".join(f"{k}={value_text(v)}" for k, v in spec["task"].items() if k != "name")
    status, spent = "under way", ""
    if records.finished(folder):
        result = records.read_json(folder / records.RESULT)
        status = result["status"]
        spent = ", ".join(f"{v} {COUNTED[k]}" for k, v in result["counters"].items())
        if result["failure"]:
            named = [str(x) for x in result["failure"].values() if x]
            status += f" ({'; '.join(named)})"
    lines = [
        f"{spec['recipe']['name']} on {spec['task']['name']} {task}".rstrip()
        + f", seed {spec['seed']}, model {spec['settings']['model']}: {status}",
        *([spent] if spent else []),
        f"key {run['key'][:16]}",
    ]
    for c in run.get("record", {}).get("components", []):
        given = {**c["parameters"], **c["options"]}
        text = ", ".join(f"{k}={value_text(v)}" for k, v in given.items())
        lines.append(f"  {c['slot']}: {c['name']}" + (f" ({text})" if text else ""))
    return lines


def _updates(moments: Iterable[Moment]) -> Table:
    last: dict[str, list[float]] = {}
    rollout = -1
    for m in moments:
        if m.at != "update":
            continue
        if m.counters["rollout"] != rollout:
            rollout, last = m.counters["rollout"], {}
        for name, x in m.metrics.items():
            last.setdefault(name, []).append(x)
    table = _numbers()
    pairs = [(name, f"{records.mean(xs):.4g}") for name, xs in last.items()]
    half = (len(pairs) + 1) // 2
    for left, right in zip_longest(pairs[:half], pairs[half:], fillvalue=("", "")):
        table.add_row(f"  {left[0]}", left[1], *right)
    return table


def _numbers() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for width in (22, 14, 20, 14):
        table.add_column(width=width)
    return table


def _answers(folder: Path) -> list[Any]:
    rows = list(_read_answers(folder))
    if not rows:
        return []
    first, last = rows[0]["rollout"], rows[-1]["rollout"]
    parts: list[Any] = []
    for at in dict.fromkeys((first, last)):
        table = columns(3)
        for row in (r for r in rows if r["rollout"] == at):
            score = "none" if row["score"] is None else value_text(float(row["score"]))
            response = _printable(row["response"]) or "(empty)"
            table.add_row(
                f"  {_printable(row['prompt'])}", response, f"{score}  {row['stop_reason']}"
            )
        parts += ["", f"answers after {at} rollouts: prompt, response, score, how it ended", table]
    return parts


def _printable(text: str) -> str:
    """In one line: a model may write anything, what moves a terminal's cursor included."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _read_answers(folder: Path) -> Iterable[dict[str, Any]]:
    file = folder / records.ANSWERS
    if not file.is_file():
        return
    for line in file.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def _warm(target: float) -> str:
    return f"supervised, to an accuracy of {value_text(target)}" if target else "none"
