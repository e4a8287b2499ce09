"""Particles: Eq. (5), by which workers move, and Eq. (6), by which they remember the best model they have had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from cbdsl.arrays import Bools, Doubles, Floats, Indices
from cbdsl.codecs.codec import Packs, Sent


@dataclass(frozen=True, eq=False)
class Particles:
    """Rows of workers: where they are, how they move, the best model each has had.

    Without a codec, `packs` and `versions` may be left out.

    >>> at = np.zeros((2, 3), np.float32)  # two workers, three parameters
    >>> Particles(at, at, at, np.full(2, np.inf)).positions.shape
    (2, 3)
    """

    positions: Floats  # w_{i,t}     (U, D)
    velocities: Floats  # v_{i,t}     (U, D)
    personal_best: Floats  # w^p_{i,t}   (U, D)
    personal_score: Doubles  # F^p_{i,t}   (U,)
    packs: Packs = field(default_factory=lambda: np.zeros((0, 0), np.uint8))  # w^p as a codec packed it, (U, C)
    versions: Indices = field(default_factory=lambda: np.zeros(0, np.int32))  # of the w^g it was packed against, (U,)


@dataclass(frozen=True, eq=False)
class Coefficients:
    """The weights of the three swarm terms in one round."""

    inertia: float  # c0
    cognitive: Floats  # c1, (U, 1) or (U, D)
    social: Floats  # c2, (U, 1) or (U, D)


def swarm_terms(particles: Particles, global_best: Floats, c: Coefficients) -> Floats:
    """Return the BI part of Eq. (5): c0 v + c1 (w^p - w) + c2 (w^g - w), (U, D)."""
    terms = np.multiply(particles.velocities, np.float32(c.inertia))
    pull = np.subtract(particles.personal_best, particles.positions)
    terms += np.multiply(pull, c.cognitive, out=pull)
    np.subtract(global_best, particles.positions, out=pull)
    terms += np.multiply(pull, c.social, out=pull)
    return terms


def move_particles(
    particles: Particles,
    global_best: Floats,
    coefficients: Coefficients,
    train: Callable[[Floats], Floats],
    sgd_from: Literal["current", "moved"],
    velocity: Literal["full", "swarm"],
) -> tuple[Floats, Floats]:
    """Apply Eq. (5); return the new positions w_{t+1} and velocities v_{t+1}, each (U, D).

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
    """Apply Eq. (6): keep the better of the old personal best and the new position. NaN never wins."""
    improved = scores < particles.personal_score  # (U,), False for NaN
    return replace(
        particles,
        positions=positions,
        velocities=velocities,
        personal_best=np.where(improved[:, None], positions, particles.personal_best),
        personal_score=np.where(improved, scores, particles.personal_score),
    )


def remember_sent(particles: Particles, positions: Floats, velocities: Floats, sent: Sent, version: int) -> Particles:
    """Apply Eq. (6) where a codec is used: the personal best is the model that the server would decode.

    version: of the w^g against which it was packed.
    """
    improved = sent.scores < particles.personal_score  # (U,), False for NaN
    kept = remember(particles, sent.models, velocities, sent.scores)
    return replace(
        kept,
        positions=positions,
        packs=np.where(improved[:, None], sent.packs, particles.packs),
        versions=np.where(improved, np.int32(version), particles.versions),
    )


def recover_lost(particles: Particles, global_best: Floats) -> Particles:
    """Move workers whose position is not finite to w^p, or to w^g, at rest; leave all others as they are."""
    lost = ~(_finite(particles.positions) & _finite(particles.velocities))
    if not lost.any():
        return particles
    usable = _finite(particles.personal_best)
    again = np.where(usable, particles.personal_best, global_best)
    return replace(
        particles,
        positions=np.where(lost, again, particles.positions),
        velocities=np.where(lost, np.float32(0), particles.velocities),
    )


def _finite(rows: Floats) -> Bools:
    """Return which rows are finite, (U, 1)."""
    return np.asarray(np.isfinite(rows).all(1, keepdims=True))


def inertia_at(round_number: int, rounds: int, schedule: tuple[float, float]) -> float:
    """Return c0 of a round from 1 to rounds: linear from the first value of the schedule to the last (Sec. III.B)."""
    first, last = schedule
    share = (round_number - 1) / (rounds - 1) if rounds > 1 else 0.0
    return first + (last - first) * share
