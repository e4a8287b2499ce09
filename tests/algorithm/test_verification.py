from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cbdsl.algorithm.messages import commitment_of
from cbdsl.algorithm.verification import (
    IMPRECISE,
    MEMORISED,
    UNTRAINABLE,
    HoldOutLosses,
    Verifier,
    add_guard,
    is_memorised,
    make_copy_check,
    make_verifier,
    trust_uploads,
)
from cbdsl.arrays import Doubles, Floats

WEIGHTS = np.array([1.0, 2.0], dtype=np.float32)


@pytest.mark.parametrize(
    ("claimed", "measured", "believed"),
    [
        (0.5, 0.5, True),
        (0.5, 0.50009, True),  # absolute below a loss of 1
        (0.5, 0.50011, False),
        (0.5, 0.4998, False),  # too modest a claim is not the truth either
        (10.0, 10.0009, True),  # relative above
        (10.0, 10.0011, False),
        (0.5, float("nan"), False),
        (0.5, float("inf"), False),
    ],
)
def test_a_claim_is_believed_within_the_tolerance(claimed: float, measured: float, believed: bool) -> None:
    finding = make_verifier(lambda _: measured, 2, 1e-4).check(claimed, WEIGHTS, 1)
    assert finding.believed is believed
    assert bool(finding.reason) is not believed


@pytest.mark.parametrize(
    ("claimed", "measured", "is_declined"),
    [(1e-36, 5e-5, True), (0.0, 5e-5, True), (1e-36, 9e-7, False), (5e-4, 5.3e-4, False), (0.2, 0.20009, False)],
)
def test_a_claim_far_from_a_tiny_loss_bans_nobody_and_is_declined(
    claimed: float, measured: float, is_declined: bool
) -> None:
    finding = make_verifier(lambda _: measured, 2, 1e-4).check(claimed, WEIGHTS, 1)
    assert (finding.believed, finding.reason) == (True, IMPRECISE if is_declined else "")


def test_the_literal_comparison_of_the_paper_bans_for_rounding() -> None:
    assert not make_verifier(lambda _: 0.5 + 4e-8, 2, 0.0).check(0.5, WEIGHTS, 1).believed
    assert make_verifier(lambda _: 0.5 + 4e-8, 2, 1e-4).check(0.5, WEIGHTS, 1).believed


def test_trust_measures_nothing() -> None:
    finding = trust_uploads(2).check(0.0, WEIGHTS, 1)
    assert finding.believed
    assert finding.measured is None


def guard(
    public: Callable[[float], Doubles],
    private: Callable[[float], Doubles],
    train: Callable[[Floats, int], Floats] | None = None,
) -> Verifier:
    """A guard over a verifier that believes a claim of 0.5; losses depend on the first weight."""
    holdout = HoldOutLosses(
        lambda weights: public(float(weights[0])),
        lambda weights, _: private(float(weights[0])),
        lambda weights: float(private(float(weights[0])).mean()),
    )
    return add_guard(make_verifier(lambda _: 0.5, 2, 1e-4), holdout, 1e-4, train)


def doubt(verifier: Verifier, current: float, proposed: float) -> str:
    assert verifier.doubt is not None
    return verifier.doubt(np.array([current, 0], np.float32), np.array([proposed, 0], np.float32), 1)


EVEN = np.array([0.4, 0.5, 0.6, 0.5] * 10)
OTHER = np.array([0.5, 0.6, 0.4, 0.5] * 10)


def test_by_heart_is_what_falls_on_the_scoring_set_alone() -> None:
    verifier = guard(lambda first: EVEN * (1 - first), lambda _: OTHER)
    assert doubt(verifier, 0, 0.9) == MEMORISED
    assert verifier.check(0.5, WEIGHTS, 1).believed  # nobody is refuted, and so banned, for it


def test_what_falls_on_both_is_not_learned_by_heart() -> None:
    assert doubt(guard(lambda first: EVEN * (1 - first), lambda first: OTHER * (1 - first)), 0, 0.9) == ""


def test_what_the_global_model_has_by_heart_is_not_held_against_those_who_start_there() -> None:
    verifier = guard(lambda first: EVEN * (1 - first), lambda _: OTHER)
    assert doubt(verifier, 0.9, 0.9) == ""
    assert doubt(verifier, 0.9, 0.5) == ""


def test_a_better_private_loss_is_no_offence() -> None:
    assert doubt(guard(lambda _: EVEN, lambda first: OTHER * (1 - first)), 0, 0.9) == ""


def test_a_private_loss_that_is_not_a_number_is_doubted() -> None:
    assert doubt(guard(lambda _: EVEN, lambda first: OTHER if first < 1 else OTHER * np.nan), 0, 1)


@pytest.mark.parametrize(("trained", "words"), [(1.0, ""), (2.0, ""), (3.0, UNTRAINABLE), (np.nan, UNTRAINABLE)])
def test_what_falls_apart_when_it_is_trained_is_doubted(trained: float, words: str) -> None:
    verifier = guard(lambda _: EVEN, lambda first: OTHER * first, lambda weights, _: weights * np.float32(trained))
    assert doubt(verifier, 1, 1) == words


def test_the_guard_does_not_save_a_lie() -> None:
    verifier = guard(lambda _: EVEN, lambda _: EVEN)
    assert verifier.check(0.1, WEIGHTS, 1).reason == "the claim is not what the server measures"


def test_a_model_worsens_if_its_loss_on_the_whole_hold_out_is_higher_or_not_a_number() -> None:
    verifier = guard(lambda _: EVEN, lambda first: EVEN * first)
    better, worse, lost = (np.array([first, 0], np.float32) for first in (1, 2, np.nan))
    assert verifier.worsens(better, worse)
    assert verifier.worsens(better, lost)
    assert not verifier.worsens(better, better)
    assert not trust_uploads(2).worsens(better, worse)


def test_idle_is_what_gets_nowhere_along_the_servers_own_way() -> None:
    idle = make_copy_check(lambda weights, number: weights + np.array([number, 0], np.float32))
    start = np.array([3, 4], np.float32)

    def after(right: float, up: float, number: int = 1) -> bool:
        return idle(start, [], start + np.array([right, up], np.float32), number)

    assert after(0, 0)
    assert after(0.05, 0)
    assert after(0.05, 50)  # far away, but not by training
    assert not after(-2, 0)  # an older model, left behind by the others
    assert not after(0.25, 50)
    assert after(0.25, 50, 4)
    assert not after(0, 0, 0)  # where the server's own training gets nowhere, nobody is blamed


def test_idle_is_what_another_has_uploaded() -> None:
    idle = make_copy_check(lambda weights, _: weights + np.array([1, 0], np.float32))
    start, first, near, far = (np.array(pair, np.float32) for pair in ((0, 0), (1, 5), (1.25, 5.25), (1.25, 6)))
    assert not idle(start, [], first, 1)
    assert idle(start, [far, first], first, 1)
    assert idle(start, [far, first], near, 1)
    assert not idle(start, [first], far, 1)


@pytest.mark.parametrize("scale", [0.001, 0.01, 0.1])
def test_noise_is_idle_even_if_it_goes_further_than_training(scale: float) -> None:
    rng = np.random.default_rng(1)
    model, step = rng.normal(size=(2, 40_000)).astype(np.float32)
    idle = make_copy_check(lambda weights, _: weights + np.float32(0.02) * step)  # a step of 2 % of the model's length
    copies = model + (scale * rng.normal(size=(20, 40_000))).astype(np.float32)
    assert all(idle(model, [], copy, 1) for copy in copies)


def test_the_server_trains_once_a_round_to_find_copies() -> None:
    calls = []

    def train(weights: Floats, number: int) -> Floats:
        calls.append(number)
        return weights + np.array([2, 0], np.float32)

    idle, start = make_copy_check(train), np.array([3, 4], np.float32)
    assert [idle(start, [], start, number) for number in (1, 1, 2)] == [True] * 3
    assert calls == [1, 2]


def test_losses_without_any_spread_are_compared_as_they_are() -> None:
    same = np.full(6, 0.5)
    assert not is_memorised(same, same, 1e-6)
    assert is_memorised(same, same + 1e-9, 1e-6)


def test_few_batches_need_a_wide_gap_for_a_rare_false_alarm() -> None:
    # Two samples of three with variance 1: a standard error of sqrt(2/3), 4 degrees of freedom, t(1e-6) = 41.578.
    three = np.array([-1.0, 0.0, 1.0])
    assert not is_memorised(three, three + 41.5 * np.sqrt(2 / 3), 1e-6)
    assert is_memorised(three, three + 41.7 * np.sqrt(2 / 3), 1e-6)


def test_few_batches_raise_no_more_false_alarms() -> None:
    # Six batches a side: the normal quantile would alarm in 23 of 1,000 tests of one population.
    drawn = np.random.default_rng(0).normal(size=(4000, 2, 6))
    assert sum(is_memorised(public, private, 0.01) for public, private in drawn) < 60


def test_the_guards_false_alarms_are_as_rare_as_stated() -> None:
    # Two samples of one population: at 1 in 100 some 20 of 2,000 tests must alarm, and 45 would be a miracle.
    rng = np.random.default_rng(0)
    drawn = rng.exponential(size=(2000, 2, 100, 20)).mean(-1)  # means of batches, as the guard sees them
    alarms = sum(is_memorised(public, private, 0.01) for public, private in drawn)
    assert 5 <= alarms <= 45


@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=8), st.integers(0, 7))
def test_a_commitment_fits_one_model_alone(values: list[float], at: int) -> None:
    model = np.array(values, dtype=np.float32)
    other = model.copy()
    other[at % len(other)] += 1
    assert commitment_of(model) == commitment_of(model.copy())
    assert commitment_of(model) != commitment_of(other)
    assert len(commitment_of(model)) == 16
