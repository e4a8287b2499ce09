"""Codecs for whole float32 numbers, and for differences in 8, 4, 3 or 2 bits: blocks of 256 weights, one scale each.

Every operation is one that IEEE 754 fixes (a difference, a maximum, a quotient, rounding to the nearest even number),
so all machines pack and unpack equally.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from cbdsl import register
from cbdsl.arrays import Floats
from cbdsl.codecs.codec import Codec, CodecError, Scores, Sent
from cbdsl.errors import UserError


@register.codec("none")
class Whole(Codec):
    """32 bits per weight, unchanged."""

    relative = False

    def longest_pack(self, size: int) -> int:
        """Return four bytes per number."""
        return 4 * size

    def pack(self, model: Floats, reference: Floats) -> bytes:
        """Pack as little-endian float32."""
        del reference
        return np.ascontiguousarray(model, "<f4").tobytes()

    def unpack(self, pack: bytes, reference: Floats) -> Floats:
        """Return the same numbers, finite or not."""
        if len(pack) != 4 * len(reference):
            raise CodecError(f"{len(pack)} bytes instead of {4 * len(reference)}")
        return np.frombuffer(pack, "<f4").astype(np.float32)

    def encode(self, model: Floats, reference: Floats) -> bytes:
        """Pack without an entropy code, which would gain nothing."""
        return self.pack(model, reference)

    def decode(self, content: bytes, reference: Floats) -> Floats:
        """Return the same numbers."""
        return self.unpack(content, reference)


@dataclass(frozen=True)
class Uniform(Codec):
    """w - w^g in 2 L + 1 steps; several to a byte."""

    block: int = 256

    levels: ClassVar[int]  # L: symbols go from -L to L
    together: ClassVar[int] = 1  # how many symbols fit into a byte: (2 L + 1)^together <= 256

    def __post_init__(self) -> None:
        if not 1 <= self.block <= 65536:
            raise UserError(f"A block has 1 to 65536 weights; given {self.block}.", code="out-of-range")

    def longest_pack(self, size: int) -> int:
        """Return two bytes per block, and the symbols."""
        return 2 * -(-size // self.block) + -(-size // self.together)

    def pack(self, model: Floats, reference: Floats) -> bytes:
        """Pack scales as float16, then the symbols."""
        return self._joined(*self._quantised(model, reference), len(reference))

    def transmit_one(self, model: Floats, reference: Floats) -> tuple[bytes, Floats]:
        """Return what `Codec.transmit_one` returns, without unpacking."""
        scales, symbols = self._quantised(model, reference)
        pack = self._joined(scales, symbols, len(reference))
        if not np.isfinite(scales).all():
            return pack, np.full_like(model, np.nan)
        return pack, _rebuilt(scales, symbols, reference)

    def unpack(self, pack: bytes, reference: Floats) -> Floats:
        """Return w^g + scale * symbol."""
        size = len(reference)
        blocks = -(-size // self.block)
        if len(pack) != self.longest_pack(size):
            raise CodecError("a pack of a wrong length")
        scales = np.frombuffer(pack, "<f2", blocks)
        if not (np.isfinite(scales).all() and (scales >= 0).all()):
            raise CodecError("a scale that is not finite")
        table = _table(self.levels, self.together)
        places = np.frombuffer(pack, np.uint8, offset=2 * blocks)
        if int(places.max(initial=0)) >= len(table):
            raise CodecError("a symbol that does not exist")
        symbols = np.zeros(blocks * self.block, np.float32)
        symbols[:size] = table[places].ravel()[:size]
        return _rebuilt(scales, symbols.reshape(blocks, self.block), reference)

    def _quantised(self, model: Floats, reference: Floats) -> tuple[NDArray[np.float16], Floats]:
        """Return scales (B,), and symbols (B, block) as whole float32 numbers; zeros behind the last weight."""
        size, blocks = len(reference), -(-len(reference) // self.block)
        steps = np.zeros(blocks * self.block, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(model, reference, out=steps[:size])
            symbols = steps.reshape(blocks, self.block)
            scales = (np.abs(symbols).max(1) / np.float32(self.levels)).astype(np.float16)
            wide = scales.astype(np.float32)[:, None]
            np.divide(symbols, np.where(wide > 0, wide, np.float32(np.inf)), out=symbols)
            np.rint(symbols, out=symbols)
            np.clip(symbols, -self.levels, self.levels, out=symbols)
        return scales, symbols

    def _joined(self, scales: NDArray[np.float16], symbols: Floats, size: int) -> bytes:
        count, base = -(-size // self.together), 2 * self.levels + 1
        digits = np.full(count * self.together, self.levels, np.uint8)
        if np.isfinite(scales).all():  # otherwise the scales alone say that it cannot be sent
            np.add(symbols.ravel()[:size], np.float32(self.levels), out=digits[:size], casting="unsafe")
        columns = digits.reshape(count, self.together)
        places = columns[:, 0].copy()
        for place in range(1, self.together):
            places += columns[:, place] * np.uint8(base**place)
        return scales.astype("<f2").tobytes() + places.tobytes()


def _rebuilt(scales: NDArray[np.float16], symbols: Floats, reference: Floats) -> Floats:
    steps = symbols * scales.astype(np.float32)[:, None]
    return np.asarray(reference + steps.ravel()[: len(reference)], np.float32)


@lru_cache(maxsize=8)
def _table(levels: int, together: int) -> Floats:
    """Return the symbols that each byte stands for, (bytes, together)."""
    base = 2 * levels + 1
    places = np.arange(base**together)
    return np.stack([places // base**place % base - levels for place in range(together)], axis=1).astype(np.float32)


@register.codec("q8")
class Q8(Uniform):
    """The difference to w^g in 255 steps, some 6.5 bits per weight."""

    levels = 127


@register.codec("q4")
class Q4(Uniform):
    """The difference to w^g in 15 steps, some 2.5 bits per weight."""

    levels, together = 7, 2


@register.codec("q3")
class Q3(Uniform):
    """The difference to w^g in 7 steps, some 1.5 bits per weight."""

    levels, together = 3, 2


@register.codec("q2")
class Q2(Uniform):
    """The difference to w^g in 3 steps, less than half a bit per weight."""

    levels, together = 1, 5


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
                f"The slack of adaptive is a share of the score, 0 or more and below 1; given {self.slack}.",
                code="out-of-range",
            )

    def longest_pack(self, size: int) -> int:
        """Return the size of a byte that names the codec, and of the longest pack."""
        return 1 + _CHOICES[-1].longest_pack(size)

    def pack(self, model: Floats, reference: Floats) -> bytes:
        """Pack with all bits, because there are no scores."""
        return bytes([len(_CHOICES) - 1]) + _CHOICES[-1].pack(model, reference)

    def unpack(self, pack: bytes, reference: Floats) -> Floats:
        """Unpack by the codec that the first byte names."""
        if not pack or pack[0] >= len(_CHOICES):
            raise CodecError("not a packed model")
        return _CHOICES[pack[0]].unpack(pack[1:], reference)

    def cut(self, pack: bytes, size: int) -> bytes:
        """Cut to the length of the codec that the first byte names."""
        return pack[: 1 + _CHOICES[pack[0]].longest_pack(size)]

    def transmit(self, models: Floats, reference: Floats, scores: Scores | None) -> Sent:
        """Encode each row with the fewest bits that keep its score."""
        if scores is None:
            return super().transmit(models, reference, scores)
        tried = [codec.transmit(models, reference, scores) for codec in _CHOICES]
        table = np.stack([one.scores for one in tried])  # (choices, k)
        best = np.nan_to_num(table, nan=np.inf, posinf=np.inf).min(0)
        good = table <= best * (1 + self.slack)  # False for NaN
        choice = np.where(good.any(0), good.argmax(0), len(_CHOICES) - 1)
        packs = np.zeros((len(models), self.longest_pack(len(reference))), np.uint8)
        packs[:, 0] = choice
        decoded = np.empty_like(models)
        for row, index in enumerate(choice):
            pack = tried[index].packs[row]
            packs[row, 1 : 1 + len(pack)] = pack
            decoded[row] = tried[index].models[row]
        return Sent(packs, decoded, table[choice, np.arange(len(models))])
