"""The documentation is true: signatures are literal, examples run, shown output is real output."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tomllib
from pathlib import Path

import pytest

from lab import cli, hookspecs, protocol, recipe
from lab.bench import Bench
from lab.shelf import Shelf

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "plugins" / "README.md").read_text(encoding="utf-8")
STUDIES = (ROOT / "studies" / "README.md").read_text(encoding="utf-8")
#: Commands that take longer than a look: their settings are read here, they run in other tests.
LONG = ("run", "train", "report")


def fences(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.S | re.M)


def shown(mark: str) -> str:
    found = re.search(rf"<!-- output: {re.escape(mark)} -->\n```\n(.*?)\n```", README, re.S)
    assert found, f"the README has no block for {mark}"
    return found[1]


def lab(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command, run in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(cwd):
        patch.setattr(sys, "argv", ["lab", *arguments])
        redirected = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
        with redirected[0], redirected[1], pytest.raises(SystemExit) as end:
            cli.main()
    return int(end.value.code or 0), out.getvalue(), err.getvalue()


IDEA = fences(README, "python")[0]
SHOUT = next(f for f in fences(GUIDE, "python") if "class Shout" in f)
COMPONENTS = [f for f in fences(GUIDE, "python") if "from lab import" in f and f != SHOUT]


@pytest.mark.parametrize("hook", hookspecs.TENSOR_HOOKS)
def test_the_guide_has_each_hook_with_its_literal_signature(hook: str) -> None:
    assert f"### `{hook}({', '.join(hookspecs.inputs(hook))})`" in GUIDE


def test_the_guide_has_the_hooks_in_the_order_of_a_run() -> None:
    places = [GUIDE.index(f"### `{hook}(") for hook in hookspecs.TENSOR_HOOKS]
    assert places == sorted(places)


@pytest.mark.parametrize("hook", hookspecs.COMPONENT_HOOKS)
def test_the_guide_has_an_example_of_each_hook(hook: str) -> None:
    assert any(re.search(rf"^@{hook}\b", example, re.M) for example in COMPONENTS)


def test_the_guide_names_each_slot_option_and_reserved_keyword() -> None:
    options = {o.name for every in hookspecs.OPTIONS.values() for o in every}
    for word in (*options, *hookspecs.RESERVED):
        assert f"`{word}`" in GUIDE, word


@pytest.mark.parametrize("example", COMPONENTS, ids=lambda e: re.findall(r"def (\w+)", e)[-1])
def test_each_component_of_the_guide_loads(example: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(example, encoding="utf-8")
    before = {(c.hook, c.name) for c in Shelf.installed()} | set(Shelf.installed().names("recipes"))
    shelf = Shelf.installed([tmp_path / "example.py"])
    after = {(c.hook, c.name) for c in shelf} | set(shelf.names("recipes"))
    assert after > before


USES = re.findall(r"^`((?:\w+) = [^`]+)`$", GUIDE, re.M)


@pytest.mark.parametrize("use", USES)
def test_what_the_guide_says_to_type_is_a_recipe(use: str, tmp_path: Path) -> None:
    """Each `slot = ...` line of the guide, over a recipe in which that slot is free."""
    files = []
    for number, example in enumerate(COMPONENTS):
        if "@recipes" in example:
            continue
        files.append(tmp_path / f"example_{number}.py")
        files[-1].write_text(example, encoding="utf-8")
    shelf = Shelf.installed(files)
    base = "ppo" if use.startswith("critic") else "grpo"
    bench = Bench(recipe.load({"base": base, **tomllib.loads(use)}, shelf), shelf)
    slot, named = use.split(" = ", 1)
    assert any(b.slot == slot and f'"{b.component.name}"' in named for b in bench.bound)


def test_there_are_uses_to_check() -> None:
    assert len(USES) >= len(hookspecs.TENSOR_HOOKS)


def test_the_ten_line_component_is_ten_lines_and_the_same_in_both_guides() -> None:
    assert COMPONENTS[0] == IDEA
    assert len(IDEA.splitlines()) <= 10


@pytest.mark.parametrize("text", [README, GUIDE], ids=["README", "guide"])
def test_the_python_examples_run(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "idea.py").write_text(IDEA, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    programs = [f for f in fences(text, "python") if "lab.evaluate" in f or "lab.run(" in f]
    assert programs
    for program in programs:
        exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
        assert capsys.readouterr().out.strip()


def test_the_readme_shows_the_real_recipes() -> None:
    assert shown("lab recipes") == lab("recipes", cwd=ROOT)[1].rstrip("\n")


def test_the_readme_shows_the_real_pulls(tmp_path: Path) -> None:
    (tmp_path / "idea.py").write_text(IDEA, encoding="utf-8")
    sets = ("--set", "surrogate=soft_gate", "--set", "surrogate.tau=2")
    _, out, _ = lab("recipes", "grpo", "--plugin", "idea.py", *sets, cwd=tmp_path)
    assert shown("pulls") == out[out.index("pull of one token") :].rstrip("\n")


def commands() -> list[list[str]]:
    texts = (README, GUIDE, STUDIES)
    lines = [c for text in texts for f in fences(text, "console") for c in f.splitlines()]
    return [c.partition("#")[0].split()[2:] for c in lines if c.startswith("$ lab ")]


def beside(folder: Path) -> Path:
    """The files that the guides say to save."""
    (folder / "idea.py").write_text(IDEA, encoding="utf-8")
    (folder / "shout.py").write_text(SHOUT, encoding="utf-8")
    (folder / "mine.toml").write_text(fences(README, "toml")[0], encoding="utf-8")
    return folder


def test_the_commands_of_the_guides_run(tmp_path: Path) -> None:
    chosen = [c for c in commands() if c[0] not in LONG]
    assert len(chosen) >= 7
    for command in chosen:
        code, _, err = lab(*command, cwd=beside(tmp_path))
        wrong = "surrogate=cipso" in command
        assert code == (2 if wrong else 0), err
        if wrong:
            assert err.strip() in README


@pytest.mark.slow
def test_the_training_commands_of_the_guides_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one rollout each, so that a misspelt option or setting is found."""
    monkeypatch.setenv("LAB_CACHE", str(tmp_path / "cache"))
    chosen = [c for c in commands() if c[0] == "train"]
    assert len(chosen) >= 2
    for command in chosen:
        short = ("--set", "run.budget.rollouts=1", "--set", "run.eval_prompts=16")
        code, out, err = lab(*command, *short, cwd=beside(tmp_path))
        assert code == 0, err
        assert ": ok" in out


def test_the_study_of_the_guide_is_one(tmp_path: Path) -> None:
    """And says what the text around it says: every key of its tables is in the example."""
    (tmp_path / "mine.toml").write_text(fences(STUDIES, "toml")[0], encoding="utf-8")
    study = protocol.read(tmp_path / "mine.toml", Shelf.installed())
    assert [a.recipe.name for a in study.arms] == ["grpo", "soft"] * 2
    assert {a.recipe.loop.lr for a in study.arms} == {1e-4, 3e-4}
    assert [c.name for c in study.contrasts] == ["soft - grpo, lr 1e-4"]
    given = tomllib.loads(fences(STUDIES, "toml")[0])["study"]
    assert set(protocol.Head.model_fields) - set(given) == {"warm_start"}
    for command in (c for c in commands() if c[0] == "run"):
        assert "first" in command or command[1].startswith("studies/")


def test_the_readme_names_each_recipe_and_the_targets_it_tells_of() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^\$ make (\S+)", README, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for name in Shelf.installed().names("recipes"):
        assert re.search(rf"^{name}\b", shown("lab recipes"), re.M), name
