from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from hypothesis.extra.numpy import arrays

from cbdsl import register
from cbdsl.algorithm.aggregators import (
    aggregate,
    check_majority,
    count_rows,
    fill_buckets,
    mix_neighbours,
    parse_aggregator,
)
from cbdsl.arrays import Doubles, Floats
from support.aggregation import CROWD, combine, trust
from support.refusals import refused_as

NAMES = [
    *register.aggregator.names(), *(f"nnm+{name}" for name in register.aggregator.names()), "bucketing+median",
    "bucketing+multi-krum", "bucketing+dnc", "bucketing+nnm+median",
]  # fmt: skip
ROBUST = [name for name in NAMES if name != "mean"]


LINE = [[0.0], [2.0], [4.0], [7.0], [10.0], [16.0], [200.0]]


@pytest.mark.parametrize(
    ("name", "rows", "expected"),
    [
        ("mean", CROWD, [21.2, -18.8]),
        ("median", CROWD, [2.0, 1.0]),
        ("trimmed-mean", CROWD, [5 / 3, 4 / 3]),  # of 1, 1, 2, 2, 100 stay 1, 2, 2; of -100, 1, 1, 2, 2 stay 1, 1, 2
        # Two nearest others: at squared distances 1 + 1 for all four of the square; the first of equals.
        ("krum", CROWD, [1.0, 1.0]),
        ("multi-krum", CROWD, [1.5, 1.5]),
        # Of seven rows Krum picks five: 4, 7, 2, and of equals the smaller, 10 and 0. Nearest their median: 4, 2 and 7.
        ("bulyan", LINE, [13 / 3]),
        # The votes are +5 of 5 and +3 of 5; at least 2f = 2 agree. With theta=4 the second weight is turned round.
        ("rlr", CROWD, [21.2, -18.8]),
        ("mda", CROWD, [1.5, 1.5]),
        # Without 200, 16 is the farthest; of 0 ... 16 without one row the least diameter is that of 0 ... 10.
        ("mda", [*LINE[:6]], [4.6]),
    ],
)
def test_by_hand(name: str, rows: list[list[float]], expected: list[float]) -> None:
    assert combine(name, rows, 1) == pytest.approx(expected)


def test_the_geometric_median_of_a_triangle_is_its_fermat_point() -> None:
    # Equilateral: the centre. And with three of five rows in one place, that place.
    height = 3**0.5
    assert combine("geometric-median", [[-1, 0], [1, 0], [0, height]], 0) == pytest.approx([0, height / 3], abs=1e-5)
    assert combine("geometric-median", [[3, 3], [3, 3], [3, 3], [50, 0], [0, 70]], 2) == pytest.approx([3, 3], abs=1e-4)


def test_the_geometric_median_leaves_a_row_that_it_starts_on() -> None:
    rows: list[list[float]] = [[0, 0], [-1, 10], [1, 10], [-5, -0.1], [5, -0.1]]  # (0, 0) is their median by coordinate
    found = combine("geometric-median", rows, 0)

    def cost(centre: list[float]) -> float:
        return float(np.linalg.norm(np.subtract(rows, centre), axis=1).sum())

    grid = [[0.0, height] for height in np.linspace(-1, 11, 12_001)]  # by symmetry it lies on this line
    assert found == pytest.approx(min(grid, key=cost), abs=2e-3)
    assert cost(found) < cost([0.0, 0.0]) - 0.1
    far = combine("geometric-median", [*rows, [1e11, 0], [-1e11, 0]], 2)  # two that pull against each other
    assert far == pytest.approx(found, abs=1e-2)


def test_centred_clipping_takes_no_step_longer_than_the_median() -> None:
    # From 0: steps 1, 1, 1000 are clipped to 1: v = 1. From there steps 0, 0, 999 are clipped to 0: v stays.
    assert combine("centred-clipping", [[1], [1], [1000]], 1, trust(size=1)) == pytest.approx([1.0])


def test_fltrust_by_hand() -> None:
    # The server steps to (1, 0). (2, 0) agrees and is shortened to (1, 0); (0, 3) has cosine 0; (-1, 0) opposes.
    # (3, 4) has cosine 0.6 and becomes (0.6, 0.8): (1 * (1, 0) + 0.6 * (0.6, 0.8)) / 1.6.
    known = trust(root=np.array([1, 0], np.float32))
    assert combine("fltrust", [[2, 0], [0, 3], [-1, 0], [3, 4]], 1, known) == pytest.approx([0.85, 0.3])


def test_fltrust_stays_where_it_is_when_nobody_can_be_trusted() -> None:
    assert combine("fltrust", [[-1, -1], [-3, 0]], 0) == [0.0, 0.0]


def test_zeno_keeps_the_rows_with_the_least_loss() -> None:
    assert combine("zeno", [[1, 1], [1.5, 1], [9, 9]], 1) == pytest.approx([1.25, 1.0])


def test_rlr_turns_a_disputed_weight_round() -> None:
    rule = register.aggregator.make("rlr", {"theta": 4})
    rows = np.array(CROWD)
    np.testing.assert_allclose(rule(rows, 1, trust()), [21.2, 18.8])


BYZFL = {  # what ByzFL 0.0.11 computes; its Krum sums over one neighbour more than Blanchard et al., so it is not here
    "mda": [-0.854, 2.03, 0.35],
    "median": [0.0, 1.64, 0.47],
    "nnm+median": [0.222, 1.496, 0.35],
    "trimmed-mean": [0.41, 1.476667, 0.63],
    "nnm+trimmed-mean": [0.063333, 1.294, 0.236667],
    "geometric-median": [0.104785, 1.138008, 0.544198],
    "nnm+geometric-median": [0.039498, 1.353016, 0.094899],
}


@pytest.mark.parametrize("name", BYZFL)
def test_rules_agree_with_an_independent_implementation(name: str) -> None:
    rows = np.round(3 * np.sin(1.7 * np.arange(21) ** 1.5).reshape(7, 3), 2)
    assert combine(name, rows.tolist(), 2, trust(size=3)) == pytest.approx(BYZFL[name], abs=2e-6)


def test_bucketing_fills_buckets_at_random() -> None:
    rows = np.array([[1.0], [2.0], [4.0], [8.0], [16.0]])
    dealt = np.random.default_rng(0).permutation(5)
    expected = [rows[dealt[:2]].mean(), rows[dealt[2:4]].mean(), rows[dealt[4]].mean()]
    np.testing.assert_allclose(fill_buckets(rows, 1, trust(size=1))[:, 0], expected)
    np.testing.assert_allclose(fill_buckets(rows, 1, trust(size=1), size=9)[0], rows.mean(0))
    assert count_rows("bucketing+krum", 5) == 3


def test_buckets_need_an_honest_majority() -> None:
    check_majority("bucketing+krum", 9, 2)  # 5 buckets
    with refused_as("out-of-range", "5 buckets"):
        check_majority("bucketing+krum", 9, 3)
    check_majority("bucketing+krum", 9, 3, lambda _part: {"size": 1})


def test_mixing_by_hand() -> None:
    rows = np.array([[0.0], [1.0], [10.0]])
    np.testing.assert_allclose(mix_neighbours(rows, 1, trust()), [[0.5], [0.5], [5.5]])


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 10_000), attackers=st.integers(0, 2))
def test_the_order_of_workers_does_not_matter(name: str, seed: int, attackers: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(7, 5)).astype(np.float32)
    plain, shuffled = (
        aggregate(name, list(models), attackers, trust(size=5)) for models in (rows, rng.permutation(rows))
    )
    np.testing.assert_allclose(plain, shuffled, rtol=1e-4, atol=1e-5)


# These see steps from w_t, which are equal here too, but do not all have the weight 1, or add noise.
MOVES_OFF = {"fltrust", "centred-clipping", "flame"}


@pytest.mark.parametrize("name", [name for name in NAMES if name.rpartition("+")[2] not in MOVES_OFF])
@given(model=arrays(np.float32, 4, elements=st.floats(-100, 100, width=32)), count=st.integers(1, 9))
def test_equal_rows_give_that_row(name: str, model: Floats, count: int) -> None:
    combined = aggregate(name, [model] * count, (count - 1) // 2, trust(size=4))
    np.testing.assert_allclose(combined, model, rtol=1e-5, atol=1e-5)


LOOKS_AT_THE_MODEL = {"align-ins", "flame"}  # these compare with w_t itself, or models with each other


@pytest.mark.parametrize("name", [name for name in NAMES if name.rpartition("+")[2] not in LOOKS_AT_THE_MODEL])
@given(seed=st.integers(0, 10_000), shift=st.integers(-5000, 5000))
@example(seed=274, shift=2000)  # equally good rows after mixing: rounding chose between them once
@example(seed=195, shift=1000)
@example(seed=406, shift=2124)  # the geometric median's iteration stayed on a row
def test_moving_everything_moves_the_result(name: str, seed: int, shift: int) -> None:
    rng = np.random.default_rng(seed)  # thousandths of a power of two, so that moving them rounds nothing
    rows, start = ((rng.integers(-3000, 3000, shape) / 1024).astype(np.float32) for shape in ((7, 4), 4))
    moved = np.float32(shift / 1024)
    plain = aggregate(name, list(rows), 2, trust(start))
    there = aggregate(name, list(rows + moved), 2, trust(start + moved))
    np.testing.assert_allclose(there, plain + moved, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_change_nothing(name: str, bad: float) -> None:
    rows = np.random.default_rng(3).normal(size=(7, 4)).astype(np.float32)
    broken = np.full((2, 4), bad, np.float32)
    broken[0, 1:] = 0
    both = aggregate(name, [*rows, *broken], 3, trust(size=4))
    np.testing.assert_array_equal(both, aggregate(name, list(rows), 1, trust(size=4)))


@pytest.mark.parametrize("name", ROBUST)
def test_nothing_but_broken_rows_keeps_the_model(name: str) -> None:
    kept = aggregate(name, [np.full(2, np.nan, np.float32)] * 3, 1, trust())
    np.testing.assert_array_equal(kept, np.zeros(2, np.float32))


def test_the_mean_dies_of_one_row_but_the_program_does_not() -> None:
    assert np.isnan(aggregate("mean", [np.ones(2, np.float32), np.full(2, np.nan, np.float32)], 0, trust())).all()


BREAKDOWN = {  # attackers of 15 that must not matter
    "median": 7, "trimmed-mean": 7, "krum": 6, "multi-krum": 6, "geometric-median": 7, "centred-clipping": 7,
    "bulyan": 3, "zeno": 7, "fltrust": 7, "mda": 7, "align-ins": 7, "dnc": 7,
    "sign-guard": 7, "flame": 7, "bant": 7, "auto-bant": 7, "fedgreed": 7, "loss-clusters": 7, "bucketing+median": 3,
}  # fmt: skip


def spread(name: str, attackers: int) -> float:
    """How far from the honest rows, all near (1, 1, 1), the result is when attackers stand far away."""
    rng = np.random.default_rng(attackers)
    honest = 1 + 0.1 * rng.normal(size=(15 - attackers, 3))
    rows: Doubles = np.concatenate([honest, np.full((attackers, 3), -1e6)])
    return float(np.abs(aggregate(name, list(rows.astype(np.float32)), attackers, trust(size=3)) - 1).max())


@pytest.mark.parametrize("name", BREAKDOWN)
def test_up_to_its_breakdown_point_a_rule_stays_with_the_honest(name: str) -> None:
    for attackers in range(BREAKDOWN[name] + 1):
        assert spread(name, attackers) < 1.0, attackers


@pytest.mark.parametrize("name", ["median", "trimmed-mean", "geometric-median", "krum"])
def test_beyond_its_breakdown_point_it_does_not(name: str) -> None:
    assert spread(name, 8) > 1e3


def test_one_attacker_breaks_the_mean() -> None:
    assert spread("mean", 1) > 1e3


@pytest.mark.parametrize("name", ["medain", "nnm+medain", "median+nnm", "nnm", "+median"])
def test_an_unknown_rule_is_named_with_those_there_are(name: str) -> None:
    with refused_as("unknown-name", "aggregator"):
        parse_aggregator(name)


def test_a_majority_of_attackers_is_refused() -> None:
    check_majority("mean", 4, 3)
    check_majority("krum", 5, 2)
    with refused_as("out-of-range", "honest majority", "defence.declared"):
        check_majority("krum", 4, 2)
