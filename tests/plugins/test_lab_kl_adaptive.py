"""A beta that follows a target KL: N15 and K4, the memory it lives in, the loop's one call for it.

Only `bench.remember` moves beta, once per rollout; `evaluate` reads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import hypothesis.strategies as st
import lab_kl
import pytest
import torch
from cases import bench, f64, gradient, ragged
from hypothesis import given, settings
from torch import Tensor

from lab.bench import Bench
from lab.shelf import Shelf


def rollout(rows: int, kl: float, width: int = 3) -> dict[str, Tensor]:
    """Rows whose summed log-ratio to the reference is `kl`, one column of junk behind them."""
    mask = torch.ones(rows, width + 1).double()
    mask[:, -1] = 0
    old = torch.where(mask.bool(), -1.0, math.nan).double()
    return {"old_logp": old, "ref_logp": old - kl / width, "mask": mask}


def betas(spec: Bench, kls: list[float], rows: int) -> list[float]:
    out = []
    for kl in kls:
        spec.remember(rollout(rows, kl))
        out.append(next(iter(spec.now.memory.values()))["beta"])
    return out


@pytest.mark.parametrize("name", ["adaptive", "adaptive_in_loss"])
def test_n15_and_k4_numbers(shelf: Shelf, name: str) -> None:
    """Kills: an error that is not clipped, a gain without n/horizon, the wrong sign."""
    got = betas(bench(shelf, kl={"name": name, "beta": 0.2}), [9.0, 5.4], 1000)
    # 9/6 - 1 = .5, clipped .2: .2 (1 + .2 * .1); 5.4/6 - 1 = -.1: (1 - .1 * .1)
    assert got == pytest.approx([0.204, 0.204 * 0.99], abs=1e-12)
    assert got[1] == pytest.approx(0.20196, abs=1e-12)
    got = betas(bench(shelf, kl={"name": name}), [9.0, 3.0], 256)
    # .15 (1 + .2 * .0256), then 3/6 - 1 = -.5, clipped -.2
    assert got == pytest.approx([0.15 * 1.00512, 0.15 * 1.00512 * 0.99488], abs=1e-12)
    assert got == pytest.approx([0.150768, 0.149996], abs=5e-7)


def test_the_target_is_per_sequence_or_per_token(shelf: Shelf) -> None:
    """3 tokens of .1: .3 a row, .1 a token. Kills: one target for both (K5)."""
    for per, target in (("sequence", 0.3), ("token", 0.1)):
        kl = {"name": "adaptive", "per": per, "target": target, "beta": 0.1}
        assert betas(bench(shelf, kl=kl), [0.3], 100) == pytest.approx([0.1], abs=1e-12)
    off = {"name": "adaptive", "per": "token", "target": 0.3, "beta": 0.1}
    assert betas(bench(shelf, kl=off), [0.3], 100)[0] == pytest.approx(0.1 * (1 - 0.2 * 0.01))


@pytest.mark.parametrize(
    "controller",
    [
        lambda b, kl, n: b * (1 + (kl / 6 - 1) * n / 10_000),  # not clipped
        lambda b, kl, n: b * (1 + min(0.2, max(-0.2, kl / 6 - 1))),  # without n / horizon
        lambda b, kl, n: b * (1 - min(0.2, max(-0.2, kl / 6 - 1)) * n / 10_000),  # sign
        lambda b, kl, n: b * (1 + min(0.2, max(-0.2, kl / 3 / 6 - 1)) * n / 10_000),  # by token
    ],
)
def test_n15_kills_other_controllers(controller: Any) -> None:
    first = controller(0.2, 9.0, 1000)
    assert abs(first - 0.204) > 1e-3 or abs(controller(first, 5.4, 1000) - 0.20196) > 1e-3


@pytest.mark.parametrize("name", ["adaptive", "adaptive_in_loss"])
def test_memory_moves_the_cost_and_evaluate_never_moves_it(shelf: Shelf, name: str) -> None:
    """Kills: a controller that runs at each call, a beta that stays where it started."""
    mask = f64([1, 1, 0, 1], [1, 0, 0, 0])
    wave = torch.arange(8).double().reshape(2, 4)
    old = -1 - 0.1 * wave
    batch = {
        "logp": old + 0.4 * torch.sin(wave),
        "old_logp": old,
        "ref_logp": old + 0.3 * torch.cos(2 * wave),
        "rewards": f64(1, 0),
        "mask": mask,
    }
    spec = bench(shelf, kl={"name": name, "beta": 0.2})
    fixed = {"adaptive": {"name": "in_reward"}, "adaptive_in_loss": {"name": "in_loss"}}[name]

    def same_as(beta: float) -> bool:
        twin = bench(shelf, kl={**fixed, "beta": beta})
        return all(
            torch.allclose(a, b, rtol=0, atol=1e-12)
            for a, b in zip(gradient(spec, batch), gradient(twin, batch), strict=True)
        )

    for _ in range(2):
        assert same_as(0.2)
        assert spec.now.memory == {}
    betas(spec, [9.0], 1000)
    assert same_as(0.204)
    assert not same_as(0.2)


def step_of(batch: Mapping[str, Any]) -> tuple[float, float, int]:
    on = batch["mask"].bool()
    tokens = (batch["old_logp"] - batch["ref_logp"])[on].double()
    return float(tokens.sum()), float(on.sum()), int(on.any(1).sum())


@settings(deadline=None, max_examples=30)
@given(
    batch=ragged(dtypes=(torch.float64,)),
    per=st.sampled_from(("sequence", "token")),
    target=st.sampled_from((0.05, 0.5, 6.0)),
    empty=st.booleans(),
)
def test_the_controller_against_its_formula(
    batch: dict[str, Any], per: str, target: float, empty: bool
) -> None:
    """Ragged rows with gaps; a row without tokens is no sample."""
    if empty:
        batch["mask"][0] = 0
    total, tokens, rows = step_of(batch)
    kl = total / max(1, tokens if per == "token" else rows)
    error = min(0.2, max(-0.2, kl / target - 1))
    got = lab_kl.control({}, batch, beta=0.1, target=target, horizon=100.0, per=per)
    assert got == {"beta": pytest.approx(0.1 * (1 + error * rows / 100), abs=1e-12)}
    again = lab_kl.control(got, batch, beta=9.0, target=target, horizon=100.0, per=per)
    assert again["beta"] == pytest.approx(got["beta"] * (1 + error * rows / 100), abs=1e-12)
