"""The bench in a run: options, state, random streams, observers, the record, the anchor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import PLAIN, bench, f64, tokens
from torch import Tensor

from lab import probe
from lab.bench import Bench
from lab.errors import LabError
from lab.hooks import alias, extra_loss, keep, observe, surrogate
from lab.loss import evaluate
from lab.recipe import Recipe, Use
from lab.shelf import Shelf


def offered(*components: Any) -> Shelf:
    """The built-ins and these components, in a plugin of one object."""
    return Shelf.installed(
        [SimpleNamespace(__name__="lab_x", **{f"c{n}": c for n, c in enumerate(components)})]
    )


def observing(shelf: Shelf, *names: str, **slots: Any) -> Bench:
    recipe = Recipe.of({**PLAIN, **slots}, "test", shelf)
    return Bench(recipe, shelf, [Use(name=n) for n in names])


# -- the filters' options


@keep
def winners(rewards: Tensor) -> Tensor:
    """Rewards above 0."""
    return rewards > 0


@keep
def small(rewards: Tensor) -> Tensor:
    """Rewards below 2."""
    return rewards < 2


@pytest.mark.parametrize(
    ("one", "two", "stats", "shares"),
    [
        # rewards -1, 1, 3, .5: `winners` refuses row 0, `small` row 2
        ({}, {}, [1, 3], [1, 3]),
        ({"stats": "all"}, {}, [0, 1, 3], [1, 3]),
        ({"mode": "drop"}, {}, [1, 3], [0, 1, 3]),
        ({"stats": "all", "mode": "drop"}, {"mode": "drop"}, [0, 1, 3], [0, 1, 2, 3]),
        ({"stats": "all"}, {"stats": "all"}, [0, 1, 2, 3], [1, 3]),
    ],
)
def test_each_filter_says_what_its_refused_rows_still_count_for(
    one: Any, two: Any, stats: list[int], shares: list[int]
) -> None:
    """A rule of the one applied to the rows of the other moves baselines or denominators."""
    found = bench(
        offered(winners, small), filter=[{"name": "winners", **one}, {"name": "small", **two}]
    )
    step: Any = {**probe.batch(), "rewards": torch.tensor([-1.0, 1.0, 3.0, 0.5])}
    kept = found.keep(step)
    assert kept.rows.nonzero().flatten().tolist() == [1, 3]
    assert kept.stats.nonzero().flatten().tolist() == stats
    assert kept.shares.nonzero().flatten().tolist() == shares


def test_without_a_filter_every_row_stays(shelf: Shelf) -> None:
    kept = bench(shelf).keep(probe.batch())
    assert all(bool(x.all()) and x.shape == (4,) for x in (kept.rows, kept.stats, kept.shares))


def test_an_option_is_the_recipes_or_the_slots_default(shelf: Shelf) -> None:
    assert bench(shelf).option("normalize", "per") == "rollout"
    assert bench(shelf, normalize="whiten").option("normalize", "per") == "rollout"
    spec = {"name": "whiten", "per": "minibatch"}
    assert bench(shelf, normalize=spec).option("normalize", "per") == "minibatch"


# -- memory, rng, progress


def _counter(memory: Mapping[str, Any], step: Mapping[str, Any], *, by: float) -> dict[str, Any]:
    return {"n": memory.get("n", 0) + by, "seen": step["kl"]}


def _paced(**more: Any) -> Any:
    def paced(
        ratio: Tensor,
        advantages: Tensor,
        *,
        memory: Mapping[str, Any],
        progress: float,
        by: float = 1.0,
    ) -> Tensor:
        """r A (1 + n) + progress."""
        return ratio * advantages * (1 + memory.get("n", 0)) + progress

    return surrogate(remember=_counter, **more)(paced)


def test_memory_is_what_the_controller_returned_last() -> None:
    found = bench(offered(_paced()), surrogate={"name": "paced", "by": 2.0})
    batch = tokens([2.0], [3.0])  # r A = 6
    assert evaluate(found, **batch).surrogate.item() == 6.0
    assert found.now.memory == {}  # building and evaluating remember nothing
    found.remember({"kl": 0.5})
    assert evaluate(found, **batch).surrogate.item() == 18.0  # 6 (1 + 2)
    found.remember({"kl": 0.25})
    assert evaluate(found, **batch).surrogate.item() == 30.0  # 6 (1 + 4)
    (memory,) = found.now.memory.values()
    assert memory == {"n": 4.0, "seen": 0.25}


def test_progress_is_the_loops() -> None:
    found = bench(offered(_paced()), surrogate="paced")
    found.now.progress = 0.25
    assert evaluate(found, **tokens([2.0], [3.0])).surrogate.item() == 6.25


def test_an_aliass_controller_gets_what_the_alias_settled() -> None:
    original = _paced()
    shelf = offered(original, alias(original, "quick", "Quick.", by=5.0))
    found = bench(shelf, surrogate="quick")
    found.remember({"kl": 0.0})
    assert evaluate(found, **tokens([2.0], [3.0])).surrogate.item() == 36.0  # 6 (1 + 5)


def test_a_component_cannot_write_its_memory() -> None:
    """State that changes in the forward pass depends on how often somebody evaluates."""

    @surrogate
    def greedy(ratio: Tensor, advantages: Tensor, *, memory: Any) -> Tensor:
        """Writes."""
        memory["n"] = 1
        return ratio * advantages

    with pytest.raises(LabError, match="surrogate 'greedy' of lab_x raised TypeError"):
        bench(offered(greedy), surrogate="greedy")


@pytest.mark.parametrize(
    "controller",
    [
        lambda memory, step: None,
        lambda memory, step: 3,
        lambda memory, step: step["no such number"],
        lambda memory, step: memory.update(n=1),
    ],
    ids=["none", "number", "KeyError", "writes"],
)
def test_a_controller_that_fails_is_named(controller: Any) -> None:
    """It runs hours into a training: a bare KeyError says neither hook nor component."""

    @surrogate(remember=controller)
    def mine(ratio: Tensor, advantages: Tensor, *, memory: Any) -> Tensor:
        """Mine."""
        return ratio * advantages

    found = bench(offered(mine), surrogate="mine")
    with pytest.raises(LabError, match=r"surrogate 'mine'.*remember"):
        found.remember({})


def _noisy(name: str, **more: Any) -> Any:
    def noisy(ratio: Tensor, advantages: Tensor, *, rng: torch.Generator) -> Tensor:
        """r A times a draw."""
        return ratio * advantages * torch.rand(ratio.shape, generator=rng, dtype=ratio.dtype)

    return surrogate(name=name, **more)(noisy)


def _draws(found: Bench, key: tuple[Any, ...]) -> list[float]:
    found.now.key = key
    batch = tokens([1.0] * 3, [1.0] * 3)
    return evaluate(found, **batch).surrogate.detach().flatten().tolist()


def test_a_components_stream_hangs_on_task_seed_step_and_component() -> None:
    """Two evaluations of one step draw the same; two steps, seeds or components do not."""
    shelf = offered(_noisy("one"), _noisy("two"))
    one, two = bench(shelf, surrogate="one"), bench(shelf, surrogate="two")
    first = _draws(one, ("task", 0, 1))
    assert _draws(one, ("task", 0, 1)) == first
    torch.manual_seed(99)  # and not on the global generator
    assert _draws(bench(shelf, surrogate="one"), ("task", 0, 1)) == first
    others = [_draws(one, k) for k in (("task", 0, 2), ("task", 1, 1), ("other", 0, 1))]
    others.append(_draws(two, ("task", 0, 1)))
    assert len({tuple(x) for x in (first, *others)}) == 5


def test_a_wrapper_and_a_component_of_one_name_share_nothing() -> None:
    """Both stand on `surrogate`: with one key the second controller overwrites the first's memory,
    and both draw the same numbers.
    """

    def around(advantages: Tensor, *, memory: Any) -> Any:
        """Around."""
        return (yield)

    def inner(ratio: Tensor, advantages: Tensor, *, memory: Any) -> Tensor:
        """Inner."""
        return ratio * advantages

    shelf = offered(
        surrogate(name="x", remember=lambda memory, step: {"who": "inner"})(inner),
        surrogate(name="x", wrapper=True, remember=lambda memory, step: {"who": "around"})(around),
    )
    found = bench(shelf, surrogate="x", wrap=["x"])
    found.remember({})
    assert sorted(m["who"] for m in found.now.memory.values()) == ["around", "inner"]


# -- observers


@observe
def sizes(mask: Tensor, pull: Tensor) -> dict[str, Any]:
    """Tokens and the largest pull."""
    assert not pull.requires_grad
    return {"tokens": mask.sum(), "pull": float(pull.abs().max())}


@observe(at="rollout")
def scores(rewards: Tensor) -> dict[str, float]:
    """The mean reward."""
    return {"reward": float(rewards.mean())}


@observe
def critics(values: Tensor) -> dict[str, float]:
    """The mean value."""
    return {"value": float(values.mean())}


def test_observers_record_at_their_moment_only() -> None:
    found = observing(offered(sizes, scores), "sizes", "scores")
    step = {"mask": f64([1, 1, 0]), "pull": f64([1, -2, 0]), "rewards": f64(1, 2)}
    assert found.observe("update", step) == {"tokens": 2.0, "pull": 2.0}
    assert found.observe("rollout", step) == {"reward": 1.5}
    assert found.observe("eval", step) == {}


def test_an_observer_whose_tensors_do_not_exist_records_nothing() -> None:
    """`values` without a critic: neither an error nor a 0 that looks like a measurement."""
    found = observing(offered(critics), "critics")
    assert not found.has_critic
    assert found.observe("update", {"mask": f64([1])}) == {}
    assert found.observe("update", {"mask": f64([1]), "values": None}) == {}


def test_an_observer_sees_detached_tensors() -> None:
    live = f64([1.0, -2.0]).requires_grad_()
    found = observing(offered(sizes), "sizes")
    assert found.observe("update", {"mask": f64([1, 1]), "pull": live})["pull"] == 2.0


def test_junk_off_the_mask_reaches_no_observer() -> None:
    """A maximum over padding is no measurement."""
    found = observing(offered(sizes), "sizes")
    step = {"mask": f64([1, 0]), "pull": f64([1.0, torch.nan])}
    assert found.observe("update", step) == {"tokens": 1.0, "pull": 1.0}


def test_two_observers_of_one_number_are_refused() -> None:
    """The second would overwrite the first in the table."""

    @observe
    def again(mask: Tensor) -> dict[str, float]:
        """Tokens too."""
        return {"tokens": 0.0}

    found = observing(offered(sizes, again), "sizes", "again")
    step = {"mask": f64([1]), "pull": f64([1])}
    with pytest.raises(LabError, match="observe 'again': another observer records 'tokens' alre"):
        found.observe("update", step)


@pytest.mark.parametrize(
    ("returned", "line"),
    [
        (None, "observe 'odd' returned nothing; is there a `return`?"),
        (3.0, "observe 'odd' returned float where a mapping was due"),
        ({"a": "b"}, "observe 'odd' records 'a': 'b'; a name and a number were due"),
        ({1: 2.0}, "observe 'odd' records 1: 2.0; a name and a number were due"),
        ({"a": torch.ones(2)}, "observe 'odd' records 'a'"),
    ],
)
def test_an_observer_that_returns_no_numbers_is_found_when_the_bench_is_built(
    returned: Any, line: str
) -> None:
    @observe
    def odd(mask: Tensor) -> Any:
        """Odd."""
        return returned

    with pytest.raises(LabError, match=line):
        observing(offered(odd), "odd")


def test_a_missing_observer_is_named_with_the_nearest(shelf: Shelf) -> None:
    with pytest.raises(LabError, match=r"no observe 'cliping'\. Did you mean 'clipping'\?"):
        observing(shelf, "cliping")


# -- the record, the anchor


def test_a_record_names_every_component_with_every_parameter(shelf: Shelf) -> None:
    spec = {"kl": {"name": "in_reward", "beta": 0.1, "when": "after"}, "wrap": ["dual_clip"]}
    record = bench(shelf, **spec, loop={"lr": 1e-3}).record()
    assert json.loads(json.dumps(record)) == record
    assert record["recipe"] == "test"
    assert record["loop"]["lr"] == 1e-3
    assert record["loop"]["group_size"] == 8
    rows = {(row["slot"], row["name"]): row for row in record["components"]}
    assert list(rows) == [
        ("kl", "in_reward"),
        ("advantage", "reinforce"),
        ("ratio", "token"),  # the default is written down too
        ("surrogate", "ppo_unclipped"),
        ("aggregate", "sequence_sum"),
        ("wrap", "dual_clip"),
    ]
    text = json.dumps(rows["kl", "in_reward"])
    for said in ('"plugin": "lab_kl"', '"hook": "kl_reward"', '"estimator": "k1"', '"beta": 0.1'):
        assert said in text  # where it came from, the default and what was given
    for said in ('"credit": "to_go"', '"when": "after"', '"centre": false'):
        assert said in text  # and the slot's options
    assert '"c": 3.0' in json.dumps(rows["wrap", "dual_clip"])


def test_a_record_has_an_own_aggregates_parameters(shelf: Shelf) -> None:
    """Every choice is in the record: `constant` without its length cannot be repeated."""
    spec = {"name": "in_loss", "aggregate": {"name": "constant", "length": 8}}
    text = json.dumps(bench(shelf, kl=spec).record())
    assert '"length": 8' in text
    text = json.dumps(bench(shelf, kl={"name": "in_loss", "aggregate": "constant"}).record())
    assert '"length": null' in text  # the default is a choice as well


def test_a_parameter_cannot_hide_who_a_row_is() -> None:
    """A keyword `plugin`, `hook` or `slot` would overwrite the row's own key."""

    @extra_loss
    def odd(logp: Tensor, *, plugin: str = "mine", hook: str = "theirs") -> Tensor:
        """Odd."""
        return logp

    refused = ""
    try:
        found = bench(offered(odd), extra=["odd"])
    except LabError as e:
        refused = str(e)
    if refused:  # right as well, if it says which name
        assert "'plugin'" in refused or "'hook'" in refused
        return
    row = next(r for r in found.record()["components"] if r["name"] == "odd")
    assert (row["plugin"], row["hook"]) == ("lab_x", "extra_loss")


@pytest.mark.parametrize("anchor", ["old", "rollout"])
def test_the_ratio_is_taken_against_the_anchor(shelf: Shelf, anchor: str) -> None:
    """r = exp(logp - old) = 3, or exp(logp - rollout) = 3/2 where the sampler said twice old."""
    found = bench(shelf, loop={"anchor": anchor})
    batch = tokens([3.0], [1.0])
    batch["rollout_logp"] = batch["old_logp"] + f64([2.0]).log()
    assert evaluate(found, **batch).ratio.item() == pytest.approx(3.0 if anchor == "old" else 1.5)


def test_an_anchor_that_is_not_there_is_an_error(shelf: Shelf) -> None:
    batch = tokens([3.0], [1.0])
    del batch["rollout_logp"]
    with pytest.raises(LabError, match=r"loop\.anchor = 'rollout' needs rollout_logp"):
        evaluate(bench(shelf, loop={"anchor": "rollout"}), **batch)
