"""What components declare of themselves, held against each other, the loop and the batch."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import PLAIN, bench, f64, tokens
from torch import Tensor

from lab.bench import COMPARISON_INTERVAL, Bench
from lab.errors import LabError
from lab.hooks import advantage, aggregate, ratio, surrogate
from lab.loss import evaluate
from lab.recipe import Recipe, load
from lab.shelf import Shelf
from lab.tools import spread


def offered(*components: Any) -> Shelf:
    """The built-ins and these components, in a plugin of one object."""
    return Shelf.installed(
        [SimpleNamespace(__name__="lab_x", **{f"c{n}": c for n, c in enumerate(components)})]
    )


def mine(ratio: Tensor, advantages: Tensor, *, steps: int = 3) -> Tensor:
    """steps r A."""
    return steps * ratio * advantages


# `mine` is decorated anew in each test; under another name, so no module-level one is lost
def declared(**declarations: Any) -> Shelf:
    def local(ratio: Tensor, advantages: Tensor, *, steps: int = 3) -> Tensor:
        """steps r A."""
        return mine(ratio, advantages, steps=steps)

    return offered(surrogate(name="mine", **declarations)(local))


# -- groups


@pytest.mark.parametrize("needs", [4, lambda steps: steps + 1], ids=["number", "function"])
def test_a_loop_with_smaller_groups_is_refused(needs: Any) -> None:
    """steps 3: groups of 4. A group of fewer would run, with a statistic of nothing."""
    shelf = declared(needs_group=needs)
    line = r"surrogate 'mine' needs groups of at least 4 rows; loop\.group_size is 2"
    with pytest.raises(LabError, match=line):
        bench(shelf, surrogate="mine", loop={"group_size": 2})
    assert bench(shelf, surrogate="mine", loop={"group_size": 4})


def test_a_need_follows_its_parameter(shelf: Shelf) -> None:
    line = r"advantage 'group' needs groups of at least 2 rows; loop\.group_size is 1"
    with pytest.raises(LabError, match=line):
        bench(shelf, advantage="group", loop={"group_size": 1})
    alone = {"name": "group", "singleton": "zero"}
    assert bench(shelf, advantage=alone, loop={"group_size": 1})


def test_a_batch_with_a_smaller_group_is_refused_with_its_id(shelf: Shelf) -> None:
    """The loop's setting says nothing of a batch that was filtered or is given by hand."""
    batch = tokens([1.0] * 3, [0.0] * 3, rewards=f64(1, 0, 1), group=torch.tensor([7, 9, 7]))
    del batch["advantages"]
    found = bench(shelf, advantage="group")
    with pytest.raises(LabError, match="needs groups of at least 2 rows; group 9 has 1"):
        evaluate(found, **batch)
    batch["group"] = torch.tensor([7, 7, 7])
    assert evaluate(found, **batch).advantages.shape == (3, 1)


def test_groups_are_counted_for_whom_the_declaration_is_made() -> None:
    """An advantage that names `group` without a need takes groups of one."""

    @advantage
    def easy(rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
        """The reward."""
        return spread(rewards, mask)

    batch = tokens([1.0, 1.0], [0.0, 0.0], rewards=f64(1, 0), group=torch.tensor([1, 2]))
    del batch["advantages"]
    out = evaluate(bench(offered(easy), advantage="easy", loop={"group_size": 1}), **batch)
    assert out.advantages.flatten().tolist() == [1.0, 0.0]


# -- the sampler's correction


def _corrector(name: str) -> Any:
    def around(rollout_logp: Tensor, old_logp: Tensor) -> Iterator[None]:
        """Around."""
        gain = yield
        return (old_logp - rollout_logp).exp() * gain

    return surrogate(name=name, wrapper=True, corrects="rollout")(around)


def test_two_corrections_for_the_sampler_are_refused() -> None:
    """The weight old/rollout would be taken twice."""
    shelf = offered(_corrector("one"), _corrector("two"))
    with pytest.raises(LabError, match="'one' and 'two' both correct for the sampler; keep one"):
        bench(shelf, wrap=["one", "two"])
    with pytest.raises(LabError, match="'one' and 'token_tis' both correct"):
        bench(shelf, wrap=["one", "token_tis"])
    assert bench(shelf, wrap=["one"])


def test_a_correction_beside_the_rollout_anchor_is_refused() -> None:
    """r is taken against the sampler already: old/rollout on top counts it twice."""
    shelf = offered(_corrector("one"))
    with pytest.raises(LabError, match=r"wrap 'one' corrects .* loop\.anchor = 'rollout' does so"):
        bench(shelf, wrap=["one"], loop={"anchor": "rollout"})
    assert bench(shelf, wrap=["one"], loop={"anchor": "old"})


# -- KL credit


@pytest.mark.parametrize(("option", "value"), [("credit", "own"), ("centre", True)])
def test_a_credit_that_goes_with_after_only_is_refused_before(
    shelf: Shelf, option: str, value: Any
) -> None:
    line = rf"kl 'in_reward': {option} = {value!r} goes with when = 'after' only"
    with pytest.raises(LabError, match=line):
        bench(shelf, kl={"name": "in_reward", "when": "before", option: value})
    assert bench(shelf, kl={"name": "in_reward", "when": "after", option: value})


@pytest.mark.parametrize("credit", ["to_go", "sequence"])
def test_the_other_credits_go_with_both(shelf: Shelf, credit: str) -> None:
    for when in ("before", "after"):
        assert bench(shelf, kl={"name": "in_reward", "when": when, "credit": credit})


# -- sequence-level components and the aggregate


@pytest.mark.parametrize("name", ["token_mean", "sequence_sum", "constant"])
def test_a_sequence_level_ratio_refuses_weights_by_length(shelf: Shelf, name: str) -> None:
    """Rows of 1 and 9 tokens, A 1 and -1, r 1: loss 0 under sequence_mean, .8 under token_mean."""
    line = rf"ratio 'sequence' is one number a row, but aggregate '{name}' weighs rows by their le"
    with pytest.raises(LabError, match=line):
        bench(shelf, ratio="sequence", aggregate=name)
    assert bench(shelf, ratio="sequence", aggregate=name, length_weighted=True)
    assert bench(shelf, ratio="token", aggregate=name)


def test_the_numbers_that_the_refusal_is_about(shelf: Shelf) -> None:
    mask = torch.zeros(2, 9, dtype=torch.float64)
    mask[0, 0] = mask[1] = 1
    logp = torch.zeros_like(mask)
    advantages = f64(1, -1)[:, None].expand_as(mask)
    batch = {"logp": logp, "old_logp": logp, "advantages": advantages, "mask": mask}
    even = bench(shelf, ratio="sequence", aggregate="sequence_mean")
    long = bench(shelf, ratio="sequence", aggregate="token_mean", length_weighted=True)
    assert evaluate(even, **batch).loss.item() == pytest.approx(0.0)  # -(1 - 1)/2
    assert evaluate(long, **batch).loss.item() == pytest.approx(0.8)  # -(1 - 9)/10


def test_the_aggregate_is_tried_whatever_its_name() -> None:
    """A list of names would let a third party's token mean pass and refuse its row mean."""

    @aggregate
    def even(mask: Tensor) -> Tensor:
        """Every row alike, times three."""
        return 3 * mask / mask.sum(1, keepdim=True).clamp(min=1)

    @aggregate
    def sequence_mean_of_mine(mask: Tensor) -> Tensor:
        """By length, whatever it says."""
        return mask / mask.sum()

    shelf = offered(even, sequence_mean_of_mine)
    assert bench(shelf, ratio="sequence", aggregate="even")
    with pytest.raises(LabError, match="weighs rows by their length"):
        bench(shelf, ratio="sequence", aggregate="sequence_mean_of_mine")


def test_a_declaration_of_the_level_may_follow_a_parameter() -> None:
    def level(logp: Tensor, old_logp: Tensor, *, whole: bool = True) -> Tensor:
        """Of a row or of a token."""
        return (logp - old_logp).exp()

    shelf = offered(ratio(sequence_level=lambda whole: whole)(level))
    with pytest.raises(LabError, match="ratio 'level' is one number a row"):
        bench(shelf, ratio="level", aggregate="token_mean")
    spec = {"name": "level", "whole": False}
    assert bench(shelf, ratio=spec, aggregate="token_mean")


def test_a_ratio_that_is_not_called_declares_nothing(shelf: Shelf) -> None:
    assert bench(shelf, ratio="sequence", surrogate="reinforce", aggregate="token_mean")


# -- the whole batch


def test_a_slice_is_refused_where_a_component_reads_the_whole_batch() -> None:
    """Statistics of a micro-batch are other numbers than the batch's."""
    batch = tokens([1.0, 1.0], [1.0, 1.0])
    shares = torch.full_like(batch["mask"], 0.1)
    whole = bench(declared(whole_batch=True), surrogate="mine")
    with pytest.raises(LabError, match="surrogate 'mine' reads statistics of the whole"):
        evaluate(whole, **batch, shares=shares)
    assert evaluate(whole, **batch).loss.item() == -3.0  # steps r A = 3, its mean
    plain = bench(declared(), surrogate="mine")
    assert evaluate(plain, **batch, shares=shares).loss.item() == pytest.approx(-0.6)  # 2 .1 3


# -- the interval


def test_bounds_follow_the_parameters_by_name() -> None:
    shelf = declared(bounds=lambda steps: (None, 1.0 + steps))
    assert bench(shelf, surrogate="mine").interval == (None, 4.0)
    assert bench(shelf, surrogate={"name": "mine", "steps": 1}).interval == (None, 2.0)


@pytest.mark.parametrize(
    ("spec", "interval"),
    [
        ({"name": "ppo_clip", "eps_low": 0.1, "eps_high": 0.3}, (0.9, 1.3)),
        ({"name": "cispo", "cap": 3.0}, (None, 3.0)),
        ({"name": "cispo", "cap": "none", "floor": 0.5}, (0.5, None)),
        ("ppo_unclipped", COMPARISON_INTERVAL),
        ("reinforce", COMPARISON_INTERVAL),
    ],
)
def test_the_interval_is_the_declared_one_or_the_comparisons(
    shelf: Shelf, spec: Any, interval: tuple[float | None, float | None]
) -> None:
    assert bench(shelf, surrogate=spec).interval == pytest.approx(interval)
    own = Bench(Recipe.of({**PLAIN, "surrogate": spec}, "x", shelf), shelf, interval=(0.5, 2.0))
    undeclared = interval == COMPARISON_INTERVAL
    assert own.interval == (pytest.approx((0.5, 2.0)) if undeclared else pytest.approx(interval))


def test_every_installed_recipe_builds(shelf: Shelf) -> None:
    for name in shelf.names("recipes"):
        assert Bench(load(name, shelf), shelf).recipe.name == name


def test_a_cost_before_an_advantage_that_reads_no_rewards_is_refused() -> None:
    """It would be listed, and cost nothing."""

    @advantage
    def blind(old_logp: Tensor) -> Tensor:
        """One everywhere."""
        return torch.ones_like(old_logp)

    shelf = Shelf.installed([blind])
    with pytest.raises(LabError, match=r"when = 'before' takes the cost off the rewards"):
        bench(shelf, advantage="blind", kl="in_reward")
    assert bench(shelf, advantage="blind", kl={"name": "in_reward", "when": "after"})
