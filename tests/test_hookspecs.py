"""The contract of the hooks: one vocabulary, one meaning a name, nothing lost in an update."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pluggy
import pytest

from lab import hookspecs
from lab.component import Param
from lab.errors import LabError
from lab.hookspecs import (
    COMPONENT_HOOKS,
    KINDS,
    LIVE,
    NAMED_DATA,
    OPTIONS,
    RESERVED,
    RETURNS,
    SLOT_OF,
    SLOTS,
    SPECS,
    TENSOR_HOOKS,
    inputs,
)
from lab.shelf import Shelf
from lab.step import GIVEN, MADE, Step

#: What a component may rely on while VERSION is 1 (DESIGN section 2): inputs may be added.
PROMISED = {
    "keep": "rewards group truncated lengths mask",
    "shape_reward": "rewards lengths truncated stop_reason budget",
    "kl_reward": "old_logp ref_logp mask",
    "advantage": "rewards token_rewards values bootstrap old_logp group mask",
    "normalize": "advantages rewards group mask",
    "critic_target": "rewards token_rewards values bootstrap advantages mask",
    "ratio": "logp old_logp mask",
    "surrogate": "ratio logp old_logp rollout_logp advantages rewards entropy mask group",
    "kl_loss": "logp old_logp ref_logp mask share",
    "extra_loss": "logp entropy rewards mask share",
    "critic_loss": "values old_values returns mask",
    "aggregate": "mask group budget",
    "observe": "pull share group",
}


def test_no_input_is_taken_from_a_published_hook() -> None:
    """A renamed or removed input breaks every component that names it; that is a new VERSION."""
    assert hookspecs.VERSION == 1
    assert set(PROMISED) == set(COMPONENT_HOOKS)
    lost = {h: set(names.split()) - set(inputs(h)) for h, names in PROMISED.items()}
    assert {h: names for h, names in lost.items() if names} == {}


def test_a_step_has_exactly_the_names_that_hooks_may_name() -> None:
    """A name of the vocabulary without a tensor would be 'not given' for ever."""
    named = {name for hook in COMPONENT_HOOKS for name in inputs(hook)}
    assert {"returns", "share", "pull", "interval"} <= named
    of_the_loop = {"counted", "shaped_rewards"}  # which no hook names
    assert not of_the_loop & named
    assert set(Step.__annotations__) == named | of_the_loop


def test_a_step_holds_each_name_in_its_kind() -> None:
    kinds = {"int": "int", "Interval": "tuple[float | None, float | None]"}
    for name, kind in KINDS.items():
        found = Step.__annotations__[name]
        assert getattr(found, "__forward_arg__", found) == kinds.get(kind, "Tensor"), name


def test_what_the_core_makes_and_what_a_person_gives_are_all_there_is() -> None:
    assert set(GIVEN) | set(MADE) == set(KINDS)
    assert not set(GIVEN) & set(MADE)


@pytest.mark.parametrize("hook", COMPONENT_HOOKS)
def test_a_name_is_of_one_kind_on_every_hook(hook: str) -> None:
    """KINDS keeps one kind a name: two would silently follow the last hook."""
    assert {n: SPECS[hook].__annotations__[n] for n in inputs(hook)} == {
        n: KINDS[n] for n in inputs(hook)
    }


def test_kinds_are_the_five_that_the_core_knows_and_results_too() -> None:
    assert set(KINDS.values()) == {"PerToken", "PerRow", "RowId", "RowFlag", "int", "Interval"}
    others = {"keep": "RowFlag", "shape_reward": "PerRow"}
    assert dict(RETURNS) == {hook: others.get(hook, "PerToken") for hook in TENSOR_HOOKS}


def test_hooks_come_in_the_order_of_a_run() -> None:
    order = list(SPECS)
    rollout = ["keep", "shape_reward", "kl_reward", "advantage", "critic_target", "normalize"]
    update = ["ratio", "surrogate", "kl_loss", "extra_loss", "critic_loss"]
    assert order[:6] == rollout
    assert order[6:11] == update


@pytest.mark.parametrize("hook", list(SPECS))
def test_pluggy_calls_a_tensor_hook_once_and_collects_the_others(hook: str) -> None:
    """Without firstresult a tensor hook would return a list; with it, one plugin's recipes."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    spec = getattr(manager.hook, hook).spec
    assert spec is not None
    assert bool(spec.opts["firstresult"]) == (hook in TENSOR_HOOKS)


@pytest.mark.parametrize("hook", list(SPECS))
def test_inputs_have_no_defaults_and_no_names_of_the_loop(hook: str) -> None:
    """pluggy fills a default up to 1.6 and the argument since 1.7; `memory` is a keyword."""
    parameters = inspect.signature(SPECS[hook]).parameters.values()
    assert all(p.default is p.empty for p in parameters)
    assert not {p.name for p in parameters} & set(RESERVED)
    assert bool(parameters) == (hook not in NAMED_DATA)


@pytest.mark.parametrize("hook", TENSOR_HOOKS)
def test_a_spec_says_what_flows(hook: str) -> None:
    """The page a person reads and the table that the bench detaches by say the same."""
    text = " ".join((inspect.getdoc(SPECS[hook]) or "").split())
    assert ("No gradient" in text) == (hook not in LIVE)
    if hook in LIVE:
        sentence = re.search(r"The gradient flows through ([^.;,]*)", text)
        assert sentence is not None
        assert tuple(re.findall(r"`(\w+)`", sentence[1])) == LIVE[hook]


def test_live_inputs_are_the_policy_and_the_critic_and_nothing_of_the_rollout() -> None:
    """An advantage, an anchor or a share with a gradient would be trained."""
    assert dict(LIVE) == {
        "ratio": ("logp",),
        "surrogate": ("ratio", "logp"),
        "kl_loss": ("logp",),
        "extra_loss": ("logp", "entropy"),
        "critic_loss": ("values",),
    }
    assert all(set(names) <= set(inputs(hook)) for hook, names in LIVE.items())


@pytest.mark.parametrize("hook", COMPONENT_HOOKS)
def test_the_example_of_a_spec_is_on_the_shelf(hook: str, shelf: Shelf) -> None:
    text = " ".join((inspect.getdoc(SPECS[hook]) or "").split())
    examples = re.search(r"Examples?: ([^.]*)\.", text)
    assert examples, "each spec ends with an example"
    for name in re.findall(r"`(\w+)`", examples[1]):
        assert hook in {c.hook for c in shelf.find(SLOT_OF.get(hook, hook), name)}


def test_each_tensor_hook_has_one_slot() -> None:
    """A hook without a slot could never be filled; one in two slots would be wired twice."""
    placed = [hook for slot in SLOTS.values() for hook in slot.hooks]
    assert sorted(placed) == sorted(TENSOR_HOOKS)
    assert {s for s, x in SLOTS.items() if x.many} == {"filter", "shape", "extra", "wrap"}
    assert {s for s, x in SLOTS.items() if x.required} == {"advantage", "surrogate", "aggregate"}
    assert SLOT_OF["kl_reward"] == SLOT_OF["kl_loss"] == "kl"
    assert SLOT_OF["keep"] == "filter"
    assert SLOT_OF["shape_reward"] == "shape"
    assert SLOT_OF["extra_loss"] == "extra"


def test_slot_options_are_those_of_the_design() -> None:
    given = {h: {o.name: o.default for o in options} for h, options in OPTIONS.items()}
    assert given == {
        "keep": {"stats": "kept", "mode": "renormalise", "refill": False, "refill_cap": 3.0},
        "kl_reward": {"credit": "to_go", "when": "before", "centre": False},
        "normalize": {"per": "rollout"},
        "kl_loss": {"aggregate": None},
        "extra_loss": {"aggregate": None},
    }


@pytest.mark.parametrize(
    ("hook", "name", "good", "bad"),
    [
        ("keep", "stats", ("kept", "all"), ("keep", True)),
        ("keep", "mode", ("renormalise", "drop"), ("renormalize",)),
        ("keep", "refill", (True, False), (1, "true")),
        ("keep", "refill_cap", (2, 2.5), ("2", True)),
        ("kl_reward", "credit", ("to_go", "own", "sequence"), ("token",)),
        ("kl_reward", "when", ("before", "after"), ("during",)),
        ("kl_reward", "centre", (True, False), ("yes",)),
        ("normalize", "per", ("rollout", "minibatch"), ("batch",)),
    ],
)
def test_an_option_takes_its_values_and_no_others(
    hook: str, name: str, good: tuple[Any, ...], bad: tuple[Any, ...]
) -> None:
    option = next(o for o in OPTIONS[hook] if o.name == name)
    param = Param(option.type, option.default, None)
    assert param.coerce(option.default, name) == option.default
    assert all(param.coerce(x, name) == x for x in good)
    for x in bad:
        with pytest.raises(LabError, match=re.escape(f"{name}={x!r} is not")):
            param.coerce(x, name)


def test_no_option_has_the_name_of_an_input_or_a_reserved_keyword() -> None:
    for hook, options in OPTIONS.items():
        names = {o.name for o in options}
        assert not names & ({*inputs(hook), *RESERVED, "name"})
        assert all(o.doc for o in options)


def test_stop_reasons_are_numbers_that_are_exported() -> None:
    """They are written into saved rollouts: a reordering would turn cuts into terminations."""
    assert {r.name: int(r) for r in hookspecs.StopReason} == {"EOS": 0, "STOP": 1, "LENGTH": 2}
