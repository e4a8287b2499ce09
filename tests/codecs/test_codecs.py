"""Every codec: the same model to the bit everywhere, and a declared error for whatever is no model."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cbdsl import register
from cbdsl.arrays import Doubles, Floats
from cbdsl.codecs.codec import Codec, CodecError, deflate, inflate
from cbdsl.codecs.quantize import Q2, Q3, Q4, Q8, Adaptive, Uniform, Whole
from cbdsl.codecs.topk import TopK
from support.refusals import refused_as

NAMES = register.codec.names()


def pair(seed: int, size: int, width: float) -> tuple[Floats, Floats]:
    """A model and a reference that differ by numbers of any magnitude."""
    rng = np.random.default_rng(seed)
    reference = rng.normal(size=size).astype(np.float32)
    steps = rng.standard_t(3, size) * 10.0 ** rng.uniform(-width, width, size)
    return (reference + steps).astype(np.float32), reference


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 1500), width=st.floats(0, 9))
def test_what_was_packed_comes_back_to_the_bit(name: str, seed: int, size: int, width: float) -> None:
    codec: Codec = register.codec.make(name, {})
    model, reference = pair(seed, size, width)
    content = codec.encode(model, reference)
    pack, expected = codec.transmit_one(model, reference)
    sent = codec.transmit(model[None], reference, None)
    assert len(pack) <= codec.longest_pack(size) == sent.packs.shape[1]
    assert codec.encode_pack(sent.packs[0], size) == deflate(pack)
    if np.isfinite(expected).all():
        assert codec.decode(content, reference).tobytes() == expected.tobytes() == sent.models[0].tobytes()
        assert codec.encode(model, reference) == content
    else:
        with pytest.raises(CodecError):
            codec.decode(content, reference)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_forged_bytes_are_an_error_or_a_model_and_nothing_else(name: str, data: st.DataObject) -> None:
    codec: Codec = register.codec.make(name, {})
    model, reference = pair(7, 300, 1)
    content = bytearray(codec.encode(model, reference))
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    forged = bytes(content[:cut]) + data.draw(st.binary(max_size=20))
    try:
        found = codec.decode(forged, reference)
    except CodecError:
        return
    assert (found.shape, found.dtype) == (reference.shape, reference.dtype)


@pytest.mark.parametrize("name", NAMES)
@given(content=st.binary(max_size=400))
def test_any_bytes_are_an_error_or_a_model(name: str, content: bytes) -> None:
    codec: Codec = register.codec.make(name, {})
    try:
        found = codec.decode(content, np.zeros(64, np.float32))
    except CodecError:
        return
    assert found.shape == (64,)


def test_bytes_that_grow_without_end_are_refused_before_they_do() -> None:
    bomb = deflate(bytes(50_000_000))
    assert len(bomb) < 10_000_000
    with pytest.raises(CodecError, match="wrong length"):
        inflate(bomb, 1000)


_ELSEWHERE = """
import hashlib, numpy as np
from cbdsl import register
rng = np.random.default_rng(3)
reference = rng.normal(size=5000).astype(np.float32)
model = (reference + rng.normal(size=5000) * 1e-3).astype(np.float32)
for name in register.codec.names():
    codec = register.codec.make(name, {})
    content = codec.encode(model, reference)
    print(name, hashlib.sha256(codec.decode(content, reference).tobytes()).hexdigest())
"""


def test_another_process_decodes_the_same_model() -> None:
    done = subprocess.run([sys.executable, "-c", _ELSEWHERE], capture_output=True, text=True, check=True)
    rng = np.random.default_rng(3)
    reference = rng.normal(size=5000).astype(np.float32)
    model = (reference + rng.normal(size=5000) * 1e-3).astype(np.float32)
    expected = {
        name: hashlib.sha256(register.codec.make(name, {}).transmit_one(model, reference)[1].tobytes()).hexdigest()
        for name in NAMES
    }
    assert dict(line.split() for line in done.stdout.splitlines()) == expected


def test_q4_by_hand() -> None:
    # A block of 2: the scale is 14 / 7 = 2, so 14 -> 7, -3 -> rint(-1.5) = -2; next block: 0.5 / 7 as float16.
    codec, reference = Q4(block=2), np.zeros(3, np.float32)
    found = codec.decode(codec.encode(np.array([14, -3, 0.5], np.float32), reference), reference)
    np.testing.assert_array_equal(found, np.array([14, -4, 7 * np.float32(np.float16(0.5 / 7))], np.float32))


@pytest.mark.parametrize("codec", [Q8(), Q4(), Q3(), Q2(), Q4(block=32)])
def test_nothing_moves_by_more_than_half_a_step(codec: Uniform) -> None:
    model, reference = pair(1, 1000, 0)
    found = codec.transmit_one(model, reference)[1]
    for start in range(0, 1000, codec.block):
        block = slice(start, start + codec.block)
        step = np.abs(model[block] - reference[block]).max() / codec.levels
        assert np.abs(found[block] - model[block]).max() <= 0.51 * step


def test_fewer_bits_take_fewer_bytes() -> None:
    model, reference = pair(1, 44_426, 0)
    lengths = [len(codec.encode(model, reference)) for codec in (Q2(), Q3(), Q4(), Q8(), Whole())]
    assert lengths == sorted(lengths)
    for length, most in zip(lengths, (0.6, 1.7, 2.8, 7, 33), strict=True):
        assert 8 * length / 44_426 < most


@pytest.mark.parametrize("name", [name for name in NAMES if name != "none"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
def test_a_model_that_no_codec_can_hold_is_no_model_on_the_other_side(name: str, poison: float) -> None:
    codec: Codec = register.codec.make(name, {})
    model, reference = pair(2, 600, 0)
    model[17] = poison
    assert np.isnan(codec.transmit_one(model, reference)[1]).all()
    with pytest.raises(CodecError, match="not finite"):
        codec.decode(codec.encode(model, reference), reference)


def test_nothing_to_send_is_the_reference_again() -> None:
    _, reference = pair(3, 700, 0)
    for name in NAMES:
        np.testing.assert_array_equal(register.codec.make(name, {}).transmit_one(reference, reference)[1], reference)


def test_topk_sends_the_largest_differences_and_of_equals_the_first() -> None:
    reference = np.zeros(10, np.float32)
    model = np.array([0, 5, -1, 1, 1, 0, -9, 1, 0, 0], np.float32)
    found = TopK(share=0.4).transmit_one(model, reference)[1]
    assert set(np.flatnonzero(found)) == {1, 2, 3, 6}
    np.testing.assert_allclose(found[[1, 2, 3, 6]], [5, -1, 1, -9], atol=0.05)
    with refused_as("out-of-range", "share of the weights"):
        TopK(share=0)


def test_adaptive_takes_as_few_bits_as_keep_the_score() -> None:
    model, reference = pair(4, 512, 0)

    def indifferent(rows: Floats) -> Doubles:
        return np.ones(len(rows))

    def exacting(rows: Floats) -> Doubles:
        return np.asarray(np.abs(rows - model).max(1), np.float64)

    codec = Adaptive()
    for scores, bits in ((indifferent, Q2()), (exacting, Q8())):
        sent = codec.transmit(model[None], reference, scores)
        expected = bits.transmit_one(model, reference)[1]
        assert sent.models[0].tobytes() == expected.tobytes()
        content = codec.encode_pack(sent.packs[0], 512)
        assert codec.decode(content, reference).tobytes() == expected.tobytes()
        assert abs(len(content) - len(bits.encode(model, reference))) <= 8


def test_settings_that_make_no_sense_are_errors() -> None:
    for make in (lambda: Q4(block=0), lambda: Adaptive(slack=1.0), lambda: TopK(share=1.5)):
        with refused_as("out-of-range"):
            make()


def test_a_codec_written_with_old_names_still_works() -> None:
    with pytest.warns(DeprecationWarning, match="longest_pack"):

        class Old(Codec):
            def longest(self, size: int) -> int:
                return 4 * size

            def pack(self, model: Floats, reference: Floats) -> bytes:
                return (model - reference).tobytes()

            def unpack(self, pack: bytes, reference: Floats) -> Floats:
                return reference + np.frombuffer(pack, np.float32)

    reference = np.ones(3, np.float32)
    codec = Old()  # type: ignore[abstract]
    assert codec.decode(codec.encode(2 * reference, reference), reference).tolist() == [2, 2, 2]
    with pytest.warns(DeprecationWarning, match="transmit_one"):
        assert codec.passed(2 * reference, reference)[1].tolist() == [2, 2, 2]
