"""Array types by name, products of vectors, and `Samples`."""

from __future__ import annotations

import math
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
"""Fills the end of a row of indices that has fewer samples than others."""


def dot(one: NDArray[np.floating], other: NDArray[np.floating]) -> float:
    """Return the dot product of two vectors. Unlike that of BLAS it does not depend on the number of threads."""
    return float(np.einsum("i,i->", one, other))


def norm(vector: NDArray[np.floating]) -> float:
    """Return the Euclidean length of a vector; see `dot`."""
    return math.sqrt(dot(vector, vector))


@dataclass(frozen=True, eq=False)
class Samples:
    """Labelled samples. Workers share one such set and refer to their own samples by index.

    >>> samples = Samples(np.zeros((3, 2), np.float32), np.array([0, 1, 1], np.int32))
    >>> len(samples), samples.taken(np.array([0, 2])).labels.tolist()
    (3, [0, 1])
    """

    features: Floats  # (N, *shape)
    labels: Indices  # (N,)

    def __len__(self) -> int:
        return len(self.labels)

    def taken(self, indices: Indices) -> Samples:
        """Return a copy of the samples with these indices."""
        return Samples(self.features[indices], self.labels[indices])

    @staticmethod
    def joined(parts: Sequence[Samples]) -> Samples:
        """Concatenate samples."""
        return Samples(np.concatenate([one.features for one in parts]), np.concatenate([one.labels for one in parts]))
