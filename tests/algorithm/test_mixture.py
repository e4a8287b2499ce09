from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from cbdsl.algorithm.mixture import go_towards, mix_steps, turn_disputed
from cbdsl.arrays import Doubles


def distance_to(*goal: float):  # type: ignore[no-untyped-def] # noqa: ANN201
    """The loss is the squared distance of a step from a goal."""
    return lambda step: float(np.square(step - np.array(goal)).sum())


def test_without_a_loss_all_count_equally_at_the_median_length() -> None:
    found = mix_steps(np.array([[1.0, 0], [0, 3], [-10, 0]]), 2, None)
    np.testing.assert_allclose(found.weights, [1 / 3] * 3)
    np.testing.assert_allclose(found.step, [0, 1])  # the first and the last cancel, whatever their lengths


def test_what_helps_has_the_weight_up_to_the_cap() -> None:
    steps = np.array([[1.0, 0], [0, 1], [-1, 0], [0, -1]])
    found = mix_steps(steps, 2, distance_to(1, 1))
    np.testing.assert_allclose(found.weights, [0.5, 0.5, 0, 0])
    np.testing.assert_allclose(found.step, [0.5, 0.5])


def test_nobody_has_more_than_the_cap_however_much_it_would_help() -> None:
    steps = np.array([[1.0, 0], *[[0, 1.0]] * 5])
    found = mix_steps(steps, 3, distance_to(1, 0))
    assert found.weights.max() <= 1 / 3 + 1e-12
    assert found.step[0] == pytest.approx(1 / 3)


@pytest.mark.parametrize(("goal", "length"), [(9.0, 4.0), (0.1, 1.0), (2.2, 2.0)])
def test_the_length_is_the_quartile_that_does_best(goal: float, length: float) -> None:
    steps = np.array([[1.0, 0], [1, 0], [2, 0], [4, 0], [4, 0]])
    assert mix_steps(steps, 2, distance_to(goal, 0)).step[0] == pytest.approx(length)


def test_what_makes_the_loss_not_a_number_has_no_weight() -> None:
    steps = np.array([[1.0, 0], [1, 0.1], [0, 1]])

    def loss(step: Doubles) -> float:
        return float("nan") if step[1] > 0.5 else -step[0]

    assert mix_steps(steps, 1, loss).weights[2] < 1e-9
    assert np.isfinite(mix_steps(steps, 1, lambda _: float("nan")).step).all()


@given(arrays(np.float64, (6, 3), elements=st.floats(-9, 9)), st.integers(1, 6), st.integers(0, 99))
def test_the_mixture_is_never_worse_than_the_mean_and_within_its_limits(steps: Doubles, q: int, seed: int) -> None:
    loss = distance_to(*np.random.default_rng(seed).normal(size=3))
    found = mix_steps(steps, q, loss)
    assert (found.weights >= 0).all()
    assert found.weights.max() <= max(1 / q, 1 / 6) + 1e-12
    assert found.weights.sum() <= 1 + 1e-12
    assert np.linalg.norm(found.step) <= np.quantile(np.linalg.norm(steps, axis=1), 0.75) + 1e-9
    assert loss(found.step) <= loss(mix_steps(steps, q, None).step) + 1e-12


def test_weights_on_whose_sign_the_uploads_disagree_are_turned_round() -> None:
    steps = np.array([[1.0, 1, 1, -1, 0], [2, 2, -1, -2, 0], [3, 3, -1, -3, 1], [4, -4, 2, -4, 0]])
    turned = turn_disputed(steps, 0.5)  # mean signs: 1, 1/2, 0, -1, 1/4
    np.testing.assert_array_equal(turned, steps * [1, 1, -1, 1, -1])


def test_as_far_towards_as_the_loss_falls() -> None:
    start, end = np.zeros(2), np.array([4.0, 0])
    assert [go_towards(start, end, distance_to(goal, 0))[0] for goal in (-1, 1.1, 9)] == [0, 1, 4]
