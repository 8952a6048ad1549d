"""lab.stats: each measure by hand, against scipy, and against the mistake it is known for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats as reference

from lab.errors import LabError
from lab.stats import (
    Interval,
    correlation,
    d_z,
    difference,
    fmt,
    hodges_lehmann,
    holm,
    iqm,
    mean_interval,
    paired,
    probability_of_improvement,
    sign_flip,
    smallest_p,
    t_test,
    tost,
    welch,
    wilson,
    worst_quarter,
)

NAN = math.nan
Y = [0.50, 0.55, 0.48, 0.60, 0.52, 0.47, 0.58, 0.51, 0.54, 0.49]
D = [0.03, -0.01, 0.05, 0.02, 0, 0.04, -0.02, 0.06, 0.01, 0.03]
X = [round(y + d, 2) for y, d in zip(Y, D, strict=True)]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def near(value: float, atol: float = 1e-12) -> Any:
    return pytest.approx(value, rel=0, abs=atol, nan_ok=True)


def test_the_worked_example() -> None:
    """Ten pairs, every number of them: ddof 0, an unpaired t or a strict > would each show."""
    shown = difference(X, Y)
    assert shown.mean == near(0.0210)  # .21 / 10
    assert shown.sd == near(0.026013, 5e-7)  # sqrt((.0105 - 10 * .021^2) / 9)
    assert (shown.low, shown.high) == (near(0.002392, 5e-7), near(0.039608, 5e-7))
    assert (shown.n, shown.level, shown.approximate) == (10, 0.95, False)
    d = paired(X, Y)
    assert sign_flip(d) == 48 / 1024 == 0.046875
    assert t_test(d) == near(0.031047, 5e-7)
    assert welch(X, Y)[0] == near(0.2344765, 5e-8)
    assert correlation(X, Y) == near(0.797457, 5e-7)
    assert probability_of_improvement(X, Y).mean == near(0.675)
    assert iqm(X) == near(0.538)
    assert d_z(d) == near(0.807294, 5e-7)  # .021 / .026013
    assert hodges_lehmann(d) == near(0.020)
    assert tost(d, 0.05) == near(0.003230, 5e-7)
    assert tost(d, 0.02) == near(0.547043, 5e-7)


def test_mean_interval_by_hand() -> None:
    """1, 2, 3: mean 2, s = sqrt(2 / 2) = 1, t(.975, 2) = 4.302653, half = 4.302653 / sqrt(3)."""
    half = 0.95 * math.sqrt(2 / (1 - 0.95**2)) / math.sqrt(3)  # t in closed form for df = 2
    shown = mean_interval([1, 2, 3])
    assert shown == Interval(2.0, near(2 - half), near(2 + half), 1.0, 3)
    # the 90 % interval takes t(.95, 2) = .9 sqrt(2 / (1 - .81)) = 2.919986
    ninety = 0.9 * math.sqrt(2 / (1 - 0.9**2)) / math.sqrt(3)
    assert mean_interval([1, 2, 3], 0.9).high == near(2 + ninety)


def test_one_run_has_a_mean_and_no_interval() -> None:
    """0/0: a warning, or an interval of width 0 that looks like certainty."""
    one = mean_interval([0.3])
    assert (one.mean, one.low, one.high, one.sd, one.n) == (0.3, near(NAN), near(NAN), near(NAN), 1)
    assert math.isnan(t_test([0.3]))
    assert math.isnan(tost([0.3], 1))
    assert math.isnan(d_z([0.3]))
    assert math.isnan(correlation([0.3], [0.4]))
    assert sign_flip([0.3]) == 1  # both signs give |.3|
    p, interval = welch([0.3], [0.1, 0.2])
    assert math.isnan(p)
    assert (interval.mean, interval.low) == (near(0.15), near(NAN))


@pytest.mark.parametrize("n", [2, 3, 8, 10])
@pytest.mark.parametrize("value", [0.1, 0.3, -0.7, 1e6])
def test_equal_scores_are_exact(value: float, n: int) -> None:
    """A plain mean of ten .1 leaves a deviation of 1e-17, and t = .1/1e-17 then means all."""
    x = np.full(n, value)
    assert mean_interval(x) == Interval(value, value, value, 0.0, n)
    assert math.isnan(correlation(x, np.arange(n)))
    assert math.isnan(correlation(np.arange(n), x))
    assert iqm(x) == worst_quarter(x) == hodges_lehmann(x) == value
    assert d_z(x) == math.copysign(math.inf, value)
    assert (t_test(x), t_test(x - x)) == (0, 1)
    assert math.isnan(d_z(x - x))
    assert welch(x, x)[0] == 1
    assert welch(x, x + 1) == (0, Interval(-1, -1, -1, near(NAN), 2 * n))


@pytest.mark.parametrize("n", [3, 5, 10])
def test_a_nominal_95_covers_95_of_normal_scores(n: int) -> None:
    """ddof 0 covers .93 at n = 5 and a normal quantile .88; binomial .999 band: .939-.960."""
    x = rng(n).normal(0.5, 0.1, (4000, n))
    hit = [i.low <= 0.5 <= i.high for i in map(mean_interval, x)]
    assert 0.939 <= np.mean(hit) <= 0.960
    mean, sd = x.mean(1), x.std(1)  # the mistake: ddof 0
    half = reference.t.ppf(0.975, n - 1) * sd / math.sqrt(n)
    assert np.mean(np.abs(mean - 0.5) <= half) < 0.939 + (0.01 if n == 10 else 0)


def test_t_tests_agree_with_scipy() -> None:
    """Unequal n and variances: a pooled variance, or n_x + n_y - 2 degrees, gives another p."""
    x, y = rng(1).normal(0.3, 1, 7), rng(2).normal(0, 3, 12)
    p, interval = welch(x, y, 0.9)
    want = reference.ttest_ind(x, y, equal_var=False)
    low, high = want.confidence_interval(0.9)
    assert p == near(want.pvalue)
    assert (interval.low, interval.high) == (near(low), near(high))
    assert (interval.n, interval.level) == (19, 0.9)
    assert abs(p - reference.ttest_ind(x, y).pvalue) > 0.01
    assert t_test(x) == near(reference.ttest_1samp(x, 0).pvalue)
    assert correlation(x, y[:7]) == near(np.corrcoef(x, y[:7])[0, 1])


def test_pairing_takes_the_shared_part_out() -> None:
    """The seed moves both by 10: unpaired runs see s = 10, pairs see s = .1."""
    shared = rng(3).normal(0, 10, 8)
    x, y = shared + rng(4).normal(0.5, 0.1, 8), shared
    assert difference(x, y).low > 0
    assert welch(x, y)[0] > 0.9
    assert correlation(x, y) > 0.999
    assert sign_flip(paired(x, y)) == 2 / 2**8


def loop(d: list[int]) -> float:
    """The sign-flip p of whole numbers, pattern by pattern, without rounding."""
    patterns = list(itertools.product((1, -1), repeat=len(d)))
    sums = [sum(s * v for s, v in zip(pattern, d, strict=True)) for pattern in patterns]
    return sum(abs(total) >= abs(sum(d)) for total in sums) / len(patterns)


def test_sign_flip_counts_the_ties_of_the_worked_example() -> None:
    """48 of 1024 in whole hundredths; comparing floats of x - y plainly finds only 32."""
    hundredths = [round(100 * d) for d in D]
    assert loop(hundredths) == 48 / 1024
    assert loop([a - b for a, b in zip(X, Y, strict=True)]) == 32 / 1024  # type: ignore[misc]
    assert sign_flip(paired(X, Y)) == sign_flip(D) == sign_flip(hundredths) == 48 / 1024


@pytest.mark.parametrize("seed", range(12))
def test_sign_flip_is_the_loop_over_all_signs(seed: int) -> None:
    """One-sided counts, flips that keep the first sign only on one side, strict comparison."""
    whole = [int(v) for v in rng(seed).integers(-3, 6, size=2 + seed % 8)]
    assert sign_flip(np.array(whole) / 7) == loop(whole)
    assert sign_flip(-np.array(whole) / 7) == loop(whole)


@pytest.mark.parametrize("n", [2, 6, 10, 16])
def test_the_smallest_p_is_two_patterns_of_all(n: int) -> None:
    """All d of one sign: the pattern itself and its opposite; 1/2^n would be one-sided."""
    assert sign_flip(np.arange(1, n + 1)) == smallest_p(n) == 2 / 2**n
    assert sign_flip(np.zeros(n)) == 1  # every pattern ties


def test_beyond_16_signs_are_drawn_and_estimate_the_exact_p() -> None:
    """A 17th difference of 0 changes no sum: p is that of 16; se = sqrt(p(1-p)/19999) < .0035."""
    d = rng(5).normal(0.3, 1, 16)
    exact, drawn = sign_flip(d), sign_flip([*d, 0.0], rng(6))
    assert 0.05 < exact < 0.95
    assert drawn == near(exact, 0.0142)  # 4 se
    assert drawn * 20_000 == near(round(drawn * 20_000), 1e-6)  # (k + 1) / (19,999 + 1)


def test_a_drawn_p_is_never_0() -> None:
    """k/draws says p = 0 for 40 equal signs, which no finite number of draws can show."""
    assert sign_flip(np.ones(40), rng()) == smallest_p(40) == 1 / 20_000


def test_a_passed_generator_fixes_the_result() -> None:
    """np.random inside would depend on the global state, or move it for everybody else."""
    d = rng(7).normal(0.2, 1, 20)
    draws: tuple[Callable[[np.random.Generator], object], ...] = (
        lambda g: sign_flip(d, g),
        lambda g: probability_of_improvement(d, d[::-1] - 0.3, g),
    )
    for draw in draws:
        np.random.seed(1)
        first, after = draw(rng(8)), np.random.random()
        np.random.seed(1)
        assert np.random.random() == after
        assert draw(rng(8)) == first
        assert draw(rng(9)) != first


def test_sign_flip_asks_for_a_generator_only_when_it_draws() -> None:
    assert sign_flip(np.ones(16)) == 2 / 2**16
    with pytest.raises(LabError, match=r"17 differences draws its signs .*got None"):
        sign_flip(np.ones(17))
    with pytest.raises(LabError, match="got 3"):
        sign_flip(np.ones(17), 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("p", "want"),
    [
        # 4 * .002, 3 * .0117, 2 * .0312, 1 * .2
        ([0.002, 0.0117, 0.0312, 0.2], [0.008, 0.0351, 0.0624, 0.2]),
        ([0.2, 0.0312, 0.002, 0.0117], [0.2, 0.0624, 0.008, 0.0351]),  # in the order given
        ([0.03, 0.04], [0.06, 0.06]),  # running max: not .04; Hochberg says (.04, .04)
        ([0.5, 0.4, 0.9], [1.0, 1.0, 1.0]),  # 3 * .4 and 2 * .5 reach 1; .9 may not fall below
        ([0.01], [0.01]),
    ],
)
def test_holm(p: list[float], want: list[float]) -> None:
    """Bonferroni multiplies all by m; without the running max the order of rejections breaks."""
    np.testing.assert_allclose(holm(p), want, rtol=0, atol=1e-12)


def test_tost_is_the_90_percent_interval_inside_the_margin() -> None:
    """The 95 % interval would ask for 2.5 %; the minimum of both sides passes nearly always."""
    d = rng(10).normal(0.004, 0.02, 10)
    ninety = mean_interval(d, 0.9)
    reach = max(abs(ninety.low), abs(ninety.high))
    assert tost(d, reach) == near(0.05)
    assert tost(d, reach * 1.01) < 0.05 < tost(d, reach / 1.01)
    assert tost(-d, reach) == near(0.05)
    one_sided = reference.ttest_1samp(d, -0.02, alternative="greater").pvalue
    assert tost(d, 0.02) >= one_sided


@pytest.mark.parametrize(
    ("value", "p"), [(0, 0), (0.0199, 0), (0.02, 1), (-0.02, 1), (0.5, 1), (-0.01, 0)]
)
def test_tost_of_equal_differences(value: float, p: float) -> None:
    """se = 0: no 0/0, and no verdict from the rounding of x - y at the margin itself."""
    assert tost(np.full(6, value), 0.02) == p
    y = np.array([0.1, 0.3, 0.5, 0.7, 1.1, 2.3])
    assert tost((y + value) - y, 0.02) == p
    assert tost([value * (1 - 1e-15)] * 6, 0.02) == p


def test_tost_at_a_true_difference_of_the_margin_passes_5_percent() -> None:
    """Binomial .999 bound of 4,000 at 5 %: 200 + 3.09 * sqrt(190) = 243; at 0 most pass."""
    noise = rng(11).normal(0, 0.01, (4000, 10))
    passed = sum(tost(d, 0.02) <= 0.05 for d in noise + 0.02)
    assert 150 <= passed <= 243
    assert sum(tost(d, 0.02) <= 0.05 for d in noise[:200]) > 190


def test_probability_of_improvement_counts_all_pairs_and_half_of_ties() -> None:
    """x = (1, 3), y = (1, 2): 1>1 half, 1>2 no, 3>1, 3>2: 2.5/4; the paired share is 1.5/2."""
    assert probability_of_improvement([1, 3], [1, 2]).mean == 2.5 / 4
    assert probability_of_improvement([1, 2], [1, 3]).mean == 1.5 / 4
    shown = probability_of_improvement([1.0], [1.0])
    assert (shown.mean, shown.low, shown.approximate) == (0.5, near(NAN), True)


def test_the_bootstrap_interval_leaves_out_equal_shares_on_both_sides() -> None:
    """Resamples of two runs: .5 (1/4), .625 (1/2), 1 (1/4); .2 and .8 lie in the outer ones."""
    shown = [probability_of_improvement([1, 3], [1, 2], rng(), level) for level in (0.6, 0.4)]
    assert [(i.low, i.high, i.level) for i in shown] == [(0.5, 1, 0.6), (0.625, 0.625, 0.4)]


def test_probability_of_improvement_compares_within_tasks() -> None:
    """Task 2 scores a hundred times higher: pooled, its scale would decide; 1 and 0 give .5."""
    x, y = np.array([[1, 100], [2, 200]]), np.array([[0, 300], [0.5, 400]])
    assert probability_of_improvement(x, y).mean == 0.5
    with pytest.raises(LabError, match=r"x has shape \(2, 2\), y \(2,\)"):
        probability_of_improvement(x, [1, 2])


def test_the_bootstrap_takes_one_index_for_both_recipes() -> None:
    """x against itself: each resample is .5 exactly; two indices would give it a width."""
    x = rng(12).normal(size=10)
    shown = probability_of_improvement(x, x, rng(13))
    assert (shown.low, shown.mean, shown.high) == (near(0.5), 0.5, near(0.5))
    wider = probability_of_improvement(x, rng(14).normal(size=10), rng(13))
    assert wider.low < wider.mean < wider.high
    # a run is resampled with all of its tasks: a task given twice adds no information
    y = rng(14).normal(size=10)
    twice = probability_of_improvement(np.c_[x, x], np.c_[y, y], rng(13))
    assert (twice.low, twice.high) == (wider.low, wider.high)


@pytest.mark.parametrize(
    ("x", "want"),
    [
        ([0, 0, 9], 1.5),  # a weight of (.75 - 2/3) / .5 = 1/6 on 9; trim_mean trims none: 3
        ([0, 1, 2, 4, 10], 2.3),  # (.15 * 1 + .2 * 2 + .15 * 4) / .5
        ([10, 4, 0, 2, 1], 2.3),
        # pooled 0 1 2 2 4 10: weights (2/6 - 1/4), 1/6, 1/6, (3/4 - 4/6) over 1/2
        ([[0, 10], [1, 2], [4, 2]], (1 / 12 + 2 / 6 + 2 / 6 + 4 / 12) * 2),
        ([70, 0, 1, 2, 3, 4, 5, 60], 3.5),  # (2 + 3 + 4 + 5) / 4, the trimmed mean
        ([3, 7], 5),  # 3 over [.25, .5], 7 over [.5, .75]
    ],
)
def test_iqm_weights_its_edges(x: Any, want: float) -> None:
    """Whole values trimmed: [0, 0, 9] has nothing trimmed below four values."""
    assert iqm(x) == near(want)


@pytest.mark.parametrize(
    ("x", "want"),
    [
        ([9, 8, 7, 6, 5, 4, 3, 2, 1, 0], (0 + 1 + 2 / 2) / 2.5),  # 2.5 of 10 runs
        ([5, 1, 3], 1),  # less than one run: the minimum
        ([8, 1, 3, 4], 1),
        ([1, 2, 3, 4, 5, 6, 7, 8], 1.5),
    ],
)
def test_worst_quarter_is_the_low_end_with_a_fractional_edge(x: list[float], want: float) -> None:
    assert worst_quarter(x) == near(want)


def test_hodges_lehmann_is_the_median_of_pairs_with_themselves() -> None:
    """0, 1, 5: averages 0 .5 1 2.5 3 5, median 1.75; without i = j it is 2.5, the mean is 2."""
    assert hodges_lehmann([5, 0, 1]) == 1.75
    assert hodges_lehmann([0.1, 0.2, 0.3, 0.2, 1e6]) < 0.3 + 1e-12


@pytest.mark.parametrize(("k", "n"), [(0, 3), (1, 10), (5, 10), (10, 10), (0, 1), (3, 200)])
def test_wilson_agrees_with_scipy_and_stays_in_0_to_1(k: int, n: int) -> None:
    """Wald's p +- 1.96 sqrt(p(1-p)/n) has width 0 at k = 0 and leaves [0, 1] at k = 1."""
    shown = wilson(k, n)
    want = reference.binomtest(k, n).proportion_ci(method="wilson")
    assert (shown.mean, shown.low, shown.high) == (k / n, near(want.low), near(want.high))
    assert 0 <= shown.low < shown.high <= 1
    assert (k == 0) == (shown.low == 0)


@pytest.mark.parametrize(
    ("value", "width", "want"),
    [
        (0.0412, 0.058, ".041"),  # two digits of the width: three decimals
        (-0.0412, 0.058, "-.041"),
        (0.0412, 0.58, ".04"),
        (12.345, 3.0, "12.3"),
        (1234.5, 5800, "1234"),  # half to even; digits before the point are never dropped
        (-0.0001, 0.058, ".000"),  # no -.000
        (0.1 + 0.2, 0.0, ".300"),
        (10.04, 0.1, "10.04"),
        (0.5, 1e-12, ".500000"),
        (NAN, 0.1, "nan"),
        (-math.inf, 0.1, "-inf"),
    ],
)
def test_fmt_rounds_by_the_width(value: float, width: float, want: str) -> None:
    assert fmt(value, width) == want


PAIRED = (difference, correlation, welch, probability_of_improvement)
SINGLE = (mean_interval, t_test, sign_flip, holm, iqm, worst_quarter, hodges_lehmann, d_z)


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf, 1e200])
def test_a_score_that_is_not_finite_is_refused_by_place(bad: float) -> None:
    """A mean that skips NaN drops the failed runs, which are results."""
    for measure in (*SINGLE, lambda d: tost(d, 0.02)):
        with pytest.raises(LabError, match=r"^\w\[1\] is .*; a score is finite"):
            measure([0.1, bad, 0.3])
    for compare in PAIRED:
        with pytest.raises(LabError, match=r"^y\[2\] is"):
            compare([0.1, 0.2, 0.3], [0.1, 0.2, bad])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: mean_interval([]), "x is empty; at least one run was due"),
        (lambda: mean_interval([[1, 2]]), r"x has shape \(1, 2\); one number per run"),
        (lambda: mean_interval(["a"]), "x: scores are numbers, one per run"),
        (lambda: mean_interval([1, 2], 1.0), "level is 1.0; a number above 0 and below 1 was due"),
        (lambda: difference([1, 2], [1]), "x has 2 runs, y has 1"),
        (lambda: tost([1, 2], 0), "margin is 0; a number above 0"),
        (lambda: tost([1, 2], NAN), "margin is nan"),
        (lambda: holm([0.1, 1.2]), r"p holds 1.2; p-values lie in \[0, 1\]"),
        (lambda: wilson(3, 2), "k is 3, n is 2; 0 <= k <= n"),
        (lambda: wilson(0.5, 2), "k is 0.5, n is 2; whole numbers"),  # type: ignore[arg-type]
    ],
)
def test_mistakes_are_one_clear_line(call: Callable[[], object], text: str) -> None:
    with pytest.raises(LabError, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)
