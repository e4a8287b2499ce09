from __future__ import annotations

from typing import Any

import pytest

from cbdsl.report.words import attack_scale, attackers_words, listed, regime_words, work_words
from cbdsl.spec import AttackSpec, LocalSpec, Spec
from cbdsl.studies.paper import FULL_PLAN, ReproductionPlan


def test_lists_read_as_people_write_them() -> None:
    assert listed([3]) == "3"
    assert listed([1, 5, 10]) == "1, 5 and 10"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "one epoch of plain SGD a round"),
        ({"epochs": 3}, "three epochs of plain SGD a round"),
        ({"epochs": 12, "momentum": 0.9}, "12 epochs, momentum 0.9"),
        ({"steps": 7}, "seven batches of plain SGD a round"),
        ({"decay": 0.5}, "one epoch, learning rate halved every round"),
        ({"decay": 0.9, "weight_decay": 0.01}, "one epoch, weight decay 0.01, learning rate times 0.9 every round"),
    ],
)
def test_a_rounds_work_is_told_from_its_settings(settings: dict[str, Any], words: str) -> None:
    assert work_words(LocalSpec(**settings)) == words


def test_the_regimes_are_told_from_their_presets() -> None:
    assert regime_words("paper", FULL_PLAN) == "as the text says: one epoch of plain SGD a round"
    assert regime_words("script", FULL_PLAN) == (
        "as the authors' published script: three epochs, momentum 0.9, learning rate halved every round"
    )
    changed = ReproductionPlan(("paper",), (0,), 1.0, (("local.epochs", 2),))
    assert regime_words("paper", changed) == "as the text says, with other settings: two epochs of plain SGD a round"


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
    assert attackers_words(ReproductionPlan(("script",), (0,), 1.0, settings)).startswith(start)


def test_nobody_is_called_an_attacker_where_there_is_none() -> None:
    assert attackers_words(ReproductionPlan(("paper",), (0,), 1.0, (("attack.byzantine", 0),))) == ""


def test_an_attack_that_finds_its_own_strength_has_no_scale() -> None:
    assert attack_scale(Spec(attack=AttackSpec("alie"))) == attack_scale(Spec(attack=AttackSpec("mimic"))) == ""
    assert attack_scale(Spec(attack=AttackSpec("alie", scale=1.5))) == " (scale 1.5)"
