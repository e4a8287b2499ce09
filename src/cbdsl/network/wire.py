"""Messages as bytes: CBOR with a fixed schema and version, hard limits, and one exception for anything invalid.

A message is one flat CBOR array, [version, kind, fields...], in canonical form: integers, floats, byte strings, texts
and booleans, nothing nested, nothing tagged. Its outline is checked before the decoder runs. Large things (models,
shared samples) travel in pieces of at most 100 KiB under a hash of the whole. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Annotated, Any, Literal, TypeVar

import cbor2
import numpy as np

from cbdsl.algorithm.messages import Claim
from cbdsl.arrays import Floats
from cbdsl.util.serialize import Bounds, FieldType, field_types

VERSION = 5
MAX_MESSAGE = 100 * 1024  # managed brokers refuse more
CHUNK = MAX_MESSAGE - 256  # bytes of data in a piece; the rest is for the fields around it
MAX_WHOLE = 2**30  # bytes of the largest thing sent in pieces
MAX_ROUND = 2**31 - 1
MAX_WORKERS = 100_000
RUN_BYTES = 8
DIGEST_BYTES = 16
NO_DIGEST = bytes(DIGEST_BYTES)  # where there is nothing to hash
SESSION_BYTES = 8


class WireError(ValueError):
    """Bytes that are not a valid message; the text is the reason, short and always the same for one cause."""


class _Float32(Bounds):
    """A number that a float32 has exactly; NaN and infinity are judged where scores are judged."""

    def problem(self, value: float) -> str:
        """Return how a value has to be, or ""."""
        if not math.isfinite(value):
            return ""
        fits = abs(value) <= float(np.finfo(np.float32).max)
        return "" if fits and struct.unpack("<f", struct.pack("<f", value))[0] == value else "a float32"


# The types of fields, with their limits.
_Run = Annotated[bytes, Bounds(RUN_BYTES, RUN_BYTES)]
_Digest = Annotated[bytes, Bounds(DIGEST_BYTES, DIGEST_BYTES)]
_Session = Annotated[bytes, Bounds(SESSION_BYTES, SESSION_BYTES)]
_Round = Annotated[int, Bounds(0, MAX_ROUND)]
_Count = Annotated[int, Bounds(0, 2**31 - 1)]
_Double = Annotated[float, Bounds()]
_LongText = Annotated[str, Bounds(0, 20_000)]


@dataclass(frozen=True)
class Status:
    """A worker is connected or not; retained, and its last will."""

    online: bool
    session: _Session  # of one connection: the will of an older one says nothing about a newer one


@dataclass(frozen=True)
class Hello:
    """A worker introduces itself, whenever it connects or receives an announcement."""

    session: _Session
    samples: _Count  # how many samples it has: FedAvg weights models with it
    round: _Round  # the last round it carried out in `run`; 0 if none
    run: _Run  # the run it has state of; zeros if none
    model_version: _Round  # of the w^g that it had in that round
    model_digest: _Digest
    release: Annotated[str, Bounds(0, 64)]


@dataclass(frozen=True)
class Announcement:
    """What is run: enough for a worker that has only its own samples and the native engine."""

    run: _Run
    spec: Annotated[str, Bounds(0, 40_000)]  # TOML
    architecture: Annotated[str, Bounds(0, 50_000)]  # JSON of an `Architecture`; empty if only torch can run the model
    size: Annotated[int, Bounds(1, MAX_WHOLE // 4)]  # D
    vectors: Annotated[int, Bounds(1, 8)]  # V: how many times D numbers a message with a model contains
    shape: Annotated[str, Bounds(0, 200)]  # of a sample, JSON
    classes: Annotated[int, Bounds(1, 2**31 - 1)]
    shared_training: _Count  # samples of D_tr in the shared set
    shared_scoring: _Count  # samples of D_sc in it
    shared_digest: _Digest
    shared_size: Annotated[int, Bounds(0, MAX_WHOLE)]  # bytes as sent; 0 if nothing is shared
    scaling: Annotated[bytes, Bounds(0, 60_000)] = b""  # float64 means, then deviations, per channel; empty: unscaled
    shades: bool = False  # of the scaling: the features were bytes, of which 255 counts as 1
    class_names: _LongText = "[]"  # JSON
    tensors: _LongText = "[]"  # JSON: the names of the weights in the network's own code; empty: those of its layers


@dataclass(frozen=True)
class Welcome:
    """The server sends a worker its number."""

    run: _Run
    worker: Annotated[int, Bounds(0, MAX_WORKERS - 1)]
    start_digest: _Digest  # of the model it starts from, where workers start apart; zeros where they start together
    forget: _Round  # a state of this round is of a history the server does not have: start anew; 0: keep the state
    newest: _Round  # the last round that has begun, or is next: an order of a later one is of another history


@dataclass(frozen=True)
class OrderMessage:
    """An order of the server; see `cbdsl.algorithm.messages.Order`. The model is given by its hash and sent apart."""

    run: _Run
    round: _Round
    task: Literal["swarm", "average", "finish"]
    participants: Annotated[bytes, Bounds(0, MAX_WORKERS // 8)]  # one bit per worker, the lowest first
    inertia: _Double
    learning_rate: _Double
    version: _Round  # of w^g
    model_digest: _Digest


@dataclass(frozen=True)
class ClaimMessage:
    """A worker's claim: one number and, where it is required, the hash of the model behind it."""

    run: _Run
    round: _Round
    score: Annotated[float, _Float32()]
    commitment: Annotated[bytes, Bounds(0, DIGEST_BYTES)]


@dataclass(frozen=True)
class Invitation:
    """The server asks one worker for its model, and repeats the claim that it received.

    A worker that did not make that claim has lost its state since, or another process has its name: it sends nothing,
    and no worker is banned.
    """

    run: _Run
    round: _Round
    claim: Annotated[bytes, Bounds(0, 4 + DIGEST_BYTES)]  # as of `pack_claim`; empty where there are no claims


@dataclass(frozen=True)
class Piece:
    """One piece of something large: bytes `index * CHUNK` and on of `size` bytes in all."""

    run: _Run
    round: _Round
    digest: _Digest
    size: Annotated[int, Bounds(1, MAX_WHOLE)]
    index: Annotated[int, Bounds(0, MAX_WHOLE // CHUNK)]
    data: Annotated[bytes, Bounds(1, CHUNK)]


Message = Status | Hello | Announcement | Welcome | OrderMessage | ClaimMessage | Invitation | Piece
_M = TypeVar("_M", bound=Message)

_KINDS: dict[type[Any], int] = {
    Status: 1,
    Hello: 2,
    Announcement: 3,
    Welcome: 4,
    OrderMessage: 5,
    ClaimMessage: 6,
    Invitation: 7,
    Piece: 8,
}
_FIELDS: dict[type[Any], tuple[FieldType, ...]] = {kind: field_types(kind) for kind in _KINDS}


def encode(message: Message) -> bytes:
    """Return the bytes of a message; equal messages have equal bytes."""
    values = astuple(message)
    if not _are_valid(type(message), values):
        raise WireError(f"a {type(message).__name__} with a value out of range")
    return cbor2.dumps([VERSION, _KINDS[type(message)], *values], canonical=True)


def decode(payload: bytes, expected: type[_M]) -> _M:
    """Return the message of the expected kind in these bytes; raise WireError for anything else."""
    if len(payload) > MAX_MESSAGE:
        raise WireError("too large")
    _check_outline(payload, 2 + len(_FIELDS[expected]))
    try:
        values = cbor2.loads(payload)
    except Exception as error:  # the decoder's own errors differ by version
        raise WireError("not CBOR") from error
    if not isinstance(values, list) or type(values[0]) is not int:
        raise WireError("not a well-formed message")
    if values[0] != VERSION:
        raise WireError(_describe_version(values[0]))
    if values[1] != _KINDS[expected] or type(values[1]) is not int:
        raise WireError("an unexpected kind of message")
    if not _are_valid(expected, values[2:]):
        raise WireError("a value out of range")
    if cbor2.dumps(values, canonical=True) != payload:
        raise WireError("not canonical")
    return expected(*values[2:])


def _describe_version(version: int) -> str:
    """Return the reason for refusing a message of another version: both versions and what to upgrade."""
    if not 0 < version < 100:  # not of any release; the reasons must be few
        return "an unsupported protocol version"
    older = "the sender" if version < VERSION else "this machine"
    return f"protocol version {version}, but this release has version {VERSION}: upgrade cbdsl on {older}"


def _are_valid(kind: type[Any], values: Sequence[Any]) -> bool:
    return all(field.accepts(value) for field, value in zip(_FIELDS[kind], values, strict=True))


def _check_outline(payload: bytes, items: int) -> None:
    """Raise WireError unless this is one array of `items` plain items: nothing nested, tagged or of unknown length."""
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


def pack_claim(claim: Claim | None) -> bytes:
    """Encode a claim as an invitation repeats it: the score's four bytes and the commitment; empty for None."""
    return b"" if claim is None else struct.pack("<f", claim.score) + claim.commitment


def digest_of(content: bytes | bytearray) -> bytes:
    """Return the hash under which something large is sent."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def split_content(run: bytes, round_number: int, content: bytes) -> Iterator[Piece]:
    """Yield the pieces of something large, each small enough for a broker."""
    if not 1 <= len(content) <= MAX_WHOLE:
        raise WireError(f"{len(content):,} bytes of content; 1 to {MAX_WHOLE:,} can be sent")
    digest = digest_of(content)
    for index in range(piece_count(len(content))):
        data = content[index * CHUNK : (index + 1) * CHUNK]
        yield Piece(run, round_number, digest, len(content), index, data)


def piece_count(size: int) -> int:
    """Return how many pieces `size` bytes are sent in."""
    return -(-size // CHUNK)


class Assembly:
    """Joins pieces that come in any order, some repeatedly. Allocates `size` bytes and no more."""

    def __init__(self, digest: bytes, size: int) -> None:
        self.digest, self.size = digest, size
        self._content = bytearray(size)
        self._missing = set(range(piece_count(size)))

    @property
    def missing(self) -> int:
        """How many pieces are missing."""
        return len(self._missing)

    def add(self, piece: Piece) -> bytes | None:
        """Add a piece and return the content when it is complete; raise WireError for a wrong piece or hash."""
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
    """Encode flat weights as little-endian float32."""
    return np.ascontiguousarray(weights, dtype="<f4").tobytes()


def weights_from_bytes(content: bytes) -> Floats:
    """Decode flat weights (D,) into a new array."""
    return np.frombuffer(content, dtype="<f4").astype(np.float32)


def pack_bits(workers: tuple[int, ...]) -> bytes:
    """Encode a set of workers, one bit each."""
    if not workers:
        return b""
    row = np.zeros(max(workers) + 1, dtype=np.uint8)
    row[list(workers)] = 1
    return np.packbits(row, bitorder="little").tobytes()


def has_bit(bits: bytes, worker: int) -> bool:
    """Return whether a worker is in an encoded set."""
    return worker // 8 < len(bits) and bool(bits[worker // 8] >> (worker % 8) & 1)
