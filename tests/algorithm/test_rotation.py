from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from cbdsl.algorithm.aggregators import trimmed_mean_of
from cbdsl.algorithm.messages import ServerState, WorkerId
from cbdsl.algorithm.rotation import (
    Rotation,
    choose_group,
    cosine,
    drop_harmful,
    drop_near,
    grow_group,
    is_noise,
    usual_lengths,
)
from cbdsl.algorithm.selection import (
    COPIED,
    EQUAL,
    FAR,
    HARMFUL,
    LEFT_OUT,
    OPPOSED,
    Candidate,
    RoundContext,
    SelectionResult,
    VerifiedUpload,
)
from cbdsl.algorithm.verification import Verifier, trust_uploads
from cbdsl.arrays import Floats

START = np.zeros(2, np.float32)


def view_of(verifier: Verifier | None = None, memory: Floats | None = None, number: int = 1) -> RoundContext:
    state = ServerState(number - 1, START, 1.0)
    return RoundContext(
        replace(state, memory=state.memory if memory is None else memory), number, verifier or trust_uploads(2)
    )


def combined(
    steps: Mapping[WorkerId, tuple[float, float]], view: RoundContext, momentum: float = 0.5
) -> SelectionResult:
    believed = [VerifiedUpload(worker, 1.0, np.array(step, np.float32)) for worker, step in steps.items()]
    return Rotation(k=12, momentum=momentum, trim=0).combine(believed, view)


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


def test_a_long_step_weighs_as_much_as_any_other() -> None:
    made = combined({0: (1, 0), 1: (0, 1), 2: (100, 0)}, view_of())
    assert made.model is not None
    np.testing.assert_allclose(made.model, [0.5, 0.5], atol=1e-6)  # 0 and 2 are the same once they are as long


def test_a_fifth_of_a_step_is_worth_a_whole_one() -> None:
    made = combined({0: (1, 0), 1: (0, 1), 2: (-0.16, -0.12)}, view_of())
    assert made.model is not None
    np.testing.assert_allclose(made.model, np.array([1 - 0.8, 1 - 0.6]) / 3, atol=1e-6)
    assert not made.declined


def test_idle_steps_are_declined_and_equal_ones_share_a_place() -> None:
    made = combined({0: (1, 0), 1: (0.6, 0.8), 2: (0.6, 0.8), 3: (0, 0), 4: (0.96, -0.28)}, view_of())
    assert made.declined == {2: EQUAL, 3: COPIED}
    assert made.model is not None
    np.testing.assert_allclose(made.model, [2.56 / 3, 0.52 / 3], atol=1e-6)


@pytest.mark.parametrize(("step", "own", "far"), [(9.0, 9 / 31, True), (9.0, 9 / 29, False), (4.0, 4 / 31, False)])
def test_what_is_longer_than_w_g_and_than_many_steps_is_far(step: float, own: float, far: bool) -> None:
    verifier = replace(trust_uploads(2), own_step=lambda _current, _round: np.array([own, 0.0]))
    state = ServerState(0, np.array([3, 4], np.float32), 1.0)
    upload = VerifiedUpload(0, 1.0, np.array([3 + step, 4], np.float32))
    assert Rotation().objection(upload, [], RoundContext(state, 1, verifier)) == (FAR if far else "")


def test_noise_has_nothing_in_common_with_the_others_whatever_its_length() -> None:
    rng = np.random.default_rng(3)
    way = rng.normal(size=4000)
    honest = way + rng.normal(size=(7, 4000))
    noise, against = rng.normal(size=(6, 4000)) * 9, -way[None]
    found = is_noise(np.concatenate([honest, noise, against]))
    assert found.tolist() == [False] * 7 + [True] * 6 + [False]
    assert not is_noise(honest * np.linspace(0.2, 5, 7)[:, None]).any()
    assert not is_noise(noise[:3]).any()  # too few to say
    assert not is_noise(noise).any()  # nothing in common at all: nobody stands out


def test_copies_with_noise_do_not_set_the_usual_length() -> None:
    rng = np.random.default_rng(4)
    way = rng.normal(size=2000).astype(np.float32)
    steps = [way + rng.normal(size=2000).astype(np.float32) for _ in range(4)]
    noise = [np.float32(0.5) * rng.normal(size=2000).astype(np.float32) for _ in range(5)]
    believed = [VerifiedUpload(worker, 1.0, step) for worker, step in enumerate([*steps, *noise])]
    state = ServerState(0, np.zeros(2000, np.float32), 1.0)
    made = Rotation(trim=0).combine(believed, RoundContext(state, 1, trust_uploads(2000)))
    assert made.declined == dict.fromkeys(range(4, 9), COPIED)
    assert made.memory is not None
    assert made.memory[-1] == pytest.approx(float(np.median([np.linalg.norm(step) for step in steps])), rel=1e-5)


def test_momentum_and_the_usual_length_are_remembered() -> None:
    first = combined({0: (3, 4)}, view_of())
    assert first.memory is not None
    np.testing.assert_allclose(first.memory, [3, 4, 5])
    second = combined({0: (3, 4)}, view_of(memory=first.memory, number=2))
    assert second.model is not None
    np.testing.assert_allclose(second.model, [4.5, 6])
    assert second.memory is not None
    np.testing.assert_allclose(second.memory, [4.5, 6, 5])


def test_usual_lengths_are_the_median_and_the_upper_quartile_and_do_not_jump() -> None:
    lengths = np.array([1.0, 2.0, 90.0])
    np.testing.assert_allclose(usual_lengths(lengths, 0), [2, 46])
    np.testing.assert_allclose(usual_lengths(lengths, 1.5), [2, 3])
    np.testing.assert_allclose(usual_lengths(lengths, 0.25), [0.5, 0.5])
    np.testing.assert_allclose(usual_lengths(lengths, 16), [8, 32])
    np.testing.assert_allclose(usual_lengths(lengths, 16, most=9), [8, 32])
    np.testing.assert_allclose(usual_lengths(lengths, 0, most=9), [2, 9])


def test_the_cosine_of_two_steps() -> None:
    own = np.array([2.0, 0.0])
    found = [cosine(np.array(step, float), own) for step in ((5, 0), (0, 7), (-1, 1), (0, 0))]
    np.testing.assert_allclose(found, [1, 0, -np.sqrt(0.5), 0], atol=1e-9)


@pytest.mark.parametrize(("goal", "length"), [(3.0, 3.0), (1.0, 1.0), (-9.0, 1.0)])
def test_with_a_hold_out_the_longer_step_is_taken_where_it_does_better(goal: float, length: float) -> None:
    """Two fifths of the steps are short ones, made by those who do not want to work: the median shrinks."""
    verifier = replace(trust_uploads(2), loss=lambda model, _round: abs(float(model[0]) - goal))
    steps = {0: (1, 0), 1: (0.96, 0.28), 2: (0.96, -0.28), 3: (2.88, 0.84), 4: (2.88, -0.84)}
    made = combined(steps, view_of(verifier, memory=np.array([0, 0, 2], np.float32)))
    assert made.memory is not None
    assert made.memory[-1] == pytest.approx(length)


def test_without_a_hold_out_the_usual_length_is_the_median() -> None:
    made = combined({0: (1, 0), 1: (0.96, 0.28), 2: (0.96, -0.28), 3: (2.88, 0.84), 4: (2.88, -0.84)}, view_of())
    assert made.memory is not None
    assert made.memory[-1] == pytest.approx(1.0)


def test_those_near_each_other_share_a_place() -> None:
    steps = np.array([[0, 0], [0, 0.1], [0, 1], [0, 0]])
    assert drop_near(steps, [0, 1, 2, 3], 0.2) == [0, 2]
    assert drop_near(steps, [1, 2, 3], 0.2) == [1, 2]
    assert drop_near(np.zeros((2, 2)), [0, 1], 0.0) == [0, 1]


def test_the_mean_is_trimmed_weight_by_weight_as_far_as_something_is_left() -> None:
    steps = np.array([[9.0, 1], [1, 2], [2, -9], [3, 3]])
    np.testing.assert_allclose(trimmed_mean_of(steps, 0), [3.75, -0.75])
    np.testing.assert_allclose(trimmed_mean_of(steps, 1), [2.5, 1.5])
    np.testing.assert_allclose(trimmed_mean_of(steps, 5), [2.5, 1.5])
    np.testing.assert_allclose(trimmed_mean_of(steps[:1], 1), [9, 1])


@pytest.mark.parametrize(("agreement", "words"), [(0.0, ""), (-0.04, ""), (-0.06, OPPOSED), (0.5, "")])
def test_a_step_against_the_servers_own_is_declined(agreement: float, words: str) -> None:
    verifier = replace(
        trust_uploads(2), own_step=lambda _current, _round: np.array([agreement, np.sqrt(1 - agreement**2)])
    )
    upload = VerifiedUpload(0, 1.0, np.array([0.5, 0], np.float32))
    assert Rotation().objection(upload, [], view_of(verifier)) == words
    assert Rotation().objection(VerifiedUpload(0, 1.0, START), [], view_of(verifier)) == ""


def test_long_steps_of_most_do_not_make_the_others_idle() -> None:
    """Attackers by chance most of a round, with steps a hundred times as long as honest ones."""
    verifier = replace(trust_uploads(2), own_step=lambda _current, _round: np.array([0.5, 0.0]))
    steps = {0: (1, 0), 1: (0.8, 0.6), 2: (0, 90), 3: (70, -70), 4: (0, -99), 5: (-80, 80)}
    made = combined(steps, view_of(verifier))
    assert made.declined == {}
    assert made.memory is not None
    assert made.memory[-1] == pytest.approx(6)  # twelve of the server's own


def test_attackers_that_hold_each_other_in_balance_are_left_out_together() -> None:
    """Each pair pulls back, and far to either side: without one of them the other one tips the balance."""
    weights = np.array([1.0, 20.0])
    verifier = replace(
        trust_uploads(2), loss=lambda model, _round: float((weights * np.square(model - np.array([1.5, 0]))).sum())
    )
    honest: dict[WorkerId, tuple[float, float]] = {0: (1, 0.02), 1: (1, -0.02), 2: (1, 0.3), 3: (1, -0.3)}
    pairs: dict[WorkerId, tuple[float, float]] = {
        4: (-0.9, 0.436), 5: (-0.9, -0.436), 6: (-0.8, 0.6), 7: (-0.8, -0.6)
    }  # fmt: skip
    believed = [VerifiedUpload(worker, 1.0, np.array(step, np.float32)) for worker, step in (honest | pairs).items()]
    made = Rotation(k=8, trim=0).combine(believed, view_of(verifier))
    assert made.model is not None
    assert set(pairs) <= set(made.declined)
    assert made.model[0] > 0.9


def goal(target: Sequence[float]) -> Verifier:
    """The private loss is the squared distance to a target."""
    return replace(trust_uploads(2), loss=lambda weights, _round: float(np.square(weights - np.array(target)).sum()))


def test_what_does_harm_is_left_out() -> None:
    honest: dict[WorkerId, tuple[float, float]] = {0: (1, 0), 1: (1, -0.5), 2: (1, 0.5)}
    made = combined({**honest, 7: (0.5, 1.5)}, view_of(goal((1, 0))))
    assert made.declined == {7: HARMFUL}
    assert made.model is not None
    assert made.model[0] > 0.9


def test_without_a_guard_nobody_is_left_out() -> None:
    assert not combined({0: (1, 0), 1: (-1, 0)}, view_of()).declined


@pytest.mark.parametrize("least", [1, 3])
def test_some_stay_whatever_they_do(least: int) -> None:
    assert len(drop_harmful(range(6), lambda some: float(len(some)), least)[0]) == least


def test_a_little_harm_is_no_reason() -> None:
    harm = {0: 0.0, 1: 0.005, 2: 0.5, 3: 0.02}
    assert drop_harmful(range(4), lambda some: 1 + sum(harm[one] for one in some), 1)[0] == [0, 1]


def test_a_group_grows_as_long_as_it_gets_better() -> None:
    gain = {0: 1.0, 1: -2.0, 2: 3.0, 3: float("nan")}
    group, loss = grow_group(range(4), lambda some: 9 - sum(gain[one] for one in some))
    assert (group, loss) == ([2, 0], 5)


def test_who_does_better_without_the_others_is_taken_where_all_together_get_nowhere() -> None:
    def loss(group: Sequence[int]) -> float:
        """0 and 1 get ahead; 2 and 3 take it back together, and each alone does more harm than that."""
        ahead = sum(one in group for one in (0, 1))
        held = 1.9 if {2, 3} <= set(group) else 2.5 if {2, 3} & set(group) else 0.0
        return 4.0 - ahead + held

    assert choose_group(range(4), loss, 1) == ([0, 1], {2: LEFT_OUT, 3: LEFT_OUT})
    assert choose_group(range(3), lambda some: 4.0 - len(some), 1) == ([0, 1, 2], {})


def test_what_makes_the_loss_not_a_number_does_harm() -> None:
    assert drop_harmful(range(4), lambda some: float("nan") if 2 in some else 1.0, 1)[0] == [0, 1, 3]
    assert drop_harmful(range(4), lambda _: float("nan"), 1)[0] == [0, 1, 2, 3]  # nobody in particular
