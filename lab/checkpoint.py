"""Checkpoints of a run: tensors as safetensors, the rest as JSON; no pickle.

Random streams are functions of (task, seed, purpose, step), so no generator has a state to save:
a resumed run continues bit for bit.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lab.errors import LabError
from lab.records import read_json, write_json
from lab.roles import Roles, Steps

FOLDER = "checkpoint"


def save(folder: Path, roles: Roles, state: Mapping[str, Any]) -> None:
    """Replace a run's checkpoint, whole or not at all.

    Args:
        folder: the run's.
        roles: weights, optimisers, past weights.
        state: counters, memory, what has been written: plain data.
    """
    fresh, old = folder / f".{FOLDER}.new", folder / f".{FOLDER}.old"
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir()
    save_file({n: x.contiguous() for n, x in _tensors(roles).items()}, fresh / "state.safetensors")
    write_json(fresh / "state.json", dict(state))
    place = folder / FOLDER
    if place.exists():
        place.rename(old)
    fresh.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def load(folder: Path, roles: Roles) -> dict[str, Any] | None:
    """Put a checkpoint's tensors into the roles; its plain data, or None where there is none.

    Raises:
        LabError: if it is another run's.
    """
    place = folder / FOLDER
    old = folder / f".{FOLDER}.old"
    if not place.is_dir() and old.is_dir():  # killed between the two renames
        old.rename(place)
    if not (place / "state.json").is_file():
        return None
    state: dict[str, Any] = read_json(place / "state.json")
    tensors = load_file(place / "state.safetensors")
    try:
        _restore(roles, tensors)
    except (KeyError, RuntimeError) as e:
        raise LabError(f"{place} is the checkpoint of another run: {e}") from None
    return state


def _modules(roles: Roles) -> dict[str, torch.nn.Module]:
    found = {
        "policy": roles.policy.model,
        "reference": roles.reference.model if roles.reference is not None else None,
        "critic": roles.critic,
        "head": roles.head,
    }
    return {n: m for n, m in found.items() if m is not None}


def _optimisers(roles: Roles) -> dict[str, Steps]:
    found = {"policy_steps": roles.policy_steps, "critic_steps": roles.critic_steps}
    return {n: s for n, s in found.items() if s is not None}


def _tensors(roles: Roles) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, module in _modules(roles).items():
        out |= {f"{name}.{n}": x.clone() for n, x in module.state_dict().items()}
    for age, weights in enumerate(roles.past):
        out |= {f"past.{age}.{n}": x for n, x in weights.items()}
    for name, steps in _optimisers(roles).items():
        for index, entries in steps.optimiser.state_dict()["state"].items():
            for key, x in entries.items():
                if x is not None:
                    out[f"{name}.{index}.{key}"] = torch.as_tensor(x).clone()
    return out


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}


def _restore(roles: Roles, tensors: Mapping[str, Tensor]) -> None:
    for name, module in _modules(roles).items():
        module.load_state_dict(_below(tensors, f"{name}."))
    ages = sorted({int(n.split(".")[1]) for n in tensors if n.startswith("past.")})
    roles.past = deque(_below(tensors, f"past.{age}.") for age in ages)
    for name, steps in _optimisers(roles).items():
        state: dict[int, dict[str, Tensor]] = {}
        for key, x in _below(tensors, f"{name}.").items():
            index, entry = key.split(".", 1)
            state.setdefault(int(index), {})[entry] = x
        whole = steps.optimiser.state_dict()
        steps.optimiser.load_state_dict({**whole, "state": state})
