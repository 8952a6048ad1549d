"""The bench: who is called, with what, around what; nothing that the recipe does not name."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from cases import PLAIN, bench, tokens
from torch import Tensor

from lab import probe
from lab.bench import Bench
from lab.errors import LabError
from lab.hooks import (
    advantage,
    aggregate,
    alias,
    critic_target,
    extra_loss,
    keep,
    observe,
    ratio,
    shape_reward,
    surrogate,
)
from lab.hookspecs import LIVE, RETURNS, SLOT_OF, SLOTS, TENSOR_HOOKS, inputs
from lab.loss import evaluate
from lab.recipe import Recipe, Use
from lab.shelf import Shelf, load_file


def offered(*components: Any) -> Shelf:
    """The built-ins and these components, in a plugin of one object."""
    return Shelf.installed(
        [SimpleNamespace(__name__="lab_x", **{f"c{n}": c for n, c in enumerate(components)})]
    )


def names(found: Any) -> list[str]:
    return [b.component.name for b in found]


# -- what is wired


def test_only_what_the_recipe_names_is_on_the_bench(shelf: Shelf) -> None:
    """An installed component that nobody named must not act: some thirty are installed."""
    found = bench(shelf)
    assert names(found.bound) == ["reinforce", "token", "ppo_unclipped", "sequence_sum"]
    assert [names(found.get(h)) for h in ("advantage", "kl_loss", "normalize")] == [
        *(["reinforce"], []),
        [],
    ]


def test_a_ratio_that_nobody_names_is_not_called(shelf: Shelf) -> None:
    """`token` is the default where the surrogate reads a ratio, and only there."""
    assert names(bench(shelf).get("ratio")) == ["token"]
    assert bench(shelf, surrogate="reinforce").get("ratio") == []
    assert bench(shelf, surrogate="reinforce", ratio="sequence").get("ratio") == []
    line = "surrogate 'ppo_unclipped' names ratio, but the recipe says ratio = 'none'"
    with pytest.raises(LabError, match=line):
        bench(shelf, ratio="none")


def test_a_wrapper_that_names_the_ratio_brings_it() -> None:
    @surrogate(wrapper=True)
    def far(ratio: Tensor) -> Iterator[None]:
        """The objective times the ratio."""
        gain = yield
        return gain * ratio

    found = bench(offered(far), surrogate="reinforce", wrap=["far"])
    assert names(found.get("ratio")) == ["token"]
    out = evaluate(found, **tokens([2.0], [3.0]))
    assert out.surrogate.item() == pytest.approx(3 * (-2 + math.log(2)) * 2)  # A log p r


def test_a_critic_exists_exactly_when_somebody_names_values(shelf: Shelf) -> None:
    without = bench(shelf)
    assert not without.has_critic
    assert without.get("critic_target") == []
    for spec in ({"advantage": "gae"}, {"critic_target": "lambda_return"}):
        found = bench(shelf, **spec)
        assert found.has_critic
        assert names(found.get("critic_loss")) == ["squared"]
    assert names(bench(shelf, advantage="gae").get("critic_target")) == ["raw_plus_values"]
    own = bench(shelf, advantage="gae", critic_target="monte_carlo", critic_loss="clipped")
    assert names([*own.get("critic_target"), *own.get("critic_loss")]) == ["monte_carlo", "clipped"]


def test_a_reference_exists_when_a_component_or_an_observer_names_it(shelf: Shelf) -> None:
    @observe
    def far(logp: Tensor, ref_logp: Tensor) -> dict[str, float]:
        """The distance."""
        return {"far": float((logp - ref_logp).abs().max())}

    assert not bench(shelf).has_reference
    assert bench(shelf, kl="in_loss").has_reference
    with_far = offered(far)
    observed = Bench(Recipe.of(PLAIN, "x", with_far), with_far, [Use(name="far")])
    assert observed.has_reference
    assert "ref_logp" not in observed.needs  # the observer makes no component need it


def test_needs_are_read_through_wrappers_aliases_and_own_aggregates(shelf: Shelf) -> None:
    """The loop computes what is named: an input that is missed would be 'not given' mid-run."""

    @surrogate(wrapper=True)
    def calm(entropy: Tensor) -> Iterator[None]:
        """Less where undecided."""
        gain = yield
        return gain * (-entropy).exp()

    def base(values: Tensor, advantages: Tensor, *, scale: float = 1.0) -> Tensor:
        """Values."""
        return scale * values + advantages

    half = alias(critic_target(name="base")(base), "half", "Half.", scale=0.5)
    found = bench(offered(calm, half), wrap=["calm"], critic_target="half")
    assert {"entropy", "values"} <= found.needs
    assert found.has_critic
    assert "group" not in bench(shelf, kl="in_loss").needs
    assert "group" in bench(shelf, kl={"name": "in_loss", "aggregate": "prompt_mean"}).needs
    assert "rollout_logp" in bench(shelf, loop={"anchor": "rollout"}).needs


@pytest.mark.parametrize(
    ("slots", "line"),
    [
        ({"surrogate": "cipso"}, r"no surrogate 'cipso'\. Did you mean 'cispo'\?"),
        ({"wrap": ["dualclip"]}, r"no wrap 'dualclip'\. Did you mean 'dual_clip'\?"),
        ({"kl": {"name": "in_loss", "bta": 1}}, r"kl 'in_loss' has no parameter 'bta'; .*'beta'\?"),
        ({"kl": {"name": "in_reward", "wen": "after"}}, r"has no parameter 'wen'; .*'when'\?"),
        ({"kl": {"name": "in_reward", "when": "now"}}, r"when='now' is not 'before' or 'after'"),
        ({"wrap": [{"name": "dual_clip", "per": 1}]}, r"wrap 'dual_clip' has no parameter 'per'"),
        ({"surrogate": {"name": "cispo", "cap": "x"}}, r"surrogate 'cispo': cap='x' is not float"),
        ({"kl": {"name": "in_loss", "aggregate": 3}}, r"kl: aggregate = 3; it takes a name"),
        ({"kl": {"name": "in_loss", "aggregate": "tokn_mean"}}, r"no aggregate 'tokn_mean'\. Did"),
    ],
)
def test_what_the_shelf_does_not_have_is_said_with_the_nearest(
    shelf: Shelf, slots: dict[str, Any], line: str
) -> None:
    with pytest.raises(LabError, match=line) as error:
        bench(shelf, **slots)
    assert len(str(error.value).splitlines()) == 1


def test_an_empty_hook_cannot_be_called(shelf: Shelf) -> None:
    with pytest.raises(LabError, match="recipe 'test' has no component on kl_loss"):
        bench(shelf).kl_loss(probe.batch())


# -- what each hook is given: a spy that names every input of its hook


def spy(folder: Path, hook: str) -> ModuleType:
    """A component on a hook that names all of its inputs and keeps what arrived."""
    live = LIVE.get(hook, ())
    plain = {"RowFlag": "mask.sum(1) > 1", "PerRow": "rewards * 1", "PerToken": "mask * 3"}
    result = " + ".join(live) + " + 3" if live else plain[RETURNS[hook]]
    pairs = ", ".join(f"{n}={n}" for n in inputs(hook))
    text = f'''
        from lab import {hook}

        SEEN = {{}}

        @{hook}
        def spy({", ".join(inputs(hook))}):
            """Keeps what arrived."""
            SEEN.update({pairs})
            return {result}
        '''
    file = folder / "spy.py"
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    return load_file(file)


def called(folder: Path, hook: str, step: Any) -> tuple[dict[str, Any], Any]:
    """What arrived at the hook, and what came out of the bench."""
    module = spy(folder, hook)
    slot = SLOT_OF[hook]
    # whoever asks for a critic's hooks needs a component that names values; the spy does
    spec = {slot: ["spy"] if SLOTS[slot].many else "spy"}
    found = bench(Shelf.installed([module]), **spec)
    module.SEEN.clear()
    result = getattr(found, hook)(step)
    return module.SEEN, result.rows if hook == "keep" else result


@pytest.mark.parametrize("hook", TENSOR_HOOKS)
def test_junk_off_the_mask_reaches_no_component_and_leaves_none(tmp_path: Path, hook: str) -> None:
    """Zero times infinity is NaN: a component must find 0 there, and what it returns there goes."""
    step: Any = probe.batch(dtype=torch.float64)
    on = step["mask"].bool()
    for name in ("logp", "old_logp", "advantages", "values", "token_rewards", "entropy", "ratio"):
        step[name] = torch.where(on, step[name], torch.full_like(step[name], torch.nan))
    seen, result = called(tmp_path, hook, step)
    assert set(seen) == set(inputs(hook))
    for name, x in seen.items():
        if isinstance(x, Tensor) and x.ndim == 2:
            assert bool((x[~on] == 0).all()), name
            assert torch.equal(x[on], step[name][on]), name
    if result.ndim == 2:
        assert bool((result[~on] == (1 if hook == "ratio" else 0)).all())
        assert bool((result[on] != 0).any())


@pytest.mark.parametrize("hook", TENSOR_HOOKS)
def test_a_gradient_flows_through_the_live_inputs_only(tmp_path: Path, hook: str) -> None:
    """An advantage or an anchor with a gradient would be trained along with the policy."""
    step: Any = probe.batch(dtype=torch.float64)
    for x in step.values():
        if isinstance(x, Tensor) and x.is_floating_point():
            x.requires_grad_()
    seen, result = called(tmp_path, hook, step)
    flows = {n for n, x in seen.items() if isinstance(x, Tensor) and x.requires_grad}
    assert flows == set(LIVE.get(hook, ()))
    assert result.requires_grad == (hook in LIVE)


def test_a_rollouts_number_has_no_graph_whatever_made_it() -> None:
    """An estimator with a network of its own: its graph would be kept for the whole rollout."""
    weight = torch.ones((), requires_grad=True)

    @advantage
    def learned(mask: Tensor) -> Tensor:
        """By a weight."""
        return weight * mask

    assert not bench(offered(learned), advantage="learned").advantage(probe.batch()).requires_grad


@pytest.mark.parametrize("hook", TENSOR_HOOKS)
def test_an_input_that_is_not_there_is_an_error_not_a_none(tmp_path: Path, hook: str) -> None:
    name = inputs(hook)[0] if inputs(hook)[0] != "mask" else "group"
    step: Any = probe.batch()
    del step[name]
    slot = SLOT_OF[hook]
    with pytest.raises(LabError, match=f"{slot} 'spy' needs {name}, which was not given"):
        called(tmp_path, hook, step)


# -- list slots


def test_filters_are_anded_and_each_sees_all_rows() -> None:
    seen = []

    @keep
    def winners(rewards: Tensor) -> Tensor:
        """Rewards above 0."""
        seen.append(rewards)
        return rewards > 0

    @keep
    def small(rewards: Tensor) -> Tensor:
        """Rewards below 2."""
        seen.append(rewards)
        return rewards < 2

    found = bench(offered(winners, small), filter=["winners", "small"])
    seen.clear()
    step: Any = {**probe.batch(), "rewards": torch.tensor([-1.0, 1.0, 3.0, 0.5])}
    assert found.keep(step).rows.tolist() == [False, True, False, True]
    assert all(torch.equal(x, step["rewards"]) for x in seen)


def test_shapers_run_one_after_another() -> None:
    """r -> r + 1 -> 10 (r + 1), in the order of the list; wrappers surround the whole."""

    @shape_reward
    def plus(rewards: Tensor) -> Tensor:
        """One more."""
        return rewards + 1

    @shape_reward
    def times(rewards: Tensor) -> Tensor:
        """Ten times."""
        return rewards * 10

    shelf = offered(plus, times)
    step: Any = {**probe.batch(), "rewards": torch.tensor([0.0, 1.0, 2.0, -1.0])}
    assert bench(shelf, shape=["plus", "times"]).shape_reward(step).tolist() == [10, 20, 30, 0]
    assert bench(shelf, shape=["times", "plus"]).shape_reward(step).tolist() == [1, 11, 21, -9]
    assert bench(shelf).shape_reward(step).tolist() == [0, 1, 2, -1]


def test_extra_losses_are_summed() -> None:
    @extra_loss
    def one(logp: Tensor, *, by: float = 1.0) -> Tensor:
        """by logp."""
        return by * logp

    @extra_loss
    def two(logp: Tensor) -> Tensor:
        """logp squared."""
        return logp**2

    found = bench(offered(one, two), extra=[{"name": "one", "by": 3.0}, "two"])
    out = evaluate(found, **tokens([1.0], [0.0]))
    assert out.extra.item() == -2.0  # 3 * -2 + (-2)^2 = -6 + 4
    assert out.loss.item() == -2.0


# -- wrappers


def _around(name: str, change: Any, hook: Any = surrogate) -> Any:
    def around(mask: Tensor) -> Iterator[None]:
        """Around."""
        result = yield
        return change(result)

    return hook(name=name, wrapper=True)(around)


def test_the_first_wrapper_is_innermost() -> None:
    """(r A + 1) * 10 is not r A * 10 + 1."""
    shelf = offered(_around("plus", lambda x: x + 1), _around("times", lambda x: x * 10))
    batch = tokens([2.0], [3.0])  # r A = 6
    assert evaluate(bench(shelf, wrap=["plus", "times"]), **batch).surrogate.item() == 70.0
    assert evaluate(bench(shelf, wrap=["times", "plus"]), **batch).surrogate.item() == 61.0


def test_a_wrapper_acts_only_where_it_is_listed() -> None:
    shelf = offered(_around("plus", lambda x: x + 1))
    assert evaluate(bench(shelf), **tokens([2.0], [3.0])).surrogate.item() == 6.0


def test_a_wrapper_of_a_list_slot_surrounds_the_whole() -> None:
    @extra_loss
    def one(logp: Tensor) -> Tensor:
        """logp."""
        return logp

    @extra_loss
    def two(logp: Tensor) -> Tensor:
        """Twice logp."""
        return 2 * logp

    shelf = offered(one, two, _around("square", lambda x: x**2, extra_loss))
    out = evaluate(bench(shelf, extra=["one", "two"], wrap=["square"]), **tokens([1.0], [0.0]))
    assert out.extra.item() == 36.0  # (-2 - 4)^2, not (-2)^2 + (-4)^2 = 20


def test_a_wrapper_of_the_aggregate_surrounds_a_slots_own_too() -> None:
    """Half the weight for every term, whichever aggregate weighs it."""
    shelf = offered(_around("half", lambda x: x / 2, aggregate))
    found = bench(shelf, wrap=["half"], kl={"name": "in_loss", "aggregate": "token_mean"})
    batch = tokens([1.0, 1.0], [1.0, 1.0])
    out = evaluate(found, **batch, ref_logp=batch["old_logp"])
    assert out.shares["surrogate"].tolist() == [[0.25], [0.25]]  # 1/B = 1/2, halved
    assert out.shares["kl"].tolist() == [[0.25], [0.25]]  # 1/N = 1/2, halved


def test_a_wrapper_with_nothing_to_wrap_is_refused() -> None:
    shelf = offered(_around("plus", lambda x: x + 1, extra_loss))
    with pytest.raises(LabError, match="wrap 'plus' wraps extra_loss, and the recipe has none"):
        bench(shelf, wrap=["plus"])
    unread = offered(_around("plus", lambda x: x + 1, ratio))
    with pytest.raises(LabError, match="wrap 'plus' wraps ratio, and the recipe has none"):
        bench(unread, surrogate="reinforce", wrap=["plus"])


# -- own aggregates


def test_a_slot_may_weigh_by_an_aggregate_of_its_own(shelf: Shelf) -> None:
    spec = {"name": "in_loss", "aggregate": {"name": "constant", "length": 8}}
    found = bench(shelf, kl=spec, extra=["entropy"])
    assert [found.own_share(s) for s in ("kl", "extra")] == [True, False]
    step = probe.batch(dtype=torch.float64)
    on = step["mask"].bool()
    assert found.aggregate(step, "kl")[on].tolist() == [1 / (4 * 8)] * int(on.sum())
    for slot in ("surrogate", "extra"):  # sequence_sum: 1/B
        assert found.aggregate(step, slot)[on].tolist() == [1 / 4] * int(on.sum())


def test_entries_of_one_list_share_one_aggregate() -> None:
    @extra_loss
    def one(logp: Tensor) -> Tensor:
        """logp."""
        return logp

    shelf = offered(one)
    own = {"name": "one", "aggregate": "token_mean"}
    with pytest.raises(LabError, match="extra: its entries share one aggregate; name the same"):
        bench(shelf, extra=["entropy", own])
    same = bench(shelf, extra=[{"name": "entropy", "aggregate": "token_mean"}, own])
    assert same.own_share("extra")
