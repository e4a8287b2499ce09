"""Rows of what workers keep: made when a worker first takes part, in memory or in a file."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from cbdsl.algorithm import worker_table
from cbdsl.algorithm.methods import FedAvg, Restart, Scaffold, SwarmMethod, kept_arrays
from cbdsl.algorithm.worker_table import WorkerTable
from cbdsl.arrays import Doubles
from cbdsl.codecs.quantize import Whole
from cbdsl.codecs.topk import TopK
from support.refusals import refused_as

LAYOUT: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
    "row": ((3,), np.dtype(np.float32)),
    "score": ((), np.dtype(np.float64)),
}


def rows(workers: list[int]) -> dict[str, Doubles]:
    """Return rows that name their workers."""
    numbers = np.array(workers, np.float64)
    return {"row": numbers[:, None] + np.zeros(3), "score": numbers}


def filled(most: int = 1000) -> WorkerTable:
    table = WorkerTable(LAYOUT, most)
    for workers in ([5, 900, 1], [2], [], [7, 3, 4, 0]):
        table.add(workers, rows(workers))
    return table


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("per_chunk", [1, 2, 100])
def test_every_worker_has_its_row_wherever_it_is(
    in_file: bool, per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_table, "_CHUNK_BYTES", 20 * per_chunk)
    monkeypatch.setattr(worker_table, "_FILE_CHUNK_BYTES", 20 * per_chunk)
    if in_file:
        monkeypatch.setattr(worker_table, "rows_in_memory_bytes", lambda: 60)
    table = filled()
    assert (table._file is not None) is in_file
    order = [5, 900, 1, 2, 7, 3, 4, 0]
    assert table.workers.tolist() == order
    table.put("score", [900, 0], np.array([-1.0, -2.0]))
    for workers in (order, [3], [2, 900], [900, 5, 1]):
        assert table.take("row", workers)[:, 0].tolist() == workers
    assert table.take("score", [0, 5, 900]).tolist() == [-2.0, 5.0, -1.0]
    assert np.concatenate(list(table.blocks("row")))[:, 2].tolist() == order


def test_rows_are_allocated_for_those_who_take_part_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_table, "_CHUNK_BYTES", 40)
    table = filled(most=10**6)
    assert len(table) == 8
    assert sum(len(chunk["row"]) for chunk in table._chunks) <= 9  # the last chunk has room for one more


def test_a_full_disk_is_reported_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(worker_table, "rows_in_memory_bytes", lambda: 0)
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with refused_as("too-large", "TMPDIR"):
        filled()


def test_a_method_says_what_its_workers_keep() -> None:
    class Odd(SwarmMethod):
        remembers = ("momentum",)

    assert kept_arrays(FedAvg(), Whole()) == kept_arrays(Restart(), Whole()) == ()
    assert kept_arrays(FedAvg(), TopK()) == kept_arrays(Scaffold(), Whole()) == ("velocities",)
    assert len(kept_arrays(SwarmMethod(), Whole())) == 6
    with refused_as("conflict", "Scaffold", "topk"):
        kept_arrays(Scaffold(), TopK())  # both would keep something else in the same array
    with refused_as("invalid-part", "momentum", "velocities"):
        kept_arrays(Odd(), Whole())
