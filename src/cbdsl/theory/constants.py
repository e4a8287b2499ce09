"""The constants that Sec. IV assumes, measured: cosines, norm ratios, their products, and the smoothness L.

Pure functions on rows of workers, (k, D) -> (k,). A value that is not defined, such as the cosine of a zero vector, is
NaN and enters no bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cbdsl.arrays import Doubles

Rows = NDArray[Any]  # (k, D), float32 or float64


def inner(left: Rows, right: Rows) -> Doubles:
    """Inner products row by row, added up in double precision."""
    result: Doubles = np.einsum("...d,...d->...", left, right, dtype=np.float64)
    return result


def norms(rows: Rows) -> Doubles:
    """Euclidean norms of the rows."""
    result: Doubles = np.sqrt(inner(rows, rows))
    return result


def quotient(over: Doubles, under: Doubles) -> Doubles:
    """over / under, NaN where under is 0."""
    result: Doubles = np.full(np.broadcast(over, under).shape, np.nan)
    return np.divide(over, under, out=result, where=under > 0)


@dataclass(frozen=True, eq=False)
class Alignment:
    """How a direction lies to a worker's gradient, (k,) each."""

    cosine: Doubles  # cos theta, against -grad F
    ratio: Doubles  # ||v|| / ||grad F||; a zero vector has no direction, and neither cosine nor ratio
    product: Doubles  # cosine * ratio = <v, -grad F> / ||grad F||^2; 0 for a zero vector


def align(direction: Rows, gradient: Rows) -> Alignment:
    """The definitions before Theorem 1."""
    length, slope = norms(direction), norms(gradient)
    descent = -inner(direction, gradient)
    cosine = np.clip(quotient(descent, length * slope), -1.0, 1.0)
    ratio = quotient(np.where(length > 0, length, np.nan), slope)
    return Alignment(cosine, ratio, quotient(descent, slope**2))


def secants(gradient_change: Rows, change: Rows) -> Doubles:
    """||grad F(w') - grad F(w)|| / ||w' - w||, Assumption 1 at one pair of points a row."""
    return quotient(norms(gradient_change), norms(change))


def curvatures(loss_change: Doubles, gradient: Rows, change: Rows) -> Doubles:
    """The smallest L for which F(w') <= F(w) + <w' - w, grad F(w)> + L/2 ||w' - w||^2 holds, a pair a row."""
    return quotient(2.0 * (loss_change - inner(change, gradient)), inner(change, change))


_Reduced = TypeVar("_Reduced")


def joined(parts: Sequence[_Reduced]) -> _Reduced:
    """Blocks of workers as one: arrays behind one another, everything else as in the first block."""

    def join(values: list[Any]) -> Any:  # noqa: ANN401 - any field of a dataclass
        if isinstance(values[0], np.ndarray):
            return np.concatenate(values)
        return joined(values) if isinstance(values[0], Alignment) else values[0]

    first = parts[0]
    return type(first)(**{name: join([vars(part)[name] for part in parts]) for name in vars(first)})


def chosen(part: _Reduced, rows: NDArray[np.bool_]) -> _Reduced:
    """The same of some of its workers: their places in every array, everything else as it is."""

    def choose(value: Any) -> Any:  # noqa: ANN401 - any field of a dataclass
        if isinstance(value, np.ndarray):
            return value[rows]
        return chosen(value, rows) if isinstance(value, Alignment) else value

    return type(part)(**{name: choose(value) for name, value in vars(part).items()})


@dataclass(frozen=True)
class Range:
    """The least and the greatest value seen; NaN if none was."""

    low: float
    high: float

    @staticmethod
    def of(values: Iterable[Doubles]) -> Range:
        """The range of everything in some arrays that is defined."""
        defined = np.concatenate([np.empty(0), *(part[~np.isnan(part)] for part in values)])
        return Range(float(defined.min()), float(defined.max())) if len(defined) else Range(math.nan, math.nan)


@dataclass(frozen=True)
class DirectionBounds:
    """The assumed bounds of one direction: over all workers and rounds."""

    cosine: Range  # q
    ratio: Range  # u
    product: Range  # q u, taken over the product: its extremes are not the products of the extremes

    @staticmethod
    def of(seen: Iterable[Alignment]) -> DirectionBounds:
        """The bounds of what was seen."""
        all_seen = list(seen)
        return DirectionBounds(
            Range.of(one.cosine for one in all_seen),
            Range.of(one.ratio for one in all_seen),
            Range.of(one.product for one in all_seen),
        )


@dataclass(frozen=True)
class Constants:
    """Everything that Sec. IV assumes, as measured on a trajectory."""

    velocity: DirectionBounds  # v_{i,t}: q, u
    personal: DirectionBounds  # v^p_{i,t}: q^p, u^p
    social: DirectionBounds  # v^g_t: q^g, u^g
    local: DirectionBounds  # the local work, all of its SGD steps: the paper's -alpha grad F, as it is
    smoothness: float  # L, the greatest secant: a lower estimate of the true constant
    curvature: float  # the least L for which the descent lemma holds on every move that was made
