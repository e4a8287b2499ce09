"""Theorem 2: the distance of a worker's model from the genie's. The bound as printed, and corrected so that it holds.

The corrected bound consists of inequalities between norms measured at the points of the proof, so it holds in every
round of every run, for any network. docs/theory.md derives it and compares it with the printed one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cbdsl.arrays import Doubles
from cbdsl.theory.constants import Rows, ValueRange, norms, quotient
from cbdsl.theory.theorem1 import ROUNDING
from cbdsl.theory.trajectory import SwarmMove


@dataclass(frozen=True, eq=False)
class GenieMove:
    """One round of the genie worker, and the population's gradients at its start."""

    before: Rows  # w^g_t, (D,)
    after: Rows  # w^g_{t+1}
    velocity: Rows  # v^g_t, (D,)
    by_class: Rows  # the gradients of E_{x|c}[f_c] at w^g_t, (C, D)


@dataclass(frozen=True, eq=False)
class GradientSet:
    """The gradients of some workers at one time."""

    gradient: Doubles  # of F_i at w_{i,t}, (k, D)
    at_genie: Doubles  # of F_i at w^g_t, (k, D)
    secants: Doubles  # L_c as seen between the two, (k, C); NaN where they are the same point

    def rows(self, chosen: slice) -> GradientSet:
        """Return the gradients of some of the workers."""
        return GradientSet(self.gradient[chosen], self.at_genie[chosen], self.secants[chosen])


@dataclass(frozen=True, eq=False)
class GenieGap:
    """One round of every worker beside the genie, reduced to what Theorem 2 needs; (k,) unless noted otherwise."""

    rates: Doubles  # alpha in this reading
    distance: Doubles  # ||w_{i,t+1} - w^g_{t+1}||
    velocity: Doubles  # |c0 - c1 - c2| ||v_{i,t} - v^g_t||, the printed second term
    swarm: Doubles  # ||(c0 - c1 - c2) v_i + c1 v^p_i + c2 v^best - c0 v^g||, with nothing replaced
    steepest: float  # f_max(w^g_t)
    local: Doubles  # what local SGD does beyond one step of size alpha, workers against genie
    sampling: Doubles  # how far a worker's samples of a class are from the population's, in gradient
    slope: Doubles  # sum_c p_i(c) L_c, with L_c as seen between this worker and the genie in this round


def emd(shares: Doubles, population: Doubles) -> Doubles:
    """Return sum_c |p_i(c) - p(c)|, (U, C) and (C,) -> (U,)."""
    return np.asarray(np.abs(shares - population).sum(-1))


def class_secants(at_worker: Rows, at_genie: Rows, apart: Rows) -> Doubles:
    """Return L_c at the pairs of the proof, ||G_c(w_i) - G_c(w^g)|| / ||w_i - w^g||, (k, C)."""
    lengths = norms(apart)[:, None]
    change = np.stack([norms(np.subtract(*pair, dtype=np.float64)) for pair in zip(at_worker, at_genie, strict=True)])
    return quotient(change, np.broadcast_to(lengths, change.shape))


def measure_gap(
    move: SwarmMove, genie: GenieMove, shares: Doubles, population: Doubles, view: GradientSet, rates: Doubles,
) -> GenieGap:  # fmt: skip
    """Measure one move beside the genie's.

    shares: p_i(c), (k, C). population: p(c), (C,). rates: alpha, (k,); the inequality holds for any value.
    """
    swarm = move.swarm_part()
    local = move.displacement() - swarm + rates[:, None] * view.gradient  # SGD beyond one full step
    genie_inertia = move.inertia * np.asarray(genie.velocity, np.float64)
    genie_gradient = population @ genie.by_class  # grad F(w^g_t)
    genie_step = np.subtract(genie.after, genie.before, dtype=np.float64)
    genie_local = (genie_step - genie_inertia)[None] + rates[:, None] * genie_gradient
    mixed = shares @ np.asarray(genie.by_class, np.float64)  # the gradient a worker would have, were its classes alike
    return GenieGap(
        rates=rates,
        distance=norms(np.subtract(move.after, genie.after, dtype=np.float64)),
        velocity=norms(move.own_weight() * (move.velocity() - genie.velocity)),
        swarm=norms(swarm - genie_inertia),
        steepest=float(norms(genie.by_class).max()),
        local=norms(local - genie_local),
        sampling=norms(view.at_genie - mixed),
        slope=(shares * np.nan_to_num(view.secants)).sum(1),
    )


@dataclass(frozen=True, eq=False)
class BoundTerms:
    """A bound after every round, term by term, (T, U) each; a term that a form lacks is 0."""

    initial: Doubles
    swarm: Doubles
    heterogeneity: Doubles  # EMD f_max
    local: Doubles  # local work that is not one step of gradient descent
    sampling: Doubles

    @property
    def bound(self) -> Doubles:
        """Return the right-hand side, (T, U)."""
        return self.initial + self.swarm + self.heterogeneity + self.local + self.sampling


def betas(gaps: Sequence[GenieGap], slopes: Sequence[Doubles]) -> Doubles:
    """Return beta = 1 + alpha sum_c p_i(c) L_c for every round, (T, U); slopes are the sums, (U,) each."""
    return np.stack([1 + gap.rates * slope for gap, slope in zip(gaps, slopes, strict=True)])


def bound_as_printed(gaps: Sequence[GenieGap], growth: Doubles, distances: Doubles, start: Doubles) -> BoundTerms:
    """Return the right-hand side of Theorem 2, exactly as printed: its third term is not multiplied by beta^{t-j}."""
    zeros = np.zeros(growth.shape)
    third = np.cumsum([gap.rates * distances * gap.steepest for gap in gaps], axis=0)
    return BoundTerms(_carry(growth, zeros, start), _carry(growth, [gap.velocity for gap in gaps]), third, zeros, zeros)


def bound_corrected(gaps: Sequence[GenieGap], growth: Doubles, distances: Doubles, start: Doubles) -> BoundTerms:
    """Return the right-hand side that follows: every term grows by beta, velocities and local work are measured."""
    return BoundTerms(
        initial=_carry(growth, np.zeros(growth.shape), start),
        swarm=_carry(growth, [gap.swarm for gap in gaps]),
        heterogeneity=_carry(growth, [gap.rates * distances * gap.steepest for gap in gaps]),
        local=_carry(growth, [gap.local for gap in gaps]),
        sampling=_carry(growth, [gap.rates * gap.sampling for gap in gaps]),
    )


BoundForm = Callable[[Sequence[GenieGap], Doubles, Doubles, Doubles], BoundTerms]


def _carry(growth: Doubles, added: Sequence[Doubles] | Doubles, start: Doubles | float = 0.0) -> Doubles:
    """Return x_{t+1} = beta x_t + added_t after every round, (T, U)."""
    value: Doubles | float = start
    rows = []
    for factor, more in zip(growth, added, strict=True):
        value = factor * value + more
        rows.append(value)
    return np.stack(rows)


@dataclass(frozen=True)
class TermMeans:
    """The terms of a bound after a round, each the mean over workers."""

    initial: float
    swarm: float
    heterogeneity: float
    local: float
    sampling: float


@dataclass(frozen=True)
class BoundRow:
    """A bound after one round beside the measurement."""

    round: int
    measured: float  # mean over workers of ||w_i - w^g||
    bound: float  # mean over workers
    held: int  # workers whose distance is within the bound
    tightness: float  # median over workers of bound / measured
    terms: TermMeans


@dataclass(frozen=True)
class DistanceBound:
    """One form of Theorem 2 on one run."""

    holds: bool  # on every round, for every worker
    workers: int
    held: int  # worker-rounds within the bound
    checked: int  # worker-rounds
    tightness: ValueRange  # of the rounds' medians
    beta: ValueRange  # over workers and rounds
    rounds: tuple[BoundRow, ...]


@dataclass(frozen=True)
class Theorem2:
    """Theorem 2 on one run, with alpha read as the learning rate and as the rate times the steps of a round."""

    emd: tuple[float, ...]  # one a worker
    lipschitz: tuple[float, ...]  # L_c, one a class
    steepest: tuple[float, ...]  # f_max(w^g_t), one a round
    printed: DistanceBound
    corrected: DistanceBound
    played: DistanceBound  # corrected, with beta of each worker and round instead of one L_c for all
    printed_whole: DistanceBound
    corrected_whole: DistanceBound


def judge(
    gaps: Sequence[GenieGap],
    whole_gaps: Sequence[GenieGap],
    problem: tuple[Doubles, Doubles],
    lipschitz: Doubles,
    start: Doubles,
) -> Theorem2:
    """Measure both forms in both readings, from one `GenieGap` per round.

    problem: p_i(c) and p(c). start: ||w_{i,0} - w^g_0||, (U,).
    """
    shares, population = problem
    heterogeneity = emd(shares, population)

    slopes = [shares @ lipschitz] * len(gaps)

    def form(make: BoundForm, seen: Sequence[GenieGap], slopes: Sequence[Doubles]) -> DistanceBound:
        with np.errstate(over="ignore"):  # beta^T may leave the range of numbers; an infinite bound still holds
            growth = betas(seen, slopes)
            return compare(make(seen, growth, heterogeneity, start), np.stack([gap.distance for gap in seen]), growth)

    return Theorem2(
        emd=tuple(heterogeneity.tolist()),
        lipschitz=tuple(lipschitz.tolist()),
        steepest=tuple(gap.steepest for gap in gaps),
        printed=form(bound_as_printed, gaps, slopes),
        corrected=form(bound_corrected, gaps, slopes),
        played=form(bound_corrected, gaps, [gap.slope for gap in gaps]),
        printed_whole=form(bound_as_printed, whole_gaps, slopes),
        corrected_whole=form(bound_corrected, whole_gaps, slopes),
    )


def compare(terms: BoundTerms, measured: Doubles, growth: Doubles) -> DistanceBound:
    """Compare a bound with measured distances, (T, U)."""
    bound = terms.bound
    within = measured <= bound * (1 + ROUNDING)
    rows = tuple(
        BoundRow(
            round=index + 1,
            measured=float(measured[index].mean()),
            bound=float(bound[index].mean()),
            held=int(within[index].sum()),
            tightness=_median(quotient(bound[index], measured[index])),
            terms=TermMeans(*(float(part[index].mean()) for part in vars(terms).values())),
        )
        for index in range(len(bound))
    )
    return DistanceBound(
        holds=bool(within.all()),
        workers=bound.shape[1],
        held=int(within.sum()),
        checked=int(within.size),
        tightness=ValueRange.of([np.array([row.tightness for row in rows])]),
        beta=ValueRange.of([growth]),
        rounds=rows,
    )


def _median(values: Doubles) -> float:
    return float(np.nanmedian(values)) if not np.isnan(values).all() else math.nan
