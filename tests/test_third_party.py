"""A package by somebody else: installed, listed, used, tuned, removed; and broken ones beside it.

What the package does is a file of ten lines first: `--plugin idea.py` needs no packaging.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from fresh import Fresh, built

from lab.loss import evaluate
from lab.recipe import Recipe
from lab.shelf import Shelf

pytestmark = pytest.mark.slow

#: pull tau^2 r A for r <= 1 and 0 beyond: at r = .5, A = 1 and tau = 2 it is 2.
IDEA = '''
from typing import Annotated
from lab import Float, surrogate

@surrogate(bounds=lambda: (None, 1.0))
def fading(ratio, advantages, *, tau: Annotated[float, Float(0.5, 8.0, log=True)] = 1.0):
    """tau^2 min(r, 1) A: an idea of somebody else's."""
    if tau <= 0:
        raise ValueError(f"tau={tau}; it is positive")
    return tau**2 * ratio.clamp(max=1.0) * advantages
'''
RECIPE = """
from lab import recipes

@recipes
def theirs():
    return {"fading_grpo": {"doc": "GRPO with it.", "base": "grpo", "surrogate": "fading"}}
"""
PROJECT = """
    [build-system]
    requires = ["hatchling"]
    build-backend = "hatchling.build"

    [project]
    name = "{module}"
    version = "1.0"
    dependencies = ["policy-gradient-lab"]

    [project.entry-points."lab.plugins"]
    {module} = "{module}"

    [tool.hatch.build.targets.wheel]
    only-include = ["{module}.py"]
    """
TUNE = """
    import optuna, torch
    from lab import evaluate
    from lab.recipe import load, spaces, suggest
    from lab.shelf import installed

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    shelf = installed()
    recipe = load("fading_grpo", shelf)
    old = torch.zeros(1, 1, dtype=torch.float64)
    batch = dict(old_logp=old, logp=old + torch.tensor(.5).double().log(), ref_logp=old)
    batch |= dict(advantages=old + 1, mask=old + 1)

    def distance(trial):
        tuned = suggest(trial, recipe, shelf, only=["surrogate.tau"])
        return float((evaluate(tuned, **batch).pull - 2).abs())  # tau^2 * .5 = 2 at tau = 2

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(distance, n_trials=20)
    space = str(spaces(recipe, shelf)["surrogate.tau"])
    asked = study.trials[0].distributions["surrogate.tau"]
    tried = [t.params["surrogate.tau"] for t in study.trials]
    best = suggest(study.best_trial, recipe, shelf, only=["surrogate.tau"])
    print(space, asked.low, asked.high, asked.log, len(tried), min(tried), max(tried))
    print(best.surrogate.settings["tau"], study.best_value, study.trials[0].value)
    """


def package(folder: Path, module: str, text: str) -> Path:
    """A project of one module with its own pyproject.toml and entry point."""
    project = folder / module
    project.mkdir()
    (project / f"{module}.py").write_text(text, encoding="utf-8")
    toml = textwrap.dedent(PROJECT.format(module=module))
    (project / "pyproject.toml").write_text(toml, encoding="utf-8")
    return project


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("built") / "dist", "--wheel")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Fresh:
    """The lab alone, from its wheel."""
    return Fresh.of(tmp_path_factory.mktemp("bare"), wheel)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Fresh:
    """The lab with the package of somebody else."""
    folder = tmp_path_factory.mktemp("theirs")
    fresh = Fresh.of(folder, wheel)
    fresh.pip("install", package(folder, "lab_theirs", IDEA + RECIPE))
    return fresh


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Fresh:
    """Three broken packages beside the good one."""
    folder = tmp_path_factory.mktemp("broken")
    fresh = Fresh.of(folder, wheel)
    good = package(folder, "lab_theirs", IDEA + RECIPE)
    fresh.pip("install", good, *(package(folder, m, text) for m, (text, _) in BROKEN.items()))
    return fresh


def listed(fresh: Fresh) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(fresh.lab("plugins", "--json").stdout)
    return found


def test_an_installed_package_is_listed_with_its_space(theirs: Fresh) -> None:
    found = listed(theirs)
    assert found["not_loaded"] == {}
    assert found["recipes"]["fading_grpo"] == "GRPO with it."
    row = next(r for r in found["components"] if r["name"] == "fading")
    assert (row["plugin"], row["slot"]) == ("lab_theirs", "surrogate")
    assert row["doc"] == "tau^2 min(r, 1) A: an idea of somebody else's."
    assert row["parameters"]["tau"] == {"type": "float 0.5..8 log", "default": 1.0}
    assert "cispo" in {r["name"] for r in found["components"]}


def test_its_recipe_runs_through_evaluate(theirs: Fresh) -> None:
    """r .5 and 2, A 1, tau 2: 4 * .5 = 2 and 4 * 1 = 4; pulls 4 * .5 = 2 and, beyond 1, 0."""
    code = """
        import torch
        import lab

        old = torch.zeros(2, 1, dtype=torch.float64)
        table = {"base": "fading_grpo", "surrogate": {"tau": 2.0}, "kl": "none"}
        out = lab.evaluate(
            table, old_logp=old, logp=torch.tensor([[.5], [2.0]]).double().log(),
            advantages=old + 1, mask=old + 1,
        )
        print(out.surrogate.flatten().tolist(), out.pull.flatten().tolist(), float(out.loss))
        print(lab.load("fading_grpo").interval, lab.load("fading_grpo").has_reference)
        """
    numbers, bench = theirs.python(code).splitlines()
    assert numbers == "[2.0, 4.0] [2.0, 0.0] -3.0"  # the loss: -(2 + 4)/2
    assert bench == "(None, 1.0) True"  # its own bounds; the reference is grpo's


def test_its_recipe_is_shown_with_its_pulls(theirs: Fresh) -> None:
    out = theirs.lab("recipes", "fading_grpo", "--set", "surrogate.tau=2").stdout
    assert "tau = 2" in out
    assert "a ratio counts as inside in [none, 1]" in out
    done = theirs.lab("recipes", "fading_grpo", "--set", "surrogate.tau=-1", check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "lab: surrogate 'fading': tau=-1.0; it is positive\n",
    )


def test_it_is_tuned_over_its_own_space(theirs: Fresh) -> None:
    """The known optimum is tau = 2: what a tuner finds says that values reach the component."""
    asked, found = theirs.python(TUNE).splitlines()
    space, low, high, log, trials, least, most = asked.rsplit(" ", 6)
    assert (space, low, high, log, trials) == ("0.5..8 log", "0.5", "8.0", "True", "20")
    assert 0.5 <= float(least) < 1
    assert 4 < float(most) <= 8  # the whole space was searched
    best, distance, first = map(float, found.split())
    assert best == pytest.approx(2.0, abs=0.1)
    assert distance == pytest.approx(abs(best**2 * 0.5 - 2))
    assert distance < 0.2 < first


BROKEN = {
    "lab_bad_import": ("import no_such_module_here\n", "No module named 'no_such_module_here'"),
    "lab_bad_name": (IDEA.replace("def fading", "def cispo"), "offered twice: by lab_cispo and by"),
    "lab_bad_exit": ("raise SystemExit('no licence')\n", "SystemExit: no licence"),
}


def test_broken_packages_take_no_other_down(broken: Fresh) -> None:
    """One ImportError at start would end every command, also those that need none of it."""
    found = listed(broken)
    assert set(found["not_loaded"]) == set(BROKEN)
    for module, (_, reason) in BROKEN.items():
        assert reason in found["not_loaded"][module]
    assert {"fading", "cispo", "ppo_clip"} <= {r["name"] for r in found["components"]}
    assert broken.lab("recipes", "fading_grpo").stdout.startswith("fading_grpo: GRPO with it.")


def test_the_reason_shows_when_a_recipe_names_what_is_missing(broken: Fresh) -> None:
    """`no surrogate 'theirs'` alone sends a person looking for a typing error."""
    done = broken.lab("recipes", "ppo", "--set", "surrogate=missed", check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lab: no surrogate 'missed'.")
    for module, (_, reason) in BROKEN.items():
        assert module in done.stderr
        assert reason in done.stderr
    done = broken.lab("recipes", "cispo", check=False)
    assert done.returncode == 2
    assert "surrogate 'cispo' is offered twice: by lab_cispo and by lab_bad_name" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_uninstalled_package_is_gone(bare: Fresh, tmp_path: Path) -> None:
    bare.pip("install", package(tmp_path, "lab_passing", IDEA.replace("fading", "passing")))
    assert "passing" in {r["name"] for r in listed(bare)["components"]}
    bare.pip("uninstall", "lab_passing")
    found = listed(bare)
    assert "passing" not in {r["name"] for r in found["components"]}
    assert found["not_loaded"] == {}  # not even as something that is missed


def test_the_same_component_is_ten_lines_in_a_file(bare: Fresh) -> None:
    """No packaging: the file beside the command, and the same numbers."""
    assert len(IDEA.strip().splitlines()) == 9
    (bare.work / "idea.py").write_text(IDEA, encoding="utf-8")
    out = bare.lab("plugins", "--plugin", "idea.py").stdout
    assert "an idea of somebody else's." in " ".join(out.split())
    asked = ("recipes", "grpo", "--set", "surrogate=fading", "--set", "surrogate.tau=2")
    data = json.loads(bare.lab(*asked, "--plugin", "idea.py", "--json").stdout)
    row = next(r for r in data["components"] if r["slot"] == "surrogate")
    assert (row["name"], row["plugin"]) == ("fading", "idea.py")
    assert "2.0" in json.dumps(row)
    code = """
        import torch
        import lab

        one = torch.ones(1, 1, dtype=torch.float64)
        table = {"base": "grpo", "surrogate": {"name": "fading", "tau": 2.0}, "kl": "none"}
        out = lab.evaluate(table, plugins=["idea.py"], logp=one * -1, old_logp=one * -1,
                           advantages=3 * one, mask=one)
        print(float(out.loss))
        """
    assert bare.python(code).strip() == "-12.0"  # 2^2 * 1 * 3


def test_the_file_gives_the_same_numbers_in_this_process(tmp_path: Path) -> None:
    import torch

    file = tmp_path / "idea.py"
    file.write_text(IDEA, encoding="utf-8")
    shelf = Shelf.installed([file])
    table = {"base": "grpo", "surrogate": {"name": "fading", "tau": 2.0}, "kl": "none"}
    one = torch.ones(1, 1, dtype=torch.float64)
    batch = {"logp": -one, "old_logp": -one, "advantages": 3 * one, "mask": one}
    assert evaluate(table, plugins=[file], **batch).loss.item() == -12.0
    assert Recipe.of(table, "x", shelf).surrogate.settings == {"tau": 2.0}
