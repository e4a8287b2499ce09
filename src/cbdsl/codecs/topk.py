"""The codec `topk`: the largest differences only, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cbdsl import register
from cbdsl.arrays import Floats
from cbdsl.codecs.codec import Codec, CodecError
from cbdsl.codecs.quantize import Q8
from cbdsl.errors import UserError

_VALUES = Q8()


@register.codec("topk")
@dataclass(frozen=True)
class TopK(Codec):
    """The largest differences to w^g, a twentieth of the weights, 8 bits each.

    Where everybody uploads, what a worker leaves out is added to its next upload (Stich et al. 2018). A claim is about
    the model that is sent, so in a swarm nothing is carried over.
    """

    share: float = 0.05

    feedback = True

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UserError(
                f"topk sends a share of the weights above 0 and up to 1; given {self.share}.", code="out-of-range"
            )

    def longest_pack(self, size: int) -> int:
        """Return one bit per weight, and the values of those that are sent."""
        return -(-size // 8) + _VALUES.longest_pack(self._count(size))

    def pack(self, model: Floats, reference: Floats) -> bytes:
        """Pack which weights are sent, one bit each, then their differences."""
        with np.errstate(over="ignore", invalid="ignore"):
            steps = model - reference
        lengths, count = np.abs(np.nan_to_num(steps, nan=np.inf)), self._count(len(reference))
        least = np.partition(lengths, -count)[-count]
        chosen = lengths > least
        chosen[np.flatnonzero(lengths == least)[: count - int(chosen.sum())]] = True  # of equals the first ones
        values = steps[chosen]
        return np.packbits(chosen).tobytes() + _VALUES.pack(values, np.zeros_like(values))

    def unpack(self, pack: bytes, reference: Floats) -> Floats:
        """Return w^g plus the differences that were sent."""
        size = len(reference)
        count, width = self._count(size), -(-size // 8)
        chosen = np.unpackbits(np.frombuffer(pack[:width], np.uint8)).astype(bool)
        if len(chosen) < size or chosen[size:].any() or int(chosen.sum()) != count:
            raise CodecError("a wrong number of weights")
        model = reference.copy()
        model[chosen[:size]] += _VALUES.unpack(pack[width:], np.zeros(count, np.float32))
        return model

    def _count(self, size: int) -> int:
        return max(1, round(self.share * size))
