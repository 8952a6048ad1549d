"""The probe: each component is called once on a tiny batch when a bench is built.

Two groups of ragged rows with a gap, both signs, ratios from .3 to 3, a truncated row. It finds
what would otherwise surface in the middle of a run: an illegal parameter, a wrong shape, a missing
return or gradient, an edited input, a use of the global random generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lab.binding import Bound, Moment, single
from lab.errors import LabError
from lab.hookspecs import LIVE, StopReason
from lab.step import Step
from lab.tools import at_last_token
from lab.wiring import by_hook

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
        entropy=0.5 + 0.05 * (cell % 4),
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


def run(bound: Iterable[Bound], call: Call, own: Mapping[str, Any]) -> None:
    """Call each hook that has a component, and the aggregates that slots name for themselves.

    Raises:
        LabError: naming the component and what is wrong with it.
    """
    found = by_hook(bound)
    group_size = max([2, *(b.declares("needs_group") for b in bound)])
    for hook, entries in found.items():
        main = next((b for b in entries if b.slot != "wrap"), None)
        if main is None:
            raise LabError(f"{entries[0].component} wraps {hook}, and the recipe has none to wrap")
        _try(hook, main, batch(group_size), call)
    for hooks in own.values():
        call("aggregate", batch(group_size), hooks)


def run_observers(observers: Iterable[Bound], now: Moment) -> None:
    """Call each observer on the probe's tensors.

    Raises:
        LabError: naming the observer and what is wrong with it.
    """
    for b in observers:
        step = batch()
        given = _copy(step)
        with _untouched(b, step, given):
            single(b, now)(*(given[n] for n in b.component.inputs))


def _try(hook: str, main: Bound, step: Step, call: Call) -> None:
    live = [n for n in LIVE.get(hook, ()) if n in main.component.inputs]
    given = _copy(step)
    leaves = [given[n].requires_grad_() for n in live]
    with torch.enable_grad(), _untouched(main, step, given):
        result = call(hook, given)
    if result.is_floating_point() and not bool(result.isfinite().all()):
        raise LabError(f"{main.component} returned a number that is not finite on the probe batch")
    if hook in LIVE and all(g is None for g in _gradients(result, leaves)):
        named = f"through {' or '.join(live)}" if live else f"it names none of {LIVE[hook]}"
        raise LabError(f"{main.component}: no gradient flows ({named}); is something detached?")


def _copy(step: Step) -> Any:
    return {n: x.clone() if isinstance(x, Tensor) else x for n, x in step.items()}


@contextmanager
def _untouched(b: Bound, step: Step, given: Any) -> Iterator[None]:
    """The global generator and the inputs stay as they were."""
    generator = torch.get_rng_state()
    yield
    if not torch.equal(torch.get_rng_state(), generator):
        raise LabError(f"{b.component} draws from the global generator; name the keyword rng")
    for name, x in step.items():
        if isinstance(x, Tensor) and not torch.equal(given[name], x):
            raise LabError(f"{b.component} changes its input {name} in place")


def _gradients(result: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    if not result.requires_grad or not leaves:
        return []
    return list(torch.autograd.grad(result.sum(), leaves, allow_unused=True))
