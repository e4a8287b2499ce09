"""What a codec is: a model as bytes, against a reference that both sides hold, and back to the same model everywhere.

Quantise, then score: a worker claims and commits to what its bytes decode to, so the server measures that very model.
A codec packs a model into plain bytes; behind every codec the same entropy coding makes them short: Huffman's, as
deflate has it, without looking for repetitions. It is in every Python, and within two hundredths of a bit a weight of
the entropy (docs/codecs.md has the comparison with an arithmetic coder).
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from cbdsl.arrays import Doubles, Floats

Packs = NDArray[np.uint8]
Scores = Callable[[Floats], Doubles]
"""The scores of models, (k, D) -> (k,)."""


class CodecError(ValueError):
    """Bytes that are no model; the text is the reason, short and always the same for a cause."""


@dataclass(frozen=True, eq=False)
class Sent:
    """Models as they will be on the other side."""

    packs: Packs  # (k, C), plain bytes
    models: Floats  # (k, D); NaN where a model cannot be sent
    scores: Doubles  # (k,)


class Codec(ABC):
    """Models as bytes. D is the size of a model, C the longest plain pack of one."""

    relative: ClassVar[bool] = True  # whether it sends the difference to a reference
    feedback: ClassVar[bool] = False  # whether what it leaves out is added to a worker's next upload, where all upload
    measures: ClassVar[bool] = False  # whether it needs scores to choose how to pack

    @abstractmethod
    def longest(self, size: int) -> int:
        """C: how many bytes a plain pack of a model of `size` numbers takes at most."""

    @abstractmethod
    def pack(self, model: Floats, reference: Floats) -> bytes:
        """The plain bytes of a model (D,), against a reference (D,). Any float32 may come, NaN too."""

    @abstractmethod
    def unpack(self, pack: bytes, reference: Floats) -> Floats:
        """The model in plain bytes, (D,), the same to the bit everywhere; CodecError if there is none."""

    def cut(self, pack: bytes, size: int) -> bytes:
        """A plain pack without what fills it up to C bytes; `size`: D."""
        del size
        return pack

    def closed(self, pack: Packs, size: int) -> bytes:
        """A row of packs, (C,), as it is sent."""
        return deflate(self.cut(pack.tobytes(), size))

    def encode(self, model: Floats, reference: Floats) -> bytes:
        """A model (D,) as it is sent."""
        return deflate(self.pack(model, reference))

    def decode(self, content: bytes, reference: Floats) -> Floats:
        """The model in what was sent, (D,); CodecError if there is none, whatever the bytes are."""
        return self.unpack(inflate(content, self.longest(len(reference))), reference)

    def sent(self, models: Floats, reference: Floats, scores: Scores | None) -> Sent:
        """Rows (k, D) as they will be on the other side, and what they score there (NaN where nobody scores)."""
        packs = np.zeros((len(models), self.longest(len(reference))), np.uint8)
        decoded = np.empty_like(models)
        for row, model in enumerate(models):
            pack, decoded[row] = self.passed(model, reference)
            packs[row, : len(pack)] = np.frombuffer(pack, np.uint8)
        return Sent(packs, decoded, np.full(len(models), np.nan) if scores is None else scores(decoded))

    def passed(self, model: Floats, reference: Floats) -> tuple[bytes, Floats]:
        """A model's plain bytes, and what they decode to; NaN if it cannot be sent."""
        pack = self.pack(model, reference)
        try:
            return pack, self.unpack(pack, reference)
        except CodecError:
            return pack, np.full_like(model, np.nan)


_PLAIN, _SHORT = b"\0", b"\1"


def deflate(pack: bytes) -> bytes:
    """Plain bytes with an entropy code, or as they are if that is shorter; a byte says which."""
    coder = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    short = coder.compress(pack) + coder.flush()
    return _SHORT + short if len(short) < len(pack) else _PLAIN + pack


def inflate(content: bytes, longest: int) -> bytes:
    """The plain bytes again; never more than `longest` of them."""
    kind, rest = content[:1], content[1:]
    if kind == _PLAIN and len(rest) <= longest:
        return rest
    if kind != _SHORT:
        raise CodecError("not a packed model")
    decoder = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        pack = decoder.decompress(rest, longest + 1)
    except zlib.error:
        raise CodecError("an entropy code that cannot be read") from None
    if len(pack) > longest or not decoder.eof or decoder.unused_data:
        raise CodecError("an entropy code of a wrong length")
    return pack
