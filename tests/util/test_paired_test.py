from __future__ import annotations

import math

import numpy as np
import pytest

from cbdsl.util.paired_test import PairedTest, least_exact_p
from cbdsl.util.student_t import quantile, tail

DIFFERENCES = ([0.02, 0.03, 0.04], [1.0, -0.5, 2.0, 0.3, 0.1], [-3.0, -1.0], [0.1, 0.2, -0.15, 0.4, 0.3, 0.25, 0.05])


@pytest.mark.parametrize("differences", DIFFERENCES)
def test_it_agrees_with_scipy(differences: list[float]) -> None:
    stats = pytest.importorskip("scipy.stats")
    found, known = PairedTest.of(differences), stats.ttest_1samp(differences, 0.0)
    assert found.p == pytest.approx(known.pvalue, rel=1e-9)
    assert (found.low, found.high) == pytest.approx(tuple(known.confidence_interval(0.95)), rel=1e-9)
    exact = stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert found.exact_p == pytest.approx(exact.pvalue)
    assert found.above == pytest.approx(stats.ttest_1samp(differences, 0.0, alternative="greater").pvalue)


def test_three_seeds_that_agree_cannot_be_significant_by_the_exact_test() -> None:
    found = PairedTest.of([0.02, 0.03, 0.04])
    assert found.exact_p == least_exact_p(3) == 0.25
    assert found.p < 0.05
    assert next(count for count in range(2, 9) if least_exact_p(count) < 0.05) == 6


def test_equal_differences_leave_no_doubt() -> None:
    assert (PairedTest.of([0.5, 0.5]).p, PairedTest.of([0.0, 0.0]).p) == (0.0, 1.0)
    assert PairedTest.of([0.5, 0.5]).low == PairedTest.of([0.5, 0.5]).high == 0.5
    assert PairedTest.of([0.0, 0.0]).exact_p == 1.0


def test_many_pairs_have_no_exact_test() -> None:
    assert PairedTest.of([1.0 + 0.1 * each for each in range(17)]).exact_p is None


@pytest.mark.parametrize("freedom", [1, 2, 9, 100])
def test_a_quantile_inverts_the_tail(freedom: int) -> None:
    for probability in (0.6, 0.95, 0.975, 0.9999):
        assert math.isclose(tail(quantile(probability, freedom), freedom), 1 - probability, rel_tol=1e-7)
