"""Tests of paired differences: the paired t-test, and the exact sign-flip permutation test."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from cbdsl.util.student_t import quantile, tail

CONFIDENCE = 0.95
MOST_FLIPPED = 16  # differences whose signs are flipped in all ways


@dataclass(frozen=True)
class PairedTest:
    """The paired tests of differences, one per seed. Both p-values are two-sided.

    >>> test = PairedTest.of([0.02, 0.03, 0.04])
    >>> f"{test.mean:.3f} in {test.low:.3f} to {test.high:.3f}, p = {test.p:.4f}, exact p = {test.exact_p}"
    '0.030 in 0.005 to 0.055, p = 0.0351, exact p = 0.25'
    """

    count: int
    mean: float
    deviation: float  # sample standard deviation
    low: float  # of the 95 % confidence interval of the mean, by Student's t
    high: float
    p: float  # of the paired t-test, which takes differences to be normal
    above: float  # the same one-sided: small if the mean is above zero
    exact_p: float | None  # of the sign-flip test; never less than 2 / 2^n; None for more than 16 differences

    @staticmethod
    def of(differences: Sequence[float]) -> PairedTest:
        """Test two or more finite differences."""
        count, mean, deviation = len(differences), fmean(differences), stdev(differences)
        error = deviation / math.sqrt(count)
        if error:
            above = tail(mean / error, count - 1)
            p = 2 * tail(abs(mean) / error, count - 1)
            half = error * quantile((1 + CONFIDENCE) / 2, count - 1)
        else:
            above, p, half = float(mean <= 0), float(mean == 0), 0.0
        return PairedTest(count, mean, deviation, mean - half, mean + half, p, above, _flip_signs(differences))


def least_exact_p(count: int) -> float:
    """Return the lowest p-value that the sign-flip test can give for `count` differences."""
    return 2.0 ** (1 - count)


def _flip_signs(differences: Sequence[float]) -> float | None:
    """Return the share of all sign patterns whose sum is at least as far from 0 as the sum that was found."""
    if len(differences) > MOST_FLIPPED:
        return None
    first, *others = differences  # patterns that begin with a minus mirror these
    found = abs(math.fsum(differences)) * (1 - 1e-12)
    patterns = itertools.product((1, -1), repeat=len(others))
    sums = [abs(math.fsum((first, *(s * d for s, d in zip(signs, others, strict=True))))) for signs in patterns]
    return sum(each >= found for each in sums) / len(sums)
