from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from cbdsl.algorithm.aggregators import trimmed_mean_of
from cbdsl.algorithm.messages import ServerState, WorkerId
from cbdsl.algorithm.rotation import Rotation, Soup
from cbdsl.algorithm.selection import COPIED, UNWEIGHTED, Candidate, RoundContext, SelectionResult, VerifiedUpload
from cbdsl.algorithm.verification import MEMORISED, Verifier, trust_uploads
from cbdsl.arrays import Floats
from cbdsl.errors import UserError

START = np.zeros(2, np.float32)


def view_of(verifier: Verifier | None = None, memory: Floats | None = None, number: int = 1) -> RoundContext:
    state = ServerState(number - 1, START, 1.0)
    return RoundContext(
        replace(state, memory=state.memory if memory is None else memory), number, verifier or trust_uploads(2)
    )


def goal(*target: float) -> Verifier:
    """The private loss is the squared distance to a target."""
    return replace(trust_uploads(2), loss=lambda weights: float(np.square(weights - np.array(target)).sum()))


def combined(
    steps: Mapping[WorkerId, tuple[float, float]], view: RoundContext, momentum: float = 0.5
) -> SelectionResult:
    believed = [VerifiedUpload(worker, 1.0, np.array(step, np.float32)) for worker, step in steps.items()]
    return Rotation(momentum=momentum).combine(believed, view)


def invited(rounds: int, workers: int, k: int) -> list[list[WorkerId]]:
    """Who is invited in each round, if everybody is believed."""
    uploaded: dict[WorkerId, float] = {}
    all_rounds = []
    for number in range(1, rounds + 1):
        state = replace(ServerState(number - 1, START, 1.0), last_uploaded=dict(uploaded))
        view, believed = RoundContext(state, number, trust_uploads(2)), list[VerifiedUpload]()
        waiting = [Candidate(worker, 0.5) for worker in range(workers)]
        while (worker := Rotation(k=k).invite(waiting, believed, view)) is not None:
            waiting = [one for one in waiting if one.worker != worker]
            believed.append(VerifiedUpload(worker, 0.5, START))
        all_rounds.append([one.worker for one in believed])
        uploaded |= {one.worker: 0.5 for one in believed}
    return all_rounds


def test_everybody_has_a_turn() -> None:
    assert invited(4, 5, 2) == [[0, 1], [2, 3], [4, 0], [1, 2]]


def test_without_samples_at_the_server_all_steps_count_equally_whatever_their_length() -> None:
    made = combined({0: (1, 0), 1: (0, 1), 2: (100, 0)}, view_of())
    assert made.model is not None
    np.testing.assert_allclose(made.model, [2 / 3, 1 / 3], atol=1e-6)
    assert not made.declined


def test_the_step_is_remembered_as_momentum() -> None:
    first = combined({0: (3, 4)}, view_of())
    assert first.memory is not None
    np.testing.assert_allclose(first.memory, [3, 4])
    second = combined({0: (3, 4)}, view_of(memory=first.memory, number=2))
    assert second.model is not None
    assert second.memory is not None
    np.testing.assert_allclose([second.model, second.memory], [[4.5, 6]] * 2)


def test_a_memory_of_another_size_is_none() -> None:
    made = combined({0: (3, 4)}, view_of(memory=np.ones(3, np.float32)))
    assert made.model is not None
    np.testing.assert_allclose(made.model, [3, 4])


def test_who_does_harm_has_no_weight() -> None:
    honest: dict[WorkerId, tuple[float, float]] = {0: (1, 0), 1: (0.8, -0.6), 2: (0.8, 0.6)}
    made = combined({**honest, 6: (-1, 0), 7: (-0.8, 0.6)}, view_of(goal(1, 0)))
    assert made.declined == {6: UNWEIGHTED, 7: UNWEIGHTED}
    assert made.model is not None
    assert made.model[0] > 0.8


def test_attackers_that_hold_each_other_in_balance_have_no_weight() -> None:
    """Each pair pulls back, and far to either side: without one of them the other one tips the balance."""
    weights = np.array([1.0, 20.0])
    verifier = replace(
        trust_uploads(2), loss=lambda model: float((weights * np.square(model - np.array([1.5, 0]))).sum())
    )
    honest: dict[WorkerId, tuple[float, float]] = {0: (1, 0.02), 1: (1, -0.02), 2: (1, 0.3), 3: (1, -0.3)}
    pairs: dict[WorkerId, tuple[float, float]] = {
        4: (-0.9, 0.436), 5: (-0.9, -0.436), 6: (-0.8, 0.6), 7: (-0.8, -0.6)
    }  # fmt: skip
    made = combined(honest | pairs, view_of(verifier))
    assert made.model is not None
    assert set(pairs) <= set(made.declined)
    assert made.model[0] > 0.9


def test_where_all_do_harm_w_g_stays_and_the_momentum_is_forgotten() -> None:
    made = combined({0: (1, 0), 1: (0.8, 0.6)}, view_of(goal(-1, 0), memory=np.array([1, 0], np.float32)), 0.9)
    assert made.model is None  # which costs no broadcast
    np.testing.assert_array_equal(made.memory, START)


def test_with_agreement_what_a_minority_wants_is_undone() -> None:
    """A backdoor in the second weight: the honest do not care about it, so its sign is disputed."""
    honest = {worker: (1.0, noise) for worker, noise in enumerate((0.1, -0.1, 0.1, -0.1))}
    believed = [VerifiedUpload(worker, 1.0, np.array(step, np.float32)) for worker, step in honest.items()]
    believed += [VerifiedUpload(9, 1.0, np.array((1, 1), np.float32))]
    plain, agreed = (Rotation(agreement=on).combine(believed, view_of()).model for on in (False, True))
    assert plain is not None
    assert agreed is not None
    assert plain[1] > 0.1
    np.testing.assert_allclose(agreed, plain * [1, -1], rtol=1e-5)


def test_a_mixture_that_is_worse_than_the_servers_own_training_does_not_win() -> None:
    """A step that is better than w^g, but leads to where no training helps any more."""
    verifier = replace(goal(1, 0), train=lambda weights, _: weights + np.array([weights[1] == 0, 0], np.float32))
    made = combined({0: (0.1, 0.01), 1: (0.1, 0.01)}, view_of(verifier))
    assert made.model is not None
    np.testing.assert_allclose(made.model, [1, 0])
    assert set(made.declined) == {0, 1}


def test_the_server_trains_the_mixture_as_far_as_that_helps_or_w_g_alone() -> None:
    verifier = replace(goal(1, 1), train=lambda weights, _round: weights + np.array([0, 4], np.float32))
    made = combined({0: (1, 0)}, view_of(verifier))
    assert made.model is not None
    assert made.memory is not None
    np.testing.assert_allclose(made.model, [1, 1])
    np.testing.assert_allclose(made.memory, [1, 0])  # not its own step
    made = combined({0: (-9, -9)}, view_of(verifier))
    assert made.model is not None
    assert made.memory is not None
    np.testing.assert_allclose(made.model, [0, 1])
    np.testing.assert_allclose(made.memory, [0, 0])
    assert Soup(2).combine([VerifiedUpload(0, 1.0, np.array([1, 0], np.float32))], view_of(replace(
        verifier, score=verifier.loss))).model is not None  # fmt: skip


def test_without_a_guard_the_scoring_set_decides() -> None:
    verifier = replace(trust_uploads(2), score=lambda weights: float(np.square(weights - 1).sum()))
    made = combined({0: (1, 0), 1: (0, 1), 2: (-1, 0), 3: (0, -1)}, view_of(verifier))
    assert set(made.declined) == {2, 3}
    assert made.score == pytest.approx(0.5)


@pytest.mark.parametrize("selection", [Rotation(3), Soup(3)])
def test_it_objects_to_what_the_guard_doubts_and_to_copies(selection: Rotation | Soup) -> None:
    def copies(current: Floats, others: Sequence[Floats], proposed: Floats, _round: int) -> bool:
        return any(np.array_equal(proposed, one) for one in (current, *others))

    verifier = replace(trust_uploads(2), copies=copies, doubt=lambda _, new, __: MEMORISED if new[0] > 1 else "")
    mine, other, far = (VerifiedUpload(0, 1.0, np.array(one, np.float32)) for one in ((1, 0), (0, 1), (2, 0)))
    assert selection.objection(mine, [other], view_of(verifier)) == ""
    assert selection.objection(mine, [other, mine], view_of(verifier)) == COPIED
    assert selection.objection(VerifiedUpload(0, 1.0, START), [], view_of(verifier)) == COPIED
    assert selection.objection(far, [], view_of(verifier)) == MEMORISED


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_of_attackers_is_less_than_all(share: float) -> None:
    with pytest.raises(UserError, match="from 0 to less than 1"):
        Rotation(byzantine=share)
    with pytest.raises(UserError, match="from 0 to less than 1"):
        Soup(byzantine=share)


def test_a_soup_has_ingredients_and_a_scoring_set() -> None:
    with pytest.raises(UserError, match="at least 2 ingredients"):
        Soup(1)
    with pytest.raises(UserError, match="D_sc"):
        Soup(2).combine([VerifiedUpload(0, 1.0, START)], view_of())


def test_the_mean_is_trimmed_weight_by_weight_as_far_as_something_is_left() -> None:
    steps = np.array([[9.0, 1], [1, 2], [2, -9], [3, 3]])
    np.testing.assert_allclose(trimmed_mean_of(steps, 0), [3.75, -0.75])
    np.testing.assert_allclose(trimmed_mean_of(steps, 1), [2.5, 1.5])
    np.testing.assert_allclose(trimmed_mean_of(steps, 5), [2.5, 1.5])
    np.testing.assert_allclose(trimmed_mean_of(steps[:1], 1), [9, 1])
