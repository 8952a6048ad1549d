"""lab.rollout.prepare: the order of the rollout's hooks, filters and shaping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import f64
from handmade import CENTRED, GAE, batch, bench, close, rows_of_one, spies
from torch import Tensor

import lab
from lab import LabError
from lab.bench import Bench
from lab.loss import optimisation_batch
from lab.recipe import Recipe
from lab.rollout import prepare
from lab.shelf import Shelf

# --- order ---------------------------------------------------------------------------------------


SPIED = {
    **dict.fromkeys(("filter", "shape", "kl", "advantage", "critic_target", "normalize"), "spy"),
    "critic_loss": "squared",
}


def test_the_order_of_a_rollout() -> None:
    """keep on raw rewards -> shape -> KL -> advantage -> target on raw advantages -> normalize.

    Row 0, reward 1: shaped 11, less 100 for its one token -89, target -89 + 5 = -84, then -1089.
    """
    seen: list[tuple[str, Any]] = []
    b = bench(*spies(seen), **SPIED)
    seen.clear()  # building a bench tries each component
    out = prepare(b, rows_of_one(1, 2, values=f64([5], [6])))
    order = list(dict.fromkeys(hook for hook, _ in seen))
    assert order == [
        *("keep", "shape_reward", "kl_reward", "advantage", "critic_target", "normalize"),
    ]
    given = dict(seen)
    close(given["keep"], [1, 2])
    close(given["shape_reward"], [1, 2])
    close(given["advantage"], [-89, -88])
    close(given["critic_target"], [[-89], [-88]])
    close(given["normalize"], [[-89], [-88]])
    close(out["returns"], [[-84], [-82]])
    close(out["advantages"], [[-1089], [-1088]])


def test_a_cost_after_the_advantage_comes_behind_the_targets_and_before_normalize() -> None:
    """Row 0: shaped 11, target 11 + 5 = 16 without the cost; normalize is given 11 - 100 = -89."""
    seen: list[tuple[str, Any]] = []
    b = bench(*spies(seen), **{**SPIED, "kl": {"name": "spy", "when": "after"}})
    out = prepare(b, rows_of_one(1, 2, values=f64([5], [6])))
    close(dict(seen)["normalize"], [[-89], [-88]])
    close(out["returns"], [[16], [18]])


def test_a_rollouts_rewards_stay_raw_for_the_update() -> None:
    """`surrogate` and `extra_loss` see raw rewards: shaping and KL change the advantages only."""
    out = prepare(bench(*spies([]), **SPIED), rows_of_one(1, 2, values=f64([5], [6])))
    close(out["rewards"], [1, 2])
    close(out["token_rewards"], [[1], [2]])


@pytest.mark.parametrize("shape", ["none", "spy"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_nothing_of_a_rollout_has_a_gradient(when: str, shape: str) -> None:
    """Values, old log-probs and rewards that require grad reach nothing that a rollout makes."""
    live = {n: f64([0.1], [0.2]).requires_grad_() for n in ("values", "old_logp", "ref_logp")}
    step = rows_of_one(1, 2, **live)
    step["rewards"] = f64(1, 2).requires_grad_()
    b = bench(
        spies([])[1],
        advantage=GAE,
        kl={"name": "in_reward", "when": when},
        shape=shape,
        normalize="whiten",
    )
    out = prepare(b, step)
    made = {n for n in out if n not in step or out[n] is not step[n]}
    assert made >= {"advantages", "returns", "mask"}
    assert not [n for n in made if out[n].requires_grad]


# --- keep ----------------------------------------------------------------------------------------

CUT_FIRST = torch.tensor([2, 0, 0])


@pytest.mark.parametrize(
    ("stats", "want"),
    [
        ("kept", [0, 0.5, -0.5]),  # mean of (1, 0) = .5
        ("all", [5, -2, -3]),  # mean of (8, 1, 0) = 3
    ],
)
def test_a_refused_row_and_its_siblings_baseline(stats: str, want: list[float]) -> None:
    """Rewards (8,1,0), row 0 not kept: siblings (.5,-.5), or (-2,-3) only where it is asked for."""
    b = bench(advantage=CENTRED, filter=[{"name": "overlong", "stats": stats}])
    out = prepare(b, rows_of_one(8, 1, 0, stop_reason=CUT_FIRST))
    close(out["advantages"][:, 0], want)
    close(out["mask"][:, 0], [0, 1, 1])


@pytest.mark.parametrize(
    ("mode", "third", "token"),
    [
        ("renormalise", 1 / 2, 1 / 4),  # two rows of 1 and 3 tokens left: 4 tokens
        ("drop", 1 / 3, 1 / 6),  # three rows of 2, 1 and 3 tokens
    ],
)
def test_what_a_refused_row_counts_in_the_shares(mode: str, third: float, token: float) -> None:
    """The denominator follows the declared mode; the refused row itself never has a share."""
    mask = f64([1, 1, 0], [1, 0, 0], [1, 1, 1])
    given = batch(mask, rewards=f64(8, 1, 0), stop_reason=CUT_FIRST)
    for aggregate, share in (("sequence_sum", third), ("token_mean", token)):
        b = bench(aggregate=aggregate, filter=[{"name": "overlong", "mode": mode}])
        _, shares = optimisation_batch(b, prepare(b, given))
        close(shares["surrogate"], share * mask * f64([0], [1], [1]))


@lab.keep
def not_negative(rewards: Tensor) -> Tensor:
    """Keep the rows whose reward is not negative."""
    return rewards >= 0


def test_filters_are_and_ed_and_each_sees_all_rows() -> None:
    """Groups (8,8) and (1,-1): the first goes for its variance, row 3 for its sign.

    If `zero_variance` saw only what `not_negative` left, row 2 would be alone, and go too.
    """
    b = bench(not_negative, filter=["not_negative", "zero_variance"])
    out = prepare(b, rows_of_one(8, 8, 1, -1, group=torch.tensor([0, 0, 1, 1])))
    close(out["mask"][:, 0], [0, 0, 1, 0])


def test_the_options_of_each_filter_hold_for_the_rows_it_refuses() -> None:
    """Row 0 is refused with stats = all, row 3 with stats = kept: mean of (8,1,0) = 3.

    Row 2 is refused by both: one of them hides it, so the mean is that of (8, 1) = 4.5.
    """
    filters = [
        {"name": "overlong", "stats": "all", "mode": "drop"},
        {"name": "not_negative", "stats": "kept", "mode": "renormalise"},
    ]
    b = bench(not_negative, filter=filters, advantage=CENTRED)
    reason = torch.tensor([2, 0, 0, 0])
    out = prepare(b, rows_of_one(8, 1, 0, -9, stop_reason=reason))
    close(out["advantages"][:, 0], [5, -2, -3, 0])
    close(out["counted"][:, 0], [1, 1, 1, 0])
    both = prepare(b, rows_of_one(8, 1, -9, -9, stop_reason=torch.tensor([2, 0, 2, 0])))
    close(both["advantages"][:, 0], [3.5, -3.5, 0, 0])
    close(both["counted"][:, 0], [1, 1, 0, 0])


def test_a_filter_refuses_rows_on_raw_rewards() -> None:
    """Equal rewards, unequal lengths: shaping would tell them apart, the filter comes before."""
    mask = f64([1, 1, 1, 1], [1, 0, 0, 0])
    given = batch(mask, rewards=f64(1, 1), budget=4)
    b = bench(filter=["zero_variance"], shape=[{"name": "soft_overlong", "cache": 1.0}])
    close(prepare(b, given)["mask"], 0 * mask)


@pytest.mark.parametrize("stats", ["kept", "all"])
@pytest.mark.parametrize("recipe", ["grpo", "ppo", "rloo", "dapo"])
def test_a_rollout_of_which_no_row_is_left(recipe: str, stats: str, shelf: Shelf) -> None:
    """0 and finite, not NaN from a mean over nothing."""
    spec = {"base": recipe, "filter": [{"name": "overlong", "stats": stats}]}
    b = Bench(Recipe.of(spec, "test", shelf), shelf)
    out = lab.evaluate(
        b,
        **rows_of_one(1, 0, stop_reason=torch.tensor([2, 2]), bootstrap=f64(1, 1)),
        values=-f64([1], [2]),
    )
    assert float(out.loss) == 0
    assert all(bool(x.isfinite().all()) for x in vars(out).values() if isinstance(x, Tensor))


# --- shaping -------------------------------------------------------------------------------------


def test_a_shaped_change_lands_on_the_rows_last_token() -> None:
    """Limit 4, stretch 2: 4 tokens lose (4-2)/2 = 1, 3 lose .5, 2 lose 0; once, behind a gap too.

    Dense rewards stay where they are: .25 of row 1 is earned at its first token.
    """
    mask = f64([1, 1, 1, 1, 0], [1, 0, 1, 1, 0], [1, 1, 0, 0, 0])
    tokens = f64([0, 0, 0, 2, 0], [0.25, 0, 0, 1, 0], [0, 3, 0, 0, 0])
    seen: list[tuple[str, Any]] = []
    b = bench(spies(seen)[3], advantage="spy", shape=[{"name": "soft_overlong", "cache": 2.0}])
    out = prepare(b, batch(mask, token_rewards=tokens, budget=4))
    close(out["advantages"], [[0, 0, 0, 1, 0], [0.25, 0, 0, 0.5, 0], [0, 3, 0, 0, 0]])
    close(dict(seen)["advantage"], [1, 0.75, 3])


def test_each_shape_sees_the_rewards_of_the_one_before() -> None:
    """(r + 10), then 2 r: 22 for r = 1; the other way round it is 12."""

    @lab.shape_reward
    def twice(rewards: Tensor) -> Tensor:
        """Double."""
        return 2 * rewards

    shape = spies([])[1]
    for order, want in ((["spy", "twice"], 22), (["twice", "spy"], 12)):
        out = prepare(bench(shape, twice, shape=order), rows_of_one(1))
        close(out["advantages"], [[want]])


def test_shaping_reaches_the_baseline_as_well() -> None:
    """Rewards (1,1), shaping (-.2,0), centred: (-.1,.1), not (-.2,0) from an unshaped baseline."""

    @lab.shape_reward
    def first_pays(rewards: Tensor, lengths: Tensor) -> Tensor:
        """Take .2 off rows of two tokens."""
        return rewards - 0.2 * (lengths == 2).to(rewards.dtype)

    b = bench(first_pays, shape=["first_pays"], advantage=CENTRED)
    out = prepare(b, batch(f64([1, 1], [1, 0]), rewards=f64(1, 1)))
    close(out["advantages"], [[-0.1, -0.1], [0.1, 0]])


def test_shaping_without_rewards_names_what_is_missing() -> None:
    @lab.shape_reward
    def by_length(lengths: Tensor, budget: int) -> Tensor:
        """Minus the length."""
        return -(lengths / budget)

    b = bench(by_length, shape=["by_length"])
    step = batch(f64([1, 1]))
    with pytest.raises(LabError, match="needs rewards"):
        prepare(b, step)


# --- what a component returned -------------------------------------------------------------------


def test_another_precision_is_refused_by_name_without_a_float_input_to_tell_it() -> None:
    """float64 in a float32 batch: else the core's own arithmetic fails, and names nobody."""

    @lab.shape_reward
    def doubles(lengths: Tensor) -> Tensor:
        """Minus the length."""
        return -lengths.double()

    single = {
        n: x.float() for n, x in rows_of_one(1, 2).items() if n in ("logp", "mask", "rewards")
    }
    with pytest.raises(LabError, match=r"'doubles' returned torch\.float64 where torch\.float32"):
        lab.evaluate(
            bench(doubles, shape=["doubles"], ratio="none", surrogate="reinforce"), **single
        )


def test_a_column_is_refused_where_rows_by_tokens_were_due() -> None:
    """[B,1] broadcasts: no input of the component has the width to tell it by."""

    @lab.advantage
    def column(rewards: Tensor) -> Tensor:
        """One number a row."""
        return rewards[:, None]

    with pytest.raises(LabError, match=r"'column' returned \[.*1\] where \[B,T\] was due"):
        lab.evaluate(bench(column, advantage="column"), **batch(f64([1, 1]), rewards=f64(1)))
