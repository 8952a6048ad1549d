"""The policy-gradient lab: write a piece of an LLM policy-gradient objective, and see what it does.

Only the names that a plugin author imports; each is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lab.errors import LabError as LabError
    from lab.hooks import advantage as advantage
    from lab.hooks import aggregate as aggregate
    from lab.hooks import alias as alias
    from lab.hooks import critic_loss as critic_loss
    from lab.hooks import critic_target as critic_target
    from lab.hooks import executors as executors
    from lab.hooks import extra_loss as extra_loss
    from lab.hooks import keep as keep
    from lab.hooks import kl_loss as kl_loss
    from lab.hooks import kl_reward as kl_reward
    from lab.hooks import normalize as normalize
    from lab.hooks import observe as observe
    from lab.hooks import ratio as ratio
    from lab.hooks import recipes as recipes
    from lab.hooks import shape_reward as shape_reward
    from lab.hooks import surrogate as surrogate
    from lab.hooks import tasks as tasks
    from lab.hookspecs import StopReason as StopReason
    from lab.loss import evaluate as evaluate
    from lab.loss import load as load
    from lab.single import run as run
    from lab.spaces import Choice as Choice
    from lab.spaces import Float as Float
    from lab.spaces import Int as Int
    from lab.task import Example as Example
    from lab.task import Task as Task
    from lab.tools import at_last_token as at_last_token
    from lab.tools import group_mean as group_mean
    from lab.tools import group_std as group_std
    from lab.tools import masked_mean as masked_mean
    from lab.tools import masked_sum as masked_sum
    from lab.tools import masked_var as masked_var
    from lab.tools import sibling_mean as sibling_mean
    from lab.tools import spread as spread
    from lab.tools import to_go as to_go

_HOME = {
    "lab.errors": ("LabError",),
    "lab.hookspecs": ("StopReason",),
    "lab.spaces": ("Choice", "Float", "Int"),
    "lab.hooks": (
        *("keep", "shape_reward", "kl_reward", "advantage", "normalize", "critic_target", "ratio"),
        *("surrogate", "kl_loss", "extra_loss", "critic_loss", "aggregate", "observe"),
        *("recipes", "tasks", "executors", "alias"),
    ),
    "lab.tools": (
        *("masked_sum", "masked_mean", "masked_var", "group_mean", "group_std", "sibling_mean"),
        *("to_go", "at_last_token", "spread"),
    ),
    "lab.loss": ("evaluate", "load"),
    "lab.single": ("run",),
    "lab.task": ("Example", "Task"),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_WHERE)  # noqa: PLE0605  # the names of the table above


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'lab' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
