from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cbdsl.theory.measure import GenieStep, Observations, observe
from cbdsl.theory.theorem2 import Theorem2, emd, judge
from cbdsl.theory.trajectory import SwarmMove
from support.quadratic import Quadratic, play, random_quadratic


def _judged(seen: Observations, problem: Quadratic) -> Theorem2:
    shares = (problem.shares, problem.population)
    return judge(seen.gaps, seen.whole_gaps, shares, seen.lipschitz, seen.start)


def test_emd_by_hand() -> None:
    shares = np.array([[1.0, 0.0], [0.5, 0.5], [0.25, 0.75]])
    assert emd(shares, np.array([0.5, 0.5])) == pytest.approx([1.0, 0.0, 0.5])


def test_on_a_quadratic_the_constants_are_the_analytic_ones() -> None:
    rng = np.random.default_rng(0)
    problem, rate = random_quadratic(rng), 0.1
    steps = list(play(problem, rng, 10, 0.4, (0.5, 0.5), rate))
    seen = observe(problem, steps, (0.5, 0.5), np.ones(4))
    found = _judged(seen, problem)
    assert found.lipschitz == pytest.approx(problem.steepness)
    growth = 1 + rate * problem.shares @ problem.steepness
    assert [found.corrected.beta.low, found.corrected.beta.high] == pytest.approx([growth.min(), growth.max()])
    genie = steps[3][1].before
    slopes = problem.steepness * np.linalg.norm(genie - problem.centres, axis=1)
    assert found.steepest[3] == pytest.approx(slopes.max())
    assert found.corrected.rounds[-1].terms.local == pytest.approx(0, abs=1e-12)  # one gradient step is all there is
    assert found.corrected.rounds[-1].terms.sampling == pytest.approx(0, abs=1e-12)


def test_the_missing_power_of_beta_lets_divergence_outgrow_the_printed_bound() -> None:
    """Two classes whose slopes push away from +1 and -1. The genie, between them, rests at 0; a worker with one class
    is driven off, faster every round: ||w_t|| = (1 + alpha)^t - 1, where the printed third term says alpha t.
    """
    problem = Quadratic(np.array([[1.0], [-1.0]]), np.array([-1.0, -1.0]), np.array([[1.0, 0.0]]), np.array([0.5, 0.5]))
    rate, rounds = 0.1, 30
    steps = play(problem, np.random.default_rng(0), rounds, 0.0, (0.0, 0.0), rate, np.zeros((1, 1)))
    found = _judged(observe(problem, steps, (0.0, 0.0), np.ones(1)), problem)
    measured = [row.measured for row in found.printed.rounds]
    assert measured == pytest.approx([(1 + rate) ** t - 1 for t in range(1, rounds + 1)])
    assert [row.bound for row in found.printed.rounds] == pytest.approx([rate * t for t in range(1, rounds + 1)])
    assert [row.held for row in found.printed.rounds] == [1] + [0] * (rounds - 1)
    assert not found.printed.holds
    assert found.corrected.holds
    assert [row.tightness for row in found.corrected.rounds] == pytest.approx([1.0] * rounds)


def test_replacing_the_personal_velocity_lets_the_printed_bound_be_zero_while_models_part() -> None:
    """No gradient, equal data, equal velocities: every printed term is 0, yet w^p draws the worker off."""
    flat = Quadratic(np.zeros((1, 2)), np.zeros(1), np.ones((1, 1)), np.ones(1))
    origin, best, half = np.zeros((1, 2)), np.array([[1.0, 0.0]]), np.array([[0.5]])
    move = SwarmMove(1, 0.5, 0.1, half, 0 * half, origin, origin, best, origin[0], 0.5 * best)
    genie = GenieStep(origin[0], origin[0], origin[0])
    found = _judged(observe(flat, [(move, genie)], (1.0, 1.0), np.ones(1)), flat)
    assert found.printed.rounds[0].bound == 0
    assert found.printed.rounds[0].measured == 0.5
    assert not found.printed.holds
    assert found.corrected.rounds[0].bound == pytest.approx(0.5)
    assert found.corrected.holds


@given(st.integers(0, 10**6), st.floats(0, 1.5), st.floats(0, 2), st.floats(0, 2), st.floats(0.01, 2.0))
def test_the_corrected_bound_holds_on_every_round_whatever_the_coefficients(
    seed: int, inertia: float, first: float, second: float, rate: float
) -> None:
    rng = np.random.default_rng(seed)
    problem, pulls = random_quadratic(rng), (first, second)
    starts = rng.normal(size=(4, 5))
    seen = observe(problem, play(problem, rng, 6, inertia, pulls, rate, starts), pulls, np.full(4, 3.0))
    found = _judged(seen, problem)
    assert found.corrected.holds
    assert found.played.holds
    assert found.corrected_whole.holds  # reading alpha as something else moves it into the residual


@given(st.integers(0, 10**6), st.floats(0.0, 1.0))
def test_the_corrected_bound_holds_when_local_work_is_anything_at_all(seed: int, noise: float) -> None:
    rng = np.random.default_rng(seed)
    problem = random_quadratic(rng)
    steps = [
        (replace(move, after=move.after + noise * rng.normal(size=move.after.shape)), genie)
        for move, genie in play(problem, rng, 1, 0.5, (1.0, 1.0), 0.1)
    ]
    assert _judged(observe(problem, steps, (1.0, 1.0), np.ones(4)), problem).corrected.holds


def test_beta_by_round_is_never_looser_than_one_constant_for_all() -> None:
    rng = np.random.default_rng(5)
    problem = random_quadratic(rng)
    found = _judged(observe(problem, play(problem, rng, 8, 0.5, (1.0, 1.0), 0.1), (1.0, 1.0), np.ones(4)), problem)
    for sharp, blunt in zip(found.played.rounds, found.corrected.rounds, strict=True):
        assert sharp.bound <= blunt.bound * (1 + 1e-9)


def test_a_worker_that_leaves_the_range_of_numbers_is_left_out_and_changes_nothing_for_others() -> None:
    rng = np.random.default_rng(6)
    problem = random_quadratic(rng)
    steps = list(play(problem, rng, 4, 0.5, (1.0, 1.0), 0.1))
    broken = []
    for move, genie in steps:
        arrays = {name: getattr(move, name).copy() for name in ("previous", "before", "after")}
        for name, first in (("after", 2), ("before", 3), ("previous", 4)):  # from round 2 on
            if move.round >= first:
                arrays[name][0] = np.nan
        broken.append((replace(move, **arrays), genie))
    with np.errstate(invalid="ignore"):
        seen = observe(problem, broken, (1.0, 1.0), np.ones(4))
    assert seen.kept.tolist() == [False, True, True, True]
    whole = observe(problem, steps, (1.0, 1.0), np.ones(4))
    np.testing.assert_array_equal(seen.gaps[-1].distance, whole.gaps[-1].distance[1:])
    found = judge(seen.gaps, seen.whole_gaps, (problem.shares[1:], problem.population), seen.lipschitz, seen.start)
    assert found.corrected.holds
