from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from cbdsl.util.student_t import tail

FREEDOMS = st.floats(0, 6).map(lambda power: 10**power)


@pytest.mark.parametrize(
    ("probability", "freedom", "table"),
    [
        (0.05, 1, 6.313751515),
        (0.025, 3, 3.182446305),
        (0.01, 5, 3.364929999),
        (1e-6, 5, 24.771029720516),
        (0.05, 10, 1.812461123),
        (0.001, 10, 4.143700494),
        (0.0005, 30, 3.645958635),
        (0.005, 120, 2.617421145),
        (0.00026895366266665, 740618.0342675191, 3.461147997114287),  # by scipy
    ],
)
def test_tails_are_those_of_tables(probability: float, freedom: float, table: float) -> None:
    assert tail(table, freedom) == pytest.approx(probability, rel=1e-7)
    assert tail(-table, freedom) == pytest.approx(1 - probability, abs=1e-9)


@pytest.mark.parametrize("t", [0.0, 1e-9, 0.3, 1.0, 1.7, 1.8, 25.0, 1e6, 1e20])
def test_one_and_two_degrees_of_freedom_have_closed_forms(t: float) -> None:
    assert tail(t, 1) == pytest.approx(math.atan2(1, t) / math.pi, rel=1e-13)
    root = math.sqrt(2 + t * t)
    assert tail(t, 2) == pytest.approx(1 / (root * (root + t)), rel=1e-13)  # (1 - t / root) / 2 without cancelling


@given(st.floats(0, 1e9), st.floats(1e-6, 1), FREEDOMS)
def test_a_larger_value_is_exceeded_more_rarely(t: float, step: float, freedom: float) -> None:
    assert tail(t * (1 + step) + step, freedom) <= tail(t, freedom)


def test_the_edges() -> None:
    assert tail(math.inf, 3) == 0
    assert tail(-math.inf, 3) == 1
    assert math.isnan(tail(math.nan, 3))
    assert math.isnan(tail(1, math.nan))


@pytest.mark.parametrize("freedom", [0.0, 0.99, -3.0, -math.inf, math.inf])
def test_less_than_one_degree_of_freedom_is_refused(freedom: float) -> None:
    with pytest.raises(ValueError, match=str(freedom)):
        tail(1.0, freedom)
