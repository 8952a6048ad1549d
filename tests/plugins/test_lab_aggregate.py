"""Section J of the acceptance list, ALGORITHMS 5, PITFALLS L1-L5: what a token weighs.

Every check takes an aggregate's name, so that it can be shown to fail for a wrong one.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

import hypothesis.strategies as st
import lab_aggregate
import pytest
import torch
from cases import bench, f64, gradient, ragged
from hypothesis import given, settings
from torch import Tensor

from lab import LabError, aggregate
from lab.bench import Bench
from lab.loss import Evaluation, evaluate
from lab.shelf import Shelf, installed

NAMES = ("token_mean", "sequence_mean", "sequence_sum", "constant", "prompt_mean")


def near(got: Any, want: Any, atol: float = 1e-12) -> None:
    got, want = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (got, want))
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


@aggregate
def padded_width(mask: Tensor) -> Tensor:
    """Mutant: 1/(B T), `.mean()` over [B,T]; verl's seq-mean-token-sum-norm without a factor."""
    return mask / mask.numel()


@aggregate
def no_rows(mask: Tensor, budget: int) -> Tensor:
    """Mutant: the constant without 1/B."""
    return mask / budget


@aggregate
def all_rows(mask: Tensor) -> Tensor:
    """Mutant: sequence_mean that counts rows without a token."""
    return mask / (mask.sum(1, keepdim=True).clamp(min=1) * mask.shape[0])


@aggregate
def by_reshape(mask: Tensor) -> Tensor:
    """Mutant: prompt_mean of neighbours, by position in place of id."""
    pairs = mask.sum(1).reshape(-1, 2).sum(1).repeat_interleave(2)
    return mask / (pairs[:, None].clamp(min=1) * (mask.shape[0] // 2))


MUTANTS = (padded_width, no_rows, all_rows, by_reshape)


@pytest.fixture(scope="module")
def mutants() -> Shelf:
    return Shelf.installed(MUTANTS)


def masks(lengths: tuple[int, ...], width: int = 0) -> Tensor:
    t = torch.arange(width or max(lengths))
    return (t < torch.tensor(lengths)[:, None]).double()


@functools.cache
def bench_of(shelf: Shelf, aggregate: str) -> Bench:
    """Built once: the aggregate as JSON."""
    return bench(shelf, aggregate=json.loads(aggregate))


def out_of(shelf: Shelf, spec: Any, mask: Tensor, **more: Any) -> Evaluation:
    """A batch at ratio 1 whose token losses are `losses` (1 where none are given)."""
    losses = more.pop("losses", torch.ones_like(mask))
    given_ = {"budget": 8, "group": torch.zeros(mask.shape[0]).long(), **more}
    zero = torch.zeros_like(mask)
    return evaluate(
        bench_of(shelf, json.dumps(spec)), logp=zero, old_logp=zero, advantages=-losses, mask=mask,
        **given_,
    )  # fmt: skip


def first_share(shelf: Shelf, spec: Any, mask: Tensor, **more: Any) -> list[float]:
    """A token's share in each row: that of the row's first."""
    return out_of(shelf, spec, mask, **more).share[:, 0].tolist()


# --- J2, G1-G6: lengths 2, 4, 6, 8, so N = 20, B = 4 ---------------------------------------------

LENGTHS = (2, 4, 6, 8)
PAIRS = torch.tensor([5, 5, -1, -1])  # groups {2,4} and {6,8}: 6 and 14 tokens, P = 2
SHARES: Mapping[str, tuple[float, ...]] = {
    "token_mean": (1 / 20,) * 4,  # .05
    "sequence_mean": tuple(1 / (n * 4) for n in LENGTHS),  # .125, .0625, .041667, .03125
    "sequence_sum": (1 / 4,) * 4,
    "constant": (1 / (4 * 8),) * 4,  # budget 8: .03125
    "prompt_mean": (1 / (6 * 2), 1 / (6 * 2), 1 / (14 * 2), 1 / (14 * 2)),
}
#: n_i times the share: a row's weight in the loss, as ALGORITHMS section 5 prints it
ROWS: Mapping[str, tuple[float, ...]] = {
    "token_mean": (0.1, 0.2, 0.3, 0.4),
    "sequence_mean": (0.25, 0.25, 0.25, 0.25),
    "sequence_sum": (0.5, 1.0, 1.5, 2.0),
    "constant": (0.0625, 0.125, 0.1875, 0.25),
    "prompt_mean": (0.1667, 0.3333, 0.2143, 0.2857),
}


def shares_of_a_token(shelf: Shelf, spec: str, as_name: str) -> None:
    near(first_share(shelf, spec, masks(LENGTHS), group=PAIRS), SHARES[as_name])
    out = out_of(shelf, spec, masks(LENGTHS, 11), group=PAIRS)  # wider: nothing changes (L3, P4)
    near(out.share.sum(1), f64(*SHARES[as_name]) * f64(*LENGTHS))
    near(out.share.sum(1), ROWS[as_name], atol=5e-5)
    assert bool((out.share[masks(LENGTHS, 11) == 0] == 0).all())


def shares_with_a_row_dropped(shelf: Shelf, spec: str, as_name: str) -> None:
    """B, N and P count what keeps a token: an empty row and an empty prompt count nothing (G15)."""
    mask = torch.cat((masks(LENGTHS), torch.zeros(2, 8).double()))
    group = torch.cat((PAIRS, torch.tensor([5, 99])))
    out = out_of(shelf, spec, mask, group=group)
    near(out.share[:4, 0], SHARES[as_name])
    assert not out.share[4:].any()


def shares_with_rows_interleaved(shelf: Shelf, spec: str, as_name: str) -> None:
    """The same rows in another order, groups as ids: shares go with their rows (P5)."""
    order = torch.tensor([2, 0, 3, 1])
    got = first_share(shelf, spec, masks(LENGTHS)[order], group=PAIRS[order])
    near(got, f64(*SHARES[as_name])[order])


CHECKS = (shares_of_a_token, shares_with_rows_interleaved, shares_with_a_row_dropped)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", NAMES)
def test_j2_shares(shelf: Shelf, name: str, check: Callable[..., None]) -> None:
    check(shelf, name, name)


@pytest.mark.parametrize(
    ("mutant", "stands_for", "check"),
    [
        ("padded_width", "constant", shares_of_a_token),
        ("padded_width", "sequence_mean", shares_of_a_token),
        ("no_rows", "constant", shares_of_a_token),
        ("all_rows", "sequence_mean", shares_with_a_row_dropped),
        ("by_reshape", "prompt_mean", shares_with_rows_interleaved),
    ],
)
def test_j2_kills(mutants: Shelf, mutant: str, stands_for: str, check: Callable[..., None]) -> None:
    """Each mutant passes until the check that is meant for it."""
    for other in CHECKS[: CHECKS.index(check)]:
        other(mutants, mutant, stands_for)
    with pytest.raises(AssertionError):
        check(mutants, mutant, stands_for)


# --- J3, L1, G11: accumulation -------------------------------------------------------------------


def accumulated(shelf: Shelf, name: str, mask: Tensor, parts: list[list[int]], sliced: bool) -> Any:
    """The gradient by logp of a batch in micro-batches: given slices of the shares, or alone."""
    whole = bench_of(shelf, json.dumps(name))
    zero, group = torch.zeros_like(mask), torch.zeros(mask.shape[0]).long()
    share = out_of(shelf, name, mask).share
    out = torch.zeros_like(mask)
    for rows in parts:
        extra = {"shares": share[rows]} if sliced else {}
        logp = zero[rows].clone().requires_grad_()
        loss = evaluate(
            whole, logp=logp, old_logp=zero[rows], advantages=-mask[rows], mask=mask[rows],
            group=group[rows], budget=8, **extra,
        ).loss  # fmt: skip
        out[rows] = torch.autograd.grad(loss, logp)[0] / (1 if sliced else len(parts))
    return out


def test_j3_slices_of_the_shares_are_exact() -> None:
    """{2,4} and {6,8}: a token keeps 1/20. Kills the mean of micro-means, 1/12 and 1/28."""
    mask, parts = masks(LENGTHS), [[0, 1], [2, 3]]
    near(accumulated(installed(), "token_mean", mask, parts, sliced=True), mask / 20)
    means = accumulated(installed(), "token_mean", mask, parts, sliced=False)
    near(means[:, 0], (0.5 / 6, 0.5 / 6, 0.5 / 14, 0.5 / 14))
    near(means[:, 0], (0.083333, 0.083333, 0.035714, 0.035714), atol=5e-7)
    with pytest.raises(AssertionError):
        near(means, mask / 20)


def test_l1_one_two_and_four_slices_give_one_gradient() -> None:
    """Lengths 4, 1 / 2, 2: 1/9 each; the mean of micro-means gives .5/5 and .5/4."""
    mask = masks((4, 1, 2, 2))
    for parts in ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]):
        near(accumulated(installed(), "token_mean", mask, parts, sliced=True), mask / 9)
    means = accumulated(installed(), "token_mean", mask, [[0, 1], [2, 3]], sliced=False)
    near(means[:, 0], (0.1, 0.1, 0.125, 0.125))


@settings(deadline=None, max_examples=25)
@given(batch=ragged(), name=st.sampled_from(NAMES), cuts=st.lists(st.integers(0, 40), max_size=3))
def test_p6_any_split_sums_to_the_whole(batch: dict[str, Any], name: str, cuts: list[int]) -> None:
    """Losses and gradients. Kills: statistics of a slice, a second division, none at all."""
    spec = bench_of(installed(), json.dumps(name))
    whole, slope = gradient(spec, batch)
    share = evaluate(spec, **batch).share
    rows, total, slopes = batch["mask"].shape[0], 0.0, []
    edges = sorted({0, rows, *(c for c in cuts if c < rows)})
    for low, high in itertools.pairwise(edges):
        part = {n: x[low:high] if isinstance(x, Tensor) else x for n, x in batch.items()}
        loss, piece = gradient(spec, {**part, "shares": share[low:high]})
        total, slopes = total + float(loss), [*slopes, piece]
    loose = 1e-12 if batch["mask"].dtype == torch.float64 else 1e-5
    near(torch.cat(slopes), slope, loose)
    near(total, whole, loose * 10)


# --- J4, G13, G14, L4, L5: what a loss comes to --------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        ("sequence_mean", ((1 + 1 + 1 + 1 + 10) / 5 + (9 + 10) / 10) / 2),  # (2.8 + 1.9)/2 = 2.35
        ("token_mean", (14 + 19) / 15),  # 2.2
        ({"name": "constant", "length": 10}, (14 + 19) / (2 * 10)),  # 1.65
    ],
)
def test_j4_two_rows_of_losses(mutants: Shelf, spec: Any, want: float) -> None:
    """(1,1,1,1,10), (1 x 9, 10). Kills `.mean()` over [B,T] and the padded width: 33/(2 * 12)."""
    mask = masks((5, 10), 12)
    losses = mask.clone()
    losses[0, 4] = losses[1, 9] = 10
    near(out_of(mutants, spec, mask, losses=losses).loss, want)
    mutant = out_of(mutants, "padded_width", mask, losses=losses).loss
    near(mutant, 33 / 24)
    with pytest.raises(AssertionError):
        near(mutant, want)


@pytest.mark.parametrize(
    ("lengths", "spec", "want"),
    [
        ((2, 2, 10, 10), "token_mean", 4 / 24),  # G13, L4: prompts of 4 and 20 tokens
        ((2, 2, 10, 10), "prompt_mean", 0.5),  # (4/4 + 0/20) / 2
        ((2, 2, 10, 10), "sequence_mean", 0.5),  # (1 + 1 + 0 + 0) / 4
        ((2, 2, 10, 10), {"name": "constant", "length": 16}, 4 / (4 * 16)),  # .0625
        ((1, 9), "sequence_mean", 0.5),  # L5: (1 + 0)/2
        ((1, 9), "token_mean", 1 / 10),
        ((1, 9), {"name": "constant", "length": 16}, 1 / (2 * 16)),  # .03125
    ],
)
def test_g13_l4_l5_several_readings_of_a_mean(
    shelf: Shelf, lengths: tuple[int, ...], spec: Any, want: float
) -> None:
    """Losses 1 in the short rows and 0 in the long ones: one name, one number."""
    mask = masks(lengths)
    losses = mask * (torch.tensor(lengths) == min(lengths))[:, None]
    group = (torch.tensor(lengths) > 2).long()
    near(out_of(shelf, spec, mask, losses=losses, group=3 - group).loss, want)


def test_l3_and_g10_the_constant_is_the_budget_never_the_width(mutants: Shelf) -> None:
    """Lengths 2, 4, budget 16: 1/32 at width 4 and at width 40; a length of its own replaces it."""
    for width in (4, 40):
        assert first_share(mutants, "constant", masks((2, 4), width), budget=16) == [1 / 32] * 2
        of_length = {"name": "constant", "length": 5}
        near(first_share(mutants, of_length, masks((2, 4), width), budget=16), [1 / 10] * 2)
    narrow, wide = (first_share(mutants, "padded_width", masks((2, 4), w))[0] for w in (4, 40))
    assert (narrow, wide) == (1 / 8, 1 / 80)  # what the mutant does


def test_the_constant_refuses_what_it_cannot_divide_by(shelf: Shelf) -> None:
    with pytest.raises(LabError, match=r"aggregate 'constant': length=0"):
        bench(shelf, aggregate={"name": "constant", "length": 0})
    with pytest.raises(LabError, match=r"'constant' needs budget"):
        evaluate(bench(shelf, aggregate="constant"), **_cell())


def _cell() -> dict[str, Tensor]:
    one = f64([1.0])
    return {"logp": -one, "old_logp": -one, "mask": one, "advantages": one}


# --- J1, G12: one choice apart from the surrogate ------------------------------------------------


def test_g12_one_share_for_surrogate_kl_and_extra(shelf: Shelf) -> None:
    """Kills: a KL or an entropy term with a mean of its own that nobody asked for."""
    mask = masks((1, 4))
    zero = torch.zeros_like(mask)
    spec = bench(
        shelf,
        aggregate="sequence_mean",
        kl={"name": "in_loss", "beta": 1.0, "estimator": "k2"},
        extra=[{"name": "entropy", "coef": 0.1}],
    )
    out = evaluate(
        spec, logp=zero, old_logp=zero, ref_logp=zero - 1, advantages=zero, mask=mask,
        entropy=mask * f64([1], [2]),
    )  # fmt: skip
    assert all(torch.equal(s, out.share) for s in out.shares.values())
    # k2 of d = 1 is 1/2 everywhere; entropy: -.1 * (1 + 2)/2
    near(out.loss, 0.5 - 0.15)


def test_j1_the_surrogate_does_not_know_its_shares(shelf: Shelf) -> None:
    """The same pulls under every aggregate. Kills: shares baked into the advantages (SkyRL)."""
    mask = masks(LENGTHS)
    pulls = [out_of(shelf, name, mask, group=PAIRS).pull for name in NAMES]
    assert all(torch.equal(p, pulls[0]) for p in pulls)


# --- any batch -----------------------------------------------------------------------------------


def by_hand(name: str, mask: list[list[float]], group: list[int], budget: int) -> list[list[float]]:
    n = [sum(row) for row in mask]
    rows = sum(x > 0 for x in n)
    prompts = len({g for g, x in zip(group, n, strict=True) if x})
    of_group = [sum(x for h, x in zip(group, n, strict=True) if h == g) for g in group]
    share = {
        "token_mean": lambda i: 1 / sum(n),
        "sequence_mean": lambda i: 1 / (n[i] * rows),
        "sequence_sum": lambda i: 1 / rows,
        "constant": lambda i: 1 / (rows * budget),
        "prompt_mean": lambda i: 1 / (of_group[i] * prompts),
    }[name]
    return [[share(i) if m else 0.0 for m in row] for i, row in enumerate(mask)]


def raw(name: str, mask: Tensor, group: Tensor, budget: int) -> Tensor:
    function = getattr(lab_aggregate, name)
    given_ = {"mask": mask, "group": group, "budget": budget}
    return function(**{n: given_[n] for n in function.__annotations__ if n in given_})


def tried(batch: Mapping[str, Any], spec: Bench) -> Tensor:
    """The shares, and that they are constants of the mask's precision."""
    out = evaluate(spec, **{**batch, "logp": batch["logp"].clone().requires_grad_()})
    assert out.share.dtype == batch["mask"].dtype
    assert not out.share.requires_grad
    return out.share


@settings(deadline=None, max_examples=25)
@given(batch=ragged(), name=st.sampled_from(NAMES), empty=st.booleans())
def test_shares_against_plain_python(batch: dict[str, Any], name: str, empty: bool) -> None:
    """Groups of 1 to 16, gaps, both precisions, a row that keeps no token; raw and by the bench."""
    mask, group = batch["mask"].clone(), batch["group"]
    if empty and mask.shape[0] > 1:
        mask[0] = 0
    loose = 1e-12 if mask.dtype == torch.float64 else 1e-6
    want = by_hand(name, mask.tolist(), group.tolist(), 8)
    near(raw(name, mask, group, 8), want, loose)
    near(tried({**batch, "mask": mask}, bench_of(installed(), json.dumps(name))), want, loose)


@settings(deadline=None, max_examples=25)
@given(batch=ragged(), name=st.sampled_from(NAMES), seed=st.integers(0, 1000))
def test_p4_p5_p19_padding_order_and_sums(batch: dict[str, Any], name: str, seed: int) -> None:
    """More columns, another order, other ids; means sum to 1, the others to N/B and N/(B L)."""
    mask, group = batch["mask"].double(), batch["group"]
    share = raw(name, mask, group, 8)
    wide = torch.nn.functional.pad(mask, (0, 3))
    assert torch.equal(raw(name, wide, group, 8)[:, : mask.shape[1]], share)
    order = torch.randperm(mask.shape[0], generator=torch.Generator().manual_seed(seed))
    near(raw(name, mask[order], 1000 - 7 * group[order], 8), share[order])
    per_row = float(mask.sum()) / mask.shape[0]
    total = {"sequence_sum": per_row, "constant": per_row / 8}.get(name, 1.0)
    near(share.sum(), total)


@pytest.mark.parametrize("name", NAMES)
def test_g15_an_empty_batch_gives_a_loss_of_zero(shelf: Shelf, name: str) -> None:
    """Kills: 0/0 in a mean over nothing."""
    mask = torch.zeros(3, 2).double()
    out = out_of(shelf, name, mask)
    assert not out.share.any()
    assert float(out.loss) == 0.0


def test_g13_what_weighs_every_token_alike(shelf: Shelf) -> None:
    """Only these leave the score function unbiased up to one scale that no row's length moves."""
    for name in ("sequence_sum", "constant"):
        few, many = (first_share(shelf, name, masks(n)) for n in ((2, 4), (2, 40)))
        assert len({*few, *many}) == 1, f"{name} weighs a token by its row"
    few, many = (first_share(shelf, "token_mean", masks(n)) for n in ((2, 4), (2, 40)))
    assert few[0] != many[0]  # alike within a batch, yet by the batch's other lengths
