"""What makes a run that run: its key is a hash of everything that can change its numbers.

A key means one result wherever it is planned, so a finished one never runs again, and one that was
made by other code, another version of a task or another torch is not taken for it. The recipe's
name and its documentation are not part of it: one recipe under two names is one run.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lab.bench import Bench
from lab.settings import Spec
from lab.task import Task
from lab.task import record as task_record

#: Rooms of the package that only plan or read runs: no number of a run depends on them.
READERS = (
    *("cli", "console", "listing", "showing", "sanity", "single"),
    *("protocol", "study", "execute", "results", "stats", "power", "verdict"),
    *("tables", "plots", "report"),
)
#: Whose versions can change a number.
LIBRARIES = ("torch", "transformers")


def canonical(data: Any) -> str:
    """JSON that is equal for equal data."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=True)


def digest(data: Any, length: int = 64) -> str:
    """sha256 of canonical JSON."""
    return hashlib.sha256(canonical(data).encode()).hexdigest()[:length]


def run_key(spec: Spec, bench: Bench, task: Task) -> str:
    """The key of a run.

    Args:
        spec: the run.
        bench: its recipe, wired.
        task: its task, built.
    """
    record = bench.record()
    # a model is its content, wherever its folder is
    changes_nothing = {"checkpoint_every", "model"}
    chosen = {k: v for k, v in spec.settings.model_dump().items() if k not in changes_nothing}
    return digest(
        {
            "components": [_without_plugin(c) for c in record["components"]],
            "own_shares": {k: _without_plugin(c) for k, c in record["own_shares"].items()},
            "loop": record["loop"],
            "sources": sorted({source_hash(b.component.function) for b in bench.everything}),
            "observers": [u.spec() for u in spec.observers],
            "task": {**task_record(task), "source": source_hash(type(task))},
            "seed": spec.seed,
            "settings": chosen,
            "model": model_hash(spec.settings.model),
            "environment": environment(),
        }
    )


def environment() -> dict[str, Any]:
    """The code, the libraries and the device that a run's numbers come from."""
    return {
        "core": core_hash(),
        "libraries": {name: version(name) for name in LIBRARIES},
        "device": "cpu",
        "threads": 1,
    }


@functools.cache
def core_hash() -> str:
    """A hash of every file of the package that can change a run's numbers."""
    root = Path(__file__).parent
    lines = []
    for file in sorted(root.rglob("*.py")):
        inside = file.relative_to(root)
        if inside.parts[0].removesuffix(".py") not in READERS:
            lines.append([inside.as_posix(), hashlib.sha256(_text(file)).hexdigest()])
    return digest(lines, 16)


def source_hash(thing: Any) -> str:
    """A hash of the file that a component or a task stands in, with all that it calls there."""
    module = sys.modules.get(thing.__module__)
    file = getattr(module, "__file__", None)
    if file is not None and Path(file).is_file():
        return hashlib.sha256(_text(Path(file))).hexdigest()
    return hashlib.sha256(inspect.getsource(inspect.unwrap(thing)).encode()).hexdigest()


def model_hash(name: str) -> str:
    """A hash of a model directory's files; of a preset or a hub id, its name."""
    folder = Path(name)
    if not folder.is_dir():
        return name
    parts = (".json", ".safetensors", ".txt", ".model")
    files = [f for f in sorted(folder.iterdir()) if f.suffix in parts]
    return digest([[f.name, hashlib.sha256(f.read_bytes()).hexdigest()] for f in files])


def _without_plugin(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k != "plugin"}


def _text(file: Path) -> bytes:
    return file.read_bytes().replace(b"\r\n", b"\n")
