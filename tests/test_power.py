"""lab.power: the table of seeds, noncentral t where it is NaN, and simulated studies."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import integrate
from scipy import stats as reference

from lab.errors import LabError
from lab.power import (
    least_seeds,
    paired_sd,
    power_equivalence,
    power_paired,
    seeds_for_difference,
    seeds_for_equivalence,
)
from lab.stats import mean_interval, probability_of_improvement, sign_flip, smallest_p
from lab.verdict import Contrast, judge


def test_the_planning_example() -> None:
    """sd .08 and rho .5: s_d = sqrt(2 * .0064 * .5) = .08, d_z = .05/.08 = .625."""
    sd = paired_sd(0.08, 0.08, 0.5)
    assert sd == pytest.approx(0.08, abs=1e-15)
    assert power_paired(0.05, sd, 10) == pytest.approx(0.4231, abs=1e-4)
    assert power_paired(0.05, sd, 22) < 0.8 <= power_paired(0.05, sd, 23)
    assert seeds_for_difference(0.05, sd) == 23


@pytest.mark.parametrize(
    ("ratio", "difference", "of_six", "equivalence"),
    [
        (0.25, 128, 198, 139),
        (0.5, 34, 52, 36),
        (1, 10, 16, 11),
        (1.5, 6, 9, 6),
        (2, 6, 8, 4),
    ],
)
def test_the_table_of_seeds(ratio: float, difference: int, of_six: int, equivalence: int) -> None:
    """80 % at margin/sd; at 2 the t-test alone wants 5 and 7, and the sign-flip's floor is 6 and 8.

    A one-sided level or a normal quantile changes every row: 128 becomes 101 or 126.
    """
    assert max(seeds_for_difference(ratio, 1), least_seeds(1)) == difference
    assert max(seeds_for_difference(ratio, 1, 0.05 / 6), least_seeds(6)) == of_six
    assert seeds_for_equivalence(ratio, 1) == equivalence


def test_the_margin_and_the_deviation_count_by_their_ratio() -> None:
    assert seeds_for_difference(0.02, 0.04) == seeds_for_difference(0.5, 1) == 34
    assert seeds_for_equivalence(0.02, 0.04) == 36
    assert power_paired(-0.05, 0.08, 10) == power_paired(0.05, 0.08, 10)


@pytest.mark.parametrize("power", [0.03, 0.5, 0.8, 0.99])
@pytest.mark.parametrize("alpha", [0.05, 0.05 / 6, 1e-4])
@pytest.mark.parametrize("ratio", [0.1, 0.7, 3])
def test_the_number_of_seeds_is_the_least(ratio: float, alpha: float, power: float) -> None:
    """A search that starts at the normal formula and only walks up misses a smaller n."""
    n = seeds_for_difference(ratio, 1, alpha, power)
    assert power_paired(ratio, 1, n, alpha) >= power
    assert n == 2 or power_paired(ratio, 1, n - 1, alpha) < power
    n = seeds_for_equivalence(ratio, 1, alpha, power)
    assert power_equivalence(ratio, 1, n, alpha) >= power
    assert n == 2 or power_equivalence(ratio, 1, n - 1, alpha) < power


@pytest.mark.parametrize(("effect", "n"), [(10.6 / 20**0.5, 20), (5, 40), (30, 5), (1000, 6)])
def test_power_where_the_far_tail_is_nan(effect: float, n: int) -> None:
    """nct.cdf(-2.093, 19, 10.6) is NaN in scipy 1.17: added, it makes the power NaN."""
    assert power_paired(effect, 1, n) == pytest.approx(1, abs=1e-6)


def test_a_difference_of_0_is_found_alpha_of_the_time() -> None:
    """Both tails: .025 + .025; the right one alone gives half."""
    assert power_paired(0, 1, 10) == pytest.approx(0.05, abs=1e-12)
    assert power_paired(0, 1, 10, 0.01) == pytest.approx(0.01, abs=1e-12)


@pytest.mark.parametrize(
    ("d", "rho", "n", "power"),
    [
        *((0.8, 0.5, 5, 0.28), (0.8, 0.5, 10, 0.62), (0.8, 0.5, 20, 0.92)),
        *((0.8, 0.8, 5, 0.57), (0.8, 0.8, 10, 0.94), (0.8, 0.8, 20, 1.0)),
        *((1.0, 0.5, 5, 0.40), (1.0, 0.5, 10, 0.80), (1.0, 0.5, 20, 0.99)),
        *((1.0, 0.8, 5, 0.75), (1.0, 0.8, 10, 0.99), (1.5, 0.5, 5, 0.71)),
        *((1.5, 0.5, 10, 0.99), (1.5, 0.8, 5, 0.97)),
    ],
)
def test_what_pairing_buys(d: float, rho: float, n: int, power: float) -> None:
    """A difference of d standard deviations of one recipe; s_d = sqrt(2 (1 - rho))."""
    assert power_paired(d, paired_sd(1, 1, rho), n) == pytest.approx(power, abs=0.005)


def test_paired_sd() -> None:
    """sqrt(9 + 16 - 2 rho 12): 5 unpaired, 1 and 7 at the ends, exactly 0 for one recipe."""
    assert [paired_sd(3, 4, rho) for rho in (0, 1, -1)] == [5, 1, 7]
    assert paired_sd(0.1, 0.1, 1) == 0


@pytest.mark.parametrize(("ratio", "n"), [(0.5, 20), (1, 8), (2, 5)])
def test_powers_agree_with_simulated_studies(ratio: float, n: int) -> None:
    """20,000 studies, se below .0036: 4 se = .0142. The formulas assume the t, not the normal."""
    d = np.random.default_rng(n).normal(0, 1, (20_000, n))
    mean, se = d.mean(1), d.std(1, ddof=1) / math.sqrt(n)
    reach = np.abs(mean) + reference.t.ppf(0.95, n - 1) * se
    assert power_equivalence(ratio, 1, n) == pytest.approx(np.mean(reach <= ratio), abs=0.0142)
    found = np.abs(mean + ratio) / se >= reference.t.ppf(0.975, n - 1)
    assert power_paired(ratio, 1, n) == pytest.approx(np.mean(found), abs=0.0142)


@pytest.mark.parametrize("n", [2, 3, 10, 300])
@pytest.mark.parametrize("alpha", [0.05, 0.001])
@pytest.mark.parametrize("ratio", [0.2, 1, 5])
def test_equivalence_agrees_with_an_adaptive_integral(n: int, alpha: float, ratio: float) -> None:
    """The fixed rule over a range cut to where the density lives, against quad."""
    df, t, shift = n - 1, reference.t.ppf(1 - alpha, n - 1), ratio * math.sqrt(n)

    def inside(s: float) -> float:
        density = reference.chi.pdf(s * math.sqrt(df), df) * math.sqrt(df)
        return float((2 * reference.norm.cdf(shift - t * s) - 1) * density)

    end = min(shift / t, 1 + 12 / math.sqrt(df))
    points = [p for p in (1 - 4 / math.sqrt(df), 1.0) if 0 < p < end]
    want = integrate.quad(inside, 0, end, points=points, epsabs=1e-11, limit=200)[0]
    assert power_equivalence(ratio, 1, n, alpha) == pytest.approx(want, abs=1e-8)


def test_the_sign_flip_test_is_weaker_than_the_formula_where_its_steps_are_coarse() -> None:
    """Six pairs reach .05 only with one sign: Phi(1.5)^6 = .6604; the t-test has .8325."""
    of_one_sign = reference.norm.cdf(1.5) ** 6 + reference.norm.cdf(-1.5) ** 6
    assert of_one_sign == pytest.approx(0.6604, abs=1e-4)
    assert sign_flip([1, 1, 1, 1, 1, -1e-9]) > 0.05  # 4/64: one tiny opposite sign is enough
    assert power_paired(1.5, 1, 6) == pytest.approx(0.8325, abs=1e-4)


def test_equivalence_out_of_reach_has_power_0() -> None:
    """No sample passes unless t s < margin sqrt(n): at 300 pairs s is never that small."""
    assert power_equivalence(1e-3, 1, 300) == 0


def test_very_small_margins_are_answered_by_the_normal_formula() -> None:
    """((1.959964 + .841621) * 1000)^2 = 7848880; a search pair by pair would not end."""
    assert seeds_for_difference(0.001, 1) == 7_848_880
    # ((1.644854 + 1.281552) * 1000)^2 = 8563850
    assert seeds_for_equivalence(0.001, 1) == pytest.approx(8_563_850, abs=10)


def test_no_spread_needs_two_pairs() -> None:
    """0/0: then the floor of the sign-flip test decides."""
    assert seeds_for_difference(0.02, 0) == seeds_for_equivalence(0.02, 0) == 2


@pytest.mark.parametrize(
    ("contrasts", "least"),
    [(1, 6), (2, 7), (3, 7), (4, 8), (6, 8), (7, 9), (12, 9), (13, 10), (25, 10), (26, 11)],
)
def test_least_seeds_of_m_contrasts(contrasts: int, least: int) -> None:
    """2/2^n <= .05/m: 1/2^n (one-sided) would allow one fewer. Seen on the test itself."""
    assert least_seeds(contrasts) == least
    assert sign_flip(np.ones(least)) <= 0.05 / contrasts < sign_flip(np.ones(least - 1))


def test_an_alpha_that_no_number_of_seeds_reaches_is_said() -> None:
    """Beyond 16 pairs the signs are drawn and p is at least 1/20,000: the loop would not end."""
    assert least_seeds(1000, 0.05) == 16  # 2/2^16 = 3.05e-5 <= 5e-5
    assert smallest_p(17) == 1 / 20_000
    with pytest.raises(LabError, match=r"alpha 0.05 over 2000 contrasts lies below 3.1e-05"):
        least_seeds(2000)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: power_paired(0.1, 0, 5), "sd is 0; a number above 0"),
        (lambda: power_paired(0.1, 1, 1), "effect is 0.1, n is 1; a finite effect and n >= 2"),
        (lambda: power_paired(math.nan, 1, 5), "effect is nan"),
        (lambda: power_paired(0.1, 1, 5, 1.5), "alpha is 1.5; a number above 0 and below 1"),
        (lambda: power_equivalence(0.1, 1, 1), "n is 1; at least 2 was due"),
        (lambda: power_equivalence(0.1, 1, 5, 0.5), "alpha is 0.5; .* below 0.5"),
        (lambda: seeds_for_difference(0, 1), "margin is 0"),
        (lambda: seeds_for_difference(0.1, math.nan), "sd is nan; a finite number, at least 0"),
        (lambda: seeds_for_equivalence(0.1, -1), "sd is -1"),
        (lambda: seeds_for_equivalence(0.1, 1, 0.05, 1), "power is 1"),
        (lambda: least_seeds(0), "contrasts is 0; at least 1 was due"),
        (lambda: paired_sd(1, 1, 1.1), r"rho is 1.1; a correlation in \[-1, 1\] was due"),
    ],
)
def test_mistakes_are_one_clear_line(call: Callable[[], object], text: str) -> None:
    with pytest.raises(LabError, match=text):
        call()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "bimodal", "log-normal"])
def test_two_names_of_one_recipe_on_disjoint_seeds_rarely_win(kind: str) -> None:
    """2,000 A/A studies: at most 131 false words (5 %, binomial .999: 100 + 3.09 * 9.75 = 130)."""
    draw = np.random.default_rng(17)
    size = (2, 2000, 10)
    if kind == "normal":
        x, y = draw.normal(0.5, 0.1, size)
    elif kind == "log-normal":
        x, y = draw.lognormal(0, 0.8, size)
    else:
        learnt = draw.random(size) < 0.75
        x, y = np.where(learnt, draw.normal(0.9, 0.03, size), draw.normal(0.1, 0.05, size))
    words, small = [], 0
    for a, b in zip(x, y, strict=True):
        got = judge([Contrast("aa", dict(enumerate(a)), dict(enumerate(b)))])[0]
        words.append(got.word)
        small += got.p <= 0.05
    false = words.count("better") + words.count("worse")
    assert 20 <= false <= small <= 131
    assert abs(words.count("better") - words.count("worse")) <= 3.3 * math.sqrt(false)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "effect", "covered"), [(5, 0.5, 0.73), (5, 0, 0.94), (20, 0.5, 0.95)]
)
def test_the_bootstrap_is_as_approximate_as_it_says(n: int, effect: float, covered: float) -> None:
    """Normal scores with rho = .8: the truth is Phi(effect / sqrt 2), two independent runs."""
    draw, truth, hits = np.random.default_rng(n), reference.norm.cdf(effect / math.sqrt(2)), 0
    for _ in range(500):
        seed, own, other = draw.normal(size=(3, n))
        x, y = effect + 0.8**0.5 * seed + 0.2**0.5 * own, 0.8**0.5 * seed + 0.2**0.5 * other
        shown = probability_of_improvement(x, y, draw)
        hits += shown.low <= truth <= shown.high
    assert hits / 500 == pytest.approx(covered, abs=0.06)


def test_no_interval_is_right_for_three_runs_that_learn_or_fail() -> None:
    """The warning in the docstring: .55 at n = 3 and .75 at n = 5 (75 % .9+-.03, 25 % .1+-.05)."""
    truth = 0.75 * 0.9 + 0.25 * 0.1  # .7
    for n, covered in ((3, 0.55), (5, 0.75)):
        draw = np.random.default_rng(n)
        learnt = draw.random((2000, n)) < 0.75
        x = np.where(learnt, draw.normal(0.9, 0.03, (2000, n)), draw.normal(0.1, 0.05, (2000, n)))
        hit = [i.low <= truth <= i.high for i in map(mean_interval, x)]
        assert np.mean(hit) == pytest.approx(covered, abs=0.04)
