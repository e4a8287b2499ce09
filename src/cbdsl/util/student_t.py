"""Student's t distribution, which the guard needs on installations without scipy."""

from __future__ import annotations

import math

_TERMS = 10_000  # of the continued fraction; it takes about sqrt(freedom)


def tail(t: float, freedom: float) -> float:
    """Return P(T > t), to 8 digits or more for a freedom from 1 to 1e6; NaN if t or the freedom is NaN.

    >>> round(tail(6.313751515, 1), 6)
    0.05
    """
    if math.isnan(t) or math.isnan(freedom):
        return math.nan
    if not 1 <= freedom < math.inf:
        raise ValueError(f"The degrees of freedom are at least 1 and finite; given {freedom}.")
    if t < 0:
        return 1 - tail(-t, freedom)
    square = t / freedom * t
    x, y = 1 / (1 + square), square / (1 + square) if square < 1 else 1 / (1 + 1 / square)
    if x == 0:
        return 0.0
    if t * t > 3:  # each fraction where it converges fast
        return _incomplete_beta(freedom / 2, 0.5, x, y) / 2
    return 0.5 - _incomplete_beta(0.5, freedom / 2, y, x) / 2


def quantile(probability: float, freedom: float) -> float:
    """Return t with P(T <= t) = probability, for a probability above 0.5 and below 1.

    >>> round(quantile(0.975, 2), 6)
    4.302653
    """
    low, high = 0.0, 1.0
    while tail(high, freedom) > 1 - probability:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:  # until floats are dense
        low, high = (middle, high) if tail(middle, freedom) > 1 - probability else (low, middle)
    return high


def _incomplete_beta(a: float, b: float, x: float, y: float) -> float:
    """Return the regularised I_x(a, b), y = 1 - x, by its continued fraction (DiDonato and Morris, 1992, Eq. 9)."""
    log_front = a * math.log(x) + b * math.log(y) if x and y else -math.inf
    log_front += math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    value = c = _denominator(0, a, b, x, y)
    d = 0.0
    for m in range(1, _TERMS):  # Lentz's rule
        numerator = (a + m - 1) * (a + b + m - 1) * m * (b - m) * (x / (a + 2 * m - 1)) ** 2
        denominator = _denominator(m, a, b, x, y)
        d = 1 / (denominator + numerator * d)
        c = denominator + numerator / c
        value *= c * d
        if abs(c * d - 1) <= 2e-16:
            break
    return math.exp(log_front) / value


def _denominator(m: int, a: float, b: float, x: float, y: float) -> float:
    first = m + m * (b - m) * x / (a + 2 * m - 1) if m else 0.0
    return first + (a + m) * (a * y - b * x + 1 + m * (1 + y)) / (a + 2 * m + 1)
