"""What the theory asks of a learning problem: losses and gradients, by worker and by class.

The theorems take gradients through `Problem` alone, so that a problem with known constants can stand where data and an
engine stand in a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from cbdsl.arrays import Doubles, Floats, Indices, Samples
from cbdsl.data.partition import Labels
from cbdsl.engines.base import Engine
from cbdsl.theory.constants import Rows
from cbdsl.workers.batches import padded


class Problem(Protocol):
    """F_i = sum_c p_i(c) E_{x|c}[f_c] for every worker, and F = sum_c p(c) E_{x|c}[f_c] for the population (Sec. V)."""

    @property
    def shares(self) -> Doubles:
        """p_i(c): how a worker's training data is spread over the classes, (U, C)."""
        ...

    @property
    def population(self) -> Doubles:
        """p(c): how the population is spread over the classes, (C,)."""
        ...

    def losses(self, weights: Rows) -> Doubles:
        """F_i(w_i) for one model a worker, (U, D) -> (U,)."""
        ...

    def class_gradients(self, workers: Indices, weights: Rows) -> Rows:
        """The gradients of E_{x|c}[f_c] over each worker's own samples, (k, D) -> (k, C, D); zero where it has none."""
        ...

    def population_gradients(self, weights: Rows) -> Rows:
        """The gradients of E_{x|c}[f_c] over the population, (D,) -> (C, D); zero for a class that nobody has."""
        ...


class EngineProblem:
    """The problem of a run: the mean cross-entropy over D_i (and D_tr where it is shared), by an engine."""

    def __init__(
        self, engine: Engine, samples: Samples, training: Sequence[Indices], population: Indices, classes: int
    ) -> None:
        """training: what each worker trains on. population: the samples of the genie worker."""
        self._engine, self._samples = engine, samples
        self._training = padded(training)
        self._by_class = [by_class(rows, samples.labels, classes) for rows in training]
        self._population = by_class(population, samples.labels, classes)
        self.shares = np.array([proportions(rows, samples.labels, classes) for rows in training])  # (U, C)
        self.population = proportions(population, samples.labels, classes)  # (C,)

    def losses(self, weights: Rows) -> Doubles:
        """See `Problem.losses`."""
        return self._engine.losses(weights, self._samples, self._training)

    def class_gradients(self, workers: Indices, weights: Rows) -> Floats:
        """See `Problem.class_gradients`."""
        return self._gradients([self._by_class[worker] for worker in workers], weights)

    def population_gradients(self, weights: Rows) -> Floats:
        """See `Problem.population_gradients`."""
        (only,) = self._gradients([self._population], weights[None])
        return np.asarray(only)

    def _gradients(self, held: Sequence[Sequence[Indices]], weights: Rows) -> Floats:
        """One row for every class that a worker has, all in one call: classes are spread over threads like workers."""
        present = [(row, label) for row, parts in enumerate(held) for label, part in enumerate(parts) if len(part)]
        rows, labels = (list(column) for column in zip(*present, strict=True))
        indices = padded([held[row][label] for row, label in present])
        result = np.zeros((len(held), len(held[0]), weights.shape[1]), np.float32)  # (k, C, D)
        result[rows, labels] = self._engine.gradients(np.ascontiguousarray(weights[rows]), self._samples, indices)
        return result


def by_class(rows: Indices, labels: Labels, classes: int) -> list[Indices]:
    """Rows sorted into one list a class."""
    return [rows[labels[rows] == label] for label in range(classes)]


def proportions(rows: Indices, labels: Labels, classes: int) -> Doubles:
    """The share of every class among these rows, (C,)."""
    return np.bincount(labels[rows], minlength=classes) / len(rows)
