"""What `lab plugins`, `lab recipes` and `lab sanity` print."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.bench import Bench
from lab.binding import Bound
from lab.component import REQUIRED, Component
from lab.errors import LabError
from lab.hookspecs import SLOTS
from lab.loss import pull_curve
from lab.recipe import Recipe
from lab.sanity import Stage
from lab.shelf import Shelf

RATIOS = (0.5, 0.8, 1.0, 1.1, 1.28, 1.5, 2.0, 6.0, 10.0)


def plugins_text(shelf: Shelf) -> str:
    """Components by slot with their parameters, the recipes, what could not be loaded."""
    parts: list[Any] = []
    components = list(shelf)
    for slot in dict.fromkeys(c.slot for c in components):
        table = names_table()
        for c in (c for c in components if c.slot == slot):
            table.add_row(f"  {c.name}", "\n".join([c.doc, *_parameters(c)]), c.plugin)
        parts += [_heading(slot, SLOTS[slot].hooks if slot in SLOTS else ()), table, ""]
    table = names_table()
    for name in shelf.names("recipes"):
        table.add_row(f"  {name}", _doc(shelf, name), shelf.plugin_of("recipes", name))
    parts += ["recipes", table]
    if shelf.broken:
        table = names_table()
        for plugin, why in shelf.broken.items():
            table.add_row(f"  {plugin}", why, "")
        parts += ["", "not loaded", table]
    return render(parts)


def plugins_json(shelf: Shelf) -> str:
    """The same for machines."""
    rows = [
        {
            "slot": c.slot,
            "hook": c.hook,
            "name": c.name,
            "doc": c.doc,
            "inputs": c.inputs,
            "parameters": {
                n: {"type": str(p), "default": None if p.default is REQUIRED else p.default}
                for n, p in c.params.items()
            },
            "plugin": c.plugin,
        }
        for c in shelf
    ]
    recipes = {n: _doc(shelf, n) for n in shelf.names("recipes")}
    return json_text({"components": rows, "recipes": recipes, "not_loaded": shelf.broken})


def recipes_text(shelf: Shelf) -> str:
    """The recipes, one a row, with the components of their main slots."""
    table = names_table()
    for name, spec in shelf.names("recipes").items():
        try:
            recipe = Recipe.of(spec, name, shelf)
        except LabError as e:  # one bad recipe of a package does not end the listing
            table.add_row(name, f"not valid: {e}", shelf.plugin_of("recipes", name))
            continue
        main = [recipe.advantage, recipe.ratio, recipe.surrogate, recipe.aggregate]
        names = " · ".join(u.name if u else "token" for u in main)
        table.add_row(name, f"{recipe.doc}\n{names}", shelf.plugin_of("recipes", name))
    return render(["advantage · ratio · surrogate · aggregate of each recipe:", "", table])


def recipes_json(shelf: Shelf) -> str:
    """Every recipe in full, for machines."""
    every: dict[str, Any] = {}
    for name, spec in shelf.names("recipes").items():
        try:
            every[name] = Recipe.of(spec, name, shelf).spec()
        except LabError as e:
            every[name] = {"not_valid": str(e)}
    return json_text(every)


def recipe_text(bench: Bench) -> str:
    """One recipe: every constant with its value and source, what it needs, its pulls."""
    recipe = bench.recipe
    source = [f"source: {recipe.source['recipe']}"] if "recipe" in recipe.source else []
    parts: list[Any] = [f"{recipe.name}: {recipe.doc}".rstrip(": "), *source, ""]
    for b in bench.bound:
        head, constants = columns(2), columns(3)
        head.add_row(b.slot, f"{b.component.name}: {b.component.doc}")
        for name, value in {**b.values, **b.options}.items():
            constants.add_row("", f"{name} = {value_text(value)}", _source(recipe, b, name))
        if b.options.get("when") == "before" and not _reads_tokens(bench):
            constants.add_row("", "", "the advantage reads the row's reward: the whole row pays")
        if b.component.hook == "kl_loss" and bench.get("kl_reward") and "beta" in b.values:
            constants.add_row("", f"2 beta = {2 * b.values['beta']:g}", "it stands on both hooks")
        parts += [head, *([constants] if constants.row_count else [])]
    loop = columns(3)
    for name, value in recipe.loop.model_dump().items():
        given = "given" if name in recipe.loop.model_fields_set else "the lab's default"
        why = recipe.source.get(f"loop.{name}", given)
        loop.add_row("", f"{name} = {value_text(value)}", why)
    low, high = (value_text(x) for x in bench.interval)
    roles = [
        *(["a critic"] if bench.has_critic else []),
        *(["a reference"] if bench.has_reference else []),
    ]
    parts += [
        "loop",
        loop,
        "",
        f"{'a' if bench.get('ratio') else 'the token'} ratio counts as inside in [{low}, {high}]",
        f"roles beside the policy: {', '.join(roles) or 'none'}",
        "",
        "pull of one token, by its ratio:",
        _pulls(bench),
    ]
    return render(parts)


def recipe_json(bench: Bench) -> str:
    """One recipe with everything filled in, for machines."""
    return json_text({**bench.recipe.spec(), **bench.record()})


def stage_text(stage: Stage) -> str:
    """A sanity stage: what it computed, then what did not hold."""
    verdict = "FAILED" if stage.failures else "ok"
    lines = [f"{stage.name}: {stage.title} ... {verdict}", *(f"  {line}" for line in stage.lines)]
    return "\n".join([*lines, *(f"  ! {failure}" for failure in stage.failures), ""])


def json_text(data: Any) -> str:
    """JSON that any reader takes: a number that is not finite is a word."""
    return json.dumps(_plain(data), indent=2, allow_nan=False)


def _plain(x: Any) -> Any:
    """What JSON can say: a number that is not finite, or another object, as text."""
    if isinstance(x, Mapping):
        return {str(k): _plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(v) for v in x]
    if x is None or isinstance(x, str | bool | int) or (isinstance(x, float) and math.isfinite(x)):
        return x
    return str(x)


def _pulls(bench: Bench) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for heading in ("ratio", "A = +1", "A = -1"):
        table.add_column(heading, justify="right")
    curves = (pull_curve(bench, RATIOS, 1.0), pull_curve(bench, RATIOS, -1.0))
    for r, up, down in zip(RATIOS, *curves, strict=True):
        table.add_row(f"{r:g}", f"{up + 0.0:.4g}", f"{down + 0.0:.4g}")
    return table


def _parameters(c: Component) -> list[str]:
    out = []
    for name, p in c.params.items():
        default = "" if p.default is REQUIRED else f" = {value_text(p.default)}"
        space = f" in {p.space}" if p.space else ""
        out.append(f"  {name}{default}{space}")
    return out


def _source(recipe: Recipe, b: Bound, name: str) -> str:
    path = f"{b.slot}.{b.component.name}" if SLOTS[b.slot].many else b.slot
    found = recipe.source.get(f"{path}.{name}")
    if found:
        return found
    value = getattr(recipe, b.slot)
    uses = value if SLOTS[b.slot].many else (value,)
    if any(u is not None and u.name == b.component.name and name in u.settings for u in uses):
        return "given"
    return "the slot's default" if name in b.options else "the component's default"


def _reads_tokens(bench: Bench) -> bool:
    return any("token_rewards" in b.component.inputs for b in bench.get("advantage"))


def _doc(shelf: Shelf, name: str) -> str:
    return str(shelf.recipe(name).get("doc", ""))


def value_text(x: Any) -> str:
    """A parameter as a person writes it."""
    if x is None:
        return "none"
    return f"{x:g}" if isinstance(x, float) else str(x).lower() if isinstance(x, bool) else str(x)


def _heading(slot: str, hooks: Iterable[str]) -> str:
    others = [h for h in hooks if h != slot]
    return f"{slot} ({', '.join(others)})" if others else slot


def names_table() -> Table:
    """Name, what it is, where it is from."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=3)
    table.add_column(ratio=1, justify="left", style="dim")
    return table


def columns(number: int) -> Table:
    """Two or three columns of narrow width."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    table.add_column(width=14)
    if number == 3:
        table.add_column(width=22, overflow="fold")
    table.add_column(ratio=1)
    return table


def render(parts: Iterable[Any]) -> str:
    """Text as wide as the terminal; 80 columns where there is none."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(width=80, highlight=False, markup=False, emoji=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
