from __future__ import annotations

import contextlib
import random
import struct

import cbor2
import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from cbdsl.network import wire
from cbdsl.network.wire import (
    Announcement,
    Assembly,
    ClaimMessage,
    Hello,
    Invitation,
    Message,
    OrderMessage,
    Piece,
    Status,
    Welcome,
    WireError,
)

KINDS: list[type[Message]] = [Status, Hello, Announcement, Welcome, OrderMessage, ClaimMessage, Invitation, Piece]

runs, digests, sessions = (st.binary(min_size=n, max_size=n) for n in (8, 16, 8))
rounds = st.integers(0, wire.MAX_ROUND)
singles = st.floats(width=32)
doubles = st.floats(allow_nan=False, allow_infinity=False)
MESSAGES: dict[type[Message], st.SearchStrategy[Message]] = {
    Status: st.builds(Status, st.booleans(), sessions),
    Hello: st.builds(Hello, sessions, st.integers(0, 2**31 - 1), rounds, runs, rounds, digests, st.text(max_size=64)),
    Announcement: st.builds(
        Announcement, runs, st.text(max_size=200), st.text(max_size=200), st.integers(1, 10**8),
        st.integers(1, 8), st.text(max_size=50),
        st.integers(1, 1000), st.integers(0, 10**6), st.integers(0, 10**6), digests, st.integers(0, wire.MAX_WHOLE),
    ),
    Welcome: st.builds(Welcome, runs, st.integers(0, wire.MAX_WORKERS - 1), digests, rounds, rounds),
    OrderMessage: st.builds(
        OrderMessage, runs, rounds, st.sampled_from(["swarm", "average", "finish"]), st.binary(max_size=50), doubles,
        doubles, rounds, digests,
    ),
    ClaimMessage: st.builds(ClaimMessage, runs, rounds, singles, st.binary(max_size=16)),
    Invitation: st.builds(Invitation, runs, rounds, st.binary(max_size=20)),
    Piece: st.builds(
        Piece, runs, rounds, digests, st.integers(1, wire.MAX_WHOLE), st.integers(0, wire.MAX_WHOLE // wire.CHUNK),
        st.binary(min_size=1, max_size=300),
    ),
}  # fmt: skip
any_message = st.one_of(list(MESSAGES.values()))


@given(any_message)
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    again = wire.decode(wire.encode(message), type(message))
    assert repr(again) == repr(message)  # by text: NaN is not equal to itself
    assert wire.encode(again) == wire.encode(message)


@given(st.binary(max_size=400), st.sampled_from(KINDS))
@example(b"", Status)
@example(b"\x9b" + b"\xff" * 8, ClaimMessage)  # an array of 2^64 items
@example(b"\x86\x02\x06\x5b" + b"\x7f" * 8, ClaimMessage)  # a byte string of exabytes
@example(b"\x85\x04\x07\xc5\x82\x3b" + b"\x7f" * 8 + b"\x01\x01", Invitation)  # a bigfloat that would take for ever
@example(b"\x85\x04\x07\xd8\x23\x61(\x01", Invitation)  # a regular expression
def test_any_bytes_are_a_message_or_a_wire_error(payload: bytes, kind: type[Message]) -> None:
    try:
        message = wire.decode(payload, kind)
    except WireError:
        return
    assert wire.encode(message) == payload


@given(any_message, st.data())
def test_a_damaged_message_is_a_message_or_a_wire_error(message: Message, data: st.DataObject) -> None:
    payload = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(payload) - 1))
        match data.draw(st.sampled_from(["change", "remove", "insert", "cut"])):
            case "change":
                payload[place] = data.draw(st.integers(0, 255))
            case "remove" if len(payload) > 1:
                del payload[place]
            case "insert":
                payload.insert(place, data.draw(st.integers(0, 255)))
            case _:
                del payload[max(1, place) :]
    with contextlib.suppress(WireError):
        wire.decode(bytes(payload), type(message))


_trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(st.lists(_trees, max_size=12), st.sampled_from(KINDS))
def test_other_cbor_is_a_message_or_a_wire_error(tree: list[object], kind: type[Message]) -> None:
    code = KINDS.index(kind) + 1
    with contextlib.suppress(WireError):
        wire.decode(cbor2.dumps([wire.VERSION, code, *tree]), kind)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (bytes(wire.MAX_MESSAGE + 1), "too large"),
        (
            cbor2.dumps([wire.VERSION + 1, 7, bytes(8), 3, b""]),
            f"has version {wire.VERSION}: upgrade cbdsl on this machine",
        ),
        (
            cbor2.dumps([wire.VERSION - 1, 7, bytes(8), 3, b""]),
            f"version {wire.VERSION - 1}, but .*: upgrade cbdsl on the sender",
        ),
        (cbor2.dumps([10**6, 7, bytes(8), 3, b""]), "unsupported protocol version"),
        (cbor2.dumps([wire.VERSION, 6, bytes(8), 3, b""]), "unexpected kind"),
        (cbor2.dumps([wire.VERSION, 7, bytes(7), 3, b""]), "out of range"),
        (cbor2.dumps([wire.VERSION, 7, bytes(8), True, b""]), "out of range"),
        (cbor2.dumps([wire.VERSION, 7, bytes(8), -3, b""]), "out of range"),
        (b"\x85\x05\x07\x48" + bytes(8) + b"\x18\x03\x40", "not canonical"),
        (cbor2.dumps([wire.VERSION, 7, bytes(8), [3], b""]), "well-formed"),
        (cbor2.dumps([wire.VERSION, 7, bytes(8), 3, b""]) + b"\x00", "well-formed"),
    ],
)
def test_what_is_wrong_is_named(payload: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        wire.decode(payload, Invitation)


def test_a_score_must_be_a_float32() -> None:
    with pytest.raises(WireError, match="out of range"):
        wire.encode(ClaimMessage(bytes(8), 1, 0.1, b""))
    as_single = struct.unpack("<f", struct.pack("<f", 0.1))[0]
    assert len(wire.encode(ClaimMessage(bytes(8), 1, as_single, b""))) < 24


def test_the_largest_piece_fits_what_managed_brokers_take() -> None:
    content = bytes(wire.CHUNK)
    piece = Piece(bytes(8), wire.MAX_ROUND, bytes(16), wire.MAX_WHOLE, wire.MAX_WHOLE // wire.CHUNK, content)
    assert len(wire.encode(piece)) <= 100 * 1024


@given(
    size=st.integers(1, 3 * wire.CHUNK),
    seed=st.integers(0, 2**32),
    copies=st.integers(1, 3),
    lost=st.booleans(),
)
def test_pieces_make_the_whole_in_any_order_and_however_often(size: int, seed: int, copies: int, lost: bool) -> None:
    rng = random.Random(seed)
    content = rng.randbytes(size)
    sent = [piece for piece in wire.split_content(bytes(8), 1, content) for _ in range(copies)]
    rng.shuffle(sent)
    if lost:
        gone = rng.randrange(wire.piece_count(size))
        sent = [piece for piece in sent if piece.index != gone]
    assembly = Assembly(wire.digest_of(content), size)
    results = [assembly.add(piece) for piece in sent]
    assert [result for result in results if result is not None] == ([] if lost else [content])


def test_pieces_that_do_not_belong_are_refused() -> None:
    content = bytes(range(256)) * 1000
    first, *_ = wire.split_content(bytes(8), 1, content)
    assembly = Assembly(first.digest, first.size)
    for wrong in (
        Piece(bytes(8), 1, bytes(16), first.size, 0, first.data),
        Piece(bytes(8), 1, first.digest, first.size + 1, 0, first.data),
        Piece(bytes(8), 1, first.digest, first.size, 0, first.data[:-1]),
        Piece(bytes(8), 1, first.digest, first.size, 99, first.data),
    ):
        with pytest.raises(WireError):
            assembly.add(wrong)


def test_a_false_hash_is_found() -> None:
    assembly = Assembly(bytes(16), 4)
    with pytest.raises(WireError, match="hash"):
        assembly.add(Piece(bytes(8), 1, bytes(16), 4, 0, b"1234"))


@given(st.sets(st.integers(0, 300)))
def test_participants_as_bits(workers: set[int]) -> None:
    bits = wire.pack_bits(tuple(workers))
    assert {worker for worker in range(310) if wire.has_bit(bits, worker)} == workers


def test_weights_keep_every_bit() -> None:
    weights = np.array([0.1, -0.0, np.nan, np.inf, 1e-45], np.float32)
    assert wire.weights_from_bytes(wire.weights_to_bytes(weights)).tobytes() == weights.tobytes()
