"""The constants that Sec. IV assumes, measured: cosines, norm ratios, their products, and the smoothness L.

Pure functions on rows of workers, (k, D) -> (k,). An undefined value, such as the cosine of a zero vector, is NaN and
is not part of any bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from cbdsl.algorithm.worker_round import pad_rows
from cbdsl.arrays import Doubles, Floats, Indices, Labels, Samples
from cbdsl.engines.engine import Engine


class Problem(Protocol):
    """F_i = sum_c p_i(c) E_{x|c}[f_c] for every worker, and F = sum_c p(c) E_{x|c}[f_c] for the population (Sec. V)."""

    @property
    def shares(self) -> Doubles:
        """Return p_i(c), the distribution of each worker's training data over the classes, (U, C)."""
        ...

    @property
    def population(self) -> Doubles:
        """Return p(c), the distribution of the population over the classes, (C,)."""
        ...

    def losses(self, weights: Rows) -> Doubles:
        """Return F_i(w_i) for one model per worker, (U, D) -> (U,)."""
        ...

    def class_gradients(self, workers: Indices, weights: Rows) -> Rows:
        """Return the gradients of E_{x|c}[f_c] over each worker's samples, (k, D) -> (k, C, D); zero for none."""
        ...

    def population_gradients(self, weights: Rows) -> Rows:
        """Return the gradients of E_{x|c}[f_c] over the population, (D,) -> (C, D); zero for an empty class."""
        ...


class EngineProblem:
    """The problem of a run: the mean cross-entropy over D_i (and D_tr where it is shared), by an engine."""

    def __init__(
        self, engine: Engine, samples: Samples, training: Sequence[Indices], population: Indices, classes: int
    ) -> None:
        """Build the problem. training: each worker's training set. population: the samples of the genie worker."""
        self._engine, self._samples = engine, samples
        self._training = pad_rows(training)
        self._by_class = [group_by_class(rows, samples.labels, classes) for rows in training]
        self._population = group_by_class(population, samples.labels, classes)
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
        """Return one row per worker and class, in one call, so that threads share the classes like workers."""
        present = [(row, label) for row, parts in enumerate(held) for label, part in enumerate(parts) if len(part)]
        rows, labels = (list(column) for column in zip(*present, strict=True))
        indices = pad_rows([held[row][label] for row, label in present])
        result = np.zeros((len(held), len(held[0]), weights.shape[1]), np.float32)  # (k, C, D)
        result[rows, labels] = self._engine.gradients(np.ascontiguousarray(weights[rows]), self._samples, indices)
        return result


def group_by_class(rows: Indices, labels: Labels, classes: int) -> list[Indices]:
    """Return rows sorted into one list per class."""
    return [rows[labels[rows] == label] for label in range(classes)]


def proportions(rows: Indices, labels: Labels, classes: int) -> Doubles:
    """Return the share of every class among these rows, (C,)."""
    return np.bincount(labels[rows], minlength=classes) / len(rows)


Rows = NDArray[Any]  # (k, D), float32 or float64


def inner(left: Rows, right: Rows) -> Doubles:
    """Return inner products row by row, summed in double precision."""
    result: Doubles = np.einsum("...d,...d->...", left, right, dtype=np.float64)
    return result


def norms(rows: Rows) -> Doubles:
    """Return the Euclidean norms of the rows."""
    result: Doubles = np.sqrt(inner(rows, rows))
    return result


def quotient(over: Doubles, under: Doubles) -> Doubles:
    """Return over / under, NaN where under is 0."""
    result: Doubles = np.full(np.broadcast(over, under).shape, np.nan)
    return np.divide(over, under, out=result, where=under > 0)


@dataclass(frozen=True, eq=False)
class Alignment:
    """The angle between a direction and a worker's gradient, (k,) each."""

    cosine: Doubles  # cos theta, against -grad F
    ratio: Doubles  # ||v|| / ||grad F||; a zero vector has no direction, and neither cosine nor ratio
    product: Doubles  # cosine * ratio = <v, -grad F> / ||grad F||^2; 0 for a zero vector


def align(direction: Rows, gradient: Rows) -> Alignment:
    """Return the quantities defined before Theorem 1."""
    length, slope = norms(direction), norms(gradient)
    descent = -inner(direction, gradient)
    cosine = np.clip(quotient(descent, length * slope), -1.0, 1.0)
    ratio = quotient(np.where(length > 0, length, np.nan), slope)
    return Alignment(cosine, ratio, quotient(descent, slope**2))


def secants(gradient_change: Rows, change: Rows) -> Doubles:
    """Return ||grad F(w') - grad F(w)|| / ||w' - w||, Assumption 1 at one pair of points per row."""
    return quotient(norms(gradient_change), norms(change))


def curvatures(loss_change: Doubles, gradient: Rows, change: Rows) -> Doubles:
    """Return the smallest L with F(w') <= F(w) + <w' - w, grad F(w)> + L/2 ||w' - w||^2, one pair per row."""
    return quotient(2.0 * (loss_change - inner(change, gradient)), inner(change, change))


_Reduced = TypeVar("_Reduced")


def join_blocks(parts: Sequence[_Reduced]) -> _Reduced:
    """Join blocks of workers: arrays are concatenated, everything else is as in the first block."""

    def join(values: list[Any]) -> Any:  # noqa: ANN401 - any field of a dataclass
        if isinstance(values[0], np.ndarray):
            return np.concatenate(values)
        return join_blocks(values) if isinstance(values[0], Alignment) else values[0]

    first = parts[0]
    return type(first)(**{name: join([vars(part)[name] for part in parts]) for name in vars(first)})


def select_workers(part: _Reduced, rows: NDArray[np.bool_]) -> _Reduced:
    """Return the same for some of the workers: their rows of every array, everything else as it is."""

    def choose(value: Any) -> Any:  # noqa: ANN401 - any field of a dataclass
        if isinstance(value, np.ndarray):
            return value[rows]
        return select_workers(value, rows) if isinstance(value, Alignment) else value

    return type(part)(**{name: choose(value) for name, value in vars(part).items()})


@dataclass(frozen=True)
class ValueRange:
    """The least and the greatest value; NaN if there was none."""

    low: float
    high: float

    @staticmethod
    def of(values: Iterable[Doubles]) -> ValueRange:
        """Return the range of the defined values of some arrays."""
        defined = np.concatenate([np.empty(0), *(part[~np.isnan(part)] for part in values)])
        return (
            ValueRange(float(defined.min()), float(defined.max())) if len(defined) else ValueRange(math.nan, math.nan)
        )


@dataclass(frozen=True)
class DirectionBounds:
    """The assumed bounds of one direction, over all workers and rounds."""

    cosine: ValueRange  # q
    ratio: ValueRange  # u
    product: ValueRange  # q u, taken over the product: its extremes are not the products of the extremes

    @staticmethod
    def of(seen: Iterable[Alignment]) -> DirectionBounds:
        """Return the bounds of some alignments."""
        all_seen = list(seen)
        return DirectionBounds(
            ValueRange.of(one.cosine for one in all_seen),
            ValueRange.of(one.ratio for one in all_seen),
            ValueRange.of(one.product for one in all_seen),
        )


@dataclass(frozen=True)
class MeasuredConstants:
    """All constants of Sec. IV, as measured on a trajectory."""

    velocity: DirectionBounds  # v_{i,t}: q, u
    personal: DirectionBounds  # v^p_{i,t}: q^p, u^p
    social: DirectionBounds  # v^g_t: q^g, u^g
    local: DirectionBounds  # the local work, all of its SGD steps: the paper's -alpha grad F, as it is
    smoothness: float  # L, the greatest secant: a lower estimate of the true constant
    curvature: float  # the least L for which the descent lemma holds on every move that was made
