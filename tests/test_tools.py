"""lab.tools: each reduction by hand: its gaps, groups, float32, gradient and empties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import f64
from torch import Tensor

from lab.tools import (
    at_last_token,
    group_mean,
    group_std,
    masked_mean,
    masked_sum,
    masked_var,
    sibling_mean,
    spread,
    to_go,
)

#: Row 0 has a gap, row 1 an end, row 2 no token at all.
MASK = f64([1, 0, 1], [1, 1, 0], [0, 0, 0])
X = f64([1, 9, 3], [4, 6, 9], [9, 9, 9])
ON_MASK = [1, 3, 4, 6]
JUNK = [0.0, -200.0, 1e30, torch.inf, -torch.inf, torch.nan]


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


def close(got: Tensor, want: Any) -> None:
    due = torch.as_tensor(want, dtype=got.dtype)
    torch.testing.assert_close(got, due, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("dim", "want"),
    [
        (None, 14),  # 1 + 3 + 4 + 6
        (1, [4, 10, 0]),  # 1 + 3, 4 + 6, none
        (0, [5, 6, 3]),  # 1 + 4, 6, 3
    ],
)
def test_masked_sum_leaves_gaps_and_ends_out(dim: int | None, want: Any) -> None:
    close(masked_sum(X, MASK, dim), want)


@pytest.mark.parametrize(
    ("dim", "want"),
    [
        (None, 3.5),  # 14 / 4, not 14 / 9: a mean over the padded width
        (1, [2, 5, 0]),  # 4 / 2, 10 / 2, nothing: 0
        (0, [2.5, 6, 3]),  # 5 / 2, 6 / 1, 3 / 1
    ],
)
def test_masked_mean_divides_by_the_tokens_not_by_the_width(dim: int | None, want: Any) -> None:
    close(masked_mean(X, MASK, dim), want)


@pytest.mark.parametrize("reduce", [masked_sum, masked_mean])
@pytest.mark.parametrize(("dim", "shape"), [(0, (1, 3)), (1, (3, 1))])
def test_keepdim_keeps_the_dimension(reduce: Any, dim: int, shape: tuple[int, int]) -> None:
    kept = reduce(X, MASK, dim, keepdim=True)
    assert kept.shape == shape
    close(kept.squeeze(dim), reduce(X, MASK, dim))


def test_masked_mean_is_that_of_all_tokens_not_of_the_rows_means() -> None:
    """Rows of 1 and 3 tokens: (8 + 0 + 0 + 0) / 4 = 2; a mean of row means says (8 + 0) / 2."""
    close(masked_mean(f64([8, 9, 9], [0, 0, 0]), f64([1, 0, 0], [1, 1, 1])), 2)


@pytest.mark.parametrize(
    ("ddof", "want"),
    [
        (0, 3.25),  # ((1-3.5)^2 + (3-3.5)^2 + (4-3.5)^2 + (6-3.5)^2) / 4 = 13 / 4
        (1, 13 / 3),  # 13 / 3
    ],
)
def test_masked_var_names_its_ddof(ddof: int, want: float) -> None:
    close(masked_var(X, MASK, ddof), want)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("tokens", [0, 1])
def test_the_variance_of_too_few_tokens_is_0(ddof: int, tokens: int) -> None:
    """0/0 is NaN, and (N - ddof) = -1 would turn the sign."""
    mask = f64([1, 0]) * tokens
    close(masked_var(f64([3, 7]), mask, ddof), 0)


def test_masked_var_has_two_passes() -> None:
    """E[x^2] - E[x]^2 in float32 says 0 or 8 for numbers near 10000; ((-1)^2 + 0 + 1^2) / 2 = 1."""
    x = torch.tensor([[9999.0, 10000.0, 10001.0]])
    assert float(masked_var(x, torch.ones_like(x), 1)) == 1.0
    naive = ((x**2).mean() - x.mean() ** 2) * 3 / 2
    assert float(naive) != 1.0


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, -0.2, 1e-30, 1e6])
@pytest.mark.parametrize("n", range(1, 17))
def test_constants_are_exact_in_float32(value: float, n: int) -> None:
    """A plain mean of eight .3 is .30000001: divided by its own std it becomes .0289."""
    x, mask = torch.full((1, n), value), torch.ones(1, n)
    row, group = x[0], torch.full((n,), 5)
    exact = torch.tensor(value)
    assert torch.equal(masked_mean(x, mask), exact)
    assert torch.equal(masked_mean(x, mask, 1), exact[None])
    assert torch.equal(group_mean(row, group), row)
    assert torch.equal(sibling_mean(row, group), row if n > 1 else torch.zeros(1))
    for ddof in (0, 1):
        assert float(masked_var(x, mask, ddof)) == 0
        assert float(group_std(row, group, ddof).abs().max()) == 0


def test_a_plain_mean_of_constants_is_not_exact() -> None:
    """What the test above kills: the mistake made once."""
    x = torch.full((8,), 0.3)
    std = ((x - x.mean()) ** 2).sum().div(7).sqrt()
    assert float(((x - x.mean()) / (std + 1e-6)).abs().max()) == pytest.approx(0.0289, abs=1e-4)


@pytest.mark.parametrize("junk", JUNK)
def test_junk_off_the_mask_changes_no_value(junk: float) -> None:
    """0 x inf is NaN: a reduction that multiplies by the mask lets junk in."""
    x = torch.where(MASK.bool(), X, torch.tensor(junk, dtype=torch.float64))
    for dim in (None, 0, 1):
        assert torch.equal(masked_sum(x, MASK, dim), masked_sum(X, MASK, dim))
        assert torch.equal(masked_mean(x, MASK, dim), masked_mean(X, MASK, dim))
    assert torch.equal(masked_var(x, MASK, 1), masked_var(X, MASK, 1))
    assert torch.equal(to_go(x, MASK)[MASK.bool()], to_go(X, MASK)[MASK.bool()])


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize(
    "reduce",
    [
        lambda x: masked_sum(x, MASK),
        lambda x: masked_mean(x, MASK),
        lambda x: masked_mean(x, MASK, 1).sum(),
        lambda x: masked_var(x, MASK, 1),
    ],
    ids=["sum", "mean", "row means", "var"],
)
def test_junk_off_the_mask_changes_no_gradient(reduce: Any, junk: float) -> None:
    """Selected before any arithmetic: the backward pass through 0 * (NaN - mean) is NaN too."""

    def gradient(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(reduce(x), x)[0]

    x = torch.where(MASK.bool(), X, torch.tensor(junk, dtype=torch.float64))
    assert torch.equal(gradient(x)[MASK.bool()], gradient(X)[MASK.bool()])


def test_the_gradient_of_masked_mean_is_one_over_n_on_each_token() -> None:
    """The smallest value, taken off first, leaves no trace in it; nor does a gap or an end."""
    x = X.clone().requires_grad_()
    close(torch.autograd.grad(masked_mean(x, MASK), x)[0], MASK / 4)
    # rows of 2, 2 and no tokens
    rows = torch.autograd.grad(masked_mean(x, MASK, 1).sum(), x)[0]
    close(rows, MASK * f64([0.5], [0.5], [0]))
    # columns of 2, 1 and 1 tokens
    columns = torch.autograd.grad(masked_mean(x, MASK, 0).sum(), x)[0]
    close(columns, MASK * f64([0.5, 1, 1]))


def test_the_gradient_of_masked_mean_where_the_smallest_value_stands_twice() -> None:
    x = f64([2, 2, 5]).requires_grad_()
    mask = f64([1, 1, 1])
    close(torch.autograd.grad(masked_mean(x, mask), x)[0], f64([1, 1, 1]) / 3)


def test_the_gradient_of_masked_var() -> None:
    """2 (x - mean) / (N - 1): mean 3.5, (1, 3, 4, 6) give (-5, -1, 1, 5) / 3."""
    x = X.clone().requires_grad_()
    got = torch.autograd.grad(masked_var(x, MASK, 1), x)[0]
    close(got[MASK.bool()], f64(-5, -1, 1, 5) / 3)
    close(got[~MASK.bool()], torch.zeros(5, dtype=torch.float64))


def test_the_gradients_of_the_group_means() -> None:
    """1/n to each of the group, 1/(n - 1) to each other row: the minimum gets none of its own."""
    weights = f64(1, 10, 100)
    x, group = f64(1, 2, 5).requires_grad_(), ids(4, 4, 4)
    (mean,) = torch.autograd.grad((weights * group_mean(x, group)).sum(), x)
    close(mean, f64(37, 37, 37))  # 111 / 3
    (others,) = torch.autograd.grad((weights * sibling_mean(x, group)).sum(), x)
    close(others, f64(55, 50.5, 5.5))  # (10 + 100)/2, (1 + 100)/2, (1 + 10)/2


def test_groups_go_by_id_not_by_position() -> None:
    """Rewards (1,0,0,1,.5), ids (7,3,7,3,7): means .5 and .5; a reshape mixes the groups."""
    x, group = f64(1, 0, 0, 1, 0.5), ids(7, 3, 7, 3, 7)
    close(x - group_mean(x, group), f64(0.5, -0.5, -0.5, 0.5, 0))
    # siblings: (0 + .5)/2, 1, (1 + .5)/2, 0, (1 + 0)/2
    close(sibling_mean(x, group), f64(0.25, 1, 0.75, 0, 0.5))


@pytest.mark.parametrize(
    ("ddof", "three", "two"),
    [
        (0, (0.5 / 3) ** 0.5, 0.5),  # sum of squares .25 + .25 + 0; .25 + .25
        (1, 0.5, 0.5**0.5),  # .5 / 2; .5 / 1
    ],
)
def test_group_std_names_its_ddof(ddof: int, three: float, two: float) -> None:
    """n differs by group: a division by the batch's rows gives both groups one divisor."""
    x, group = f64(1, 0, 0, 1, 0.5), ids(7, 3, 7, 3, 7)
    close(group_std(x, group, ddof), f64(three, two, three, two, three))


@pytest.mark.parametrize("relabelled", [ids(0, 1, 0, 1, 0), ids(-4, 10**12, -4, 10**12, -4)])
def test_the_value_of_an_id_means_nothing(relabelled: Tensor) -> None:
    """Ids used as indices, or assumed to start at 0 and to have no holes."""
    x, group = f64(1, 0, 0, 1, 0.5), ids(7, 3, 7, 3, 7)
    for reduce in (group_mean, sibling_mean, lambda x, g: group_std(x, g, 1)):
        assert torch.equal(reduce(x, group), reduce(x, relabelled))


def test_a_group_of_one_has_itself_as_mean_and_no_deviation_and_no_siblings() -> None:
    x, group = f64(3, 1, 2), ids(0, 5, 5)
    close(group_mean(x, group), f64(3, 1.5, 1.5))
    close(sibling_mean(x, group), f64(0, 2, 1))
    close(group_std(x, group, 1)[:1], f64(0))
    close(group_std(x, group, 0)[:1], f64(0))


def test_leave_one_out_of_a_large_offset_in_float32() -> None:
    """(sum - own) / (n - 1) on 1000.1 loses the digits; the siblings of equal rows are equal."""
    x = torch.tensor([1000.1] * 7 + [1000.6])
    others = sibling_mean(x, torch.zeros(8).long())
    assert float(others[7]) == float(x[0])


def test_to_go_sums_what_is_still_to_come() -> None:
    x, mask = f64([1, 2, 4]), f64([1, 1, 1])
    close(to_go(x, mask), f64([7, 6, 4]))  # 1+2+4, 2+4, 4
    close(to_go(x, mask, 0.5), f64([3, 4, 4]))  # 1 + .5*(2 + .5*4), 2 + .5*4, 4


def test_to_go_carries_its_sum_through_a_gap_undecayed() -> None:
    """Mask 1,1,0,0,1, reward 1 at the end, gamma .5: (.25,.5,.,.,1), not (.0625,.125,.,.,1)."""
    mask = f64([1, 1, 0, 0, 1])
    got = to_go(f64([0, 0, 9, 9, 1]), mask, 0.5)
    close(got[mask.bool()], f64(0.25, 0.5, 1))


def test_to_go_does_not_sum_what_stands_behind_the_end() -> None:
    mask = f64([1, 1, 0])
    close(to_go(f64([1, 2, 9]), mask)[mask.bool()], f64(3, 2))


def test_at_last_token_is_the_last_mask_token_not_the_last_column() -> None:
    mask = f64([1, 0, 1], [1, 1, 0], [0, 0, 0], [1, 0, 0])
    got = at_last_token(f64(5, 6, 7, 8), mask)
    close(got, f64([0, 0, 5], [0, 6, 0], [0, 0, 0], [8, 0, 0]))


def test_at_last_token_is_not_at_the_number_of_tokens() -> None:
    """Mask 1,0,1 has two tokens, its last stands at 2: a position counted from the sum is 1."""
    close(at_last_token(f64(5), f64([1, 0, 1])), f64([0, 0, 5]))


def test_spread_gives_the_row_its_number_and_no_other_place() -> None:
    close(spread(f64(5, 6, 7), MASK), f64([5, 0, 5], [6, 6, 0], [0, 0, 0]))


def test_a_number_without_a_token_to_stand_on_reaches_nobody() -> None:
    """NaN on an empty row (an unscored answer) must not appear anywhere."""
    nothing = f64([0, 0])
    for place in (at_last_token, spread):
        close(place(f64(torch.nan), nothing), f64([0, 0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_precision_is_kept(dtype: torch.dtype) -> None:
    """An upcast inside would change what a float32 loss adds up."""
    x, mask, group = X.to(dtype), MASK.to(dtype), ids(0, 0, 1)
    row = x[:, 0]
    results = [
        *(masked_sum(x, mask, 1), masked_mean(x, mask), masked_var(x, mask, 1)),
        *(group_mean(row, group), group_std(row, group, 1), sibling_mean(row, group)),
        *(to_go(x, mask, 0.9), at_last_token(row, mask), spread(row, mask)),
    ]
    assert {r.dtype for r in results} == {dtype}


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)], ids=["no rows", "no columns"])
def test_empty_tensors(shape: tuple[int, int]) -> None:
    """A rollout of which no row is left, and a width of 0: zeros of the right shape, no error."""
    x = mask = torch.zeros(shape, dtype=torch.float64)
    row = torch.zeros(shape[0], dtype=torch.float64)
    assert masked_sum(x, mask).shape == masked_mean(x, mask).shape == masked_var(x, mask, 1).shape
    assert float(masked_mean(x, mask)) == float(masked_var(x, mask, 1)) == 0
    assert masked_mean(x, mask, 1).shape == row.shape
    assert masked_mean(x, mask, 0).shape == (shape[1],)
    for result in (to_go(x, mask), at_last_token(row, mask), spread(row, mask)):
        assert result.shape == shape


def test_groups_of_no_rows() -> None:
    nothing, none = f64(), torch.zeros(0, dtype=torch.int64)
    for result in (
        group_mean(nothing, none),
        sibling_mean(nothing, none),
        group_std(nothing, none, 1),
    ):
        assert result.shape == (0,)
