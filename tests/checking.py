"""Which property is checked on what, with which batches; `holds` runs one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import invariances as i
import properties as p
import torch
from cases import ragged
from hypothesis import HealthCheck, Phase, given, settings
from subjects import Subject, variants

from lab.tools import masked_sum

DOUBLE = (torch.float64,)
SINGLE = (torch.float32,)


@dataclass(frozen=True)
class Property:
    """A property of ACCEPTANCE P.

    Attributes:
        check: takes a subject and a batch.
        hooks: those that it is checked on; all, and recipes, where it is empty.
        reads: an input that the component must name to be concerned.
        dtypes: precisions of the batches.
        everywhere: also at each option of each parameter that has few.
        spaced: only where a parameter has a search space.
    """

    check: p.Check
    hooks: tuple[str, ...] = ()
    reads: str = ""
    dtypes: tuple[torch.dtype, ...] = (*DOUBLE, *SINGLE)
    everywhere: bool = False
    spaced: bool = False

    def concerns(self, s: Subject) -> bool:
        """Whether it says something of a subject."""
        if self.hooks and s.hook not in self.hooks:
            return False
        if self.spaced and not any(knob.space for knob in s.knobs.values()):
            return False
        return not self.reads or self.reads in s.bound.component.inputs

    def batches(self, s: Subject) -> st.SearchStrategy[dict[str, Any]]:
        """Ragged batches of groups that are large enough, some with a reward at each token."""
        least = max(2, *(b.declares("needs_group") for b in s.bench.bound))
        outcomes = ragged(dtypes=self.dtypes, group_sizes=(least, least + 3))
        return st.one_of(outcomes, outcomes.map(dense))


def dense(batch: dict[str, Any]) -> dict[str, Any]:
    """The same batch with a reward at each token, in quarters, in place of one a row."""
    tokens = (2 * batch["values"]).round() / 4
    return {**batch, "token_rewards": tokens, "rewards": masked_sum(tokens, batch["mask"], 1)}


UPDATE = ("ratio", "surrogate", "recipe")
DIFFERENTIABLE = ("ratio", "surrogate", "kl_loss", "extra_loss", "critic_loss", "recipe")
PROPERTIES: dict[str, Property] = {
    "P1": Property(p.p1_form, everywhere=True),
    "P2": Property(i.p2_detached, everywhere=True),
    "P3": Property(i.p3_junk, everywhere=True),
    "P4": Property(i.p4_pad_columns, dtypes=DOUBLE, everywhere=True),
    "P5": Property(i.p5_rows_and_ids, dtypes=DOUBLE, everywhere=True),
    "P6": Property(i.p6_splits, dtypes=DOUBLE, everywhere=True),
    "P8": Property(p.p8_fresh, UPDATE, everywhere=True),
    "P13": Property(p.p13_singleton, ("advantage", "normalize"), "group", everywhere=True),
    "P14": Property(i.p14_observations, dtypes=DOUBLE, everywhere=True),
    "P15": Property(i.p15_truncation, dtypes=DOUBLE),
    "P16": Property(p.p16_derivative, DIFFERENTIABLE, dtypes=DOUBLE, everywhere=True),
    "P17": Property(p.p17_single_precision, dtypes=SINGLE, everywhere=True),
    "P18": Property(p.p18_search_space, dtypes=DOUBLE, spaced=True),
    "P19": Property(i.p19_shares, ("aggregate",), everywhere=True),
    "P20": Property(i.p20_repeatable, everywhere=True),
}


def cases(subjects: Iterable[Subject]) -> Iterator[tuple[str, Subject]]:
    """Each property with each subject that it concerns, at its defaults."""
    for s in subjects:
        yield from ((name, s) for name, prop in PROPERTIES.items() if prop.concerns(s))


def holds(name: str, s: Subject, examples: int, options: bool = False) -> None:
    """Check one property on one subject, on random batches that are the same at each call.

    Args:
        examples: how many batches; the first is the smallest.
        options: also at each option of its parameters, where the property is one of everywhere.

    Raises:
        AssertionError: where it does not hold.
        LabError: where the bench refuses the subject.
    """
    prop = PROPERTIES[name]
    for here in variants(s) if options and prop.everywhere else (s,):
        _on_batches(prop.check, here, prop.batches(here), examples)


def _on_batches(
    check: Callable[..., None],
    s: Subject,
    batches: st.SearchStrategy[dict[str, Any]],
    examples: int,
) -> None:
    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate],  # the batches are small; shrinking them takes minutes
        suppress_health_check=list(HealthCheck),
    )
    @given(batches)
    def on(batch: dict[str, Any]) -> None:
        check(s, batch)

    on()
