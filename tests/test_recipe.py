"""Recipes as data: bases, overrides and files merge by one rule, and unknown keys are refused."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from lab.errors import LabError
from lab.hooks import recipes
from lab.overrides import merge, parse_set
from lab.recipe import Loop, Recipe, load
from lab.shelf import Shelf

PLAIN: dict[str, Any] = {
    "advantage": "group",
    "surrogate": {"name": "ppo_clip", "eps_low": 0.1, "eps_high": 0.3},
    "aggregate": "token_mean",
}


def of(shelf: Shelf, sets: tuple[str, ...] = (), **spec: Any) -> Recipe:
    return Recipe.of({**PLAIN, **spec}, "mine", shelf, sets)


def named(**tables: Any) -> Shelf:
    """The built-ins and some more named recipes."""
    return Shelf.installed([SimpleNamespace(__name__="lab_x", r=recipes(lambda: tables))])


def test_a_table_fills_slots_and_the_rest_keeps_its_defaults(shelf: Shelf) -> None:
    recipe = of(shelf, loop={"lr": 3e-4}, wrap=["token_tis", {"name": "dual_clip", "c": 2}])
    assert recipe.surrogate.settings == {"eps_low": 0.1, "eps_high": 0.3}
    assert recipe.advantage.name == "group"
    assert [u.name for u in recipe.wrap] == ["token_tis", "dual_clip"]  # in the order given
    assert (recipe.ratio, recipe.kl, recipe.filter, recipe.length_weighted) == (
        None,
        None,
        (),
        False,
    )
    assert recipe.loop == Loop(lr=3e-4)


def test_the_loops_defaults_are_those_of_the_design() -> None:
    """And three that sampling and a shared backbone need: they change nothing by default."""
    assert Loop().model_dump() == {
        "group_size": 8,
        "prompts": 16,
        "epochs": 4,
        "minibatches": 4,
        "lag": 0,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "lr": 1e-4,
        "optimizer": "adamw",
        "max_grad_norm": 1.0,
        "anchor": "old",
        "kl_stop": 0.0,
        "critic_warmup": 0,
        "critic_coef": 0.5,
        "critic": "own",
    }


def test_the_given_table_is_left_as_it_was(shelf: Shelf) -> None:
    """A study builds many recipes from one table: an edit would leak from one into the next."""
    spec = {"base": "grpo", "surrogate": {"eps_low": 0.1}, "wrap": [{"name": "dual_clip"}]}
    before = {k: (dict(v) if isinstance(v, dict) else v) for k, v in spec.items()}
    recipe = Recipe.of(spec, "mine", shelf, ["wrap.dual_clip.c=2", "surrogate.eps_low=.4"])
    assert recipe.surrogate.settings["eps_low"] == 0.4
    assert spec == before
    assert shelf.recipe("grpo")["surrogate"]["eps_low"] == 0.2


def test_a_base_gives_what_is_not_said(shelf: Shelf) -> None:
    recipe = Recipe.of({"base": "grpo", "surrogate": {"eps_high": 0.28}}, "mine", shelf)
    base = load("grpo", shelf)
    assert recipe.surrogate.settings == {"eps_low": 0.2, "eps_high": 0.28}
    assert (recipe.kl, recipe.advantage, recipe.aggregate) == (
        *(base.kl, base.advantage),
        base.aggregate,
    )
    assert recipe.name == "mine"


def test_a_named_component_replaces_the_bases_with_all_its_parameters(shelf: Shelf) -> None:
    """eps_low of ppo_clip in a cispo would be an unknown parameter, or worse, a known one."""
    recipe = Recipe.of({"base": "grpo", "surrogate": {"name": "cispo"}}, "mine", shelf)
    assert recipe.surrogate.spec() == {"name": "cispo"}
    recipe = Recipe.of({"base": "grpo", "surrogate": {"name": "ppo_clip"}}, "mine", shelf)
    assert recipe.surrogate.settings == {}


def test_precedence_is_recipe_then_study_then_set(shelf: Shelf) -> None:
    """base < recipe < study override < --set, each of them over one parameter."""
    base = {"base": "grpo"}
    over_base = {**base, "surrogate": {"eps_low": 0.11}, "loop": {"lr": 1e-3, "epochs": 1}}
    recipe = Recipe.of(over_base, "mine", shelf)
    study = recipe.override({"surrogate": {"eps_low": 0.12}, "loop": {"lr": 2e-3}}, shelf)
    by_hand = load(study, shelf, ["surrogate.eps_low=.13"])
    values = [
        r.surrogate.settings["eps_low"]
        for r in (Recipe.of(base, "b", shelf), recipe, study, by_hand)
    ]
    assert values == [0.2, 0.11, 0.12, 0.13]
    assert (by_hand.loop.lr, by_hand.loop.epochs, by_hand.loop.prompts) == (2e-3, 1, 16)
    assert by_hand.surrogate.settings["eps_high"] == 0.2  # what nobody changed is the base's
    assert by_hand.name == "mine"


def test_later_sets_win(shelf: Shelf) -> None:
    recipe = of(shelf, ("loop.lr=1e-3", "surrogate=sapo", "surrogate.tau_pos=2", "loop.lr=2e-3"))
    assert recipe.loop.lr == 2e-3
    assert recipe.surrogate.spec() == {"name": "sapo", "tau_pos": 2}


@pytest.mark.parametrize(
    ("one", "slot", "spec"),
    [
        ("surrogate=sapo", "surrogate", {"name": "sapo"}),
        (
            "surrogate.eps_low=.4",
            "surrogate",
            {"name": "ppo_clip", "eps_low": 0.4, "eps_high": 0.3},
        ),
        ('surrogate={name = "cispo", cap = 3}', "surrogate", {"name": "cispo", "cap": 3}),
        ("surrogate.name=cispo", "surrogate", {"name": "cispo"}),
        ("kl=in_reward", "kl", {"name": "in_reward"}),
        ("ratio=none", "ratio", {"name": "none"}),
    ],
)
def test_set_changes_one_slot(shelf: Shelf, one: str, slot: str, spec: dict[str, Any]) -> None:
    assert getattr(of(shelf, (one,)), slot).spec() == spec


@pytest.mark.parametrize(
    ("one", "names", "settings"),
    [
        ("wrap.dual_clip.c=2", ["token_tis", "dual_clip"], [{}, {"c": 2}]),
        ("wrap=dual_clip", ["dual_clip"], [{}]),
        ("wrap=none", [], []),
        ("wrap=[]", [], []),
        ('wrap=["dual_clip", "token_tis"]', ["dual_clip", "token_tis"], [{}, {}]),
        ('wrap={name = "dual_clip", c = 4}', ["dual_clip"], [{"c": 4}]),
    ],
)
def test_set_changes_a_list(
    shelf: Shelf, one: str, names: list[str], settings: list[dict[str, Any]]
) -> None:
    """An entry is changed in its place; only a name or a list replaces the list."""
    recipe = of(shelf, (one,), wrap=["token_tis", {"name": "dual_clip", "c": 5}])
    assert [u.name for u in recipe.wrap] == names
    assert [u.settings for u in recipe.wrap] == settings


@pytest.mark.parametrize(
    ("text", "nested"),
    [
        ("loop.lr=3e-4", {"loop": {"lr": 3e-4}}),
        ("loop.lr=.5", {"loop": {"lr": 0.5}}),  # no TOML, and what a person types
        ("loop.epochs=4", {"loop": {"epochs": 4}}),
        ("loop.optimizer=sgd", {"loop": {"optimizer": "sgd"}}),
        ('loop.optimizer="sgd"', {"loop": {"optimizer": "sgd"}}),
        ("a.b=true", {"a": {"b": True}}),
        (" a.b = 3", {"a": {"b": 3}}),
        ("kl.estimator=k1+", {"kl": {"estimator": "k1+"}}),
        ("kl.aggregate={name = 'x', n = 8}", {"kl": {"aggregate": {"name": "x", "n": 8}}}),
    ],
)
def test_set_reads_toml_or_a_word(text: str, nested: dict[str, Any]) -> None:
    assert parse_set(text) == nested


@pytest.mark.parametrize("text", ["loop.lr", "=3", "loop..lr=3", ".lr=3", "lo op=3", ""])
def test_set_without_path_or_value_is_refused(text: str) -> None:
    with pytest.raises(LabError, match=r"--set .*: it reads PATH=VALUE, for example surrogate"):
        parse_set(text)


@pytest.mark.parametrize("value", ["[1, 2", "{a = 1", '"open', "two words", ""])
def test_a_set_value_that_is_neither_toml_nor_a_word_is_refused(value: str) -> None:
    """A forgotten quote would otherwise become a string that some component takes."""
    with pytest.raises(LabError, match=f"--set a={re.escape(value)}: .* is neither a TOML value"):
        parse_set(f"a={value}")


def test_a_set_value_is_one_value() -> None:
    """`tomllib.loads` of a text with a line break would read further keys, and drop them."""
    with pytest.raises(LabError, match="neither a TOML value"):
        parse_set("loop.lr=1\nloop.epochs=2")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"surogate": "cispo"}, "unknown slot 'surogate'. Did you mean 'surrogate'? A recipe has fil"),
    ({"name": "x"}, "unknown slot 'name'."),
    ({"loop": {"lrr": 1}}, "unknown key 'loop.lrr'. Did you mean 'lr'? It has group_size"),
    ({"loop": 3}, "loop is a table, got 3"),
    ({"loop": {"lr": "x"}}, "loop.lr = 'x': "),
    ({"loop": {"lr": -1.0}}, "loop.lr = -1.0: "),
    ({"loop": {"epochs": 0}}, "loop.epochs = 0: "),
    ({"loop": {"epochs": 1.5}}, "loop.epochs = 1.5: "),
    ({"loop": {"epochs": True}}, "loop.epochs = True: "),
    ({"loop": {"optimizer": "adam"}}, "loop.optimizer = 'adam': "),
    ({"loop": {"anchor": "ref"}}, "loop.anchor = 'ref': "),
    ({"length_weighted": "yes"}, "length_weighted = 'yes': "),
    ({"doc": 3}, "doc = 3: "),
    ({"source": {"recipe": 3}}, "source.recipe = 3: "),
    ({"surrogate": 3}, "surrogate = 3; it takes a name or a table {name = ..., ...}"),
    ({"surrogate": ["cispo"]}, "surrogate = ['cispo']; it takes a name or a table"),
    ({"surrogate": {"name": 3}}, "surrogate: name = 3; a component's name is a string"),
    ({"kl": {"beta": 0.1}}, "kl names no component, and there is none to change; give name = ..."),
    ({"wrap": 3}, "wrap = 3; it takes a list of names or tables"),
    ({"wrap": [3]}, "wrap holds 3; each entry is a name or a table with one"),
    ({"wrap": [{"c": 2}]}, "wrap holds {'c': 2}; each entry is a name or a table with one"),
    ({"wrap": ["a", "b", "a"]}, "wrap lists 'a' twice"),
    ({"wrap": [{"name": 3}]}, "wrap: name = 3; a component's name is a string"),
    ({"surrogate": "none"}, "recipe 'mine' has no surrogate"),
    ({"surrogate": {"name": "none"}}, "recipe 'mine' has no surrogate"),
    ({"aggregate": {"name": "none"}}, "recipe 'mine' has no aggregate"),
    ({"surrogate": {}}, "surrogate names no component"),
    ({"base": "grop"}, "no recipe 'grop'. Did you mean 'grpo'?"),
    ({"base": 3}, "no recipe '3'"),
    ({"base": ["grpo"]}, "no recipe"),
]


@pytest.mark.parametrize(("change", "line"), WRONG, ids=[str(c) for c, _ in WRONG])
def test_what_is_wrong_in_a_table_is_said_in_one_line(
    shelf: Shelf, change: dict[str, Any], line: str
) -> None:
    """Unknown keys are refused everywhere; pydantic's own report has four lines and a URL."""
    with pytest.raises(LabError, match=re.escape(line)) as error:
        of(shelf, **change)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("slot", ["advantage", "surrogate", "aggregate"])
def test_a_recipe_without_a_main_slot_is_refused(shelf: Shelf, slot: str) -> None:
    spec = {k: v for k, v in PLAIN.items() if k != slot}
    with pytest.raises(LabError, match=f"recipe 'mine' has no {slot}"):
        Recipe.of(spec, "mine", shelf)


@pytest.mark.parametrize(
    ("one", "line"),
    [
        ("surogate.cap=3", "--set surogate.cap=3: unknown slot 'surogate'. Did you mean 'surrog"),
        ("loop.lrr=3", "unknown key 'loop.lrr'. Did you mean 'lr'?"),
        ("wrap.dualclip.c=3", "wrap has no entry 'dualclip'. Did you mean 'dual_clip'? It lists"),
        ("wrap.dual_clip=3", "wrap has no entry 'dual_clip'"),
        ("filter.overlong.stats=all", "filter has no entry 'overlong'. It lists none"),
        ("base=grpo", "base"),
    ],
)
def test_a_wrong_set_is_refused_with_the_nearest(shelf: Shelf, one: str, line: str) -> None:
    with pytest.raises(LabError, match=re.escape(line)) as error:
        of(shelf, (one,), wrap=["dual_clip"])
    assert len(str(error.value).splitlines()) == 1


def test_a_base_of_a_base(shelf: Shelf) -> None:
    tables = {
        "one": {"base": "grpo", "loop": {"lr": 1e-3}},
        "two": {"base": "one", "surrogate": {"eps_low": 0.1}},
    }
    recipe = Recipe.of({"base": "two"}, "three", named(**tables))
    assert recipe.loop.lr == 1e-3
    assert recipe.surrogate.settings == {"eps_low": 0.1, "eps_high": 0.2}


@pytest.mark.parametrize("start", ["one", "two", "self"])
def test_bases_that_go_round_are_refused(start: str) -> None:
    """Not a RecursionError."""
    shelf = named(one={"base": "two"}, two={"base": "one"}, self={"base": "self"})
    with pytest.raises(LabError, match=r"base goes round in a circle: .* -> "):
        load(start, shelf)


def test_merge_replaces_changes_and_empties() -> None:
    spec = {"kl": {"name": "in_loss", "beta": 0.1}, "wrap": [{"name": "a"}], "loop": {"lr": 1.0}}
    assert merge(spec, {}, "x") == spec
    assert merge(spec, {"kl": "in_reward"}, "x")["kl"] == {"name": "in_reward"}
    assert merge(spec, {"kl": {"beta": 0.2}}, "x")["kl"] == {"name": "in_loss", "beta": 0.2}
    assert merge(spec, {"kl": "none"}, "x")["kl"] is None
    assert merge(spec, {"wrap": "none"}, "x")["wrap"] == []
    assert merge(spec, {"loop": {"epochs": 2}}, "x")["loop"] == {"lr": 1.0, "epochs": 2}
    assert spec["kl"] == {"name": "in_loss", "beta": 0.1}


SOURCED = {
    **PLAIN,
    "wrap": [{"name": "dual_clip", "c": 3.0}, "token_tis"],
    "loop": {"lr": 1e-3, "epochs": 2},
    "source": {
        "recipe": "a paper",
        "surrogate.eps_low": "section 1",
        "surrogate.eps_high": "section 2",
        "wrap.dual_clip.c": "section 3",
        "wrap.token_tis.cap": "section 4",
        "loop.lr": "section 5",
        "loop.epochs": "section 6",
    },
}


@pytest.mark.parametrize(
    ("one", "gone"),
    [
        ("surrogate.eps_low=.4", {"surrogate.eps_low"}),
        ("surrogate=cispo", {"surrogate.eps_low", "surrogate.eps_high"}),
        ("surrogate={name='ppo_clip', eps_low=0.1}", {"surrogate.eps_low", "surrogate.eps_high"}),
        ("wrap.dual_clip.c=2", {"wrap.dual_clip.c"}),
        ("wrap=token_tis", {"wrap.dual_clip.c", "wrap.token_tis.cap"}),
        ("wrap=[]", {"wrap.dual_clip.c", "wrap.token_tis.cap"}),
        ("loop.lr=1", {"loop.lr"}),
        ("kl=in_loss", set()),
        ("length_weighted=true", set()),
    ],
)
def test_a_changed_number_loses_its_source_and_no_other_does(
    shelf: Shelf, one: str, gone: set[str]
) -> None:
    """A table that shows `eps_low = .4, section 1` ascribes to a paper what it never said."""
    recipe = Recipe.of(SOURCED, "mine", shelf, [one])
    lost = set(SOURCED["source"]) - set(recipe.source)  # type: ignore[call-overload]
    assert lost - {"recipe"} == gone
    assert recipe.source.get("recipe") is None  # the whole is no longer the paper's either
    assert one in recipe.doc


def test_a_change_may_bring_its_own_source(shelf: Shelf) -> None:
    change = {"surrogate": {"eps_low": 0.4}, "source": {"surrogate.eps_low": "another paper"}}
    recipe = Recipe.of(SOURCED, "mine", shelf).override(change, shelf)
    assert recipe.source["surrogate.eps_low"] == "another paper"
    assert recipe.source["surrogate.eps_high"] == "section 2"


def test_a_base_keeps_the_sources_of_what_it_still_says(shelf: Shelf) -> None:
    recipe = Recipe.of({"base": "grpo", "kl": {"beta": 0.5}}, "mine", shelf)
    assert "kl.beta" not in recipe.source
    assert recipe.source["kl.estimator"] == load("grpo", shelf).source["kl.estimator"]


@pytest.mark.parametrize(
    "name", ["ppo", "grpo", "cispo", "dapo", "dr_grpo", "gspo", "sapo", "rloo"]
)
def test_a_recipe_and_its_table_say_the_same(shelf: Shelf, name: str) -> None:
    """What is written into a run's record must build the recipe that ran."""
    recipe = load(name, shelf)
    assert Recipe.of(recipe.spec(), name, shelf) == recipe
    assert load(recipe, shelf) == recipe
    assert recipe.override({}, shelf) == recipe
