"""A partition on demand: a worker's samples are drawn when they are asked for, from a stream of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import cbdsl
from cbdsl.arrays import Indices
from cbdsl.spec import DataSpec


@dataclass(frozen=True, eq=False)
class Drawn(Sequence[Indices]):
    """Shares of one shuffled pool that are computed by the worker's number alone and not kept."""

    pool: Indices
    size: int
    workers: int
    key: int

    def __len__(self) -> int:
        return self.workers

    def __getitem__(self, worker: Any) -> Any:  # noqa: ANN401 - one number or a slice
        if isinstance(worker, slice):
            return [self[one] for one in range(*worker.indices(len(self)))]
        if not 0 <= worker < self.workers:
            raise IndexError(worker)
        return np.random.default_rng([self.key, worker]).choice(self.pool, self.size, replace=False)


@cbdsl.register.partition("drawn")
def drawn(pool: cbdsl.Pool, spec: DataSpec, workers: int, rng: np.random.Generator) -> Sequence[Indices]:
    """Every worker draws its samples from the whole pool; two workers may have the same sample."""
    return Drawn(pool.indices, min(len(pool), spec.samples_per_worker), workers, int(rng.integers(2**32)))
