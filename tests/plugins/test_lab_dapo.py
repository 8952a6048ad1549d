"""Filters and the recipe `dapo`: F1, F2, G5, M4. Reward shaping: test_lab_dapo_shape.py.

The filter's two options are told apart everywhere: `stats`, whether a refused row still stands in
the group's statistics, and `mode`, whether it still counts in the shares.
"""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any

import lab_dapo
import pytest
import torch
from cases import bench, f64, gradient, ragged
from hypothesis import given, settings
from torch import Tensor

from lab import LabError, group_std, keep
from lab.bench import Bench
from lab.loss import Evaluation, evaluate, load
from lab.shelf import Shelf, installed

CENTRED = {"name": "group", "scale": "none"}


def near(got: Any, want: Any, atol: float = 1e-12) -> None:
    got, want = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (got, want))
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


@keep
def by_position(rewards: Tensor, group: Tensor) -> Tensor:
    """Mutant: zero_variance of neighbours."""
    rows = rewards.reshape(len(group.unique()), -1)
    return (rows.amax(1) > rows.amin(1)).repeat_interleave(rows.shape[1])


@keep
def by_std(rewards: Tensor, group: Tensor) -> Tensor:
    """Mutant: a tolerance in place of equality."""
    return group_std(rewards, group, 0) > 1e-3


@keep
def whole_batch(rewards: Tensor) -> Tensor:
    """Mutant: any difference in the batch will do."""
    return (rewards.amax() > rewards.amin()).expand(len(rewards)).clone()


@keep
def not_the_best(rewards: Tensor) -> Tensor:
    """A rejection by score: 8 and more stay out (G5)."""
    return rewards < 8


@pytest.fixture(scope="module")
def mutants() -> Shelf:
    return Shelf.installed([by_position, by_std, whole_batch, not_the_best])


def of_rows(spec: Bench, rewards: Tensor, group: Any = None, **more: Any) -> Evaluation:
    """Rows of one token at ratio 1."""
    ones = torch.ones_like(rewards)[:, None]
    ids = torch.zeros(len(rewards)).long() if group is None else torch.tensor(group)
    rows = {"logp": -ones, "old_logp": -ones, "mask": ones, "rewards": rewards, "group": ids}
    return evaluate(spec, **{**rows, **more})


# --- zero_variance -------------------------------------------------------------------------------


def kept_rows(shelf: Shelf, name: str, rewards: Tensor, group: list[int]) -> list[bool]:
    spec = bench(shelf, filter=[name])
    return (of_rows(spec, rewards, group).share[:, 0] > 0).tolist()


def f1_by_id(shelf: Shelf, name: str) -> None:
    """Groups (.3,.3), (0,1) and (0,0), rows in turns."""
    got = kept_rows(shelf, name, f64(0.3, 0, 0, 0.3, 1, 0), [9, -4, 7, 9, -4, 7])
    assert got == [False, True, False, False, True, False]


def f1_exact(shelf: Shelf, name: str) -> None:
    """max S = min S exactly: .1 + .2 and .3 differ by 5.6e-17."""
    assert kept_rows(shelf, name, f64(0.1 + 0.2, 0.3, 0.3, 0.3), [1, 1, 2, 2]) == [
        *(True, True),
        *(False, False),
    ]


@pytest.mark.parametrize("check", [f1_by_id, f1_exact])
def test_f1_zero_variance(shelf: Shelf, check: Any) -> None:
    check(shelf, "zero_variance")


@pytest.mark.parametrize(
    ("mutant", "check"),
    [("by_position", f1_by_id), ("whole_batch", f1_by_id), ("by_std", f1_exact)],
)
def test_f1_kills(mutants: Shelf, mutant: str, check: Any) -> None:
    with pytest.raises(AssertionError):
        check(mutants, mutant)


@settings(deadline=None, max_examples=30)
@given(batch=ragged())
def test_f1_against_plain_python(batch: dict[str, Any]) -> None:
    """Groups of 1 to 16 in any order, both precisions; a group of one never varies."""
    s, g = batch["rewards"].tolist(), batch["group"].tolist()
    want = [len({r for r, h in zip(s, g, strict=True) if h == mine}) > 1 for mine in g]
    assert lab_dapo.zero_variance(batch["rewards"], batch["group"]).tolist() == want


def test_f1_reads_raw_rewards(shelf: Shelf) -> None:
    """Shaping would make the group vary: it is dropped all the same (DESIGN: keep comes first)."""
    spec = bench(shelf, filter=["zero_variance"], shape=["no_eos_penalty"])
    out = of_rows(spec, f64(1, 1), stop_reason=torch.tensor([0, 2]))
    assert not out.share.any()


# --- overlong, stats and mode --------------------------------------------------------------------


def filtered(name: str, shelf: Shelf | None = None, **options: Any) -> Bench:
    return bench(shelf or installed(), advantage=CENTRED, filter=[{"name": name, **options}])


@pytest.mark.parametrize("name", ["overlong", "not_the_best"])
@pytest.mark.parametrize(
    ("stats", "want"), [("kept", (0, 0.5, -0.5)), ("all", (8 - 3, 1 - 3, 0 - 3))]
)
def test_g5_stats(mutants: Shelf, name: str, stats: str, want: tuple[float, ...]) -> None:
    """(8,1,0), row 0 refused: means .5 or 3. Kills: a rejected answer in its siblings' baseline."""
    spec = filtered(name, mutants, stats=stats)
    out = of_rows(spec, f64(8, 1, 0), truncated=torch.tensor([True, False, False]))
    near(out.advantages[1:, 0], want[1:])  # row 0 is off the mask
    near(out.advantages[0], [0.0])
    by_default = of_rows(filtered(name, mutants), f64(8, 1, 0), truncated=out.share[:, 0] == 0)
    near(by_default.advantages[:, 0], (0, 0.5, -0.5))  # kept


@pytest.mark.parametrize(("mode", "share"), [("renormalise", 1 / 2), ("drop", 1 / 3)])
@pytest.mark.parametrize("stats", ["kept", "all"])
def test_m4_mode(shelf: Shelf, mode: str, share: float, stats: str) -> None:
    """Two of three rows stay. Kills: refused rows that divide, or kept rows inflated, unasked."""
    spec = filtered("overlong", stats=stats, mode=mode)
    for aggregate in ("token_mean", "sequence_mean", "sequence_sum"):
        one = bench(shelf, {**spec.recipe.spec(), "aggregate": aggregate})
        out = of_rows(one, f64(8, 1, 0), truncated=torch.tensor([True, False, False]))
        near(out.share[:, 0], (0, share, share))
    constant = bench(shelf, {**spec.recipe.spec(), "aggregate": "constant"})
    out = of_rows(constant, f64(8, 1, 0), truncated=torch.tensor([True, False, False]), budget=4)
    near(out.share[:, 0], (0, share / 4, share / 4))


def test_filters_are_anded_and_keep_their_own_options(shelf: Shelf) -> None:
    """Rows 0, 1 are cut (stats all, drop), group 2 is constant (kept, renormalise): of six rows
    0 and 1 count and are seen, 4 and 5 do neither; shares 1/4, means over rows 0..3.
    """
    spec = bench(
        shelf,
        advantage=CENTRED,
        aggregate="token_mean",
        filter=[{"name": "overlong", "stats": "all", "mode": "drop"}, "zero_variance"],
    )
    cut = torch.tensor([True, True, False, False, False, False])
    out = of_rows(spec, f64(4, 0, 1, 3, 2, 2), [1, 1, 1, 1, 2, 2], truncated=cut)
    near(out.share[:, 0], (0, 0, 1 / 4, 1 / 4, 0, 0))
    near(out.advantages[:, 0], (0, 0, 1 - 2, 3 - 2, 0, 0))  # mean of (4, 0, 1, 3)


def test_a_refused_row_carries_no_gradient_of_any_term(shelf: Shelf) -> None:
    """Kills: a KL or an entropy term that still pulls there."""
    ones = torch.ones(3, 1).double()
    batch = {
        "logp": -ones, "old_logp": -ones, "ref_logp": -2 * ones, "entropy": ones, "mask": ones,
        "rewards": f64(8, 1, 0), "group": torch.tensor([0, 0, 0]),
        "truncated": torch.tensor([True, False, False]),
    }  # fmt: skip
    for mode in ("renormalise", "drop"):
        spec = bench(
            shelf,
            advantage=CENTRED,
            filter=[{"name": "overlong", "stats": "all", "mode": mode}],
            kl={"name": "in_loss", "estimator": "k2", "beta": 0.1},
            extra=["entropy"],
        )
        loss, slope = gradient(spec, batch)
        assert float(slope[0]) == 0.0
        assert bool((slope[1:] != 0).all())
        assert bool(loss.isfinite())


@pytest.mark.parametrize("stats", ["kept", "all"])
@pytest.mark.parametrize("mode", ["renormalise", "drop"])
@pytest.mark.parametrize(
    "aggregate", ["token_mean", "sequence_mean", "sequence_sum", "constant", "prompt_mean"]
)
def test_m4_nothing_left_is_a_loss_of_zero(
    shelf: Shelf, stats: str, mode: str, aggregate: str
) -> None:
    """Every row refused: loss and gradient 0, all finite, whatever else the recipe does."""
    base: dict[str, Any] = {
        "filter": [{"name": "zero_variance", "stats": stats, "mode": mode}],
        "aggregate": aggregate,
    }
    ones = torch.ones(4, 2).double()
    batch = {
        "logp": -ones, "old_logp": -ones, "ref_logp": -2 * ones, "entropy": ones, "mask": ones,
        "rewards": f64(1, 1, 0, 0), "group": torch.tensor([3, 3, 1, 1]), "budget": 2,
    }  # fmt: skip
    kl = {"name": "in_reward", "when": "after", "centre": True}
    for more in (
        {"advantage": {"name": "group", "scale": "batch"}, "normalize": "whiten", "kl": kl},
        {"advantage": "rloo", "kl": "in_loss", "extra": ["entropy"], "normalize": "batch_std"},
    ):
        loss, slope = gradient(bench(shelf, {**base, **more}), batch)
        assert float(loss) == 0.0
        assert not slope.any()


def test_f1_drop_is_the_gradient_without_a_filter(shelf: Shelf) -> None:
    """A dead group has no advantage: dropping it changes nothing, renormalising gives 4/2 times."""
    rewards, ids = f64(1, 1, 0, 1), [0, 0, 1, 1]
    batch = {"truncated": torch.zeros(4).bool()}
    plain = of_rows(bench(shelf, advantage="group"), rewards, ids, **batch)
    for mode, times in (("drop", 1.0), ("renormalise", 2.0)):
        spec = bench(shelf, advantage="group", filter=[{"name": "zero_variance", "mode": mode}])
        out = of_rows(spec, rewards, ids, **batch)
        near((out.share * out.pull)[:, 0], times * (plain.share * plain.pull)[:, 0])


def test_what_a_filter_leaves_of_a_group_must_be_enough(shelf: Shelf) -> None:
    """A21 after a filter: one sibling left has no baseline of kept rows; of all rows it has."""
    cut = torch.tensor([True, False])
    with pytest.raises(LabError, match=r"groups of at least 2 rows; group 0 has 1"):
        of_rows(filtered("overlong"), f64(1, 0), truncated=cut)
    out = of_rows(filtered("overlong", stats="all"), f64(1, 0), truncated=cut)
    near(out.advantages[:, 0], (0, -0.5))
    one = {**CENTRED, "singleton": "zero"}
    zero = bench(shelf, advantage=one, filter=["overlong"])
    assert not of_rows(zero, f64(1, 0), truncated=cut).advantages.any()


# --- the recipe ----------------------------------------------------------------------------------


@functools.cache
def dapo() -> Bench:
    return load("dapo")


def dapo_by_hand(batch: dict[str, Any]) -> list[list[float]]:
    """The gradient by logp, row by row and token by token."""
    lp, old, mask = (batch[n].tolist() for n in ("logp", "old_logp", "mask"))
    raw, g, limit = batch["rewards"].tolist(), batch["group"].tolist(), batch["budget"]
    rows = range(len(raw))
    live = [i for i in rows if len({raw[j] for j in rows if g[j] == g[i]}) > 1]
    start = limit - limit / 5
    n = [sum(row) for row in mask]
    s = [r - min(1.0, max(0.0, (k - start) / (limit / 5))) for r, k in zip(raw, n, strict=True)]
    tokens, out = sum(n[i] for i in live), [[0.0] * len(row) for row in lp]
    for i in live:
        peers = [s[j] for j in rows if g[j] == g[i]]
        centred = s[i] - statistics.mean(peers)
        a = centred / (statistics.stdev(peers) + 1e-6) if len(set(peers)) > 1 else 0.0
        for t, m in enumerate(mask[i]):
            r = math.exp(lp[i][t] - old[i][t])
            inside = r <= 1.28 if a > 0 else r >= 0.8
            out[i][t] = -r * a / tokens if m and inside else 0.0
    return out


@settings(deadline=None, max_examples=25)
@given(batch=ragged(dtypes=(torch.float64,), group_sizes=(1, 6)))
def test_the_recipe_against_plain_python(batch: dict[str, Any]) -> None:
    """Dead groups and groups of one leave, long rows pay, clip-higher, mean over kept tokens."""
    batch = {**batch, "budget": 5}  # the last stretch begins at 4 tokens; rows of 6 exceed it
    near(gradient(dapo(), batch)[1], dapo_by_hand(batch), 1e-11)


def fixed_batch() -> dict[str, Any]:
    """Rows of 3, 5 and 2 tokens and a dead group; L 6, stretch 1.2: the row of 5 pays .2/1.2."""
    mask = (torch.arange(5) < torch.tensor([[3], [5], [2], [2], [1]])).double()
    ratios = 1 + 0 * mask
    ratios[0, :3], ratios[1, :4] = f64(1.25, 1.3, 0.7), f64(1.25, 0.75, 0.82, 1.3)
    return {
        "logp": ratios.log() - 1, "old_logp": 0 * mask - 1, "mask": mask, "budget": 6,
        "rewards": f64(1, 0.5, 0, 2, 2), "group": torch.tensor([6, 6, 6, 1, 1]),
    }  # fmt: skip


def test_the_recipe_on_a_fixed_batch() -> None:
    batch = fixed_batch()
    near(gradient(dapo(), batch)[1], dapo_by_hand(batch))


@pytest.mark.parametrize(
    "change",
    [
        {"surrogate": {"eps_high": 0.2}},  # TRL's dapo: no clip-higher
        {"surrogate": {"eps_low": 0.3}},
        {"aggregate": "sequence_mean"},
        {"shape": "none"},
        {"shape": {"soft_overlong": {"cache": 1.25}}},
        {"filter": "none"},  # the dead group's tokens count
        {"filter": {"zero_variance": {"mode": "drop"}}},
        {"advantage": {"ddof": 0}},
    ],
    ids=str,
)
def test_neighbours_of_the_recipe_are_killed(change: dict[str, Any]) -> None:
    batch = fixed_batch()
    with pytest.raises(AssertionError):
        near(gradient(load({"base": "dapo", **change}), batch)[1], dapo_by_hand(batch))
