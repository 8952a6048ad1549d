"""The entropy bonus: N20, a live gradient, shares of its own, and what is not an entropy."""

from __future__ import annotations

import functools
import math
from typing import Any

import lab_entropy
import pytest
import torch
from cases import JUNK, PI, bench, f64, gradient, ragged, with_junk
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lab import LabError, extra_loss, surrogate
from lab.bench import Bench
from lab.loss import Evaluation, evaluate
from lab.shelf import Shelf, installed

H = -sum(p * math.log(p) for p in PI)  # 1.029653
SLOPE = tuple(-p * (math.log(p) + H) for p in PI)  # (-.168253, .052296, .115957)


def near(got: Any, want: Any, atol: float = 1e-12) -> None:
    got, want = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (got, want))
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


@extra_loss
def signed(entropy: Tensor, *, coef: float = 1.0) -> Tensor:
    """Mutant: the bonus as a penalty."""
    return coef * entropy


@extra_loss
def sampled(logp: Tensor, *, coef: float = 1.0) -> Tensor:
    """Mutant: -log p of the sampled token for the entropy: right value, expected gradient 0."""
    return coef * logp


@extra_loss
def held(entropy: Tensor, logp: Tensor, *, coef: float = 1.0) -> Tensor:
    """Mutant: an entropy that does not move."""
    return -coef * entropy.detach() + 0 * logp


@extra_loss
def twice_logp(logp: Tensor) -> Tensor:
    """A second entry for the list: 2 log p."""
    return 2 * logp


@surrogate
def by_entropy(logp: Tensor, advantages: Tensor, entropy: Tensor) -> Tensor:
    """A surrogate that weighs by the entropy."""
    return advantages * entropy * logp


@pytest.fixture(scope="module")
def shelf_() -> Shelf:
    return Shelf.installed([signed, sampled, held, twice_logp, by_entropy])


def on_pi(spec: Bench) -> tuple[Evaluation, Tensor]:
    """The three answers of pi, each with its chance as share, in the one state they come from."""
    z = f64(*PI).log().requires_grad_()
    logp = z.log_softmax(0)
    entropy = -(logp.exp() * logp).sum()
    out = evaluate(
        spec, logp=logp[:, None], old_logp=logp.detach()[:, None], mask=torch.ones(3, 1).double(),
        advantages=torch.zeros(3, 1).double(), entropy=entropy.expand(3, 1),
        shares=f64(*PI)[:, None],
    )  # fmt: skip
    return out, torch.autograd.grad(out.loss, z)[0]


def check_n20(spec: Bench, coef: float) -> None:
    out, got = on_pi(spec)
    near(out.loss, -coef * H)
    near(got, [-coef * s for s in SLOPE])


@pytest.mark.parametrize("coef", [1.0, 0.01])
def test_n20_value_and_live_gradient(shelf: Shelf, coef: float) -> None:
    """Full logits: H = 1.029653, dH/dz = -pi (log pi + H) = (-.168253, .052296, .115957)."""
    check_n20(bench(shelf, extra=[{"name": "entropy", "coef": coef}]), coef)
    near(H, 1.029653, 5e-7)
    near(SLOPE, (-0.168253, 0.052296, 0.115957), 5.1e-7)


@pytest.mark.parametrize("mutant", ["signed", "sampled", "held"])
def test_n20_kills(shelf_: Shelf, mutant: str) -> None:
    spec = bench(shelf_, extra=[mutant])
    with pytest.raises(AssertionError):
        check_n20(spec, 1.0)
    if mutant == "sampled":  # its value is right: E[log p] = -H
        near(on_pi(spec)[0].loss, -H)
        near(on_pi(spec)[1], (0, 0, 0))


def test_what_has_no_gradient_at_all_is_refused() -> None:
    """A detached bonus alone does not pass the probe."""

    @extra_loss
    def frozen(entropy: Tensor) -> Tensor:
        """Mutant: detached."""
        return -entropy.detach()

    with pytest.raises(LabError, match=r"extra 'frozen': no gradient flows"):
        bench(Shelf.installed([frozen]), extra=["frozen"])


def rows() -> dict[str, Any]:
    """Rows of 1 and 3 tokens: entropies .5 / 1, 2, 3."""
    mask = f64([1, 0, 0], [1, 1, 1])
    return {
        "logp": -mask,
        "old_logp": -mask,
        "advantages": 0 * mask,
        "mask": mask,
        "entropy": f64([0.5, 99, 99], [1, 2, 3]),
    }


def test_shares_of_the_recipe_or_its_own(shelf: Shelf) -> None:
    """Kills: a token mean that nobody asked for (TRL's bonus), an aggregate that is not used."""
    bonus = {"name": "entropy", "coef": 0.1}
    plain = evaluate(bench(shelf, aggregate="sequence_mean", extra=[bonus]), **rows())
    near(plain.loss, -0.1 * (0.5 + (1 + 2 + 3) / 3) / 2)
    own = bench(shelf, aggregate="sequence_mean", extra=[{**bonus, "aggregate": "token_mean"}])
    out = evaluate(own, **rows())
    near(out.loss, -0.1 * (0.5 + 1 + 2 + 3) / 4)
    near(out.shares["extra"], rows()["mask"] / 4)
    near(out.shares["surrogate"], rows()["mask"] * f64([1 / 2], [1 / 6]))
    near(out.extra, -0.1 * rows()["mask"] * rows()["entropy"])
    table = {"name": "constant", "length": 10}
    of_table = bench(shelf, extra=[{**bonus, "aggregate": table}])
    near(evaluate(of_table, **rows(), budget=3).loss, -0.1 * 6.5 / (2 * 10))


def test_entries_of_the_list_are_summed_with_one_share(shelf_: Shelf) -> None:
    """-coef H + 2 log p; two aggregates for one sum are refused."""
    spec = bench(shelf_, extra=[{"name": "entropy", "coef": 0.1}, "twice_logp"])
    out = evaluate(spec, **rows())
    mask = rows()["mask"]
    near(out.extra, -0.1 * mask * rows()["entropy"] - 2 * mask)
    two = [{"name": "entropy", "aggregate": "token_mean"}, "twice_logp"]
    with pytest.raises(LabError, match=r"entries share one aggregate"):
        bench(shelf_, extra=two)


def test_the_bonus_is_live_and_a_surrogate_s_weight_is_not(shelf_: Shelf) -> None:
    """DESIGN 2: `entropy` is live in extra_loss, detached in surrogate. Kills: a trained weight."""
    batch = {**rows(), "advantages": rows()["mask"]}
    for spec, want in (
        (bench(shelf_, surrogate="by_entropy", ratio="none"), None),
        (bench(shelf_, extra=["entropy"]), -0.001 / 2),  # coef over B
    ):
        entropy = batch["entropy"].clone().requires_grad_()
        logp = batch["logp"].clone().requires_grad_()
        loss = evaluate(spec, **{**batch, "entropy": entropy, "logp": logp}).loss
        (got,) = torch.autograd.grad(loss, entropy, allow_unused=True)
        if want is None:
            assert got is None
        else:
            near(got, want * batch["mask"])  # 0 off the mask


def test_coef_0_is_the_recipe_without_it(shelf: Shelf) -> None:
    """Bit for bit, and without it nobody asks for entropies."""
    batch = {**rows(), "advantages": f64([1, 0, 0], [-1, 2, 0.5])}
    spec = bench(shelf, extra=[{"name": "entropy", "coef": 0.0}])
    without = bench(shelf)
    assert "entropy" not in without.needs
    for a, b in zip(gradient(spec, batch), gradient(without, batch), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(LabError, match=r"extra 'entropy' needs entropy"):
        evaluate(spec, **{**batch, "entropy": None})


@functools.cache
def bonus(coef: float) -> Bench:
    return bench(installed(), extra=[{"name": "entropy", "coef": coef}])


@settings(deadline=None, max_examples=25)
@given(batch=ragged(), junk=st.sampled_from(JUNK), coef=st.sampled_from((1e-4, 0.1)))
def test_any_batch(batch: dict[str, Any], junk: float, coef: float) -> None:
    """Elementwise, raw and through the bench; junk off the mask changes nothing (M6)."""
    spec = bonus(coef)
    raw = lab_entropy.entropy_bonus(batch["entropy"], coef=coef)
    out = evaluate(spec, **batch)
    assert torch.equal(out.extra, raw * batch["mask"])
    assert out.extra.dtype == batch["mask"].dtype
    clean, dirty = (gradient(spec, b) for b in (with_junk(batch, 0.0), with_junk(batch, junk)))
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
