"""Workers' own models, in memory and in a run's folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbdsl.arrays import Floats, Indices
from cbdsl.errors import UserError
from cbdsl.models.network import read_tensors

FILE = "personal_models.safetensors"
_BUFFERS = "buffers/"


@dataclass(frozen=True, eq=False)
class PersonalModels(Mapping[int, Floats]):
    """A mapping from workers' numbers to flat weights, frozen ones included, in the global model's tensor order.

    >>> models = PersonalModels(np.array([3, 7], np.int32), np.array([[1.0, 2.0], [3.0, 4.0]], np.float32))
    >>> models[7].tolist(), list(models), PersonalModels.of(models.tensors())[3].tolist()
    ([3.0, 4.0], [3, 7], [1.0, 2.0])
    """

    workers: Indices  # (m,), sorted
    weights: Floats  # (m, P)
    buffers: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # (m, ...) by name: statistics of BatchNorm

    def __getitem__(self, worker: int) -> Floats:
        place = int(np.searchsorted(self.workers, worker))
        if place == len(self.workers) or self.workers[place] != worker:
            raise KeyError(worker)
        row: Floats = self.weights[place]
        return row

    def __iter__(self) -> Iterator[int]:
        return iter(self.workers.tolist())

    def __len__(self) -> int:
        return len(self.workers)

    def buffers_of(self, worker: int) -> dict[str, NDArray[Any]]:
        """Return the statistics of one worker's model by name."""
        place = int(np.searchsorted(self.workers, worker))
        return {name: rows[place] for name, rows in self.buffers.items()}

    def tensors(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of the file."""
        named = {f"{_BUFFERS}{name}": np.ascontiguousarray(rows) for name, rows in self.buffers.items()}
        return {"workers": self.workers, "weights": self.weights, **named}

    @staticmethod
    def of(tensors: Mapping[str, Any]) -> PersonalModels:
        """Return the models with these `tensors`; raise ValueError if they do not fit together."""
        workers, weights = (np.asarray(tensors.get(name, ())) for name in ("workers", "weights"))
        rising = workers.ndim == 1 and workers.dtype.kind == "i" and bool((np.diff(workers) > 0).all())
        if not rising or weights.ndim != 2 or len(weights) != len(workers) or weights.dtype != np.float32:
            raise ValueError("workers and their weights do not fit together")
        buffers = {name.removeprefix(_BUFFERS): rows for name, rows in tensors.items() if name.startswith(_BUFFERS)}
        if any(len(rows) != len(workers) for rows in buffers.values()):
            raise ValueError("workers and their statistics do not fit together")
        return PersonalModels(workers.astype(np.int32), weights, buffers)

    @staticmethod
    def read(folder: Path) -> PersonalModels | None:
        """Read the models of a run's folder; None if it has none."""
        path = folder / FILE
        if not path.is_file():
            return None
        tensors = read_tensors(path)
        try:
            return PersonalModels.of(tensors)
        except ValueError as error:
            raise UserError(
                f"{path} is damaged ({error}). Write it again from the rest: cbdsl resume {folder}", code="damaged-file"
            ) from error
