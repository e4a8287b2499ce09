"""How what workers remember lies in memory between two rounds: float32, or positions and velocities in half the space.

bfloat16 is the upper half of a float32: its range, and 8 bits instead of 24. A round itself is computed in float32. The
personal best keeps all its bits: a claim is about that very model, to the bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbdsl.arrays import Floats
from cbdsl.spec_groups import SwarmSpec
from cbdsl.workers.swarm import Particles

Halves = NDArray[np.uint16]
"""bfloat16 numbers, as bits: numpy has no such type."""

_NO_NUMBER = np.uint16(0x7FC0)


def halved(values: Floats) -> Halves:
    """To the nearest bfloat16, ties to even; what is no number stays none."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    halves: Halves = rounded.astype(np.uint16)
    halves[np.isnan(values)] = _NO_NUMBER  # rounded up, its bits would run over
    return halves


def whole(values: NDArray[Any]) -> NDArray[Any]:
    """An array as rounds work on it: halves as float32, everything else as it is."""
    if values.dtype != np.uint16:
        return values
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def as_stored(values: Floats, swarm: SwarmSpec) -> NDArray[Any]:
    """Positions or velocities as they are kept."""
    return values if swarm.storage == "float32" else halved(values)


def stored(rows: Particles, swarm: SwarmSpec) -> Particles:
    """Rows as they are kept."""
    return replace(
        rows, positions=as_stored(rows.positions, swarm), velocities=as_stored(rows.velocities, swarm)
    )  # fmt: skip


def opened(rows: Particles) -> Particles:
    """Rows as rounds work on them, from rows as they are kept."""
    return Particles(*(whole(array) for array in vars(rows).values()))


def bytes_of_row(size: int, swarm: SwarmSpec, packed: int) -> int:
    """What a worker with a model of so many numbers takes; packed: bytes of a codec's pack, if there is one."""
    return (12 if swarm.storage == "float32" else 8) * size + 12 + packed
