from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cbdsl.algorithm.ledger import Traffic
from cbdsl.algorithm.messages import BackOff, Claim, Order, RoundLog, ServerState, commitment_of
from cbdsl.algorithm.rotation import Rotation, Soup
from cbdsl.algorithm.round import PAPER, ServerPolicy, play_round
from cbdsl.algorithm.selection import (
    COPIED,
    UNWEIGHTED,
    WORSENS,
    Best,
    RoundContext,
    Selection,
    SelectionResult,
    VerifiedUpload,
)
from cbdsl.algorithm.verification import MEMORISED, Verifier, make_verifier, trust_uploads
from cbdsl.arrays import Floats
from support.helpers import fresh_state, next_order

SIZE = 2


def model(score: float) -> Floats:
    """A model whose true score is its first weight."""
    return np.array([score, 1.0], dtype=np.float32)


class ScriptedSwarm:
    """Workers that claim and upload what a test tells them to; one without a model stays silent."""

    def __init__(self, scores: Mapping[int, float], models: Mapping[int, Floats]) -> None:
        self.scores, self.models = scores, models
        self.invited: list[int] = []

    def report(self, order: Order) -> Mapping[int, Claim]:  # noqa: ARG002 - the script is fixed
        return {worker: Claim(score) for worker, score in self.scores.items()}

    def upload(self, workers: Sequence[int]) -> Mapping[int, Floats]:
        self.invited += workers
        return {worker: self.models[worker] for worker in workers if worker in self.models}


def honest(scores: Mapping[int, float]) -> ScriptedSwarm:
    return ScriptedSwarm(scores, {worker: model(score) for worker, score in scores.items()})


VERIFY = make_verifier(lambda weights: float(weights[0]), SIZE, 1e-4)


def play(
    state: ServerState,
    swarm: ScriptedSwarm,
    workers: int = 4,
    verify: Verifier = VERIFY,
    policy: ServerPolicy = PAPER,
) -> tuple[ServerState, RoundLog]:
    order = next_order(state, "swarm", range(workers), 0.5, 0.01)
    return play_round(state, order, swarm, verify, policy)


START = fresh_state(model(1.0), 1.0)


def test_only_the_best_claimant_is_invited_and_becomes_the_global_best() -> None:
    swarm = honest({0: 0.75, 1: 0.25, 2: 0.5, 3: 0.875})
    after, log = play(START, swarm)
    assert swarm.invited == [1]
    assert log.outcome("accepted") == [1]
    assert (after.round, after.global_score, after.version, after.banned) == (1, 0.25, 1, frozenset())
    assert set(after.told.values()) == {0}
    np.testing.assert_array_equal(after.global_best, model(0.25))


def test_the_global_score_is_the_larger_of_claim_and_measurement_so_no_claim_walks_it_to_zero() -> None:
    claims, state = {0: 5e-5}, START
    for claimed in (8.9e-5, 1e-20, 0.0):  # the model's loss stays 9e-5, within the tolerance of each claim
        claims[0] = claimed
        state, log = play(replace(state, back_offs={}), ScriptedSwarm(dict(claims), {0: model(9e-5)}))
        assert state.global_score == np.float32(9e-5)
        assert state.banned == frozenset()
    assert log.outcome("declined") == [0]


def test_a_liar_is_banned_and_the_next_best_is_invited() -> None:
    swarm = honest({0: 0.75, 1: 0.25, 2: 0.5})
    swarm = ScriptedSwarm({**swarm.scores, 3: 1e-6}, {**swarm.models, 3: model(7.0)})
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
    assert (after.global_score, after.version, len(after.told)) == (1.0, 0, 4)
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
    after, log = play(START, swarm, verify=trust_uploads(SIZE) if trust else VERIFY)
    assert log.outcome("refuted") == [0]
    assert log.outcome("accepted") == [1]
    assert np.isfinite(after.global_best).all()


def test_without_a_scoring_set_the_server_believes_a_liar() -> None:
    swarm = ScriptedSwarm({0: 0.25, 1: 1e-6}, {0: model(0.25), 1: model(7.0)})
    after, _ = play(START, swarm, verify=trust_uploads(SIZE))
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
        "order": (2, 24),
        "broadcast": (2, 2 * SIZE * 4),
        "score": (2, 8),
        "invitation": (1, 4),
        "upload": (1, SIZE * 4),
    }
    second, log = play(first, swarm, workers=2)
    assert traffic(log.traffic)["broadcast"] == (2, 16)  # the model accepted in round 1
    _, log = play(second, swarm, workers=2)
    assert traffic(log.traffic) == {
        "order": (2, 24),
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


def test_a_round_ends_at_its_cap_of_invitations() -> None:
    swarm = ScriptedSwarm(dict.fromkeys(range(8), 1e-6), {worker: model(7.0) for worker in range(8)})
    after, log = play(START, swarm, workers=8, policy=ServerPolicy(invitations=3))
    assert swarm.invited == [0, 1, 2]
    assert after.banned == {0, 1, 2}
    assert traffic(log.traffic)["upload"] == (3, 3 * SIZE * 4)


def test_a_silent_worker_waits_longer_and_longer_and_comes_after_the_reliable() -> None:
    state = START
    swarm = ScriptedSwarm({0: 1e-6, 1: 0.9}, {})
    rounds = []
    for number in range(1, 32):
        swarm.invited.clear()
        state, _ = play(state, swarm, workers=1)
        rounds += [number] * (0 in swarm.invited)
    assert rounds == [1, 4, 9, 18]  # passed over for 2, 4, 8 rounds
    assert state.banned == frozenset()
    state = replace(state, round=99)
    swarm = honest({0: 0.5, 1: 0.75})
    after, _ = play(state, swarm)
    assert swarm.invited == [1]  # worker 0 claims more, but was silent before
    swarm = honest({0: 0.5})
    after, _ = play(after, swarm)
    assert after.global_score == 0.5
    assert 0 not in after.back_offs  # it delivered: forgiven


def test_an_upload_must_be_what_was_promised() -> None:
    class Committed(ScriptedSwarm):
        def report(self, order: Order) -> Mapping[int, Claim]:
            claims = super().report(order)
            promised = {0: model(0.25), 1: model(0.5)}
            return {
                worker: Claim(claim.score, commitment_of(promised[worker]) if worker in promised else b"")
                for worker, claim in claims.items()
            }

    swapped = np.array([0.25, 2.0], dtype=np.float32)  # as good a score, another model
    swarm = Committed({0: 0.25, 1: 0.5, 2: 0.125}, {0: swapped, 1: model(0.5), 2: model(0.125)})
    after, log = play(START, swarm, policy=ServerPolicy(commitment=True))
    assert log.set_aside == {2: "no commitment"}
    assert log.outcome("refuted") == [0]
    assert log.verdicts[0].reason == "not the model that was promised"
    assert log.outcome("accepted") == [1]
    assert after.global_score == 0.5
    assert traffic(log.traffic)["score"] == (3, 3 * 4 + 2 * 16)


def pair(first: float, second: float) -> Floats:
    return np.array([first, second], dtype=np.float32)


def around(goal: Floats) -> Verifier:
    """A score that is the distance from a goal, so that an average can beat its parts."""
    return make_verifier(lambda weights: float(np.linalg.norm(weights - goal)), SIZE, 1e-4)


SOUP = {0: pair(1, 0), 1: pair(0, 1.25), 2: pair(3, 3)}
CENTRED = {worker: float(np.linalg.norm(weights - pair(0.5, 0.5))) for worker, weights in SOUP.items()}


def test_a_soup_mixes_what_helps_and_declines_the_rest() -> None:
    uploads = {0: pair(1, 0), 1: pair(0, 1), 2: pair(3, 3)}
    scores = {worker: float(np.linalg.norm(weights - pair(0, 0))) for worker, weights in uploads.items()}
    state, goal = fresh_state(pair(2, 2), 5.0), pair(0, 0)
    after, log = play(state, ScriptedSwarm(scores, uploads), 3, around(goal), ServerPolicy(Soup(3)))
    assert (log.outcome("accepted"), log.outcome("declined"), after.banned) == ([0, 1], [2], frozenset())
    assert [one.reason for one in log.verdicts if one.worker == 2] == [UNWEIGHTED]
    assert after.global_score == pytest.approx(float(np.linalg.norm(after.global_best)))
    assert after.global_score < 0.9


def test_a_soup_that_is_worse_than_the_global_best_is_not_adopted_and_its_models_are_not_uploaded_again() -> None:
    state, swarm = fresh_state(pair(0.5, 0.5), 0.0), ScriptedSwarm(CENTRED, SOUP)
    after, _ = play(state, swarm, 3, around(pair(0.5, 0.5)), ServerPolicy(Soup(2)))
    np.testing.assert_array_equal(after.global_best, state.global_best)
    assert after.version == state.version
    swarm.invited.clear()
    play(after, swarm, 3, around(pair(0.5, 0.5)), ServerPolicy(Soup(2)))
    assert swarm.invited == [2]  # the other two have nothing new


def test_a_model_that_worsens_the_private_loss_is_declined_and_the_next_is_asked() -> None:
    verify = replace(VERIFY, loss=lambda weights: 9.0 if weights[0] < 0.4 else 0.0)
    after, log = play(START, honest({0: 0.25, 1: 0.5}), verify=verify)
    assert (log.outcome("declined"), log.outcome("accepted")) == ([0], [1])
    assert log.verdicts[0].reason == WORSENS
    assert after.banned == frozenset()


def test_whatever_a_selection_makes_is_not_adopted_if_it_is_worse_in_private() -> None:
    class Careless(Best):
        def objection(self, *_: object) -> str:
            return ""

        def combine(self, believed: Sequence[VerifiedUpload], view: RoundContext) -> SelectionResult:
            return replace(super().combine(believed, view), memory=np.ones(3, np.float32))

    verify = replace(VERIFY, loss=lambda weights: -float(weights[0]))
    after, log = play(START, honest({0: 0.25}), verify=verify, policy=ServerPolicy(Careless()))
    np.testing.assert_array_equal(after.global_best, START.global_best)
    assert (after.global_score, after.version, len(after.memory)) == (START.global_score, START.version, 0)
    assert [(one.outcome, one.reason) for one in log.verdicts] == [("declined", WORSENS)]


def test_copies_of_the_global_model_take_no_place_in_the_soup_and_their_senders_wait() -> None:
    start = pair(0.5, 1.5)
    verifier = replace(
        around(pair(0.5, 0.5)), copies=lambda current, _, proposed, __: bool((current == proposed).all())
    )
    uploads = {**SOUP, 3: start, 4: start}
    scores = {**CENTRED, 3: 1.0, 4: 1.0}  # worker 2 is the worst of all, behind the copies
    swarm = ScriptedSwarm(scores, uploads)
    after, log = play(fresh_state(start, 1.0), swarm, 5, verifier, ServerPolicy(Soup(3)))
    assert swarm.invited == [0, 1, 3, 4, 2]
    assert [verdict.worker for verdict in log.verdicts if verdict.reason == COPIED] == [3, 4]
    assert (log.outcome("accepted"), after.banned) == ([0, 1, 2], frozenset())
    assert after.back_offs == {3: BackOff(1, 3), 4: BackOff(1, 3)}

    swarm = ScriptedSwarm(
        {3: 0.01}, {3: pair(0.5, 0.51)}
    )  # it has done some work since, and is heard once it may speak
    waiting, log = play(after, swarm, 5, verifier, ServerPolicy(Soup(3)))
    assert swarm.invited == []
    waiting, log = play(waiting, swarm, 5, verifier, ServerPolicy(Soup(3)))
    last, log = play(waiting, swarm, 5, verifier, ServerPolicy(Soup(3)))
    assert (log.outcome("accepted"), last.back_offs) == ([3], {4: BackOff(1, 3)})


def test_a_worker_that_was_silent_once_is_invited_though_nobody_reliable_beats_the_global_best() -> None:
    state = replace(fresh_state(model(1.0), 0.5), back_offs={0: BackOff(1, 0)})
    after, log = play(state, honest({0: 0.125, 1: 0.75}), 2)
    assert (log.outcome("accepted"), after.global_score, after.back_offs) == ([0], 0.125, {})


def test_the_same_model_twice_takes_one_place() -> None:
    verifier = replace(
        around(pair(0.5, 0.5)), copies=lambda _, others, mine, __: any((mine == one).all() for one in others)
    )
    uploads, scores = {**SOUP, 3: SOUP[0]}, {**CENTRED, 3: CENTRED[0]}
    swarm = ScriptedSwarm(scores, uploads)
    _, log = play(fresh_state(pair(9, 9), 5.0), swarm, 4, verifier, ServerPolicy(Soup(2)))
    assert swarm.invited == [0, 3, 1]
    assert (log.outcome("accepted"), log.outcome("declined")) == ([0, 1], [3])


@pytest.mark.parametrize("selection", [Best(), Soup(2), Rotation(2)])
def test_what_the_guard_doubts_is_declined_and_waits_but_nobody_is_banned(selection: Selection) -> None:
    verifier = replace(VERIFY, doubt=lambda _current, proposed, _round: MEMORISED if proposed[0] < 0.3 else "")
    after, log = play(fresh_state(model(1.0), 1.0), honest({0: 0.25, 1: 0.5, 2: 0.75}), verify=verifier,
                      policy=ServerPolicy(selection))  # fmt: skip
    assert [(one.outcome, one.reason) for one in log.verdicts if one.worker == 0] == [("declined", MEMORISED)]
    assert (after.banned, after.back_offs) == (frozenset(), {0: BackOff(1, 3)})
    assert 1 in log.outcome("accepted")


def test_whoever_has_no_weight_in_the_mixture_need_not_wait() -> None:
    verifier = replace(VERIFY, loss=lambda weights: float(weights[0]))
    models = {worker: np.array(one, np.float32) for worker, one in enumerate([(0.5, 1.2), (0.5, 0.8), (1.5, 1)])}
    swarm = ScriptedSwarm({worker: float(one[0]) for worker, one in models.items()}, models)
    after, log = play(fresh_state(model(1.0), 1.0), swarm, verify=verifier, policy=ServerPolicy(Rotation(3)))
    assert {one.worker: one.reason for one in log.verdicts if one.outcome == "declined"} == {2: UNWEIGHTED}
    assert (after.banned, after.back_offs) == (frozenset(), {})
