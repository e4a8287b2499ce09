from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cbdsl.algorithm.particles import (
    Coefficients,
    Particles,
    inertia_at,
    move_particles,
    remember,
    swarm_terms,
)
from cbdsl.algorithm.worker_round import initial_particles


def floats(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float32)


# One worker of two parameters: w = (1, 2), v = (0.5, -1), w^p = (3, 2), w^g = (1, 6).
WORKER = Particles(floats([1, 2]), floats([0.5, -1]), floats([3, 2]), np.array([0.7]))
GLOBAL_BEST = np.array([1, 6], dtype=np.float32)
HALF_QUARTER = Coefficients(0.5, floats([0.5]), floats([0.25]))  # c0 = 0.5, c1 = 0.5, c2 = 0.25
# c0 v = (0.25, -0.5); c1 (w^p - w) = (1, 0); c2 (w^g - w) = (0, 1): together (1.25, 0.5).


def downhill(start: np.ndarray) -> np.ndarray:
    """SGD whose displacement is -(0.1) w, so that it matters where it starts."""
    return np.asarray(start * np.float32(0.9))


def test_the_three_swarm_terms_by_hand() -> None:
    np.testing.assert_allclose(swarm_terms(WORKER, GLOBAL_BEST, HALF_QUARTER), [[1.25, 0.5]])


def test_the_printed_equation_adds_the_displacement_of_sgd_from_the_current_position() -> None:
    after, velocity = move_particles(WORKER, GLOBAL_BEST, HALF_QUARTER, downhill, "current", "full")
    np.testing.assert_allclose(after, [[1 + 1.25 - 0.1, 2 + 0.5 - 0.2]], rtol=1e-6)
    np.testing.assert_allclose(velocity, [[1.15, 0.3]], rtol=1e-6)  # w_{t+1} - w_t


def test_the_published_script_trains_after_the_swarm_move() -> None:
    after, velocity = move_particles(WORKER, GLOBAL_BEST, HALF_QUARTER, downhill, "moved", "swarm")
    np.testing.assert_allclose(after, [[0.9 * 2.25, 0.9 * 2.5]], rtol=1e-6)
    np.testing.assert_allclose(velocity, [[1.25, 0.5]], rtol=1e-6)  # the swarm terms alone


def test_coefficients_may_differ_by_parameter() -> None:
    each = Coefficients(0.0, floats([1, 0]), floats([0, 0.5]))
    np.testing.assert_allclose(swarm_terms(WORKER, GLOBAL_BEST, each), [[2, 2]])


def test_moving_leaves_the_particles_as_they_were() -> None:
    move_particles(WORKER, GLOBAL_BEST, HALF_QUARTER, downhill, "current", "full")
    np.testing.assert_array_equal(WORKER.positions, [[1, 2]])
    np.testing.assert_array_equal(WORKER.velocities, [[0.5, -1]])
    np.testing.assert_array_equal(WORKER.personal_best, [[3, 2]])


@pytest.mark.parametrize(("score", "expected"), [(0.6, [9, 9]), (0.7, [3, 2]), (0.8, [3, 2]), (np.nan, [3, 2])])
def test_a_personal_best_is_replaced_only_by_a_lower_score(score: float, expected: list[float]) -> None:
    after = remember(WORKER, floats([9, 9]), WORKER.velocities, np.array([score]))
    np.testing.assert_array_equal(after.personal_best, [expected])
    assert after.personal_score[0] == np.fmin(score, 0.7)


def test_a_personal_best_does_not_follow_the_position_afterwards() -> None:
    positions = floats([9, 9])
    after = remember(WORKER, positions, WORKER.velocities, np.array([0.1]))
    positions += 1
    np.testing.assert_array_equal(after.personal_best, [[9, 9]])


def test_inertia_falls_linearly_from_the_first_round_to_the_last() -> None:
    assert [inertia_at(number, 5, (1.0, 0.0)) for number in range(1, 6)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert inertia_at(1, 1, (0.9, 0.4)) == 0.9


@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_a_worker_moves_the_same_alone_as_in_a_swarm(workers: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    position, velocity, best = rng.normal(size=(3, workers, 4)).astype(np.float32)
    c = Coefficients(0.7, *rng.random((2, workers, 1), dtype=np.float32))
    together = swarm_terms(Particles(position, velocity, best, np.zeros(workers)), best[0], c)
    for i in range(workers):
        row = slice(i, i + 1)
        alone = Particles(position[row], velocity[row], best[row], np.zeros(1))
        own = Coefficients(0.7, c.cognitive[row], c.social[row])
        np.testing.assert_array_equal(swarm_terms(alone, best[0], own), together[row])


def test_rows_are_made_without_a_second_copy_of_them() -> None:
    initial = np.ones((1, 10_000), np.float32)
    initial_particles(initial, 1)
    tracemalloc.start()
    try:
        rows = initial_particles(initial, 400)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    kept = sum(array.nbytes for array in vars(rows).values())
    assert kept == 400 * (12 * 10_000 + 12)
    assert most < kept + 20 * initial.nbytes
