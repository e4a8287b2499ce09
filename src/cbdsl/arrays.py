"""Array types by name, products of vectors, and `Samples`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbdsl.errors import UserError

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Indices = NDArray[np.int32]
Bools = NDArray[np.bool_]
Seeds = NDArray[np.uint64]
Labels = NDArray[Any]  # (N,) int32, or targets (N, T) float32
NamedArrays = dict[str, NDArray[Any]]

PADDING = -1
"""Fills the end of a row of indices that has fewer samples than others."""


def dot(one: NDArray[np.floating], other: NDArray[np.floating]) -> float:
    """Return the dot product of two vectors. Unlike that of BLAS it does not depend on the number of threads."""
    return float(np.einsum("i,i->", one, other))


def norm(vector: NDArray[np.floating]) -> float:
    """Return the Euclidean length of a vector; see `dot`."""
    return math.sqrt(dot(vector, vector))


def copy_memory(memory: object, owner: str) -> NamedArrays:
    """Return a copy of a part's memory with read-only arrays; raise UserError if it cannot be saved with the run.

    >>> copy_memory({"seen": np.arange(2)}, "The attack X")
    {'seen': array([0, 1])}
    """
    if not isinstance(memory, Mapping):
        raise _invalid_memory(owner, f"a {type(memory).__name__}")
    copies: NamedArrays = {}
    for name, value in memory.items():
        if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII)):
            raise _invalid_memory(owner, f"the name {name!r}")
        if not (isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf"):
            raise _invalid_memory(owner, f"{name}, a {type(value).__name__}")
        copies[name] = np.array(value)
        copies[name].flags.writeable = False
    return copies


def _invalid_memory(owner: str, what: str) -> UserError:
    return UserError(
        f"{owner} remembers {what}. A memory must be a dict of numpy arrays of numbers, with names of letters, "
        "digits and underscores.",
        code="invalid-part",
    )


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples with their labels or targets. Workers share one such set and refer to their own samples by index.

    The labels of a regression are its targets: real numbers, scaled as the data set says. A reconstruction has none, as
    its targets are the features: its labels are 0, or in a test set 1 for what is not normal.

    >>> samples = Samples(np.zeros((3, 2), np.float32), np.array([0, 1, 1], np.int32))
    >>> len(samples), samples.taken(np.array([0, 2])).labels.tolist()
    (3, [0, 1])
    """

    features: Floats  # (N, *shape)
    labels: Labels  # (N,) int32; targets are (N, T) float32

    def __len__(self) -> int:
        return len(self.labels)

    def taken(self, indices: Indices) -> Samples:
        """Return a copy of the samples with these indices."""
        return Samples(self.features[indices], self.labels[indices])

    @staticmethod
    def joined(parts: Sequence[Samples]) -> Samples:
        """Concatenate samples."""
        return Samples(np.concatenate([one.features for one in parts]), np.concatenate([one.labels for one in parts]))
