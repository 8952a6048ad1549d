"""Changes over a recipe's table: one rule for a base, a study's overrides and ``--set``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, TypeAlias

from lab.errors import LabError, nearest, one_of
from lab.hookspecs import SLOTS

Spec: TypeAlias = dict[str, Any]
_KEYS = (*SLOTS, "loop", "length_weighted", "doc", "source", "base")


def merge(spec: Mapping[str, Any], changes: Mapping[str, Any], where: str) -> Spec:
    """A recipe's table with changes over it.

    ``{"surrogate": "sapo"}`` and ``{"surrogate": {"name": "sapo"}}`` replace the component,
    ``{"surrogate": {"cap": 3}}`` changes its parameter, ``{"wrap": {"dual_clip": {"c": 2}}}`` that
    of a list's entry, ``"none"`` empties a slot. The source of what is changed goes with it.
    """
    out: Spec = deepcopy(dict(spec))
    for key, value in changes.items():
        if key not in _KEYS:
            raise LabError(
                f"{where}: unknown slot {key!r}.{nearest(key, _KEYS)} "
                f"A recipe has {', '.join(_KEYS)}; a parameter reads SLOT.NAME, "
                "a setting of the loop loop.NAME"
            )
        if key in ("loop", "source"):
            if not isinstance(value, Mapping):
                raise LabError(f"{where}: {key} is a table, got {value!r}")
            out[key] = {**out.get(key, {}), **value}
        elif key not in SLOTS:
            out[key] = value
        elif SLOTS[key].many:
            out[key] = _merge_list(out.get(key, []), key, value, where)
        else:
            out[key] = _merge_one(out.get(key), key, value, where)
    changed = {path for path in _paths(changes) if not path.startswith("source.")}
    stale = [p for p in out.get("source", {}) if p not in changes.get("source", {})]
    gone = {p for p in stale if any(p == c or p.startswith(f"{c}.") for c in changed)}
    if gone:
        out["source"] = {p: s for p, s in out["source"].items() if p not in gone}
    return out


def parse_set(text: str) -> Spec:
    """``a.b=value`` as nested tables; the value is TOML, or else a word.

    Raises:
        LabError: if there is no ``=``, or a value begins like TOML and is none.
    """
    path, equals, value = text.partition("=")
    if "\n" in value:  # tomllib would read on, and further keys would be lost
        raise LabError(f"--set {text!r}: the value is neither a TOML value nor a word")
    keys = path.strip().split(".")
    if not equals or not all(re.fullmatch(r"[\w+:-]+", k) for k in keys):
        raise LabError(f"--set {text}: it reads PATH=VALUE, for example surrogate.cap=3")
    try:
        parsed = tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        parsed = _number_or_word(value.strip())
        if isinstance(parsed, str) and not re.fullmatch(r"[\w.+:/~-]+", parsed):
            raise LabError(f"--set {text}: {value!r} is neither a TOML value nor a word") from None
    for key in reversed(keys):
        parsed = {key: parsed}
    return dict(parsed)


def _number_or_word(text: str) -> float | str:
    try:
        return float(text)  # .5 is no TOML, and what a person types
    except ValueError:
        return text


def _merge_one(old: Any, slot: str, value: Any, where: str) -> Any:
    if value is None:  # emptied by a merge before this one
        return None
    if isinstance(value, str):
        return {"name": value} if value != "none" or slot == "ratio" else None
    if not isinstance(value, Mapping):
        raise LabError(
            f"{where}: {slot} = {value!r}; it takes a name or a table {{name = ..., ...}}"
        )
    if "name" in value:
        empty = value["name"] == "none" and slot != "ratio"
        return None if empty else dict(value)
    if not old:
        raise LabError(
            f"{where}: {slot} names no component, and there is none to change; give name = ..."
        )
    return {**old, **value}


def _merge_list(old: list[Spec], slot: str, value: Any, where: str) -> list[Spec]:
    if isinstance(value, str):
        return [] if value == "none" else [{"name": value}]
    if isinstance(value, list | tuple):
        entries = [{"name": v} if isinstance(v, str) else v for v in value]
        for entry in entries:
            if not isinstance(entry, Mapping) or "name" not in entry:
                raise LabError(
                    f"{where}: {slot} holds {entry!r}; each entry is a name or a table with one"
                )
        names = [e["name"] for e in entries]
        twice = next((n for n in names if names.count(n) > 1), None)
        if twice:
            raise LabError(f"{where}: {slot} lists {twice!r} twice")
        return [dict(e) for e in entries]
    if not isinstance(value, Mapping):
        raise LabError(f"{where}: {slot} = {value!r}; it takes a list of names or tables")
    if "name" in value:
        return [dict(value)]
    out = [dict(e) for e in old]
    for name, settings in value.items():
        entry = next((e for e in out if e["name"] == name), None)
        if entry is None or not isinstance(settings, Mapping):
            listed = [e["name"] for e in out]
            raise LabError(
                f"{where}: {slot} has no entry {name!r}.{nearest(name, listed)} "
                f"It lists {one_of(listed)}"
            )
        entry.update(settings)
    return out


def _paths(changes: Mapping[str, Any]) -> Iterator[str]:
    """The dotted paths that a change settles; naming a component settles all below it."""
    for key, value in changes.items():
        if isinstance(value, Mapping) and "name" not in value:
            yield from (f"{key}.{below}" for below in _paths(value))
        else:
            yield key
