"""lab.tokens.check_rescored: a fresh rollout scored again."""

from __future__ import annotations

import math

import pytest
import torch
from cases import PI, f64

from lab.errors import LabError
from lab.tokens import check_rescored, log_probs

SAMPLED = log_probs(f64(*PI).log(), 0.6)[None]
ON = torch.ones(1, 3, dtype=torch.float64)


def test_the_largest_difference_is_returned() -> None:
    again = SAMPLED + f64([2e-6, -5e-6, 1e-6])
    assert check_rescored(SAMPLED, again, ON, 1e-5) == pytest.approx(5e-6)
    assert check_rescored(SAMPLED, SAMPLED, ON, 1e-5) == 0


def test_tokens_are_compared_and_not_their_mean() -> None:
    """F3: untempered over tempered (.821990, 1.155489, 1.514119), whose mean is 1 where sampled.

    .608280 * .821990 + .259630 * 1.155489 + .132090 * 1.514119 = 1: a check of the mean passes.
    """
    again = log_probs(f64(*PI).log(), 1.0)[None]
    ratio = (again - SAMPLED).exp()
    torch.testing.assert_close(ratio[0], f64(0.821990, 1.155489, 1.514119), rtol=0, atol=5e-7)
    assert float((SAMPLED.exp() * ratio).sum()) == pytest.approx(1, abs=1e-12)
    with pytest.raises(LabError, match=r"max \|log ratio\| 0\.41 > .*Likely: a temperature"):
        check_rescored(SAMPLED, again, ON, 1e-5)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("place", range(3))
def test_one_token_is_enough(place: int, sign: int) -> None:
    again = SAMPLED.clone()
    again[0, place] += sign * 2e-5
    with pytest.raises(LabError, match="re-scored rollout differs"):
        check_rescored(SAMPLED, again, ON, 1e-5)
    assert check_rescored(SAMPLED, again, ON, 1e-4) == pytest.approx(2e-5)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(junk: float) -> None:
    """`worst > limit` is false for NaN, and lets it pass."""
    again = SAMPLED.clone()
    again[0, 1] = junk
    with pytest.raises(LabError, match=r"max \|log ratio\| (nan|inf)"):
        check_rescored(SAMPLED, again, ON, 1e-5)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -200.0])
def test_what_stands_off_the_mask_is_nothing(junk: float) -> None:
    again, mask = SAMPLED.clone(), f64([1, 0, 1])
    again[0, 1] = junk
    assert check_rescored(SAMPLED, again, mask, 1e-5) == 0
    assert check_rescored(again, SAMPLED, mask, 1e-5) == 0


def test_the_causes_given_are_named_in_their_order() -> None:
    causes = ["dropout on (model.training is True)", "precision (torch.bfloat16)"]
    with pytest.raises(LabError) as e:
        check_rescored(SAMPLED, SAMPLED + 0.031, ON, 1e-5, causes)
    assert str(e.value) == (
        "re-scored rollout differs: max |log ratio| 0.031 > 1e-05. "
        "Likely: dropout on (model.training is True); precision (torch.bfloat16)"
    )


def test_a_kept_mass_points_at_the_support() -> None:
    """F4's log .8 on every token, or another mass at each: never above 0.

    A temperature has both signs: F3's .82, 1.16, 1.51.
    """
    for mass in ([0.8, 0.8, 0.8], [0.9, 0.8, 1.0], [0.95, 0.3, 0.6]):
        with pytest.raises(LabError, match=r"Likely: the support \(top-k, top-p\)"):
            check_rescored(SAMPLED, SAMPLED + f64(mass).log(), ON, 1e-5)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_nothing_to_compare(shape: tuple[int, int]) -> None:
    empty = torch.zeros(shape)
    assert check_rescored(empty, empty, empty, 1e-5) == 0
