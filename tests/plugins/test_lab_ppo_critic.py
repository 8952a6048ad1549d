"""The critic's losses: squared, and the value clip (ACCEPTANCE C17, N18).

V_old .5, R 1, c .2 throughout. `CRITICS` are wrong ones that the numbers are there to kill.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from cases import bench, f64
from hypothesis import given, settings
from lab_ppo import clipped

from lab import critic_loss
from lab.errors import LabError
from lab.loss import evaluate
from lab.shelf import Shelf

near = functools.partial(pytest.approx, rel=0, abs=1e-12)


@critic_loss
def clip_alone(values, old_values, returns, *, c=0.2):
    """Value clipping without the max."""
    return 0.5 * ((values - old_values).clamp(-c, c) + old_values - returns) ** 2


@critic_loss
def smaller_of_both(values, old_values, returns, *, c=0.2):
    """Min for max."""
    moved = (values - old_values).clamp(-c, c) + old_values
    return 0.5 * torch.minimum((values - returns) ** 2, (moved - returns) ** 2)


@critic_loss
def not_halved(values, old_values, returns, *, c=0.2):
    """The square without its half."""
    return 2 * clipped(values, old_values, returns, c=c)


@critic_loss
def around_the_target(values, returns, *, c=0.2):
    """The interval laid around R in place of V_old."""
    return 0.5 * (values - returns).clamp(-c, c) ** 2


CRITICS = (clip_alone, smaller_of_both, not_halved, around_the_target)


@pytest.fixture(scope="module")
def wrong() -> Shelf:
    return Shelf.installed(CRITICS)


def value_loss(shelf: Shelf, name: str, values: Any, old: float = 0.5, r: float = 1.0) -> Any:
    v = f64(*[[x] for x in values]).requires_grad_()
    spec = {"advantage": "gae", "critic_loss": {"name": name, "c": 0.2}}
    flat = torch.zeros_like(v)
    given = {"logp": flat, "old_logp": flat, "mask": flat + 1, "advantages": flat, "values": v}
    out = evaluate(bench(shelf, spec), **given, old_values=flat + old, returns=flat + r)
    (slope,) = torch.autograd.grad(out.critic_loss.sum(), v)
    return out.critic_loss.flatten().tolist(), slope.flatten().tolist()


#: C17, by hand: (.7 - 1)^2/2, (.2 - 1)^2/2, (.6 - 1)^2/2, (.7 - 1)^2/2; slope V - R or, held, 0.
C17 = (0.9, 0.2, 0.6, 1.2), ((0.045, 0.32, 0.08, 0.045), (0, 0.2 - 1, 0.6 - 1, 0))


def test_value_clip(shelf: Shelf) -> None:
    loss, slope = value_loss(shelf, "clipped", C17[0])
    assert loss == near(C17[1][0])
    assert slope == near(C17[1][1])
    loss, slope = value_loss(shelf, "clipped", (0.7, 0.3), old=0.5, r=0.0)
    assert loss == near((0.7**2 / 2, 0.3**2 / 2))


def test_the_value_clips_interval_is_closed() -> None:
    """C4's rule for ratios: on the bound a value is inside, so its slope is V - R, not a part."""
    v = f64([0.75, 0.25]).requires_grad_()  # .5 +- .25 is exact
    clipped(v, 0 * v.detach() + 0.5, f64([1, 0]), c=0.25).sum().backward()
    assert v.grad[0].tolist() == near((0.75 - 1, 0.25 - 0))


@pytest.mark.parametrize("mutant", [f.__name__ for f in CRITICS])
def test_value_clip_kills(wrong: Shelf, mutant: str) -> None:
    assert value_loss(wrong, mutant, C17[0])[0] != near(C17[1][0])


@settings(max_examples=40, deadline=None)
@given(*(st.floats(-3, 3) for _ in range(3)), st.floats(0.05, 0.5))
def test_value_clip_is_its_formula(v, old, r, c) -> None:
    held = min(max(v, old - c), old + c)
    want = max((v - r) ** 2, (held - r) ** 2) / 2
    assert float(clipped(f64([v]), f64([old]), f64([r]), c=c)) == near(want)


@pytest.mark.parametrize("c", [0.0, -0.2, math.nan])
def test_illegal_parameters(shelf: Shelf, c: float) -> None:
    with pytest.raises(LabError):
        bench(shelf, {"advantage": "gae", "critic_loss": {"name": "clipped", "c": c}})
