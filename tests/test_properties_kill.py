"""Each property can fail: planted mistakes are found, and right components are not accused."""

from __future__ import annotations

from typing import Any

import mutants
import mutants_rollout
import pytest
import torch
from checking import PROPERTIES, cases, holds
from properties import p7_knob, p12_constant_groups
from subjects import Subject, subject
from torch import Tensor

import lab.bench
from lab import LabError
from lab.hookspecs import LIVE
from lab.shelf import Shelf

SHELF = Shelf.installed([mutants, mutants_rollout])
WRONG = [(name, f) for name, found in mutants.KILLED.items() for f in found]


def planted(function: Any) -> Subject:
    """The subject that a component of `mutants` is."""
    mark = function.lab_component
    return next(
        subject(c, SHELF)
        for c in SHELF
        if c.name == mark.name and c.hook == mark.hook and c.function is function
    )


def check(name: str, s: Subject) -> None:
    if name == "P7":
        p7_knob(s, "knob")
    elif name == "P12":
        p12_constant_groups(s)
    else:
        holds(name, s, examples=6)


def test_each_property_has_a_mutant() -> None:
    others = {"P2"}  # the core detaches all inputs: its mutants are the core's, below
    assert PROPERTIES.keys() | {"P7", "P12"} == mutants.KILLED.keys() | others


@pytest.mark.parametrize(("name", "wrong"), WRONG, ids=[f"{n}-{f.__name__}" for n, f in WRONG])
def test_a_planted_mistake_is_found(name: str, wrong: Any) -> None:
    with pytest.raises((AssertionError, LabError), match=wrong.__name__):
        check(name, planted(wrong))


RIGHT = [(n, s) for n, s in cases(planted(f) for f in mutants.RIGHT)]


@pytest.mark.parametrize(("name", "subject"), RIGHT, ids=[f"{n}-{s.label}" for n, s in RIGHT])
def test_a_right_component_is_not_accused(name: str, subject: Subject) -> None:
    holds(name, subject, examples=2)


# --- mistakes of the core ------------------------------------------------------------------------


def built_in(name: str) -> Subject:
    return next(subject(c, SHELF) for c in SHELF if c.name == name)


def not_detached(name: str, x: Any, on: Tensor, live: bool) -> Any:
    per_token = isinstance(x, Tensor) and x.ndim == 2
    return torch.where(on, x, torch.zeros_like(x)) if per_token else x


def not_selected(name: str, x: Any, on: Tensor, live: bool) -> Any:
    return x if live or not isinstance(x, Tensor) else x.detach()


@pytest.mark.parametrize("name", ["token", "ppo_clip", "in_loss", "clipped", "sequence"])
def test_p2_finds_a_core_that_does_not_detach(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """old_logp, ref_logp, advantages, old_values and targets would be trained."""
    s = built_in(name)
    assert s.bench
    monkeypatch.setattr(lab.bench, "_at_mask", not_detached)
    with pytest.raises(AssertionError, match="trains"):
        holds("P2", s, examples=3)


@pytest.mark.parametrize(
    ("name", "hook", "leak"),
    [
        ("token", "ratio", "old_logp"),
        ("in_loss", "kl_loss", "ref_logp"),
        ("clipped", "critic_loss", "old_values"),
    ],
)
def test_p2_finds_one_live_input_too_many(
    name: str, hook: str, leak: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = built_in(name)
    assert s.bench
    monkeypatch.setattr(lab.bench, "LIVE", {**LIVE, hook: (*LIVE[hook], leak)})
    with pytest.raises(AssertionError, match=f"trains .*'{leak}'"):
        holds("P2", s, examples=3)


@pytest.mark.parametrize("name", ["token", "sapo", "whiten", "gae", "in_loss"])
def test_p3_finds_a_core_that_hands_on_junk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 x NaN in the backward pass: where the mask is applied after the arithmetic."""
    s = built_in(name)
    assert s.bench
    monkeypatch.setattr(lab.bench, "_at_mask", not_selected)
    with pytest.raises(AssertionError, match=r"with -?(inf|nan|1e)"):
        holds("P3", s, examples=3)


@pytest.mark.parametrize("option", ["credit", "when", "centre"])
def test_p7_finds_a_core_that_does_not_read_an_option(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option that is parsed, recorded and never used."""
    read = lab.bench.Bench.option

    def ignores(bench: lab.bench.Bench, hook: str, name: str) -> Any:
        return (
            {"credit": "to_go", "when": "before", "centre": False}[name]
            if name == option
            else read(bench, hook, name)
        )

    monkeypatch.setattr(lab.bench.Bench, "option", ignores)
    with pytest.raises(AssertionError, match=f"both: {option} changes nothing"):
        p7_knob(built_in("both"), option)
