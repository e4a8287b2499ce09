"""Versions of w^g on their way down, and uploads against the version they belong to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cbdsl.algorithm.broadcast import (
    StaleError,
    adopt_model,
    bytes_of,
    bytes_to_catch_up,
    decode_upload,
    encode_model,
    keyframe_of,
    relay_upload,
)
from cbdsl.algorithm.messages import ServerState
from cbdsl.arrays import Floats
from cbdsl.codecs.codec import CodecError
from cbdsl.codecs.envelope import KEPT_VERSIONS, Codecs, apply_update, wrap_version
from cbdsl.codecs.quantize import Q4, Q8

SIZE = 600
BOTH = Codecs(Q4(), Q4())


def vector(seed: int) -> Floats:
    return np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)


def nothing() -> ServerState:
    return ServerState(0, np.zeros(SIZE, np.float32), np.inf)


def grown(versions: int, codecs: Codecs = BOTH) -> list[ServerState]:
    """The server before any model, and after each of so many."""
    states = [nothing()]
    for version in range(1, versions + 1):
        model = states[-1].global_best + np.float32(0.01) * vector(version)
        states.append(adopt_model(states[-1], encode_model(model, states[-1], codecs), codecs))
    return states


def test_every_version_can_be_reached_from_the_one_before_by_its_update_alone() -> None:
    held = np.zeros(SIZE, np.float32)
    for state in grown(9)[1:]:
        held = apply_update(state.updates[-1], held, BOTH)
        assert held.tobytes() == state.global_best.tobytes()


def test_who_was_away_gets_there_from_the_keyframe_and_the_updates_since() -> None:
    for state in grown(11)[1:]:
        keyframe, age = keyframe_of(state), state.version % KEPT_VERSIONS
        held = np.zeros(SIZE, np.float32) if keyframe is None else keyframe
        assert (keyframe is None) == (state.version < KEPT_VERSIONS)
        for update in state.updates[len(state.updates) - age :]:
            held = apply_update(update, held, BOTH)
        assert held.tobytes() == state.global_best.tobytes()


def test_the_first_model_gets_more_bits_than_a_difference() -> None:
    first = encode_model(vector(1), nothing(), BOTH)
    np.testing.assert_array_equal(first.model, Q8().transmit_one(vector(1), np.zeros(SIZE, np.float32))[1])


def test_without_a_codec_everything_goes_whole() -> None:
    states = grown(3, Codecs())
    assert states[3].updates == states[3].references == ()
    np.testing.assert_array_equal(states[1].global_best, np.float32(0.01) * vector(1))
    assert bytes_to_catch_up(states[3], 2, states[3].global_best, Codecs()) == 4 * SIZE


def test_what_a_worker_gets_depends_on_what_it_missed() -> None:
    state = grown(7)[7]
    message, lengths = state.global_best, [len(update) for update in state.updates]
    assert len(lengths) == KEPT_VERSIONS
    assert bytes_to_catch_up(state, 6, message, BOTH) == lengths[-1]
    assert bytes_to_catch_up(state, 3, message, BOTH) == sum(lengths)
    assert bytes_to_catch_up(state, 2, message, BOTH) == 4 * SIZE + sum(lengths[1:])  # version 4 whole, then 5, 6, 7
    assert bytes_to_catch_up(state, 0, message, BOTH) == 4 * SIZE + sum(lengths[1:])


def test_the_winners_own_bytes_go_to_everybody_if_everybody_can_read_them() -> None:
    state = grown(2)[2]
    content = Q4().encode(vector(5), state.global_best)
    model = Q4().decode(content, state.global_best)
    relay = relay_upload(model, wrap_version(content, 2), state, BOTH)
    assert relay is not None
    assert relay.update[1:] == content
    assert apply_update(relay.update, state.global_best, BOTH).tobytes() == model.tobytes()
    assert relay_upload(model, wrap_version(content, 1), state, BOTH) is None
    assert relay_upload(model, model, state, BOTH) is None
    assert relay_upload(model, wrap_version(content, 2), state, Codecs(up=Q4())) is None


def test_an_upload_is_decoded_against_the_version_it_names() -> None:
    states = grown(6)
    for version in range(3, 7):
        content = Q4().encode(vector(9), states[version].global_best)
        found = decode_upload(wrap_version(content, version), states[6], BOTH, SIZE)
        assert found.tobytes() == Q4().decode(content, states[version].global_best).tobytes()
    for version in (0, 2, 7, 2**31):
        with pytest.raises(StaleError):
            decode_upload(wrap_version(b"", version), states[6], BOTH, SIZE)
    for upload in (b"", b"abc", wrap_version(b"", 6), wrap_version(b"\x02abc", 6)):
        with pytest.raises(CodecError):
            decode_upload(upload, states[6], BOTH, SIZE)
    numbers = vector(1)
    assert decode_upload(numbers, states[6], BOTH, SIZE) is numbers
    assert bytes_of(numbers) == 4 * SIZE


@pytest.mark.parametrize("update", [b"", b"\x03abc", b"\x00", b"\x01\x01\xff"])
def test_an_update_that_is_none_is_an_error(update: bytes) -> None:
    with pytest.raises(CodecError):
        apply_update(update, np.zeros(SIZE, np.float32), BOTH)


def test_a_model_that_cannot_be_sent_does_not_become_w_g() -> None:
    state = grown(2)[2]
    far = state.global_best + np.float32(1e30)
    assert adopt_model(state, encode_model(far, state, BOTH), BOTH) is state


def test_w_g_is_nobodys_own_row() -> None:
    row = vector(1)
    state = adopt_model(nothing(), encode_model(row, nothing(), Codecs()), Codecs())
    row[0] = 77
    assert state.global_best[0] != 77
    assert replace(state).version == 1
