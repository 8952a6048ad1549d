"""The tensors of a step by name: the vocabulary of the hooks as one typed mapping.

`complete` turns what a person gives into a step: shapes and precision checked, and what follows
from other tensors (lengths, truncation, the bootstrap, token rewards) filled in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from lab.errors import LabError, nearest
from lab.hookspecs import KINDS, StopReason
from lab.tools import at_last_token, masked_sum


class Step(TypedDict, total=False):
    """Every input that a hook may name. Shapes: [B,T] or [B], as in lab.hookspecs."""

    logp: Tensor
    old_logp: Tensor
    rollout_logp: Tensor
    ref_logp: Tensor
    ratio: Tensor
    surrogate: Tensor
    pull: Tensor
    share: Tensor
    kl: Tensor
    extra: Tensor
    advantages: Tensor
    returns: Tensor
    values: Tensor
    old_values: Tensor
    entropy: Tensor
    rewards: Tensor
    token_rewards: Tensor
    group: Tensor
    lengths: Tensor
    truncated: Tensor
    stop_reason: Tensor
    bootstrap: Tensor
    mask: Tensor
    counted: Tensor  # [B,T] the mask that shares count; no hook names it
    shaped_rewards: Tensor  # [B] the rewards that the advantages were made from; no hook names it
    budget: int
    interval: tuple[float | None, float | None]
    bounds: tuple[float | None, float | None]


#: What the core makes itself; a person gives the others.
MADE = ("ratio", "surrogate", "pull", "share", "kl", "extra", "interval", "bounds")
GIVEN = tuple(name for name in KINDS if name not in MADE)
AS_TENSOR = " (torch.as_tensor makes one)"
_SIZES = {"PerToken": 2, "PerRow": 1, "RowId": 1, "RowFlag": 1}
_FLOATS = (torch.float32, torch.float64)


def complete(given: Mapping[str, Any]) -> Step:
    """A step from what a person gives; None counts as not given.

    Raises:
        LabError: for an unknown name, a wrong shape or precision, or tensors that contradict each
            other. The line says which tensor, what it was and what was due.
    """
    tensors = {name: x for name, x in given.items() if x is not None}
    for name in tensors:
        if name in MADE:
            raise LabError(
                f"{name} is made by the recipe's components; give what they make it from"
            )
        if name not in GIVEN:
            raise LabError(
                f"no input {name!r}.{nearest(name, GIVEN)} The inputs are {', '.join(GIVEN)}"
            )
    for due in ("logp", "mask"):
        if due not in tensors:
            got = ", ".join(sorted(tensors)) or "nothing"
            raise LabError(f"{due} [B,T] was not given; got {got}")
        if not isinstance(tensors[due], Tensor):
            raise LabError(f"{due} is a {type(tensors[due]).__name__}; a tensor was due{AS_TENSOR}")
    logp = tensors["logp"]
    if logp.ndim != 2 or logp.dtype not in _FLOATS or not logp.shape[1]:
        raise LabError(f"logp is {_what(logp)}; [B,T] in float32 or float64 was due, T at least 1")
    step: Any = {name: _checked(name, x, logp) for name, x in tensors.items()}
    mask = step["mask"]
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise LabError("mask holds other values than 0 and 1")
    step.setdefault("lengths", mask.sum(1).long())
    _complete_stop(step)
    _complete_rewards(step)
    typed: Step = step
    return typed


def _checked(name: str, x: Any, logp: Tensor) -> Any:
    kind = KINDS[name]
    if kind == "int":
        if not isinstance(x, int) or isinstance(x, bool) or x < 1:
            raise LabError(f"{name} = {x!r}; a whole number of tokens, at least 1, was due")
        return x
    if not isinstance(x, Tensor):
        raise LabError(f"{name} is a {type(x).__name__}; a tensor was due{AS_TENSOR}")
    shape = logp.shape[: _SIZES[kind]]
    if x.shape != shape:
        letters = "[B,T]" if kind == "PerToken" else "[B]"
        raise LabError(f"{name} is {_what(x)}; {letters} = {list(shape)} was due, as logp has it")
    if kind in ("RowId", "RowFlag"):
        whole = not x.is_floating_point() and not x.is_complex()
        flag = x.dtype == torch.bool or (whole and bool(((x == 0) | (x == 1)).all()))
        if not (flag if kind == "RowFlag" else whole and x.dtype != torch.bool):
            raise LabError(
                f"{name} is {_what(x)}; {'bool' if kind == 'RowFlag' else 'int64'} was due"
            )
        return x.bool() if kind == "RowFlag" else x.long()
    if x.is_floating_point() and x.dtype != logp.dtype:
        raise LabError(
            f"{name} is {_what(x)} and logp {_what(logp)}; one precision was due (x.to(logp.dtype))"
        )
    return x if x.is_floating_point() else x.to(logp.dtype)


def _complete_stop(step: dict[str, Any]) -> None:
    """Truncation from the stop reason; the bootstrap is 0 where a row terminated."""
    if "stop_reason" in step:
        reason = step["stop_reason"]
        known = [int(r) for r in StopReason]
        if not bool(((reason >= min(known)) & (reason <= max(known))).all()):
            raise LabError(f"stop_reason holds other values than {known} (lab.StopReason)")
        cut = reason == StopReason.LENGTH
        if "truncated" in step and not torch.equal(cut, step["truncated"]):
            row = int((cut != step["truncated"]).nonzero()[0])
            raise LabError(f"truncated and stop_reason contradict each other in row {row}")
        step["truncated"] = cut
    if "truncated" not in step:
        return
    cut = step["truncated"]
    if "bootstrap" in step:
        # a terminated row has no future: its bootstrap is 0 whatever the critic says of the state
        step["bootstrap"] = torch.where(cut, step["bootstrap"], torch.zeros_like(step["bootstrap"]))
    elif not bool(cut.any()):
        step["bootstrap"] = torch.zeros(cut.shape, dtype=step["logp"].dtype, device=cut.device)


def _complete_rewards(step: dict[str, Any]) -> None:
    """Token rewards sum to the rewards; an outcome score lands on the last mask token."""
    mask = step["mask"]
    if "token_rewards" in step:
        total = masked_sum(step["token_rewards"], mask, 1)
        if "rewards" not in step:
            step["rewards"] = total
        close = torch.isclose(total, step["rewards"], rtol=1e-4, atol=1e-6, equal_nan=True)
        close |= mask.sum(1) == 0  # a row without tokens has nowhere to put its reward
        if not bool(close.all()):
            row = int((~close).nonzero()[0])
            raise LabError(
                f"token_rewards of row {row} sum to {float(total[row]):g} on its mask, "
                f"rewards say {float(step['rewards'][row]):g}"
            )
    elif "rewards" in step:
        step["token_rewards"] = at_last_token(step["rewards"], mask)


def _what(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
