"""SAPO: 4/tau sigmoid(tau (r - 1)) A, whose pull fades (ALGORITHMS S12, PITFALLS S4).

Every wrong implementation that a number is there to kill stands in `MUTANTS` and is run.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from cases import bench, f64, ragged, tokens
from hypothesis import given, settings

from lab import surrogate
from lab.errors import LabError
from lab.loss import evaluate, load, pull_curve
from lab.shelf import Shelf, installed

near = functools.partial(pytest.approx, rel=0, abs=1e-12)


def weight(r: float, tau: float) -> float:
    """4 p (1 - p) r with p = sigmoid(tau (r - 1)), in a form that does not cancel."""
    x = tau * (r - 1)
    return 4 * r / (2 + math.exp(x) + math.exp(-x))


@surrogate
def sign_lost(ratio, advantages, *, tau_pos=1.0, tau_neg=1.05):
    """-A lost: it learns from failures (unsloth-zoo 869)."""
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(ratio.dtype)
    return (tau * (ratio - 1)).sigmoid() * 4 / tau * advantages.abs()


@surrogate
def taus_swapped(ratio, advantages, *, tau_pos=1.0, tau_neg=1.05):
    """The positive's temperature for negatives."""
    tau = torch.where(advantages > 0, tau_neg, tau_pos).to(ratio.dtype)
    return (tau * (ratio - 1)).sigmoid() * 4 / tau * advantages


@surrogate
def one_tau(ratio, advantages, *, tau_pos=1.0):
    """Deaf to the sign of A."""
    return (tau_pos * (ratio - 1)).sigmoid() * 4 / tau_pos * advantages


@surrogate
def not_divided(ratio, advantages, *, tau_pos=1.0, tau_neg=1.05):
    """Without 1/tau: pull tau A at r = 1."""
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(ratio.dtype)
    return (tau * (ratio - 1)).sigmoid() * 4 * advantages


@surrogate
def gate_detached(ratio, logp, advantages, *, tau_pos=1.0, tau_neg=1.05):
    """The gate's value as a weight on log p, in place of its slope."""
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(ratio.dtype)
    return ((tau * (ratio - 1)).sigmoid() * 4 / tau).detach() * advantages * logp


MUTANTS = (sign_lost, taus_swapped, one_tau, not_divided, gate_detached)


@pytest.fixture(scope="module")
def wrong() -> Shelf:
    return Shelf.installed(MUTANTS)


def four_cases(shelf: Shelf, name: str) -> tuple[list[float], list[float]]:
    """Objective and pull at (A, r) = (2, 1.3), (2, .7), (-2, .7), (-2, 1.3)."""
    batch = tokens((1.3, 0.7, 0.7, 1.3), (2, 2, -2, -2))
    out = evaluate(bench(shelf, surrogate=name), **batch)
    return out.surrogate[:, 0].tolist(), out.pull[:, 0].tolist()


def gate(x: float, tau: float) -> float:
    return 4 / tau / (1 + math.exp(-tau * x))


#: tau 1 for A > 0, 1.05 for A < 0; r - 1 = .3, -.3.
OBJECTIVE = [2 * gate(0.3, 1), 2 * gate(-0.3, 1), -2 * gate(-0.3, 1.05), -2 * gate(0.3, 1.05)]
PULLS = [2 * weight(1.3, 1), 2 * weight(0.7, 1), -2 * weight(0.7, 1.05), -2 * weight(1.3, 1.05)]


def test_four_cases(shelf: Shelf) -> None:
    objective, pulls = four_cases(shelf, "sapo")
    assert objective == near(OBJECTIVE)
    assert pulls == near(PULLS)


@pytest.mark.parametrize("mutant", [f.__name__ for f in MUTANTS])
def test_four_cases_kill(wrong: Shelf, mutant: str) -> None:
    assert four_cases(wrong, mutant)[1] != near(PULLS)


def test_failures_push_away(wrong: Shelf) -> None:
    """S4: tau 1, r 2, A +1: 1.572895; tau 1.05, A -1: -1.536220; the mutant pulls towards it."""
    for a, tau, rounded in ((1, 1, 1.572895), (-1, 1.05, -1.536220)):
        assert a * weight(2, tau) == pytest.approx(rounded, rel=0, abs=5e-7)
        assert pull_curve(bench(wrong, surrogate="sapo"), [2], a) == near([a * weight(2, tau)])
    assert pull_curve(bench(wrong, surrogate="sign_lost"), [2], -1)[0] > 0


#: ALGORITHMS section 4, as printed, and half of each last digit.
COLUMNS = (0.5, 0.8, 1, 1.1, 1.28, 1.5, 2, 6, 10, 30)
PRINTED = {
    1: (0.470, 0.792, 1, 1.097, 1.255, 1.410, 1.573, 0.160, 0.0049, 3e-11),
    -1: (0.467, 0.791, 1, 1.097, 1.253, 1.401, 1.536, 0.125, 0.0031, 7e-12),
}
HALF = (*(5e-4,) * 8, 5e-5, 5e-12)
#: ACCEPTANCE, pull table: r = .5, 1, 2, 10.
LISTED = {1: (0.470007, 1, 1.572895, 0.004935), -1: (0.467070, 1, 1.536220, 0.003147)}


@pytest.mark.parametrize("sign", [1, -1])
def test_pull_table(shelf: Shelf, sign: int) -> None:
    tau = 1 if sign > 0 else 1.05
    got = pull_curve(bench(shelf, surrogate="sapo"), COLUMNS, sign)
    for r, x, printed, half in zip(COLUMNS, got, PRINTED[sign], HALF, strict=True):
        # p(1 - p) in float64: p rounds to 1 - 2^-53, so far out the pull is good to 4 r 1e-16
        assert x == pytest.approx(sign * weight(r, tau), rel=1e-12, abs=4 * r * 1.2e-16)
        assert sign * x == pytest.approx(printed, rel=0, abs=half)
    recipe = pull_curve(load("sapo"), (0.5, 1, 2, 10), sign)
    assert recipe == pytest.approx([sign * x for x in LISTED[sign]], rel=0, abs=5e-7)


@settings(max_examples=30, deadline=None)
@given(ragged(), st.floats(0.3, 4), st.floats(0.3, 4))
def test_pull_is_its_formula(batch: dict[str, Any], tau_pos: float, tau_neg: float) -> None:
    """And A at r = 1 for any tau."""
    spec = {"name": "sapo", "tau_pos": tau_pos, "tau_neg": tau_neg}
    a = batch["values"].round()  # 0, +-1, +-2 ..
    out = evaluate(bench(installed(), surrogate=spec), **{**batch, "advantages": a})
    cells = zip(
        (batch["logp"].double() - batch["old_logp"].double()).flatten().tolist(),
        a.flatten().tolist(),
        batch["mask"].flatten().tolist(),
        strict=True,
    )
    want = [weight(math.exp(x), tau_pos if s > 0 else tau_neg) * s * m for x, s, m in cells]
    # 1 - p loses e^-8 of its digits at tau 4, r 3: 1e-7 e^8 in float32
    rtol = 1e-11 if a.dtype == torch.float64 else 1e-3
    got = out.pull.double()
    torch.testing.assert_close(got, f64(want).reshape(a.shape), rtol=rtol, atol=0)


@pytest.mark.parametrize("name", ["tau_pos", "tau_neg"])
def test_parameters(shelf: Shelf, name: str) -> None:
    """S7: each moves its own sign; 0, negative and NaN are refused."""
    for sign in (1, -1):
        curves = [
            pull_curve(bench(shelf, surrogate={"name": "sapo", name: tau}), [2], sign)
            for tau in (0.5, 2.0)
        ]
        assert (curves[0] != curves[1]) == ((sign > 0) == (name == "tau_pos"))
    for illegal in (0.0, -1.0, math.nan):
        with pytest.raises(LabError):
            bench(shelf, surrogate={"name": "sapo", name: illegal})
