"""The command line: what it prints, and that a mistake is one line on stderr and exit code 2."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from lab import cli, sanity
from lab.loss import evaluate  # noqa: F401  # torch is loaded once here, not inside a timed test
from lab.recipe import load
from lab.shelf import Shelf

IDEA = '''
    from typing import Annotated
    from lab import Float, recipes, surrogate

    @surrogate
    def idea(ratio, advantages, *, tau: Annotated[float, Float(0.5, 4.0)] = 1.0):
        """tau r A, an idea of mine."""
        if tau <= 0:
            raise ValueError(f"tau={tau}; it is positive")
        return tau * ratio * advantages

    @recipes
    def mine():
        return {"mine": {"doc": "My idea in GRPO.", "base": "grpo", "surrogate": "idea"}}
    '''
FILE = """
    [recipe.one]
    base = "ppo"
    surrogate = {eps_low = 0.1}

    [recipe.two]
    base = "one"
    """


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every command runs in a folder with a plugin, a recipe file and some broken ones."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.py").mkdir()
    for name, text in {
        "idea.py": IDEA,
        "recipes.toml": FILE,
        "only.toml": '[recipe.only]\nbase = "grpo"\n',
        "missing_import.py": "x = 1\nimport no_such_module_here\n",
        "syntax.py": "x = 1\ndef f(:\n",
        "leaves.py": "raise SystemExit('bye')\n",
        "taken.py": IDEA.replace("def idea", "def cispo"),
        "undocumented.py": "from lab import ratio\n\n\n@ratio\ndef mine(logp):\n    return logp\n",
        "nothing.toml": "",
        "broken.toml": "[recipe.x\n",
        "other.toml": "[recipes.x]\n",
        "unknown.toml": '[recipe.x]\nbase = "ppo"\nsurogate = "sapo"\n',
        "circle.toml": '[recipe.a]\nbase = "b"\n[recipe.b]\nbase = "a"\n',
        "number.toml": "recipe = 3\n",
    }.items():
        (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")
    return tmp_path


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command in this process: exit code, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lab", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def ok(result: tuple[int, str, str]) -> str:
    code, out, err = result
    assert (code, err) == (0, "")
    return out


# -- lab plugins


def test_plugins_lists_every_component_recipe_and_parameter(lab: Any, shelf: Shelf) -> None:
    out = ok(lab("plugins"))
    lines = [line.split() for line in out.splitlines()]
    assert all(len(line) <= 80 for line in out.splitlines())
    for component in shelf:
        assert any(w[:1] == [component.name] and w[-1] == component.plugin for w in lines)
        for name in component.params:
            assert any(w[:2] == [name, "="] or w == [name] for w in lines), name
    for name in shelf.names("recipes"):
        assert any(w[:1] == [name] for w in lines)
    assert "not loaded" not in out


def test_plugins_json_is_the_shelf_for_machines(lab: Any, shelf: Shelf) -> None:
    data = json.loads(ok(lab("plugins", "--json")), parse_constant=pytest.fail)
    assert set(data) >= {"components", "recipes", "not_loaded"}
    assert data["not_loaded"] == {}
    assert set(data["recipes"]) == set(shelf.names("recipes"))
    rows = {(r["hook"], r["name"]): r for r in data["components"]}
    assert set(rows) == {(c.hook, c.name) for c in shelf}
    row = rows["surrogate", "cispo"]
    assert (row["slot"], row["plugin"]) == ("surrogate", "lab_cispo")
    assert row["inputs"] == ["ratio", "logp", "advantages"]
    assert row["parameters"]["cap"]["default"] == 5.0
    assert "1..10 log" in row["parameters"]["cap"]["type"]


def test_a_plugin_file_is_listed_beside_the_installed(lab: Any) -> None:
    out = ok(lab("plugins", "--plugin", "idea.py"))
    assert "tau r A, an idea of mine." in out
    assert "tau = 1 in 0.5..4" in out
    assert "My idea in GRPO." in out
    assert "cispo" in out
    data = json.loads(ok(lab("plugins", "--plugin", "idea.py", "--json")))
    assert [r["plugin"] for r in data["components"] if r["name"] == "idea"] == ["idea.py"]
    assert data["recipes"]["mine"] == "My idea in GRPO."
    assert "an idea of mine" not in ok(lab("plugins"))  # and is gone without the option


def test_a_default_that_json_cannot_say_is_still_json(lab: Any, here: Path) -> None:
    """`Infinity` is Python's own dialect: every other reader of the listing fails on it."""
    text = IDEA.replace("*, tau", '*, cap: float = float("inf"), tau')
    (here / "endless.py").write_text(textwrap.dedent(text), encoding="utf-8")
    out = ok(lab("plugins", "--plugin", "endless.py", "--json"))
    json.loads(out, parse_constant=pytest.fail)
    out = ok(lab("recipes", "mine", "--plugin", "endless.py", "--json"))
    json.loads(out, parse_constant=pytest.fail)


# -- lab recipes


def test_recipes_lists_each_with_its_main_components(lab: Any, shelf: Shelf) -> None:
    out = ok(lab("recipes"))
    for name in shelf.names("recipes"):
        recipe = load(name, shelf)
        assert any(line.split()[:1] == [name] for line in out.splitlines())
        assert f"{recipe.advantage.name} · " in out
    data = json.loads(ok(lab("recipes", "--json")))
    assert data == {n: load(n, shelf).spec() for n in shelf.names("recipes")}


def test_a_recipe_is_shown_with_every_constant_and_its_source(lab: Any, shelf: Shelf) -> None:
    out = " ".join(ok(lab("recipes", "ppo")).split())
    for said in ("gae", "lam = 0.95", "eps_high = 0.2", "group_size = 8", "critic_coef = 0.1"):
        assert said in out
    assert "1707.06347" in out
    assert "roles beside the policy: a critic, a reference" in out
    assert "[0.8, 1.2]" in out
    assert "roles beside the policy: none" in ok(lab("recipes", "reinforce"))


def test_a_recipes_pulls_are_its_own(lab: Any) -> None:
    """PPO-Clip with eps .2: r A up to 1.2 and 0 beyond for A = 1, r A for A = -1 above .8."""
    lines = [line.split() for line in ok(lab("recipes", "ppo")).splitlines()]
    pulls = {w[0]: w[1:] for w in lines if len(w) == 3 and w[0].replace(".", "").isdigit()}
    assert (pulls["0.5"], pulls["1"], pulls["2"]) == (["0.5", "0"], ["1", "-1"], ["0", "-2"])


def test_set_changes_what_is_shown_and_where_it_came_from(lab: Any) -> None:
    """The paper's name beside a number that the person typed would be a false citation."""
    before = ok(lab("recipes", "ppo"))
    after = ok(lab("recipes", "ppo", "--set", "surrogate.eps_high=.5", "--set", "loop.lr=1"))
    assert "eps_high = 0.5 " in after
    assert "lr = 1 " in after

    def row(text: str) -> str:
        return next(line for line in text.splitlines() if "eps_high = " in line)

    assert "1707.06347" in row(before)
    assert "1707.06347" not in row(after)
    data = json.loads(ok(lab("recipes", "ppo", "--set", "surrogate=sapo", "--json")))
    assert data["surrogate"] == {"name": "sapo"}
    components = {row["slot"]: row for row in data["components"]}
    assert components["surrogate"]["parameters"]["tau_neg"] == 1.05  # everything filled in


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["only.toml"], ["only: "]),
        (["recipes.toml:two"], ["two: ", "eps_low = 0.1"]),
        (["recipes.toml:one", "--set", "surrogate.eps_low=.3"], ["one: ", "eps_low = 0.3"]),
        (["mine", "--plugin", "idea.py"], ["mine: My idea in GRPO.", "tau = 1", "in_loss"]),
        (["ppo", "--plugin", "idea.py", "--set", "surrogate=idea"], ["ppo: ", "tau = 1"]),
    ],
)
def test_recipes_come_from_files_and_plugins(
    lab: Any, arguments: list[str], words: list[str]
) -> None:
    out = ok(lab("recipes", *arguments))
    assert [w for w in words if w not in out] == []


def test_a_kl_on_both_hooks_without_a_beta_can_be_shown(lab: Any, here: Path) -> None:
    """The line `2 beta` is for components that have one."""
    text = '''
        from lab import kl_loss, kl_reward

        @kl_reward(name="k")
        def one(old_logp, ref_logp):
            """One."""
            return old_logp - ref_logp

        @kl_loss(name="k")
        def two(logp, ref_logp):
            """Two."""
            return logp - ref_logp
        '''
    (here / "kl.py").write_text(textwrap.dedent(text), encoding="utf-8")
    assert "k: One." in ok(lab("recipes", "ppo", "--set", "kl=k", "--plugin", "kl.py"))
    assert "2 beta = 0.1" in ok(lab("recipes", "ppo", "--set", "kl=both"))


def test_a_surrogate_of_large_groups_can_be_shown(lab: Any, here: Path) -> None:
    """Its pulls are drawn from single tokens: nine rows are no group of sixteen."""
    text = IDEA.replace("@surrogate", "@surrogate(needs_group=16)")
    text = text.replace("(ratio, ", "(ratio, group, ")
    (here / "large.py").write_text(textwrap.dedent(text), encoding="utf-8")
    out = ok(lab("recipes", "mine", "--plugin", "large.py", "--set", "loop.group_size=16"))
    assert "pull of one token" in out


@pytest.mark.parametrize("given", ['{"broken": {"surrogate": "idea"}}', '{"broken": 3}'])
@pytest.mark.parametrize("command", [["plugins"], ["plugins", "--json"], ["recipes"]], ids=" ".join)
def test_one_bad_recipe_of_a_package_does_not_end_the_listing(
    lab: Any, here: Path, monkeypatch: pytest.MonkeyPatch, given: str, command: list[str]
) -> None:
    """An installed plugin takes no other down, whether its module or its data is wrong."""
    more = f"@recipes\ndef more():\n    return {given}\n"
    text = textwrap.dedent(IDEA) + "\n" + more
    (here / "lab_badly.py").write_text(text, encoding="utf-8")
    info = here / "lab_badly-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab_badly\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lab.plugins]\nlab_badly = lab_badly\n")
    monkeypatch.syspath_prepend(here)
    monkeypatch.delitem(sys.modules, "lab_badly", raising=False)
    try:
        out = ok(lab(*command))
    finally:
        sys.modules.pop("lab_badly", None)
    assert "grpo" in out
    if command[0] == "plugins":
        assert "lab_badly" in out  # whose it is
    elif given != '{"broken": 3}':  # a plugin that is not loaded stands in `lab plugins`
        assert "recipe 'broken' has no advantage" in " ".join(out.split())


# -- lab sanity


def test_sanity_runs_all_stages_and_says_so(lab: Any) -> None:
    out = ok(lab("sanity"))
    assert out.splitlines()[-1] == "All six PPO sanity checks passed."
    assert sum(line.endswith("... ok") for line in out.splitlines()) == 6


def test_sanity_runs_the_stages_that_are_named(lab: Any) -> None:
    out = ok(lab("sanity", "bandit", "clipping"))
    assert out.splitlines()[-1] == "2 PPO sanity checks passed."
    assert [line.split(":")[0] for line in out.splitlines() if line.endswith("... ok")] == [
        "bandit",
        "clipping",
    ]


def test_a_sanity_check_that_fails_is_named_and_is_no_mistake_of_the_user(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 1, not 2: the check ran, and the formula is wrong."""

    def wrong(stage: Any, shelf: Any) -> None:
        stage.expect("one and one", 2.0, (3.0,))

    monkeypatch.setitem(sanity.STAGES, "clipping", ("directional clipping", wrong))
    code, out, err = lab("sanity", "bandit", "clipping")
    assert (code, err) == (1, "")
    assert "clipping: directional clipping ... FAILED" in out
    assert "! one and one: got 2, want 3" in out
    assert out.splitlines()[-1] == "1 of 2 PPO sanity checks failed: directional clipping."


def test_sanity_takes_a_plugin(lab: Any) -> None:
    assert "1 PPO sanity checks passed." in ok(lab("sanity", "bandit", "--plugin", "idea.py"))
