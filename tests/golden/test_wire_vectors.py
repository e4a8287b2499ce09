"""The wire format does not change: every vector of `wire.json` is encoded to its bytes and decoded to its values.

`README.md` describes the vectors. Reasons of errors may be reworded, so only the class of an error is checked.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from support import wire_code as code, wire_numbers as numbers

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "wire.json").read_text(encoding="utf-8"))
SAME_DEFLATE = "ng" not in zlib.ZLIB_RUNTIME_VERSION  # another compressor may find other, equally valid bytes


def named(section: str) -> list[Any]:
    """Return the vectors of a section as parameters of a test."""
    texts = [
        f"{number}-{vector.get('codec', vector.get('kind', ''))}-{vector.get('name', '')}"
        for number, vector in enumerate(GOLDEN[section])
    ]
    return [pytest.param(vector, id=text) for text, vector in zip(texts, GOLDEN[section], strict=True)]


def from_hex(text: str) -> NDArray[np.float32]:
    """Read little-endian float32 numbers."""
    return np.frombuffer(bytes.fromhex(text), "<f4").astype(np.float32)


def same_bits(first: NDArray[np.float32], second: NDArray[np.float32]) -> bool:
    """Return whether two arrays hold the same float32 numbers, bit for bit."""
    return first.dtype == second.dtype == np.float32 and first.tobytes() == second.tobytes()


def test_the_version_and_the_limits_are_the_recorded_ones() -> None:
    assert GOLDEN["version"] == code.wire.VERSION
    assert GOLDEN["limits"] == code.LIMITS


def test_every_kind_of_message_has_vectors() -> None:
    assert {vector["kind"] for vector in GOLDEN["messages"]} == set(code.KINDS)


@pytest.mark.parametrize("vector", named("messages"))
def test_a_message_is_encoded_and_decoded(vector: dict[str, Any]) -> None:
    values = [numbers.value_of(field["value"], field["type"]) for field in vector["fields"]]
    content = bytes.fromhex(vector["bytes"])
    assert code.wire.encode(code.build_message(vector["kind"], values)) == content
    decoded = code.message_values(code.wire.decode(content, code.KINDS[vector["kind"]]))
    assert repr(decoded) == repr(values)  # by text, with types: NaN is not equal to itself, and True is equal to 1


@pytest.mark.parametrize("vector", named("refused_messages"))
def test_a_malformed_message_is_refused(vector: dict[str, Any]) -> None:
    if "fill" in vector:
        middle = bytes.fromhex(vector["fill"]) * vector["times"]
        content = bytes.fromhex(vector["start"]) + middle + bytes.fromhex(vector["end"])
    else:
        content = bytes.fromhex(vector["bytes"])
    with pytest.raises(code.WireError):
        code.wire.decode(content, code.KINDS[vector["kind"]])


def test_every_truncation_of_a_message_is_refused() -> None:
    for vector in GOLDEN["messages"]:
        content = bytes.fromhex(vector["bytes"])
        for length in range(len(content)):
            with pytest.raises(code.WireError):
                code.wire.decode(content[:length], code.KINDS[vector["kind"]])


@pytest.mark.parametrize("case", GOLDEN["pieces"]["cases"], ids=lambda case: str(case["length"]))
def test_a_long_content_is_cut_and_put_together(case: dict[str, Any]) -> None:
    content, run, digest = numbers.content(case["length"]), bytes.fromhex(case["run"]), bytes.fromhex(case["digest"])
    assert code.wire.digest_of(content) == digest
    cut = list(code.wire.split_content(run, case["round"], content))
    assert code.wire.piece_count(len(content)) == len(cut) == len(case["pieces"])
    for piece, expected in zip(cut, case["pieces"], strict=True):
        encoded = code.wire.encode(piece)
        assert (piece.index, len(piece.data)) == (expected["index"], expected["data_bytes"])
        assert len(encoded) == expected["message_bytes"] <= code.LIMITS["message_bytes"]
        assert encoded[:64].hex() == expected["start"]
        assert code.wire.digest_of(encoded).hex() == expected["blake2b"]
    assembly = code.wire.Assembly(digest, len(content))
    whole = [assembly.add(piece) for piece in reversed(cut)]
    assert whole == [None] * (len(cut) - 1) + [content]
    assert assembly.add(cut[0]) is None  # a piece that came before


def test_pieces_that_do_not_fit_are_refused() -> None:
    case = GOLDEN["pieces"]["cases"][-1]
    content, digest = numbers.content(case["length"]), bytes.fromhex(case["digest"])
    cut = list(code.wire.split_content(bytes(8), 1, content))
    run, number, _, size, index, data = code.message_values(cut[1])
    piece = code.KINDS[8]
    for wrong in (
        piece(run, number, bytes(16), size, index, data),  # another digest
        piece(run, number, digest, size + 1, index, data),  # another size
        piece(run, number, digest, size, index, data[:-1]),  # too short
        piece(run, number, digest, size, 3, data),  # behind the end
        piece(run, number, digest, size, 2, data),  # longer than the last piece
    ):
        with pytest.raises(code.WireError):
            code.wire.Assembly(digest, size).add(wrong)
    assembly = code.wire.Assembly(digest, size)
    assembly.add(cut[0])
    assembly.add(piece(run, number, digest, size, index, bytes(len(data))))
    with pytest.raises(code.WireError):  # the hash of the whole
        assembly.add(cut[2])
    with pytest.raises(code.WireError):
        list(code.wire.split_content(bytes(8), 1, b""))


def test_claims_sets_of_workers_digests_and_weights() -> None:
    things = GOLDEN["small_things"]
    for one in things["repeated_claims"]:
        claim = code.Claim(numbers.value_of(one["score"], "float"), bytes.fromhex(one["commitment"]))
        assert code.wire.pack_claim(claim).hex() == one["bytes"]
    assert code.wire.pack_claim(None) == b""
    for one in things["worker_sets"]:
        bits = bytes.fromhex(one["bytes"])
        assert code.wire.pack_bits(tuple(one["workers"])) == bits
        assert [number for number in range(8 * len(bits) + 9) if code.wire.has_bit(bits, number)] == one["workers"]
    for one in things["digests"]:
        assert code.wire.digest_of(bytes.fromhex(one["content"])).hex() == one["digest"]
    for one in things["weights"]:
        values = np.array([numbers.value_of(value, "float") for value in one["values"]], np.float32)
        assert code.wire.weights_to_bytes(values).hex() == one["bytes"]
        assert same_bits(code.wire.weights_from_bytes(bytes.fromhex(one["bytes"])), values)
        assert code.commitment_of(values).hex() == one["commitment"]
    for one in things["commitments"]:
        assert code.commitment_of(numbers.floats(one["model"], one["size"])).hex() == one["commitment"]


def test_topics_are_built_and_read() -> None:
    topics = GOLDEN["topics"]
    assert {one["function"] for one in topics["built"]} == set(code.TOPICS)
    for one in topics["built"]:
        assert code.TOPICS[one["function"]](*one["arguments"]) == one["topic"]
    for one in topics["read_by_the_server_of_lab"]:
        origin = code.topics.parse_origin("lab", one["topic"])
        assert (None if origin is None else [origin.worker, origin.kind, origin.number]) == one["origin"]
    assert any(one["origin"] is None for one in topics["read_by_the_server_of_lab"])
    for one in topics["kinds"]:
        assert code.topics.kind_of(one["topic"]) == one["kind"]
    for one in topics["may_be_retained"]:
        assert code.topics.may_be_retained(one["topic"]) is one["retained"]
    assert list(code.topics.DOWN_ALL) == topics["readable_by_workers"]
    for one in topics["names"]:
        if one["valid"]:
            assert code.topics.check_name(one["name"], "worker") == one["name"]
        else:
            with pytest.raises(code.UserError):
                code.topics.check_name(one["name"], "worker")


@pytest.mark.parametrize("vector", GOLDEN["shared"], ids=lambda vector: str(vector["shape"]))
def test_shared_samples_are_packed_and_unpacked(vector: dict[str, Any]) -> None:
    shape, count = tuple(vector["shape"]), vector["training"] + vector["scoring"]
    features = numbers.floats(vector["features"], count * math.prod(shape)).reshape(count, *shape)
    labels = np.arange(count, dtype=np.int32) % np.int32(vector["classes"])
    content, layout = bytes.fromhex(vector["bytes"]), (vector["training"], vector["scoring"], shape)
    assert zlib.decompress(content).hex() == vector["unpacked"]
    packed = code.pack_samples(features, labels)
    assert zlib.decompress(packed).hex() == vector["unpacked"]
    if SAME_DEFLATE:
        assert packed == content
    found, classes = code.unpack_samples(content, *layout, vector["classes"])
    assert same_bits(found, features)
    assert classes.tolist() == labels.tolist()
    for wrong in (content[:-5], b"", content[:2] + b"\xff" * 20, zlib.compress(bytes(100_000))):
        with pytest.raises(code.WireError):
            code.unpack_samples(wrong, *layout, vector["classes"])
    with pytest.raises(code.WireError):  # one sample more was announced
        code.unpack_samples(content, vector["training"] + 1, vector["scoring"], shape, vector["classes"])
    if vector["classes"] > 1:
        with pytest.raises(code.WireError):  # a label beyond the classes
            code.unpack_samples(content, *layout, vector["classes"] - 1)


def test_every_codec_has_vectors() -> None:
    assert {vector["codec"] for vector in GOLDEN["codecs"]} == set(code.CODECS)


@pytest.mark.parametrize("vector", named("codecs"))
def test_a_model_is_packed_and_unpacked(vector: dict[str, Any]) -> None:
    codec, size = code.build_codec(vector["codec"], vector["options"]), vector["size"]
    reference = numbers.floats(vector["reference"], size)
    model = reference + numbers.floats(vector["difference"], size)
    pack, sent, decoded = bytes.fromhex(vector["pack"]), bytes.fromhex(vector["bytes"]), from_hex(vector["decoded"])
    upload = bytes.fromhex(vector["upload"])
    assert codec.longest_pack(size) == vector["longest_pack"]
    assert codec.pack(model, reference) == pack
    assert same_bits(codec.unpack(pack, reference), decoded)
    if SAME_DEFLATE:
        assert codec.encode(model, reference) == sent
    assert same_bits(codec.decode(sent, reference), decoded)
    assert same_bits(codec.decode(codec.encode(model, reference), reference), decoded)
    assert code.wrapped(sent, vector["version"]) == upload
    assert code.unwrapped(upload) == (vector["version"], sent)
    if vector["codec"] != "none":
        if SAME_DEFLATE:
            assert code.squeezed(pack) == sent
        assert code.expanded(sent, vector["longest_pack"]) == pack
        together = codec.transmit(model[None], reference, None)  # as a row among others
        assert same_bits(together.models[0], decoded)
        assert codec.cut(together.packs[0].tobytes(), size) == pack


@pytest.mark.parametrize("vector", GOLDEN["measured_codec"], ids=lambda vector: str(vector["choice"]))
def test_a_codec_that_measures_takes_the_fewest_bits(vector: dict[str, Any]) -> None:
    codec, size = code.build_codec(vector["codec"], {}), vector["size"]
    reference = numbers.floats(vector["reference"], size)
    model = reference + numbers.floats(vector["difference"], size)
    sent = codec.transmit(model[None], reference, numbers.scores(model, vector["factor"]))
    decoded = from_hex(vector["decoded"])
    assert sent.packs[0, 0] == vector["choice"]
    assert same_bits(sent.models[0], decoded)
    if SAME_DEFLATE:
        assert codec.encode_pack(sent.packs[0], size).hex() == vector["bytes"]
    assert same_bits(codec.decode(bytes.fromhex(vector["bytes"]), reference), decoded)


@pytest.mark.parametrize("vector", named("refused_packs"))
def test_a_malformed_pack_is_refused(vector: dict[str, Any]) -> None:
    reference = numbers.floats(numbers.REFERENCE, vector["size"])
    with pytest.raises(code.CodecError):
        code.build_codec(vector["codec"], {}).decode(bytes.fromhex(vector["bytes"]), reference)


def test_an_upload_without_a_version_is_refused() -> None:
    for length in range(4):
        with pytest.raises(code.CodecError):
            code.unwrapped(bytes(length))


@pytest.mark.parametrize("vector", GOLDEN["updates"], ids=lambda vector: str(vector["first_byte"]))
def test_an_update_leads_to_the_next_model(vector: dict[str, Any]) -> None:
    size, form = vector["size"], vector["reference"]
    before = np.zeros(size, np.float32) if form is None else numbers.floats(form, size)
    codecs = [code.build_codec(vector[key], {}) for key in ("codec_up", "codec_down")]
    update = bytes.fromhex(vector["bytes"])
    assert same_bits(code.apply_update(update, before, *codecs), from_hex(vector["decoded"]))
    for wrong in (b"", b"\3" + update[1:], update[:-1], update[:1]):
        with pytest.raises(code.CodecError):
            code.apply_update(wrong, before, *codecs)


@pytest.mark.parametrize("vector", GOLDEN["streams"]["named"], ids=lambda vector: vector["purpose"])
def test_a_random_stream_has_the_recorded_numbers(vector: dict[str, Any]) -> None:
    key = (int(vector["seed"]), vector["purpose"], vector["round"], vector["worker"])
    assert [str(one) for one in code.stream(*key).bit_generator.random_raw(8)] == vector["uint64"]
    assert numbers.hex_of(code.stream(*key).random(8, np.float32)) == vector["float32"]
    assert str(code.seed_of(*key)) == vector["seed_of"]
    assert code.stream(*key).permutation(10).tolist() == vector["permutation_of_10"]


@pytest.mark.parametrize("vector", GOLDEN["streams"]["batches"], ids=lambda vector: str(vector["local"]))
def test_a_worker_draws_the_recorded_batches(vector: dict[str, Any]) -> None:
    key = (int(vector["seed"]), vector["round"], vector["worker"])
    assert code.draw_batches(*key, vector["samples"], vector["local"]) == vector["rows"]


@pytest.mark.parametrize("vector", GOLDEN["networks"], ids=lambda vector: vector["model"])
def test_a_network_is_described_and_read(vector: dict[str, Any]) -> None:
    description, size = code.describe_network(vector["model"], tuple(vector["shape"]), vector["classes"])
    assert json.dumps(description) == vector["text"]
    network = code.read_network(json.loads(vector["text"]))
    assert (network.size, list(network.shape), network.classes) == (size, vector["shape"], vector["classes"])
    assert size == vector["weights"]
    assert network.to_dict() == description


def test_an_announced_spec_is_read() -> None:
    texts = {vector["fields"][1]["value"] for vector in GOLDEN["messages"] if vector["kind"] == 3}
    specs = [code.from_toml(text) for text in sorted(texts)]
    assert [(one.model, one.workers, one.rounds) for one in specs] == [("cnn", 50, 30), ("softmax", 4, 3)]


def test_flower_messages_have_the_recorded_records() -> None:
    vectors = {vector["name"]: vector for vector in GOLDEN["messages"]}
    with code.flower_modules() as modules:
        flower_messages = modules["flower_messages"]
        for form in GOLDEN["flower"]["forms"]:
            vector = vectors[form["message"]]
            values = [numbers.value_of(field["value"], field["type"]) for field in vector["fields"]]
            message = code.build_message(vector["kind"], values)
            written = flower_messages.make_flower_message([message], {"model": b"\1\2\3"}, worker=3)
            content = flower_messages.make_request(written, 5, "train", 9, 60).content
            assert numbers.records(content) == form["records"]
            read = flower_messages.read(content)
            assert read.form(code.KINDS[vector["kind"]]) == message
            assert (read.number("worker", -1), dict(read.large)) == (3, {"model": b"\1\2\3"})


@pytest.mark.parametrize("name", GOLDEN["flower"]["runs"])
def test_a_flower_run_sends_the_recorded_messages(name: str, tmp_path: Path) -> None:
    run = GOLDEN["flower"]["runs"][name]
    assert code.flower_conversation(tmp_path, 3, numbers.flower_config(run["config"])) == run["messages"]
