"""The interface of a codec: encodes a model against a reference that both sides have, and decodes it bit by bit equal.

Quantise, then score: a worker claims and commits to what its bytes decode to, so the server measures that very model.
A codec packs a model into plain bytes. The same entropy coding follows every codec: deflate's Huffman code, without
looking for repetitions. It comes with Python, and is within two hundredths of a bit per weight of the entropy
(docs/codecs.md compares it with an arithmetic coder).
"""

from __future__ import annotations

import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from cbdsl.arrays import Doubles, Floats
from cbdsl.errors import renamed

Packs = NDArray[np.uint8]
Scores = Callable[[Floats], Doubles]
"""Scores models, (k, D) -> (k,)."""


class CodecError(ValueError):
    """Bytes that are not a model; the text is the reason, short and always the same for a cause.

    >>> raise CodecError("not a packed model")
    Traceback (most recent call last):
    ...
    cbdsl.codecs.codec.CodecError: not a packed model
    """


@dataclass(frozen=True, eq=False)
class Sent:
    """Models as the receiver decodes them."""

    packs: Packs  # (k, C), plain bytes
    models: Floats  # (k, D); NaN where a model cannot be sent
    scores: Doubles  # (k,)


class Codec(ABC):
    """Encodes models as bytes. D is the size of a model, C the longest plain pack of one.

    >>> class Halves(Codec):
    ...     def longest_pack(self, size): return 2 * size
    ...     def pack(self, model, reference): return (model - reference).astype("<f2").tobytes()
    ...     def unpack(self, pack, reference): return reference + np.frombuffer(pack, "<f2").astype(np.float32)
    >>> w = np.ones(2, np.float32)
    >>> Halves().decode(Halves().encode(w, 0 * w), 0 * w)
    array([1., 1.], dtype=float32)
    """

    relative: ClassVar[bool] = True  # whether it sends the difference to a reference
    feedback: ClassVar[bool] = False  # whether what it leaves out is added to a worker's next upload, where all upload
    measures: ClassVar[bool] = False  # whether it needs scores to choose an encoding

    def __init_subclass__(cls) -> None:
        """Accept a class that defines a method by its old name, until 1.0."""
        for old, new in _OLD_NAMES.items():
            if old in vars(cls) and new not in vars(cls):
                warnings.warn(f"{cls.__name__}.{old} is now {new}", DeprecationWarning, stacklevel=2)
                setattr(cls, new, vars(cls)[old])

    @abstractmethod
    def longest_pack(self, size: int) -> int:
        """Return C, the most bytes that a plain pack of a model of `size` numbers takes."""

    @abstractmethod
    def pack(self, model: Floats, reference: Floats) -> bytes:
        """Pack a model (D,) against a reference (D,) into plain bytes. Numbers may be anything, NaN too."""

    @abstractmethod
    def unpack(self, pack: bytes, reference: Floats) -> Floats:
        """Unpack plain bytes to a model (D,), to the same bits everywhere; raise CodecError if it is not one."""

    def cut(self, pack: bytes, size: int) -> bytes:
        """Remove from a plain pack what fills it up to C bytes. size: D."""
        del size
        return pack

    def encode_pack(self, pack: Packs, size: int) -> bytes:
        """Return a row of packs, (C,), as it is sent."""
        return deflate(self.cut(pack.tobytes(), size))

    def encode(self, model: Floats, reference: Floats) -> bytes:
        """Encode a model (D,) as it is sent."""
        return deflate(self.pack(model, reference))

    def decode(self, content: bytes, reference: Floats) -> Floats:
        """Decode what was sent to a model (D,); raise CodecError if it is not one, whatever the bytes are."""
        return self.unpack(inflate(content, self.longest_pack(len(reference))), reference)

    def transmit(self, models: Floats, reference: Floats, scores: Scores | None) -> Sent:
        """Encode and decode rows (k, D), and score the result; scores are NaN if `scores` is None."""
        packs = np.zeros((len(models), self.longest_pack(len(reference))), np.uint8)
        decoded = np.empty_like(models)
        for row, model in enumerate(models):
            pack, decoded[row] = self.transmit_one(model, reference)
            packs[row, : len(pack)] = np.frombuffer(pack, np.uint8)
        return Sent(packs, decoded, np.full(len(models), np.nan) if scores is None else scores(decoded))

    def transmit_one(self, model: Floats, reference: Floats) -> tuple[bytes, Floats]:
        """Return a model's plain bytes and what they decode to; NaN if it cannot be sent."""
        pack = self.pack(model, reference)
        try:
            return pack, self.unpack(pack, reference)
        except CodecError:
            return pack, np.full_like(model, np.nan)

    longest = renamed("longest", longest_pack)  # old names, until 1.0
    closed = renamed("closed", encode_pack)
    sent = renamed("sent", transmit)
    passed = renamed("passed", transmit_one)


_OLD_NAMES = {"longest": "longest_pack", "closed": "encode_pack", "sent": "transmit", "passed": "transmit_one"}


_PLAIN, _SHORT = b"\0", b"\1"


def deflate(pack: bytes) -> bytes:
    """Apply the entropy code to plain bytes, unless that is longer; the first byte says which."""
    coder = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    short = coder.compress(pack) + coder.flush()
    return _SHORT + short if len(short) < len(pack) else _PLAIN + pack


def inflate(content: bytes, longest: int) -> bytes:
    """Return the plain bytes, never more than `longest`; raise CodecError if there are none."""
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
