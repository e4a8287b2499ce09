from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cbdsl.algorithm.messages import Claim, Order
from cbdsl.algorithm.methods import FedAdam, FedAvg, FedAvgM, Method
from cbdsl.algorithm.round import Combination, limit_stated_size, play_average_round, weighted_mean
from cbdsl.arrays import Floats
from support.helpers import fresh_state, next_order


class Uploads:
    def __init__(self, models: Mapping[int, Floats]) -> None:
        self.models = models
        self.orders: list[Order] = []

    def report(self, order: Order) -> Mapping[int, Claim]:
        self.orders.append(order)
        return {}

    def upload(self, workers: Sequence[int]) -> Mapping[int, Floats]:
        return {worker: self.models[worker] for worker in workers if worker in self.models}


def vector(*values: float) -> Floats:
    return np.array(values, dtype=np.float32)


def test_fedavg_averages_by_hand_with_the_number_of_samples_as_weight() -> None:
    # (1 * (1, 2) + 3 * (5, -2)) / 4 = (4, -1)
    state = fresh_state(vector(0, 0))
    swarm = Uploads({0: vector(1, 2), 1: vector(5, -2)})
    after, log = play_average_round(
        state,
        next_order(state, "average", range(2), 0.0, 0.1),
        swarm,
        FedAvg(),
        Combination({0: 1, 1: 3}.__getitem__),
        2,
    )
    np.testing.assert_array_equal(after.global_best, vector(4, -1))
    assert log.outcome("accepted") == [0, 1]
    assert {t.kind: t.payload for t in log.traffic} == {"order": 24, "broadcast": 2 * 8, "upload": 2 * 8}
    assert swarm.orders[0].global_best is state.global_best


def test_fedavg_leaves_out_the_silent_and_what_is_not_a_model() -> None:
    state = fresh_state(vector(0, 0))
    swarm = Uploads({0: vector(1, 2), 2: vector(1, 2, 3)})
    after, log = play_average_round(
        state,
        next_order(state, "average", range(3), 0.0, 0.1),
        swarm,
        FedAvg(),
        Combination({0: 1, 1: 1, 2: 1}.__getitem__),
        3,
    )
    np.testing.assert_array_equal(after.global_best, vector(1, 2))
    assert (log.outcome("silent"), log.outcome("declined"), after.banned) == ([1], [2], frozenset())
    assert log.verdicts[2].reason == "left out: shape (3,) instead of (2,)"


def test_fedavg_keeps_its_model_when_nobody_answers() -> None:
    state = fresh_state(vector(3, 4))
    after, _ = play_average_round(
        state,
        next_order(state, "average", range(2), 0.0, 0.1),
        Uploads({}),
        FedAvg(),
        Combination({0: 1, 1: 1}.__getitem__),
        2,
    )
    np.testing.assert_array_equal(after.global_best, vector(3, 4))


def test_fedavg_believes_a_fake_model() -> None:
    state = fresh_state(vector(0, 0))
    swarm = Uploads({0: vector(1, 1), 1: vector(1001, 1)})
    after, log = play_average_round(
        state,
        next_order(state, "average", range(2), 0.0, 0.1),
        swarm,
        FedAvg(),
        Combination({0: 1, 1: 1}.__getitem__),
        2,
    )
    np.testing.assert_array_equal(after.global_best, vector(501, 1))
    assert log.outcome("accepted") == [0, 1]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.integers(0, 99))
def test_the_mean_of_equal_models_is_that_model_whatever_the_weights(shares: list[int], seed: int) -> None:
    model = np.random.default_rng(seed).normal(size=5).astype(np.float32)
    stack = np.tile(model, (len(shares), 1))
    np.testing.assert_allclose(weighted_mean(stack, np.array(shares, dtype=np.float64)), model, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_model_that_is_not_finite_takes_no_part_in_the_average_and_nobody_is_banned(bad: float) -> None:
    state = fresh_state(vector(0, 0))
    swarm = Uploads({0: vector(1, 2), 1: vector(1, bad), 2: vector(3, 4)})
    after, log = play_average_round(
        state,
        next_order(state, "average", range(3), 0.0, 0.1),
        swarm,
        FedAvg(),
        Combination({0: 1, 1: 5, 2: 1}.__getitem__),
        3,
    )
    np.testing.assert_array_equal(after.global_best, vector(2, 3))
    assert (log.outcome("refuted"), log.outcome("declined"), after.banned) == ([], [1], frozenset())
    assert log.verdicts[1].reason == "left out: weights that are not finite"


def test_a_stated_number_of_samples_counts_up_to_three_times_the_others() -> None:
    # (300 * 0 + 300 * 0 + 300 * 0 + 900 * 8) / 1800 = 4, and not 8
    state = fresh_state(vector(0))
    swarm = Uploads({0: vector(0), 1: vector(0), 2: vector(0), 3: vector(8)})
    combine = Combination({0: 300, 1: 300, 2: 300, 3: 2**31 - 1}.__getitem__, stated=True)
    after, _ = play_average_round(state, next_order(state, "average", range(4), 0.0, 0.1), swarm, FedAvg(), combine, 4)
    np.testing.assert_array_equal(after.global_best, vector(4))


def test_numbers_that_the_server_dealt_itself_count_as_they_are() -> None:
    combine = Combination({0: 1, 1: 99}.__getitem__)
    np.testing.assert_array_equal(combine(fresh_state(vector(0)), [0, 1], [vector(0), vector(1)])[0], vector(0.99))


def test_where_nobody_states_any_samples_everybody_counts_alike() -> None:
    for stated in (False, True):
        combine = Combination({0: 0, 1: 0}.__getitem__, stated)
        np.testing.assert_array_equal(combine(fresh_state(vector(0)), [0, 1], [vector(1), vector(3)])[0], vector(2))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=9), st.data())
def test_a_minority_cannot_raise_what_is_believable(honest: list[int], data: st.DataObject) -> None:
    lies = data.draw(st.lists(st.integers(0, 2**31 - 1), max_size=len(honest)))
    assert limit_stated_size(np.array([*honest, *lies], np.float64)) <= 3.0 * max(honest)


@pytest.mark.parametrize("method", [FedAvgM(), FedAdam()])
def test_an_upload_too_wild_to_take_a_step_on_neither_ends_the_run_nor_spoils_its_memory(method: Method) -> None:
    state = fresh_state(vector(-3e38, 0))
    state = replace(state, memory=method.memory(2))
    order = next_order(state, "average", range(1), 0.0, 0.1)
    with np.errstate(over="ignore"):
        after, _ = play_average_round(
            state, order, Uploads({0: vector(3e38, 1)}), method, Combination({0: 1}.__getitem__), 1
        )
    np.testing.assert_array_equal(after.global_best, state.global_best)
    np.testing.assert_array_equal(after.memory, state.memory)
