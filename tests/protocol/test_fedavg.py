from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cbdsl.arrays import Floats
from cbdsl.methods.fedavg import FedAvg
from cbdsl.protocol.fedavg import averaging, play_average_round, weighted_mean
from cbdsl.protocol.messages import Claim, Order
from helpers import fresh_state, next_order


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
        state, next_order(state, "average", range(2), 0.0, 0.1), swarm, FedAvg(), averaging({0: 1, 1: 3}), 2
    )
    np.testing.assert_array_equal(after.global_best, vector(4, -1))
    assert log.outcome("accepted") == [0, 1]
    assert {t.kind: t.payload for t in log.traffic} == {"order": 24, "broadcast": 2 * 8, "upload": 2 * 8}
    assert swarm.orders[0].global_best is state.global_best


def test_fedavg_leaves_out_the_silent_and_what_is_not_a_model() -> None:
    state = fresh_state(vector(0, 0))
    swarm = Uploads({0: vector(1, 2), 2: vector(1, 2, 3)})
    after, log = play_average_round(
        state, next_order(state, "average", range(3), 0.0, 0.1), swarm, FedAvg(), averaging({0: 1, 1: 1, 2: 1}), 3
    )
    np.testing.assert_array_equal(after.global_best, vector(1, 2))
    assert (log.outcome("silent"), log.outcome("refuted"), after.banned) == ([1], [2], frozenset())


def test_fedavg_keeps_its_model_when_nobody_answers() -> None:
    state = fresh_state(vector(3, 4))
    after, _ = play_average_round(
        state, next_order(state, "average", range(2), 0.0, 0.1), Uploads({}), FedAvg(), averaging({0: 1, 1: 1}), 2
    )
    np.testing.assert_array_equal(after.global_best, vector(3, 4))


def test_fedavg_believes_a_fake_model() -> None:
    state = fresh_state(vector(0, 0))
    swarm = Uploads({0: vector(1, 1), 1: vector(1001, 1)})
    after, log = play_average_round(
        state, next_order(state, "average", range(2), 0.0, 0.1), swarm, FedAvg(), averaging({0: 1, 1: 1}), 2
    )
    np.testing.assert_array_equal(after.global_best, vector(501, 1))
    assert log.outcome("refuted") == []


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.integers(0, 99))
def test_the_mean_of_equal_models_is_that_model_whatever_the_weights(shares: list[int], seed: int) -> None:
    model = np.random.default_rng(seed).normal(size=5).astype(np.float32)
    stack = np.tile(model, (len(shares), 1))
    np.testing.assert_allclose(weighted_mean(stack, np.array(shares, dtype=np.float64)), model, rtol=1e-6)
