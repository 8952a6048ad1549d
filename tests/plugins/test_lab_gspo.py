"""Sequence ratios: what they weigh, pull and correct (ALGORITHMS section 3, ACCEPTANCE E8).

Every wrong implementation that a number is there to kill stands in `MUTANTS` and is run.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from cases import bench, f64, gradient, ragged
from hypothesis import given, settings

from lab import aggregate, masked_mean, ratio
from lab.errors import LabError
from lab.loss import evaluate, load
from lab.shelf import Shelf, installed

near = functools.partial(pytest.approx, rel=0, abs=1e-12)
SEQUENCE = ("sequence", "sequence_token", "sequence_product")
MEAN = {"aggregate": "sequence_mean"}


@ratio(sequence_level=True)
def mean_of_ratios(logp, old_logp, mask):
    """The arithmetic mean of the token ratios."""
    return masked_mean((logp - old_logp).exp(), mask, 1, keepdim=True).expand_as(logp)


@ratio(sequence_level=True)
def sum_of_ratios(logp, old_logp, mask):
    """The sum of the token ratios: 101.005017 for 100 tokens of e^.01."""
    return ((logp - old_logp).exp() * mask).sum(1, keepdim=True).expand_as(logp)


@ratio(sequence_level=True)
def width_divides(logp, old_logp):
    """The padded width as the row's length."""
    return (logp - old_logp).mean(1, keepdim=True).exp().expand_as(logp)


@ratio(sequence_level=True)
def row_detached(logp, old_logp, mask):
    """The row's number with the slope of log p, not of p: right at 1 only."""
    row = masked_mean(logp - old_logp, mask, 1, keepdim=True).exp().detach()
    return row + (logp - logp.detach())


@ratio(sequence_level=True)
def batch_mean(logp, old_logp, mask):
    """One number for the whole batch."""
    return masked_mean(logp - old_logp, mask).exp().expand_as(logp)


@ratio
def prefix_by_hand(logp, old_logp):
    """No mutant: the product up to a token, with the token's own gradient (R5, not shipped)."""
    return (logp - old_logp).cumsum(1).exp().detach() * (logp - logp.detach()).exp()


@aggregate
def by_length_squared(mask):
    """A third party's aggregate that weighs rows by their length."""
    return mask * mask.sum(1, keepdim=True) / mask.sum()


MUTANTS = (mean_of_ratios, sum_of_ratios, width_divides, row_detached, batch_mean)


@pytest.fixture(scope="module")
def wrong() -> Shelf:
    return Shelf.installed((*MUTANTS, prefix_by_hand, by_length_squared))


def two_rows(shelf: Shelf, name: str, a: Any = ((2, 2), (-1, -1))) -> tuple[Any, Any]:
    """Values and pulls of rows with token ratios (1.5, 1.2, pad) and (.9, gap, .4)."""
    mask = f64([1, 1, 0], [1, 0, 1])
    on = mask > 0
    logp = torch.zeros(2, 3, dtype=torch.float64).masked_scatter(on, f64(1.5, 1.2, 0.9, 0.4).log())
    batch = {"logp": logp.requires_grad_(), "old_logp": 0 * mask, "mask": mask}
    advantages = torch.zeros_like(mask).masked_scatter(on, f64(*a).flatten())
    out = evaluate(bench(shelf, MEAN, ratio=name), **batch, advantages=advantages)
    assert out.ratio[~on].tolist() == [1, 1]
    assert out.pull[~on].tolist() == [0, 0]
    return out.ratio[on].tolist(), out.pull[on].tolist()


#: Geometric means: sqrt(1.5 * 1.2), sqrt(.9 * .4).
S = (math.sqrt(1.8), math.sqrt(0.36))


@pytest.mark.parametrize(
    ("name", "values", "pulls"),
    [
        # each token carries s A: the mean's 1/n against n tokens
        ("sequence", S, (2 * S[0], -S[1])),
        ("sequence_token", S, (2 * S[0], -S[1])),
        # each token carries the whole product, n times: 2 * 1.8 * 2, 2 * .36 * -1
        ("sequence_product", (1.8, 0.36), (2 * 1.8 * 2, 2 * 0.36 * -1)),
    ],
)
def test_one_number_a_row(shelf: Shelf, name: str, values: Any, pulls: Any) -> None:
    got = two_rows(shelf, name)
    assert got[0] == near([values[0]] * 2 + [values[1]] * 2)
    assert got[1] == near([pulls[0]] * 2 + [pulls[1]] * 2)


@pytest.mark.parametrize("mutant", [f.__name__ for f in MUTANTS])
def test_two_rows_kill(wrong: Shelf, mutant: str) -> None:
    for name in SEQUENCE:
        assert two_rows(wrong, mutant)[1] != near(two_rows(wrong, name)[1])


def test_whose_gradient(shelf: Shelf) -> None:
    """A = (2, -4) in a row: `sequence` pulls by the mean -1, `sequence_token` by each."""
    a = ((2, -4), (-1, -1))
    assert two_rows(shelf, "sequence", a)[1][:2] == near((S[0] * -1, S[0] * -1))
    assert two_rows(shelf, "sequence_token", a)[1][:2] == near((S[0] * 2, S[0] * -4))
    assert two_rows(shelf, "sequence_product", a)[1][:2] == near((1.8 * -2, 1.8 * -2))


def test_product_and_geometric_mean_differ_by_length(wrong: Shelf) -> None:
    """R6, R14: 100 tokens of log ratio .01 each: e and e^.01; never 100 e^.01."""
    mask = torch.ones(1, 100, dtype=torch.float64)
    logp = 0.01 * mask
    batch = {"logp": logp, "old_logp": 0 * logp, "mask": mask, "advantages": mask}
    for name, want in (
        ("sequence_product", math.e),  # 2.718282
        ("sequence", math.exp(0.01)),  # 1.010050
        ("sequence_token", math.exp(0.01)),
        ("sum_of_ratios", 100 * math.exp(0.01)),  # 101.005017
    ):
        got = evaluate(bench(wrong, MEAN, ratio=name), **batch).ratio[0, 0]
        assert float(got) == pytest.approx(want, rel=1e-12, abs=0)


@settings(max_examples=30, deadline=None)
@given(ragged(), st.sampled_from(SEQUENCE), st.booleans())
def test_share_times_pull_is_the_gradient(batch: dict[str, Any], name: str, constant: bool) -> None:
    """R11, and the closed form: s A_row or n Pi A_row; rows with gaps are their compacted rows."""
    mask = batch["mask"]
    a = batch["values"].round()
    a = a[:, :1].expand_as(a) if constant else a
    batch = {**batch, "advantages": a}
    b = bench(installed(), MEAN, ratio=name)
    out = evaluate(b, **batch)
    exact = a.dtype == torch.float64
    rtol, atol = (1e-11, 1e-12) if exact else (1e-4, 1e-5)
    torch.testing.assert_close(gradient(b, batch)[1], -out.share * out.pull, rtol=rtol, atol=atol)
    want = torch.zeros_like(mask).double()
    for i, on in enumerate(mask > 0):
        log_ratio = (batch["logp"][i].double() - batch["old_logp"][i].double())[on].tolist()
        mine, n = a[i][on].tolist(), len(log_ratio)
        if name == "sequence_product":
            pulls = [math.exp(sum(log_ratio)) * sum(mine)] * n
        else:
            s = math.exp(sum(log_ratio) / n)
            pulls = [s * x for x in mine] if name == "sequence_token" else [s * sum(mine) / n] * n
        want[i][on] = f64(*pulls)
    torch.testing.assert_close(out.pull.double(), want, rtol=rtol, atol=atol)


@settings(max_examples=25, deadline=None)
@given(ragged(dtypes=(torch.float64,)))
def test_gspo_and_gspo_token_are_one_gradient(batch: dict[str, Any]) -> None:
    """R3: for row-constant advantages, through the recipe's own clip."""
    a = batch["rewards"][:, None].expand_as(batch["mask"]) - 0.2
    spec = {"base": "gspo", "surrogate": {"eps_low": 0.1, "eps_high": 0.15}}
    one, other = (
        gradient(load({**spec, "ratio": r}), {**batch, "advantages": a})
        for r in ("sequence", "sequence_token")
    )
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def test_the_recipe_clips_rows(shelf: Shelf) -> None:
    """GSPO: eps 3e-4/4e-4 on the geometric mean; token ratios far apart may cancel in it.

    A group of rewards (1, 0): +-.5/(sqrt(.5) + 1e-6). Row 0 has ratios 1.3, 1/1.3: s = 1, inside;
    with 1.3, 1/1.3 * 1.002 s = sqrt(1.002) > 1.0004: both tokens flat, in 1/(n B) shares.
    """
    a, old = 0.5 / (math.sqrt(0.5) + 1e-6), f64([-2, -2], [-2, -2])
    for factor, want in ((1.0, a), (1.002, 0.0)):
        logp = old + f64([1.3, factor / 1.3], [1, 1]).log()
        given = {"rewards": f64(1, 0), "group": torch.tensor([4, 4]), "mask": 0 * old + 1}
        out = evaluate(load("gspo"), logp=logp, old_logp=old, **given)
        assert out.pull[0].tolist() == near((want, want))
        assert out.pull[1].tolist() == near((-a, -a))
        assert out.share.tolist() == [[1 / (2 * 2)] * 2] * 2


def lengths_1_and_9(shelf: Shelf, spec: Any) -> float:
    mask = (torch.arange(9) < torch.tensor([[1], [9]])).double()
    given = {"logp": 0 * mask, "old_logp": 0 * mask, "mask": mask}
    out = evaluate(bench(shelf, spec), **given, advantages=f64([1], [-1]).expand_as(mask))
    return float(out.loss)


@pytest.mark.parametrize("name", SEQUENCE)
@pytest.mark.parametrize(
    "other", ["token_mean", "constant", "sequence_sum", "prompt_mean", "by_length_squared"]
)
def test_a_row_weighed_by_its_length_is_refused(wrong: Shelf, name: str, other: str) -> None:
    """S6, R10: found on the probe, whatever the aggregate's name; refused unless said."""
    spec = {"ratio": name, "aggregate": other}
    with pytest.raises(LabError, match="length_weighted"):
        bench(wrong, spec)
    bench(wrong, {**spec, "length_weighted": True})


@pytest.mark.parametrize("name", SEQUENCE)
def test_what_the_refusal_prevents(shelf: Shelf, name: str) -> None:
    """S6: lengths 1 and 9, A (1, -1), r 1: objective (1 - 1)/2, or (1 - 9)/10 = -.8."""
    assert lengths_1_and_9(shelf, {"ratio": name, **MEAN}) == near(0)
    weighted = {"ratio": name, "aggregate": "token_mean", "length_weighted": True}
    assert lengths_1_and_9(shelf, weighted) == near(0.8)
    assert lengths_1_and_9(shelf, {"ratio": "token", "aggregate": "token_mean"}) == near(0.8)


# The two-step tree: mu .5 everywhere, pi(1) = pi(1|1) = .8, pi(1|0) = .5, reward iff both are 1.
PATHS = [(a, b) for a in (0, 1) for b in (0, 1)]
J_PI, J_MU = 0.8 * 0.8, 0.5 * 0.5
#: Q - V under pi and under mu: V(1) = .8 and .5, V(0) = 0, a reached end is worth its reward.
A_PI = {
    (0, 0): (0 - J_PI, 0), (0, 1): (0 - J_PI, 0), (1, 0): (0.8 - J_PI, 0 - 0.8),
    (1, 1): (0.8 - J_PI, 1 - 0.8),
}  # fmt: skip
A_MU = {(0, 0): (-0.25, 0), (0, 1): (-0.25, 0), (1, 0): (0.25, -0.5), (1, 1): (0.25, 0.5)}
OUTCOME = {path: (float(path == (1, 1)),) * 2 for path in PATHS}


def tree(shelf: Shelf, name: str, advantage: dict[Any, Any], per_row: bool) -> tuple[float, Any]:
    """The expected surrogate over mu's four paths, and its gradient by the logits on path (1, 1).

    A spread sequence weight is shared by the row's two tokens (`per_row`), token weights are not.
    """
    z = f64(math.log(4), math.log(4)).requires_grad_()  # sigmoid(log 4) = .8
    up, down = torch.nn.functional.logsigmoid(z), torch.nn.functional.logsigmoid(-z)
    half = f64(0.5).log()[0]
    second = {0: (half, half), 1: (down[1], up[1])}
    logp = torch.stack([torch.stack(((down, up)[a][0], second[a][b])) for a, b in PATHS])
    mask = torch.ones_like(logp).detach()
    spec = {"ratio": name, "length_weighted": True}
    given = {"old_logp": 0 * mask + half, "mask": mask, "shares": mask / (8 if per_row else 4)}
    given["advantages"] = f64(*(advantage[p] for p in PATHS))
    out = evaluate(bench(shelf, spec), logp=logp, **given)
    return -float(out.loss.detach()), torch.autograd.grad(-out.loss, z)[0].tolist()


@pytest.mark.parametrize(
    ("name", "advantage", "first", "second"),
    [
        ("token", OUTCOME, 0.625, 0.625),
        ("prefix_by_hand", OUTCOME, 0.625, 1),
        ("sequence_product", OUTCOME, 1, 1),
        ("token", A_PI, 1, 0.625),
        ("prefix_by_hand", A_PI, 1, 1),
    ],
)
def test_what_each_ratio_corrects(wrong: Shelf, name, advantage, first, second) -> None:
    """R12, E4. Exact: dJ/dz = .8 (1 - .8) .8 = .128 for both logits; .5/.8 = .625 is left out."""
    _, g = tree(wrong, name, advantage, per_row=name == "sequence_product")
    assert g == near((first * 0.128, second * 0.128))


def test_trajectory_weights_are_exact_and_token_weights_are_not(shelf: Shelf) -> None:
    """E8: .25 * 1.6 * 1.6 = .64 = J_pi; J_mu + (.2 - .05) + .5 (.4 - .1) = .55."""
    assert tree(shelf, "sequence_product", OUTCOME, per_row=True)[0] == near(J_PI)
    # first token .8 * .25 - .2 * .25, second .5 (.8 * .5 - .2 * .5)
    assert J_MU + tree(shelf, "token", A_MU, per_row=False)[0] == near(0.25 + 0.15 + 0.15)
