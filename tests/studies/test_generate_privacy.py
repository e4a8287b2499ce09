"""Measures of privacy: what copies look like, what strangers look like, and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from cbdsl.arrays import Floats
from cbdsl.studies.generate import measure_privacy, membership, nearest


def cloud(count: int, seed: int) -> Floats:
    return np.random.default_rng(seed).normal(size=(count, 6)).astype(np.float32)


def test_the_nearest_is_found() -> None:
    rows = np.array([[0.0, 0.0], [3.0, 4.0]], np.float32)
    others = np.array([[0.0, 2.0], [3.0, 4.0]], np.float32)
    assert nearest(rows, others) == pytest.approx([np.sqrt(2.0), 0.0], abs=1e-3)


@pytest.mark.parametrize("middle", [0.0, 100.0, -1e4])
def test_a_copy_is_at_0_however_far_features_are_from_it(middle: float) -> None:
    rows = cloud(1200, 1) + np.float32(middle)
    assert nearest(rows, rows).max() == 0.0
    step = np.float32(0.25)
    assert nearest(rows + step, rows).max() <= step * 1.01


def test_the_nearest_of_many_is_that_of_all_pairs() -> None:
    rows, others = cloud(700, 1) * np.array([1, 1, 1, 1, 1, 1000], np.float32), cloud(1300, 2)
    pairs = np.square(rows[:, None].astype(np.float64) - others).mean(2)
    assert nearest(rows, others) == pytest.approx(np.sqrt(pairs.min(1)), rel=1e-6)


def test_copies_are_found_out() -> None:
    members, unseen = cloud(400, 1), cloud(400, 2)
    found = measure_privacy(members + 0.01, members, unseen, (np.zeros(400), np.ones(400)))
    assert found.closer_to_members > 0.95
    assert found.by_samples.advantage > 0.9
    assert found.by_generator.area == 1.0
    assert found.generated_to_members.median < found.unseen_to_members.lowest


def test_strangers_are_not() -> None:
    members, unseen = cloud(2000, 1), cloud(2000, 2)
    losses = np.random.default_rng(4).normal(size=(2, 2000))
    found = measure_privacy(cloud(1000, 3), members, unseen, (losses[0], losses[1]))
    assert abs(found.closer_to_members - 0.5) < 4 * found.closer_error
    for test in (found.by_samples, found.by_generator):
        assert abs(test.area - 0.5) < 4 * test.area_error
        assert abs(test.advantage) < 4 * test.advantage_error


def test_the_area_counts_pairs_and_ties_count_half() -> None:
    assert membership(np.array([1.0, 2.0]), np.array([0.0, 1.0])).area == pytest.approx((1 + 0.5 + 1 + 1) / 4)
