"""As few bits as keep the score: whoever sends a model measures on D_sc what a bit costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cbdsl import register
from cbdsl.arrays import Floats
from cbdsl.codecs.base import Codec, CodecError, Scores, Sent
from cbdsl.codecs.uniform import Q2, Q3, Q4, Q8
from cbdsl.errors import UserError

_CHOICES: tuple[Codec, ...] = (Q2(), Q3(), Q4(), Q8())  # from the shortest on


@register.codec("adaptive")
@dataclass(frozen=True)
class Adaptive(Codec):
    """2, 3, 4 or 8 bits, the fewest whose model scores within `slack` of the best of them (0.01: one per cent).

    Every model is scored up to four times.
    """

    slack: float = 0.01

    measures = True

    def __post_init__(self) -> None:
        if not 0 <= self.slack < 1:
            raise UserError(
                f"The slack of adaptive is a share of the score, 0 or more and below 1; given {self.slack}."
            )

    def longest(self, size: int) -> int:
        """A byte that says which codec, and its pack."""
        return 1 + _CHOICES[-1].longest(size)

    def pack(self, model: Floats, reference: Floats) -> bytes:
        """Without scores to go by: with all bits."""
        return bytes([len(_CHOICES) - 1]) + _CHOICES[-1].pack(model, reference)

    def unpack(self, pack: bytes, reference: Floats) -> Floats:
        """By the codec that the first byte names."""
        if not pack or pack[0] >= len(_CHOICES):
            raise CodecError("not a packed model")
        return _CHOICES[pack[0]].unpack(pack[1:], reference)

    def cut(self, pack: bytes, size: int) -> bytes:
        """As long as the codec makes it that the first byte names."""
        return pack[: 1 + _CHOICES[pack[0]].longest(size)]

    def sent(self, models: Floats, reference: Floats, scores: Scores | None) -> Sent:
        """Each row with the fewest bits that keep its score."""
        if scores is None:
            return super().sent(models, reference, scores)
        tried = [codec.sent(models, reference, scores) for codec in _CHOICES]
        table = np.stack([one.scores for one in tried])  # (choices, k)
        best = np.nan_to_num(table, nan=np.inf, posinf=np.inf).min(0)
        good = table <= best * (1 + self.slack)  # False for NaN
        choice = np.where(good.any(0), good.argmax(0), len(_CHOICES) - 1)
        packs = np.zeros((len(models), self.longest(len(reference))), np.uint8)
        packs[:, 0] = choice
        decoded = np.empty_like(models)
        for row, index in enumerate(choice):
            pack = tried[index].packs[row]
            packs[row, 1 : 1 + len(pack)] = pack
            decoded[row] = tried[index].models[row]
        return Sent(packs, decoded, table[choice, np.arange(len(models))])
