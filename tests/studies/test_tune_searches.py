"""Searches: they find the bottom of a bowl, stay in the cube, and depend on their seed and what they are told alone."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from cbdsl.arrays import Doubles, Floats
from cbdsl.errors import UserError
from cbdsl.studies import tune
from cbdsl.studies.tune import SEARCHES, Search, first_points

BOTTOM = np.array([0.7, 0.2], np.float32)
HERE = [name for name in SEARCHES if name != "tpe" or find_spec("optuna")]


def bowl(points: Floats) -> Doubles:
    return np.asarray(((points - BOTTOM) ** 2).sum(1), np.float64)


def played(search: Search, generations: int) -> tuple[list[Floats], float]:
    asked, best = [], np.inf
    for _ in range(generations):
        points = search.ask()
        scores = bowl(points)
        asked.append(points.copy())
        best = min(best, float(scores.min()))
        search.tell(scores)
    return asked, best


@pytest.mark.parametrize("name", HERE)
def test_a_search_stays_in_the_cube_and_repeats_itself(name: str) -> None:
    first = first_points(6, 2, 3, None)
    asked, _ = played(SEARCHES[name](first, 3), 5)
    again, _ = played(SEARCHES[name](first_points(6, 2, 3, None), 3), 5)
    other, _ = played(SEARCHES[name](first_points(6, 2, 4, None), 4), 5)
    for one, two in zip(asked, again, strict=True):
        assert np.array_equal(one, two)
        assert one.shape == (6, 2)
        assert ((one >= 0) & (one <= 1)).all()
    assert not np.array_equal(asked[-1], other[-1])


@pytest.mark.parametrize("name", HERE)
def test_every_search_begins_with_the_same_points_and_the_known_one_first(name: str) -> None:
    known = np.array([0.25, 0.75], np.float32)
    asked, _ = played(SEARCHES[name](first_points(5, 2, 0, known), 0), 1)
    assert asked[0][0] == pytest.approx(known)
    assert asked[0] == pytest.approx(first_points(5, 2, 0, known), abs=1e-6)


def test_a_swarm_gets_closer_to_the_bottom_of_a_bowl_than_chance() -> None:
    ends = {
        name: np.mean([played(SEARCHES[name](first_points(8, 2, seed, None), seed), 12)[1] for seed in range(10)])
        for name in ("swarm", "random")
    }
    assert ends["swarm"] < ends["random"] / 5


def test_a_swarm_moves_on_where_everything_failed() -> None:
    search = SEARCHES["swarm"](first_points(4, 2, 0, None), 0)
    before = search.ask().copy()
    search.tell(np.full(4, np.inf))
    assert np.isfinite(search.ask()).all()
    assert not np.array_equal(search.ask(), before)


def test_no_two_particles_try_the_leader_again_at_once() -> None:
    search = SEARCHES["swarm"](first_points(6, 2, 1, None), 1)
    first = search.ask().copy()
    search.tell(bowl(first))
    assert not any((search.ask() == point).all() for point in first)


def test_without_optuna_its_search_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "find_spec", lambda _name: None)
    with pytest.raises(UserError, match=r"pip install 'cbdsl\[tune\]'"):
        SEARCHES["tpe"](first_points(4, 2, 0, None), 0)
