"""The group advantage, its alias `rloo`, `batch_std`, and the recipes grpo, dr_grpo and rloo.

ALGORITHMS A20-A27 and N12, PITFALLS G1-G10, properties P5 and P10-P13. The exact expectations of
section K stand in test_lab_grpo_exact.py. `by_hand` is the advantage in plain Python, with the
exact means and deviations of `statistics`.
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
from lab.loss import evaluate
from lab.shelf import Shelf, installed

F32 = torch.float32


def near(got: Any, want: Any, atol: float = 1e-12) -> None:
    got, want = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (got, want))
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


@functools.cache
def bench_of(**advantage: Any) -> Bench:
    return bench(installed(), advantage=advantage, ratio="none", surrogate="reinforce")


def advantages(rewards: Tensor, group: Any = None, name: str = "group", **way: Any) -> Tensor:
    """One advantage a row, through the bench."""
    ones = torch.ones_like(rewards)[:, None]
    ids = torch.zeros(len(rewards)).long() if group is None else torch.as_tensor(group)
    out = evaluate(bench_of(name=name, **way), logp=-ones, mask=ones, rewards=rewards, group=ids)
    return out.advantages[:, 0]


def by_hand(
    rewards: list[float], group: list[int], baseline: str, scale: str, ddof: int, eps: float
) -> list[float]:
    def std(x: list[float]) -> float:
        if len(x) <= ddof:
            return 0.0
        return statistics.stdev(x) if ddof else statistics.pstdev(x)

    out = []
    for i, (s, g) in enumerate(zip(rewards, group, strict=True)):
        own = [r for r, h in zip(rewards, group, strict=True) if h == g]
        siblings = [r for j, r in enumerate(rewards) if group[j] == g and j != i]
        if not siblings:
            out.append(0.0)
            continue
        centred = s - statistics.mean(siblings if baseline == "loo" else own)
        divisor = {"none": 1.0, "std": std(own) + eps, "batch": std(rewards) + eps}[scale]
        out.append(0.0 if len(set(own)) == 1 else centred / divisor)
    return out


WAYS = {
    "baseline": st.sampled_from(("mean", "loo")),
    "scale": st.sampled_from(("std", "none", "batch")),
    "ddof": st.sampled_from((0, 1)),
    "eps": st.sampled_from((1e-6, 1e-4)),
}


@settings(deadline=None, max_examples=30)
@given(batch=ragged(), way=st.fixed_dictionaries(WAYS))
def test_against_plain_python(batch: dict[str, Any], way: dict[str, Any]) -> None:
    """Groups of 1 to 16 in any order, both precisions, gaps: raw and through the bench.

    Kills: ddof, eps inside the root, grouping by position, the own reward in a sibling mean, junk
    spread off the mask.
    """
    rewards, group, mask = batch["rewards"], batch["group"], batch["mask"]
    row = by_hand(rewards.tolist(), group.tolist(), **way)
    loose = 1e-12 if mask.dtype == torch.float64 else 2e-5
    want = f64(*row)[:, None] * mask
    near(lab_grpo.group(rewards, group, mask, singleton="zero", **way), want, loose)
    out = evaluate(bench_of(name="group", singleton="zero", **way), **batch)
    near(out.advantages, want, loose)
    assert out.advantages.dtype == mask.dtype


@settings(deadline=None, max_examples=20)
@given(batch=ragged(group_sizes=(2, 16)), seed=st.integers(0, 1000))
def test_p5_permuted_rows_and_other_ids(batch: dict[str, Any], seed: int) -> None:
    """Kills: reshape, an order of ids, ids read as numbers."""
    rewards, group = batch["rewards"].double(), batch["group"]
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))
    for way in ({}, {"scale": "none", "baseline": "loo"}, {"scale": "batch"}):
        plain = advantages(rewards, group, **way)
        near(advantages(rewards[order], group[order], **way), plain[order])
        near(advantages(rewards, 10**12 - 31 * group, **way), plain)


@settings(deadline=None, max_examples=20)
@given(batch=ragged(group_sizes=(2, 16)), shift=st.sampled_from((-3.0, 100.0)))
def test_p10_a_shift_of_the_rewards(batch: dict[str, Any], shift: float) -> None:
    """Kills: no baseline; one across groups, shown by a shift of one group alone (G10)."""
    rewards, group = batch["rewards"].double(), batch["group"]
    one = (group == group[0]).double()
    for way in ({}, {"baseline": "loo", "scale": "none"}, {"scale": "batch"}):
        plain = advantages(rewards, group, **way)
        near(advantages(rewards + shift, group, **way), plain, 1e-11)
        if way.get("scale") != "batch":
            near(advantages(rewards + shift * one, group, **way), plain, 1e-11)


@settings(deadline=None, max_examples=20)
@given(batch=ragged(group_sizes=(2, 16)), times=st.sampled_from((0.01, 100.0)))
def test_p11_a_scale_of_the_rewards(batch: dict[str, Any], times: float) -> None:
    """By a std nothing moves; centred and siblings scale along. Kills: division by the mean."""
    rewards, group = batch["rewards"].double(), batch["group"]
    live = torch.tensor([len(set(rewards[group == g].tolist())) > 1 for g in group])
    for way in ({"eps": 0.0}, {"eps": 0.0, "ddof": 0}, {"eps": 0.0, "scale": "batch"}):
        plain = advantages(rewards, group, **way)
        near(advantages(times * rewards, group, **way)[live], plain[live], 1e-11)
    for name, way in (("group", {"scale": "none"}), ("rloo", {})):
        plain = advantages(rewards, group, name=name, **way)
        near(advantages(times * rewards, group, name=name, **way), times * plain, 1e-11)


# --- A20, P12, G1, G2: constant groups -----------------------------------------------------------


def naive(rewards: Tensor, eps: float) -> Tensor:
    """Mutant: rewards less their plain mean over their std."""
    return (rewards - rewards.mean()) / (rewards.std() + eps)


@pytest.mark.parametrize("baseline", ["mean", "loo"])
@pytest.mark.parametrize("scale", ["std", "none", "batch"])
@pytest.mark.parametrize("eps", [1e-6, 1e-9, 0.0])
def test_a20_a_constant_group_is_exactly_zero(baseline: str, scale: str, eps: float) -> None:
    """.1, .3, .7 at G 3..16 in float32, alone and beside a live group; eps 0 included (K8, P12)."""
    way = {"baseline": baseline, "scale": scale, "eps": eps}
    for value in (0.1, 0.3, 0.7):
        for size in range(3, 17):
            alone = torch.full((size,), value, dtype=F32)
            assert not advantages(alone, **way).any(), (value, size)
            mixed = torch.cat((alone, torch.tensor([0.0, 1.0])))
            got = advantages(mixed, [4] * size + [2, 2], **way)
            assert not got[:size].any(), (value, size)
            assert bool((got[size:] != 0).all())


def test_a20_kills_the_plain_mean() -> None:
    """A residue over its own std: eight times .3 in float32 gives .0289, or .907 at eps 1e-9."""
    eight = torch.full((8,), 0.3)
    if bool((eight - eight.mean()).any()):  # the residue depends on how the machine adds up
        near(naive(eight, 1e-6)[0].abs(), 0.0289, 5e-5)
        near(naive(eight, 1e-9)[0].abs(), 0.907, 5e-4)
    hit = [
        (v, n)
        for v in (0.1, 0.3, 0.7)
        for n in range(3, 17)
        if bool(naive(torch.full((n,), v), 1e-9).any())
    ]
    assert len(hit) > 10  # so the test above would see it


@settings(deadline=None, max_examples=20)
@given(
    rewards=st.lists(st.floats(-1e3, 1e3, width=32, allow_subnormal=False), min_size=2, max_size=16)
)
def test_a20_bounds(rewards: list[float]) -> None:
    """|A| <= (G-1)/sqrt(G) for ddof 1, sqrt(G-1) for ddof 0. Kills: a one-pass variance (G2)."""
    size = len(rewards)
    for ddof, bound in ((1, (size - 1) / math.sqrt(size)), (0, math.sqrt(size - 1))):
        got = advantages(torch.tensor(rewards), ddof=ddof)
        assert float(got.abs().max()) <= bound * (1 + 1e-5)


def test_g2_a_one_pass_variance_breaks_the_bound() -> None:
    """E[x^2] - E[x]^2 of (1000.25, 1000 x 7) in float32 has no correct digit left."""
    rewards = torch.tensor([1000.25] + [1000.0] * 7)
    one_pass = ((rewards**2).mean() - rewards.mean() ** 2).clamp(min=0).sqrt()
    mutant = (rewards - rewards.mean()) / (one_pass + 1e-6)
    assert float(mutant.abs().max()) > 7**0.5 * 1.05 or float(mutant.abs().max()) < 7**0.5 * 0.95
    near(advantages(rewards, ddof=0), (7**0.5, *[-(7**-0.5)] * 7), 1e-4)


@pytest.mark.parametrize("scale", ["std", "none", "batch"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_not_swallowed(scale: str, bad: float) -> None:
    """Kills: `where(std > 0, ...)`, which makes a group with a NaN look like a dead one."""
    got = advantages(f64(bad, 1, 0), scale=scale)
    assert not bool(got.isfinite().all())


def test_g8_no_advantage_against_its_deviation() -> None:
    """(0,-1,-1,-1), mean -.75. Kills: division by the mean, which gives (-1, +1/3, ...)."""
    rewards = f64(0, -1, -1, -1)
    mutant = (rewards - rewards.mean()) / rewards.mean()
    near(mutant, (-1, 1 / 3, 1 / 3, 1 / 3))
    for way in ({}, {"scale": "none"}, {"scale": "batch"}, {"name": "rloo"}):
        assert bool((advantages(rewards, **way).sign() == f64(1, -1, -1, -1)).all())


# --- groups --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["group", "rloo"])
def test_a21_a_group_of_one_is_refused_or_zero(name: str) -> None:
    """Kills: NaN, the raw reward (verl's loop), a silent choice (P13, G3)."""
    rewards = f64(1, 0, 5)
    with pytest.raises(LabError, match=rf"'{name}' needs groups of at least 2.*group 9 has 1"):
        advantages(rewards, [4, 4, 9], name=name)
    got = advantages(rewards, [4, 4, 9], name=name, singleton="zero")
    assert float(got[2]) == 0.0
    assert bool((got[:2] != 0).all())
    assert not advantages(f64(5), name=name, singleton="zero").any()
    with pytest.raises(LabError, match=r"group_size is 1"):
        bench(installed(), advantage=name, loop={"group_size": 1})


def test_g4_a24_groups_by_id_and_ragged() -> None:
    """(1,0,0,1,.5), ids (7,3,7,3,7): means .5 and .5."""
    near(advantages(f64(1, 0, 0, 1, 0.5), [7, 3, 7, 3, 7], scale="none"), (0.5, -0.5, -0.5, 0.5, 0))


def test_g6_batch_std_is_of_the_batch() -> None:
    """(0,0), (0,1): std of (0,0,0,1), ddof 1, is 1/2. Kills: a "batch" std per group."""
    got = advantages(f64(0, 0, 0, 1), [0, 0, 1, 1], scale="batch", eps=0.0)
    near(got, (0, 0, -1, 1))
    per_group = advantages(f64(0, 0, 0, 1), [0, 0, 1, 1])
    near(per_group.abs()[2:], (math.sqrt(0.5),) * 2, 1e-5)


def test_n12_eps_stands_outside_the_root() -> None:
    """(1,0,0,0), ddof 1: .75/(.5 + 1e-4) = 1.499700. Inside the root it would be 3e-8 more."""
    got = float(advantages(f64(1, 0, 0, 0), eps=1e-4)[0])
    assert got == pytest.approx(0.75 / 0.5001, abs=1e-12)
    assert got == pytest.approx(1.499700, abs=5e-7)
    assert abs(0.75 / math.sqrt(0.25 + 1e-4) - got) > 1e-8  # the mutant


@pytest.mark.parametrize(
    ("way", "want"),
    [  # (1,0,0,0): mean .25, sum of squares .75
        ({"ddof": 1}, (0.75 / 0.500001, -0.25 / 0.500001)),  # 1.5, -.5
        ({"ddof": 0}, (0.75 / (0.75**0.5 / 2 + 1e-6), -0.25 / (0.75**0.5 / 2 + 1e-6))),
        ({"scale": "none"}, (0.75, -0.25)),
        ({"name": "rloo"}, (1.0, -1 / 3)),
    ],
)
def test_one_of_four(way: dict[str, Any], want: tuple[float, float]) -> None:
    """The row of ALGORITHMS section 1: 1.5/-.5, 1.7321/-.5774, .75/-.25, 1/-.3333."""
    near(advantages(f64(1, 0, 0, 0), **way), (want[0], *[want[1]] * 3))


def test_rloo_is_the_group_with_siblings_and_no_scale() -> None:
    """G/(G-1) (S - mean): e.g. 4/3 (1 - .375). Kills: an alias that still takes what it settles."""
    rewards = f64(1, 0, 0, 0.5)
    near(advantages(rewards, name="rloo"), 4 / 3 * (rewards - 0.375))
    near(advantages(rewards, baseline="loo", scale="none"), advantages(rewards, name="rloo"))
    for settled in ("baseline", "scale", "ddof", "eps"):
        with pytest.raises(LabError, match=rf"'rloo' has no parameter '{settled}'"):
            bench(installed(), advantage={"name": "rloo", settled: 1})


@pytest.mark.parametrize(
    "way", [{"baseline": "median"}, {"scale": "loo_std"}, {"ddof": 2}, {"eps": -1e-6}]
)
def test_a23_other_ways_are_refused_when_built(way: dict[str, Any]) -> None:
    """Leave-one-out stds are not shipped: equal siblings leave a residue to divide by."""
    with pytest.raises(LabError, match=next(iter(way))):
        bench(installed(), advantage={"name": "group", **way})


def test_a25_observations_between_tokens_change_nothing(shelf: Shelf) -> None:
    """Mask 1,1,0,0,1 is the row of three tokens: one number a row, 0 where nobody chose (P14)."""
    gap = f64([1, 1, 0, 0, 1], [1, 1, 1, 0, 0])
    out = evaluate(
        bench(shelf, advantage="group"), logp=-gap, old_logp=-gap, mask=gap,
        rewards=f64(1, 0), group=torch.tensor([1, 1]),
    )  # fmt: skip
    a = 0.5 / (math.sqrt(0.5) + 1e-6)
    near(out.advantages, gap * f64([a], [-a]))


def test_a27_search_spaces(shelf: Shelf) -> None:
    """Scale and baseline are tuned; ddof and eps never are."""
    spec = {"name": "group", "singleton": "zero"}
    found = recipe.spaces(bench(shelf, advantage=spec).recipe, shelf)
    assert {p: s.options for p, s in found.items() if p.startswith("advantage")} == {
        "advantage.baseline": ("mean", "loo"),
        "advantage.scale": ("std", "none", "batch"),
    }


def test_a22_without_a_signal_only_the_kl_pulls(shelf: Shelf) -> None:
    """Equal rewards: surrogate gradient 0, KL gradient not, and the two stand apart (K6)."""
    logp, ones = f64([-1], [-2]), f64([1], [1])
    kl = {"name": "in_loss", "estimator": "k2", "beta": 0.1}
    batch = {
        "logp": logp, "old_logp": logp, "ref_logp": logp - 0.5, "mask": ones,
        "rewards": f64(1, 1), "group": torch.tensor([0, 0]),
    }  # fmt: skip
    for component, want in (("none", 0.0), (kl, 0.1 * 0.5 / 2)):  # beta d / B
        spec = bench(shelf, advantage="group", kl=component)
        near(gradient(spec, batch)[1], [[want], [want]])
        out = evaluate(spec, **batch)
        assert not out.surrogate.any()
        assert not out.pull.any()
    near(out.kl, 0.1 * 0.5 * 0.5**2 * ones)
