"""A mistake on the command line: one line on stderr, exit code 2, the nearest name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_cli import here, lab  # noqa: F401  # fixtures

PLUGIN_MISTAKES = {
    "missing.py": "missing.py: no such Python file",
    "folder.py": "folder.py: no such Python file",
    "recipes.toml": "recipes.toml: no such Python file",
    "missing_import.py": "missing_import.py: ModuleNotFoundError: No module named 'no_such",
    "syntax.py": "syntax.py: SyntaxError: invalid syntax (syntax.py, line 2)",
    "leaves.py": "leaves.py: SystemExit: bye",
    "taken.py": "surrogate 'cispo' is offered twice: by lab_cispo and by taken.py",
    "undocumented.py": "undocumented.py: mine: no docstring; its first line is the row in",
}


def refused(result: tuple[int, str, str]) -> str:
    """The one line, without the program's name."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert err.startswith("lab: ")
    return err.removeprefix("lab: ")


@pytest.mark.parametrize("file", PLUGIN_MISTAKES)
def test_a_plugin_file_that_cannot_be_used(lab: Any, file: str) -> None:  # noqa: F811  # the fixture
    assert PLUGIN_MISTAKES[file] in refused(lab("plugins", "--plugin", file))


@pytest.mark.parametrize("file", ["syntax.py", "leaves.py", "taken.py"])
@pytest.mark.parametrize(
    "command", [["plugins", "--json"], ["recipes"], ["recipes", "ppo"], ["sanity"]], ids=" ".join
)
def test_every_command_refuses_it(lab: Any, command: list[str], file: str) -> None:  # noqa: F811  # the fixture
    """The option is read by each of them, before anything is printed."""
    assert PLUGIN_MISTAKES[file] in refused(lab(*command, "--plugin", file))


def test_a_good_file_beside_a_bad_one_does_not_hide_it(lab: Any) -> None:  # noqa: F811  # the fixture
    line = refused(lab("plugins", "--plugin", "idea.py", "--plugin", "syntax.py"))
    assert "syntax.py: SyntaxError" in line
    line = refused(lab("plugins", "--plugin", "idea.py", "--plugin", "idea.py"))
    assert "idea.py" in line
    assert len(line) < 200


MISTAKES: list[tuple[list[str], list[str]]] = [
    (["ppoo"], ["no recipe 'ppoo'. Did you mean 'ppo'? Available: cispo, dapo"]),
    (["missing.toml"], ["missing.toml: No such file or directory"]),
    (["missing.toml:one"], ["missing.toml: No such file or directory"]),
    (["recipes.toml"], ["recipes.toml holds 2 recipes (one, two); name one: recipes.toml:NAME"]),
    (["recipes.toml:onw"], ["no recipe 'onw'. Did you mean 'one'? It has one, two"]),
    (["nothing.toml"], ["nothing.toml: no table [recipe.NAME]"]),
    (["number.toml"], ["number.toml: no table [recipe.NAME]"]),
    (["broken.toml"], ["broken.toml is not TOML: ", "line 1"]),
    (["other.toml"], ["other.toml: unknown table [recipes]. Did you mean 'recipe'?"]),
    (["unknown.toml"], ["unknown slot 'surogate'. Did you mean 'surrogate'? A recipe has"]),
    (["circle.toml:a"], ["base goes round in a circle: a -> b -> a"]),
    (["ppo", "--set", "surogate.cap=3"], ["unknown slot 'surogate'. Did you mean 'surrogate'?"]),
    (["ppo", "--set", "surrogate.eps_lo=3"], ["no parameter 'eps_lo'", "'eps_low'?"]),
    (["ppo", "--set", "surrogate=sappo"], ["no surrogate 'sappo'. Did you mean 'sapo'?"]),
    (["ppo", "--set", "surrogate.eps_low=x"], ["'ppo_clip': eps_low='x' is not float"]),
    (["ppo", "--set", "surrogate.eps_low=7"], ["'ppo_clip': eps_low=7.0", "0 < eps_low <= 1"]),
    (["ppo", "--set", "surrogate=none"], ["recipe 'ppo' has no surrogate"]),
    (["ppo", "--set", "surrogate.name=none"], ["has no surrogate"]),
    (["ppo", "--set", "loop.lrr=3"], ["unknown key 'loop.lrr'. Did you mean 'lr'? It has"]),
    (["ppo", "--set", "loop.lr=fast"], ["loop.lr = 'fast'", "number"]),
    (["ppo", "--set", "loop.epochs=0"], ["loop.epochs = 0", "greater than or equal to 1"]),
    (["ppo", "--set", "loop.optimizer=adam"], ["loop.optimizer = 'adam'", "'adamw' or 'sgd'"]),
    (["ppo", "--set", "loop.lr"], ["--set loop.lr: it reads PATH=VALUE"]),
    (["ppo", "--set", "loop.lr=[1"], ["--set loop.lr=[1: '[1' is neither a TOML value nor"]),
    (["ppo", "--set", "kl.when=after", "--set", "kl.credit=row"], ["credit='row' is not 'to_go'"]),
    (["ppo", "--set", "wrap=dual_clp"], ["no wrap 'dual_clp'. Did you mean 'dual_clip'?"]),
    (["ppo", "--set", "loop.group_size=1", "--set", "advantage=group"], ["needs groups of at lea"]),
    (
        ["gspo", "--set", "aggregate=token_mean"],
        ["'sequence' is one number a row", "sequence_mean"],
    ),
    (
        ["mine", "--plugin", "idea.py", "--set", "surrogate.tau=0"],
        ["surrogate 'idea': tau=0.0; it"],
    ),
    (["--set", "loop.lr=1"], ["--set changes one recipe; name it: lab recipes NAME --set ..."]),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_recipe_that_cannot_be_had(lab: Any, arguments: list[str], words: list[str]) -> None:  # noqa: F811
    line = refused(lab("recipes", *arguments))
    assert [w for w in words if w not in line] == [], line


@pytest.mark.parametrize("arguments", [["ppoo"], ["broken.toml"], ["ppo", "--set", "loop.lr"]])
def test_a_mistake_is_no_json(lab: Any, arguments: list[str]) -> None:  # noqa: F811
    """Nothing on stdout: whoever reads it by machine must not take half an answer for one."""
    assert refused(lab("recipes", *arguments, "--json")) == refused(lab("recipes", *arguments))


def test_a_stage_that_is_not_there(lab: Any) -> None:  # noqa: F811  # the fixture
    line = refused(lab("sanity", "bandt"))
    assert line.startswith(
        "no stage 'bandt'. Did you mean 'bandit'? They are bandit, baseline, seq"
    )
    line = refused(lab("sanity", "bandit", "clippping"))  # before the first has run
    assert line.startswith("no stage 'clippping'. Did you mean 'clipping'?")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plugin"], ["No such command", "plugin"]),
        (["plugins", "--plugn", "x"], ["No such option", "--plugin"]),
        (["plugins", "extra"], ["extra"]),
        (["recipes", "--set"], ["--set", "argument"]),
        (["sanity", "--json"], ["No such option", "--json"]),
    ],
    ids=" ".join,
)
def test_a_command_that_is_not_there(lab: Any, arguments: list[str], words: list[str]) -> None:  # noqa: F811
    """These lines are the parser's own: a usage, the reason, no traceback."""
    code, out, err = lab(*arguments)
    assert (code, out) == (2, "")
    assert [w for w in words if w not in err] == []
    assert "Traceback" not in err


def test_a_mistake_leaves_no_file_behind(lab: Any, here: Path) -> None:  # noqa: F811
    before = sorted(p.name for p in here.iterdir())
    refused(lab("recipes", "ppoo"))
    assert [n for n in sorted(p.name for p in here.iterdir()) if n != "__pycache__"] == before
