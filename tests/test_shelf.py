"""The shelf: what is found, under which name, and what one bad plugin does to the others."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab import hookspecs
from lab.errors import LabError
from lab.hooks import advantage, kl_loss, kl_reward, recipes, surrogate, tasks
from lab.hookspecs import hookimpl
from lab.shelf import Shelf, load_file

COMPONENT = '''
    from lab import {hook}

    @{hook}
    def {name}(mask):
        """Of {name}."""
        return mask
    '''


def component(name: str = "mine", hook: Any = surrogate, **more: Any) -> Any:
    def function(mask: Any) -> Any:
        """Mine."""
        return mask

    return hook(name=name, **more)(function)


def plugin(module: str, **attributes: Any) -> Any:
    return SimpleNamespace(__name__=module, **attributes)


def write(folder: Path, text: str, name: str = "idea.py") -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    return file


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a module with an entry point, as a package's installation leaves it."""
    root = tmp_path / "site"
    root.mkdir()
    monkeypatch.syspath_prepend(root)

    def installed(module: str, text: str) -> None:
        monkeypatch.delitem(sys.modules, module, raising=False)
        write(root, text, f"{module}.py")
        info = root / f"{module}-1.0.dist-info"
        write(info, f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n", "METADATA")
        write(info, f"[{hookspecs.ENTRY_POINTS}]\n{module} = {module}\n", "entry_points.txt")

    yield installed
    for file in root.glob("*.py"):
        sys.modules.pop(file.stem, None)


def test_the_built_in_plugins_are_found_by_their_entry_points(shelf: Shelf) -> None:
    assert shelf.broken == {}
    (found,) = shelf.find("surrogate", "cispo")
    assert (found.plugin, found.hook) == ("lab_cispo", "surrogate")
    assert {"ppo", "grpo", "cispo", "dapo", "rloo"} <= set(shelf.names("recipes"))
    assert shelf.plugin_of("recipes", "grpo") == "lab_grpo"


def test_components_come_by_slot_in_the_order_of_a_run_then_by_name(shelf: Shelf) -> None:
    order = [*hookspecs.SLOTS, "observe"]
    keys = [(order.index(c.slot), c.name) for c in shelf]
    assert keys == sorted(keys)
    assert len(keys) > 30


def test_a_name_may_stand_in_two_slots(shelf: Shelf) -> None:
    """`reinforce` is an advantage and a surrogate; a wrapper has a slot of its own."""
    assert shelf.find("advantage", "reinforce")[0].hook == "advantage"
    assert shelf.find("surrogate", "reinforce")[0].hook == "surrogate"

    def around(mask: Any) -> Any:
        """Around."""
        return (yield)

    both = plugin("lab_x", one=component(), two=surrogate(name="mine", wrapper=True)(around))
    found = Shelf([both])
    assert not found.find("surrogate", "mine")[0].declared.wrapper
    assert found.find("wrap", "mine")[0].declared.wrapper


def test_a_missing_component_is_named_with_the_nearest_and_all_there_are(shelf: Shelf) -> None:
    line = r"^no surrogate 'cipso'\. Did you mean 'cispo'\? Available: cispo, ppo_clip, .*sapo$"
    with pytest.raises(LabError, match=line):
        shelf.find("surrogate", "cipso")
    with pytest.raises(LabError, match=r"no kl 'in_los'\. Did you mean 'in_loss'\?"):
        shelf.find("kl", "in_los")
    with pytest.raises(LabError, match=r"no wrap 'dualclip'\. Did you mean 'dual_clip'\?"):
        shelf.find("wrap", "dualclip")
    with pytest.raises(LabError, match=r"no recipe 'grp'\. Did you mean 'grpo'\?"):
        shelf.recipe("grp")
    with pytest.raises(LabError, match=r"^no surrogate 'ppo_clip'\. Available: none$"):
        Shelf().find("surrogate", "ppo_clip")


def test_a_component_of_another_slot_is_not_found(shelf: Shelf) -> None:
    """`gae` is no surrogate, whatever else it is."""
    with pytest.raises(LabError, match="no surrogate 'gae'"):
        shelf.find("surrogate", "gae")


def test_a_plugin_may_be_a_file_a_module_an_object_or_one_function(tmp_path: Path) -> None:
    file = write(tmp_path, COMPONENT.format(hook="ratio", name="of_file"))
    module = load_file(write(tmp_path, COMPONENT.format(hook="ratio", name="of_module"), "two.py"))
    shelf = Shelf([file, module, plugin("lab_x", a=component("of_object")), component("alone")])
    names = {c.name: c.plugin for c in shelf}
    assert set(names) == {"of_file", "of_module", "of_object", "alone"}
    assert names["of_file"] == "idea.py"
    assert names["of_object"] == "lab_x"
    assert Shelf([str(file)]).find("ratio", "of_file")


def undecorated(ratio: Any) -> Any:
    """What a person gives who forgot the decorator."""


@pytest.mark.parametrize("thing", [undecorated, None, 3, {"a": 1}])
def test_what_offers_nothing_is_no_plugin(thing: Any) -> None:
    """Silence here, and `no surrogate 'undecorated'` later, which does not say why."""
    with pytest.raises(LabError, match=r"(undecorated|NoneType|int|dict).*no component"):
        Shelf([thing])


def test_a_file_that_offers_nothing_is_no_plugin(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"idea\.py.*no component"):
        Shelf([write(tmp_path, "def mine(ratio):\n    return ratio\n")])


def test_an_imported_component_stays_the_other_plugins(tmp_path: Path, shelf: Shelf) -> None:
    """It would be offered twice, by both modules."""
    text = "from lab_grpo import group, rloo\nfrom lab_ppo import *\n"
    found = Shelf.installed(
        [write(tmp_path, text + textwrap.dedent(COMPONENT).format(hook="ratio", name="own"))]
    )
    assert [c.name for c in found if c.plugin == "idea.py"] == ["own"]
    assert len(list(found)) == len(list(shelf)) + 1


def test_a_name_given_twice_is_refused_with_both_plugins() -> None:
    """The last registered would win, silently."""
    shelf = Shelf([plugin("lab_x", a=component())])
    line = r"^surrogate 'mine' is offered twice: by lab_x and by lab_y$"
    with pytest.raises(LabError, match=line):
        shelf.add(plugin("lab_y", a=component()))
    with pytest.raises(LabError, match=line):  # and nobody may use either from then on
        shelf.find("surrogate", "mine")
    with pytest.raises(LabError, match="advantage 'a' is offered twice: by lab_z and by lab_z"):
        Shelf([plugin("lab_z", a=component("a", advantage), b=component("a", advantage))])


def test_a_recipe_given_twice_is_refused_with_both_plugins() -> None:
    one = plugin("lab_x", r=recipes(lambda: {"mine": {"surrogate": "a"}}))
    two = plugin("lab_y", r=recipes(lambda: {"mine": {"surrogate": "b"}}))
    shelf = Shelf([one])
    with pytest.raises(LabError, match="recipe 'mine' is offered twice: by lab_x and by lab_y"):
        shelf.add(two)
    with pytest.raises(LabError, match="offered twice"):
        shelf.recipe("mine")


def test_a_plugin_is_taken_whole_or_not_at_all() -> None:
    """Half a plugin would leave names that the listing shows and nothing else knows."""
    shelf = Shelf([plugin("lab_x", a=component())])
    half = plugin(
        "lab_y",
        a=component("fresh"),
        b=component("mine"),
        r=recipes(lambda: {"theirs": {}}),
    )
    with pytest.raises(LabError, match="offered twice"):
        shelf.add(half)
    assert [c.name for c in shelf] == ["mine"]
    assert shelf.names("recipes") == {}
    shelf.add(plugin("lab_y", a=component("fresh")))  # its name is free again
    assert [c.name for c in shelf] == ["fresh", "mine"]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ([1], "lab_x: recipes returned list where a mapping was due"),
        (None, "lab_x: recipes returned NoneType where a mapping was due"),
        ({"mine": 3}, "lab_x: .*'mine'.*(table|mapping)"),
        ({3: {}}, "lab_x: .*3"),
    ],
)
def test_recipes_that_are_no_tables_are_refused_when_read(given: Any, line: str) -> None:
    """Otherwise a TypeError in `lab recipes`, and a listing that nobody can read."""
    with pytest.raises(LabError, match=line):
        Shelf([plugin("lab_x", r=recipes(lambda: given))])


def test_recipes_that_raise_are_refused_with_the_plugin_and_the_reason() -> None:
    def broken() -> Any:
        return {}["key"]

    with pytest.raises(LabError, match=r"lab_x.*KeyError.*key"):
        Shelf([plugin("lab_x", r=recipes(broken))])


def test_tasks_are_named_data_too() -> None:
    shelf = Shelf([plugin("lab_x", t=tasks(lambda: {"count": 3}))])
    assert shelf.names("tasks") == {"count": 3}
    assert shelf.plugin_of("tasks", "count") == "lab_x"


def _hookimpl(text: str, name: str) -> Any:
    namespace: dict[str, Any] = {"hookimpl": hookimpl}
    exec(f"@hookimpl\n{text}", namespace)
    return namespace[name]


@pytest.mark.parametrize(
    ("text", "name", "line"),
    [
        ("def surrogate(ratio): return ratio", "surrogate", "bare hookimpl on surrogate; .*@surr"),
        ("def surogate(ratio): return ratio", "surogate", "unknown hook 'surogate'.*'surrogate'"),
        ("def surrogate(ratoi): return ratoi", "surrogate", "ratoi"),
        ("def recipes(shelf): return {}", "recipes", "shelf"),
    ],
    ids=["bare", "misspelt", "input", "argument"],
)
def test_a_bare_hookimpl_is_refused_in_one_line(text: str, name: str, line: str) -> None:
    """pluggy would register it: without a mark nothing ever calls it, misspelt or not."""
    shelf = Shelf()
    with pytest.raises(LabError, match=rf"^lab_x: .*{line}") as error:
        shelf.add(plugin("lab_x", **{name: _hookimpl(text, name)}))
    assert len(str(error.value).splitlines()) == 1
    assert " at 0x" not in str(error.value)  # no object's address in what a person reads
    shelf.add(plugin("lab_x", a=component()))  # nothing of it is left, pending or registered
    assert [c.name for c in shelf] == ["mine"]


@pytest.mark.parametrize("again", ["same file", "same name"])
def test_a_plugin_given_twice_is_refused_in_one_line(tmp_path: Path, again: str) -> None:
    """pluggy prints its whole table of plugins here."""
    one = write(tmp_path, COMPONENT.format(hook="ratio", name="a"), "one/idea.py")
    two = write(tmp_path, COMPONENT.format(hook="ratio", name="b"), "two/idea.py")
    with pytest.raises(LabError, match=r"idea\.py.*twice") as error:
        Shelf([one, one if again == "same file" else two])
    assert len(str(error.value)) < 200


def test_a_kl_name_on_both_hooks_takes_one_plugin_and_equal_parameters() -> None:
    def first(old_logp: Any, *, beta: float = 0.5) -> Any:
        """One."""

    def second(logp: Any, *, beta: float = 0.5) -> Any:
        """Two."""

    def unequal(logp: Any, *, beta: float = 0.6) -> Any:
        """Three."""

    reward, loss = kl_reward(name="k")(first), kl_loss(name="k")(second)
    shelf = Shelf([plugin("lab_x", a=reward, b=loss)])
    assert [c.hook for c in shelf.find("kl", "k")] == ["kl_reward", "kl_loss"]
    line = r"kl 'k' stands on two hooks, by lab_x \(kl_{}\) and lab_{} \(kl_{}\)"
    shelf = Shelf([plugin("lab_x", a=reward), plugin("lab_y", b=loss)])
    with pytest.raises(LabError, match=line.format("reward", "y", "loss")):
        shelf.find("kl", "k")
    shelf = Shelf([plugin("lab_x", a=reward, b=kl_loss(name="k")(unequal))])
    with pytest.raises(LabError, match=line.format("loss", "x", "reward")):
        shelf.find("kl", "k")


BROKEN = {
    "ImportError": ("import no_such_module_here", "No module named 'no_such_module_here'"),
    "SyntaxError": ("def f(:", "SyntaxError: .*line 1"),
    "SystemExit": ("import sys\nsys.exit('asked to leave')", "SystemExit: asked to leave"),
    "duplicate": (COMPONENT.format(hook="surrogate", name="cispo"), "is offered twice: by lab_cis"),
    "component": (COMPONENT.format(hook="surrogate", name="m").replace("mask", "msk"), "'mask'"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_installed_plugin_takes_no_other_down(
    install: Any, shelf: Shelf, what: str
) -> None:
    """One bad package would end every command; its reason must be there when it is missed."""
    text, reason = BROKEN[what]
    install("aaa_broken", text)  # before the built-ins in the alphabet
    install("zzz_fine", COMPONENT.format(hook="surrogate", name="fine"))
    found = Shelf.installed()
    assert list(found.broken) == ["aaa_broken"]
    assert found.find("surrogate", "fine")[0].plugin == "zzz_fine"
    assert {c.name for c in found} == {c.name for c in shelf} | {"fine"}
    line = rf"(?s)no surrogate 'missed'.*not loaded: aaa_broken: .*{reason}"
    with pytest.raises(LabError, match=line):
        found.find("surrogate", "missed")
    with pytest.raises(
        LabError, match=rf"(?s)no recipe 'theirs'.*not loaded: aaa_broken.*{reason}"
    ):
        found.recipe("theirs")


def test_a_built_in_name_taken_by_a_package_is_the_packages_fault(install: Any) -> None:
    """Sorted by name alone `aaa` would come first and lab_cispo would be the broken one."""
    install("aaa_taken", COMPONENT.format(hook="surrogate", name="cispo"))
    found = Shelf.installed()
    assert list(found.broken) == ["aaa_taken"]
    with pytest.raises(LabError, match="offered twice: by lab_cispo and by aaa_taken"):
        found.find("surrogate", "cispo")  # which of the two was meant, nobody knows
    assert found.find("surrogate", "ppo_clip")


def test_a_person_who_interrupts_is_heard(install: Any) -> None:
    """`except BaseException` alone would list Ctrl-C as a broken plugin."""
    install("aaa_slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        Shelf.installed()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = 1\nimport no_such_module_here", r"ModuleNotFoundError: .*\(line 2\)"),
        ("x = 1\ny = x / 0", r"ZeroDivisionError: division by zero \(line 2\)"),
        ("x = 1\ndef f(:", r"SyntaxError: .*line 2"),
        ("raise SystemExit(3)", r"SystemExit: 3 \(line 1\)"),
        ("from lab import nothing", r"ImportError: cannot import name 'nothing' from 'lab'"),
        ("raise ValueError('two\\nlines')", r"ValueError: two lines \(line 1\)"),
    ],
)
@pytest.mark.parametrize("relative", [False, True], ids=["absolute", "relative"])
def test_a_file_that_fails_says_where_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, line: str, relative: bool
) -> None:
    """A person types `--plugin idea.py`: the line number must not depend on how."""
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, text, "failing.py")
    with pytest.raises(LabError, match=rf"^--plugin .*failing\.py: {line}") as error:
        load_file(Path(file.name) if relative else file)
    assert len(str(error.value).splitlines()) == 1
    assert "lab_file_failing" not in sys.modules  # half a module would be found by an import


@pytest.mark.parametrize("name", ["missing.py", "folder", "folder.py", "notes.txt"])
def test_what_is_no_python_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.py").mkdir()
    write(tmp_path, "x = 1", "notes.txt")
    with pytest.raises(LabError, match=rf"--plugin .*{name}: no such Python file"):
        load_file(tmp_path / name)


def test_a_file_edited_within_its_second_is_read_anew(tmp_path: Path) -> None:
    """Same name, size and second: Python's cached bytecode would be the old component."""
    for letter in "ab":
        file = write(tmp_path, COMPONENT.format(hook="ratio", name=f"of_{letter}"))
        os.utime(file, (1e9, 1e9))
        assert [c.name for c in Shelf([file])] == [f"of_{letter}"]
