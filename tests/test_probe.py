"""The probe: what is wrong with a component is found when the bench is built, and who it is."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import PLAIN, bench
from torch import Tensor

import lab
from lab import probe
from lab.bench import Bench
from lab.errors import LabError
from lab.hooks import aggregate, extra_loss, keep, observe, surrogate
from lab.hookspecs import KINDS, LIVE, RETURNS, SLOT_OF, SLOTS, TENSOR_HOOKS, StopReason, inputs
from lab.recipe import Recipe, Use
from lab.shelf import Shelf
from lab.step import GIVEN, complete


def offered(*components: Any) -> Shelf:
    """The built-ins and these components, in a plugin of one object."""
    return Shelf.installed(
        [SimpleNamespace(__name__="lab_x", **{f"c{n}": c for n, c in enumerate(components)})]
    )


# -- the batch


@pytest.mark.parametrize("group_size", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_batch_has_every_name_in_its_kind(group_size: int, dtype: torch.dtype) -> None:
    """A name that is missing here would be 'not given' for whoever needs it."""
    step: Any = probe.batch(max(2, group_size), dtype)
    assert set(step) == set(KINDS)
    rows = step["mask"].shape[0]
    for name, kind in KINDS.items():
        if kind in ("PerToken", "PerRow"):
            shape = (rows, probe.WIDTH) if kind == "PerToken" else (rows,)
            assert (step[name].dtype, step[name].shape) == (dtype, shape), name
        elif kind in ("RowId", "RowFlag"):
            due = torch.bool if kind == "RowFlag" else torch.int64
            assert (step[name].dtype, step[name].shape) == (due, (rows,)), name


def test_the_batch_is_what_a_person_could_give() -> None:
    """Contradictions in it would prove components on a batch that no run can have."""
    step: Any = probe.batch(4)
    given = {n: x for n, x in step.items() if n in GIVEN}
    completed: Any = complete(given)
    assert torch.equal(completed["bootstrap"], step["bootstrap"])
    assert torch.equal(completed["lengths"], step["lengths"])
    assert torch.equal((step["token_rewards"] * step["mask"]).sum(1), step["rewards"])
    assert torch.allclose(step["ratio"], (step["logp"] - step["old_logp"]).exp())


def test_the_batch_holds_the_cases_that_go_wrong() -> None:
    """Ragged rows, a gap, both signs, ratios on both sides, a cut row, groups by id."""
    step: Any = probe.batch()
    on = step["mask"].bool()
    assert len(set(step["lengths"].tolist())) > 1
    assert bool(((~on[:, :-1]) & on[:, 1:]).any())  # a token after a gap
    assert bool((~on).any(1).any())
    ratios, advantages = step["ratio"][on], step["advantages"][on]
    for sign in (1, -1):
        of_sign = ratios[advantages.sign() == sign]
        assert float(of_sign.min()) < 0.8
        assert float(of_sign.max()) > 1.2
    assert 0 < int(step["truncated"].sum()) < 4
    assert step["stop_reason"][step["truncated"]].unique().tolist() == [StopReason.LENGTH]
    assert step["group"].unique().numel() == 2
    assert step["group"].tolist() != sorted(step["group"].tolist())  # not by position
    assert step["mask"].shape[0] != step["mask"].shape[1]  # B and T cannot be taken for each other
    assert len(set(step["rewards"].tolist())) > 1


# -- building a bench


def _returning(hook: str, count: list[str]) -> Any:
    """A component on a hook that counts its calls."""
    live = LIVE.get(hook, ())
    plain = {"RowFlag": "mask.sum(1) > 1", "PerRow": "rewards * 1", "PerToken": "mask * 3"}
    result = " + ".join(live) + " + 3" if live else plain[RETURNS[hook]]
    namespace: dict[str, Any] = {"count": count}
    text = f'def spy({", ".join(inputs(hook))}):\n    """S."""\n    count.append("")\n'
    exec(f"{text}    return {result}", namespace)
    return getattr(lab, hook)(namespace["spy"])


@pytest.mark.parametrize("hook", TENSOR_HOOKS)
def test_building_a_bench_calls_each_component_once(hook: str) -> None:
    count: list[str] = []
    slot = SLOT_OF[hook]
    spec = {slot: ["spy"] if SLOTS[slot].many else "spy"}
    bench(offered(_returning(hook, count)), **spec)
    assert len(count) == 1


def test_building_a_bench_calls_wrappers_entries_own_aggregates_and_observers_once() -> None:
    count: list[str] = []

    def around(mask: Tensor) -> Iterator[None]:
        """Around."""
        count.append("around")
        return (yield)

    def weigh(mask: Tensor) -> Tensor:
        """Weigh."""
        count.append("weigh")
        return mask / mask.sum()

    def numbers(mask: Tensor) -> dict[str, float]:
        """Numbers."""
        count.append("numbers")
        return {}

    def entry(logp: Tensor) -> Tensor:
        """Entry."""
        count.append("entry")
        return logp

    shelf = offered(
        surrogate(wrapper=True)(around), aggregate(weigh), observe(numbers), extra_loss(entry)
    )
    spec = {**PLAIN, "wrap": ["around"], "extra": ["entropy", {"name": "entry"}]}
    spec["kl"] = {"name": "in_loss", "aggregate": "weigh"}
    Bench(Recipe.of(spec, "x", shelf), shelf, [Use(name="numbers")])
    assert sorted(count) == ["around", "entry", "numbers", "weigh"]


def test_a_component_that_needs_large_groups_is_tried_on_such() -> None:
    sizes = []

    @lab.advantage(needs_group=6)
    def six(rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
        """Six."""
        sizes.append(group.unique(return_counts=True)[1].tolist())
        return mask

    bench(offered(six), advantage="six", loop={"group_size": 6})
    assert sizes == [[6, 6]]


def test_building_a_bench_leaves_the_global_generator(shelf: Shelf) -> None:
    """Two recipes of one seed share their first rollout: building must draw nothing."""
    before = torch.get_rng_state()
    assert bench(shelf)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_bench_is_built_where_no_gradients_are(shelf: Shelf, mode: Any) -> None:
    """`with torch.no_grad(): lab.evaluate("ppo", ...)` asks for a number, and nothing is wrong."""
    with mode():
        assert bench(shelf, advantage="gae", kl="in_loss", extra=["entropy"])


# -- what is found, and that the guilty one is named


def _surrogate(body: Callable[[Tensor, Tensor], Any]) -> Any:
    def mine(ratio: Tensor, advantages: Tensor) -> Any:
        """Mine."""
        return body(ratio, advantages)

    return surrogate(mine)


def _wrapper(body: Callable[[Tensor], Any]) -> Any:
    def mine(ratio: Tensor) -> Any:
        """Mine."""
        result = yield
        return body(result)

    return surrogate(wrapper=True)(mine)


def _entry(body: Callable[[Tensor, Tensor], Any]) -> Any:
    def mine(logp: Tensor, entropy: Tensor) -> Any:
        """Mine."""
        return body(logp, entropy)

    return extra_loss(mine)


FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "detached": (lambda x: x.detach(), "no gradient flows"),
    "not finite": (lambda x: x / 0, "not finite"),
    "torch draws": (lambda x: x * torch.rand(()), "global generator; name the keyword rng"),
    "row sums": (lambda x: x.sum(1), r"returned \[B\] where \[B,T\] was due"),
    "one number": (lambda x: x.sum(), r"returned \[\] where \[B,T\] was due"),
    "a column": (lambda x: x[:, :1], r"returned \[B,1\] where \[B,T\] was due"),
    "upcast": (lambda x: x.double(), r"returned torch\.float64 where torch\.float32 was due"),
    "nothing": (lambda x: None, r"returned nothing; is there a `return`\?"),  # type: ignore[dict-item,return-value]
    "an array": (lambda x: x.detach().numpy(), "returned ndarray where a tensor was due"),
    "a list": (lambda x: x.tolist(), "returned list where a tensor was due"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_component_is_named(fault: str) -> None:
    body, line = FAULTS[fault]
    shelf = offered(_surrogate(lambda ratio, advantages: body(ratio * advantages)))
    with pytest.raises(LabError, match=f"^surrogate 'mine'.*{line}"):
        bench(shelf, surrogate="mine")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_wrapper_is_named_not_what_it_wraps(fault: str) -> None:
    """The author of ppo_unclipped would look in vain."""
    body, line = FAULTS[fault]
    with pytest.raises(LabError, match=f"^wrap 'mine'.*{line}"):
        bench(offered(_wrapper(body)), wrap=["mine"])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_entry_of_a_list_is_named_not_the_first(fault: str) -> None:
    """And a detached one is found although its neighbour has a gradient."""
    body, line = FAULTS[fault]
    shelf = offered(_entry(lambda logp, entropy: body(logp * entropy)))
    with pytest.raises(LabError, match=f"^extra 'mine'.*{line}"):
        bench(shelf, extra=["entropy", "mine"])


@pytest.mark.parametrize("fault", ["not finite", "torch draws"])
def test_a_faulty_own_aggregate_is_named(fault: str) -> None:
    body, line = FAULTS[fault]

    @aggregate
    def mine(mask: Tensor) -> Tensor:
        """Mine."""
        return body(mask)

    with pytest.raises(LabError, match=f"^aggregate 'mine'.*{line}"):
        bench(offered(mine), kl={"name": "in_loss", "aggregate": "mine"})


@pytest.mark.parametrize("draw", [np.random.rand, random.random], ids=["numpy", "random"])
def test_other_global_generators_are_found_too(draw: Any) -> None:
    """numpy's and Python's streams hang on no seed of a run either."""
    shelf = offered(_surrogate(lambda ratio, advantages: ratio * advantages * draw()))
    with pytest.raises(LabError, match="global generator; name the keyword rng"):
        bench(shelf, surrogate="mine")


@pytest.mark.parametrize("name", ["ratio", "advantages", "rewards", "mask", "group"])
def test_a_component_that_edits_an_input_is_named_with_the_input(name: str) -> None:
    """Wrappers and later entries see the same tensors: the edit would change what they do."""
    namespace: dict[str, Any] = {}
    given = ", ".join(dict.fromkeys(("ratio", "advantages", name)))
    text = f'def mine({given}):\n    """Mine."""\n    {name}.mul_(2)\n'
    exec(f"{text}    return ratio * advantages", namespace)
    with pytest.raises(LabError, match=f"surrogate 'mine' changes its input {name} in place"):
        bench(offered(surrogate(namespace["mine"])), surrogate="mine")


@pytest.mark.parametrize("first", ["overlong", "mine"])
def test_an_entry_that_edits_an_input_is_named(first: str) -> None:
    @keep
    def mine(rewards: Tensor) -> Tensor:
        """Mine."""
        rewards.add_(1)
        return rewards > 0

    order = ["overlong", "mine"] if first == "overlong" else ["mine", "overlong"]
    with pytest.raises(LabError, match="filter 'mine' changes its input rewards in place"):
        bench(offered(mine), filter=order)


def test_an_observer_that_edits_is_named() -> None:
    @observe
    def mine(pull: Tensor) -> dict[str, float]:
        """Mine."""
        pull.abs_()
        return {}

    shelf = offered(mine)
    with pytest.raises(LabError, match="observe 'mine' changes its input pull in place"):
        Bench(Recipe.of(PLAIN, "x", shelf), shelf, [Use(name="mine")])


def test_a_component_that_names_no_live_input_is_refused() -> None:
    """An objective of constants trains nothing, and its loss looks like any other."""

    @surrogate
    def mine(advantages: Tensor) -> Tensor:
        """Mine."""
        return advantages * 1

    line = r"surrogate 'mine': no gradient flows \(it names none of .*ratio.*logp"
    with pytest.raises(LabError, match=line):
        bench(offered(mine), surrogate="mine")


@pytest.mark.parametrize(
    ("slots", "line"),
    [
        ({"surrogate": {"name": "cispo", "cap": 0.5}}, "surrogate 'cispo': cap=0.5; below 1"),
        ({"wrap": [{"name": "dual_clip", "c": 1.0}]}, "wrap 'dual_clip': c=1.0; it bounds"),
        ({"kl": {"name": "in_loss", "beta": -1.0}}, "kl 'in_loss': beta=-1.0; it is at least 0"),
        (
            {"kl": {"name": "in_loss", "estimator": "k1"}},
            "kl 'in_loss': estimator='k1' in the loss",
        ),
        (
            {"aggregate": {"name": "constant", "length": 0}},
            "aggregate 'constant': length=0; a numb",
        ),
    ],
)
def test_an_illegal_parameter_is_found_before_any_training(
    shelf: Shelf, slots: dict[str, Any], line: str
) -> None:
    with pytest.raises(LabError, match=f"^{re.escape(line)}"):
        bench(shelf, **slots)
