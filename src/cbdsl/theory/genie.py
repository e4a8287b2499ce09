"""The genie worker of Sec. V, which holds the population, and the distance of the swarm's models from it (Fig. 5)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cbdsl.algorithm.messages import Order
from cbdsl.algorithm.particles import Coefficients, Particles, move_particles
from cbdsl.algorithm.worker_round import count_steps as steps_in_round, draw_batches
from cbdsl.arrays import Doubles, Floats, Indices
from cbdsl.data.dataset import Dataset
from cbdsl.engines.engine import Sgd
from cbdsl.rng import seed_of, stream
from cbdsl.runs.build import Experiment, ModelBuilder, honest_workers, make_worker_data
from cbdsl.runs.loop import play_rounds
from cbdsl.runs.records import finite
from cbdsl.spec import Spec
from cbdsl.theory.constants import norms
from cbdsl.theory.trajectory import prepare_measurement


@dataclass(frozen=True)
class Divergence:
    """Model divergence after a round, over the workers whose weights are finite; NaN if there are none."""

    round: int
    mean: float
    deviation: float  # the standard deviation over workers
    low: float
    high: float
    median: float  # where a few workers run away, the mean is theirs
    lost: int  # workers whose weights are not finite any more

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {name: finite(value) for name, value in vars(self).items()}


OnDivergence = Callable[[Divergence], None]


@dataclass(frozen=True, eq=False)
class Genie:
    """One worker that holds all data: v^g_{t+1} = c0 v^g_t - alpha grad F(w^g_t), w^g_{t+1} = w^g_t + v^g_{t+1}."""

    experiment: Experiment
    population: Indices
    steps: int  # as many batches a round as a worker's
    position: Floats  # w^g_t, (D,)
    velocity: Floats  # v^g_t, (D,)

    @staticmethod
    def at_start(experiment: Experiment) -> Genie:
        """Return the genie before round 1, at the swarm's common initial model."""
        steps = int(steps_of(experiment).max())
        start = experiment.initial[0]
        return Genie(experiment, find_population(experiment), steps, start, np.zeros_like(start))

    def move(self, round_number: int, inertia: float, learning_rate: float) -> Genie:
        """Return the genie after a round: inertia and as much SGD as a worker does, in the workers' order."""
        settings = self.experiment.spec.swarm
        nothing = np.zeros((1, 1), np.float32)
        own = Particles(self.position[None], self.velocity[None], self.position[None], np.zeros(1))
        positions, velocities = move_particles(
            own,
            self.position,
            Coefficients(inertia, nothing, nothing),
            lambda start: self._train(start, round_number, learning_rate),
            settings.sgd_from,
            settings.velocity,
        )
        return replace(self, position=positions[0], velocity=velocities[0])

    def _train(self, start: Floats, round_number: int, learning_rate: float) -> Floats:
        if self.steps == 0:
            return start.copy()
        spec, experiment = self.experiment.spec, self.experiment
        local = replace(spec.local, steps=self.steps)
        batches = draw_batches(self.population, local, stream(spec.seed, "genie", round_number))
        seeds = np.array([seed_of(spec.seed, "genie", round_number, worker=1)], dtype=np.uint64)
        sgd = Sgd.of(local, learning_rate)
        return experiment.engine.train(np.ascontiguousarray(start), experiment.dataset.train, batches[None], sgd, seeds)


def find_population(experiment: Experiment) -> Indices:
    """Return D, the union of all D_i (Sec. III), without D_G: runs with and without it have one population."""
    return np.concatenate(experiment.split.workers)


def steps_of(experiment: Experiment) -> Indices:
    """Return the number of SGD steps of each worker per round, (U,)."""
    held = make_worker_data(experiment.split, experiment.dataset.train, experiment.spec).training
    return np.array([steps_in_round(len(own.indices), experiment.spec.local) for own in held], np.int32)


def divergences(positions: Floats, genie: Floats) -> Doubles:
    """Return ||w_i - w^genie|| / ||w^genie||, (U, D) and (D,) -> (U,); not finite for a worker that overflowed."""
    with np.errstate(invalid="ignore"):
        return norms(np.subtract(positions, genie, dtype=np.float64)) / norms(genie[None])


def summarise(round_number: int, values: Doubles) -> Divergence:
    """Summarise the divergences of one round in six numbers."""
    kept = values[np.isfinite(values)]
    lost = len(values) - len(kept)
    if not len(kept):
        kept = np.array([math.nan])
    return Divergence(
        round=round_number,
        mean=float(kept.mean()),
        deviation=float(kept.std()),
        low=float(kept.min()),
        high=float(kept.max()),
        median=float(np.median(kept)),
        lost=lost,
    )


class Companion:
    """A genie beside a run: it observes every round and records the divergence of the workers."""

    def __init__(self) -> None:
        self.curve: list[Divergence] = []
        self._genie: Genie | None = None

    def __call__(self, experiment: Experiment, order: Order) -> None:
        """Move the genie as the swarm was ordered to move, then measure."""
        before = self._genie or Genie.at_start(experiment)
        self._genie = before.move(order.round, order.inertia, order.learning_rate)
        positions = experiment.memory_swarm.take(honest_workers(experiment).tolist()).positions
        self.curve.append(summarise(order.round, divergences(positions, self._genie.position)))


def divergence_curve(
    spec: Spec,
    threads: int | None = None,
    on_round: OnDivergence | None = None,
    *,
    model: ModelBuilder | None = None,
    data: Dataset | None = None,
) -> list[dict[str, Any]]:
    """Return Figure 5 for one spec: one `Divergence` per round, as plain numbers for JSON."""
    experiment, companion = prepare_measurement(spec, threads, model, data), Companion()
    for played in play_rounds(experiment, experiment.first_state(), measured=False):
        companion(experiment, played.order)
        if on_round is not None:
            on_round(companion.curve[-1])
    return [found.to_json() for found in companion.curve]
