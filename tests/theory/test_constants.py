from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cbdsl.theory.constants import (
    Alignment,
    DirectionBounds,
    ValueRange,
    align,
    curvatures,
    join_blocks,
    norms,
    secants,
)


def test_cosine_ratio_and_product_by_hand() -> None:
    found = align(np.array([[3.0, 4.0]]), np.array([[0.0, -2.0]]))  # -grad F = (0, 2)
    assert found.cosine == pytest.approx([0.8])
    assert found.ratio == pytest.approx([2.5])
    assert found.product == pytest.approx([2.0])


def test_a_step_along_minus_the_gradient_has_cosine_one() -> None:
    gradient = np.array([[1.0, 2.0, -2.0]])
    assert align(-0.1 * gradient, gradient).cosine == pytest.approx([1.0])
    assert align(0.1 * gradient, gradient).cosine == pytest.approx([-1.0])


def test_a_zero_vector_has_no_direction_but_a_product_of_zero() -> None:
    found = align(np.zeros((1, 2)), np.array([[1.0, 0.0]]))
    assert np.isnan(found.cosine).all()
    assert np.isnan(found.ratio).all()
    assert found.product == [0.0]


def test_where_the_gradient_vanishes_nothing_is_defined() -> None:
    found = align(np.ones((1, 2)), np.zeros((1, 2)))
    assert all(np.isnan(values).all() for values in vars(found).values())


def test_the_extremes_of_a_product_are_not_the_products_of_the_extremes() -> None:
    seen = align(np.array([[-1.0, 0.0], [-3.0, 0.0], [2.0, 0.0]]), np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]))
    bounds = DirectionBounds.of([seen])
    assert bounds.cosine == ValueRange(-1.0, 1.0)
    assert bounds.ratio == ValueRange(1.0, 3.0)
    assert bounds.product == ValueRange(-2.0, 3.0)  # not -1 * 1, which is what the proof of Theorem 1 writes


def test_secants_and_curvatures_of_a_bowl_are_its_steepness() -> None:
    before, after = np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([[0.5, 1.0], [3.0, -1.0]])
    change = after - before
    assert secants(4.0 * change, change) == pytest.approx([4.0, 4.0])
    loss_change = 2.0 * (norms(after) ** 2 - norms(before) ** 2)
    assert curvatures(loss_change, 4.0 * before, change) == pytest.approx([4.0, 4.0])


def test_the_range_of_nothing_is_not_a_number() -> None:
    assert np.isnan(ValueRange.of([]).low)
    assert np.isnan(ValueRange.of([np.array([np.nan])]).high)
    assert ValueRange.of([np.array([np.nan, 2.0]), np.array([1.0])]) == ValueRange(1.0, 2.0)


def test_blocks_of_workers_are_joined_in_order() -> None:
    rows = np.arange(12.0).reshape(6, 2) + 1
    parts = [align(rows[part], rows[part] - 3) for part in (slice(0, 2), slice(2, 3), slice(3, 6))]
    whole = align(rows, rows - 3)
    assert isinstance(join_blocks(parts), Alignment)
    np.testing.assert_array_equal(join_blocks(parts).product, whole.product)


vectors = st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=3, max_size=3)


@given(vectors, vectors, st.floats(0.01, 100))
def test_the_product_is_cosine_times_ratio_and_scales_with_the_direction(
    direction: list[float], gradient: list[float], scale: float
) -> None:
    v, g = np.array([direction]), np.array([gradient])
    if norms(v)[0] < 1e-6 or norms(g)[0] < 1e-6:
        return
    found, scaled = align(v, g), align(scale * v, g)
    assert -1 <= found.cosine[0] <= 1
    assert found.product == pytest.approx(found.cosine * found.ratio, rel=1e-9, abs=1e-9 * found.ratio[0])
    assert scaled.cosine == pytest.approx(found.cosine, abs=1e-12)
    assert scaled.ratio == pytest.approx(scale * found.ratio)
