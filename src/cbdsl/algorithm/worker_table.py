"""A table of what workers keep between rounds: a row per array and participant so far, in memory or in a file."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from cbdsl.arrays import Indices
from cbdsl.errors import UserError
from cbdsl.util.formatting import format_bytes
from cbdsl.util.memory import free_memory

_CHUNK_BYTES = 16 * 2**20
_FILE_CHUNK_BYTES = 256 * 2**20  # each takes a file descriptor
_ALIGNED = 64  # bytes


@dataclass(frozen=True, eq=False)
class KeptRows:
    """The rows of some workers, as in a checkpoint."""

    workers: Indices  # (n,) numbers
    arrays: Mapping[str, NDArray[Any]]  # by name, (n, ...) each; they may be mapped from a file


class WorkerTable:
    """A table of rows by worker. A row is added when its worker first takes part; existing rows stay in place.

    >>> table = WorkerTable({"velocities": ((3,), np.dtype(np.float32))}, most=1000)
    >>> table.add([7, 2], {"velocities": np.ones((2, 3))})
    >>> table.put("velocities", [2], np.zeros((1, 3)))
    >>> table.take("velocities", [7, 2]).tolist(), table.workers.tolist()
    ([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]], [7, 2])
    """

    def __init__(self, layout: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]], most: int) -> None:
        """layout: shape and type of a row of each array. most: the number of workers that there may be."""
        self.layout, self._most = dict(layout), most
        self.row_bytes = sum(int(np.prod(shape)) * kind.itemsize for shape, kind in self.layout.values())
        self._room = rows_in_memory_bytes()
        self._file: IO[bytes] | None = None
        self._file_end = 0
        self._chunks: list[dict[str, NDArray[Any]]] = []
        self._left = 0  # unused rows of the last chunk
        self._places: dict[int, tuple[int, int]] = {}  # chunk and row of each worker

    def __contains__(self, worker: int) -> bool:
        return worker in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def workers(self) -> Indices:
        """The workers that have rows, in the order in which they first took part, (n,)."""
        return np.fromiter(self._places, np.int32, len(self._places))

    def add(self, workers: Sequence[int], rows: Mapping[str, NDArray[Any]]) -> None:
        """Add rows for workers that have none. rows: their values by array, (k, ...) each."""
        done = 0
        while self.layout and done < len(workers):
            if not self._left:
                self._open_chunk(len(workers) - done)
            chunk = self._chunks[-1]
            capacity = len(next(iter(chunk.values())))
            count, start = min(self._left, len(workers) - done), capacity - self._left
            for name in self.layout:
                chunk[name][start : start + count] = rows[name][done : done + count]
            for place, worker in enumerate(workers[done : done + count], start):
                self._places[int(worker)] = len(self._chunks) - 1, place
            self._left, done = self._left - count, done + count

    def take(self, name: str, workers: Sequence[int]) -> NDArray[Any]:
        """Return rows of one array, (k, ...): a view of a single row, otherwise a copy."""
        places = [self._places[worker] for worker in workers]
        if len(places) == 1:
            chunk, row = places[0]
            return self._chunks[chunk][name][row : row + 1]
        if len({chunk for chunk, _ in places}) == 1:
            found: NDArray[Any] = self._chunks[places[0][0]][name][[row for _, row in places]]
            return found
        shape, kind = self.layout[name]
        found = np.empty((len(places), *shape), kind)
        for place, (chunk, row) in enumerate(places):
            found[place] = self._chunks[chunk][name][row]
        return found

    def put(self, name: str, workers: Sequence[int], rows: NDArray[Any]) -> None:
        """Replace rows of one array."""
        for worker, row in zip(workers, rows, strict=True):
            chunk, place = self._places[worker]
            self._chunks[chunk][name][place] = row

    def blocks(self, name: str) -> Iterator[NDArray[Any]]:
        """Yield all rows of one array, in the order of `workers`."""
        left = len(self)
        for chunk in self._chunks:
            yield chunk[name][:left]
            left -= len(chunk[name])

    def _open_chunk(self, wanted: int) -> None:
        """Allocate rows for some new workers, and a few spare ones."""
        offsets = {}
        held = sum(len(next(iter(chunk.values()))) for chunk in self._chunks)

        def lay_out(capacity: int) -> int:
            end = 0
            for name, (shape, kind) in self.layout.items():
                offsets[name] = end
                end += -(-capacity * int(np.prod(shape)) * kind.itemsize // _ALIGNED) * _ALIGNED
            return end

        def capacity_of(chunk_bytes: int) -> int:
            return min(max(wanted, chunk_bytes // max(1, self.row_bytes)), self._most - held)

        capacity = capacity_of(_CHUNK_BYTES)
        size = lay_out(capacity)
        raw: NDArray[np.uint8]
        if held * self.row_bytes + size <= self._room:
            raw = np.empty(size, np.uint8)  # pages that no row touches take no memory
        else:
            capacity = capacity_of(_FILE_CHUNK_BYTES)
            raw = self._map(lay_out(capacity))
        chunk = {}
        for name, (shape, kind) in self.layout.items():
            each = int(np.prod(shape)) * kind.itemsize
            part = raw[offsets[name] : offsets[name] + capacity * each]
            chunk[name] = np.frombuffer(part.data, kind, capacity * int(np.prod(shape))).reshape(capacity, *shape)
        self._chunks.append(chunk)
        self._left = capacity

    def _map(self, size: int) -> NDArray[np.uint8]:
        """Return new bytes of the temporary file, mapped; raise UserError if its disk is full."""
        size = -(-size // 2**16) * 2**16
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the table
        try:
            if hasattr(os, "posix_fallocate"):  # otherwise a full disk would be found by writing to the map
                os.posix_fallocate(self._file.fileno(), self._file_end, size)
            else:
                self._file.truncate(self._file_end + size)
        except OSError as error:
            raise UserError(
                f"What workers keep between rounds takes more than the {format_bytes(self._room)} of memory available, "
                f"and {tempfile.gettempdir()} has less than {format_bytes(size)} free for the rest ({error.strerror}). "
                "Set TMPDIR to a folder on a larger disk, or use fewer workers or a smaller model.",
                code="too-large",
            ) from error
        made = np.memmap(self._file, np.uint8, "r+", self._file_end, (size,))
        self._file_end += size
        return made


def room_in_file() -> int:
    """Return the bytes that a table's temporary file may take."""
    return shutil.disk_usage(tempfile.gettempdir()).free


def rows_in_memory_bytes() -> int:
    """Return the bytes of memory that a table may take; further rows are in a temporary file."""
    return free_memory() // 2
