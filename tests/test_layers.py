"""Who imports whom, read off the source: the layers of DESIGN section 5, and what stays light."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lab

ROOT = Path(__file__).parent.parent
LAB, PLUGINS, TESTS = ROOT / "lab", ROOT / "plugins", ROOT / "tests"

#: A module imports only from modules that stand above it. Names that have no file yet hold the
#: place that the design gives them; a package (`execute`) is one place.
ORDER = (
    *("errors", "hookspecs", "spaces", "hooks", "records", "stats", "power", "verdict", "tools"),
    *(
        "declarations",
        "component",
        "shelf",
        "overrides",
        "recipe",
        "step",
        "binding",
        "wiring",
        "probe",
        "checks",
        "bench",
    ),
    *("results", "tables", "plots", "report", "tokens", "text", "rollout", "loss"),
    *("llama", "samples", "policy"),
    *("task", "streams", "settings", "identity", "protocol", "testing"),
    *("roles", "collect", "heldout", "update", "warm", "checkpoint", "train", "console", "single"),
    *("exact", "gradients", "execute", "study", "bridge", "sanity", "listing", "showing", "cli"),
)
#: Third-party modules that are imported in one place only.
HOME = {"transformers": "policy", "optuna": "study", "trl": "bridge", "typer": "cli"}
#: What may never reach these: a report is read where no torch is installed.
NO_TORCH = ("errors", "hookspecs", "spaces", "hooks", "component", "shelf", "recipe", "records")
NO_TORCH += ("stats", "power", "verdict", "results", "tables", "plots", "report", "cli")  # type: ignore[assignment]
HEAVY = ("torch", "transformers", "optuna", "pandas", "pydantic", "trl", "scipy", "seaborn")


def place(file: Path) -> str:
    """The module's name in ORDER; a package's files share one."""
    return file.relative_to(LAB).parts[0].removesuffix(".py")


FILES = sorted(f for f in LAB.rglob("*.py") if f.name != "__init__.py" or f.parent != LAB)
SOURCES = sorted([*LAB.rglob("*.py"), *PLUGINS.rglob("*.py"), *TESTS.rglob("*.py")])


@functools.cache
def imports(file: Path) -> tuple[tuple[str, str | None, bool], ...]:
    """(module, name, at run time) of every import in a file, also inside functions."""
    return tuple(_imports(file))


def _imports(file: Path) -> Iterator[tuple[str, str | None, bool]]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    checking = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        runs = id(node) not in checking
        if isinstance(node, ast.Import):
            yield from ((a.name, None, runs) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file.name}: a relative import"
            yield from ((node.module or "", a.name, runs) for a in node.names)


def of_lab(file: Path) -> set[str]:
    """The modules of lab that a file imports: `from lab import bench` and `lab.bench` alike."""
    found = set()
    for module, name, _ in imports(file):
        first, *rest = module.split(".")
        if first == "lab":
            below = rest[0] if rest else name
            found.add(below if below in ORDER else "__init__")
    return found


def test_every_module_has_its_place() -> None:
    """A module that is not listed would be checked against nothing."""
    assert len(FILES) >= 19
    assert {place(f) for f in FILES} - set(ORDER) == set()
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(LAB)))
def test_a_module_imports_only_from_above(file: Path) -> None:
    here = place(file)
    above = {*ORDER[: ORDER.index(here)], here}
    allowed = above if file.parent != LAB else above - {here}
    assert of_lab(file) - allowed == set(), f"{here} imports from below or from lab itself"


def test_the_reader_of_imports_sees_what_it_must(tmp_path: Path) -> None:
    """All of it would pass if it saw none: in a function, under TYPE_CHECKING, in three forms."""
    file = tmp_path / "m.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lab.cli import app\n"
        "def f():\n    from lab import bench\n    import lab.loss\n    from lab import surrogate\n"
    )
    assert of_lab(file) == {"cli", "bench", "loss", "__init__"}
    assert ("lab.cli", "app", False) in set(imports(file))
    assert ("lab.loss", None, True) in set(imports(file))


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(LAB)))
def test_lab_imports_no_plugin(file: Path) -> None:
    """The built-ins are found like anybody else's; a wheel without one must still import."""
    names = {f.stem for f in PLUGINS.glob("*.py")}
    assert len(names) >= 12
    assert {m.split(".")[0] for m, _, _ in imports(file)} & names == set()


@pytest.mark.parametrize("file", sorted(PLUGINS.glob("*.py")), ids=lambda f: f.stem)
def test_a_plugin_imports_only_the_names_that_lab_exports(file: Path) -> None:
    """What the built-ins need beyond them, a third party would need and not have."""
    own = {f.stem for f in PLUGINS.glob("*.py")}
    for module, name, _ in imports(file):
        top = module.split(".")[0]
        assert top not in own, f"{file.stem} imports the plugin {module}"
        if top == "lab":
            assert module == "lab", f"{file.stem} reaches into {module}"
            assert name in lab.__all__, f"{file.stem} imports lab.{name}"


@pytest.mark.parametrize("name", HOME)
def test_a_heavy_dependency_has_one_home(name: str) -> None:
    users = {place(f) for f in FILES for m, _, _ in imports(f) if m.split(".")[0] == name}
    assert users <= {HOME[name]}


def _at_run_time(file: Path, names: tuple[str, ...]) -> set[str]:
    return {m.split(".")[0] for m, _, runs in imports(file) if runs} & set(names)


@pytest.mark.parametrize("module", NO_TORCH)
def test_what_must_work_without_torch_does_not_import_it(module: str) -> None:
    """The hookspecs name Tensor under TYPE_CHECKING; everything else in this list not at all."""
    for file in (f for f in FILES if place(f) == module):
        assert _at_run_time(file, ("torch",)) == set()
        by_type = [runs for m, _, runs in imports(file) if m.split(".")[0] == "torch"]
        assert by_type == ([False] if module == "hookspecs" else [])


def test_the_package_itself_is_lazy() -> None:
    """`import lab` would load torch with any of its homes."""
    eager = [m for m, _, runs in imports(LAB / "__init__.py") if runs and m.startswith("lab")]
    assert eager == []


LIGHT = """
import json, sys
{code}
print(json.dumps([m for m in {names!r} if m in sys.modules]))
"""
RUN = "import lab.cli\nsys.argv = ['lab', {}]\ntry:\n    lab.cli.main()\n"
RUN += "except SystemExit as e:\n    assert e.code == {}"
LIGHT_CODE = {
    "import": "import lab",
    "dir": "import lab; dir(lab); lab.LabError",
    "decorators": "import lab; lab.surrogate, lab.Float, lab.Choice, lab.StopReason, lab.alias",
    "L0": "import lab.hookspecs, lab.hooks, lab.spaces, lab.errors",
    "cli": "import lab.cli",
    "help": RUN.format("'--help'", 0),
    "command help": RUN.format("'recipes', '--help'", 0),
    "mistake": RUN.format("'nothing'", 2),
}


def in_a_fresh_process(code: str, names: tuple[str, ...]) -> list[str]:
    """Those of the names that are loaded once the code has run."""
    text = LIGHT.format(code=code, names=names)
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    found: list[str] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("what", LIGHT_CODE)
def test_what_a_person_waits_for_is_light(what: str) -> None:
    """Seen in sys.modules of a fresh process, not by the clock."""
    # typer itself reads a command's parameters with pydantic where that is installed
    spared = {"pydantic"} if what in ("command help", "mistake") else set()
    names = tuple(n for n in HEAVY if n not in spared)
    assert in_a_fresh_process(LIGHT_CODE[what], names) == []


def test_data_and_reports_are_read_without_torch() -> None:
    """Not even by way of a module that they import: pandas and pydantic are theirs to use."""
    modules = sorted({place(f) for f in FILES} & set(NO_TORCH))
    assert {"recipe", "shelf", "component"} <= set(modules)
    code = "import " + ", ".join(f"lab.{m}" for m in modules)
    assert in_a_fresh_process(code, ("torch", "transformers", "optuna", "trl")) == []


def test_the_light_check_would_see_a_heavy_module() -> None:
    """It is vacuous if the names it looks for are never in sys.modules."""
    assert in_a_fresh_process("import pydantic", HEAVY) == ["pydantic"]


def test_every_exported_name_can_be_had_and_no_other() -> None:
    """A name in the table whose home has lost it would fail in an author's import."""
    assert lab.__all__ == sorted(set(lab.__all__))
    assert [n for n in lab.__all__ if not hasattr(lab, n)] == []
    assert dir(lab) == lab.__all__
    assert not hasattr(lab, "Bench")
    with pytest.raises(AttributeError, match="module 'lab' has no attribute 'surogate'"):
        _ = lab.surogate


def test_type_checkers_see_what_the_table_exports() -> None:
    """The names under TYPE_CHECKING and those of the lazy table are written twice."""
    seen = {(m, n) for m, n, runs in imports(LAB / "__init__.py") if not runs}
    assert {n for _, n in seen} == set(lab.__all__)
    homes = {(lab._WHERE[n], n) for n in lab.__all__}
    assert seen == homes


@pytest.mark.parametrize("file", SOURCES, ids=lambda f: str(f.relative_to(ROOT)))
def test_a_file_and_its_functions_stay_small(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count("\n") < 400, "a file that wants more wants a second room"
    defined = (ast.FunctionDef, ast.AsyncFunctionDef)
    long = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(ast.parse(text))
        if isinstance(node, defined)
    }
    assert {name: lines for name, lines in long.items() if lines >= 60} == {}
