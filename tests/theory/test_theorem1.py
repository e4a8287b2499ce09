from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cbdsl.theory.constants import DirectionBounds, MeasuredConstants, ValueRange
from cbdsl.theory.measure import Observations, observe
from cbdsl.theory.theorem1 import (
    CoefficientBounds,
    Theorem1,
    judge,
    least,
    measure_constants,
    phi_corrected,
    phi_printed,
    remark_corrected,
    remark_printed,
)
from support.quadratic import Quadratic, play, random_quadratic


def _direction(
    cosine: tuple[float, float], ratio: tuple[float, float], product: tuple[float, float]
) -> DirectionBounds:
    return DirectionBounds(ValueRange(*cosine), ValueRange(*ratio), ValueRange(*product))


CONSTANTS = MeasuredConstants(
    velocity=_direction((-0.5, 0.5), (1.0, 2.0), (-1.0, 1.0)),
    personal=_direction((-0.25, 0.5), (1.0, 4.0), (-1.0, 2.0)),
    social=_direction((0.5, 1.0), (1.0, 2.0), (0.5, 2.0)),
    local=_direction((1.0, 1.0), (0.5, 0.5), (0.5, 0.5)),
    smoothness=0.01,
    curvature=0.005,
)


def test_the_moments_of_the_coefficients_by_hand() -> None:
    weights = CoefficientBounds(1.0, 1.0, 1.0)
    assert weights.mean == 0.0
    assert weights.mean_square == pytest.approx(1 / 6)


@given(st.floats(0, 2), st.floats(0, 3), st.floats(0, 3))
def test_the_moments_are_those_of_uniform_numbers(inertia: float, first: float, second: float) -> None:
    nodes = 0.5 + np.array([-0.5, 0.5]) / math.sqrt(3)  # Gauss: exact for cubics
    value = inertia - first * nodes[:, None] - second * nodes
    weights = CoefficientBounds(inertia, first, second)
    assert weights.mean == pytest.approx(value.mean(), abs=1e-9)
    assert weights.mean_square == pytest.approx((value**2).mean(), abs=1e-9)


def test_phi_as_printed_by_hand() -> None:
    weights = CoefficientBounds(1.0, 1.0, 0.5)  # mean 0.25, mean square 1 - 1.5 + 1/3 + 1/12 + 1/4 = 1/6
    square = (1 / 6) * 4 + (1 / 3) * 16 + (0.25 / 3) * 4
    slope = 0.5 - 0.25 * (-0.5) * 1.0 - 0.5 * 4.0 * 0.5 - 0.25 * 2.0 * 1.0
    assert phi_printed(CONSTANTS, weights, 0.5) == pytest.approx(slope - 0.02 * (square + 0.25))


def test_phi_corrected_by_hand() -> None:
    weights = CoefficientBounds(1.0, 1.0, 0.5)
    square = (1 / 6) * 4 + (1 / 3) * 16 + (0.25 / 3) * 4
    slope = 0.25 * (-1.0) + 0.5 * (-1.0) + 0.25 * 0.5 + 0.5
    assert phi_corrected(CONSTANTS, weights) == pytest.approx(slope - 0.02 * (square + 0.25))


def test_the_sign_of_the_inertias_weight_decides_which_end_of_the_range_counts() -> None:
    assert least(0.5, ValueRange(-1.0, 3.0)) == -0.5
    assert least(-0.5, ValueRange(-1.0, 3.0)) == -1.5


def test_without_a_swarm_both_remarks_compare_equals() -> None:
    alone = CoefficientBounds(0.0, 0.0, 0.0)
    assert remark_printed(CONSTANTS, alone, 0.5) == pytest.approx(0.0)
    assert remark_corrected(CONSTANTS, alone) == pytest.approx(0.0)


def _judged(seen: Observations, lowest: float = 0.0) -> Theorem1:
    return judge(
        seen.descents, seen.last_squared_gradient, seen.first_loss, [one.learning_rate for one in seen.descents], lowest
    )


def test_on_a_quadratic_the_constants_are_the_analytic_ones() -> None:
    rng = np.random.default_rng(0)
    problem = random_quadratic(rng)
    rate, pulls = 0.1, (0.4, 0.6)
    seen = observe(problem, play(problem, rng, 12, 0.3, pulls, rate), pulls, np.ones(4))
    found = measure_constants(seen.descents)
    assert found.smoothness == pytest.approx((problem.shares @ problem.steepness).max())
    assert found.curvature == pytest.approx((problem.shares @ problem.steepness).max())
    # One exact gradient step is the whole local work: along -grad F, alpha times as long.
    assert [found.local.cosine.low, found.local.cosine.high] == pytest.approx([1.0, 1.0])
    assert [found.local.ratio.low, found.local.ratio.high] == pytest.approx([rate, rate])
    assert [found.local.product.low, found.local.product.high] == pytest.approx([rate, rate])


def test_without_a_swarm_the_corrected_theorem_is_gradient_descents() -> None:
    rng = np.random.default_rng(1)
    problem = random_quadratic(rng)
    seen = observe(problem, play(problem, rng, 20, 0.0, (0.0, 0.0), 0.05), (0.0, 0.0), np.ones(4))
    steepest = float((problem.shares @ problem.steepness).max())
    found = _judged(seen)
    assert found.corrected.phi.low == pytest.approx(0.05 - 2 * steepest * 0.05**2)
    assert found.corrected.held == found.corrected.speaks == 4
    assert found.corrected.tightness >= 1


def test_where_the_swarm_is_gentle_the_corrected_theorem_speaks_and_holds() -> None:
    rng = np.random.default_rng(2)
    problem = random_quadratic(rng)
    pulls = (0.002, 0.002)
    seen = observe(problem, play(problem, rng, 6, 0.001, pulls, 0.05), pulls, np.ones(4))
    found = _judged(seen)
    assert found.corrected.speaks == 4
    assert found.corrected.held == 4


def test_a_pull_uphill_breaks_the_printed_bound_and_silences_the_corrected_one() -> None:
    """One worker in a bowl around 0, held at 2 by a best that another loss prefers.

    cos theta^p = cos theta^g = -1, which the printed signs count as help.
    """
    bowl = Quadratic(np.zeros((1, 1)), np.ones(1), np.ones((1, 1)), np.ones(1))
    rng, rounds, pulls = np.random.default_rng(3), 400, (0.1, 0.1)

    def dragged() -> list[object]:
        steps: list[object] = []
        previous = here = np.array([[1.0]])
        best = np.array([[2.0]])
        for (move, genie), draw in zip(
            play(bowl, rng, rounds, 0.0, pulls, 0.001, here), rng.uniform(0, 0.1, (rounds, 2, 1, 1)), strict=True
        ):
            after = here + draw[0] * (best - here) + draw[1] * (best - here) - 0.001 * here
            values = vars(move) | {
                "cognitive": draw[0], "social": draw[1], "previous": previous, "before": here, "personal_best": best,
                "global_best": best[0], "after": after,
            }  # fmt: skip
            steps.append((type(move)(**values), genie))
            previous, here = here, after
        return steps

    found = _judged(observe(bowl, dragged(), pulls, np.ones(1)))  # type: ignore[arg-type]
    assert found.printed.phi.low > 0
    assert found.printed.speaks == 1
    assert found.printed.held == 0
    assert found.printed.tightness < 0.1
    assert found.corrected.speaks == 0
    assert math.isnan(found.corrected.bound)


@given(st.integers(0, 10**6), st.floats(0, 1.5), st.floats(0, 2), st.floats(0, 2), st.floats(0.01, 0.4))
def test_the_played_form_holds_wherever_it_speaks(
    seed: int, inertia: float, first: float, second: float, rate: float
) -> None:
    rng = np.random.default_rng(seed)
    problem, pulls = random_quadratic(rng), (first, second)
    found = _judged(observe(problem, play(problem, rng, 5, inertia, pulls, rate), pulls, np.ones(4)))
    assert found.played.held == found.played.speaks
    assert found.beyond_smoothness == 0  # a quadratic's secants are its smoothness


def test_one_round_leaves_the_swarms_constants_undefined_and_no_promise() -> None:
    rng = np.random.default_rng(4)
    problem = random_quadratic(rng)
    found = _judged(observe(problem, play(problem, rng, 1, 1.0, (1.0, 1.0), 0.1), (1.0, 1.0), np.ones(4)))
    assert found.printed.speaks == 0
    assert found.played.held == found.played.speaks
