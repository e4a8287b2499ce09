"""An attack of a user's own that goes wrong ends its run: left out of an average, it would pass for harmless."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cbdsl
from cbdsl.attacks.attack import Attack, AttackContext, Truthful
from cbdsl.errors import UserError
from support.helpers import blobs, perceptron, small_spec
from support.refusals import refused_as

Make = Callable[[AttackContext], Any]


class Uploading(Attack):
    def __init__(self, make: Make) -> None:
        self._make = make

    def upload(self, seen: AttackContext) -> Any:  # noqa: ANN401
        return self._make(seen)


class Omniscient(Uploading):
    omniscient = True


class Scoring(Attack):
    def claim(self, seen: AttackContext) -> float:
        return seen.score_of(seen.model[:5])


class Short(Truthful):
    def upload(self, seen: AttackContext) -> Any:  # noqa: ANN401
        return seen.model[:5]


class Claiming(Attack):
    def __init__(self, claimed: object) -> None:
        self._claimed = claimed

    def claim(self, seen: AttackContext) -> Any:  # noqa: ANN401, ARG002
        return self._claimed


def played(attack: Attack, method: str, **settings: object) -> cbdsl.Result:
    spec = small_spec(method=method, attack__byzantine=2, rounds=2, **settings)
    return cbdsl.run(spec, model=perceptron, data=blobs(), attack=attack, callbacks=[])


@pytest.mark.parametrize("kind", [Uploading, Omniscient])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda seen: seen.model[:5], r"float32 of shape \(5,\)"),
        (lambda seen: seen.model[None], r"float32 of shape \(1, 75\)"),
        (lambda seen: seen.model.tolist(), r"\[.* characters\)"),
        (lambda seen: seen.model.astype(complex), r"complex128 of shape \(75,\)"),
        (lambda seen: np.array([None] * len(seen.model)), r"object of shape \(75,\)"),
        (lambda _: 0.5, r"0\.5"),
    ],
)
def test_an_upload_that_is_no_model_ends_the_run(kind: type[Uploading], make: Make, words: str) -> None:
    allowed = r"An upload is a model, here an array of shape \(75,\), finite or not, or None to stay silent"
    said = rf"The attack {kind.__name__} uploads {words}\. {allowed}.*check_attack"
    with pytest.raises(UserError, match=said):
        played(kind(make), "fedavg")


@pytest.mark.parametrize("settings", [{}, {"codec__up": "q8"}, {"defence__commitment": True}])
def test_it_does_in_the_swarm_too_once_it_is_asked_for(settings: dict[str, object]) -> None:
    class Eager(Attack):
        def claim(self, seen: AttackContext) -> float:
            return seen.score / 2

        def upload(self, seen: AttackContext) -> Any:  # noqa: ANN401
            return seen.model[:5]

    with refused_as("invalid-part", "Eager", "uploads", "float32 of shape (5,)", "An upload is a model"):
        played(Eager(), "cb-dsl", **settings)


@pytest.mark.parametrize("settings", [{}, {"codec__up": "q8"}])
def test_no_score_is_measured_of_what_is_not_a_model(settings: dict[str, object]) -> None:
    with refused_as("invalid-part", "Scoring", "the score of", "float32 of shape (5,)"):
        played(Scoring(), "cb-dsl", **settings)
    with refused_as("invalid-part", "Short", "uploads", "float32 of shape (5,)"):
        played(Short(), "cb-dsl", **settings)


@pytest.mark.parametrize("claimed", [None, "0.5", True, [0.5], np.zeros(3), 1j])
def test_a_claim_that_is_no_number_ends_the_run(claimed: object) -> None:
    with pytest.raises(
        UserError, match=r"The attack Claiming claims .* A claim is one number, finite or not, such as seen\.score"
    ):
        played(Claiming(claimed), "cb-dsl")


@pytest.mark.parametrize("claimed", [0, 0.25, np.float32(0.25), np.array(0.25), np.nan, -np.inf])
def test_any_number_may_be_claimed(claimed: object) -> None:
    assert len(played(Claiming(claimed), "cb-dsl").rounds) == 2


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "cb-dsl"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30, 1])
def test_any_numbers_in_the_shape_of_a_model_may_be_sent(method: str, value: float) -> None:
    assert len(played(Uploading(lambda seen: np.full(len(seen.model), value)), method).rounds) == 2


def test_silence_is_allowed() -> None:
    result = played(Uploading(lambda _: None), "fedavg")
    assert [line.silent for line in result.rounds] == [result.summary.byzantine] * 2
