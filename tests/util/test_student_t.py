from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import stdtr

from cbdsl.util.student_t import tail

FREEDOMS = st.floats(0, 6).map(lambda power: 10**power)


@given(st.floats(-3, 3), FREEDOMS)
def test_tails_are_those_of_scipy(power: float, freedom: float) -> None:
    t = 10**power
    assert tail(t, freedom) == pytest.approx(float(stdtr(freedom, -t)), rel=1e-7, abs=1e-300)
    assert tail(t, freedom) + tail(-t, freedom) == pytest.approx(1, abs=1e-15)


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
