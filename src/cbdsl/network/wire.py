"""Messages as bytes: CBOR with a fixed schema and version, hard limits, and one exception for whatever is wrong.

A message is one flat CBOR array, [version, kind, fields...], in canonical form: whole numbers, floats, byte strings,
texts and truth values, nothing nested, nothing tagged. Its outline is checked before the decoder sees it. Large things
(models, shared samples) travel in pieces of at most 100 KiB under a hash of the whole. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

import cbor2
import numpy as np

from cbdsl.algorithm.messages import Claim
from cbdsl.arrays import Floats

VERSION = 5
MAX_MESSAGE = 100 * 1024  # managed brokers refuse more
CHUNK = MAX_MESSAGE - 256  # bytes of data in a piece; the rest is for the fields around it
MAX_WHOLE = 2**30  # bytes of the largest thing sent in pieces
MAX_ROUND = 2**31 - 1
MAX_WORKERS = 100_000
RUN_BYTES = 8
DIGEST_BYTES = 16
NO_DIGEST = bytes(DIGEST_BYTES)  # of what there is none of
SESSION_BYTES = 8


class WireError(ValueError):
    """Bytes that are no message of this protocol; the text is the reason, short and always the same for a cause."""


@dataclass(frozen=True)
class Status:
    """A worker is there or gone; retained, and left behind as its last will."""

    online: bool
    session: bytes  # of one connection: the will of an older one says nothing about a newer one


@dataclass(frozen=True)
class Hello:
    """A worker introduces itself, whenever it connects or hears of a run."""

    session: bytes
    samples: int  # how many samples it holds: FedAvg weights models with it
    round: int  # the last round it carried out in `run`; 0 if none
    run: bytes  # the run it has state of; zeros if none
    model_version: int  # of the w^g that it had in that round
    model_digest: bytes  # of its numbers
    release: str


@dataclass(frozen=True)
class Announcement:
    """What is run: enough for a worker that has only its own samples and the native engine."""

    run: bytes
    spec: str  # TOML
    architecture: str  # JSON of engines.architecture; empty if only torch can run the model
    size: int  # D
    vectors: int  # V: how many times D numbers a message with a model carries
    shape: str  # of a sample, JSON
    classes: int
    shared_training: int  # samples of D_tr in the shared set
    shared_scoring: int  # samples of D_sc in it
    shared_digest: bytes
    shared_size: int  # bytes as sent; 0 if nothing is shared
    scaling: bytes = b""  # means, then deviations, one a channel, float64; empty: features are used as they are
    shades: bool = False  # of the scaling: the features were bytes, of which 255 counts as 1
    class_names: str = "[]"  # JSON
    tensors: str = "[]"  # JSON: what the network's own code calls its weights, in their order; empty: as its layers do


@dataclass(frozen=True)
class Welcome:
    """The server tells a worker its number."""

    run: bytes
    worker: int
    start_digest: bytes  # of the model it starts from, where workers start apart; zeros where they start together
    forget: int  # a state of this round is of a history the server does not know: start anew; 0: keep what is there
    newest: int  # the last round that has begun, or is next: an order of a later one is of a history that is no more


@dataclass(frozen=True)
class OrderMessage:
    """An order of the server; see `cbdsl.algorithm.messages.Order`. The model is named by its hash and sent apart."""

    run: bytes
    round: int
    task: str  # swarm, average or finish
    participants: bytes  # a bit for each worker, the lowest first
    inertia: float
    learning_rate: float
    version: int  # of w^g
    model_digest: bytes  # of its numbers


@dataclass(frozen=True)
class ClaimMessage:
    """A worker's claim: one number and, where it is asked for, the hash of the model behind it."""

    run: bytes
    round: int
    score: float  # float32
    commitment: bytes


@dataclass(frozen=True)
class Invitation:
    """The server asks one worker for its model, and repeats the claim that it heard.

    Whoever does not know that claim has lost its state since, or has a double: it stays silent, and nobody is banned.
    """

    run: bytes
    round: int
    claim: bytes  # as `said`; empty where nobody claims a score


@dataclass(frozen=True)
class Piece:
    """One piece of something large: bytes `index * CHUNK` and on of `size` bytes in all."""

    run: bytes
    round: int
    digest: bytes
    size: int
    index: int
    data: bytes


Message = Status | Hello | Announcement | Welcome | OrderMessage | ClaimMessage | Invitation | Piece
_M = TypeVar("_M", bound=Message)
_Check = Callable[[Any], bool]


def _whole(low: int, high: int) -> _Check:
    return lambda value: type(value) is int and low <= value <= high


def _bytes(low: int, high: int | None = None) -> _Check:
    return lambda value: type(value) is bytes and low <= len(value) <= (low if high is None else high)


def _text(longest: int, *allowed: str) -> _Check:
    return lambda value: type(value) is str and len(value) <= longest and (not allowed or value in allowed)


def _truth(value: object) -> bool:
    return type(value) is bool


def _double(value: object) -> bool:
    return type(value) is float and math.isfinite(value)


def _single(value: object) -> bool:
    """A number that a float32 holds exactly; NaN and infinity are judged where scores are judged."""
    if type(value) is not float:
        return False
    return not math.isfinite(value) or (abs(value) <= float(np.finfo(np.float32).max) and _rounded(value) == value)


def _rounded(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


_RUN, _DIGEST, _SESSION, _ROUND = _bytes(RUN_BYTES), _bytes(DIGEST_BYTES), _bytes(SESSION_BYTES), _whole(0, MAX_ROUND)
_SCHEMA: dict[type[Any], tuple[int, tuple[_Check, ...]]] = {
    Status: (1, (_truth, _SESSION)),
    Hello: (2, (_SESSION, _whole(0, 2**31 - 1), _ROUND, _RUN, _ROUND, _DIGEST, _text(64))),
    Announcement: (
        3,
        (
            _RUN, _text(40_000), _text(50_000), _whole(1, MAX_WHOLE // 4), _whole(1, 8), _text(200),
            _whole(1, 2**31 - 1), _whole(0, 2**31 - 1), _whole(0, 2**31 - 1), _DIGEST, _whole(0, MAX_WHOLE),
            _bytes(0, 60_000), _truth, _text(20_000), _text(20_000),
        ),
    ),
    Welcome: (4, (_RUN, _whole(0, MAX_WORKERS - 1), _DIGEST, _ROUND, _ROUND)),
    OrderMessage: (
        5,
        (
            _RUN, _ROUND, _text(10, "swarm", "average", "finish"), _bytes(0, MAX_WORKERS // 8), _double, _double,
            _ROUND, _DIGEST,
        ),
    ),
    ClaimMessage: (6, (_RUN, _ROUND, _single, _bytes(0, DIGEST_BYTES))),
    Invitation: (7, (_RUN, _ROUND, _bytes(0, 4 + DIGEST_BYTES))),
    Piece: (8, (_RUN, _ROUND, _DIGEST, _whole(1, MAX_WHOLE), _whole(0, MAX_WHOLE // CHUNK), _bytes(1, CHUNK))),
}  # fmt: skip


def encode(message: Message) -> bytes:
    """The bytes of a message; equal messages have equal bytes."""
    code, checks = _SCHEMA[type(message)]
    values = astuple(message)
    if not all(check(value) for check, value in zip(checks, values, strict=True)):
        raise WireError(f"a {type(message).__name__} with a value out of range")
    return cbor2.dumps([VERSION, code, *values], canonical=True)


def decode(payload: bytes, expected: type[_M]) -> _M:
    """The message in these bytes, which must be of the kind expected; WireError for anything else."""
    if len(payload) > MAX_MESSAGE:
        raise WireError("too large")
    code, checks = _SCHEMA[expected]
    _check_outline(payload, 2 + len(checks))
    try:
        values = cbor2.loads(payload)
    except Exception as error:  # the decoder's own errors differ by version; no message is worth any of them
        raise WireError("not CBOR") from error
    if not isinstance(values, list) or values[0] != VERSION or type(values[0]) is not int:
        raise WireError("an unsupported protocol version")
    if values[1] != code or type(values[1]) is not int:
        raise WireError("an unexpected kind of message")
    if not all(check(value) for check, value in zip(checks, values[2:], strict=True)):
        raise WireError("a value out of range")
    if cbor2.dumps(values, canonical=True) != payload:
        raise WireError("not canonical")
    return expected(*values[2:])


def _check_outline(payload: bytes, items: int) -> None:
    """One array of so many plain items that ends with the payload: nothing nested, tagged or of unknown length."""
    if not payload or payload[0] != 0x80 | items:
        raise WireError("not a well-formed message")
    position = 1
    for _ in range(items):
        if position >= len(payload):
            raise WireError("not a well-formed message")
        major, extra = payload[position] >> 5, payload[position] & 31
        width = {24: 1, 25: 2, 26: 4, 27: 8}.get(extra, 0)
        if extra > 27 or major in {4, 5, 6}:
            raise WireError("not a well-formed message")
        length = int.from_bytes(payload[position + 1 : position + 1 + width], "big") if width else extra
        position += 1 + width + (length if major in {2, 3} else 0)
    if position != len(payload):
        raise WireError("not a well-formed message")


def said(claim: Claim | None) -> bytes:
    """A claim as an invitation repeats it: the score's four bytes, and the commitment; empty where there is none."""
    return b"" if claim is None else struct.pack("<f", claim.score) + claim.commitment


def digest_of(content: bytes | bytearray) -> bytes:
    """The hash under which something large is sent."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def pieces(run: bytes, round_number: int, content: bytes) -> Iterator[Piece]:
    """Cut something large into pieces that a broker takes."""
    if not 1 <= len(content) <= MAX_WHOLE:
        raise WireError(f"{len(content):,} bytes in one thing; 1 to {MAX_WHOLE:,} can be sent")
    digest = digest_of(content)
    for index in range(piece_count(len(content))):
        data = content[index * CHUNK : (index + 1) * CHUNK]
        yield Piece(run, round_number, digest, len(content), index, data)


def piece_count(size: int) -> int:
    """How many pieces something of so many bytes makes."""
    return -(-size // CHUNK)


class Assembly:
    """Puts pieces together, in any order, each as often as it comes. Holds `size` bytes and no more."""

    def __init__(self, digest: bytes, size: int) -> None:
        self.digest, self.size = digest, size
        self._content = bytearray(size)
        self._missing = set(range(piece_count(size)))

    @property
    def missing(self) -> int:
        """How many pieces have not come yet."""
        return len(self._missing)

    def add(self, piece: Piece) -> bytes | None:
        """Take a piece; the whole once it is complete. WireError for a piece of something else or a false hash."""
        if piece.digest != self.digest or piece.size != self.size:
            raise WireError("a piece of something else")
        start = piece.index * CHUNK
        if start >= self.size or len(piece.data) != min(CHUNK, self.size - start):
            raise WireError("a piece of a wrong length")
        if piece.index not in self._missing:
            return None
        self._content[start : start + len(piece.data)] = piece.data
        self._missing.discard(piece.index)
        if self._missing:
            return None
        if digest_of(self._content) != self.digest:
            raise WireError("a hash mismatch")
        return bytes(self._content)


def weights_to_bytes(weights: Floats) -> bytes:
    """Flat weights as little-endian float32."""
    return np.ascontiguousarray(weights, dtype="<f4").tobytes()


def weights_from_bytes(content: bytes) -> Floats:
    """The inverse of `weights_to_bytes`, (D,); an array of its own."""
    return np.frombuffer(content, dtype="<f4").astype(np.float32)


def bits_of(workers: tuple[int, ...]) -> bytes:
    """A set of workers as bits."""
    if not workers:
        return b""
    row = np.zeros(max(workers) + 1, dtype=np.uint8)
    row[list(workers)] = 1
    return np.packbits(row, bitorder="little").tobytes()


def has_bit(bits: bytes, worker: int) -> bool:
    """Whether a worker is in a set of bits."""
    return worker // 8 < len(bits) and bool(bits[worker // 8] >> (worker % 8) & 1)
