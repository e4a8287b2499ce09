"""The swarm's mathematics: how particles move and what they remember (Sec. III.C).

Pure functions on rows of workers; row i of a result depends on row i of the inputs alone. No randomness, no network,
no data: those are given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cbdsl.arrays import Doubles, Floats


@dataclass(frozen=True, eq=False)
class Particles:
    """Rows of workers: where they are, how they move, the best they have seen."""

    positions: Floats  # w_{i,t}     (U, D)
    velocities: Floats  # v_{i,t}     (U, D)
    personal_best: Floats  # w^p_{i,t}   (U, D)
    personal_score: Doubles  # F^p_{i,t}   (U,)


@dataclass(frozen=True, eq=False)
class Coefficients:
    """The weights of the three swarm terms in one round."""

    inertia: float  # c0
    cognitive: Floats  # c1, (U, 1) or (U, D)
    social: Floats  # c2, (U, 1) or (U, D)


def swarm_terms(particles: Particles, global_best: Floats, c: Coefficients) -> Floats:
    """The BI part of Eq. (5): c0 v + c1 (w^p - w) + c2 (w^g - w), (U, D)."""
    terms = np.multiply(particles.velocities, np.float32(c.inertia))
    pull = np.subtract(particles.personal_best, particles.positions)
    terms += np.multiply(pull, c.cognitive, out=pull)
    np.subtract(global_best, particles.positions, out=pull)
    terms += np.multiply(pull, c.social, out=pull)
    return terms


def move(
    particles: Particles,
    global_best: Floats,
    coefficients: Coefficients,
    train: Callable[[Floats], Floats],
    sgd_from: Literal["current", "moved"],
    velocity: Literal["full", "swarm"],
) -> tuple[Floats, Floats]:
    """Eq. (5): the new positions w_{t+1} and velocities v_{t+1}, each (U, D).

    `train` is the AI part: it takes positions and returns them after local SGD on D_i and D_tr. As printed, its
    displacement is measured from w_t ("current"); the authors' published script trains after the swarm move ("moved").
    """
    before = particles.positions
    terms = swarm_terms(particles, global_best, coefficients)
    if sgd_from == "current":
        after = train(before)
        after += terms  # w_t + (SGD(w_t) - w_t) + terms
    else:
        after = train(before + terms)
    return after, (np.subtract(after, before, out=terms) if velocity == "full" else terms)


def remember(particles: Particles, positions: Floats, velocities: Floats, scores: Doubles) -> Particles:
    """Eq. (6): keep the better of the old personal best and the new position. NaN never wins."""
    improved = scores < particles.personal_score  # (U,), False for NaN
    return Particles(
        positions,
        velocities,
        np.where(improved[:, None], positions, particles.personal_best),
        np.where(improved, scores, particles.personal_score),
    )


def inertia_at(round_number: int, rounds: int, schedule: tuple[float, float]) -> float:
    """c0 in round 1 ... rounds: linear from the first value of the schedule to the last (Sec. III.B)."""
    first, last = schedule
    share = (round_number - 1) / (rounds - 1) if rounds > 1 else 0.0
    return first + (last - first) * share
