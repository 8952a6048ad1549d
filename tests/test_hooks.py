"""The decorators: a component stays a plain function, and no component is lost without a word."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import lab
from lab import hooks
from lab.component import describe
from lab.errors import LabError
from lab.hooks import MARK, alias, observe, surrogate
from lab.hookspecs import COMPONENT_HOOKS, NAMED_DATA, TENSOR_HOOKS, hookimpl
from lab.shelf import Shelf, load_file


def loaded(folder: Path, text: str, name: str = "idea") -> ModuleType:
    file = folder / f"{name}.py"
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    return load_file(file)


def gate(ratio: Any, advantages: Any, *, tau: float = 2.0, shift: float = 0.0) -> Any:
    """tau r A + shift."""
    return tau * ratio * advantages + shift


@pytest.mark.parametrize("hook", COMPONENT_HOOKS)
def test_a_decorator_marks_for_the_hook_of_its_name(hook: str) -> None:
    """A slip in the list of decorators would put an author's component on another hook."""

    def mine() -> None: ...

    marked = getattr(lab, hook)(mine)
    assert marked is mine  # returned unchanged: it can be called and tested alone
    assert (getattr(mine, MARK).hook, getattr(mine, MARK).name) == (hook, "mine")


@pytest.mark.parametrize("hook", TENSOR_HOOKS)
def test_declarations_are_kept_and_default_to_nothing(hook: str) -> None:
    def mine() -> None: ...

    def bounds() -> tuple[float, float]:
        return 0.0, 1.0

    getattr(lab, hook)(
        name="yours",
        needs_group=3,
        sequence_level=True,
        whole_batch=True,
        corrects="rollout",
        bounds=bounds,
        exempt={"P8": "why"},
    )(mine)
    declared = getattr(mine, MARK)
    assert (declared.name, declared.needs_group, declared.sequence_level) == ("yours", 3, True)
    assert (declared.whole_batch, declared.corrects) == (True, "rollout")
    assert declared.bounds is bounds
    assert declared.exempt == {"P8": "why"}

    def plain() -> None: ...

    declared = getattr(getattr(lab, hook)(plain), MARK)
    assert (declared.needs_group, declared.sequence_level, declared.whole_batch) == (
        1,
        False,
        False,
    )
    assert (declared.corrects, declared.bounds, declared.remember) == (None, None, None)
    assert not declared.wrapper


def test_the_mathematics_of_a_decorated_function_can_be_called() -> None:
    @surrogate
    def mine(ratio: Any, advantages: Any, *, tau: float = 2.0) -> Any:
        return tau * ratio * advantages

    @surrogate(name="x")
    def yours(ratio: Any, advantages: Any, *, tau: float = 2.0) -> Any:
        return tau * ratio * advantages

    r, a = torch.tensor(1.5), torch.tensor(-2.0)
    assert float(mine(r, a)) == -6.0  # 2 * 1.5 * -2
    assert float(yours(r, a, tau=1.0)) == -3.0


@pytest.mark.parametrize(
    ("hook", "name", "near"),
    [
        ("surrogate", "needsgroup", "needs_group"),
        ("surrogate", "warpper", "wrapper"),
        ("ratio", "at", ""),
        ("observe", "wrapper", ""),
        ("observe", "needs_group", ""),
    ],
)
def test_an_unknown_declaration_is_refused_in_our_words(hook: str, name: str, near: str) -> None:
    """Not a TypeError that names the lab's own Declared.__init__."""

    def mine(mask: Any) -> Any: ...

    with pytest.raises(LabError, match=rf"{hook}.*{name}.*{near}"):
        getattr(lab, hook)(**{name: 1})(mine)


@pytest.mark.parametrize("name", ["none", "a.b", "", "two words", 3])
def test_a_name_that_no_recipe_could_write_is_refused(name: Any) -> None:
    """`none` empties a slot, a dot splits the path of --set: such a component is out of reach."""

    def mine(ratio: Any) -> Any: ...

    with pytest.raises(LabError, match="name"):
        surrogate(name=name)(mine)


class _Callable:
    """An object that can be called."""

    def __call__(self, ratio: Any) -> Any: ...


@pytest.mark.parametrize(
    "thing",
    [_Callable, _Callable(), functools.partial(gate), 3],
    ids=["class", "callable", "partial", "number"],
)
def test_what_is_no_function_is_refused_in_our_words(thing: Any) -> None:
    """Not an AttributeError about __name__ or __globals__."""
    with pytest.raises(LabError, match="function"):
        surrogate(thing)


@pytest.mark.parametrize("at", ["update", "rollout", "eval"])
def test_an_observer_says_when(at: Any) -> None:
    @observe(at=at, name="yours")
    def mine(mask: Any) -> Any: ...

    @observe
    def plain(mask: Any) -> Any: ...

    assert (getattr(mine, MARK).at, getattr(mine, MARK).name) == (at, "yours")
    assert getattr(plain, MARK).at == "update"


def test_an_observer_of_no_moment_is_refused() -> None:
    """A misspelt moment would never come, so the observer would record nothing for ever."""

    def mine(mask: Any) -> Any: ...

    with pytest.raises(
        LabError, match=r"observe.*at='updat'; it may be update, rollout,? (or )?eval"
    ):
        observe(at="updat")(mine)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", NAMED_DATA)
def test_named_data_is_marked_for_pluggy_and_is_no_component(kind: str) -> None:
    def mine() -> dict[str, Any]:
        return {}

    marked = getattr(hooks, kind)(mine)
    assert marked is mine
    assert getattr(mine, hookimpl.project_name + "_impl")["specname"] == kind
    assert not hasattr(mine, MARK)


TWICE = '''
    from lab import {first}, {second}

    @{first}
    def mine(mask):
        """One."""
        return mask

    @{second}{named}
    def mine(mask):
        """Two."""
        return mask
'''


@pytest.mark.parametrize(("first", "second"), [("ratio", "aggregate"), ("ratio", "ratio")])
@pytest.mark.parametrize("named", ["", "(name='other')"])
def test_one_function_name_twice_in_a_module_is_refused(
    tmp_path: Path, first: str, second: str, named: str
) -> None:
    """Python keeps the second only: the first would be missing and nobody told."""
    text = TWICE.format(first=first, second=second, named=named)
    with pytest.raises(LabError, match=rf"'mine' is defined twice \({first} and {second}\)"):
        loaded(tmp_path, text)


def test_two_components_of_one_name_on_two_hooks_take_two_functions(tmp_path: Path) -> None:
    module = loaded(
        tmp_path,
        '''
        from lab import advantage, surrogate

        @advantage(name="mine")
        def first(mask):
            """One."""
            return mask

        @surrogate(name="mine")
        def second(ratio):
            """Two."""
            return ratio
        ''',
    )
    found = {(c.hook, c.name) for c in Shelf([module])}
    assert found == {("advantage", "mine"), ("surrogate", "mine")}


def test_a_helper_may_give_its_name_to_a_component(tmp_path: Path) -> None:
    """Only a lost component is refused; a plain function that is replaced is Python as usual."""
    module = loaded(
        tmp_path,
        '''
        from lab import ratio

        def mine(mask):
            return mask

        @ratio
        def mine(logp):
            """One."""
            return logp
        ''',
    )
    assert [c.inputs for c in Shelf([module])] == [("logp",)]


def test_a_module_may_be_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """importlib.reload runs a file in its old namespace: nothing is defined twice in it."""
    text = 'from lab import ratio\n\n\n@ratio\ndef mine(logp):\n    """One."""\n    return logp\n'
    (tmp_path / "lab_reloaded.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("lab_reloaded")
    monkeypatch.delitem(sys.modules, "lab_reloaded")
    monkeypatch.setitem(sys.modules, "lab_reloaded", module)
    again = importlib.reload(module)
    assert [c.name for c in Shelf([again])] == ["mine"]


@pytest.mark.parametrize("names", [("<stdin>", "<stdin>"), ("cell-1.py", "cell-2.py")])
def test_a_notebook_cell_may_be_run_again(names: tuple[str, str]) -> None:
    """A person who edits a component in a notebook defines it many times, under one __main__."""
    text = 'from lab import ratio\n@ratio\ndef mine(logp):\n    """One."""\n    return logp\n'
    namespace: dict[str, Any] = {"__name__": "__main__", "__spec__": None}
    for name in names:
        exec(compile(text, name, "exec"), namespace)
    assert getattr(namespace["mine"], MARK).name == "mine"


def test_two_hooks_on_one_function_are_refused(tmp_path: Path) -> None:
    """The second decorator overwrites the mark of the first, so one hook would be lost."""
    text = '''
        from lab import kl_loss, kl_reward

        @kl_reward
        @kl_loss
        def mine(old_logp, ref_logp):
            """One."""
            return old_logp - ref_logp
        '''
    with pytest.raises(LabError, match=r"'?mine'?.*kl_loss.*kl_reward"):
        loaded(tmp_path, text)


def test_an_alias_settles_parameters_and_leaves_the_original() -> None:
    def mine(ratio: Any, advantages: Any, *, tau: float = 2.0, shift: float = 0.0) -> Any:
        """Mine."""
        return gate(ratio, advantages, tau=tau, shift=shift)

    surrogate(mine)
    other = alias(mine, "steep", "Steep.\n\nMore.", tau=5.0)
    found, original = describe(other, "lab_x"), describe(mine, "lab_x")
    assert (found.name, found.doc, found.inputs) == ("steep", "Steep.", ("ratio", "advantages"))
    assert list(found.params) == ["shift"]  # what is settled is no parameter any more
    assert (original.name, original.doc, list(original.params)) == (
        *("mine", "Mine."),
        ["tau", "shift"],
    )
    r, a = torch.tensor(1.5), torch.tensor(-2.0)
    assert float(other(r, a, shift=1.0)) == -14.0  # 5 * 1.5 * -2 + 1
    assert float(mine(r, a)) == -6.0
    third = alias(other, "steeper", "Steeper.", shift=3.0)  # an alias of an alias keeps both
    assert float(third(r, a)) == -12.0  # 5 * 1.5 * -2 + 3
    assert not describe(third, "lab_x").params


def test_an_alias_keeps_its_declarations_at_the_values_it_settles() -> None:
    """`needs_group` may depend on a parameter that the alias has taken out of the signature."""

    def mine(ratio: Any, *, low: float = 0.8, alone: str = "refuse") -> Any:
        """Mine."""

    declared = surrogate(
        bounds=lambda low: (low, None), needs_group=lambda alone: 1 if alone == "zero" else 2
    )
    found = describe(alias(declared(mine), "lone", "Lone.", alone="zero", low=0.5), "lab_x")
    assert found.declaration("needs_group", {}) == 1
    assert found.declaration("bounds", {}) == (0.5, None)


def test_an_alias_of_an_alias_declares_at_all_that_is_settled() -> None:
    """The second alias's values alone would leave a declaration without its argument."""

    @surrogate(bounds=lambda low, high: (low, high))
    def mine(ratio: Any, *, low: float = 0.8, high: float = 1.2) -> Any:
        """Mine."""

    second = alias(alias(mine, "one", "One.", low=0.5), "two", "Two.", high=3.0)
    assert describe(second, "lab_x").declaration("bounds", {}) == (0.5, 3.0)


def test_an_alias_of_a_wrapper_is_a_generator_function() -> None:
    """pluggy takes a wrapper by its kind of function: a plain closure would not be one."""

    def mine(advantages: Any, *, c: float = 3.0) -> Any:
        """Mine."""
        gain = yield
        return c * gain

    other = alias(surrogate(wrapper=True)(mine), "five", "Five.", c=5.0)
    assert inspect.isgeneratorfunction(other)
    running = other(torch.ones(()))
    next(running)
    with pytest.raises(StopIteration) as end:
        running.send(torch.tensor(2.0))
    assert float(end.value.value) == 10.0  # 5 * 2


@pytest.mark.parametrize("given", ["tua", "ratio", "credit"])
def test_an_alias_settles_only_parameters(given: str) -> None:
    """Neither a slip, nor an input, nor an option of the slot: the name is in the error."""

    def mine(ratio: Any, *, tau: float = 2.0) -> Any: ...

    with pytest.raises(LabError, match=rf"alias 'other': 'mine' has no parameter {given!r}"):
        alias(surrogate(mine), "other", "Other.", **{given: 1.0})


def test_an_alias_of_a_plain_function_is_refused() -> None:
    with pytest.raises(LabError, match="alias 'other': 'gate' is no component"):
        alias(gate, "other", "Other.")


def test_an_alias_of_another_plugins_component_is_not_lost(tmp_path: Path) -> None:
    """It carries the other plugin's module name, by which the shelf leaves imports out."""
    text = """
        from lab import alias
        from lab_grpo import group

        mine = alias(group, "mine", "Group without its std.", scale="none")
        """
    try:
        module = loaded(tmp_path, text)
    except LabError:
        return  # refusing it aloud is right as well
    assert [c.name for c in Shelf([module])] == ["mine"]
