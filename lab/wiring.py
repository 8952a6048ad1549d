"""From a recipe to hooks: entries resolved, defaults filled in, one implementation a hook."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pluggy

from lab import hookspecs
from lab.binding import Bound, Moment, implement, resolve
from lab.errors import LabError
from lab.hookspecs import PROJECT, SLOTS
from lab.recipe import Recipe, Use
from lab.shelf import Shelf

DEFAULT_RATIO = Use(name="token")
DEFAULT_TARGET = Use(name="raw_plus_values")
DEFAULT_CRITIC_LOSS = Use(name="squared")


def components(recipe: Recipe, shelf: Shelf) -> list[Bound]:
    """The recipe's components in the order of a run, and the defaults of what they read.

    A ratio that nobody names is left out, so it is never called; a critic's target and loss come in
    where a component names ``values``.
    """
    uses = {slot: [u for s, u in recipe.uses() if s == slot] for slot in SLOTS}
    bound = {s: [b for u in found for b in resolve(s, u, shelf)] for s, found in uses.items()}
    every = [b for found in bound.values() for b in found]
    on_surrogate = [b for b in every if b.component.hook == "surrogate"]
    reader = next((b for b in on_surrogate if "ratio" in b.component.inputs), None)
    if reader is None:
        bound["ratio"] = []
    elif recipe.ratio is None:
        bound["ratio"] = resolve("ratio", DEFAULT_RATIO, shelf)
    elif not bound["ratio"]:
        raise LabError(f"{reader.component} names ratio, but the recipe says ratio = 'none'")
    if any("values" in b.component.inputs for b in every):
        for slot, use in (("critic_target", DEFAULT_TARGET), ("critic_loss", DEFAULT_CRITIC_LOSS)):
            bound[slot] = bound[slot] or resolve(slot, use, shelf)
    return [b for slot in SLOTS for b in bound[slot]]


def own_aggregates(bound: Iterable[Bound], shelf: Shelf) -> dict[str, Bound]:
    """slot -> the aggregate that the slot (kl, extra) names for itself.

    Raises:
        LabError: if the entries of a list slot name different ones: their sum has one share.
    """
    named: dict[str, list[Any]] = {}
    for b in bound:
        if "aggregate" in b.options:
            named.setdefault(b.slot, []).append(b.options["aggregate"])
    own = {}
    for slot, given in named.items():
        if any(g != given[0] for g in given):
            raise LabError(
                f"{slot}: its entries share one aggregate; name the same for all, or none"
            )
        if given[0] is not None:
            own[slot] = resolve("aggregate", _as_use(given[0], slot), shelf)[0]
    return own


def _as_use(given: Any, slot: str) -> Use:
    spec = {"name": given} if isinstance(given, str) else given
    if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
        raise LabError(f"{slot}: aggregate = {given!r}; it takes a name or a table with one")
    return Use(name=spec["name"], settings={k: v for k, v in spec.items() if k != "name"})


def needs(bound: Iterable[Bound], anchor: str) -> frozenset[str]:
    """Every input that a component names; the anchor where it stands in for ``old_logp``."""
    named = {n for b in bound for n in b.component.inputs}
    return frozenset(named | {"rollout_logp"} if anchor == "rollout" else named)


def by_hook(bound: Iterable[Bound]) -> dict[str, list[Bound]]:
    """The components of each hook, wrappers included, in their order."""
    out: dict[str, list[Bound]] = {}
    for b in bound:
        out.setdefault(b.component.hook, []).append(b)
    return out


def wire(bound: Iterable[Bound], now: Moment) -> Any:
    """The hooks of a fresh manager: one implementation each, the wrappers around them."""
    bound = list(bound)
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    for hook, entries in by_hook(b for b in bound if b.slot != "wrap").items():
        manager.register(implement(entries, now), name=hook)
    for b in (b for b in bound if b.slot == "wrap"):  # pluggy: the last registered is outermost
        manager.register(implement([b], now), name=f"wrap.{b.component.name}")
    return manager.hook
