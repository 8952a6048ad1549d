"""One word per contrast, and the guard rails that keep a word from being said.

The first match decides:

1. a guard rail's text;
2. adjusted TOST p <= alpha: *equivalent*, "differs from 0" beside it if 3 holds too, as the
   margin is the smallest difference that matters;
3. adjusted sign-flip p <= alpha *and* an interval of level 1 - alpha without 0: *better*, *worse*;
4. *inconclusive*, with the number of seeds that would decide.

A larger mean alone never decides. Intervals shown are not adjusted for the number of contrasts.

| rail | condition, in order | word |
|---|---|---|
| unfinished | any contrast has fewer seeds than planned | none |
| G1 | n < 3: no interval; n < 6: interval without p | none |
| G8 | not declared before the study | exploratory |
| G4 | truncated share >= .9 (warning from .5) | inconclusive |
| G5 | share of zero-variance groups >= .9 (warning from .5) | inconclusive |
| G6 | every d is 0; or no token ever outside and no d beyond margin/10,000 | equivalent |
| G2 | even the smallest p of the sign-flip test exceeds alpha / m | inconclusive |

G6 stands before G2 as it needs no test, and after G4 and G5, which say why nothing differs. A
study under G2 is not allowed to say *equivalent* either: that would be the only word it could say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lab.errors import LabError
from lab.power import least_seeds, seeds_for_difference, seeds_for_equivalence
from lab.stats import (
    TIE,
    Array,
    Interval,
    correlation,
    d_z,
    fmt,
    hodges_lehmann,
    holm,
    mean_interval,
    positive,
    probability_of_improvement,
    scores,
    sign_flip,
    smallest_p,
    tost,
)

#: From this share on G4 and G5 warn, and from that one on they decide.
WARN, DECIDE = 0.5, 0.9
#: Differences below this share of the margin are those of one computation written in two ways.
TINY = 1e-4
UNTESTED = ("unfinished", "G1", "G8", "G6")


@dataclass(frozen=True)
class Contrast:
    """Two recipes' scores by seed, and what the guard rails must know of their runs."""

    name: str  #: such as "ppo - grpo, lr 1e-4"
    x: Mapping[int, float]  #: seed -> score of A
    y: Mapping[int, float]  #: seed -> score of B
    declared: bool = True  #: before the study
    truncated: float = 0.0  #: largest share of truncated rows of the two arms
    zero_variance: float = 0.0  #: largest share of groups without reward variance
    outside: bool = True  #: whether any token was ever outside, in any update of A or B


@dataclass(frozen=True)
class Rail:
    """A guard rail that a contrast has met: its name, the word it forces and its text."""

    name: str
    word: str
    text: str


@dataclass(frozen=True)
class Judged:
    """A contrast with its word and every number behind it; NaN is what was not computed."""

    contrast: Contrast
    word: str  #: better, worse, equivalent, inconclusive, exploratory or ""
    n: int
    difference: Interval  #: mean of d = x - y, level 1 - alpha, unadjusted
    ninety: Interval  #: the same at level 1 - 2 alpha, that of TOST: 90 % at alpha .05
    p: float  #: sign-flip
    p_adjusted: float  #: Holm over the declared contrasts
    tost_p: float
    tost_adjusted: float  #: Holm over the same
    rho: float  #: observed correlation of the pairs
    d_z: float
    improvement: float  #: probability that a run of A beats one of B
    shift: float  #: Hodges-Lehmann
    note: str  #: the guard rails' texts, or what qualifies the word
    warnings: tuple[str, ...]
    seeds_needed: int | None  #: when inconclusive and more seeds would help
    rails: tuple[str, ...]  #: names of the guard rails met, the deciding one first
    margin: float
    alpha: float


@dataclass(frozen=True)
class _Rule:
    margin: float
    alpha: float
    m: int  # declared contrasts
    planned: int | None
    finished: bool


@dataclass(frozen=True)
class _Case:
    contrast: Contrast
    x: Array
    y: Array
    d: Array
    rails: tuple[Rail, ...] = ()

    @property
    def tested(self) -> bool:
        return not any(rail.name in UNTESTED for rail in self.rails)


def judge(
    contrasts: Sequence[Contrast],
    margin: float = 0.02,
    alpha: float = 0.05,
    planned: int | None = None,
    seed: int = 0,
) -> list[Judged]:
    """The verdict on each contrast, in the order given; see the head of this module.

    Runs are paired by seed. Holm's adjustment runs over the declared contrasts alone, m of them;
    one that a guard rail leaves untested counts in m, with p = 1. `planned` is the number of seeds
    of a finished study: with fewer in any contrast no word is said. Beyond 16 seeds the signs are
    drawn from `seed`, anew for each contrast, so a further contrast changes no other's p.

    Raises:
        LabError: seeds missing on one side or beyond the plan, a score that is not finite, one
            name twice, or an option out of range.
    """
    positive(margin, "margin")
    positive(alpha, "alpha", 0.5)
    if seed < 0:
        raise LabError(f"seed is {seed}; a whole number, at least 0, was due")
    names = [contrast.name for contrast in contrasts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise LabError(f"contrast {twice[0]!r} is given twice; each needs a name of its own")
    pairs = [_pair(contrast) for contrast in contrasts]
    declared = [case.contrast.declared for case in pairs]
    complete = [_check_plan(case, planned) for case in pairs]
    rule = _Rule(margin, alpha, sum(declared), planned, all(complete))
    cases = [_Case(c.contrast, c.x, c.y, c.d, tuple(_rails(c, rule))) for c in pairs]
    signs = [np.random.default_rng(seed) for _ in cases]
    p = [sign_flip(c.d, g) if c.tested else math.nan for c, g in zip(cases, signs, strict=True)]
    tost_p = [tost(case.d, margin) if case.tested else math.nan for case in cases]
    adjusted, tost_adjusted = _adjust(p, declared), _adjust(tost_p, declared)
    rows = zip(cases, p, adjusted, tost_p, tost_adjusted, strict=True)
    return [_judge(case, rule, numbers) for case, *numbers in rows]


def _pair(contrast: Contrast) -> _Case:
    """x, y and d in the order of seeds, once both sides have the same ones."""
    name, x, y = contrast.name, contrast.x, contrast.y
    for side, lacks in (("x", y.keys() - x.keys()), ("y", x.keys() - y.keys())):
        if lacks:
            some = ", ".join(map(str, sorted(lacks)[:5])) + (", ..." if len(lacks) > 5 else "")
            raise LabError(f"contrast {name!r} is paired by seed, and {side} lacks {some}")
    for what in ("truncated", "zero_variance"):
        if not 0 <= getattr(contrast, what) <= 1:
            given = getattr(contrast, what)
            raise LabError(f"contrast {name!r}: {what} is {given}; a share in [0, 1] was due")
    seeds = sorted(x)
    for side, values in (("x", x), ("y", y)):
        for s in seeds:
            score = values[s]
            if not isinstance(score, int | float | np.number) or not math.isfinite(score):
                text = f"contrast {name!r}: {side} is {score} at seed {s}; "
                raise LabError(text + "finite scores were due, a failed run has the study's floor")
    a = scores([x[s] for s in seeds], f"contrast {name!r}: x")
    b = scores([y[s] for s in seeds], f"contrast {name!r}: y")
    return _Case(contrast, a, b, a - b)


def _check_plan(case: _Case, planned: int | None) -> bool:
    """Whether the contrast has all seeds planned; more than those is a mistake."""
    n = len(case.d)
    if planned is not None and n > planned:
        raise LabError(
            f"contrast {case.contrast.name!r} has {n} seeds, {planned} were planned; "
            "adding seeds after a look makes p-values too small"
        )
    return planned is None or n == planned


def _rails(case: _Case, rule: _Rule) -> list[Rail]:
    """The guard rails that the contrast meets, in their order."""
    c, n, found = case.contrast, len(case.d), []
    if not rule.finished:
        found.append(Rail("unfinished", "", f"{n} of {rule.planned} seeds, study unfinished"))
    if n < 6:
        shown = "t-interval without p" if n >= 3 else "dots only"
        text = f"{_count(n, 'seed')}: {shown}, a verdict needs {_least(rule)}"
        found.append(Rail("G1", "", text))
    if not c.declared:
        text = "not declared before the study: interval, no verdict"
        found.append(Rail("G8", "exploratory", text))
    if c.truncated >= DECIDE:
        text = f"the length cap decides, truncated share {fmt(c.truncated, 0.1)}"
        found.append(Rail("G4", "inconclusive", text))
    if c.zero_variance >= DECIDE:
        share = fmt(c.zero_variance, 0.1)
        text = f"almost no group carries a gradient, zero-variance share {share}"
        found.append(Rail("G5", "inconclusive", text))
    if text := _identical(case, rule.margin):
        found.append(Rail("G6", "equivalent", text))
    if c.declared and n >= 6 and smallest_p(n) > rule.alpha / rule.m:
        need = "needs" if rule.m == 1 else "need"
        text = f"cannot reach alpha by construction: {_count(n, 'seed')}, "
        text += f"{_count(rule.m, 'contrast')} {need} at least {_count(_least(rule), 'seed')}"
        found.append(Rail("G2", "inconclusive", text))
    return found


def _identical(case: _Case, margin: float) -> str:
    """The text of G6, or nothing."""
    by = "identical by construction"
    largest = float(np.abs(case.d).max())
    scale = float(max(np.abs(case.x).max(), np.abs(case.y).max()))
    if largest <= TIE * scale:
        text = f"{by}: every difference is 0, which says nothing about clipping"
        if len(case.x) > 1 and np.ptp(case.x) == 0:
            text += f"; all runs score {fmt(float(case.x[0]), 0.0)}, as at a ceiling or a floor"
        return text
    if not case.contrast.outside and largest <= TINY * margin:
        return f"{by}: no token was ever outside, which says nothing about clipping"
    return ""


def _least(rule: _Rule) -> int:
    """Seeds below which G1 or G2 forbids a verdict."""
    return max(6, least_seeds(max(rule.m, 1), rule.alpha))


def _count(n: int, what: str) -> str:
    return f"{n} {what}" + ("" if n == 1 else "s")


def _adjust(p: Sequence[float], declared: Sequence[bool]) -> list[float]:
    """Holm over the declared; what was not tested has p = 1 there and stays NaN."""
    family = [i for i, counts in enumerate(declared) if counts]
    adjusted = [math.nan] * len(p)
    if family:
        steps = holm([1.0 if math.isnan(p[i]) else p[i] for i in family])
        for i, step in zip(family, steps, strict=True):
            adjusted[i] = math.nan if math.isnan(p[i]) else float(step)
    return adjusted


def _interval(case: _Case, level: float) -> Interval:
    """The t-interval of d; none below 3 seeds or where d is the rounding of 0."""
    shown = mean_interval(case.d, level)
    if len(case.d) < 3 or any(rail.name == "G6" for rail in case.rails):
        return replace(shown, low=math.nan, high=math.nan)
    return shown


def _judge(case: _Case, rule: _Rule, numbers: Sequence[float]) -> Judged:
    p, p_adjusted, tost_p, tost_adjusted = numbers
    shown = _interval(case, 1 - rule.alpha)
    differs = p_adjusted <= rule.alpha and (shown.low > 0 or shown.high < 0)
    if case.rails:
        word, note = case.rails[0].word, "; ".join(rail.text for rail in case.rails)
    elif tost_adjusted <= rule.alpha:
        word, note = "equivalent", "differs from 0, by less than the margin" if differs else ""
    elif differs:
        word, note = "better" if shown.low > 0 else "worse", ""
    else:
        split = p_adjusted <= rule.alpha
        word, note = "inconclusive", "adjusted p and t-interval disagree" if split else ""
    undecided = word == "inconclusive" and (not case.rails or case.rails[0].name == "G2")
    return Judged(
        contrast=case.contrast,
        word=word,
        n=len(case.d),
        difference=shown,
        ninety=_interval(case, 1 - 2 * rule.alpha),
        p=p,
        p_adjusted=p_adjusted,
        tost_p=tost_p,
        tost_adjusted=tost_adjusted,
        rho=correlation(case.x, case.y),
        d_z=math.nan if math.isnan(shown.low) else d_z(case.d),
        improvement=probability_of_improvement(case.x, case.y).mean,
        shift=hodges_lehmann(case.d),
        note=note,
        warnings=_warnings(case.contrast),
        seeds_needed=_seeds_needed(shown.sd, rule) if undecided else None,
        rails=tuple(rail.name for rail in case.rails),
        margin=rule.margin,
        alpha=rule.alpha,
    )


def _seeds_needed(sd: float, rule: _Rule) -> int:
    """Enough for 80 % power on either side of the margin and for the sign-flip test's steps."""
    alpha = rule.alpha / rule.m
    return max(
        seeds_for_difference(rule.margin, sd, alpha),
        seeds_for_equivalence(rule.margin, sd, alpha),
        _least(rule),
    )


def _warnings(contrast: Contrast) -> tuple[str, ...]:
    told = (
        (contrast.truncated, "truncated share {}: the length cap takes part in the score"),
        (contrast.zero_variance, "zero-variance share {}: many groups carry no gradient"),
    )
    return tuple(text.format(fmt(share, 0.1)) for share, text in told if share >= WARN)


def sentence(judged: Judged, a: str, b: str) -> str:
    """The verdict on recipe a against recipe b in a plain sentence, worded by `judged.word` alone.

    Differences are a - b; the interval is that of level 1 - alpha, unadjusted, and for an
    equivalence the narrower one of TOST, which says its level.
    """
    j, seeds = judged, _count(judged.n, "seed")
    note = f"; {j.note}" if j.note else ""
    if j.word in ("better", "worse"):
        p = p_text(j.p_adjusted, j.alpha)
        return (
            f"{a} is {j.word} than {b}: {difference_text(j.difference)} ({seeds}, adjusted p {p})."
        )
    if j.word == "equivalent" and "G6" in j.rails:
        return f"{a} and {b} are equivalent ({j.note}; {seeds})."
    if j.word == "equivalent":
        p, within = p_text(j.tost_adjusted, j.alpha), f"{j.margin:g}".replace("0.", ".", 1)
        shown = difference_text(j.ninety, f", {100 * j.ninety.level:g} % interval")
        text = f"{a} and {b} are equivalent within ±{within}: {shown}"
        return f"{text} ({seeds}, adjusted TOST p {p}{note})."
    if j.word == "inconclusive":
        p = p_text(j.p_adjusted, j.alpha)
        text = f"{a} against {b} is inconclusive: {difference_text(j.difference)}"
        return f"{text} ({seeds}, adjusted p {p}{note}){_outlook(j)}."
    if j.word == "exploratory":
        return f"{a} against {b} is exploratory: {difference_text(j.difference)} ({seeds}{note})."
    shown = "" if "unfinished" in j.rails else f": {difference_text(j.difference)}"
    return f"{a} against {b} has no verdict{shown} ({j.note})."


def _outlook(judged: Judged) -> str:
    needed = judged.seeds_needed
    if needed is None:
        return ""
    if needed <= judged.n:
        return f"; {needed} seeds would usually have decided"
    return f"; about {needed} seeds would decide"


def difference_text(interval: Interval, label: str = "") -> str:
    """``+.041 [.012, .070]``, with digits enough that a bound beyond 0 does not print as 0."""
    low, high = interval.low, interval.high
    width = high - low
    if low > 0 or high < 0:
        width = min(width, 10 * min(abs(low), abs(high)))
    mean = fmt(interval.mean, width)
    sign = "+" if interval.mean > 0 and mean.strip(".0") else ""
    bounds = "" if math.isnan(low) else f" [{fmt(low, width)}, {fmt(high, width)}]"
    return f"{sign}{mean}{label if bounds else ''}{bounds}"


def p_text(p: float, alpha: float) -> str:
    """Three decimals, or as many as it takes to stand on p's side of alpha."""
    if p < 0.001:
        return "< .001"
    text = fmt(p, 0.01)
    return text if (float(text) <= alpha) == (p <= alpha) else fmt(p, 1e-4)
