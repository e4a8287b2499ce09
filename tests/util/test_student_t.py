from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbdsl.util.student_t import quantile, tail

FREEDOMS = st.floats(0, 12).map(lambda power: 10**power)


@pytest.mark.parametrize(
    ("probability", "freedom", "table"),
    [
        (0.05, 1, 6.313751515),
        (0.05, 2, 2.919985580),
        (0.025, 3, 3.182446305),
        (0.01, 5, 3.364929999),
        (0.05, 10, 1.812461123),
        (0.001, 10, 4.143700494),
        (0.0005, 30, 3.645958635),
        (0.005, 120, 2.617421145),
        (1e-6, math.inf, 4.753424309),
    ],
)
def test_tables(probability: float, freedom: float, table: float) -> None:
    assert quantile(probability, freedom) == pytest.approx(table, abs=1e-8)
    assert tail(table, freedom) == pytest.approx(probability, rel=1e-7)
    assert tail(-table, freedom) == pytest.approx(1 - probability, abs=1e-9)


@pytest.mark.parametrize("t", [0.0, 1e-9, 0.3, 1.0, 1.7, 1.8, 25.0, 1e6, 1e20])
def test_one_degree_of_freedom_is_cauchys(t: float) -> None:
    assert tail(t, 1) == pytest.approx(math.atan2(1, t) / math.pi, rel=1e-13)


@pytest.mark.parametrize("t", [0.0, 1e-9, 0.3, 1.0, 1.7, 1.8, 25.0, 1e6, 1e20])
def test_two_degrees_of_freedom_are_algebraic(t: float) -> None:
    root = math.sqrt(2 + t * t)
    assert tail(t, 2) == pytest.approx(1 / (root * (root + t)), rel=1e-13)  # (1 - t / root) / 2 without cancelling


@pytest.mark.parametrize("t", [0.1, 1.0, 1.7, 1.8, 3.0])
def test_four_degrees_of_freedom_are_algebraic(t: float) -> None:
    sine = t / math.sqrt(4 + t * t)
    assert tail(t, 4) == pytest.approx(0.5 - sine * (1 + (1 - sine**2) / 2) / 2, abs=1e-14)


@pytest.mark.parametrize("probability", [0.4, 0.05, 1e-6, 1e-100, 1e-300])
def test_far_out_the_closed_forms_hold_too(probability: float) -> None:
    assert quantile(probability, 1) == pytest.approx(1 / math.tan(math.pi * probability), rel=1e-12)
    # 2 p = 1 - t / sqrt(2 + t^2), so t = (1 - 2 p) / sqrt(2 p (1 - p))
    algebraic = (1 - 2 * probability) / math.sqrt(2 * probability * (1 - probability))
    assert quantile(probability, 2) == pytest.approx(algebraic, rel=1e-12)


def test_few_degrees_of_freedom_far_out() -> None:
    # At 5 degrees P(T > t) = 1/2 - (a + sin a cos a (1 + 2/3 cos^2 a)) / pi with tan a = t / sqrt(5).
    t = quantile(1e-6, 5)
    assert t == pytest.approx(24.771029720516, rel=1e-12)  # a series in 1 / freedom gives 23.06
    angle = math.atan(t / math.sqrt(5))
    sine, cosine = math.sin(angle), math.cos(angle)
    closed = 0.5 - (angle + sine * cosine * (1 + 2 / 3 * cosine**2)) / math.pi
    assert closed == pytest.approx(1e-6, abs=1e-15)


@pytest.mark.parametrize("t", [0.5, 1.7, 1.8, 5.0, 20.0, 37.0])
def test_many_degrees_of_freedom_are_the_normal_distribution(t: float) -> None:
    normal = math.erfc(t / math.sqrt(2)) / 2
    assert tail(t, math.inf) == tail(t, 1e300) == normal
    # To first order in 1 / freedom P(T > t) is the normal tail and (t^3 + t) phi(t) / (4 freedom).
    first = (t**3 + t) * math.exp(-t * t / 2) / math.sqrt(2 * math.pi) / 4
    assert tail(t, 1e12) == pytest.approx(normal + first / 1e12, rel=2e-13)
    assert tail(t, 0.99e18) == pytest.approx(normal, rel=1e-12)


@pytest.mark.parametrize("freedom", [200.0, 1e18])
@pytest.mark.parametrize("t", [1.0, 10.0])
def test_formulas_meet_where_one_takes_over_from_the_other(t: float, freedom: float) -> None:
    below, above = tail(t, math.nextafter(freedom, 0)), tail(t, math.nextafter(freedom, math.inf))
    assert below == pytest.approx(above, rel=1e-12)


@given(st.floats(-300, math.log10(0.5)), FREEDOMS)
def test_the_quantile_is_the_inverse_of_the_tail(power: float, freedom: float) -> None:
    probability = min(10**power, 0.5)
    assert tail(quantile(probability, freedom), freedom) == pytest.approx(probability, rel=1e-12)


@given(st.floats(1e-12, 1 - 1e-12), FREEDOMS)
def test_the_distribution_is_symmetric(probability: float, freedom: float) -> None:
    t = quantile(probability, freedom)
    assert tail(t, freedom) == pytest.approx(probability, rel=1e-11)
    assert tail(t, freedom) + tail(-t, freedom) == pytest.approx(1, abs=1e-15)


@given(st.floats(0, 1e9), st.floats(1e-6, 1), FREEDOMS)
def test_a_larger_value_is_exceeded_more_rarely(t: float, step: float, freedom: float) -> None:
    assert tail(t * (1 + step) + step, freedom) <= tail(t, freedom)


@given(st.floats(2, 30), FREEDOMS)
def test_more_degrees_of_freedom_mean_lighter_tails(t: float, freedom: float) -> None:
    assert tail(t, 1.01 * freedom) <= tail(t, freedom) * (1 + 1e-12)


def test_the_edges() -> None:
    assert quantile(0.5, 3) == 0
    assert tail(math.inf, 3) == 0
    assert tail(-math.inf, 3) == 1
    assert quantile(1e-320, 1) == math.inf  # beyond the largest float
    assert math.isnan(tail(math.nan, 3))
    assert math.isnan(tail(1, math.nan))
    assert math.isnan(quantile(0.01, math.nan))
    assert math.isnan(quantile(math.nan, 3))


@pytest.mark.parametrize("freedom", [0.0, 0.99, -3.0, -math.inf])
def test_less_than_one_degree_of_freedom_is_refused(freedom: float) -> None:
    with pytest.raises(ValueError, match="from 1 degree of freedom on"):
        tail(1.0, freedom)
    with pytest.raises(ValueError, match="from 1 degree of freedom on"):
        quantile(0.05, freedom)


@pytest.mark.parametrize("probability", [0.0, 1.0, -0.1, 1.5])
def test_a_probability_that_is_none_is_refused(probability: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        quantile(probability, 3)
