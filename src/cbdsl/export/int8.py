"""Weights of eight bits: a whole number from -127 to 127 each, and a factor for every output of a layer.

Biases, norms and all that flows between layers stay floats. What a rounded model gets wrong can be measured on any
engine: `weights_of` has it as floats again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cbdsl.arrays import Floats
from cbdsl.export.steps import Step
from cbdsl.models.layers import Conv1d, Conv2d, Linear

_MOST = 127


@dataclass(frozen=True, eq=False)
class Rounded:
    """The weights of one layer."""

    numbers: NDArray[np.int8]  # (outputs, ...)
    scales: Floats  # (outputs,)

    def floats(self) -> Floats:
        """What they stand for."""
        behind = (1,) * (self.numbers.ndim - 1)
        return np.asarray(self.numbers * self.scales.reshape(-1, *behind), np.float32)


def rounded(steps: Sequence[Step]) -> dict[int, Rounded]:
    """The weights of all convolutions and dense layers, by step."""
    return {
        step.number: _round(step.tensors["weight"])
        for step in steps
        if isinstance(step.layer, Conv1d | Conv2d | Linear)
    }


def weights_of(steps: Sequence[Step]) -> Floats:
    """Flat weights (D,) of the rounded model."""
    made = rounded(steps)
    parts = [
        made[step.number].floats() if name == "weight" and step.number in made else values
        for step in steps
        for name, values in step.tensors.items()
    ]
    return np.concatenate([part.reshape(-1) for part in parts])


def _round(weights: Floats) -> Rounded:
    rows = np.abs(weights.reshape(len(weights), -1)).max(axis=1)
    scales = np.asarray(np.where(rows > 0, rows / _MOST, 1.0), np.float32)
    scales[scales == 0] = 1.0  # smaller than a float32 can say: all of the row is 0
    behind = (1,) * (weights.ndim - 1)
    numbers = np.clip(np.rint(weights / scales.reshape(-1, *behind)), -_MOST, _MOST)
    return Rounded(numbers.astype(np.int8), scales)
