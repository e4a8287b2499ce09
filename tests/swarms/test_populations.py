"""Populations: what a round and a run cost depends on who takes part, not on how many workers there are."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cbdsl
from cbdsl import register
from cbdsl.algorithm import worker_table
from cbdsl.algorithm.messages import Order
from cbdsl.attacks.adversary import Poisoner
from cbdsl.runs import loop
from cbdsl.runs.build import Experiment
from cbdsl.runs.records import RoundRecord
from cbdsl.runs.result import Result
from cbdsl.spec import Spec
from support.helpers import blobs, small_spec
from support.refusals import refused_as

METHODS = [name for name in register.method.names() if register.method.get(name).conversation != "alone"]
MANY = 10**6
COHORT, ROUNDS = 4, 4


def population(workers: int = MANY, **settings: object) -> Spec:
    settings = {"data__samples_per_worker": 300, "data__overlap": True, "rounds": ROUNDS, **settings}
    return small_spec(workers=workers, model="softmax", participation=COHORT, **settings)


def run(spec: Spec, **rest: Any) -> Result:  # noqa: ANN401
    return cbdsl.run(spec, data=blobs(), threads=1, callbacks=[], **rest)


class StoppedError(RuntimeError):
    """Ends a run."""


class StopAfterTwo(cbdsl.Callback):
    """Ends a run after its second round."""

    def round(self, record: RoundRecord) -> None:
        if record.round == 2:
            raise StoppedError


def numbers(result: Result) -> list[RoundRecord]:
    return [replace(record, seconds=0.0) for record in result.rounds]


def peak_of(spec: Spec) -> int:
    """Return the most bytes that Python and numpy held during a run."""
    tracemalloc.start()
    try:
        run(spec)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "cb-dsl", "shared": "none"},
        {"method": "fedavg"},
        {"method": "restart", "selection__name": "rotation", "codec__up": "q4", "codec__down": "q4"},
        {"method": "scaffold", "attack__byzantine": 3, "attack__name": "label-flip"},
    ],
    ids=lambda settings: settings["method"],
)
def test_a_worker_that_takes_no_part_costs_no_object(
    settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A permutation of all numbers is 8 bytes per worker; a Python object, or a row of any array, would be more."""
    monkeypatch.setattr(worker_table, "_CHUNK_BYTES", 0)  # no rows in advance
    run(population(1000, **settings))  # what is imported and cached by the first run
    assert peak_of(population(MANY, **settings)) - peak_of(population(1000, **settings)) < 12 * MANY


@pytest.mark.parametrize("method", [name for name in METHODS if name != "pso"])
def test_rows_are_those_of_workers_that_took_part(method: str) -> None:
    known: set[int] = set()

    def look(stage: Experiment, order: Order) -> None:
        known.update(order.participants)
        swarm = stage.memory_swarm
        assert {*swarm.table.workers.tolist()} == (known if stage.remembers else set())
        rest = len(swarm.table.layout) < 6  # some arrays start anew in every round
        assert {*swarm._moved} == ({*order.participants} if rest else set())

    run(population(method=method), watch=look)
    assert len(known) > COHORT


def test_only_attackers_that_take_part_are_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned: list[int] = []
    original = Poisoner.poison

    def poison(self: Poisoner, worker: int, own: Any) -> Any:  # noqa: ANN401
        poisoned.append(worker)
        return original(self, worker, own)

    monkeypatch.setattr(Poisoner, "poison", poison)
    orders: list[Order] = []
    result = run(
        population(1000, method="fedavg", attack__byzantine=500, attack__name="label-flip"),
        watch=lambda _, order: orders.append(order),
    )
    took_part = {worker for order in orders for worker in order.participants}
    assert set(poisoned) == took_part & set(result.summary.byzantine)
    assert poisoned


@pytest.mark.parametrize("method", ["cb-dsl", "restart", "scaffold"])
def test_a_stopped_run_of_a_population_ends_as_it_would_have(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, object]
    settings = {"selection__name": "rotation", "codec__up": "q4", "codec__down": "q4"} if method == "restart" else {}
    spec = population(10_000, method=method, attack__byzantine=2_500, **settings)
    whole = run(spec)
    monkeypatch.setattr(loop, "_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(loop, "_CHECKPOINT_SHARE", 0.0)
    with pytest.raises(StoppedError):
        cbdsl.run(spec, data=blobs(), threads=1, callbacks=[StopAfterTwo()], out=tmp_path / "run")
    assert (tmp_path / "run" / "checkpoint.npz").stat().st_size < 300_000  # bytes; rows of all would take 3 MB
    result = cbdsl.resume(tmp_path / "run", data=blobs(), threads=1, callbacks=[])
    np.testing.assert_array_equal(result.weights, whole.weights)
    assert numbers(result) == numbers(whole)


@pytest.mark.parametrize("method", METHODS)
def test_rows_in_a_file_give_the_same_numbers(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_spec(model="softmax", method=method, participation=4)
    expected = run(spec)
    monkeypatch.setattr(worker_table, "rows_in_memory_bytes", lambda: 0)
    found = run(spec)
    np.testing.assert_array_equal(found.weights, expected.weights)
    assert numbers(found) == numbers(expected)


def test_workers_of_a_population_hold_samples_back() -> None:
    summary = run(population(10_000, method="cb-dsl", data__local_test=0.25)).summary
    assert summary.local_test is not None
    assert summary.local_test.samples == 75 * summary.local_test.workers


def test_rows_that_fit_neither_in_memory_nor_on_the_disk_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbdsl.runs.build.room_in_file", lambda: 0)
    monkeypatch.setattr("cbdsl.util.memory.free_memory", lambda: 10_000_000)
    run(population(method="fedavg"))
    with refused_as("too-large", "1,000,000 workers"):
        run(population(MANY, rounds=100_000))
