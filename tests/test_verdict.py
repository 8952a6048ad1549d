"""lab.verdict: each guard rail, each word, their order, and the sentence made of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from lab.errors import LabError
from lab.power import seeds_for_difference, seeds_for_equivalence
from lab.stats import Interval, mean_interval
from lab.verdict import Contrast, Judged, judge, sentence

NAN = math.nan
#: Scores of B, to which differences are added.
BASE = [0.50, 0.55, 0.48, 0.60, 0.52, 0.47, 0.58, 0.51, 0.54, 0.49]
#: Ten differences, all positive: sign-flip 2/1024; mean .055, far beyond a margin of .02.
UP = [0.04, 0.06, 0.05, 0.07, 0.03, 0.08, 0.05, 0.06, 0.04, 0.07]
#: Mean 0, s = .01: inside +-.02.
FLAT = [0.01, -0.01, 0.01, -0.01, 0.01, -0.01, 0.01, -0.01, 0.01, -0.01]
#: Mean .01, s = .065: neither.
WIDE = [0.07, -0.05, 0.08, -0.06, 0.06, -0.04, 0.05, -0.07, 0.09, -0.03]


def of(d: Any, name: str = "a - b", **facts: Any) -> Contrast:
    """A contrast with these differences over seeds 9000, 9001, ..."""
    base = np.resize(BASE, len(d))
    x = {9000 + i: float(b + v) for i, (b, v) in enumerate(zip(base, d, strict=True))}
    return Contrast(name, x, {9000 + i: float(b) for i, b in enumerate(base)}, **facts)


def one(d: Any, margin: float = 0.02, alpha: float = 0.05, **facts: Any) -> Judged:
    return judge([of(d, **facts)], margin, alpha)[0]


def crowd(m: int, d: Any = WIDE) -> list[Contrast]:
    return [of(d, f"other {i}") for i in range(m)]


def near(value: float, atol: float = 1e-9) -> Any:
    return pytest.approx(value, rel=0, abs=atol, nan_ok=True)


@pytest.mark.parametrize(
    ("d", "word"),
    [
        (UP, "better"),
        ([-v for v in UP], "worse"),
        (FLAT, "equivalent"),
        (WIDE, "inconclusive"),
    ],
)
def test_each_word(d: list[float], word: str) -> None:
    """The four words that data can earn, with the numbers behind them."""
    got = one(d)
    assert (got.word, got.rails, got.n, got.warnings) == (word, (), 10, ())
    assert got.difference.mean == near(float(np.mean(d)))
    assert got.ninety == mean_interval(np.subtract(*arms(got)), 0.9)
    assert got.p == got.p_adjusted  # one contrast
    assert got.tost_p == got.tost_adjusted
    assert (got.seeds_needed is None) == (word != "inconclusive")
    assert got.note == ""


def arms(judged: Judged) -> tuple[list[float], list[float]]:
    x, y = judged.contrast.x, judged.contrast.y
    return [x[s] for s in sorted(x)], [y[s] for s in sorted(x)]


def test_a_larger_mean_alone_decides_nothing() -> None:
    """A wins by .5 on average, with s = 1.26: the mean would say better."""
    got = one([2.5, -1, 1.5, -0.8, 2, -1, 1.2, -0.9, 1.8, -0.3])
    assert got.difference.mean == near(0.5)
    assert got.word == "inconclusive"


def test_a_small_p_does_not_decide_against_the_interval() -> None:
    """Six of one sign: p = 2/64; mean .1675, s .408: .1675 +- 2.571 * .1665 holds 0."""
    got = one([0.001] * 5 + [1.0])
    assert got.p_adjusted == 2 / 64
    assert got.difference.low < 0 < got.difference.high
    assert (got.word, got.note) == ("inconclusive", "adjusted p and t-interval disagree")


def test_an_interval_does_not_decide_against_the_p() -> None:
    """Five of .1 and a -.01: .0817 +- 2.571 * .0183 is above 0; p = 4/64."""
    got = one([0.1] * 5 + [-0.01])
    assert got.difference.low > 0
    assert (got.p, got.word) == (4 / 64, "inconclusive")


def test_equivalence_comes_first_and_says_that_it_differs_from_0() -> None:
    """.005 in each pair, give or take .001: significant, and smaller than what matters."""
    got = one([0.005, 0.006, 0.004, 0.005, 0.006, 0.004, 0.005, 0.006, 0.004, 0.005])
    assert got.p_adjusted <= 0.05 < got.difference.low * 100
    assert (got.word, got.note) == ("equivalent", "differs from 0, by less than the margin")
    assert one(UP, margin=0.2).word == "equivalent"
    assert one(UP, margin=0.002).word == "better"


def test_exchanging_the_arms_exchanges_the_word_and_nothing_else() -> None:
    a, b = one(UP), one([-v for v in UP])
    assert (a.p, a.tost_p, a.rho) == (b.p, near(b.tost_p), near(b.rho, 0.2))
    swapped = judge([Contrast("b - a", a.contrast.y, a.contrast.x)])[0]
    assert (swapped.word, swapped.p, swapped.rho) == ("worse", a.p, near(a.rho))
    assert swapped.improvement == near(1 - a.improvement)
    assert (swapped.d_z, swapped.shift) == (near(-a.d_z), near(-a.shift))


def test_runs_are_paired_by_seed_not_by_position() -> None:
    """The same runs listed in another order: paired by position, p and rho change."""
    first = of(UP)
    mixed = {s: first.x[s] for s in sorted(first.x, key=lambda s: (s * 7) % 10)}
    assert list(mixed) != list(first.x)
    again = judge([dataclasses.replace(first, x=mixed)])[0]
    want = judge([first])[0]
    assert dataclasses.replace(again, contrast=first) == want


def test_holm_runs_over_the_declared_contrasts_alone() -> None:
    """p = 48/1024 alone; the smaller of two counts twice: .09375; an undeclared third does not."""
    d = [0.03, -0.01, 0.05, 0.02, 0, 0.04, -0.02, 0.06, 0.01, 0.03]
    assert one(d, margin=0.001).word == "better"
    got = judge([of(d), *crowd(1), of(UP, "found later", declared=False)], margin=0.001)
    assert [g.p for g in got[:2]] == [near(48 / 1024), near(got[1].p)]
    assert got[0].p_adjusted == near(2 * 48 / 1024)
    assert got[1].p_adjusted == got[1].p > 0.1
    assert [g.word for g in got] == ["inconclusive", "inconclusive", "exploratory"]


def test_tost_is_adjusted_over_the_same_contrasts() -> None:
    """Raw p below .05 and twice above: equivalent alone, not beside a second contrast."""
    d = [v * 2.9 for v in FLAT]  # s = .0306, se = .0097, .02/se = 2.07, P(T > 2.07) = .034
    alone, beside = one(d), judge([of(d), *crowd(1)])[0]
    assert (alone.word, alone.tost_p) == ("equivalent", near(0.034, 0.001))
    assert (beside.word, beside.tost_adjusted) == ("inconclusive", near(2 * alone.tost_p))


@pytest.mark.parametrize("n", [1, 2])
def test_g1_below_three_seeds_there_are_only_dots(n: int) -> None:
    """A t-interval of two runs exists, and is 12.7 standard errors wide on either side."""
    got = one(UP[:n])
    assert (got.word, got.rails, got.seeds_needed) == ("", ("G1",), None)
    assert got.note.startswith(f"{n} seed")
    assert "dots only, a verdict needs 6" in got.note
    for interval in (got.difference, got.ninety):
        assert (interval.low, interval.high) == (near(NAN), near(NAN))
    assert all(math.isnan(v) for v in (got.p, got.p_adjusted, got.tost_p, got.d_z))


@pytest.mark.parametrize("n", [3, 4, 5])
def test_g1_below_six_seeds_there_is_an_interval_and_no_p(n: int) -> None:
    """Even where TOST would pass and the interval excludes 0."""
    for d in (UP, [0.001 * v for v in UP]):
        got = one(d[:n])
        assert (got.word, got.rails) == ("", ("G1",))
        assert got.note == f"{n} seeds: t-interval without p, a verdict needs 6"
        assert got.difference.low > 0
        assert math.isnan(got.p)
        assert math.isnan(got.tost_adjusted)


def test_g1_counts_in_holm_as_untested() -> None:
    """Three declared, one of them with 4 seeds: m stays 3; leaving it out says 2 * p."""
    got = judge([of(UP), of(UP[:4], "short"), *crowd(1)])
    assert got[0].p_adjusted == near(3 * 2 / 1024)
    assert math.isnan(got[1].p_adjusted)


@pytest.mark.parametrize(("m", "n", "least"), [(2, 6, 7), (4, 7, 8), (7, 8, 9), (13, 9, 10)])
def test_g2_says_what_cannot_be_reached(m: int, n: int, least: int) -> None:
    """2/2^n > .05/m: no data is significant, so its absence says nothing; one seed more can."""
    got = judge([of(UP[:n]), *crowd(m - 1, WIDE[:n])])[0]
    assert (got.word, got.rails) == ("inconclusive", ("G2",))
    assert got.note == (
        f"cannot reach alpha by construction: {n} seeds, {m} contrasts need at least {least} seeds"
    )
    assert got.p == 2 / 2**n
    assert got.p_adjusted > 0.05
    assert got.seeds_needed is not None
    assert got.seeds_needed >= least
    more = judge([of(UP[:least]), *crowd(m - 1, WIDE[:least])])[0]
    assert (more.word, more.rails) == ("better", ())


def test_g2_comes_before_equivalence() -> None:
    """TOST alone would pass: a study whose only possible word is equivalent may not say it."""
    got = judge([of([v / 100 for v in WIDE[:6]]), *crowd(1, WIDE[:6])])[0]
    assert got.tost_adjusted < 0.05
    assert (got.word, got.rails) == ("inconclusive", ("G2",))
    later = [of(UP[:6], f"later {i}", declared=False) for i in range(3)]
    assert judge([of(UP[:6]), *later])[0].word == "better"  # what is not declared is not counted
    assert one(UP[:6], alpha=0.01).note.endswith("6 seeds, 1 contrast needs at least 8 seeds")


def test_g3_seeds_missing_on_one_side_are_refused_by_number() -> None:
    """Cutting to the common seeds drops the failed runs of one recipe."""
    x, y = dict(of(UP).x), dict(of(UP).y)
    del y[9003], y[9004]
    with pytest.raises(LabError, match=r"'a - b' is paired by seed, and y lacks 9003, 9004$"):
        judge([Contrast("a - b", x, y)])
    with pytest.raises(LabError, match=r"x lacks 1, 2, 3, 4, 5, \.\.\."):
        judge([Contrast("a - b", {}, dict.fromkeys(range(1, 8), 0.5))])


@pytest.mark.parametrize(
    ("fact", "rail", "text", "warning"),
    [
        ("truncated", "G4", "the length cap decides, truncated share .90", "truncated share .50"),
        (
            *("zero_variance", "G5"),
            "almost no group carries a gradient, zero-variance share .90",
            "zero-variance share .50",
        ),
    ],
)
def test_g4_and_g5(fact: str, rail: str, text: str, warning: str) -> None:
    """From .9 on they decide, over better and equivalent alike; from .5 on they warn."""
    for d in (UP, FLAT):
        got = one(d, **{fact: 0.9})
        assert (got.word, got.rails, got.note) == ("inconclusive", (rail,), text)
        assert got.seeds_needed is None  # more seeds do not help
        assert not math.isnan(got.p_adjusted)
        below = one(d, **{fact: 0.5})
        assert below.word == one(d).word
        assert len(below.warnings) == 1
        assert below.warnings[0].startswith(warning)
        assert one(d, **{fact: 0.499}).warnings == ()
        assert one(d, **{fact: 0.899}).word == below.word


@pytest.mark.parametrize("n", [6, 10, 20])
def test_g6_one_recipe_under_two_names(n: int) -> None:
    """All d 0: 0/0 in every test. Also under G2, which would ask for seeds to show nothing."""
    for got in (one([0.0] * n), judge([of([0.0] * n), *crowd(3, WIDE[:6])])[0]):
        assert (got.word, got.rails[0], got.seeds_needed) == ("equivalent", "G6", None)
        assert got.note.startswith("identical by construction: every difference is 0")
        assert "says nothing about clipping" in got.note
        assert got.difference == Interval(0.0, near(NAN), near(NAN), 0.0, n)
        assert all(math.isnan(v) for v in (got.p, got.tost_p, got.tost_adjusted, got.d_z))
        assert (got.improvement, got.rho) == (0.5, near(1.0))


def test_g6_where_no_token_was_outside_and_the_recipes_agree() -> None:
    """Two clips that never acted, apart by rounding of 1e-7; with tokens outside it is a result."""
    d = [1e-7, -2e-7, 1e-7, 2e-7, -1e-7, 1e-7, 1e-7, -1e-7, 0, 1e-7]
    got = one(d, outside=False)
    assert (got.word, got.rails) == ("equivalent", ("G6",))
    assert got.note.startswith("identical by construction: no token was ever outside")
    assert one(d).rails == ()
    assert one(UP, outside=False).word == "better"  # they disagree inside


def test_g6_at_a_ceiling_says_so() -> None:
    """Both recipes solve the task in every run: that is not one recipe under two names."""
    scores: Mapping[int, float] = dict.fromkeys(range(8), 1.0)
    got = judge([Contrast("a - b", scores, dict(scores))])[0]
    assert got.word == "equivalent"
    assert got.note.endswith("all runs score 1.000, as at a ceiling or a floor")
    assert math.isnan(got.rho)


def test_g4_and_g5_come_before_g6() -> None:
    """Nothing learnt as no group had a gradient: the recipes agree, and not by construction."""
    got = one([0.0] * 8, zero_variance=1.0, truncated=0.95)
    assert (got.word, got.rails) == ("inconclusive", ("G4", "G5", "G6"))
    assert got.note.count("; ") == 2


def test_g8_what_was_not_declared_is_exploratory() -> None:
    """An interval and neither a p nor a word, however clear."""
    got = one(UP, declared=False)
    assert (got.word, got.rails) == ("exploratory", ("G8",))
    assert got.difference.low > 0
    assert all(math.isnan(v) for v in (got.p, got.p_adjusted, got.tost_p, got.tost_adjusted))
    assert judge([]) == []


def test_an_unfinished_study_says_no_word() -> None:
    """A look at 6 of 10 seeds, again at 7 ...: each look is a test. One contrast holds all up."""
    got = judge([of(UP), of(UP[:7], "late")], planned=10)
    assert [g.word for g in got] == ["", ""]
    assert got[1].note == "7 of 10 seeds, study unfinished"
    assert got[0].note == "10 of 10 seeds, study unfinished"
    assert all(math.isnan(g.p) and math.isnan(g.tost_p) for g in got)
    assert [g.word for g in judge([of(UP)], planned=10)] == ["better"]
    with pytest.raises(LabError, match=r"'b' has 10 seeds, 7 were planned; adding seeds after"):
        judge([of(UP[:6], "a"), of(UP, "b")], planned=7)


def test_seeds_needed_is_the_largest_of_three() -> None:
    """At .02 and s = .065: 85 and 92 by the two tests; never from the observed effect of .01."""
    got = one(WIDE)
    s = got.difference.sd
    assert got.seeds_needed == max(seeds_for_difference(0.02, s), seeds_for_equivalence(0.02, s))
    twice = judge([of(WIDE), *crowd(5)])[0]
    assert twice.seeds_needed == seeds_for_equivalence(0.02, s, 0.05 / 6)
    shifted = one([v + 0.01 for v in WIDE])
    assert shifted.word == "inconclusive"
    assert shifted.seeds_needed == got.seeds_needed
    # hardly any spread: the floor of the sign-flip test, 8 for 6 contrasts
    tight = judge([of([0.3 + v / 1e4 for v in WIDE[:6]]), *crowd(5, WIDE[:6])])[0]
    assert (tight.rails, tight.seeds_needed) == (("G2",), 8)
    # 2/2^15 = .000061 <= .0001
    assert one(UP[:6], margin=10, alpha=1e-4).seeds_needed == 15


def test_beyond_16_seeds_a_verdict_is_a_function_of_its_own_data() -> None:
    """One stream of signs for all would change p with each contrast before it."""
    d = np.random.default_rng(3).normal(0.02, 0.05, 20)
    np.random.seed(1)
    alone = judge([of(d)])[0]
    np.random.seed(2)
    beside = judge([*crowd(1, list(d[::-1])), of(d)])[1]
    assert 1 / 20_000 < alone.p == beside.p < 1
    assert judge([of(d)], seed=1)[0].p != alone.p
    assert judge([of(d)], seed=1)[0].p == near(alone.p, 0.0142)


@pytest.mark.parametrize(
    ("judged", "text"),
    [
        (one(UP), "ppo is better than grpo: +.055 [.044, .066] (10 seeds, adjusted p .002)."),
        (
            one([-x for x in UP]),
            "ppo is worse than grpo: -.055 [-.066, -.044] (10 seeds, adjusted p .002).",
        ),
        (
            one(FLAT),
            "ppo and grpo are equivalent within ±.02: .000, 90 % interval [-.006, .006] "
            "(10 seeds, adjusted TOST p < .001).",
        ),
        (
            one(WIDE),
            "ppo against grpo is inconclusive: +.010 [-.036, .056] (10 seeds, adjusted p .658); "
            "about 92 seeds would decide.",
        ),
        (
            one(UP, truncated=0.95),
            "ppo against grpo is inconclusive: +.055 [.044, .066] (10 seeds, adjusted p .002; "
            "the length cap decides, truncated share .95).",
        ),
        (
            one([0.0] * 8),
            "ppo and grpo are equivalent (identical by construction: every difference is 0, "
            "which says nothing about clipping; 8 seeds).",
        ),
        (
            one(UP, declared=False),
            "ppo against grpo is exploratory: +.055 [.044, .066] (10 seeds; not declared before "
            "the study: interval, no verdict).",
        ),
        (
            one(UP[:2]),
            "ppo against grpo has no verdict: +.050 (2 seeds: dots only, a verdict needs 6).",
        ),
        (
            judge([of(UP)], planned=20)[0],
            "ppo against grpo has no verdict (10 of 20 seeds, study unfinished).",
        ),
    ],
    ids=lambda v: v.word if isinstance(v, Judged) else "",
)
def test_the_sentence(judged: Judged, text: str) -> None:
    assert sentence(judged, "ppo", "grpo") == text


def test_the_sentence_goes_by_the_word_and_prints_no_number_on_the_wrong_side() -> None:
    """A word from the sign of the mean; a bound above 0 as .000; p = .0504 as .050 at alpha .05."""
    got = dataclasses.replace(one(UP), word="inconclusive", p_adjusted=0.0504, seeds_needed=9)
    text = sentence(got, "a", "b")
    assert text.startswith("a against b is inconclusive: +.055")
    assert "adjusted p .05040); 9 seeds would usually have decided." in text
    close = dataclasses.replace(one(UP), difference=Interval(0.035, 0.0004, 0.07, 0.05, 10))
    assert "+.0350 [.0004, .0700]" in sentence(close, "a", "b")


@pytest.mark.parametrize(
    ("contrasts", "options", "text"),
    [
        ([of(UP), of(UP)], {}, "contrast 'a - b' is given twice"),
        ([of(UP)], {"margin": 0}, "margin is 0; a number above 0"),
        ([of(UP)], {"alpha": 0.5}, "alpha is 0.5; .* below 0.5"),
        ([of(UP)], {"seed": -1}, "seed is -1"),
        ([of([])], {}, "contrast 'a - b': x is empty"),
        ([of([0.1, NAN])], {}, "'a - b': x is nan at seed 9001; .* has the study's floor"),
        ([Contrast("c", {1: 0.5}, {1: None})], {}, "'c': y is None at seed 1"),  # type: ignore[dict-item]
        ([of(UP, truncated=1.5)], {}, r"truncated is 1.5; a share in \[0, 1\]"),
        ([of(UP, zero_variance=NAN)], {}, "zero_variance is nan"),
    ],
)
def test_mistakes_are_one_clear_line(contrasts: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(LabError, match=text):
        judge(contrasts, **options)
