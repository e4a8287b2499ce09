"""A problem with known constants: one bowl a class, and a swarm that takes exactly one gradient step a round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cbdsl.arrays import Doubles, Indices
from cbdsl.theory.constants import Rows
from cbdsl.theory.measure import GenieStep
from cbdsl.theory.trajectory import SwarmMove


@dataclass(frozen=True, eq=False)
class Quadratic:
    """f_c(w) = steepness_c / 2 ||w - centre_c||^2, so L_c = |steepness_c| and L_i = |sum_c p_i(c) steepness_c|."""

    centres: Doubles  # (C, D)
    steepness: Doubles  # (C,)
    shares: Doubles  # p_i(c), (U, C)
    population: Doubles  # p(c), (C,)

    def losses(self, weights: Rows) -> Doubles:
        return np.asarray((self.shares * self.class_losses(weights)).sum(1))

    def class_losses(self, weights: Rows) -> Doubles:  # (k, C)
        apart = weights[:, None] - self.centres
        return np.asarray(self.steepness / 2 * (apart**2).sum(-1))

    def class_gradients(self, workers: Indices, weights: Rows) -> Doubles:
        del workers
        return np.asarray(self.steepness[:, None] * (weights[:, None] - self.centres))

    def population_gradients(self, weights: Rows) -> Doubles:
        return np.asarray(self.steepness[:, None] * (weights - self.centres))

    def gradients(self, weights: Rows) -> Doubles:
        by_class = self.steepness[:, None] * (weights[:, None] - self.centres)  # (U, C, D)
        return np.asarray((self.shares[:, :, None] * by_class).sum(1))


def random_quadratic(rng: np.random.Generator, workers: int = 4, classes: int = 3, size: int = 5) -> Quadratic:
    return Quadratic(
        centres=rng.normal(size=(classes, size)),
        steepness=rng.uniform(0.2, 2.0, classes),
        shares=rng.dirichlet(np.ones(classes), workers),
        population=rng.dirichlet(np.ones(classes)),
    )


def play(
    problem: Quadratic,
    rng: np.random.Generator,
    rounds: int,
    inertia: float,
    pulls: tuple[float, float],
    rate: float,
    starts: Doubles | None = None,
) -> Iterator[tuple[SwarmMove, GenieStep]]:
    """Eq. (5) to the letter, and the genie's own equation; the best is judged by the population's loss."""
    workers, size = len(problem.shares), problem.centres.shape[1]
    here = np.broadcast_to(rng.normal(size=size), (workers, size)).copy() if starts is None else starts
    previous, best, genie = here, here, here[0]
    genie_velocity = np.zeros(size)
    for number in range(1, rounds + 1):
        scores = problem.class_losses(best) @ problem.population
        leader = best[int(scores.argmin())]
        cognitive, social = (rng.uniform(0, pull, (workers, 1)) if pull else np.zeros((workers, 1)) for pull in pulls)
        after = here + inertia * (here - previous) + cognitive * (best - here) + social * (leader - here)
        after = after - rate * problem.gradients(here)
        next_velocity = inertia * genie_velocity - rate * problem.population @ problem.population_gradients(genie)
        yield (
            SwarmMove(number, inertia, rate, cognitive, social, previous, here, best, leader, after),
            GenieStep(genie, genie_velocity, genie + next_velocity),
        )
        better = problem.class_losses(after) @ problem.population < scores
        previous, here, best = here, after, np.where(better[:, None], after, best)
        genie, genie_velocity = genie + next_velocity, next_velocity
