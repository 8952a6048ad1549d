"""How many runs a question needs.

All of it is for paired differences d of standard deviation sd, n of them, nearly normal. The
t-test's power stands in for that of `lab.stats.sign_flip`, which has no closed form and is weaker
where its steps are coarse: for 6 pairs and an effect of 1.5 sd, .66 in place of .83.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import special, stats  # type: ignore[import-untyped]  # ships no types

from lab.errors import LabError
from lab.stats import EXACT, LARGEST, Array, positive, smallest_p

#: Beyond this the t-distribution is normal for every purpose of planning.
LARGE = 100_000


def _spread(sd: float) -> float:
    if not 0 <= sd < LARGEST:
        raise LabError(f"sd is {sd}; a finite number, at least 0, was due")
    return float(sd)


def paired_sd(sd_x: float, sd_y: float, rho: float) -> float:
    """Standard deviation of d = x - y.

    sqrt(sd_x^2 + sd_y^2 - 2 rho sd_x sd_y), rho the correlation of the pairs. Source: the
    variance of a difference.
    """
    a, b = _spread(sd_x), _spread(sd_y)
    if not -1 <= rho <= 1:
        raise LabError(f"rho is {rho}; a correlation in [-1, 1] was due")
    # the square of a - b, rather than a^2 + b^2 - 2ab, is exactly 0 for a = b
    return math.sqrt((a - b) ** 2 + 2 * (1 - rho) * a * b)


def power_paired(effect: float, sd: float, n: int, alpha: float = 0.05) -> float:
    """Power of the two-sided paired t-test at a true mean difference.

    P(|T| > t_{1-a/2, n-1}), T noncentral with delta = effect sqrt(n)/sd. The wrong-sided tail is
    dropped where `scipy.stats.nct.cdf` is NaN, far out, where it is 0 to all digits. Assumes
    normal d. Source: Owen (1965), Biometrika 52:437-446.
    """
    positive(sd, "sd")
    positive(alpha, "alpha", 1)
    if n < 2 or not abs(effect) < LARGEST:
        raise LabError(f"effect is {effect}, n is {n}; a finite effect and n >= 2 were due")
    df, shift = n - 1, abs(effect) / sd * math.sqrt(n)
    t = float(special.stdtrit(df, 1 - alpha / 2))
    right = float(stats.nct.sf(t, df, shift))
    wrong = float(stats.nct.cdf(-t, df, shift))
    return right if math.isnan(wrong) else right + wrong


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(100)


def _chi(s: Array, df: int) -> Array:
    """Density of s = sqrt(chi^2 / df), the sample deviation of a unit normal."""
    half = df / 2
    log = math.log(2) + half * math.log(half) - special.gammaln(half)
    return np.asarray(np.exp(log + (df - 1) * np.log(s) - half * s**2))


def power_equivalence(margin: float, sd: float, n: int, alpha: float = 0.05) -> float:
    """Power of the two one-sided tests (`lab.stats.tost`) when the true difference is 0.

    Exact: given the sample deviation s both tests pass when |mean d| <= margin - t_{1-a, n-1}
    s/sqrt(n), of probability 2 Phi(margin sqrt(n)/sd - t s/sd) - 1; that is integrated over the
    chi distribution of s by Gauss-Legendre. Assumes normal d. Source: Phillips (1990), J.
    Pharmacokinet. Biopharm. 18:137-144.
    """
    positive(margin, "margin")
    positive(sd, "sd")
    positive(alpha, "alpha", 0.5)
    if n < 2:
        raise LabError(f"n is {n}; at least 2 was due")
    df, shift = n - 1, margin / sd * math.sqrt(n)
    t = float(special.stdtrit(df, 1 - alpha))
    # the density outside these quantiles is below 1e-16; above shift/t no sample passes
    low = math.sqrt(2 * float(special.gammaincinv(df / 2, 1e-16)) / df)
    high = min(shift / t, math.sqrt(float(special.chdtri(df, 1e-16)) / df))
    if high <= low:
        return 0.0
    s = low + (high - low) * (_NODES + 1) / 2
    inside = 2 * special.ndtr(shift - t * s) - 1
    return float((high - low) / 2 * (_WEIGHTS @ (inside * _chi(s, df))))


def _least(start: float, power_at: Callable[[int], float], power: float) -> int:
    """The least n >= 2 with that power, sought from a normal approximation on."""
    if start > LARGE:
        return math.ceil(start)
    n = max(2, math.ceil(start))
    while power_at(n) < power:
        n += 1
    while n > 2 and power_at(n - 1) >= power:
        n -= 1
    return n


def seeds_for_difference(margin: float, sd: float, alpha: float = 0.05, power: float = 0.8) -> int:
    """Least n for that power at a true difference of `margin`, the smallest that matters.

    The least n >= 2 with `power_paired` >= power (the normal formula beyond 100,000). `sd` may be
    an observed one; the effect never is: power at an observed effect only restates its p-value
    (Hoenig & Heisey 2001, Am. Stat. 55:19-24). For m contrasts give alpha / m.
    """
    positive(margin, "margin")
    positive(alpha, "alpha", 1)
    positive(power, "power", 1)
    if _spread(sd) == 0:
        return 2
    z = float(special.ndtri(1 - alpha / 2) + special.ndtri(power))
    start = (max(z, 0.0) * sd / margin) ** 2
    return _least(start, lambda n: power_paired(margin, sd, n, alpha), power)


def seeds_for_equivalence(margin: float, sd: float, alpha: float = 0.05, power: float = 0.8) -> int:
    """Least n to show equivalence within +-margin with that power, at a true difference of 0.

    The least n >= 2 with `power_equivalence` >= power (the normal formula beyond 100,000). For m
    contrasts give alpha / m. A true difference that is not 0 needs more.
    """
    positive(margin, "margin")
    positive(alpha, "alpha", 0.5)
    positive(power, "power", 1)
    if _spread(sd) == 0:
        return 2
    z = float(special.ndtri(1 - alpha) + special.ndtri((1 + power) / 2))
    return _least((z * sd / margin) ** 2, lambda n: power_equivalence(margin, sd, n, alpha), power)


def least_seeds(contrasts: int, alpha: float = 0.05) -> int:
    """Least n at which the sign-flip test can reach alpha for the first of m contrasts at all.

    The least n with 2/2^n <= alpha / m: 6 for one contrast at .05, 7 for 2-3, 8 for 4-6. With
    fewer no data whatever is significant after Holm's adjustment.
    """
    positive(alpha, "alpha", 1)
    if contrasts < 1:
        raise LabError(f"contrasts is {contrasts}; at least 1 was due")
    for n in range(2, EXACT + 1):
        if smallest_p(n) <= alpha / contrasts:
            return n
    raise LabError(
        f"alpha {alpha:g} over {contrasts} contrasts lies below {smallest_p(EXACT):.2g}, the "
        "smallest p of the sign-flip test; declare fewer contrasts or a larger alpha"
    )
