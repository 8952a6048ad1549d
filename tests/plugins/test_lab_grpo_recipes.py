"""The recipes grpo, dr_grpo and rloo as whole objectives, and the normalisation `batch_std`.

A recipe is written out in plain Python, token by token: loss and gradient. Every check is shown to
fail for a neighbour that runs under the same name elsewhere (ALGORITHMS section 11).
"""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any

import hypothesis.strategies as st
import lab_grpo
import pytest
import torch
from cases import bench, f64, gradient, ragged
from hypothesis import given, settings
from torch import Tensor

from lab import LabError, recipe
from lab.bench import Bench
from lab.loss import evaluate, load
from lab.shelf import Shelf

Rows = list[list[float]]
F64 = (torch.float64,)


def near(got: Any, want: Any, atol: float = 1e-12) -> None:
    got, want = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (got, want))
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


def siblings(values: list[float], group: list[int], i: int, own: bool) -> list[float]:
    return [v for j, v in enumerate(values) if group[j] == group[i] and (own or j != i)]


def tokens_of(batch: dict[str, Any]) -> list[tuple[int, int]]:
    return [(i, t) for i, row in enumerate(batch["mask"].tolist()) for t, m in enumerate(row) if m]


def clipped(ratio: float, a: float) -> tuple[float, float]:
    """PPO-Clip at .2: objective, and its slope by logp."""
    held = min(max(ratio, 0.8), 1.2) * a
    return (ratio * a, ratio * a) if ratio * a <= held else (held, 0.0)


def grpo_by_hand(batch: dict[str, Any]) -> tuple[float, Rows]:
    """Mean of row means of -min(r A, clip A) + .001 (e^-d - 1 + d), d = logp - ref."""
    lp, old, ref = (batch[n].tolist() for n in ("logp", "old_logp", "ref_logp"))
    s, g = batch["rewards"].tolist(), batch["group"].tolist()
    loss, slopes = 0.0, [[0.0] * len(row) for row in lp]
    for i, t in tokens_of(batch):
        peers = siblings(s, g, i, own=True)
        a = (s[i] - statistics.mean(peers)) / (statistics.stdev(peers) + 1e-6)
        gain, slope = clipped(math.exp(lp[i][t] - old[i][t]), a)
        d = lp[i][t] - ref[i][t]
        share = 1 / (sum(batch["mask"][i].tolist()) * len(s))
        loss += share * (-gain + 0.001 * (math.exp(-d) - 1 + d))
        slopes[i][t] = share * (-slope + 0.001 * (1 - math.exp(-d)))
    return loss, slopes


def dr_grpo_by_hand(batch: dict[str, Any]) -> tuple[float, Rows]:
    """Sum of -min(r A, clip A) over B times the budget, A = S - group mean."""
    lp, old = (batch[n].tolist() for n in ("logp", "old_logp"))
    s, g = batch["rewards"].tolist(), batch["group"].tolist()
    loss, slopes = 0.0, [[0.0] * len(row) for row in lp]
    for i, t in tokens_of(batch):
        a = s[i] - statistics.mean(siblings(s, g, i, own=True))
        gain, slope = clipped(math.exp(lp[i][t] - old[i][t]), a)
        share = 1 / (len(s) * batch["budget"])
        loss -= share * gain
        slopes[i][t] = -share * slope
    return loss, slopes


def rloo_by_hand(batch: dict[str, Any]) -> tuple[float, Rows]:
    """Sum of -A logp over B; A is of S - .03 sum(old - ref), less the siblings' mean of it."""
    lp, old, ref = (batch[n].tolist() for n in ("logp", "old_logp", "ref_logp"))
    paid, g = batch["rewards"].tolist(), batch["group"].tolist()
    for i, t in tokens_of(batch):
        paid[i] -= 0.03 * (old[i][t] - ref[i][t])
    loss, slopes = 0.0, [[0.0] * len(row) for row in lp]
    for i, t in tokens_of(batch):
        a = paid[i] - statistics.mean(siblings(paid, g, i, own=False))
        loss -= a * lp[i][t] / len(paid)
        slopes[i][t] = -a / len(paid)
    return loss, slopes


BY_HAND = {"grpo": grpo_by_hand, "dr_grpo": dr_grpo_by_hand, "rloo": rloo_by_hand}


@functools.cache
def built(name: str) -> Bench:
    return load(name)


def check(spec: Bench, name: str, batch: dict[str, Any]) -> None:
    loss, slopes = gradient(spec, batch)
    want, rows = BY_HAND[name](batch)
    near(slopes, rows, 1e-11)
    near(loss, want, 1e-11)


@settings(deadline=None, max_examples=25)
@given(batch=ragged(dtypes=F64, group_sizes=(2, 6)), name=st.sampled_from(tuple(BY_HAND)))
def test_a_recipe_against_plain_python(batch: dict[str, Any], name: str) -> None:
    """Ragged rows with gaps, unequal groups, ratios on both sides of the clip."""
    check(built(name), name, batch)


def fixed_batch() -> dict[str, Any]:
    """Rows of 1, 2, 3, 3 tokens, two groups in turns, ratios inside and outside [.8, 1.2]."""
    mask = f64([1, 0, 0], [1, 0, 1], [1, 1, 1], [1, 1, 1])
    old = -1.0 - 0.1 * torch.arange(12).double().reshape(4, 3)
    ratios = f64([0.7, 1, 1], [1.1, 1, 1.3], [0.9, 1.35, 0.6], [1.5, 0.75, 1.05])
    return {
        "logp": old + ratios.log(),
        "old_logp": old,
        "ref_logp": old - 0.3 * torch.cos(torch.arange(12).double()).reshape(4, 3),
        "rewards": f64(1, 0.5, -0.5, 2),
        "group": torch.tensor([3, 8, 3, 8]),
        "mask": mask,
        "budget": 5,
    }


@pytest.mark.parametrize("name", BY_HAND)
def test_the_fixed_batch_passes(name: str) -> None:
    check(built(name), name, fixed_batch())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("grpo", {"aggregate": "token_mean"}),  # verl's and OpenRLHF's GRPO
        ("grpo", {"advantage": {"eps": 1e-4}}),  # TRL's
        ("grpo", {"advantage": {"ddof": 0}}),
        ("grpo", {"kl": {"weight": "live"}}),  # TRL's since 1.10
        ("grpo", {"kl": {"estimator": "k2"}}),
        ("grpo", {"kl": {"beta": 0.04}}),
        ("grpo", {"surrogate": {"eps_high": 0.28}}),  # DAPO's
        ("grpo", {"surrogate": "ppo_unclipped"}),
        ("dr_grpo", {"advantage": {"scale": "std"}}),  # TRL's dr_grpo: the std stays
        ("dr_grpo", {"aggregate": "sequence_mean"}),  # rlhf-book's
        ("dr_grpo", {"aggregate": {"name": "constant", "length": 3}}),  # the padded width
        ("rloo", {"advantage": {"name": "group", "scale": "none"}}),  # own reward in the mean
        ("rloo", {"kl": {"when": "after"}}),  # the cost meets no baseline
        ("rloo", {"kl": {"credit": "to_go", "when": "after"}}),
        ("rloo", {"kl": {"beta": 0.05}}),  # TRL's
        ("rloo", {"ratio": "sequence_product", "surrogate": "ppo_clip"}),  # TRL's
        ("rloo", {"aggregate": "sequence_mean"}),
    ],
)
def test_neighbours_of_the_same_name_are_killed(name: str, change: dict[str, Any]) -> None:
    spec = load({"base": name, "length_weighted": True, **change})
    with pytest.raises(AssertionError):
        check(spec, name, fixed_batch())


def test_rloo_credits_the_sequence_whatever_the_credit() -> None:
    """A group advantage reads the row's sum, so `before` charges the whole row either way."""
    batch = fixed_batch()
    loss = [
        gradient(load({"base": "rloo", "kl": {"credit": credit}}), batch)[0]
        for credit in ("sequence", "to_go")
    ]
    near(loss[0], loss[1])
    assert load("rloo").recipe.loop.group_size == 4  # k = 2 and 4 in the paper


def test_the_recipes_name_what_they_need(shelf: Shelf) -> None:
    """grpo and rloo have a reference model, dr_grpo none; no group recipe has a critic."""
    for name, needs_reference in (("grpo", True), ("dr_grpo", False), ("rloo", True)):
        found = load(name)
        assert found.has_reference is needs_reference
        assert not found.has_critic
        assert found.recipe == recipe.load(name, shelf)


# --- batch_std -----------------------------------------------------------------------------------


def batch_std_by_hand(advantages: Rows, mask: Rows, ddof: int, eps: float) -> Rows:
    means = [
        statistics.mean(a for a, m in zip(row, on, strict=True) if m)
        for row, on in zip(advantages, mask, strict=True)
        if any(on)
    ]
    if len(means) <= ddof:
        std = 0.0
    else:
        std = statistics.stdev(means) if ddof else statistics.pstdev(means)
    return [
        [a / (std + eps) if m else 0.0 for a, m in zip(row, on, strict=True)]
        for row, on in zip(advantages, mask, strict=True)
    ]


@settings(deadline=None, max_examples=25)
@given(
    batch=ragged(dtypes=F64),
    ddof=st.sampled_from((0, 1)),
    eps=st.sampled_from((1e-4, 1e-2)),
    empty=st.booleans(),
)
def test_batch_std_against_plain_python(
    batch: dict[str, Any], ddof: int, eps: float, empty: bool
) -> None:
    """Every row counts once whatever its length, rows without tokens do not; no shift."""
    mask, values = batch["mask"].clone(), batch["values"]
    if empty and len(mask) > 1:
        mask[0] = 0
    want = batch_std_by_hand(values.tolist(), mask.tolist(), ddof, eps)
    got = lab_grpo.batch_std(values, mask, ddof=ddof, eps=eps) * mask
    near(got, want, 1e-12 / eps)


def shifted(advantages: Tensor, mask: Tensor, *, ddof: int = 1, eps: float = 1e-4) -> Tensor:
    """Mutant: takes the mean off."""
    row = advantages.sum(1) / mask.sum(1)
    return (advantages - row.mean()) / (row.std(correction=ddof) + eps)


def by_token(advantages: Tensor, mask: Tensor, *, ddof: int = 1, eps: float = 1e-4) -> Tensor:
    """Mutant: the std over tokens, where a long row weighs more."""
    return advantages / (advantages[mask.bool()].std(correction=ddof) + eps)


@pytest.mark.parametrize(
    ("function", "right"), [(lab_grpo.batch_std, True), (shifted, False), (by_token, False)]
)
def test_batch_std_divides_by_the_std_of_the_rows(function: Any, right: bool) -> None:
    """Row values (0, 3), lengths 1, 3: std 3/sqrt(2) (ddof 1); by tokens 1.5, shifted -1.5."""
    mask = f64([1, 0, 0], [1, 1, 1])
    std = math.sqrt((1.5**2 + 1.5**2) / 1)
    want = 3 * mask * f64([0], [1]) / (std + 1e-4)
    got = function(3 * mask * f64([0], [1]), mask) * mask
    assert torch.allclose(got, want, rtol=0, atol=1e-12) is right


def test_batch_std_is_of_the_advantages_not_of_the_rewards(shelf: Shelf) -> None:
    """(0,0), (0,1), centred (0,0,-.5,.5): std sqrt(.5/3); group(scale=batch) has that of S, 1/2."""
    ones = torch.ones(4, 1).double()
    batch = {"logp": -ones, "old_logp": -ones, "mask": ones, "rewards": f64(0, 0, 0, 1),
             "group": torch.tensor([0, 0, 1, 1])}  # fmt: skip
    centred = {"name": "group", "scale": "none"}
    for per in ("rollout", "minibatch"):
        spec = bench(shelf, advantage=centred, normalize={"name": "batch_std", "per": per})
        big = 0.5 / (math.sqrt(0.5 / 3) + 1e-4)
        near(evaluate(spec, **batch).advantages[:, 0], (0, 0, -big, big))
    spec = bench(shelf, advantage={"name": "group", "scale": "batch", "eps": 1e-4})
    near(evaluate(spec, **batch).advantages[:, 0], (0, 0, -0.5 / 0.5001, 0.5 / 0.5001))


@pytest.mark.parametrize("eps", [1e-4, 0.0])
def test_batch_std_of_nothing_but_zeros_is_zero(shelf: Shelf, eps: float) -> None:
    """All groups constant: no advantage anywhere, also at eps 0 (a zero std never divides, G2)."""
    ones = torch.ones(4, 1).double()
    spec = bench(
        shelf,
        advantage={"name": "group", "scale": "none"},
        normalize={"name": "batch_std", "eps": eps},
    )
    out = evaluate(
        spec, logp=-ones, old_logp=-ones, mask=ones, rewards=f64(1, 1, 0, 0),
        group=torch.tensor([0, 0, 1, 1]),
    )  # fmt: skip
    assert not out.advantages.any()
    with pytest.raises(LabError, match=r"normalize 'batch_std': eps=-1"):
        bench(shelf, normalize={"name": "batch_std", "eps": -1.0})


def test_batch_std_does_not_swallow_what_is_no_number() -> None:
    """A NaN among the advantages stays one: the run must see that it diverged."""
    got = lab_grpo.batch_std(f64([math.nan], [1.0], [-1.0]), f64([1], [1], [1]))
    assert not bool(got.isfinite().all())


def test_nothing_here_is_trained() -> None:
    """P2: no gradient in rewards, values or the advantages they make."""
    batch = fixed_batch()
    leaves = {n: batch[n].clone().requires_grad_() for n in ("rewards", "old_logp", "ref_logp")}
    for name in BY_HAND:
        logp = batch["logp"].clone().requires_grad_()
        out = evaluate(built(name), **{**batch, **leaves, "logp": logp})
        found = torch.autograd.grad(out.loss, list(leaves.values()), allow_unused=True)
        assert found == (None, None, None)
        assert not out.advantages.requires_grad
