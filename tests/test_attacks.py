from __future__ import annotations

import numpy as np
import pytest

from cbdsl.attacks import ATTACKS, make_attack
from cbdsl.errors import UserError
from cbdsl.spec import AttackSpec


@pytest.mark.parametrize("honest", [1e-9, 0.3, 2.3, float("inf")])
def test_a_liar_claims_less_than_the_truth_but_nothing_impossible(honest: float) -> None:
    assert 0 < make_attack(AttackSpec("liar")).claim(honest) < honest


def test_a_liar_uploads_random_weights_of_the_stated_scale() -> None:
    honest = np.ones(20_000, dtype=np.float32)
    fake = make_attack(AttackSpec("liar", scale=3.0)).upload(honest, np.random.default_rng(0))
    assert fake.dtype == np.float32
    assert fake.std() == pytest.approx(3.0, rel=0.03)
    assert abs(fake.mean()) < 0.1
    np.testing.assert_array_equal(honest, 1)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_the_same_for_the_same_stream(name: str) -> None:
    attack = make_attack(AttackSpec(name))
    uploads = [attack.upload(np.ones(5, dtype=np.float32), np.random.default_rng(4)) for _ in range(2)]
    np.testing.assert_array_equal(uploads[0], uploads[1])


def test_an_unknown_attack_is_named_with_the_ones_there_are() -> None:
    with pytest.raises(UserError, match=r"Unknown attack 'lair'. Did you mean 'liar'\?"):
        make_attack(AttackSpec("lair"))
