"""lab.rollout.prepare: KL in the reward, values old and new, normalisation; numbers by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import f64
from handmade import CENTRED, GAE, batch, bench, close, rows_of_one, spies
from torch import Tensor

import lab
from lab import LabError
from lab.loss import evaluate, optimisation_batch
from lab.rollout import prepare

#: Two rows of 3 and 2 tokens, the first with a gap; costs .1 per unit of log-ratio.
MASK = f64([1, 1, 0, 1], [1, 1, 0, 0])
COST = f64([1, 2, 9, 3], [4, 6, 9, 9]) * 0.1
REWARDS = f64(5, 7)


def k1(**options: Any) -> dict[str, Any]:
    return {"name": "in_reward", "estimator": "k1", "beta": 0.1, **options}


def paid(mask: Tensor = MASK, **slots: Any) -> Tensor:
    """The advantages where old - ref is ten times COST: so the cost of each token is COST."""
    b = bench(**{"kl": k1(), **slots})
    return prepare(b, batch(mask, rewards=REWARDS, ref_logp=-mask - 10 * COST))["advantages"]


# --- before the advantage ------------------------------------------------------------------------


def test_to_go_before_each_token_pays_for_the_rest_of_its_row() -> None:
    """Row 0: 5 - (.1+.2+.3) = 4.4, 5 - (.2+.3) = 4.5, 5 - .3 = 4.7; the 9 in the gap costs nothing.

    Row 1: 7 - (.4+.6) = 6, 7 - .6 = 6.4.
    """
    close(paid(), [[4.4, 4.5, 0, 4.7], [6, 6.4, 0, 0]])


def test_sequence_before_the_last_token_pays_for_the_row() -> None:
    """Reward to go is 5 - .6 everywhere in row 0, 7 - 1 in row 1."""
    close(paid(kl=k1(credit="sequence")), [[4.4, 4.4, 0, 4.4], [6, 6, 0, 0]])


@pytest.mark.parametrize("credit", ["to_go", "sequence"])
def test_the_sum_of_a_rows_costs_meets_the_group_statistics(credit: str) -> None:
    """Rewards 5 - .6 = 4.4 and 7 - 1 = 6: less their mean 5.2, (-.8,.8)."""
    got = paid(kl=k1(credit=credit), advantage=CENTRED)
    close(got, MASK * f64([-0.8], [0.8]))


def test_what_goes_with_after_only_is_refused_before() -> None:
    for option in ({"credit": "own"}, {"centre": True}):
        with pytest.raises(LabError, match=r"goes with when = 'after' only"):
            bench(kl=k1(when="before", **option))


# --- after the advantage -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("credit", "want"),
    [
        ("own", [[4.9, 4.8, 0, 4.7], [6.6, 6.4, 0, 0]]),  # 5 - .1, 5 - .2, 5 - .3; 7 - .4, 7 - .6
        ("to_go", [[4.4, 4.5, 0, 4.7], [6, 6.4, 0, 0]]),  # 5 - .6, 5 - .5, 5 - .3; 7 - 1, 7 - .6
        ("sequence", [[4.4, 4.4, 0, 4.4], [6, 6, 0, 0]]),  # 5 - .6; 7 - 1
    ],
)
def test_after_the_credit_says_what_a_token_pays(credit: str, want: Any) -> None:
    close(paid(kl=k1(when="after", credit=credit)), want)


@pytest.mark.parametrize(
    ("credit", "mean"),
    [
        ("own", 0.32),  # (.1 + .2 + .3 + .4 + .6) / 5 tokens; over the width it would be .2
        ("to_go", 0.6),  # (.6 + .5 + .3 + 1 + .6) / 5
        ("sequence", 0.76),  # (3 * .6 + 2 * 1) / 5
    ],
)
def test_centre_gives_the_mean_cost_of_a_token_back(credit: str, mean: float) -> None:
    plain = paid(kl=k1(when="after", credit=credit))
    centred = paid(kl=k1(when="after", credit=credit, centre=True))
    close(centred, plain + mean * MASK)


def test_before_and_after_of_a_standardised_group() -> None:
    """R (1,0,0,1), sequence KL (.2,.1,.3,.4), beta .1, std ddof 1, eps 0 (ACCEPTANCE H11).

    Before: rewards (.98,-.01,-.03,.96), mean .475, std by n - 1 from (.505,-.485,-.505,.485).
    After: (1-.5)/.577350 - .02 = .846025, and so on. Only the order differs.
    """
    std = {"name": "group", "scale": "std", "ddof": 1, "eps": 0.0}
    kl = f64([0.2], [0.1], [0.3], [0.4])
    want = {
        "before": [0.883341, -0.848357, -0.883341, 0.848357],
        "after": [0.846025, -0.876025, -0.896025, 0.826025],
    }
    for when, due in want.items():
        b = bench(kl=k1(when=when, credit="sequence"), advantage=std)
        got = prepare(b, rows_of_one(1, 0, 0, 1, ref_logp=-1 - kl))["advantages"][:, 0]
        close(got, due, 5e-7)


def test_the_coefficient_reaches_centred_groups() -> None:
    """As above without a std: (.505,-.485,-.505,.485); a dead coefficient gives (.5,-.5,-.5,.5)."""
    kl = f64([0.2], [0.1], [0.3], [0.4])
    b = bench(kl=k1(), advantage=CENTRED)
    got = prepare(b, rows_of_one(1, 0, 0, 1, ref_logp=-1 - kl))["advantages"][:, 0]
    close(got, [0.505, -0.485, -0.505, 0.485])


def test_targets_hold_a_cost_before_and_not_one_after() -> None:
    """gae, lambda 1, values 0: targets are the returns, 4.4, 4.5, 4.7 before and 5 after."""
    for when, first in (("before", [4.4, 4.5, 0, 4.7]), ("after", [5, 5, 0, 5])):
        b = bench(advantage={**GAE, "lam": 1.0}, kl=k1(when=when))
        step = batch(MASK, rewards=REWARDS, ref_logp=-MASK - 10 * COST, values=0 * MASK)
        out = prepare(b, step)
        close(out["returns"][0], first)
        close(out["advantages"][0], [4.4, 4.5, 0, 4.7])


@pytest.mark.parametrize("when", ["before", "after"])
def test_beta_0_is_no_kl_bit_for_bit(when: str) -> None:
    assert torch.equal(paid(kl={**k1(when=when), "beta": 0.0}), paid(kl="none"))


def test_the_score_stands_on_the_last_token_and_decays_by_lambda() -> None:
    """V 0, gamma 1, lambda .95, score 1, 3 tokens: (.9025,.95,1), with or without a pad behind.

    At the first pad it would be (.857375,.9025,.95).
    """
    for width in (3, 5):
        mask = (torch.arange(width) < 3).double()[None]
        out = prepare(bench(advantage=GAE), batch(mask, rewards=f64(1), values=0 * mask))
        close(out["advantages"][0, :3], [0.9025, 0.95, 1])


# --- values --------------------------------------------------------------------------------------

#: ACCEPTANCE C1 and C8: rewards (0,0,1), values (.2,.4,.5), lambda .9.
EPISODE = {"token_rewards": f64([0, 0, 1])}
OLD, LIVE = f64([0.2, 0.4, 0.5]), f64([3, 3, 3])


def episode(**values: Tensor) -> lab.loss.Evaluation:
    b = bench(advantage={**GAE, "lam": 0.9}, critic_loss={"name": "clipped", "c": 0.2})
    return evaluate(b, **batch(torch.ones(1, 3, dtype=torch.float64), **EPISODE, **values))


@pytest.mark.parametrize(
    "values", [{"values": OLD}, {"old_values": OLD}, {"values": LIVE, "old_values": OLD}]
)
def test_a_rollouts_hooks_see_the_rollouts_values(values: dict[str, Tensor]) -> None:
    """The current critic's values in the targets would move them during the batch (C5)."""
    out = episode(**values)
    close(out.advantages, [[0.695, 0.55, 0.5]])
    assert out.returns is not None
    close(out.returns, [[0.895, 0.95, 1]])


def test_the_critics_loss_sees_the_live_values_beside_the_rollouts() -> None:
    """V 3, V_old (.2,.4,.5), c .2, R (.895,.95,1): the move is clipped, the larger error counts.

    1/2 (3 - .895)^2 = 2.2155125, 1/2 (3 - .95)^2 = 2.10125, 1/2 (3 - 1)^2 = 2.
    """
    loss = episode(values=LIVE, old_values=OLD).critic_loss
    assert loss is not None
    close(loss, [[2.2155125, 2.10125, 2]])


@pytest.mark.parametrize("name", ["values", "old_values"])
def test_one_alone_serves_as_both(name: str) -> None:
    """Nothing has moved: 1/2 (.2 - .895)^2 = .2415125, .15125, .125."""
    loss = episode(**{name: OLD}).critic_loss
    assert loss is not None
    close(loss, [[0.2415125, 0.15125, 0.125]])


def test_a_cut_row_bootstraps_and_a_terminated_one_does_not() -> None:
    """C8 and C12: V(s_3) = .6 adds .6 to the last residual, 1.1, 1.09 = .1 + .9 * 1.1, 1.181."""
    b = bench(advantage={**GAE, "lam": 0.9})
    mask = torch.ones(2, 3, dtype=torch.float64)
    rewards, values = f64([0, 0, 1], [0, 0, 1]), torch.cat([OLD, OLD])
    for given in (
        {"stop_reason": torch.tensor([0, 2])},
        {"stop_reason": None, "truncated": torch.tensor([False, True])},
    ):
        step = batch(mask, token_rewards=rewards, values=values, bootstrap=f64(0.6, 0.6), **given)
        out = prepare(b, step)
        close(out["advantages"], [[0.695, 0.55, 0.5], [1.181, 1.09, 1.1]])
        close(out["returns"], [[0.895, 0.95, 1], [1.381, 1.49, 1.6]])


# --- normalize -----------------------------------------------------------------------------------

WHITEN = {"name": "whiten", "ddof": 0, "eps": 0.0}


def test_normalize_once_over_the_rollout_or_over_each_minibatch() -> None:
    """A (1,3,5,7): mean 4, std sqrt(5) over the rollout; over each half (-1,1).

    A rollout's statistics per minibatch, or the other way round, is the mistake.
    """
    for per, want in (
        ("rollout", [-3 / 5**0.5, -1 / 5**0.5, 1 / 5**0.5, 3 / 5**0.5]),
        ("minibatch", [-1, 1, -1, 1]),
    ):
        b = bench(normalize={**WHITEN, "per": per})
        step = prepare(b, rows_of_one(1, 3, 5, 7))
        got = []
        for half in (slice(0, 2), slice(2, 4)):
            rows: Any = {n: x[half] if isinstance(x, Tensor) else x for n, x in step.items()}
            got += [optimisation_batch(b, rows)[0]["advantages"]]
        close(torch.cat(got)[:, 0], want)


def test_normalize_per_minibatch_leaves_the_rollouts_advantages_raw() -> None:
    b = bench(normalize={**WHITEN, "per": "minibatch"})
    close(prepare(b, rows_of_one(1, 3))["advantages"], [[1], [3]])


def test_targets_are_bit_equal_with_normalize_on_and_off() -> None:
    """Targets from normalised advantages: C15's (1.318972,.087346,-.306318) in place of C8's."""
    mask = torch.ones(1, 3, dtype=torch.float64)
    step = batch(mask, **EPISODE, values=OLD)
    returns = []
    for normalize in ("none", "whiten", {"name": "whiten", "per": "minibatch"}):
        b = bench(advantage={**GAE, "lam": 0.9}, normalize=normalize)
        returns.append(evaluate(b, **step).returns)
    assert torch.equal(returns[0], returns[1])
    assert torch.equal(returns[0], returns[2])
    close(returns[0], [[0.895, 0.95, 1]])


@pytest.mark.parametrize("per", ["rollout", "minibatch"])
def test_normalize_sees_one_kind_of_rewards_whatever_it_is_over(per: str) -> None:
    """`per` says what the statistics are over, not which rewards: shaped 1 + 10 in both cases."""

    @lab.normalize
    def as_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
        """The rewards that it was given."""
        return lab.spread(rewards, mask)

    shape = spies([])[1]
    b = bench(as_rewards, shape, shape=["spy"], normalize={"name": "as_rewards", "per": per})
    step, _ = optimisation_batch(b, prepare(b, rows_of_one(1, 2)))
    close(step["advantages"], [[11], [12]])
