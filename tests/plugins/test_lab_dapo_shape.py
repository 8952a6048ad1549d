"""Reward shaping: H1, H2, N16, T3, G9, and what reads shaped rewards and what raw ones."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import lab_dapo
import pytest
import torch
from cases import bench, f64
from hypothesis import given, settings
from torch import Tensor

from lab import LabError, StopReason, shape_reward, surrogate
from lab.bench import Bench
from lab.loss import Evaluation, evaluate
from lab.shelf import Shelf

CENTRED = {"name": "group", "scale": "none"}


def near(got: Any, want: Any, atol: float = 1e-12) -> None:
    got, want = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (got, want))
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


@shape_reward
def halve(rewards: Tensor) -> Tensor:
    """A second entry for the list: half of what it is given."""
    return rewards / 2


@shape_reward
def unclamped(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Mutant of soft_overlong (100, 20): falls on beyond the limit."""
    return rewards - ((lengths - 80) / 20).clamp(min=0).to(rewards)


@shape_reward
def hard(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Mutant: -1 as soon as the stretch begins."""
    return rewards - (lengths > 80).to(rewards)


@shape_reward
def upwards(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Mutant: the sign of the stretch."""
    return rewards + ((lengths - 80) / 20).clamp(0, 1).to(rewards)


@shape_reward
def by_width(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Mutant: the longest row at hand for the limit."""
    limit = lengths.amax()
    return rewards - ((lengths - 0.8 * limit) / (0.2 * limit)).clamp(0, 1).to(rewards)


@shape_reward
def by_truncation(rewards: Tensor, truncated: Tensor) -> Tensor:
    """Mutant of no_eos_penalty: a stop string passes for an EOS."""
    return rewards - truncated.to(rewards)


@surrogate
def reads_rewards(logp: Tensor, advantages: Tensor, rewards: Tensor) -> Tensor:
    """A surrogate that shows the rewards it sees."""
    return rewards[:, None] + 0 * advantages * logp


@pytest.fixture(scope="module")
def extended() -> Shelf:
    return Shelf.installed(
        [halve, unclamped, hard, upwards, by_width, by_truncation, reads_rewards]
    )


def of_rows(spec: Bench, rewards: Tensor, **more: Any) -> Evaluation:
    """Rows of one token at ratio 1, all of one group."""
    ones = torch.ones_like(rewards)[:, None]
    rows = {"logp": -ones, "old_logp": -ones, "mask": ones, "rewards": rewards}
    return evaluate(spec, **rows, group=torch.zeros(len(rewards)).long(), **more)


def shaped(spec: Any, lengths: list[int], shelf: Shelf, budget: int = 7) -> list[float]:
    """What a reward of 0 becomes at these lengths, read off the reward to go."""
    n = torch.tensor(lengths)
    zeros = torch.zeros(len(n)).double()
    out = of_rows(bench(shelf, shape=[spec]), zeros, lengths=n, budget=budget)
    return out.advantages[:, 0].tolist()


H1 = {85: -0.25, 90: -0.5, 100: -1.0, 80: 0.0, 1: 0.0, 101: -1.0, 500: -1.0}


def test_h1_soft_overlong(shelf: Shelf) -> None:
    """L 100, cache 20: (80 - n)/20 from 80 to 100, -1 beyond (2503.14476 eq. 13)."""
    spec = {"name": "soft_overlong", "length": 100, "cache": 20.0}
    near(shaped(spec, [*H1], shelf), [*H1.values()])
    # left out: L is the budget, the stretch a fifth of it
    near(shaped("soft_overlong", [*H1], shelf, budget=100), [*H1.values()])
    # 4096 of 20480: half way through the last fifth
    near(shaped("soft_overlong", [16384, 18432, 20480], shelf, budget=20480), (0, -0.5, -1))


@pytest.mark.parametrize("mutant", ["unclamped", "hard", "upwards", "by_width"])
def test_h1_kills(extended: Shelf, mutant: str) -> None:
    with pytest.raises(AssertionError):
        near(shaped(mutant, [*H1], extended), [*H1.values()])


@settings(deadline=None, max_examples=30)
@given(
    n=st.integers(1, 400),
    limit=st.integers(1, 300),
    share=st.floats(0.01, 1.0),
    dtype=st.sampled_from((torch.float32, torch.float64)),
)
def test_h1_against_the_formula(n: int, limit: int, share: float, dtype: torch.dtype) -> None:
    cache = share * limit
    fall = ((limit - cache) - n) / cache if n <= limit else -1.0
    want = 0.0 if n <= limit - cache else fall
    got = lab_dapo.soft_overlong(
        torch.tensor([0.5], dtype=dtype), torch.tensor([n]), 1, length=limit, cache=cache
    )
    assert got.dtype == dtype
    near(got, [0.5 + want], 1e-12 / share if dtype == torch.float64 else 1e-4 / share)


@pytest.mark.parametrize("cache", [0.0, -1.0, 101.0])
def test_h1_refuses_a_stretch_outside_the_limit(shelf: Shelf, cache: float) -> None:
    with pytest.raises(LabError, match=rf"shape 'soft_overlong': cache={cache}"):
        bench(shelf, shape=[{"name": "soft_overlong", "length": 100, "cache": cache}])


# --- no_eos_penalty, and the list ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["no_eos_penalty", "by_truncation"])
def test_n16_no_eos_penalty_by_stop_reason(extended: Shelf, name: str) -> None:
    """EOS, a stop string, a cut: 0, -1, -1. Kills: by truncation (0, 0, -1)."""
    reasons = torch.tensor([StopReason.EOS, StopReason.STOP, StopReason.LENGTH])
    got = of_rows(bench(extended, shape=[name]), f64(2, 2, 2), stop_reason=reasons).advantages
    right = torch.allclose(got[:, 0], f64(2, 1, 1), rtol=0, atol=1e-12)
    assert right is (name == "no_eos_penalty")


def test_n16_the_penalty_s_size_and_its_one_input(shelf: Shelf) -> None:
    quarter = bench(shelf, shape=[{"name": "no_eos_penalty", "penalty": 0.25}])
    near(of_rows(quarter, f64(2), stop_reason=torch.tensor([1])).advantages, [[1.75]])
    with pytest.raises(LabError, match=r"'no_eos_penalty' needs stop_reason"):
        of_rows(bench(shelf, shape=["no_eos_penalty"]), f64(2), truncated=torch.tensor([True]))


def test_g9_shaped_rewards_meet_a_shaped_baseline(shelf: Shelf) -> None:
    """(1,1), shaping (-.2,0), centred: .8 - .9, 1 - .9. Kills: an unshaped baseline, (-.2, 0)."""
    spec = bench(shelf, advantage=CENTRED, shape=[{"name": "no_eos_penalty", "penalty": 0.2}])
    out = of_rows(spec, f64(1, 1), stop_reason=torch.tensor([2, 0]))
    near(out.advantages[:, 0], (-0.1, 0.1))
    with pytest.raises(AssertionError):
        near(f64(0.8, 1) - 1, (-0.1, 0.1))


def test_shaping_goes_down_the_list_and_the_surrogate_sees_raw(extended: Shelf) -> None:
    """(2 - 1)/2 or 2/2 - 1; `surrogate` sees 2 (DESIGN section 2)."""
    reason = {"stop_reason": torch.tensor([2])}
    for shape, want in ((["no_eos_penalty", "halve"], 0.5), (["halve", "no_eos_penalty"], 0.0)):
        out = of_rows(bench(extended, shape=shape), f64(2), **reason)
        near(out.advantages, [[want]])
    spec = bench(extended, shape=["halve"], surrogate="reads_rewards", ratio="none")
    near(of_rows(spec, f64(2)).surrogate, [[2.0]])


def test_t3_a_change_lands_on_the_last_token_of_the_policy(shelf: Shelf) -> None:
    """Score 1 and a penalty of .4 on token 2 of 4 (an observation and a pad behind), gamma .5."""
    mask = f64([1, 1, 0, 0])
    spec = bench(
        shelf,
        advantage={"name": "reinforce", "gamma": 0.5},
        shape=[{"name": "no_eos_penalty", "penalty": 0.4}],
    )
    out = evaluate(
        spec, logp=-mask, old_logp=-mask, mask=mask, rewards=f64(1), stop_reason=torch.tensor([1])
    )
    near(out.advantages, [[0.5 * 0.6, 0.6, 0, 0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_at_the_limit_the_penalty_is_exactly_one(dtype: torch.dtype) -> None:
    """n = L takes off 1, and 0 at L - L/5, for every limit. Kills: (n - (L - c))/c, .99999994 at
    822 of these limits in float32, which the std of an otherwise equal group then blows up.
    """
    for limit in range(1, 2049):
        rewards = torch.ones(1, dtype=dtype)
        shaped = lab_dapo.soft_overlong(rewards, torch.tensor([limit]), limit)
        assert float(shaped) == 0, limit
