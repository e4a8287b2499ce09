"""Ways to search a cube for the lowest score: a particle swarm, at random, and optuna's TPE. Runs nothing.

All work in generations: a search is asked for some points, and told their scores before it is asked again. What it says
next follows from its seed and from what it was told, so a search that was interrupted is simply repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np

from cbdsl.arrays import Doubles, Floats
from cbdsl.errors import UserError, unknown
from cbdsl.rng import seed_of, stream
from cbdsl.workers.swarm import Coefficients, Particles, remember, swarm_terms

_INERTIA = 0.7298  # c0, and below delta_1 = delta_2 with c1, c2 ~ U(0, delta): a swarm with these settles down
_PULL = 1.49618  # (Clerc and Kennedy, 2002)


class Search(Protocol):
    """Proposes points of the cube [0, 1]^K."""

    def ask(self) -> Floats:
        """The points of the next generation, (N, K)."""
        ...

    def tell(self, scores: Doubles) -> None:
        """How they did, (N,): the lower the better; what failed is infinite."""
        ...


def first_points(count: int, size: int, seed: int, known: Floats | None) -> Floats:
    """Where every search begins, (N, K): a point that is known, if any, and others at random."""
    points = stream(seed, "search").random((count, size), np.float32)
    if known is not None:
        points[0] = known
    return points


class SwarmSearch:
    """Particle swarm optimisation of settings: the swarm terms of Eq. (5) and the memory of Eq. (6), without SGD."""

    def __init__(self, first: Floats, seed: int) -> None:
        targets = stream(seed, "search", 1).random(first.shape, np.float32)
        velocities = (targets - first) / np.float32(2)  # at rest, the first to lead would stay where it is
        self._particles = Particles(first, velocities, first.copy(), np.full(len(first), np.inf))
        self._generation, self._seed = 1, seed

    def ask(self) -> Floats:
        """See `Search.ask`."""
        return self._particles.positions

    def tell(self, scores: Doubles) -> None:
        """See `Search.tell`: remember, then move."""
        kept = remember(self._particles, self._particles.positions, self._particles.velocities, scores)
        self._generation += 1
        leader = kept.personal_best[int(np.argmin(kept.personal_score))]  # w^g, (K,)
        draws = stream(self._seed, "search", self._generation)
        cognitive, social = draws.random((2, *kept.positions.shape), np.float32) * np.float32(_PULL)
        velocities = swarm_terms(kept, leader, Coefficients(_INERTIA, cognitive, social))  # (N, K)
        moved = kept.positions + velocities
        inside = np.clip(moved, 0, 1)
        velocities[moved != inside] = 0  # at a wall a particle stops
        self._particles = replace(kept, positions=inside, velocities=velocities)


class RandomSearch:
    """Points at random: what every search has to beat (Bergstra and Bengio, 2012)."""

    def __init__(self, first: Floats, seed: int) -> None:
        self._points, self._seed, self._generation = first, seed, 1

    def ask(self) -> Floats:
        """See `Search.ask`."""
        return self._points

    def tell(self, _scores: Doubles) -> None:
        """See `Search.tell`."""
        self._generation += 1
        self._points = stream(self._seed, "search", self._generation).random(self._points.shape, np.float32)


class TpeSearch:
    """The tree-structured Parzen estimator of optuna (Bergstra et al., 2011)."""

    def __init__(self, first: Floats, seed: int) -> None:
        demand("tpe")
        optuna: Any = import_module("optuna")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._names = [str(number) for number in range(first.shape[1])]
        self._ranges = dict.fromkeys(self._names, optuna.distributions.FloatDistribution(0, 1))
        sampler = optuna.samplers.TPESampler(seed=seed_of(seed, "search") % 2**32, n_startup_trials=len(first))
        self._study = optuna.create_study(sampler=sampler)
        for point in first:
            self._study.enqueue_trial(dict(zip(self._names, map(float, point), strict=True)))
        self._count, self._asked = len(first), []  # type: tuple[int, list[Any]]

    def ask(self) -> Floats:
        """See `Search.ask`."""
        self._asked = [self._study.ask(self._ranges) for _ in range(self._count)]
        return np.array([[trial.params[name] for name in self._names] for trial in self._asked], np.float32)

    def tell(self, scores: Doubles) -> None:
        """See `Search.tell`."""
        for trial, score in zip(self._asked, scores, strict=True):
            self._study.tell(trial, float(score) if np.isfinite(score) else 1e9)


SEARCHES: dict[str, Callable[[Floats, int], Search]] = {
    "swarm": SwarmSearch,
    "random": RandomSearch,
    "tpe": TpeSearch,
}
"""By name; made of the first points and a seed."""


def demand(name: str) -> None:
    """Refuse a search that is not known, or not installed."""
    if name not in SEARCHES:
        raise unknown("search", name, SEARCHES)
    if name == "tpe" and find_spec("optuna") is None:
        raise UserError("The search 'tpe' is optuna's, which is not installed. Run: pip install 'cbdsl[tune]'")
