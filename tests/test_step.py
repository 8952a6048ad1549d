"""lab.step.complete: what is derived from what is given, and what is refused with which words."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cases import f64
from torch import Tensor

from lab import LabError, StopReason
from lab.step import GIVEN, MADE, complete

#: Three rows of 2, 3 and 1 tokens; the first has a gap.
MASK = f64([1, 0, 1], [1, 1, 1], [1, 0, 0])
LOGP = f64([-1, -2, -3], [-1, -1, -1], [-2, -2, -2])
GIVEN_AT_LEAST = {"logp": LOGP, "mask": MASK}


def flags(*given: bool) -> Tensor:
    return torch.tensor(given)


def ids(*given: int) -> Tensor:
    return torch.tensor(given)


def step(**more: Any) -> Any:
    return complete({**GIVEN_AT_LEAST, **more})


def refused(message: str, **more: Any) -> None:
    with pytest.raises(LabError, match=f"^{re.escape(message)}$"):
        step(**more)


def test_none_counts_as_not_given() -> None:
    assert step(rewards=None, group=None, budget=None).keys() == step().keys()


def test_nothing_is_made_up() -> None:
    """An old_logp or a group that nobody gave would hide a mistake of the caller's."""
    assert step().keys() == {"logp", "mask", "lengths"}


# --- what follows from the mask ------------------------------------------------------------------


def test_lengths_count_mask_tokens_not_the_position_of_the_last() -> None:
    """Row 0 has its last token at 2 and two tokens: 2, not 3."""
    assert step()["lengths"].tolist() == [2, 3, 1]
    assert step()["lengths"].dtype == torch.int64


def test_given_lengths_stay() -> None:
    assert step(lengths=ids(7, 7, 7))["lengths"].tolist() == [7, 7, 7]


# --- the stop reason -----------------------------------------------------------------------------


def test_only_the_length_limit_is_a_cut() -> None:
    """A stop string (1) ends a row as EOS (0) does; a rule `reason != EOS` cuts both."""
    reason = ids(StopReason.EOS, StopReason.STOP, StopReason.LENGTH)
    assert step(stop_reason=reason)["truncated"].tolist() == [False, False, True]


def test_truncation_is_never_told_from_the_width() -> None:
    """Row 1 fills the width with an EOS, row 2 was cut after one token."""
    assert step(stop_reason=ids(0, 0, 2))["truncated"].tolist() == [False, False, True]
    assert "truncated" not in step()


def test_truncated_and_stop_reason_may_agree() -> None:
    out = step(stop_reason=ids(0, 2, 1), truncated=flags(False, True, False))
    assert out["truncated"].tolist() == [False, True, False]


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.uint8])
def test_truncated_may_be_0_and_1(kind: torch.dtype) -> None:
    out = step(truncated=flags(False, True, False).to(kind), bootstrap=f64(1, 2, 3))
    assert out["truncated"].dtype == torch.bool
    assert out["bootstrap"].tolist() == [0, 2, 0]


# --- the bootstrap -------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", [9.0, torch.inf, torch.nan])
def test_the_bootstrap_is_0_where_a_row_terminated(junk: float) -> None:
    """A critic's value of the state after an EOS is no future; 0 * NaN would stay NaN."""
    out = step(stop_reason=ids(0, 2, 1), bootstrap=f64(junk, 0.6, junk))
    assert out["bootstrap"].tolist() == [0, 0.6, 0]


def test_the_bootstrap_is_0_where_nothing_was_cut() -> None:
    out = step(truncated=flags(False, False, False))
    assert out["bootstrap"].tolist() == [0, 0, 0]
    assert out["bootstrap"].dtype == torch.float64


def test_a_cut_row_without_a_value_has_no_bootstrap() -> None:
    """0 would say that the row terminated: better that an estimator names what is missing."""
    assert "bootstrap" not in step(truncated=flags(False, True, False))


def test_a_bootstrap_alone_is_taken_at_its_word() -> None:
    assert step(bootstrap=f64(1, 2, 3))["bootstrap"].tolist() == [1, 2, 3]


# --- rewards -------------------------------------------------------------------------------------


def test_an_outcome_score_lands_on_the_last_mask_token() -> None:
    """Once, behind the gap, and not on the last column."""
    want = f64([0, 0, 5], [0, 0, 6], [7, 0, 0])
    assert torch.equal(step(rewards=f64(5, 6, 7))["token_rewards"], want)


def test_token_rewards_sum_to_the_rewards_on_the_mask() -> None:
    """Row 0 is 1 + 3, without the 9 in its gap: 4."""
    given = f64([1, 9, 3], [1, 2, 3], [7, 9, torch.nan])
    assert step(token_rewards=given)["rewards"].tolist() == [4, 6, 7]


def test_token_rewards_and_rewards_stay_as_given() -> None:
    tokens, rewards = f64([1, 9, 3], [1, 2, 3], [7, 9, 9]), f64(4, 6, 7)
    out = step(token_rewards=tokens, rewards=rewards)
    assert torch.equal(out["token_rewards"], tokens)
    assert torch.equal(out["rewards"], rewards)


def test_a_rounding_between_token_rewards_and_rewards_is_no_contradiction() -> None:
    out = step(token_rewards=f64([1, 0, 3], [1, 2, 3], [7, 0, 0]), rewards=f64(4, 6.0001, 7))
    assert out["rewards"].tolist() == [4, 6.0001, 7]


# --- what is converted ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.uint8])
def test_a_mask_of_another_kind_takes_logps_precision(kind: torch.dtype) -> None:
    for dtype in (torch.float32, torch.float64):
        out = complete({"logp": LOGP.to(dtype), "mask": MASK.to(kind)})
        assert out["mask"].dtype == dtype
        assert torch.equal(out["mask"], MASK.to(dtype))


def test_whole_rewards_take_logps_precision() -> None:
    assert step(rewards=ids(1, 0, 1))["rewards"].dtype == torch.float64


def test_ids_become_int64() -> None:
    assert step(group=torch.tensor([3, 3, 1], dtype=torch.int32))["group"].dtype == torch.int64


def test_the_given_tensors_are_left_alone() -> None:
    given = {
        "logp": LOGP.clone(),
        "mask": MASK.clone(),
        "bootstrap": f64(1, 2, 3),
        "truncated": flags(False, True, False),
        "rewards": f64(5, 6, 7),
    }
    before = {n: x.clone() for n, x in given.items()}
    complete(given)
    assert given.keys() == before.keys()
    assert all(torch.equal(given[n], before[n]) for n in given)


def test_a_live_logp_stays_live() -> None:
    logp = LOGP.clone().requires_grad_()
    assert complete({"logp": logp, "mask": MASK})["logp"] is logp


# --- what is refused -----------------------------------------------------------------------------


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(LabError, match=r"^no input 'old_logps'\. Did you mean 'old_logp'\? ") as e:
        step(old_logps=LOGP)
    assert str(e.value).endswith(", ".join(GIVEN))


@pytest.mark.parametrize("name", MADE)
def test_what_the_core_makes_cannot_be_given(name: str) -> None:
    """A given ratio or pull would be silently ignored."""
    refused(
        f"{name} is made by the recipe's components; give what they make it from", **{name: LOGP}
    )


def test_the_mask_that_shares_count_cannot_be_given() -> None:
    with pytest.raises(LabError, match=r"^no input 'counted'\."):
        step(counted=MASK)


@pytest.mark.parametrize("missing", ["logp", "mask"])
def test_logp_and_mask_are_due(missing: str) -> None:
    left = {n: x for n, x in GIVEN_AT_LEAST.items() if n != missing}
    other = next(iter(left))
    with pytest.raises(LabError, match=rf"^{missing} \[B,T\] was not given; got {other}$"):
        complete(left)


def test_nothing_at_all_is_refused() -> None:
    with pytest.raises(LabError, match=r"^logp \[B,T\] was not given; got nothing$"):
        complete({})


@pytest.mark.parametrize(
    ("logp", "what"),
    [
        (LOGP[0], "float64 [3]"),
        (LOGP[None], "float64 [1, 3, 3]"),
        (LOGP.half(), "float16 [3, 3]"),
        (LOGP.long(), "int64 [3, 3]"),
        (LOGP[:, :0], "float64 [3, 0]"),
    ],
)
def test_logp_is_rows_by_tokens_in_float32_or_float64(logp: Tensor, what: str) -> None:
    refused(f"logp is {what}; [B,T] in float32 or float64 was due, T at least 1", logp=logp)


def test_an_empty_batch_is_no_error() -> None:
    out = complete(
        {"logp": LOGP[:0], "mask": MASK[:0], "rewards": f64(), "stop_reason": ids(0)[:0]}
    )
    assert out["lengths"].shape == out["truncated"].shape == out["bootstrap"].shape == (0,)


@pytest.mark.parametrize("bad", [0.5, 2.0, -1.0, torch.nan])
def test_a_mask_is_0_or_1(bad: float) -> None:
    """A fraction would weigh a token twice: in the mask and in its share."""
    mask = MASK.clone()
    mask[1, 1] = bad
    refused("mask holds other values than 0 and 1", mask=mask)


@pytest.mark.parametrize(
    ("name", "bad", "what"),
    [
        ("old_logp", LOGP[:, :2], "float64 [3, 2]; [B,T] = [3, 3]"),
        ("values", LOGP[:, :1], "float64 [3, 1]; [B,T] = [3, 3]"),  # it would broadcast
        ("advantages", f64(1, 2, 3), "float64 [3]; [B,T] = [3, 3]"),  # so would this
        ("rewards", f64(1, 2), "float64 [2]; [B] = [3]"),
        ("rewards", f64([1, 2, 3]), "float64 [1, 3]; [B] = [3]"),
        ("group", ids(0, 1), "int64 [2]; [B] = [3]"),
        ("mask", MASK[:2], "float64 [2, 3]; [B,T] = [3, 3]"),
    ],
)
def test_a_wrong_shape_is_refused(name: str, bad: Tensor, what: str) -> None:
    """Square batches hide a [B] that broadcasts as [T]."""
    refused(f"{name} is {what} was due, as logp has it", **{name: bad})


@pytest.mark.parametrize("name", ["old_logp", "rewards", "entropy", "mask", "bootstrap"])
def test_one_precision_throughout(name: str) -> None:
    """float32 beside float64 would be promoted without a word."""
    x = (f64(1, 1, 1) if name in ("rewards", "bootstrap") else MASK).float()
    line = f"{name} is float32 {list(x.shape)} and logp float64 [3, 3]; one precision was due"
    refused(f"{line} (x.to(logp.dtype))", **{name: x})


@pytest.mark.parametrize(
    ("name", "bad", "what"),
    [
        ("group", f64(0, 0, 1), "float64 [3]; int64"),
        ("group", flags(True, True, False), "bool [3]; int64"),
        ("stop_reason", f64(0, 1, 2), "float64 [3]; int64"),
        ("lengths", f64(2, 3, 1), "float64 [3]; int64"),
        ("truncated", f64(0, 1, 0), "float64 [3]; bool"),
        ("truncated", ids(0, 1, 2), "int64 [3]; bool"),
    ],
)
def test_ids_are_whole_and_flags_are_flags(name: str, bad: Tensor, what: str) -> None:
    refused(f"{name} is {what} was due", **{name: bad})


def test_a_tensor_is_a_tensor() -> None:
    line = "is a list; a tensor was due (torch.as_tensor makes one)"
    refused(f"rewards {line}", rewards=[1.0, 0.0, 1.0])
    refused(f"mask {line}", mask=[[1.0, 0.0, 1.0]] * 3)  # given, so not "not given"


@pytest.mark.parametrize("bad", [0, -1, 8.0, True, "8"])
def test_a_budget_is_a_whole_number_of_tokens(bad: Any) -> None:
    refused(f"budget = {bad!r}; a whole number of tokens, at least 1, was due", budget=bad)


@pytest.mark.parametrize("bad", [-1, 3])
def test_an_unknown_stop_reason_is_refused(bad: int) -> None:
    """It would count as terminated, since it is not LENGTH."""
    refused(
        "stop_reason holds other values than [0, 1, 2] (lab.StopReason)",
        stop_reason=ids(0, bad, 2),
    )


def test_truncated_and_stop_reason_may_not_contradict() -> None:
    refused(
        "truncated and stop_reason contradict each other in row 2",
        stop_reason=ids(0, 2, 1),
        truncated=flags(False, True, True),
    )


def test_token_rewards_and_rewards_may_not_contradict() -> None:
    """Row 1 sums to 1 + 2 + 3 = 6; row 0's 9 stands in its gap and is no part of the sum."""
    refused(
        "token_rewards of row 1 sum to 6 on its mask, rewards say 5",
        token_rewards=f64([1, 9, 3], [1, 2, 3], [7, 9, 9]),
        rewards=f64(4, 5, 7),
    )
