"""lab.loss.evaluate(shares=): micro-batches of a larger batch, shares of each term, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import f64
from handmade import bench, close
from torch import Tensor

import lab
from lab import LabError, evaluate

#: Rows of 2, 1, 3 and 2 tokens; the third has a gap.
MASK = f64([1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 1, 1], [1, 1, 0, 0])
RATIO = f64([1.1, 0.6, 1, 1], [0.9, 1, 1, 1], [1.3, 1, 0.7, 1], [2, 0.5, 1, 1])
ADVANTAGES = f64([2, -1, 0, 0], [-2, 0, 0, 0], [1, 0, -1, 1], [0.5, 0.5, 0, 0])
KL = {"name": "in_loss", "estimator": "k2", "beta": 0.1}
ENTROPY = {"name": "entropy", "coef": 0.01}


def given(rows: slice = slice(None), **more: Any) -> dict[str, Any]:
    every = {
        "logp": -1 + RATIO.log(),
        "old_logp": torch.full_like(MASK, -1),
        "ref_logp": torch.full_like(MASK, -1.5),
        "entropy": 1 + MASK,
        "mask": MASK,
        "advantages": ADVANTAGES,
        "group": torch.tensor([0, 0, 1, 1]),
    }
    return {n: x[rows] for n, x in every.items()} | more


def by_hand(out: lab.loss.Evaluation, shares: dict[str, Tensor]) -> float:
    terms = {"surrogate": -out.surrogate, "kl": out.kl, "extra": out.extra}
    return sum(float((shares[n] * x).sum()) for n, x in terms.items() if x is not None)


# --- whose shares a term has ---------------------------------------------------------------------


def test_all_terms_have_the_recipes_shares_unless_a_slot_names_its_own() -> None:
    """token_mean 1/8; the KL's sequence_sum 1/4; the bonus' constant of 16: 1/(4 * 16)."""
    b = bench(aggregate="token_mean", kl=KL, extra=[ENTROPY])
    plain = evaluate(b, **given())
    for share in plain.shares.values():
        close(share, MASK / 8)
    own = bench(
        aggregate="token_mean",
        kl={**KL, "aggregate": "sequence_sum"},
        extra=[{**ENTROPY, "aggregate": {"name": "constant", "length": 16}}],
    )
    out = evaluate(own, **given(budget=9))
    close(out.share, MASK / 8)
    close(out.shares["kl"], MASK / 4)
    close(out.shares["extra"], MASK / 64)
    close(out.loss, by_hand(out, {"surrogate": MASK / 8, "kl": MASK / 4, "extra": MASK / 64}))


@pytest.mark.parametrize("slot", ["kl", "extra"])
def test_a_component_sees_the_shares_of_its_own_term(slot: str) -> None:
    """`share` is what the term will be summed with: 1/4 here, while the surrogate has 1/8."""
    seen: list[Tensor] = []

    @lab.kl_loss(name="see")
    def see_kl(logp: Tensor, share: Tensor) -> Tensor:
        """Note the share."""
        seen.append(share)
        return logp

    @lab.extra_loss(name="see")
    def see_extra(logp: Tensor, share: Tensor) -> Tensor:
        """Note the share."""
        seen.append(share)
        return logp

    spec = {"name": "see", "aggregate": "sequence_sum"}
    slots = {"kl": {"kl": spec}, "extra": {"extra": [spec]}}[slot]
    evaluate(bench(see_kl, see_extra, aggregate="token_mean", **slots), **given())
    close(seen[-1], MASK / 4)


def test_the_entries_of_extra_share_one_aggregate() -> None:
    """Their sum has one share: two different ones cannot both hold."""

    @lab.extra_loss
    def other(logp: Tensor) -> Tensor:
        """-0.01 log p."""
        return -0.01 * logp

    with pytest.raises(LabError, match="its entries share one aggregate"):
        bench(other, extra=[{**ENTROPY, "aggregate": "sequence_sum"}, "other"])


def test_further_losses_add_up() -> None:
    @lab.extra_loss
    def other(logp: Tensor) -> Tensor:
        """-0.5 log p."""
        return -0.5 * logp

    both = evaluate(bench(other, extra=[ENTROPY, "other"]), **given()).extra
    one = evaluate(bench(other, extra=[ENTROPY]), **given()).extra
    two = evaluate(bench(other, extra=["other"]), **given()).extra
    close(both, one + two)


# --- given shares --------------------------------------------------------------------------------

FULL = {"kl": KL, "extra": [ENTROPY]}


def test_one_tensor_of_shares_is_for_all_terms() -> None:
    """The KL's own aggregate gives way too: its 1/4 is not added to a micro-batch."""
    b = bench(kl={**KL, "aggregate": "sequence_sum"}, extra=[ENTROPY])
    share = f64([1, 2, 9, 9], [3, 9, 9, 9], [4, 9, 5, 6], [7, 8, 9, 9]) / 100
    out = evaluate(b, **given(), shares=share)
    on = torch.where(MASK.bool(), share, 0.0)
    for got in out.shares.values():
        close(got, on)
    close(out.loss, by_hand(out, dict.fromkeys(("surrogate", "kl", "extra"), on)))


def test_a_mapping_gives_each_term_its_own() -> None:
    shares = {"surrogate": MASK / 8, "kl": MASK / 4, "extra": MASK / 64}
    out = evaluate(bench(**FULL), **given(), shares=shares)
    close(out.loss, by_hand(out, shares))


def test_a_term_without_shares_of_its_own_may_be_left_out_of_a_mapping() -> None:
    out = evaluate(bench(**FULL), **given(), shares={"surrogate": MASK / 8})
    for got in out.shares.values():
        close(got, MASK / 8)


@pytest.mark.parametrize(
    ("slots", "shares", "message"),
    [
        (
            {},
            {"surogate": MASK},
            r"shares: no term 'surogate'\. Did you mean 'surrogate'\? "
            "They are surrogate, kl, extra",
        ),
        (
            {"kl": {**KL, "aggregate": "sequence_sum"}},
            {"surrogate": MASK},
            "shares: the recipe has a term 'kl' with shares of its own; give them too",
        ),
        (
            {"kl": KL},
            {"kl": MASK},
            "shares: the recipe has a term 'surrogate' with shares of its own; give them too",
        ),
        (
            {},
            MASK[:2],
            r"shares of surrogate are torch\.float64 \[2, 4\]; torch\.float64 \[4, 4\] was due",
        ),
        (
            {},
            MASK[:, :1],  # it would broadcast
            r"shares of surrogate are torch\.float64 \[4, 1\]; torch\.float64 \[4, 4\] was due",
        ),
        (
            {},
            MASK.float(),
            r"shares of surrogate are torch\.float32 \[4, 4\]; torch\.float64 \[4, 4\] was due",
        ),
        ({}, 0.125, r"shares of surrogate are 0\.125; torch\.float64 \[4, 4\] was due"),
        (
            {"kl": KL},
            {"surrogate": MASK, "kl": [1, 2]},
            r"shares of kl are \[1, 2\]; torch\.float64 \[4, 4\] was due",
        ),
    ],
)
def test_shares_that_are_not_valid(slots: Any, shares: Any, message: str) -> None:
    with pytest.raises(LabError, match=f"^{message}$"):
        evaluate(bench(**slots), **given(), shares=shares)


def test_a_share_is_not_trained() -> None:
    """It weighs the loss: a gradient into it would train the weights of the tokens."""
    share = (MASK / 8).requires_grad_()
    logp = given()["logp"].requires_grad_()
    out = evaluate(bench(**FULL), **given(logp=logp), shares=share)
    assert torch.autograd.grad(out.loss, share, allow_unused=True) == (None,)


def test_junk_shares_off_the_mask_reach_nothing() -> None:
    share = torch.where(MASK.bool(), MASK / 8, torch.nan)
    close(evaluate(bench(**FULL), **given(), shares=share).share, MASK / 8)


@pytest.mark.parametrize("advantages", [True, False])
def test_a_component_that_reads_the_whole_batch_is_refused_on_a_slice(advantages: bool) -> None:
    """Its statistics of a slice are other numbers: the sum of slices would not be the whole."""

    @lab.surrogate(whole_batch=True)
    def centred(ratio: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """r (A - mean)."""
        return ratio * (advantages - lab.masked_mean(advantages, mask))

    b = bench(centred, surrogate="centred")
    whole = evaluate(b, **given())
    more = {} if advantages else {"advantages": None, "rewards": f64(1, 2, 3, 4)}
    with pytest.raises(LabError, match="'centred' reads statistics of the whole optimisation bat"):
        evaluate(b, **given(**more), shares=whole.share)


def test_whole_batch_may_depend_on_the_parameters() -> None:
    @lab.surrogate(whole_batch=lambda centre: centre)
    def maybe(ratio: Tensor, advantages: Tensor, mask: Tensor, *, centre: bool = False) -> Tensor:
        """r A, or r (A - mean)."""
        return ratio * (advantages - centre * lab.masked_mean(advantages, mask))

    evaluate(bench(maybe, surrogate="maybe"), **given(), shares=MASK / 8)
    with pytest.raises(LabError, match="'maybe' reads statistics"):
        evaluate(
            bench(maybe, surrogate={"name": "maybe", "centre": True}), **given(), shares=MASK / 8
        )


# --- micro-batches -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "aggregate", ["token_mean", "sequence_mean", "sequence_sum", "constant", "prompt_mean"]
)
@pytest.mark.parametrize("cuts", [[0, 2, 4], [0, 1, 2, 3, 4], [0, 3, 4]])
def test_slices_with_their_shares_add_up_to_the_whole(aggregate: str, cuts: list[int]) -> None:
    """A mean of micro-means, or a second division, gives another gradient for each cut."""
    b = bench(aggregate=aggregate, kl={**KL, "aggregate": "token_mean"}, extra=[ENTROPY])
    logp = given()["logp"].requires_grad_()
    whole = evaluate(b, **given(logp=logp, budget=4))
    want = torch.autograd.grad(whole.loss, logp)[0]
    loss, gradients = 0.0, []
    for rows in map(slice, cuts[:-1], cuts[1:]):
        part = given(rows)["logp"].requires_grad_()
        out = evaluate(
            b, **given(rows, logp=part), shares={n: s[rows] for n, s in whole.shares.items()}
        )
        loss += float(out.loss.detach())
        gradients.append(torch.autograd.grad(out.loss, part)[0])
    close(torch.cat(gradients), want)
    close(whole.loss.detach(), loss)


def test_two_slices_of_lengths_2_4_and_6_8() -> None:
    """token_mean over 2 + 4 + 6 + 8 = 20 tokens: .05 each; micro-means give .083333, .035714."""
    mask = (torch.arange(8) < torch.tensor([2, 4, 6, 8])[:, None]).double()
    step = {"logp": -mask, "old_logp": -mask, "advantages": mask, "mask": mask}
    whole = evaluate(bench(aggregate="token_mean"), **step)
    close(whole.share, mask * 0.05)
    for rows in (slice(0, 2), slice(2, 4)):
        part = {n: x[rows] for n, x in step.items()}
        out = evaluate(bench(aggregate="token_mean"), **part, shares=whole.share[rows])
        close(out.share, mask[rows] * 0.05)
