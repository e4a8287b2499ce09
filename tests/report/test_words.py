from __future__ import annotations

from typing import Any

import pytest

from cbdsl.report.paper_page import _format_scale, describe_attackers, describe_regime
from cbdsl.report.words import describe_training, join_words
from cbdsl.spec import AttackSpec, LocalSpec, Spec
from cbdsl.studies.paper import FULL_PLAN, ReproductionPlan


def test_lists_read_as_people_write_them() -> None:
    assert join_words([3]) == "3"
    assert join_words([1, 5, 10]) == "1, 5 and 10"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "one epoch of plain SGD per round"),
        ({"epochs": 3}, "three epochs of plain SGD per round"),
        ({"epochs": 12, "momentum": 0.9}, "12 epochs, momentum 0.9"),
        ({"steps": 7}, "seven batches of plain SGD per round"),
        ({"decay": 0.5}, "one epoch, learning rate halved every round"),
        ({"decay": 0.9, "weight_decay": 0.01}, "one epoch, weight decay 0.01, learning rate times 0.9 every round"),
    ],
)
def test_local_training_is_described_by_its_settings(settings: dict[str, Any], words: str) -> None:
    assert describe_training(LocalSpec(**settings)) == words


def test_regimes_are_described_by_their_presets() -> None:
    assert describe_regime("paper", FULL_PLAN) == "as the text says: one epoch of plain SGD per round"
    assert describe_regime("script", FULL_PLAN) == (
        "as the authors' published script: three epochs, momentum 0.9, learning rate halved every round"
    )
    changed = ReproductionPlan(("paper",), (0,), 1.0, (("local.epochs", 2),))
    assert (
        describe_regime("paper", changed) == "as the text says, with other settings: two epochs of plain SGD per round"
    )


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ((), "In Figures 3 and 4, 1 of 50 workers attacks: liar (scale 10). The paper's attacker"),
        ((("attack.scale", 0.5), ("workers", 8)), "In Figures 3 and 4, 1 of 8 workers attacks: liar (scale 0.5)."),
        (
            (("attack.name", "zero"), ("attack.byzantine", 3)),
            "In Figures 1, 2, 3, 4 and 5, 3 of 50 workers attack: zero. A",
        ),
    ],
)
def test_the_attackers_are_those_that_were_run(settings: tuple[tuple[str, Any], ...], start: str) -> None:
    assert describe_attackers(ReproductionPlan(("script",), (0,), 1.0, settings)).startswith(start)


def test_no_attackers_are_described_where_there_are_none() -> None:
    assert describe_attackers(ReproductionPlan(("paper",), (0,), 1.0, (("attack.byzantine", 0),))) == ""


def test_an_attack_that_finds_its_own_strength_has_no_scale() -> None:
    assert _format_scale(Spec(attack=AttackSpec("alie"))) == _format_scale(Spec(attack=AttackSpec("mimic"))) == ""
    assert _format_scale(Spec(attack=AttackSpec("alie", scale=1.5))) == " (scale 1.5)"
