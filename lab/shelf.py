"""The shelf: everything that is installed, by hook and name. It is read, never called in a run.

Plugins are found by entry point or given as a file. A plugin that cannot be loaded takes no other
down: it is listed with its reason, and the reason is raised when a recipe asks for something that
is not there.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import pluggy

from lab import hookspecs
from lab.component import Component, describe
from lab.errors import LabError, nearest, one_of
from lab.hooks import MARK
from lab.hookspecs import ENTRY_POINTS, NAMED_DATA, PROJECT

#: What may be given as a plugin: a file, a module, or any object whose attributes are components.
Plugin: TypeAlias = str | Path | ModuleType | object


class _Manager(pluggy.PluginManager):
    """Sees only what the plugin itself defines: what it imported is another plugin's."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        opts = super().parse_hookimpl_opts(plugin, name)
        defined_in = getattr(getattr(plugin, name, None), "__module__", None)
        if opts and isinstance(plugin, ModuleType) and defined_in != plugin.__name__:
            return None
        return opts


class Shelf:
    """Every component, recipe and task at hand.

    Attributes:
        broken: plugin -> why it could not be loaded.
    """

    def __init__(self, plugins: Iterable[Plugin] = ()) -> None:
        self._manager = _Manager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._components: dict[tuple[str, str], Component] = {}
        self._named: dict[str, dict[str, tuple[Any, str]]] = {kind: {} for kind in NAMED_DATA}
        self._clashes: dict[tuple[str, str], str] = {}
        self.broken: dict[str, str] = {}
        for plugin in plugins:
            self.add(plugin)

    @classmethod
    def installed(cls, plugins: Iterable[Plugin] = ()) -> Shelf:
        """All plugins of the entry-point group `lab.plugins`, and further ones, files for example.

        Raises:
            LabError: if one of the further ones cannot be used. An installed one that cannot is
                kept in `broken`.
        """
        shelf = cls()
        for entry in sorted(entry_points(group=ENTRY_POINTS), key=_built_ins_first):
            try:
                shelf.add(entry.load(), entry.value)
            except KeyboardInterrupt:
                raise
            except BaseException as e:  # also SystemExit: one plugin must not end the program
                shelf.broken[entry.value] = str(e) if isinstance(e, LabError) else _one_line(e)
        for plugin in plugins:
            shelf.add(plugin)
        return shelf

    def add(self, plugin: Plugin, name: str = "") -> None:
        """Put a plugin on the shelf, whole or not at all.

        Raises:
            LabError: if it cannot be imported, a component is not valid, or a name is taken.
        """
        if isinstance(plugin, str | Path):
            name, plugin = Path(plugin).name, load_file(Path(plugin))
        elif hasattr(plugin, MARK):  # a component alone, as in a notebook
            name = f"{getattr(plugin, '__module__', '')}.{getattr(plugin, '__name__', '')}"
            plugin = SimpleNamespace(component=plugin)
        name = name or str(getattr(plugin, "__name__", type(plugin).__name__))
        if plugin is None:
            raise LabError("NoneType offers no component, recipe or task")
        found = [describe(f, name) for f in _marked(plugin)]
        self._register(plugin, name)
        try:
            self._take(plugin, name, found)
        except BaseException:
            self._manager.unregister(plugin)
            raise

    def _register(self, plugin: object, name: str) -> None:
        if self._manager.has_plugin(name):
            raise LabError(f"plugin {name} is given twice")
        try:
            self._manager.register(plugin, name=name)
        except (pluggy.PluginValidationError, ValueError) as e:
            if self._manager.has_plugin(name):
                self._manager.unregister(plugin)
            raise LabError(f"{name}: {str(e).splitlines()[-1].strip()}") from e
        # a misspelt hook registers and is never called; pluggy's check_pending() says so less well
        callers = self._manager.get_hookcallers(plugin) or []
        unknown = next((c.name for c in callers if not c.has_spec()), None)
        if unknown is not None:
            self._manager.unregister(plugin)
            raise LabError(f"{name}: unknown hook {unknown!r}.{nearest(unknown, hookspecs.SPECS)}")
        impls = [(c.name, i) for c in callers for i in c.get_hookimpls() if i.plugin is plugin]
        bare = next(
            (h for h, i in impls if h not in NAMED_DATA and not hasattr(i.function, MARK)), None
        )
        if bare is not None:
            self._manager.unregister(plugin)
            raise LabError(f"{name}: a bare hookimpl on {bare}; use the decorator @{bare} of lab")
        if not impls:
            self._manager.unregister(plugin)
            raise LabError(f"{name} offers no component, recipe or task; is a decorator missing?")

    def _take(self, plugin: object, name: str, found: list[Component]) -> None:
        fresh: dict[tuple[str, str], Component] = {}
        for c in found:
            key = ("wrap" if c.declared.wrapper else c.hook, c.name)
            other = self._components.get(key) or fresh.get(key)
            self._refuse_taken(key, other.plugin if other else None, name)
            fresh[key] = c
        data = [(kind, *row) for kind in NAMED_DATA for row in self._data(plugin, kind, name)]
        for kind, key_name, _ in data:
            _, owner = self._named[kind].get(key_name, (None, None))
            self._refuse_taken((kind.removesuffix("s"), key_name), owner, name)
        self._components |= fresh
        for kind, key_name, value in data:
            self._named[kind][key_name] = (value, name)

    def _data(self, plugin: object, kind: str, name: str) -> list[tuple[str, Any]]:
        rows: list[tuple[str, Any]] = []
        for impl in getattr(self._manager.hook, kind).get_hookimpls():
            if impl.plugin is not plugin:
                continue
            try:
                given = impl.function()
            except Exception as e:
                raise LabError(f"{name}: {kind} raised {_one_line(e)}") from e
            if not isinstance(given, Mapping):
                raise LabError(
                    f"{name}: {kind} returned {type(given).__name__} where a mapping was due"
                )
            for key, value in given.items():
                if not isinstance(key, str) or (
                    kind == "recipes" and not isinstance(value, Mapping)
                ):
                    raise LabError(
                        f"{name}: {kind}: {key!r}: {value!r}; a name and a table were due"
                    )
                rows.append((key, value))
        return rows

    def _refuse_taken(self, key: tuple[str, str], other: str | None, name: str) -> None:
        if other is not None:
            message = f"{key[0]} {key[1]!r} is offered twice: by {other} and by {name}"
            self._clashes[key] = message
            raise LabError(message)

    def __iter__(self) -> Iterator[Component]:
        slots, hooks = [*hookspecs.SLOTS, "observe"], list(hookspecs.COMPONENT_HOOKS)
        return iter(
            sorted(
                self._components.values(),
                key=lambda c: (slots.index(c.slot), c.name, hooks.index(c.hook)),
            )
        )

    def find(self, slot: str, name: str) -> tuple[Component, ...]:
        """The component of that name in that slot; two when a `kl` name stands on both hooks.

        Raises:
            LabError: if there is none (with the nearest name), or two plugins offer it.
        """
        hooks = hookspecs.SLOTS[slot].hooks if slot in hookspecs.SLOTS else (slot,)
        hooks = hooks or (slot,)  # "wrap" and "observe" are slots without a hook of their own
        for hook in hooks:
            if (hook, name) in self._clashes:
                raise LabError(self._clashes[hook, name])
        found = tuple(self._components[h, name] for h in hooks if (h, name) in self._components)
        if not found:
            raise self._missing(slot, name, [n for h, n in self._components if h in hooks])
        if len({c.plugin for c in found}) > 1 or any(c.params != found[0].params for c in found):
            origins = " and ".join(sorted(f"{c.plugin} ({c.hook})" for c in found))
            raise LabError(
                f"{slot} {name!r} stands on two hooks, by {origins}: "
                "that takes one plugin and equal parameters"
            )
        return found

    def names(self, kind: str) -> dict[str, Any]:
        """The named recipes, tasks or executors."""
        return {name: value for name, (value, _) in sorted(self._named[kind].items())}

    def recipe(self, name: str) -> Mapping[str, Any]:
        """A named recipe as data.

        Raises:
            LabError: if there is none (with the nearest name), or two plugins offer it.
        """
        if ("recipe", name) in self._clashes:
            raise LabError(self._clashes["recipe", name])
        if name not in self._named["recipes"]:
            raise self._missing("recipe", name, self._named["recipes"])
        found: Mapping[str, Any] = self._named["recipes"][name][0]
        return found

    def plugin_of(self, kind: str, name: str) -> str:
        """The plugin that offers a named recipe, task or executor."""
        return self._named[kind][name][1]

    def _missing(self, slot: str, name: str, names: Iterable[str]) -> LabError:
        names = list(names)
        broken = "".join(f"\n  not loaded: {p}: {why}" for p, why in self.broken.items())
        return LabError(
            f"no {slot} {name!r}.{nearest(name, names)} Available: {one_of(set(names))}{broken}"
        )


def _marked(plugin: object) -> list[Any]:
    """The components that a plugin defines; a module's imports are another plugin's."""
    every = [getattr(plugin, n, None) for n in dir(plugin) if not n.startswith("__")]
    own = plugin.__name__ if isinstance(plugin, ModuleType) else None
    return [f for f in every if hasattr(f, MARK) and own in (None, f.__module__)]


@functools.cache
def installed() -> Shelf:
    """The installed plugins, read once per process."""
    return Shelf.installed()


def load_file(path: Path) -> ModuleType:
    """The module of a plugin file, under a name of its own (`lab_file_idea` for idea.py).

    Raises:
        LabError: if it is no Python file or fails while it is imported, with file and line.
    """
    if not path.is_file() or path.suffix != ".py":
        raise LabError(f"--plugin {path}: no such Python file")
    shown, path = path, path.resolve()
    name = f"lab_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LabError(f"--plugin {shown}: it cannot be read as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # compiled here: a cached bytecode file would be taken for a file edited within its second
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        del sys.modules[name]
        raise LabError(
            f"--plugin {path}: {e if isinstance(e, LabError) else _one_line(e, path)}"
        ) from e
    return module


def _built_ins_first(entry: EntryPoint) -> tuple[bool, str]:
    own = entry.dist is not None and entry.dist.name == "policy-gradient-lab"
    return not own, entry.value


def _one_line(e: BaseException, path: Path | None = None) -> str:
    line, trace = None, e.__traceback__
    while trace is not None:
        if path is not None and trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    text = " ".join(str(e).split())
    return f"{type(e).__name__}: {text}" + (f" (line {line})" if line else "")
