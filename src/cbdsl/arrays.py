"""Arrays by name and labelled samples: what every room speaks of. Shapes stand where arrays are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Indices = NDArray[np.int32]
Bools = NDArray[np.bool_]
Seeds = NDArray[np.uint64]

PADDING = -1
"""Stands where a row of indices has no sample; always at the end of its row."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Labelled samples that all workers share; each worker is told which ones are its own by index."""

    features: Floats  # (N, *shape)
    labels: Indices  # (N,)

    def __len__(self) -> int:
        return len(self.labels)

    def taken(self, indices: Indices) -> Samples:
        """The samples with these indices, copied."""
        return Samples(self.features[indices], self.labels[indices])

    @staticmethod
    def joined(parts: Sequence[Samples]) -> Samples:
        """Samples one after the other."""
        return Samples(np.concatenate([one.features for one in parts]), np.concatenate([one.labels for one in parts]))
