from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cbdsl.arrays import Floats
from cbdsl.protocol.selection import Candidate, greedy_soup, waiting_list
from cbdsl.protocol.state import BackOff


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


@given(arrays(np.float32, (4, 3), elements=st.floats(-4, 4, width=32)))
def test_a_soup_is_never_worse_than_its_first_model_and_is_the_mean_of_its_parts(models: Floats) -> None:
    def score(weights: Floats) -> float:
        return float(np.square(weights.astype(np.float64)).sum())

    average, found, used = greedy_soup(list(models), score)
    assert found <= score(models[0])
    assert found == score(average)
    assert used[0] == 0
    np.testing.assert_allclose(average, models[used].mean(0), atol=1e-6)
