"""Write `tests/golden/wire.json`, the test vectors of the wire format, from the code as it is.

    python tools/golden_wire.py            # says which sections would change, and writes nothing
    python tools/golden_wire.py --write    # writes the file

Writing it anew is legitimate in two cases only. (1) A vector is added, and every vector that was there before stays as
it was: the command lists changed sections, and `git diff` shows added lines alone. (2) The wire format is changed on
purpose: then VERSION in the module of the wire format goes up by one, the changelog names the change, and devices with
the old version are refused. A renaming, a new version of a library or a failing test is never a reason: workers in the
field send and expect the recorded bytes.
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cbor2
import numpy as np

HERE = Path(__file__).resolve().parent
GOLDEN = HERE.parent / "tests" / "golden"
sys.path.insert(0, str(GOLDEN.parent))

from support import wire_code as code, wire_numbers as numbers  # noqa: E402

RUN, SESSION = bytes(range(0xA0, 0xA8)), bytes(range(0x10, 0x18))
DIGEST, OTHER = bytes(range(16)), bytes(range(0xF0, 0x100))
NOTHING = bytes(16)
TOML = 'method = "cb-dsl"\nmodel = "softmax"\nworkers = 4\nrounds = 3\nseed = 7\n'
NETWORK = json.dumps(code.describe_network("softmax", (4,), 3)[0])


def single(value: float) -> float:
    """Round a number to a float32."""
    return float(np.float32(value))


MESSAGES: dict[str, tuple[int, list[Any]]] = {
    "status: online": (1, [True, SESSION]),
    "status: offline, as a last will": (1, [False, SESSION]),
    "hello: of a new worker": (2, [SESSION, 500, 0, bytes(8), 0, NOTHING, "0.2.0"]),
    "hello: with state of a run": (2, [SESSION, 1, 23, RUN, 24, DIGEST, "0.2.0"]),
    "hello: largest numbers": (2, [SESSION, 2**31 - 1, 2**31 - 1, RUN, 2**31 - 1, OTHER, "r" * 64]),
    "hello: text that is not ASCII": (2, [SESSION, 0, 255, RUN, 256, DIGEST, "0.3.0-β✓"]),
    "announcement: without optional fields": (3, [RUN, TOML, "", 15, 1, "[4]", 3, 0, 0, NOTHING, 0]),
    "announcement: with a network and shared samples": (
        3,
        [RUN, TOML, NETWORK, 15, 1, "[4]", 3, 10, 20, DIGEST, 65_536],
    ),
    "announcement: with scaling, class names and names of weights": (
        3,
        [
            RUN,
            TOML,
            NETWORK,
            15,
            2,
            "[4]",
            3,
            0,
            20,
            OTHER,
            65_535,
            struct.pack("<8d", *range(1, 9)),
            True,
            '["cat", "dög", "3"]',
            '["0.weight", "0.bias"]',
        ],
    ),
    "announcement: sizes around the widths of a number": (
        3,
        [RUN, "", "", 24, 8, "[1, 28, 28]", 23, 255, 256, DIGEST, 2**30, b"", False, "[]", "[]"],
    ),
    "welcome: first worker, workers start together": (4, [RUN, 0, NOTHING, 0, 1]),
    "welcome: largest number, starts apart, has to forget": (4, [RUN, 99_999, DIGEST, 17, 2**31 - 1]),
    "order: swarm": (5, [RUN, 1, "swarm", b"\x0f", 1.0, 0.01, 1, DIGEST]),
    "order: swarm, numbers that need 64 bits": (5, [RUN, 300, "swarm", b"\xff\x03", 1 / 3, 0.1, 70_000, OTHER]),
    "order: average": (5, [RUN, 2, "average", b"\x05", 0.0, 0.5, 2, DIGEST]),
    "order: finish, nobody takes part": (5, [RUN, 31, "finish", b"", -0.0, 1e300, 28, OTHER]),
    "claim: with a commitment": (6, [RUN, 1, single(0.1), DIGEST]),
    "claim: score that a half holds": (6, [RUN, 2, 2.5, b""]),
    "claim: score that a float32 holds": (6, [RUN, 3, single(2.302585), b""]),
    "claim: largest float32": (6, [RUN, 4, float(np.finfo(np.float32).max), b""]),
    "claim: smallest float32": (6, [RUN, 5, float(np.float32(2**-149)), b""]),
    "claim: zero": (6, [RUN, 6, 0.0, b""]),
    "claim: infinite, judged by the server": (6, [RUN, 7, float("inf"), b""]),
    "claim: not a number, judged by the server": (6, [RUN, 8, float("nan"), b""]),
    "claim: negative, judged by the server": (6, [RUN, 9, -1.0, b"\x01"]),
    "invitation: repeats a claim": (7, [RUN, 1, struct.pack("<f", 0.1) + DIGEST]),
    "invitation: repeats a score alone": (7, [RUN, 2, struct.pack("<f", 2.5)]),
    "invitation: where nobody claims a score": (7, [RUN, 3, b""]),
    "piece: one byte": (8, [RUN, 0, DIGEST, 1, 0, b"\x2a"]),
    "piece: the last of three": (8, [RUN, 12, OTHER, 204_289, 2, bytes(range(200))]),
}

TYPES: dict[int, Sequence[str]] = {
    1: ("bool", "bytes"),
    2: ("bytes", "int", "int", "bytes", "int", "bytes", "text"),
    3: (
        "bytes", "text", "text", "int", "int", "text", "int", "int", "int", "bytes", "int", "bytes", "bool", "text",
        "text",
    ),
    4: ("bytes", "int", "bytes", "int", "int"),
    5: ("bytes", "int", "text", "bytes", "float", "float", "int", "bytes"),
    6: ("bytes", "int", "float", "bytes"),
    7: ("bytes", "int", "bytes"),
    8: ("bytes", "int", "bytes", "int", "int", "bytes"),
}  # fmt: skip


PLAIN: dict[int, list[Any]] = {
    1: [True, SESSION],
    4: [RUN, 0, NOTHING, 0, 1],
    5: [RUN, 1, "swarm", b"\x0f", 1.0, 0.5, 1, DIGEST],
    6: [RUN, 1, 2.5, b""],
    7: [RUN, 1, b""],
    8: [RUN, 0, DIGEST, 200_000, 0, b"\x2a"],
}
"""Valid fields, of which one at a time is replaced below."""

CHANGED: list[tuple[str, int, int, Any]] = [
    ("run too short", 6, 2, RUN[:-1]),
    ("run too long", 6, 2, RUN + b"\0"),
    ("run as text", 6, 2, "abcdefgh"),
    ("round negative", 6, 3, -1),
    ("round too large", 6, 3, 2**31),
    ("round as a truth value", 6, 3, True),
    ("round as a float", 6, 3, 1.0),
    ("score as a whole number", 6, 4, 2),
    ("score that no float32 holds", 6, 4, 0.1),
    ("score beyond float32", 6, 4, 1e39),
    ("score nested in an array", 6, 4, [2.5]),
    ("score null", 6, 4, None),
    ("commitment too long", 6, 5, bytes(17)),
    ("claim too long", 7, 4, bytes(21)),
    ("truth value as a number", 1, 2, 1),
    ("unknown task", 5, 4, "train"),
    ("inertia infinite", 5, 6, float("inf")),
    ("learning rate not a number", 5, 7, float("nan")),
    ("piece without data", 8, 7, b""),
    ("piece of nothing", 8, 5, 0),
    ("piece beyond the largest size", 8, 5, 2**30 + 1),
    ("piece beyond the largest number", 8, 6, 2**30 // 102_144 + 1),
    ("worker beyond the largest number", 4, 3, 100_000),
    ("digest too short", 4, 4, NOTHING[:-1]),
]
"""What is wrong, the kind of message, the place in the array, and the wrong value."""


def messages() -> list[Any]:
    """Each message with its fields and its bytes."""
    found = []
    for name, (kind, given) in MESSAGES.items():
        message = code.build_message(kind, given)
        found.append(
            {
                "name": name,
                "kind": kind,
                "fields": [
                    {"name": field, "type": form, "value": numbers.plain(value, form)}
                    for field, form, value in zip(
                        code.field_names(kind), TYPES[kind], code.message_values(message), strict=True
                    )
                ],
                "bytes": code.wire.encode(message).hex(),
            }
        )
    return found


def refused_messages() -> list[Any]:
    """Bytes that a receiver must refuse, by the kind of message that it expects."""
    good = {kind: code.wire.encode(code.build_message(kind, given)) for kind, given in reversed(MESSAGES.values())}
    found: list[Any] = []

    def add(name: str, kind: int, content: bytes) -> None:
        found.append({"name": name, "kind": kind, "bytes": content.hex()})

    version = code.wire.VERSION
    for kind, content in sorted(good.items()):
        add("last byte missing", kind, content[:-1])
        add("half of it", kind, content[: len(content) // 2])
        add("one byte too many", kind, content + b"\0")
        add("version one lower", kind, content[:1] + bytes([version - 1]) + content[2:])
        add("version one higher", kind, content[:1] + bytes([version + 1]) + content[2:])
        add("version as a truth value", kind, content[:1] + b"\xf5" + content[2:])
        add("another kind", kind, content[:2] + bytes([kind % 8 + 1]) + content[3:])
        add("one field fewer announced", kind, bytes([content[0] - 1]) + content[1:])
        add("array of unknown length", kind, b"\x9f" + content[1:] + b"\xff")
        add("a tag before the array", kind, b"\xc1" + content)
    add("empty", 1, b"")
    for name, kind, place, value in CHANGED:
        items = [version, kind, *PLAIN[kind]]
        items[place] = value
        add(name, kind, cbor2.dumps(items, canonical=True))
    add("round in more bytes than it needs", 7, b"\x85\x05\x07\x48" + RUN + b"\x18\x03\x40")
    add("score in more bytes than it needs", 6, cbor2.dumps([version, 6, *PLAIN[6]]))
    add("byte string of exabytes", 7, b"\x85\x05\x07\x5b" + b"\x7f" * 8 + b"\x01\x40")

    def long(name: str, kind: int, place: int, length: int) -> None:
        """Add a message with a field of `length` zero bytes, which are not written out."""
        items = [version, kind, *PLAIN[kind]]
        items[place] = b"?" * length
        start, end = cbor2.dumps(items, canonical=True).split(items[place])
        rest = {"start": start.hex(), "fill": "00", "times": length, "end": end.hex()}
        found.append({"name": name, "kind": kind, **rest})

    long("participants too many", 5, 5, 12_501)
    long("piece too long", 8, 7, code.LIMITS["piece_bytes"] + 1)
    long("message too large", 8, 7, code.LIMITS["message_bytes"])
    found.append({"name": "far too large", "kind": 3, "start": "", "fill": "ff", "times": 1_000_000, "end": ""})
    return found


def pieces() -> Mapping[str, Any]:
    """Long contents by a formula, and the pieces they are cut into."""
    chunk, cases = code.LIMITS["piece_bytes"], []
    for length in (1, chunk - 1, chunk, chunk + 1, 2 * chunk + 5000):
        content = numbers.content(length)
        cut = list(code.wire.split_content(RUN, 3, content))
        encoded = [code.wire.encode(piece) for piece in cut]
        cases.append(
            {
                "length": length,
                "run": RUN.hex(),
                "round": 3,
                "digest": code.wire.digest_of(content).hex(),
                "pieces": [
                    {
                        "index": piece.index,
                        "data_bytes": len(piece.data),
                        "message_bytes": len(one),
                        "start": one[:64].hex(),
                        "blake2b": code.wire.digest_of(one).hex(),
                    }
                    for piece, one in zip(cut, encoded, strict=True)
                ],
            }
        )
    return {"formula": "byte[i] = (i * i + 7 * i + floor(i / 251)) mod 256", "cases": cases}


def small_things() -> Mapping[str, Any]:
    """Forms without a message of their own."""
    scores = (0.0, 2.5, 0.1, 2.302585)
    sets: tuple[tuple[int, ...], ...] = ((), (0,), (7,), (8,), (0, 1, 2, 3), (1, 9, 17), (1000,))
    vectors = [[0.0], [1.0, -2.0, 0.5], [float(np.float32(0.1)), 3.4e38, -0.0]]
    contents = (b"", b"cbdsl", bytes(range(256)))
    return {
        "repeated_claims": [
            {
                "score": numbers.plain(single(score), "float"),
                "commitment": commitment.hex(),
                "bytes": (struct.pack("<f", score) + commitment).hex(),
            }
            for score in scores
            for commitment in (b"", DIGEST)
        ],
        "worker_sets": [{"workers": list(one), "bytes": code.wire.pack_bits(one).hex()} for one in sets],
        "digests": [{"content": one.hex(), "digest": code.wire.digest_of(one).hex()} for one in contents],
        "weights": [
            {
                "values": [numbers.plain(single(value), "float") for value in vector],
                "bytes": code.wire.weights_to_bytes(np.array(vector, np.float32)).hex(),
                "commitment": code.commitment_of(np.array(vector, np.float32)).hex(),
            }
            for vector in vectors
        ],
        "commitments": [
            {
                "size": size,
                "model": dict(form),
                "commitment": code.commitment_of(numbers.floats(form, size)).hex(),
            }
            for size, form in ((1, numbers.REFERENCE), (300, numbers.REFERENCE), (300, numbers.PEAKED))
        ],
    }


def topics() -> Mapping[str, Any]:
    """Topics as they are built, read and refused."""
    calls: list[tuple[str, list[Any]]] = [
        ("root", ["lab"]), ("spec", ["lab"]), ("order", ["lab"]), ("model", ["lab", 0]), ("model", ["lab", 12]),
        ("model", ["lab", "+"]), ("update", ["lab", 0, 0]), ("update", ["lab", 3, 11]), ("update", ["lab", "+"]),
        ("shared", ["lab", 0]), ("shared", ["lab", "+"]), ("down", ["lab"]), ("to_worker", ["lab", "w-1", "welcome"]),
        ("to_worker", ["lab", "w-1", "invitation"]), ("to_worker", ["lab", "w-1", "start/2"]),
        ("to_worker", ["lab", "w-1", "#"]), ("from_worker", ["lab", "w-1", "hello"]),
        ("from_worker", ["lab", "w-1", "claim"]), ("from_worker", ["lab", "w-1", "upload/0"]),
        ("from_worker", ["lab", "w-1", "status"]), ("from_all", ["lab"]), ("spec", ["A_b-9"]),
    ]  # fmt: skip
    read = [
        "cbdsl/lab/from/w-1/hello", "cbdsl/lab/from/w-1/claim", "cbdsl/lab/from/w-1/status",
        "cbdsl/lab/from/w-1/upload/0", "cbdsl/lab/from/w-1/upload/17", "cbdsl/lab/from/w-1/upload/999999",
        "cbdsl/lab/from/w-1/upload", "cbdsl/lab/from/w-1/upload/", "cbdsl/lab/from/w-1/upload/01",
        "cbdsl/lab/from/w-1/upload/-1", "cbdsl/lab/from/w-1/upload/1000000", "cbdsl/lab/from/w-1/upload/1/2",
        "cbdsl/lab/from/w-1/hello/0", "cbdsl/lab/from/w-1/other", "cbdsl/lab/from/w-1", "cbdsl/lab/from//hello",
        "cbdsl/lab/from/w 1/hello", "cbdsl/lab/to/w-1/welcome", "cbdsl/other/from/w-1/hello", "cbdsl/lab/down/spec",
        "cbdsl/lab2/from/w-1/hello", "",
    ]  # fmt: skip
    kinds = [
        "cbdsl/lab/down/spec", "cbdsl/lab/down/model/3", "cbdsl/lab/down/update/1.0", "cbdsl/lab/to/w-1/welcome",
        "cbdsl/lab/to/w-1/start/2", "cbdsl/lab/from/w-1/upload/4", "cbdsl/lab/from/w-1/status", "cbdsl/lab", "",
    ]  # fmt: skip
    names = ["a", "lab", "A_b-9", "x" * 64, "", "x" * 65, "a/b", "a b", "a+", "#", "ä", "a\n", "$SYS"]

    def origin(topic: str) -> list[Any] | None:
        found = code.topics.parse_origin("lab", topic)
        return None if found is None else [found.worker, found.kind, found.number]

    return {
        "built": [{"function": name, "arguments": given, "topic": code.TOPICS[name](*given)} for name, given in calls],
        "read_by_the_server_of_lab": [{"topic": topic, "origin": origin(topic)} for topic in read],
        "kinds": [{"topic": topic, "kind": code.topics.kind_of(topic)} for topic in kinds],
        "may_be_retained": [{"topic": topic, "retained": code.topics.may_be_retained(topic)} for topic in read + kinds],
        "readable_by_workers": list(code.topics.DOWN_ALL),
        "names": [{"name": name, "valid": not _refuses(name)} for name in names],
    }


def _refuses(name: str) -> bool:
    try:
        code.topics.check_name(name, "worker")
    except code.UserError:
        return True
    return False


def shared() -> list[Any]:
    """Shared samples by formulas, as they are packed."""
    found = []
    for training, scoring, shape, classes in ((0, 1, (1,), 1), (2, 4, (4,), 3), (5, 7, (1, 4, 4), 10)):
        count = training + scoring
        features = numbers.floats(numbers.PEAKED, count * int(np.prod(shape))).reshape(count, *shape)
        labels = np.arange(count, dtype=np.int32) % classes
        found.append(
            {
                "training": training,
                "scoring": scoring,
                "shape": list(shape),
                "classes": classes,
                "features": dict(numbers.PEAKED),
                "labels": "label[i] = i mod classes",
                "unpacked": (features.astype("<f4").tobytes() + labels.astype("<i4").tobytes()).hex(),
                "bytes": code.pack_samples(features, labels).hex(),
            }
        )
    return found


CODECS: list[tuple[str, Mapping[str, Any], int, Mapping[str, int]]] = [
    *((name, {}, 300, numbers.PEAKED) for name in ("none", "q8", "q4", "q3", "q2", "topk", "adaptive")),
    *((name, {}, 300, numbers.EVEN) for name in ("q8", "q2", "topk")),
    *((name, {}, 7, numbers.EVEN) for name in ("none", "q8", "q4", "q3", "q2", "topk", "adaptive")),
    *((name, {}, 1, numbers.EVEN) for name in ("none", "q8", "q4", "q3", "q2", "topk", "adaptive")),
    *((name, {}, 40, numbers.STILL) for name in ("none", "q8", "q4", "q3", "q2", "topk")),
    *((name, {"block": 32}, 70, numbers.PEAKED) for name in ("q8", "q4", "q3", "q2")),
    ("topk", {"share": 0.25}, 70, numbers.PEAKED),
    ("topk", {"share": 1.0}, 30, numbers.EVEN),
    ("adaptive", {"slack": 0.1}, 70, numbers.PEAKED),
]


def codecs() -> list[Any]:
    """Models by formulas, packed, entropy-coded and decoded."""
    found = []
    for number, (name, options, size, form) in enumerate(CODECS):
        codec = code.build_codec(name, options)
        reference = numbers.floats(numbers.REFERENCE, size)
        model = reference + numbers.floats(form, size)
        encoded = codec.encode(model, reference)
        found.append(
            {
                "codec": name,
                "options": dict(options),
                "size": size,
                "reference": dict(numbers.REFERENCE),
                "difference": dict(form),
                "pack": codec.pack(model, reference).hex(),
                "longest_pack": codec.longest(size),
                "bytes": encoded.hex(),
                "version": number * 1000,
                "upload": code.wrapped(encoded, number * 1000).hex(),
                "decoded": numbers.hex_of(codec.decode(encoded, reference)),
            }
        )
    return found


def measured() -> list[Any]:
    """The codec that measures what a bit costs, with a score by a formula."""
    found = []
    for factor in (0.25, 1.0, 4.0, 32.0):
        codec = code.build_codec("adaptive", {})
        reference = numbers.floats(numbers.REFERENCE, 60)
        model = reference + numbers.floats(numbers.EVEN, 60)
        sent = codec.sent(model[None], reference, numbers.scores(model, factor))
        found.append(
            {
                "codec": "adaptive",
                "size": 60,
                "reference": dict(numbers.REFERENCE),
                "difference": dict(numbers.EVEN),
                "factor": factor,
                "bytes": codec.closed(sent.packs[0], 60).hex(),
                "decoded": numbers.hex_of(sent.models[0]),
                "choice": int(sent.packs[0, 0]),
            }
        )
    return found


def updates() -> list[Any]:
    """Updates of the global model: a byte that names the codec, and what it made."""
    found = []
    for kind, name in ((0, "q3"), (0, "topk"), (1, "q8"), (1, "adaptive"), (2, "q8")):
        before = np.zeros(50, np.float32) if kind == 2 else numbers.floats(numbers.REFERENCE, 50)
        codec = code.build_codec(name, {})
        update = bytes([kind]) + codec.encode(before + numbers.floats(numbers.PEAKED, 50), before)
        up, down = ("none", "none") if kind == 2 else (name, "q2") if kind == 0 else ("q2", name)
        after = code.apply_update(update, before, code.build_codec(up, {}), code.build_codec(down, {}))
        found.append(
            {
                "first_byte": kind,
                "codec_up": up,
                "codec_down": down,
                "size": 50,
                "reference": None if kind == 2 else dict(numbers.REFERENCE),
                "bytes": update.hex(),
                "decoded": numbers.hex_of(after),
            }
        )
    return found


def refused_packs() -> list[Any]:
    """Bytes that a codec must refuse, for a model of 70 weights."""
    size, found = 70, []
    reference = numbers.floats(numbers.REFERENCE, size)
    model = reference + numbers.floats(numbers.PEAKED, size)

    def add(codec: str, name: str, content: bytes) -> None:
        found.append({"codec": codec, "name": name, "size": size, "bytes": content.hex()})

    for name in ("none", "q8", "q4", "q3", "q2", "topk", "adaptive"):
        codec = code.build_codec(name, {})
        content, pack = codec.encode(model, reference), codec.pack(model, reference)
        add(name, "empty", b"")
        add(name, "last byte missing", content[:-1])
        if name == "none":
            add(name, "one byte too many", content + b"\0")
            continue
        add(name, "unknown first byte", b"\2" + content[1:])
        coder = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
        short = coder.compress(pack) + coder.flush()
        add(name, "entropy code cut off", b"\1" + short[:-2])
        add(name, "entropy code with a byte behind it", b"\1" + short + b"\0")
        add(name, "plain, one byte too few", b"\0" + pack[:-1])
        add(name, "plain, one byte too many", b"\0" + pack + b"\0")
        add(name, "entropy code that is none", b"\1" + b"\xff" * 20)
        add(name, "unpacks to far more than allowed", code.squeezed(bytes(10_000)))
        lost = model.copy()
        lost[3] = np.nan
        add(name, "a model with NaN", codec.encode(lost, reference))
    scale = np.array([np.nan], "<f2").tobytes()
    for name, base in (("q4", 15 * 15), ("q3", 49), ("q2", 243), ("q8", 255)):
        pack = code.build_codec(name, {}).pack(model, reference)
        add(name, "scale that is not a number", b"\0" + scale + pack[2:])
        add(name, "scale that is negative", b"\0" + np.array([-1], "<f2").tobytes() + pack[2:])
        add(name, "symbol that does not exist", b"\0" + pack[:2] + bytes([base]) + pack[3:])
    pack = code.build_codec("topk", {}).pack(model, reference)
    add("topk", "more weights than its share", b"\0" + b"\xff" + pack[1:])
    add("topk", "a bit behind the last weight", b"\0" + pack[:8] + bytes([pack[8] | 1]) + pack[9:])
    add("adaptive", "unknown choice", b"\0\4" + code.build_codec("q8", {}).pack(model, reference))
    return found


def streams() -> Mapping[str, Any]:
    """What workers draw: raw numbers, float32 numbers, seeds, batches."""
    keys: list[tuple[int, Any, int, int]] = [
        (0, "batches", 1, 0), (0, "coefficients", 1, 0), (7, "coefficients", 30, 4), (0, "layers", 1, 2),
        (2**63, "batches", 2**31 - 1, 99_999), (1, "participation", 5, 0), (1, "partition", 0, 0),
        (1, "initial-weights", 0, 3), (3, "shared-set", 0, 0), (3, "attack", 2, 1),
    ]  # fmt: skip
    batches: list[tuple[int, int, int, int, dict[str, int]]] = [
        (0, 1, 0, 10, {"batch_size": 4, "epochs": 1}),
        (7, 3, 2, 23, {"batch_size": 5, "epochs": 2}),
        (7, 4, 2, 23, {"batch_size": 5, "epochs": 1, "steps": 7}),
    ]
    return {
        "named": [
            {
                "seed": str(seed),
                "purpose": purpose,
                "round": number,
                "worker": worker,
                "uint64": [str(one) for one in code.stream(seed, purpose, number, worker).bit_generator.random_raw(8)],
                "float32": numbers.hex_of(code.stream(seed, purpose, number, worker).random(8, np.float32)),
                "seed_of": str(code.seed_of(seed, purpose, number, worker)),
                "permutation_of_10": code.stream(seed, purpose, number, worker).permutation(10).tolist(),
            }
            for seed, purpose, number, worker in keys
        ],
        "batches": [
            {
                "seed": str(seed),
                "round": number,
                "worker": worker,
                "samples": samples,
                "local": local,
                "rows": code.draw_batches(seed, number, worker, samples, local),
            }
            for seed, number, worker, samples, local in batches
        ],
    }


def networks() -> list[Any]:
    """The built-in networks as an announcement describes them."""
    shapes = {"har-cnn": (6, 128), "mobilenet-025": (3, 32, 32), "resnet8": (3, 32, 32)}
    found = []
    for name in ("softmax", "mlp", "cnn", "har-cnn", "ds-cnn", "resnet8", "mobilenet-025"):
        shape = shapes.get(name, (1, 28, 28))
        description, size = code.describe_network(name, shape, 10)
        text = json.dumps(description)
        found.append({"model": name, "shape": list(shape), "classes": 10, "weights": size, "text": text})
    return found


FLOWER = {
    "cb-dsl with a codec": {"rounds": 3, "settings": "method=cb-dsl codec.up=q8 codec.down=q8 data.shared_scoring=20"},
    "fedavg": {"rounds": 2, "settings": "method=fedavg shared=none"},
}


def flower() -> Mapping[str, Any]:
    """Flower messages: the bytes of forms, and what the messages of a run contain."""
    found = []
    with code.flower_modules() as modules:
        letters = modules["messages"]
        for name in ("hello: with state of a run", "order: swarm", "claim: with a commitment"):
            kind, given = MESSAGES[name]
            form = code.build_message(kind, given)
            content = letters.message(
                letters.make_flower_message([form], {"model": b"\1\2\3"}, worker=3), 5, "train", 9, 60
            ).content
            found.append(
                {
                    "message": name,
                    "records": numbers.records(content),
                }
            )
    runs = {}
    for name, config in FLOWER.items():
        with tempfile.TemporaryDirectory() as folder:
            runs[name] = {
                "config": config,
                "messages": code.flower_conversation(Path(folder), 3, numbers.flower_config(config)),
            }
    return {"forms": found, "runs": runs}


SECTIONS: dict[str, Callable[[], Any]] = {
    "version": lambda: code.wire.VERSION,
    "limits": lambda: dict(code.LIMITS),
    "messages": messages,
    "refused_messages": refused_messages,
    "pieces": pieces,
    "small_things": small_things,
    "topics": topics,
    "shared": shared,
    "codecs": codecs,
    "measured_codec": measured,
    "updates": updates,
    "refused_packs": refused_packs,
    "streams": streams,
    "networks": networks,
    "flower": flower,
}


def main() -> int:
    """Compare the file with the code, and write it if that is asked for."""
    path = GOLDEN / "wire.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    now = json.loads(json.dumps({name: build() for name, build in SECTIONS.items()}))
    changed = [name for name in now if before.get(name) != now[name]]
    print(f"{len(now)} sections, changed: {', '.join(changed) or 'none'}")
    if "--write" in sys.argv[1:]:
        path.write_text(numbers.text_of(now))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
