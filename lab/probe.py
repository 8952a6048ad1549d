"""The probe: each component is called once on a tiny batch when a bench is built.

Two groups of ragged rows with a gap, both signs, ratios from .3 to 3, a truncated row. It finds
what would otherwise surface in the middle of a run: an illegal parameter, a wrong shape, a missing
return or gradient, an edited input, a use of the global random generator.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.binding import Bound, Moment, single
from lab.errors import LabError
from lab.hookspecs import LIVE, StopReason
from lab.step import Step
from lab.tools import at_last_token
from lab.wiring import by_hook, wire

Call = Callable[..., Tensor]
WIDTH = 5  # odd, so that it never equals the even number of rows


def batch(group_size: int = 2, dtype: torch.dtype = torch.float32) -> Step:
    """The probe's tensors: two groups of `group_size` rows, every name of the vocabulary."""
    rows = 2 * group_size
    row = torch.arange(rows)
    cell = torch.arange(rows * WIDTH).reshape(rows, WIDTH)
    mask = (torch.arange(WIDTH) < 2 + (row % 4)[:, None]).to(dtype)
    mask[1, 1] = 0  # an observation between two tokens
    ratios = torch.tensor([0.3, 0.7, 1.0, 1.3, 3.0, 0.95, 1.15], dtype=dtype)[cell % 7]
    old = -0.5 - 0.1 * (cell % 11).to(dtype)
    rewards = torch.tensor([1.0, -0.5, 0.25, 0.0, 2.0], dtype=dtype)[row % 5]
    cut = row % 4 == 3
    wave = torch.tensor([1.0, -2.0, 0.5, -0.75, 1.5], dtype=dtype)[cell % 5]
    return Step(
        logp=old + ratios.log(),
        old_logp=old,
        rollout_logp=old - 0.02 * (cell % 3 - 1),
        ref_logp=old - 0.1 * (cell % 5 - 2),
        ratio=ratios,
        surrogate=ratios * wave,
        pull=ratios * wave,
        share=mask / mask.sum(),
        kl=0.01 * wave.abs(),
        extra=0.01 * wave,
        advantages=wave,
        returns=0.5 + 0.1 * wave,
        values=0.4 + 0.2 * wave,
        old_values=0.3 + 0.1 * wave,
        entropy=0.5 + 0.05 * (cell % 4).to(dtype),
        rewards=rewards,
        token_rewards=at_last_token(rewards, mask),
        group=7 - 4 * (row % 2),
        lengths=mask.sum(1).long(),
        truncated=cut,
        stop_reason=torch.where(cut, int(StopReason.LENGTH), int(StopReason.EOS)),
        bootstrap=torch.where(cut, 0.6, 0.0).to(dtype),
        mask=mask,
        budget=8,
        interval=(0.8, 1.2),
        bounds=(0.8, 1.2),
    )


def run(bound: Iterable[Bound], own: Iterable[Bound], call: Call, now: Moment) -> None:
    """Try each component alone, then each wrapper around what it wraps.

    Args:
        bound: the recipe's components.
        own: the aggregates that slots name for themselves.
        call: the bench's way to call a hook: (hook, step, hooks) -> result.
        now: what reserved keywords are filled from.

    Raises:
        LabError: naming the component and what is wrong with it.
    """
    bound = list(bound)
    rows = max([2, *(b.declares("needs_group") for b in bound)])
    for hook, entries in by_hook(bound).items():
        mains = [b for b in entries if b.slot != "wrap"]
        around = [b for b in entries if b.slot == "wrap"]
        if not mains:
            raise LabError(f"{around[0].component} wraps {hook}, and the recipe has none to wrap")
        parts = [[b] for b in mains]
        parts += [[*mains, *around[: n + 1]] for n in range(len(around))]
        for part in parts:  # the last of a part is new in it, so it is what has failed
            _try(hook, part, batch(rows), call, wire(part, now))
    for b in own:
        _try("aggregate", [b], batch(rows), call, wire([b], now))


def run_observers(observers: Iterable[Bound], now: Moment) -> None:
    """Call each observer on the probe's tensors.

    Raises:
        LabError: naming the observer and what is wrong with it.
    """
    for b in observers:
        given: Any = batch()
        with _no_draws(b):
            single(b, now)(*(given[n] for n in b.component.inputs))


def _try(hook: str, part: list[Bound], step: Step, call: Call, hooks: Any) -> None:
    culprit = part[-1]
    named = {n for b in part for n in b.component.inputs}
    live = [n for n in LIVE.get(hook, ()) if n in named]
    given: Any = {**step}
    leaves = [given[n].requires_grad_() for n in live]
    with _no_draws(culprit):
        result = call(hook, given, hooks)
    if result.is_floating_point() and not bool(result.isfinite().all()):
        raise LabError(f"{culprit.component} returned what is not finite on the probe batch")
    if hook in LIVE and all(g is None for g in _gradients(result, leaves)):
        through = f"through {' or '.join(live)}" if live else f"it names none of {LIVE[hook]}"
        raise LabError(
            f"{culprit.component}: no gradient flows ({through}); is something detached?"
        )


@contextmanager
def _no_draws(b: Bound) -> Iterator[None]:
    """The global generators stay as they were."""
    before = _generators()
    yield
    if _generators() != before:
        raise LabError(f"{b.component} draws from the global generator; name the keyword rng")


def _generators() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    numpy_state = (kind, np.asarray(keys).tobytes(), *rest)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy_state


def _gradients(result: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    if not result.requires_grad or not leaves:
        return []
    return list(torch.autograd.grad(result.sum(), leaves, allow_unused=True))
