"""Measures over runs: intervals, tests and effect sizes.

Throughout, a run is the unit: x and y hold one score per run, position by position from the same
seed, and d = x - y. A standard deviation has ddof 1. Where a number is not defined (an interval
from one run, a correlation with a constant) it is NaN; a NaN that is *given* is refused. Means
take the smallest value off first, as in lab.tools, so that equal scores have deviation 0 exactly.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special  # type: ignore[import-untyped]  # ships no types

from lab.errors import LabError

Array = NDArray[np.float64]

#: Sums that differ by less than this share of sum |d| are ties: they differ by rounding alone.
TIE = 1e-12
#: Up to this many differences all sign patterns are enumerated; beyond it, DRAWS are drawn.
EXACT = 16
DRAWS = 19_999
RESAMPLES = 9_999
#: Beyond this a score is a diverged run, whose square may overflow.
LARGEST = 1e100


@dataclass(frozen=True)
class Interval:
    """A mean and its interval: low and high are NaN where there is none.

    `sd` is the standard deviation of the n values (NaN where the interval has another base),
    `level` its nominal coverage. An `approximate` interval is known to cover less than that.
    """

    mean: float
    low: float
    high: float
    sd: float
    n: int
    level: float = 0.95
    approximate: bool = False


def scores(x: ArrayLike, name: str = "x", ndim: int | None = 1) -> Array:
    """x as an array of finite numbers, at least one.

    Raises:
        LabError: naming the place of the first value that is none, or the shape.
    """
    try:
        array = np.asarray(x, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise LabError(f"{name}: scores are numbers, one per run; {error}") from error
    if ndim is not None and array.ndim != ndim:
        raise LabError(f"{name} has shape {array.shape}; one number per run, [n], was due")
    if not array.size:
        raise LabError(f"{name} is empty; at least one run was due")
    bad = np.argwhere(~(np.abs(array) <= LARGEST))
    if len(bad):
        at = tuple(int(i) for i in bad[0])
        where = ", ".join(map(str, at))
        raise LabError(f"{name}[{where}] is {array[at]}; a score is finite, at most {LARGEST:g}")
    return array


def paired(x: ArrayLike, y: ArrayLike) -> Array:
    """d = x - y, position by position: x and y come from the same seeds in the same order."""
    a, b = scores(x, "x"), scores(y, "y")
    if len(a) != len(b):
        raise LabError(f"x has {len(a)} runs, y has {len(b)}; pairs need as many of each")
    return a - b


def positive(value: float, name: str, below: float = LARGEST) -> float:
    """The value, if it lies strictly between 0 and `below`."""
    if not 0 < value < below:
        raise LabError(f"{name} is {value}; a number above 0 and below {below:g} was due")
    return float(value)


def _moments(x: Array) -> tuple[float, float]:
    """Mean and standard deviation (ddof 1; NaN for one value)."""
    low = x.min()
    mean = low + (x - low).mean()
    if len(x) < 2:
        return float(mean), math.nan
    return float(mean), float(np.sqrt(np.square(x - mean).sum() / (len(x) - 1)))


def _t(p: float, df: float) -> float:
    """The p-quantile of Student's t."""
    return float(special.stdtrit(df, p))


def _tail(t: float, df: float) -> float:
    """P(T >= t)."""
    return float(special.stdtr(df, -t))


def mean_interval(x: ArrayLike, level: float = 0.95) -> Interval:
    """Mean of one recipe's runs, with a t-interval.

    mean +- t_{1-a/2, n-1} s / sqrt(n) with a = 1 - level. Assumes independent runs with nearly
    normal scores: when runs either learn or fail it covers .55 at n = 3 and .75 at n = 5 in place
    of .95. One run has no interval. Source: Student (1908), Biometrika 6:1-25.
    """
    values = scores(x)
    positive(level, "level", 1)
    n, (mean, sd) = len(values), _moments(values)
    half = _t((1 + level) / 2, n - 1) * sd / math.sqrt(n) if n > 1 else math.nan
    return Interval(mean, mean - half, mean + half, sd, n, level)


def difference(x: ArrayLike, y: ArrayLike, level: float = 0.95) -> Interval:
    """Mean difference of two recipes over the same seeds, with the paired t-interval.

    `mean_interval` of d = x - y; its sd is that of d. Assumes that pairs are independent and d
    nearly normal; x and y may have different variances and any correlation. Pays over `welch`
    only where the correlation is clearly above 0. Source: Student (1908).
    """
    return mean_interval(paired(x, y), level)


def t_test(d: ArrayLike) -> float:
    """Two-sided p of the paired t-test of mean difference 0, for comparison with `sign_flip`.

    2 P(T >= |mean| sqrt(n) / s), n - 1 degrees of freedom; NaN for one pair. With s = 0 it is 1
    for a mean of 0 and otherwise 0. Assumes nearly normal d. Source: Student (1908).
    """
    values = scores(d, "d")
    mean, sd = _moments(values)
    if len(values) < 2:
        return math.nan
    if sd == 0:
        return float(mean == 0)
    return 2 * _tail(abs(mean) / sd * math.sqrt(len(values)), len(values) - 1)


def welch(x: ArrayLike, y: ArrayLike, level: float = 0.95) -> tuple[float, Interval]:
    """Two-sided p and interval of a mean difference when the runs are not paired.

    t = (mean x - mean y) / se with se^2 = s_x^2/n_x + s_y^2/n_y and the degrees of freedom of
    Welch and Satterthwaite. The interval counts n_x + n_y runs and has no sd. NaN if either side
    has one run; with se = 0, p is 1 for equal means and otherwise 0. Assumes independent, nearly
    normal scores; the variances may differ. Source: Welch (1947), Biometrika 34:28-35.
    """
    a, b = scores(x, "x"), scores(y, "y")
    positive(level, "level", 1)
    (mean_a, sd_a), (mean_b, sd_b) = _moments(a), _moments(b)
    mean, n = mean_a - mean_b, len(a) + len(b)
    if min(len(a), len(b)) < 2:
        return math.nan, Interval(mean, math.nan, math.nan, math.nan, n, level)
    va, vb = sd_a**2 / len(a), sd_b**2 / len(b)
    se = math.sqrt(va + vb)
    if se == 0:
        return float(mean == 0), Interval(mean, mean, mean, math.nan, n, level)
    # shares of se^2, as va^2 alone may underflow
    df = 1 / ((va / se**2) ** 2 / (len(a) - 1) + (vb / se**2) ** 2 / (len(b) - 1))
    half = _t((1 + level) / 2, df) * se
    p = 2 * _tail(abs(mean) / se, df)
    return p, Interval(mean, mean - half, mean + half, math.nan, n, level)


def correlation(x: ArrayLike, y: ArrayLike) -> float:
    """Observed correlation rho of the pairs: what pairing by seed has bought.

    var(d) = s_x^2 + s_y^2 - 2 rho s_x s_y. NaN for one pair, or when either side is constant.
    Source: Pearson (1895), Proc. R. Soc. 58:240-242.
    """
    paired(x, y)
    a, b = scores(x, "x"), scores(y, "y")
    (mean_a, sd_a), (mean_b, sd_b) = _moments(a), _moments(b)
    if not (sd_a > 0 and sd_b > 0):
        return math.nan
    rho = ((a - mean_a) / sd_a) @ ((b - mean_b) / sd_b) / (len(a) - 1)
    return float(np.clip(rho, -1, 1))


def sign_flip(d: ArrayLike, rng: np.random.Generator | None = None) -> float:
    """Two-sided p of the sign-flip test on paired differences.

    The share of sign patterns s in {-1, 1}^n with |sum s_i d_i| >= |sum d_i|; sums closer than
    1e-12 of sum |d_i| are ties and count. All 2^n patterns for n <= 16; beyond, (k + 1)/(draws
    + 1) over 19,999 patterns from the Generator passed. Exact for "both recipes give the same
    distribution", not for "equal means, unequal shapes": d ~ Exp(1) - 1 is rejected in 7 % (n =
    6) to 11 % (n = 10) at .05. Sources: Fisher (1935), The Design of Experiments, section 21;
    Phipson & Smyth (2010), Stat. Appl. Genet. Mol. Biol. 9:39, for the + 1.
    """
    values = scores(d, "d")
    n, tie = len(values), TIE * float(np.abs(values).sum())
    if n <= EXACT:
        sums = np.zeros(1)
        for value in values:
            sums = np.concatenate([sums + value, sums - value])
        return float(np.mean(np.abs(sums) >= abs(sums[0]) - tie))
    if not isinstance(rng, np.random.Generator):
        raise LabError(
            f"sign_flip of {n} differences draws its signs (more than {EXACT}); "
            f"pass rng=numpy.random.default_rng(seed), got {rng!r}"
        )
    signs = 2.0 * rng.integers(0, 2, size=(DRAWS, n), dtype=np.int8) - 1.0
    hits = np.count_nonzero(np.abs(signs @ values) >= abs(float(values.sum())) - tie)
    return (hits + 1) / (DRAWS + 1)


def smallest_p(n: int) -> float:
    """The least p that `sign_flip` of n differences can give: 2/2^n, or 1/20,000 when drawn."""
    return 2.0 ** (1 - n) if n <= EXACT else 1 / (DRAWS + 1)


def holm(p: ArrayLike) -> Array:
    """Holm's adjusted p-values, in the order given.

    Sorted p_(1) <= ... <= p_(m): adjusted p_(j) = max over l <= j of min(1, (m - l + 1) p_(l)).
    Rejecting those <= a errs anywhere with probability <= a under any dependence of the tests.
    Source: Holm (1979), Scand. J. Stat. 6:65-70.
    """
    raw = scores(p, "p")
    outside = raw[(raw < 0) | (raw > 1)]
    if len(outside):
        raise LabError(f"p holds {outside[0]}; p-values lie in [0, 1]")
    order = np.argsort(raw, kind="stable")
    steps = np.minimum(1.0, np.arange(len(raw), 0, -1) * raw[order])
    adjusted = np.empty_like(raw)
    adjusted[order] = np.maximum.accumulate(steps)
    return adjusted


def tost(d: ArrayLike, margin: float) -> float:
    """p of the two one-sided tests that the mean difference lies outside +-margin.

    max of P(T >= (mean + margin)/se) and P(T <= (mean - margin)/se), n - 1 degrees of freedom:
    p <= a exactly when the 1 - 2a interval lies inside +-margin. NaN for one pair; with se = 0 it
    is 0 for |mean| < margin and otherwise 1. Assumes nearly normal d. Source: Schuirmann (1987),
    J. Pharmacokinet. Biopharm. 15:657-680.
    """
    values = scores(d, "d")
    positive(margin, "margin")
    n, (mean, sd) = len(values), _moments(values)
    if n < 2:
        return math.nan
    se = sd / math.sqrt(n)
    if se <= TIE * margin:  # rounding of x - y, not spread
        return float(abs(mean) >= margin * (1 - TIE))
    return max(_tail((mean + margin) / se, n - 1), _tail((margin - mean) / se, n - 1))


def probability_of_improvement(
    x: ArrayLike, y: ArrayLike, rng: np.random.Generator | None = None, level: float = 0.95
) -> Interval:
    """Probability that a run of x beats a run of y, ties counting half.

    n^-2 sum_ij [1(x_i > y_j) + 1(x_i = y_j)/2] over *all* pairs i, j; for [n, tasks] the mean over
    tasks. With rng, the percentile bootstrap of runs, one index for both recipes and all tasks,
    marked approximate: at .95 it covers .69-.94 at n = 5, .88-.95 at 10 and .92-.96 at 20, for
    normal scores, by effect (0 to 1.5 sd) and pairing (rho 0 to .8). Without rng, no interval.
    Source: Agarwal et al. (2021), arXiv:2108.13264, section 4.
    """
    a, b = scores(x, "x", None), scores(y, "y", None)
    positive(level, "level", 1)
    if a.shape != b.shape or a.ndim not in (1, 2):
        raise LabError(f"x has shape {a.shape}, y {b.shape}; both [n] or both [n, tasks] was due")
    n = len(a)
    a, b = a.reshape(n, 1, -1), b.reshape(1, n, -1)
    wins = ((a > b) + 0.5 * (a == b)).mean(axis=2)  # [n, n]
    point, low, high = float(wins.mean()), math.nan, math.nan
    if rng is not None:
        index = rng.integers(0, n, size=(RESAMPLES, n)) + n * np.arange(RESAMPLES)[:, None]
        counts = np.bincount(index.ravel(), minlength=n * RESAMPLES).reshape(RESAMPLES, n)
        draws = ((counts @ wins) * counts).sum(axis=1) / n**2
        low, high = (float(q) for q in np.quantile(draws, [(1 - level) / 2, (1 + level) / 2]))
    return Interval(point, low, high, math.nan, n, level, approximate=True)


def _quantile_mean(x: Array, low: float, high: float) -> float:
    """Mean of the empirical quantile function over [low, high], edge values weighted by share."""
    ordered = np.sort(x, axis=None)
    cut = np.clip(np.arange(len(ordered) + 1) / len(ordered), low, high)
    first = ordered[0]
    return float(first + (ordered - first) @ np.diff(cut) / (high - low))


def iqm(x: ArrayLike) -> float:
    """Interquartile mean of scores of any shape, runs and tasks pooled.

    2 times the integral of the quantile function over [.25, .75]: edge values have fractional
    weight, so [0, 0, 9] gives 1.5, where a trimmed mean trims nothing and says 3. Robust against
    a quarter of runs on either side, and blind to them. Source: Agarwal et al. (2021).
    """
    return _quantile_mean(scores(x, "x", None), 0.25, 0.75)


def worst_quarter(x: ArrayLike) -> float:
    """Mean of the worst quarter of runs, higher scores being better.

    4 times the integral of the quantile function over [0, .25], with fractional edge weight: the
    expected shortfall at 25 %; the minimum for up to 4 runs. Source: Acerbi & Tasche (2002), J.
    Bank. Finance 26:1487-1503.
    """
    return _quantile_mean(scores(x), 0.0, 0.25)


def hodges_lehmann(d: ArrayLike) -> float:
    """Hodges-Lehmann shift: the median of all (d_i + d_j)/2 with i <= j.

    Estimates the centre of symmetrically distributed differences, little moved by one odd run.
    Source: Hodges & Lehmann (1963), Ann. Math. Stat. 34:598-611.
    """
    values = scores(d, "d")
    pairs = (values[:, None] + values) / 2
    return float(np.median(pairs[np.triu_indices(len(values))]))


def d_z(d: ArrayLike) -> float:
    """Mean difference in standard deviations of the difference, mean(d) / s.

    Grows with the pairing correlation, so it compares designs, not recipes. NaN for one pair or
    for d all 0; +-inf for equal differences that are not 0. Source: Cohen (1988), Statistical
    Power Analysis for the Behavioral Sciences, section 2.3.5.
    """
    mean, sd = _moments(scores(d, "d"))
    if sd == 0:
        return math.copysign(math.inf, mean) if mean else math.nan
    return mean / sd


def wilson(k: SupportsIndex, n: SupportsIndex, level: float = 0.95) -> Interval:
    """Share k/n of runs, such as those that failed, with Wilson's interval.

    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n): stays in [0, 1] and has a width at
    k = 0 and k = n. Assumes independent runs of one probability. Source: Wilson (1927), J. Am.
    Stat. Assoc. 22:209-212.
    """
    try:
        k, n = operator.index(k), operator.index(n)
    except TypeError as error:
        raise LabError(f"k is {k!r}, n is {n!r}; whole numbers of runs were due") from error
    positive(level, "level", 1)
    if not (0 <= k <= n and n >= 1):
        raise LabError(f"k is {k}, n is {n}; 0 <= k <= n and n >= 1 was due")
    z = float(special.ndtri((1 + level) / 2))
    p, scale = k / n, 1 + z**2 / n
    centre = (p + z**2 / (2 * n)) / scale
    half = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / scale
    low = 0.0 if k == 0 else centre - half
    high = 1.0 if k == n else centre + half
    return Interval(p, low, high, math.nan, n, level)


def fmt(value: float, width: float) -> str:
    """A value as text, with the digits that an interval of this width carries.

    The width keeps two significant digits: .058 wide gives three decimals, so .0412 prints as
    .041. At most six decimals; three where there is no width (0, NaN). No leading 0, no -.000.
    """
    if not math.isfinite(value):
        return str(value)
    known = math.isfinite(width) and width > 0
    decimals = min(6, max(0, 1 - math.floor(math.log10(width)))) if known else 3
    text = f"{value:.{decimals}f}"
    if float(text) == 0:
        text = text.lstrip("-")
    return text.replace("0.", ".", 1) if text.lstrip("-").startswith("0.") else text
