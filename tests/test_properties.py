"""Every component and recipe on the shelf has the properties of ACCEPTANCE P.

Found by iterating the shelf: a new component is checked without a line here. That each property can
fail is shown in test_properties_kill.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from checking import cases, holds
from properties import acting, p7_knob, p12_constant_groups
from subjects import Subject, outcome, subjects
from torch import Tensor

import lab
from lab.shelf import Shelf, installed

SUBJECTS = subjects(installed())
EVERY = [pytest.param(name, s, id=f"{name}-{s.label}") for name, s in cases(SUBJECTS)]
KNOBS = [pytest.param(s, n, id=f"{s.label}-{n}") for s in SUBJECTS for n in s.knobs]
GROUPED = [s for s in SUBJECTS if s.hook == "advantage" and "group" in s.bound.component.inputs]


def test_the_whole_shelf_is_checked() -> None:
    found = {s.label for s in SUBJECTS}
    shelf = installed()
    assert found >= {f"{c.hook} {c.name}" for c in shelf}
    assert found >= {f"recipe {n}" for n in shelf.names("recipes")}
    assert not shelf.broken


@pytest.mark.parametrize(("name", "subject"), EVERY)
def test_property(name: str, subject: Subject) -> None:
    holds(name, subject, examples=2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "subject"), EVERY)
def test_property_on_more_batches_and_at_each_option(name: str, subject: Subject) -> None:
    holds(name, subject, examples=8, options=True)


@pytest.mark.long
@pytest.mark.parametrize(("name", "subject"), EVERY)
def test_property_on_many_batches(name: str, subject: Subject) -> None:
    holds(name, subject, examples=60, options=True)


@pytest.mark.parametrize(("subject", "knob"), KNOBS)
def test_each_parameter_and_slot_option_does_something(subject: Subject, knob: str) -> None:
    """P7: a dead option, a swallowed keyword."""
    p7_knob(subject, knob)


@pytest.mark.parametrize("subject", GROUPED, ids=lambda s: s.label)
@pytest.mark.parametrize(
    "settings", [{}, {"scale": "none"}, {"scale": "batch"}, {"baseline": "loo"}]
)
def test_equal_rewards_give_exactly_0(subject: Subject, settings: dict[str, Any]) -> None:
    """P12: the residue of a mean, divided by its own std."""
    if not settings.keys() <= subject.knobs.keys():
        pytest.skip("it has no such parameter")
    p12_constant_groups(subject.at(**settings))


def test_the_core_selects_for_observers_too() -> None:
    """P3 for an observer that multiplies by the mask: off the mask it is handed zeros, no junk."""

    @lab.observe
    def mean_entropy(entropy: Tensor, mask: Tensor) -> dict[str, float]:
        """The mean, by multiplication."""
        return {"mean_entropy": float((entropy * mask).sum() / mask.sum())}

    shelf = Shelf.installed([mean_entropy])
    s = next(s for s in subjects(shelf) if s.label == "observe mean_entropy")
    holds("P3", s, examples=2)


OBSERVERS = [s for s in SUBJECTS if s.hook == "observe"]


@pytest.mark.parametrize("subject", OBSERVERS, ids=lambda s: s.label)
def test_metrics_of_a_batch_without_a_token_are_finite_or_absent(subject: Subject) -> None:
    """A filter may refuse every row: a mean over nothing is no NaN in a record."""
    batch = acting()[0]
    found = outcome(subject.bench, {**batch, "mask": 0 * batch["mask"]})
    assert all(bool(x.isfinite()) for n, x in found.items() if n.startswith("metric "))
