"""Client sampling: who takes part in a round, and what happens to those who do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cbdsl
from cbdsl import register
from cbdsl.algorithm.messages import Order
from cbdsl.runs.build import Experiment
from cbdsl.runs.result import Result
from support.helpers import blobs, small_spec
from support.refusals import refused_as

METHODS = [name for name in register.method.names() if register.method.get(name).conversation != "alone"]


class Seen:
    """The orders of a run, and its particles before the first round and after each one."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.before: dict[str, Any] | None = None
        self.moved: list[set[int]] = []

    def __call__(self, stage: Experiment, order: Order) -> None:
        after = {name: array.copy() for name, array in vars(stage.memory_swarm.particles).items()}
        if self.before is None:
            start = np.broadcast_to(stage.initial, after["positions"].shape)
            self.before = {
                "positions": start,
                "velocities": np.zeros_like(start),
                "personal_best": start,
                "personal_score": np.full(len(start), np.inf),
                "packs": np.zeros((len(start), 0), np.uint8),
                "versions": np.zeros(len(start), np.int32),
            }
        workers = range(stage.spec.workers)
        changed = [
            worker
            for worker in workers
            if any(not np.array_equal(self.before[name][worker], array[worker]) for name, array in after.items())
        ]
        self.moved.append(set(changed))
        kept = stage.memory_swarm.table.layout  # everything else starts anew in every round
        self.before = {name: after[name] if name in kept else start for name, start in self.before.items()}
        self.orders.append(order)


def run(seen: Seen, **settings: object) -> Result:
    return cbdsl.run(small_spec(model="softmax", **settings), data=blobs(), watch=seen, callbacks=[])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("participation", "expected"), [(0.5, 3), (0.34, 2), (0.01, 1), (4, 4), (6, 6), (1.0, 6)])
def test_a_share_or_a_number_of_workers_takes_part(method: str, participation: float, expected: int) -> None:
    seen = Seen()
    result = run(seen, method=method, participation=participation)
    assert [len(order.participants) for order in seen.orders] == [expected] * 5
    assert [line.participants for line in result.rounds] == [expected] * 5
    for order in seen.orders:
        assert list(order.participants) == sorted(set(order.participants))


@pytest.mark.parametrize("method", METHODS)
def test_who_does_not_take_part_does_not_move(method: str) -> None:
    seen = Seen()
    run(seen, method=method, participation=2, rounds=8)
    for order, moved in zip(seen.orders, seen.moved, strict=True):
        assert moved <= set(order.participants)
    assert any(moved for moved in seen.moved)
    assert len({worker for order in seen.orders for worker in order.participants}) > 2  # not always the same two


@pytest.mark.parametrize("method", METHODS)
def test_the_ledger_counts_participants_alone(method: str) -> None:
    seen = Seen()
    result = run(seen, method=method, participation=2, rounds=8)
    size, vectors = result.summary.parameters, 2 if method == "scaffold" else 1
    average = result.summary.conversation == "average"
    told: set[int] = set()
    for line, order in zip(result.rounds, seen.orders, strict=True):
        receivers = len(set(order.participants) - told)
        assert line.traffic["order"] == [2, 2 * 12]
        assert line.traffic["broadcast"] == [receivers, receivers * vectors * size * 4]
        assert line.uploads == line.traffic["upload"][0]
        assert line.uploads == 2 if average else line.uploads <= 2
        if not average:
            assert line.traffic["score"] == [2, 2 * 4]
        told |= set(order.participants)
        if average or line.accepted:  # a new model, which nobody has
            told = set()


def test_who_comes_late_gets_the_global_best_once() -> None:
    """A swarm that never finds anything better: w^g stays the initial model, and each worker receives it once."""
    seen = Seen()
    result = run(seen, participation=2, rounds=12, local__learning_rate=1e-30, swarm__cognitive=0.0, swarm__social=0.0)
    assert result.summary.uploads == 0
    first: list[int] = []
    for line, order in zip(result.rounds, seen.orders, strict=True):
        fresh = [worker for worker in order.participants if worker not in first]
        assert line.traffic["broadcast"][0] == len(fresh)
        assert (order.global_best is None) == (not fresh)
        first += fresh
    assert sorted(first) == list(range(6))


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_draws_the_same_workers(method: str) -> None:
    drawn = []
    for seed in (3, 3, 4):
        seen = Seen()
        run(seen, method=method, participation=3, seed=seed)
        drawn.append([order.participants for order in seen.orders])
    assert drawn[0] == drawn[1] != drawn[2]
    other = Seen()
    run(other, method="fedavg", participation=3, seed=3)
    assert drawn[0] == [order.participants for order in other.orders]  # comparisons are paired


@pytest.mark.parametrize("participation", [1.0, 0.5, 4])
def test_nobody_is_drawn_who_is_banned(participation: float) -> None:
    seen = Seen()
    result = run(seen, participation=participation, rounds=10, attack__byzantine=3, attack__name="liar")
    banned: set[int] = set()
    for line, order in zip(result.rounds, seen.orders, strict=True):
        assert not banned & set(order.participants)
        banned |= set(line.banned)
    assert banned == set(result.summary.byzantine)
    assert len(seen.orders[-1].participants) == 3  # no more than there are


def test_an_omniscient_attacker_sees_those_who_take_part() -> None:
    """Who sits a round out sends nothing, so nothing of it can be known."""
    rows: list[int] = []

    class Spy(cbdsl.Attack):
        omniscient = True

        def upload(self, seen: cbdsl.AttackContext) -> Any:  # noqa: ANN401
            assert seen.honest is not None
            rows.append(len(seen.honest))
            return seen.model

    seen = Seen()
    spec = small_spec(model="softmax", method="fedavg", participation=3, rounds=8, attack__byzantine=2)
    result = cbdsl.run(spec, data=blobs(), attack=Spy(), watch=seen, callbacks=[])
    liars = set(result.summary.byzantine)
    expected = [len(set(order.participants) - liars) for order in seen.orders if set(order.participants) & liars]
    assert rows == expected


@pytest.mark.parametrize("participation", [0, -0.5, 1.5, 2.5, 7, float("nan"), float("inf")])
def test_an_impossible_participation_is_refused(participation: float) -> None:
    with refused_as("out-of-range", "participation"):
        cbdsl.run(small_spec(model="softmax"), data=blobs(), participation=participation)


def test_participation_by_keyword_is_in_the_spec() -> None:
    result = cbdsl.run(small_spec(model="softmax"), data=blobs(), participation=0.5, callbacks=[])
    assert (result.spec.participation, result.spec.participants) == (0.5, 3)
