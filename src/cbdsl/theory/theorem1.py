"""Theorem 1: the mean squared gradient norm is at most (F(w_0) - F*) / (T Phi_E), as printed, corrected and on the run.

Where Phi_E is not positive the theorem makes no statement, and none is reported. docs/theory.md derives each form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cbdsl.arrays import Doubles
from cbdsl.theory.constants import (
    Alignment,
    DirectionBounds,
    MeasuredConstants,
    Rows,
    ValueRange,
    align,
    curvatures,
    inner,
    quotient,
    secants,
)
from cbdsl.theory.trajectory import SwarmMove

ROUNDING = 1e-9  # relative; sums of exact numbers differ by their order


@dataclass(frozen=True)
class CoefficientBounds:
    """The coefficients of one round and the moments of c0 - c1 - c2, with c1 ~ U(0, delta_1), c2 ~ U(0, delta_2)."""

    inertia: float  # c0
    cognitive: float  # delta_1
    social: float  # delta_2

    @property
    def mean(self) -> float:
        """Return E[c0 - c1 - c2]."""
        return self.inertia - (self.cognitive + self.social) / 2

    @property
    def mean_square(self) -> float:
        """Return E[(c0 - c1 - c2)^2]."""
        c0, d1, d2 = self.inertia, self.cognitive, self.social
        return c0**2 - (d1 + d2) * c0 + d1**2 / 3 + d2**2 / 3 + d1 * d2 / 2


@dataclass(frozen=True, eq=False)
class Descent:
    """One round of every worker, reduced to what Theorem 1 needs; (k,) each."""

    weights: CoefficientBounds
    learning_rate: float  # alpha
    velocity: Alignment
    personal: Alignment
    social: Alignment
    local: Alignment
    squared_gradient: Doubles  # ||grad F_i(w_t)||^2
    squared_step: Doubles  # ||v_{t+1}||^2
    progress: Doubles  # <v_{t+1}, -grad F_i(w_t)>
    swarm_progress: Doubles  # the same of the swarm's terms alone
    loss_change: Doubles  # F_i(w_{t+1}) - F_i(w_t)
    secant: Doubles
    curvature: Doubles


def measure_descent(
    move: SwarmMove, weights: CoefficientBounds, gradient: Rows, next_gradient: Rows, loss_change: Doubles
) -> Descent:
    """Measure one move; gradients of F_i at w_t and at w_{t+1}, (k, D)."""
    step, swarm = move.displacement(), move.swarm_part()
    return Descent(
        weights=weights,
        learning_rate=move.learning_rate,
        velocity=align(move.velocity(), gradient),
        personal=align(move.personal_velocity(), gradient),
        social=align(move.social_velocity(), gradient),
        local=align(step - swarm, gradient),
        squared_gradient=inner(gradient, gradient),
        squared_step=inner(step, step),
        progress=-inner(step, gradient),
        swarm_progress=-inner(swarm, gradient),
        loss_change=loss_change,
        secant=secants(np.subtract(next_gradient, gradient, dtype=np.float64), step),
        curvature=curvatures(loss_change, gradient, step),
    )


def measure_constants(descents: Sequence[Descent]) -> MeasuredConstants:
    """Return the bounds over all workers and rounds; in round 1, where nothing has moved, the products are 0."""
    return MeasuredConstants(
        velocity=DirectionBounds.of(one.velocity for one in descents),
        personal=DirectionBounds.of(one.personal for one in descents),
        social=DirectionBounds.of(one.social for one in descents),
        local=DirectionBounds.of(one.local for one in descents),
        smoothness=ValueRange.of(one.secant for one in descents).high,
        curvature=ValueRange.of(one.curvature for one in descents).high,
    )


def phi_printed(c: MeasuredConstants, weights: CoefficientBounds, learning_rate: float) -> float:
    """Return Phi_E of Theorem 1, exactly as printed."""
    slope = (
        learning_rate
        - weights.mean * c.velocity.cosine.low * c.velocity.ratio.low
        - weights.cognitive / 2 * c.personal.ratio.high * c.personal.cosine.high
        - weights.social / 2 * c.social.ratio.high * c.social.cosine.high
    )
    return slope - 2 * c.smoothness * (_swarm_square(c, weights) + learning_rate**2)


def phi_corrected(c: MeasuredConstants, weights: CoefficientBounds) -> float:
    """Return Phi_E with the sign of the cosines corrected, extremes of products, and the measured local work."""
    slope = (
        least(weights.mean, c.velocity.product)
        + weights.cognitive / 2 * c.personal.product.low
        + weights.social / 2 * c.social.product.low
        + c.local.product.low
    )
    return slope - 2 * smoothness(c) * (_swarm_square(c, weights) + c.local.ratio.high**2)


def remark_printed(c: MeasuredConstants, weights: CoefficientBounds, learning_rate: float) -> float:
    """Return the left side of Remark 1, Phi_E - (alpha - 2 L alpha^2): CB-DSL is faster where it is positive."""
    return phi_printed(c, weights, learning_rate) - (learning_rate - 2 * c.smoothness * learning_rate**2)


def remark_corrected(c: MeasuredConstants, weights: CoefficientBounds) -> float:
    """Return the same with the corrected Phi_E: what the swarm's terms add to local work alone."""
    return phi_corrected(c, weights) - (c.local.product.low - 2 * smoothness(c) * c.local.ratio.high**2)


def least(factor: float, values: ValueRange) -> float:
    """Return the least of factor * x over a range: the sign of the factor decides which end."""
    return min(factor * values.low, factor * values.high)


def smoothness(c: MeasuredConstants) -> float:
    """Return the L that the corrected form needs: Assumption 1 and the descent lemma, at every pair of points."""
    return max(c.smoothness, c.curvature)


def _swarm_square(c: MeasuredConstants, weights: CoefficientBounds) -> float:
    """Return E[(c0-c1-c2)^2] u^2 + E[c1^2] u^p^2 + E[c2^2] u^g^2."""
    return (
        weights.mean_square * c.velocity.ratio.high**2
        + weights.cognitive**2 / 3 * c.personal.ratio.high**2
        + weights.social**2 / 3 * c.social.ratio.high**2
    )


@dataclass(frozen=True)
class RateBound:
    """One form of the theorem beside the measurement, over the workers of a run."""

    phi: ValueRange  # over rounds; over workers for the played form
    workers: int
    speaks: int  # workers of whom it says something: those with a positive Phi
    held: int  # of these, the workers whose gradients stay within the bound
    bound: float  # the median of the bounds it gives; NaN if it gives none
    measured: float  # the median of what is bounded; of all workers if it speaks of none
    tightness: float  # the median of bound / measured


@dataclass(frozen=True)
class Theorem1:
    """Theorem 1 on one run."""

    printed: RateBound  # alpha is the learning rate
    printed_whole: RateBound  # alpha is the rate times the steps of a round
    corrected: RateBound
    played: RateBound  # follows from the very moves that were made
    remark_printed: ValueRange  # the left side of Remark 1 over the rounds
    remark_corrected: ValueRange
    swarm_share: float  # of all progress along -grad F, the share of the swarm's terms
    moves: int  # worker-rounds
    uphill: int  # of these, moves that raised the worker's loss
    beyond_smoothness: int  # moves on which the descent lemma needs more than the L of the secants


def judge(
    descents: Sequence[Descent],
    last_squared_gradient: Doubles,
    first_loss: Doubles,
    whole_rates: Sequence[float],
    lowest_loss: float = 0.0,
) -> Theorem1:
    """Compare all forms of Theorem 1 with a run; one `Descent` per round, F_i(w_0) of each worker, (k,).

    whole_rates: for each round, the learning rate times the steps of the round. lowest_loss: F*; 0 for cross-entropy.
    """
    c = measure_constants(descents)
    rounds = len(descents)
    squares = np.stack([one.squared_gradient for one in descents])  # (T, k), t = 0 ... T-1
    from_one = np.vstack([squares[1:], last_squared_gradient[None]])  # (T, k), t = 1 ... T, as printed
    budget = np.maximum(first_loss - lowest_loss, 0.0)  # (k,)
    weights = [one.weights for one in descents]
    alphas = [one.learning_rate for one in descents]

    def uniform(phis: list[float], measured: Doubles) -> RateBound:
        phi = min(phis)  # NaN, where a constant is not defined, is no promise either
        return _rate(ValueRange(phi, max(phis)), np.full(len(budget), phi), budget, measured, rounds)

    steps = np.stack([one.squared_step for one in descents])  # (T, k)
    gains = np.stack([one.progress for one in descents])  # (T, k)
    own_smoothness = np.stack([np.fmax(one.secant, one.curvature) for one in descents])  # of each move, NaN if none
    phi_played = quotient((gains - np.nan_to_num(own_smoothness) / 2 * steps).sum(0), squares.sum(0))  # (k,)
    change = np.stack([one.loss_change for one in descents])
    promised = gains - c.smoothness / 2 * steps
    progress = sum(float(one.progress.sum()) for one in descents)
    swarm = sum(float(one.swarm_progress.sum()) for one in descents)
    return Theorem1(
        printed=uniform([phi_printed(c, w, a) for w, a in zip(weights, alphas, strict=True)], from_one.mean(0)),
        printed_whole=uniform(
            [phi_printed(c, w, a) for w, a in zip(weights, whole_rates, strict=True)], from_one.mean(0)
        ),
        corrected=uniform([phi_corrected(c, w) for w in weights], squares.mean(0)),
        played=_rate(ValueRange.of([phi_played]), phi_played, -change.sum(0), squares.mean(0), rounds),
        remark_printed=_span([remark_printed(c, w, a) for w, a in zip(weights, alphas, strict=True)]),
        remark_corrected=_span([remark_corrected(c, w) for w in weights]),
        swarm_share=swarm / progress if progress else math.nan,
        moves=int(change.size),
        uphill=int((change > 0).sum()),
        beyond_smoothness=int((change > -promised + ROUNDING * np.abs(promised)).sum()),
    )


def _rate(phi: ValueRange, phis: Doubles, budget: Doubles, measured: Doubles, rounds: int) -> RateBound:
    """Compare budget / (T Phi) with the measured means, worker by worker."""
    speaks = phis > 0
    bounds = budget[speaks] / (rounds * phis[speaks])
    held = measured[speaks] <= bounds * (1 + ROUNDING)
    return RateBound(
        phi=phi,
        workers=len(phis),
        speaks=int(speaks.sum()),
        held=int(held.sum()),
        bound=_median(bounds),
        measured=_median(measured[speaks] if speaks.any() else measured),
        tightness=_median(quotient(bounds, measured[speaks])),
    )


def _span(values: list[float]) -> ValueRange:
    return ValueRange(min(values), max(values))


def _median(values: Doubles) -> float:
    return float(np.nanmedian(values)) if len(values) and not np.isnan(values).all() else math.nan
