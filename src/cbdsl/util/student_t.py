"""Student's t distribution: tail probability and quantile.

The tail is half of the regularised incomplete beta function I_x(freedom / 2, 1 / 2) at x = freedom / (freedom + t^2),
by its continued fraction (Abramowitz and Stegun 26.7.1; DiDonato and Morris 1992, Eq. 9). Both functions take any real
freedom of 1 or more and keep their relative accuracy in the far tail.
"""

from __future__ import annotations

import math
import sys

_NORMAL = 1e18  # from here on the distribution equals the normal one in floating point
_DIRECT = 100.0  # up to here the gamma function itself is used, beyond it the series of a ratio
_SERIES = (1.0, -1 / 8, 1 / 128, 5 / 1024, -21 / 32768, -399 / 262144, 869 / 4194304)


def tail(t: float, freedom: float) -> float:
    """Return P(T > t), to about 12 digits; NaN if t or the freedom is NaN."""
    if math.isnan(t) or math.isnan(freedom):
        return math.nan
    _check(freedom)
    if t < 0:
        return 1 - tail(-t, freedom)
    if t == 0 or math.isinf(t):
        return 0.0 if t else 0.5
    if freedom >= _NORMAL:
        return math.erfc(t / math.sqrt(2)) / 2
    half, square = freedom / 2, _square(t, freedom)
    x, y = 1 / (1 + square), square / (1 + square) if square < 1 else 1 / (1 + 1 / square)
    common = math.exp(-half * _log_stretch(t, freedom)) * math.sqrt(y) * _gamma_ratio(half) / math.sqrt(math.pi)
    if t * t > 3:  # each fraction where it converges fast: x below (a + 1) / (a + b + 2)
        return common * _fraction(half, 0.5, x, y) / 2
    return 0.5 - common * _fraction(0.5, half, y, x) / 2


def quantile(tail_probability: float, freedom: float) -> float:
    """Return the t that is exceeded with a probability between 0 and 1; NaN if either number is NaN."""
    if math.isnan(tail_probability) or math.isnan(freedom):
        return math.nan
    _check(freedom)
    if not 0 < tail_probability < 1:
        raise ValueError(f"A tail probability lies between 0 and 1; given {tail_probability}.")
    if tail_probability >= 0.5:
        return -quantile(1 - tail_probability, freedom) if tail_probability > 0.5 else 0.0
    low = (0.5 - tail_probability) / math.exp(_log_density(0.0, freedom))  # the tail is convex: it is no smaller
    high = max(2.0, 2 * low)
    while tail(high, freedom) > tail_probability:
        if high == sys.float_info.max:
            return math.inf  # no float is exceeded so rarely
        low, high = high, min(high * high, sys.float_info.max)
    t = low
    for _ in range(200):  # Newton's rule on the logarithms, or halving where it leaves the bracket
        found = tail(t, freedom)
        low, high = (t, high) if found > tail_probability else (low, t)
        better = t * math.exp(_newton(t, found, tail_probability, freedom))
        if not low <= better <= high:
            better = math.sqrt(low) * math.sqrt(high)
        if abs(better - t) <= 1e-9 * t:  # the next step would be shorter than a float can tell
            return better
        t = better
    return t


def _newton(t: float, found: float, wanted: float, freedom: float) -> float:
    """Return the Newton step of log t to the root of log tail; NaN where the tail underflows."""
    if found == 0:
        return math.nan
    inverse_slope = math.exp(math.log(found) - math.log(t) - _log_density(t, freedom))
    return min((math.log(found) - math.log(wanted)) * inverse_slope, 700.0)


def _log_density(t: float, freedom: float) -> float:
    if freedom >= _NORMAL:
        return -t * t / 2 - math.log(2 * math.pi) / 2
    scale = _gamma_ratio(freedom / 2) / math.sqrt(math.pi * freedom)
    return math.log(scale) - (freedom + 1) / 2 * _log_stretch(t, freedom)


def _square(t: float, freedom: float) -> float:
    """t^2 / freedom, or infinity where that overflows."""
    return t / freedom * t


def _log_stretch(t: float, freedom: float) -> float:
    """log(1 + t^2 / freedom), also where the square overflows."""
    square = _square(t, freedom)
    return math.log1p(square) if square < 1e18 else 2 * math.log(t) - math.log(freedom)


def _gamma_ratio(z: float) -> float:
    """Gamma(z + 1/2) / Gamma(z)."""
    if z <= _DIRECT:
        return math.gamma(z + 0.5) / math.gamma(z)
    return math.sqrt(z) * sum(term / z**power for power, term in enumerate(_SERIES))


def _fraction(a: float, b: float, x: float, y: float) -> float:
    """I_x(a, b) B(a, b) / (x^a y^b) with y = 1 - x, by Lentz's rule."""
    value = c = _denominator(0, a, b, x, y)
    d = 0.0
    for m in range(1, 1000):
        numerator = (a + m - 1) * (a + b + m - 1) * m * (b - m) * (x / (a + 2 * m - 1)) ** 2
        denominator = _denominator(m, a, b, x, y)
        d = 1 / (denominator + numerator * d)
        c = denominator + numerator / c
        value *= c * d
        if abs(c * d - 1) <= 2e-16:
            break
    return 1 / value


def _denominator(m: int, a: float, b: float, x: float, y: float) -> float:
    first = m + m * (b - m) * x / (a + 2 * m - 1) if m else 0.0
    return first + (a + m) * (a * y - b * x + 1 + m * (1 + y)) / (a + 2 * m + 1)


def _check(freedom: float) -> None:
    if not freedom >= 1:
        raise ValueError(f"Student's distribution is computed from 1 degree of freedom on; given {freedom}.")
