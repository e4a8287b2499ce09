from __future__ import annotations

from dataclasses import replace

import numpy as np

from cbdsl.algorithm.broadcast import encode_model
from cbdsl.algorithm.messages import BackOff, ServerState
from cbdsl.algorithm.selection import (
    NO_GAIN,
    Best,
    Candidate,
    RoundContext,
    VerifiedUpload,
    waiting_list,
)
from cbdsl.algorithm.verification import ClaimCheck, Verifier
from cbdsl.arrays import Floats
from cbdsl.codecs.envelope import Codecs, wrap_version
from cbdsl.codecs.quantize import Q2


def test_the_queue_is_sorted_by_silence_then_score_then_number() -> None:
    scores = {4: 0.5, 3: 0.5, 2: 0.25, 1: 0.125, 0: 0.0625}
    back_offs = {1: BackOff(1, 4), 0: BackOff(2, 9)}
    assert waiting_list(scores, back_offs, {}, 5) == [
        Candidate(2, 0.25),
        Candidate(3, 0.5),
        Candidate(4, 0.5),
        Candidate(1, 0.125),
    ]


def test_a_claim_that_was_heard_is_not_asked_for_again_but_a_new_one_is() -> None:
    assert waiting_list({0: 0.5, 1: 0.75}, {}, {0: 0.5, 1: 0.8}, 1) == [Candidate(1, 0.75)]


def test_silence_grows() -> None:
    first = BackOff(0, 0).again(10)
    assert (first, first.again(20)) == (BackOff(1, 12), BackOff(2, 24))


def test_with_a_guard_a_score_that_was_learned_by_heart_does_not_stand() -> None:
    state = ServerState(3, np.zeros(2, np.float32), 1.0)
    plain = Verifier(lambda claimed, _weights, _number: ClaimCheck(True, claimed, ""), lambda _weights: 0.1)
    guarded = replace(plain, loss=lambda _weights: 0.4)
    upload = VerifiedUpload(0, 0.1, np.ones(2, np.float32))
    assert Best().combine([upload], RoundContext(state, 4, plain)).score == 0.1
    assert Best().combine([upload], RoundContext(state, 4, guarded)).score == 0.4


def test_an_upload_for_an_older_w_g_is_packed_again_and_has_to_beat_w_g_then() -> None:
    codecs = Codecs(Q2(), Q2())
    state = ServerState(3, np.zeros(600, np.float32), 0.5, version=3)
    model = np.linspace(-1, 1, 600).astype(np.float32)
    near = encode_model(model, state, codecs).model
    stale = VerifiedUpload(4, 0.1, model, wrap_version(b"", 2))
    fresh = VerifiedUpload(4, 0.1, model, wrap_version(Q2().encode(model, state.global_best), 3))

    def verifier(found: float) -> Verifier:
        def score(weights: Floats) -> float:
            return found if np.array_equal(weights, near) else 0.1

        return Verifier(lambda claimed, _weights, _number: ClaimCheck(True, claimed, ""), score)

    kept = Best().combine([stale], RoundContext(state, 4, verifier(0.6), codecs))
    assert (kept.model, kept.declined) == (None, {4: NO_GAIN})
    made = Best().combine([stale], RoundContext(state, 4, verifier(0.3), codecs))
    assert made.score == 0.3
    assert made.model is not None
    np.testing.assert_array_equal(made.model, near)
    relayed = Best().combine([fresh], RoundContext(state, 4, verifier(0.6), codecs))
    assert (relayed.model is model, relayed.score) == (True, 0.1)
