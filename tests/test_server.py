from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbdsl.engines.base import Floats
from cbdsl.ledger import Traffic
from cbdsl.server import Order, RoundLog, ServerState, fresh_state, next_order, play_round
from cbdsl.verification import Verifier, measuring, trusting

SIZE = 2


def model(score: float) -> Floats:
    """A model whose true score is its first weight."""
    return np.array([score, 1.0], dtype=np.float32)


class ScriptedSwarm:
    """Workers that claim and upload what a test tells them to; one without a model stays silent."""

    def __init__(self, claims: Mapping[int, float], models: Mapping[int, Floats]) -> None:
        self.claims, self.models = claims, models
        self.invited: list[int] = []

    def report(self, order: Order) -> Mapping[int, float]:  # noqa: ARG002 - the script is fixed
        return self.claims

    def upload(self, workers: Sequence[int]) -> Mapping[int, Floats]:
        self.invited += workers
        return {worker: self.models[worker] for worker in workers if worker in self.models}


def honest(scores: Mapping[int, float]) -> ScriptedSwarm:
    return ScriptedSwarm(scores, {worker: model(score) for worker, score in scores.items()})


VERIFY = measuring(lambda weights: float(weights[0]), SIZE, 1e-4)


def play(
    state: ServerState, swarm: ScriptedSwarm, workers: int = 4, verify: Verifier = VERIFY
) -> tuple[ServerState, RoundLog]:
    order = next_order(state, "swarm", range(workers), 0.5, 0.01)
    return play_round(state, order, swarm, verify)


START = fresh_state(model(1.0), 1.0)


def test_only_the_best_claimant_is_invited_and_becomes_the_global_best() -> None:
    swarm = honest({0: 0.75, 1: 0.25, 2: 0.5, 3: 0.875})
    after, log = play(START, swarm)
    assert swarm.invited == [1]
    assert log.outcome("accepted") == [1]
    assert (after.round, after.global_score, after.changed, after.banned) == (1, 0.25, True, frozenset())
    np.testing.assert_array_equal(after.global_best, model(0.25))


def test_a_liar_is_banned_and_the_next_best_is_invited() -> None:
    swarm = honest({0: 0.75, 1: 0.25, 2: 0.5})
    swarm = ScriptedSwarm({**swarm.claims, 3: 1e-6}, {**swarm.models, 3: model(7.0)})
    after, log = play(START, swarm)
    assert swarm.invited == [3, 1]
    assert log.outcome("refuted") == [3]
    assert log.outcome("accepted") == [1]
    assert after.banned == {3}
    assert (log.verdicts[0].claimed, log.verdicts[0].measured) == (1e-6, 7.0)


def test_a_banned_worker_is_not_asked_and_not_heard_again() -> None:
    state = replace(START, banned=frozenset({3}))
    assert next_order(state, "swarm", range(4), 0.5, 0.01).participants == (0, 1, 2)
    swarm = honest({0: 0.75, 3: 0.25})
    after, log = play(state, swarm)
    assert swarm.invited == [0]
    assert 3 not in log.claims
    assert after.global_score == 0.75


def test_a_silent_worker_is_passed_over_but_not_banned() -> None:
    swarm = ScriptedSwarm({0: 0.5, 1: 0.25}, {0: model(0.5)})
    after, log = play(START, swarm)
    assert log.outcome("silent") == [1]
    assert log.outcome("accepted") == [0]
    assert after.banned == frozenset()


def test_nobody_is_invited_when_nothing_beats_the_global_score() -> None:
    swarm = honest({0: 1.0, 1: 1.5})
    after, log = play(START, swarm)
    assert swarm.invited == []
    assert log.verdicts == ()
    assert (after.global_score, after.changed) == (1.0, False)
    assert after.global_best is START.global_best


def test_equal_scores_go_to_the_lower_number() -> None:
    swarm = honest({2: 0.5, 1: 0.5})
    play(START, swarm)
    assert swarm.invited == [1]


@pytest.mark.parametrize(
    ("claim", "reason"),
    [(math.nan, "not a number"), (-0.1, "negative"), (math.inf, "infinite"), (-math.inf, "infinite")],
)
def test_a_claim_that_cannot_be_true_is_set_aside(claim: float, reason: str) -> None:
    swarm = ScriptedSwarm({0: claim, 1: 0.5}, {0: model(0.0), 1: model(0.5)})
    after, log = play(START, swarm)
    assert swarm.invited == [1]
    assert log.set_aside == {0: reason}
    assert after.banned == frozenset()


@pytest.mark.parametrize("upload", [np.array([np.nan, 1.0]), np.array([0.25, np.inf]), np.zeros(3), np.zeros((1, 2))])
@pytest.mark.parametrize("trust", [True, False])
def test_an_upload_that_is_no_model_is_refuted_even_without_measuring(upload: Floats, trust: bool) -> None:
    swarm = ScriptedSwarm({0: 0.25, 1: 0.5}, {0: upload.astype(np.float32), 1: model(0.5)})
    after, log = play(START, swarm, verify=trusting(SIZE) if trust else VERIFY)
    assert log.outcome("refuted") == [0]
    assert log.outcome("accepted") == [1]
    assert np.isfinite(after.global_best).all()


def test_without_a_scoring_set_the_server_believes_a_liar() -> None:
    swarm = ScriptedSwarm({0: 0.25, 1: 1e-6}, {0: model(0.25), 1: model(7.0)})
    after, _ = play(START, swarm, verify=trusting(SIZE))
    np.testing.assert_array_equal(after.global_best, model(7.0))
    assert after.banned == frozenset()


def test_the_holder_of_the_global_best_is_not_invited_twice() -> None:
    claim = float(np.float32(0.1))  # rounded up from the true score
    swarm = ScriptedSwarm({0: claim}, {0: model(0.1)})
    after, _ = play(START, swarm)
    _, log = play(after, swarm)
    assert swarm.invited == [0]
    assert log.verdicts == ()


def test_a_model_uploaded_later_does_not_change_the_global_best() -> None:
    uploaded = model(0.25)
    after, _ = play(START, ScriptedSwarm({0: 0.25}, {0: uploaded}))
    uploaded[:] = 9
    np.testing.assert_array_equal(after.global_best, model(0.25))


def test_the_model_is_broadcast_only_after_it_changed() -> None:
    swarm = honest({0: 0.25, 1: 0.5})
    first, log = play(START, swarm, workers=2)
    assert traffic(log.traffic) == {
        "order": (2, 16),
        "broadcast": (2, 2 * SIZE * 4),
        "score": (2, 8),
        "invitation": (1, 4),
        "upload": (1, SIZE * 4),
    }
    second, log = play(first, swarm, workers=2)
    assert traffic(log.traffic)["broadcast"] == (2, 16)  # the model accepted in round 1
    _, log = play(second, swarm, workers=2)
    assert traffic(log.traffic) == {
        "order": (2, 16),
        "broadcast": (0, 0),
        "score": (2, 8),
        "invitation": (0, 0),
        "upload": (0, 0),
    }


def test_a_refuted_upload_is_in_the_ledger_and_a_silent_one_is_not() -> None:
    swarm = ScriptedSwarm({0: 0.25, 1: 0.5, 2: 0.75}, {0: model(7.0), 2: model(0.75)})
    _, log = play(START, swarm)
    assert traffic(log.traffic)["invitation"] == (3, 12)
    assert traffic(log.traffic)["upload"] == (2, 2 * SIZE * 4)


def traffic(items: Sequence[Traffic]) -> dict[str, tuple[int, int]]:
    return {item.kind: (item.messages, item.payload) for item in items}


@given(st.lists(st.tuples(st.floats(0, 2, width=32), st.booleans(), st.booleans()), min_size=1, max_size=8))
def test_whatever_is_claimed_the_global_best_is_true_and_honest_workers_stay(
    workers: list[tuple[float, bool, bool]],
) -> None:
    """Each worker: its true score, whether it lies, whether it answers an invitation."""
    claims = {i: (score / 4 if lies else score) for i, (score, lies, _) in enumerate(workers)}
    models = {i: model(score) for i, (score, _, answers) in enumerate(workers) if answers}
    after, log = play(START, ScriptedSwarm(claims, models), workers=len(workers))
    assert after.global_score <= START.global_score
    assert abs(float(after.global_best[0]) - after.global_score) <= 1e-4 * max(1, after.global_score)
    assert all(workers[i][1] for i in after.banned)
    assert len(log.outcome("accepted")) <= 1
