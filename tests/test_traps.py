"""The traps of pluggy (DESIGN section 6), a test a row: its bare behaviour, and our answer."""

from __future__ import annotations

import functools
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pluggy
import pytest
from cases import bench
from torch import Tensor

from lab import hookspecs
from lab.binding import Moment, implement
from lab.errors import LabError
from lab.hooks import aggregate, extra_loss, surrogate
from lab.hookspecs import hookimpl
from lab.shelf import Shelf, load_file
from lab.wiring import wire


def bare() -> pluggy.PluginManager:
    """pluggy over our hooks, with nothing of ours around it."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def plugin(module: str, **attributes: Any) -> Any:
    return SimpleNamespace(__name__=module, **attributes)


def module(folder: Path, name: str, text: str) -> ModuleType:
    file = folder / f"{name}.py"
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    return load_file(file)


NUMBERS = {"mask": 3.0, "group": 0, "budget": 1}


def test_an_input_with_a_default_depends_on_pluggys_version() -> None:
    """Filled or left at its default: 1.6 and 1.7 compute different objectives, in silence."""

    def weigh(mask: float, budget: int = 7) -> float:
        return mask * budget

    manager = bare()
    manager.register(plugin("x", aggregate=hookimpl(specname="aggregate")(weigh)))
    newer = tuple(map(int, pluggy.__version__.split(".")[:2])) >= (1, 7)
    assert manager.hook.aggregate(**NUMBERS) == (3.0 if newer else 21.0)

    def mine(mask: Tensor, budget: int = 7) -> Tensor:
        """Mine."""
        return mask * budget

    line = "lab_x: mine: 'budget' has a default but is not keyword-only; put hyperparameters after"
    with pytest.raises(LabError, match=line):
        Shelf([plugin("lab_x", mine=aggregate(mine))])


def test_a_forgotten_return_falls_through_to_another_implementation() -> None:
    def old(mask: float) -> float:
        return mask

    def forgetful(mask: float) -> None:
        mask * 2

    manager = bare()
    for name, f in (("old", old), ("forgetful", forgetful)):
        manager.register(plugin(name, aggregate=hookimpl(specname="aggregate")(f)), name)
    assert manager.hook.aggregate(**NUMBERS) == 3.0  # not an error, and not the last one's either

    def mine(ratio: Tensor, advantages: Tensor) -> None:
        """Mine."""
        ratio * advantages

    shelf = Shelf.installed([plugin("lab_x", mine=surrogate(mine))])
    with pytest.raises(LabError, match=r"surrogate 'mine' returned nothing; is there a `return`\?"):
        bench(shelf, surrogate="mine")


def test_a_wrapper_that_forgets_its_return_gives_none_to_the_caller() -> None:
    def inner(mask: float) -> float:
        return mask

    def around(mask: float) -> Iterator[None]:
        yield

    manager = bare()
    manager.register(plugin("x", aggregate=hookimpl(specname="aggregate")(inner)))
    manager.register(plugin("y", aggregate=hookimpl(specname="aggregate", wrapper=True)(around)))
    assert manager.hook.aggregate(**NUMBERS) is None

    def mine(ratio: Tensor) -> Iterator[None]:
        """Mine."""
        yield

    shelf = Shelf.installed([plugin("lab_x", mine=surrogate(wrapper=True)(mine))])
    with pytest.raises(LabError, match=r"wrap 'mine' returned nothing; is there a `return`\?"):
        bench(shelf, wrap=["mine"])


def test_of_two_implementations_the_last_registered_wins() -> None:
    def called(name: str) -> Any:
        def weigh(mask: float) -> str:
            return name

        return hookimpl(specname="aggregate")(weigh)

    manager = bare()
    for name in ("one", "two"):
        manager.register(plugin(name, aggregate=called(name)), name)
    assert manager.hook.aggregate(**NUMBERS) == "two"

    def component(text: str) -> Any:
        def mine(ratio: Tensor) -> Tensor: ...

        mine.__doc__ = text
        return surrogate(mine)

    line = "surrogate 'mine' is offered twice: by lab_x and by lab_y"
    shelf = Shelf([plugin("lab_x", mine=component("One."))])
    with pytest.raises(LabError, match=line):
        shelf.add(plugin("lab_y", mine=component("Two.")))
    with pytest.raises(LabError, match=line):
        shelf.find("surrogate", "mine")


def test_the_bench_binds_one_implementation_per_hook(shelf: Shelf) -> None:
    """Also where the recipe lists several: their sum, their conjunction, their chain is one."""

    def mine(logp: Tensor) -> Tensor:
        """Mine."""
        return logp

    found = bench(
        Shelf.installed([plugin("lab_x", mine=extra_loss(mine))]),
        extra=["entropy", "mine"],
        filter=["overlong", "zero_variance"],
        shape=["no_eos_penalty", "soft_overlong"],
        wrap=["dual_clip", "token_tis"],
    )
    hooks = wire(found.bound, found.now)
    for hook in hookspecs.TENSOR_HOOKS:
        impls = getattr(hooks, hook).get_hookimpls()
        assert len([i for i in impls if not i.wrapper]) == (1 if found.get(hook) else 0), hook
        assert len([i for i in impls if i.wrapper]) == (2 if hook == "surrogate" else 0), hook


def test_a_misspelt_hook_registers_and_is_never_called() -> None:
    called = []

    def agregate(mask: float) -> float:
        called.append(mask)
        return mask

    manager = bare()
    manager.register(plugin("x", agregate=hookimpl(agregate)))
    assert manager.hook.aggregate(**NUMBERS) is None
    assert called == []
    with pytest.raises(pluggy.PluginValidationError, match="unknown hook 'agregate'"):
        manager.check_pending()
    with pytest.raises(LabError, match="lab_x: unknown hook 'agregate'"):
        Shelf([plugin("lab_x", agregate=hookimpl(agregate))])


def test_an_imported_component_is_registered_twice(tmp_path: Path) -> None:
    text = '''
        from lab import aggregate

        @aggregate
        def mine(mask):
            """Mine."""
            return mask
        '''
    first = module(tmp_path, "first", text)
    second = module(tmp_path, "second", "from lab_file_first import mine\n")
    manager = bare()
    manager.register(first)
    manager.register(second)
    assert len(manager.hook.aggregate.get_hookimpls()) == 2
    third = module(tmp_path, "third", "from lab_file_first import mine\n" + textwrap.dedent(
        text.replace("def mine", "def other")
    ))  # fmt: skip
    shelf = Shelf([first, third])
    assert sorted((c.name, c.plugin) for c in shelf) == [
        ("mine", "lab_file_first"),
        ("other", "lab_file_third"),
    ]


def test_a_partial_is_not_found() -> None:
    def weigh(mask: float, by: float) -> float:
        return mask * by

    bound = functools.partial(weigh, by=2.0)
    manager = bare()
    manager.register(plugin("x", aggregate=hookimpl(specname="aggregate")(bound)))
    assert manager.hook.aggregate.get_hookimpls() == []
    assert manager.hook.aggregate(**NUMBERS) is None


@pytest.mark.parametrize(
    ("slot", "name", "hook"),
    [("aggregate", "constant", "aggregate"), ("wrap", "dual_clip", "surrogate")],
)
def test_a_bound_component_is_found_and_a_wrappers_closure_is_a_generator(
    shelf: Shelf, slot: str, name: str, hook: str
) -> None:
    """A closure that is no generator function would be called in the wrapped one's place."""
    spec = {slot: [{"name": name, "c": 2.0}] if slot == "wrap" else {"name": name, "length": 4}}
    bound = [b for b in bench(shelf, **spec).bound if b.component.name == name]
    implementation: Any = implement(bound, Moment())
    manager = bare()
    manager.register(implementation)
    (found,) = getattr(manager.hook, hook).get_hookimpls()
    assert found.wrapper == (slot == "wrap")
    assert inspect.isgeneratorfunction(found.function) == (slot == "wrap")
    assert found.argnames == bound[0].component.inputs  # by which pluggy fills it


BROKEN = {
    "ImportError": ("import no_such_module_here", ModuleNotFoundError),
    "SystemExit": ("raise SystemExit(3)", SystemExit),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_one_plugin_that_fails_ends_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    text, raised = BROKEN[kind]
    name = f"lab_trap_{kind.lower()}"
    (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    info = tmp_path / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{hookspecs.ENTRY_POINTS}]\n{name} = {name}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(raised):
        bare().load_setuptools_entrypoints(hookspecs.ENTRY_POINTS)
    assert name not in sys.modules
    shelf = Shelf.installed()
    assert list(shelf.broken) == [name]
    assert shelf.find("surrogate", "cispo")
    with pytest.raises(LabError, match=rf"(?s)no surrogate 'theirs'.*not loaded: {name}: .*"):
        shelf.find("surrogate", "theirs")
