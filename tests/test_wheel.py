"""What a person gets from the wheel: all of the lab, every plugin, nothing else."""

from __future__ import annotations

import configparser
import json
import tarfile
import tomllib
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from fresh import ROOT, Fresh, built

from lab import listing
from lab.hookspecs import ENTRY_POINTS
from lab.sanity import STAGES
from lab.shelf import Shelf

PLUGINS = {f.stem for f in (ROOT / "plugins").glob("lab_*.py")}
AGAIN = "plugins/ and pyproject.toml have moved on: run `pip install -e .` again"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("built") / "dist", "--wheel")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Fresh:
    return Fresh.of(tmp_path_factory.mktemp("fresh"), wheel)


def files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {n: archive.read(n) for n in archive.namelist() if not n.endswith("/")}


#: What comes with the lab and is no file of plugins/: its tasks and executors.
INSIDE = {"lab_execute": "lab.execute", "lab_task": "lab.task"}


def declared() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: dict[str, str] = project["entry-points"][ENTRY_POINTS]
    return found


def test_every_plugin_file_has_its_entry_point() -> None:
    """A new plugins/lab_x.py without one would be in the wheel and never be found."""
    assert len(PLUGINS) >= 12
    assert declared() == {name: name for name in sorted(PLUGINS)} | INSIDE, "pyproject.toml"


def test_what_is_installed_here_is_what_is_declared() -> None:
    """Entry points are written at installation: an edit of pyproject.toml alone changes nothing."""
    own = {
        e.name
        for e in entry_points(group=ENTRY_POINTS)
        if e.dist is not None and e.dist.name == "policy-gradient-lab"
    }
    assert own == PLUGINS | INSIDE.keys(), AGAIN


@pytest.mark.slow
def test_the_wheel_holds_the_lab_and_every_plugin_as_they_are(wheel: Path) -> None:
    found = files(wheel)
    for file in sorted([*(ROOT / "lab").rglob("*.py"), ROOT / "lab" / "py.typed"]):
        assert found[file.relative_to(ROOT).as_posix()] == file.read_bytes()
    for name in PLUGINS:  # a source root, not a package: they stand at the top
        assert found[f"{name}.py"] == (ROOT / "plugins" / f"{name}.py").read_bytes()


@pytest.mark.slow
def test_the_wheel_installs_nothing_else_at_the_top(wheel: Path) -> None:
    """A top-level `tests` or `plugins` would shadow, or be shadowed by, anybody's own."""
    tops = {name.split("/")[0] for name in files(wheel)}
    (info,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops == {"lab", info, *(f"{name}.py" for name in PLUGINS)}
    guides = [n for n in files(wheel) if n.endswith((".md", ".pyc"))]
    assert guides == ["lab/studies/README.md"]  # it travels with the studies that it explains


@pytest.mark.slow
def test_the_wheel_holds_the_studies_and_the_reports_page(wheel: Path) -> None:
    """`lab run first` outside a checkout would find no study, and its report no template."""
    found = files(wheel)
    for name in ("studies/first.toml", "lab/report/report.html.jinja", "lab/report/report.css"):
        inside = name if name.startswith("lab/") else f"lab/{name}"
        assert found[inside] == (ROOT / name).read_bytes()


@pytest.mark.slow
def test_the_wheels_entry_points_are_the_plugins_and_the_command(wheel: Path) -> None:
    (text,) = (x for n, x in files(wheel).items() if n.endswith(".dist-info/entry_points.txt"))
    parser = configparser.ConfigParser()
    parser.read_string(text.decode())
    assert dict(parser[ENTRY_POINTS]) == declared()
    assert dict(parser["console_scripts"]) == {"lab": "lab.cli:main"}
    assert set(parser.sections()) == {ENTRY_POINTS, "console_scripts"}  # no pytest11


@pytest.mark.slow
def test_the_source_distribution_builds_the_same_wheel(tmp_path: Path, wheel: Path) -> None:
    """And carries the tests: who packages it further can run them."""
    again = files(built(tmp_path / "dist"))
    (source,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    carried = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "plugins").glob("*")]
    due = {f.relative_to(ROOT).as_posix() for f in carried if f.is_file()}
    due |= {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt"}
    assert due - names == set()
    assert {n: x for n, x in again.items() if "dist-info" not in n} == {
        n: x for n, x in files(wheel).items() if "dist-info" not in n
    }


@pytest.mark.slow
def test_the_installed_lab_is_the_wheels_and_not_the_checkouts(fresh: Fresh) -> None:
    """Without this the other tests could pass on the editable project."""
    code = "import lab, lab_ppo, sys\nprint(lab.__file__, lab_ppo.__file__, *sys.path, sep='\\n')"
    lab_file, plugin_file, *path = fresh.python(code).splitlines()
    assert Path(lab_file).parent.parent == fresh.site
    assert Path(plugin_file).parent == fresh.site
    assert str(ROOT) not in path
    assert str(ROOT / "plugins") not in path


@pytest.mark.slow
def test_plugins_of_the_wheel_are_those_of_the_checkout(fresh: Fresh) -> None:
    here = json.loads(listing.plugins_json(Shelf.installed()))
    there = json.loads(fresh.lab("plugins", "--json").stdout)
    assert there == here
    assert there["not_loaded"] == {}


@pytest.mark.slow
def test_the_staged_path_holds_from_the_wheel(fresh: Fresh) -> None:
    out = fresh.lab("sanity").stdout
    assert out.splitlines()[-1] == "All six PPO sanity checks passed."
    assert [s for s in STAGES if f"{s}: " not in out] == []


@pytest.mark.slow
def test_a_mistake_from_the_wheel_is_one_line(fresh: Fresh) -> None:
    done = fresh.lab("recipes", "ppoo", check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lab: no recipe 'ppoo'. Did you mean 'ppo'?")
    assert done.stderr.count("\n") == 1
