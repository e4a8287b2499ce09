"""The weights of a network that do not train, and where they are among all of its weights.

Methods, codecs and messages see the D weights that train. An engine, a model's file and an export need all P.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cbdsl.arrays import Bools, Floats, Indices


@dataclass(frozen=True, eq=False)
class FrozenWeights:
    """Constants among the weights of a network.

    >>> frozen = FrozenWeights(np.array([1.0, 0.0, 3.0], np.float32), np.array([False, True, False]))
    >>> frozen.size, frozen.fill(np.array([2.0], np.float32)).tolist()
    (1, [1.0, 2.0, 3.0])
    """

    values: Floats  # (P,); those of weights that train do not count
    trains: Bools  # (P,)

    @cached_property
    def size(self) -> int:
        """D, the number of weights that train."""
        return int(np.count_nonzero(self.trains))

    @property
    def constants(self) -> Floats:
        """The frozen weights alone, (P - D,)."""
        return self.values[~self.trains]

    @property
    def digest(self) -> str:
        """A hash of the frozen weights and of their places."""
        content = np.packbits(self.trains).tobytes() + np.ascontiguousarray(self.constants, "<f4").tobytes()
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    def fill(self, weights: Floats) -> Floats:
        """Return all weights of a model, (D,) -> (P,)."""
        whole = self.values.copy()
        whole[self.trains] = weights
        return whole

    def runs(self) -> Indices:
        """Return the frozen ranges of the P weights, (k, 2): where each begins, and how many weights it has."""
        edges = np.flatnonzero(np.diff(self.trains, prepend=True, append=True))  # begins and ends in turn
        return np.stack([edges[::2], edges[1::2] - edges[::2]], axis=1).astype(np.int32)

    @staticmethod
    def of_runs(runs: Indices, constants: Floats, count: int) -> FrozenWeights:
        """Build from what `runs` and `constants` return. count: P."""
        trains, values = np.ones(count, np.bool_), np.zeros(count, np.float32)
        for start, length in runs:
            trains[start : start + length] = False
        values[~trains] = constants
        return FrozenWeights(values, trains)
