"""The shipped recipes are the published ones: slots, constants, and a source for each constant."""

from __future__ import annotations

from typing import Any

import pytest

from lab.bench import Bench
from lab.hookspecs import SLOTS
from lab.recipe import Recipe, load
from lab.shelf import Shelf

GROUP = {"name": "group", "baseline": "mean", "scale": "std", "ddof": 1, "eps": 1e-6}
#: Slot -> component and constants, as in the papers; what is not named here must be empty.
PUBLISHED: dict[str, dict[str, Any]] = {
    "reinforce": {
        "advantage": {"name": "reinforce", "gamma": 1.0},
        "surrogate": {"name": "reinforce"},
        "aggregate": {"name": "sequence_sum"},
    },
    "rloo": {
        "advantage": {"name": "rloo"},
        "surrogate": {"name": "reinforce"},
        "aggregate": {"name": "sequence_sum"},
        "kl": {
            "name": "in_reward",
            "estimator": "k1",
            "beta": 0.03,
            "credit": "sequence",
            "when": "before",
        },
    },
    "ppo": {
        "advantage": {"name": "gae", "gamma": 1.0, "lam": 0.95},
        "ratio": {"name": "token"},
        "surrogate": {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.2},
        "aggregate": {"name": "token_mean"},
        "normalize": {"name": "whiten", "ddof": 1, "eps": 1e-8},
        "kl": {
            "name": "in_reward",
            "estimator": "k1",
            "beta": 0.05,
            "credit": "to_go",
            "when": "before",
        },
        "critic_loss": {"name": "clipped", "c": 0.2},
        "critic_target": {"name": "raw_plus_values"},
    },
    "grpo": {
        "advantage": GROUP,
        "ratio": {"name": "token"},
        "surrogate": {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.2},
        "aggregate": {"name": "sequence_mean"},
        "kl": {"name": "in_loss", "estimator": "k3", "beta": 0.001, "weight": "none"},
    },
    "dr_grpo": {
        "advantage": {"name": "group", "baseline": "mean", "scale": "none"},
        "ratio": {"name": "token"},
        "surrogate": {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.2},
        "aggregate": {"name": "constant", "length": None},
    },
    "dapo": {
        "filter": {"name": "zero_variance", "refill": True},
        "shape": {"name": "soft_overlong", "cache": None, "length": None},
        "advantage": GROUP,
        "ratio": {"name": "token"},
        "surrogate": {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.28},
        "aggregate": {"name": "token_mean"},
    },
    "cispo": {
        "advantage": GROUP,
        "ratio": {"name": "token"},
        "surrogate": {"name": "cispo", "cap": 5.0, "floor": None},
        "aggregate": {"name": "token_mean"},
    },
    "gspo": {
        "advantage": GROUP,
        "ratio": {"name": "sequence"},
        "surrogate": {"name": "ppo_clip", "eps_low": 3e-4, "eps_high": 4e-4},
        "aggregate": {"name": "sequence_mean"},
    },
    "sapo": {
        "advantage": GROUP,
        "ratio": {"name": "token"},
        "surrogate": {"name": "sapo", "tau_pos": 1.0, "tau_neg": 1.05},
        "aggregate": {"name": "sequence_mean"},
    },
}


def test_no_recipe_is_missing_or_unchecked(shelf: Shelf) -> None:
    assert shelf.names("recipes").keys() == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_is_the_published_one(name: str, shelf: Shelf) -> None:
    """Kills a swapped surrogate, a wrong constant, a slot filled that the paper leaves empty."""
    bench = Bench(load(name, shelf), shelf)
    found = {b.slot: {"name": b.component.name, **b.values, **b.options} for b in bench.bound}
    assert found.keys() - {"critic_target"} == PUBLISHED[name].keys() - {"critic_target"}
    for slot, wanted in PUBLISHED[name].items():
        assert wanted.items() <= found[slot].items(), slot


def constants(recipe: Recipe) -> set[str]:
    """The path of each parameter and loop setting that a recipe settles itself."""
    paths = set()
    for slot, use in recipe.uses():
        path = f"{slot}.{use.name}" if SLOTS[slot].many else slot
        paths |= {f"{path}.{name}" for name in use.settings}
    return paths | {f"loop.{name}" for name in recipe.loop.model_fields_set}


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_constant_has_a_source_and_each_source_a_constant(name: str, shelf: Shelf) -> None:
    recipe = load(name, shelf)
    assert recipe.source.keys() == constants(recipe) | {"recipe"}
    assert all(recipe.source.values())
    assert recipe.doc


def test_ppo_trains_its_critic_as_published(shelf: Shelf) -> None:
    ppo = load("ppo", shelf)
    assert (ppo.loop.epochs, ppo.loop.critic_coef) == (4, 0.1)
    assert load("rloo", shelf).loop.group_size == 4
    for name in ("reinforce", "rloo"):  # no ratio, so a second update would be biased
        assert (load(name, shelf).loop.epochs, load(name, shelf).loop.minibatches) == (1, 1)


@pytest.mark.parametrize(
    ("name", "critic", "reference"),
    [("ppo", True, True), ("grpo", False, True), ("rloo", False, True), ("cispo", False, False)],
)
def test_roles_exist_exactly_when_a_component_names_their_tensors(
    name: str, critic: bool, reference: bool, shelf: Shelf
) -> None:
    bench = Bench(load(name, shelf), shelf)
    assert (bench.has_critic, bench.has_reference) == (critic, reference)
