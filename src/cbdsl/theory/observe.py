"""A trajectory reduced to scalars as it passes by: what both theorems need of every round, and no more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cbdsl.arrays import Doubles, Indices
from cbdsl.theory.constants import Rows, chosen, inner, joined, norms
from cbdsl.theory.problem import Problem
from cbdsl.theory.theorem1 import CoefficientBounds, Descent, descent_of
from cbdsl.theory.theorem2 import Gap, GenieMove, View, class_secants, gap_of
from cbdsl.theory.trajectory import Move

_BLOCK_BYTES = 64 * 2**20  # class gradients held at once


@dataclass(frozen=True, eq=False)
class GenieStep:
    """One round of the genie worker."""

    before: Rows  # w^g_t, (D,)
    velocity: Rows  # v^g_t
    after: Rows  # w^g_{t+1}


@dataclass(frozen=True, eq=False)
class Observations:
    """A whole trajectory in scalars."""

    descents: tuple[Descent, ...]  # one a round
    gaps: tuple[Gap, ...]  # with alpha the learning rate
    whole_gaps: tuple[Gap, ...]  # with alpha the rate times the steps of a round
    lipschitz: Doubles  # L_c, (C,)
    start: Doubles  # ||w_{i,0} - w^g_0||, (U,)
    first_loss: Doubles  # F_i(w_{i,0}), (U,)
    last_squared_gradient: Doubles  # ||grad F_i(w_{i,T})||^2, (U,)
    kept: NDArray[
        np.bool_
    ]  # of all workers observed, those whose weights and gradients stay finite: the U of everything above


def observe(
    problem: Problem, steps: Iterable[tuple[Move, GenieStep]], pulls: tuple[float, float], work: Doubles
) -> Observations:
    """Follow a trajectory and measure it; a worker whose numbers do not stay finite is left out.

    pulls: delta_1 and delta_2. work: how many steps of size alpha the local work of a round amounts to, (U,).
    """
    descents: list[Descent] = []
    gaps: list[Gap] = []
    whole_gaps: list[Gap] = []
    lipschitz: list[Doubles] = []
    view: View | None = None
    for move, genie in steps:
        if view is None:
            view = _look(problem, move.before, genie.before)
            loss = first_loss = problem.losses(move.before)
            start = norms(np.subtract(move.before, genie.before, dtype=np.float64))
        after = _look(problem, move.after, genie.after)
        next_loss = problem.losses(move.after)
        weights = CoefficientBounds(move.inertia, *pulls)
        genie_move = GenieMove(genie.before, genie.after, genie.velocity, problem.population_gradients(genie.before))
        rates = np.full(len(work), move.learning_rate)
        parts = []
        for rows in _blocks(len(work), move.after.shape[1] * 4):
            block, seen = move.rows(rows), view.rows(rows)
            shared = (problem.shares[rows], problem.population, seen)
            parts.append((
                descent_of(block, weights, seen.gradient, after.gradient[rows], (next_loss - loss)[rows]),
                gap_of(block, genie_move, *shared, rates[rows]),
                gap_of(block, genie_move, *shared, (rates * work)[rows]),
            ))  # fmt: skip
        descents.append(joined([part[0] for part in parts]))
        gaps.append(joined([part[1] for part in parts]))
        whole_gaps.append(joined([part[2] for part in parts]))
        lipschitz.append(view.secants)
        view, loss = after, next_loss
    if view is None:
        raise ValueError("there are no moves to observe; give a trajectory of at least one round")
    last = inner(view.gradient, view.gradient)
    needed = [
        last,
        *(vars(gap)[name] for gap in gaps for name in ("distance", "velocity", "swarm", "local", "sampling")),
    ]
    needed += [vars(one)[name] for one in descents for name in ("squared_gradient", "loss_change")]
    kept: NDArray[np.bool_] = np.asarray(np.isfinite(np.stack(needed)).all(0))  # (U,)
    return Observations(
        tuple(chosen(one, kept) for one in descents),
        tuple(chosen(one, kept) for one in gaps),
        tuple(chosen(one, kept) for one in whole_gaps),
        np.nan_to_num(_greatest(np.concatenate([seen[kept] for seen in lipschitz]))),
        start[kept],
        first_loss[kept],
        last[kept],
        kept,
    )


def _look(problem: Problem, positions: Rows, genie: Rows) -> View:
    """Gradients at the workers' positions and at the genie's; class by class within, then put together."""
    parts = []
    for rows in _blocks(len(positions), positions.shape[1] * len(problem.population) * 4):
        workers: Indices = np.arange(len(positions), dtype=np.int32)[rows]
        own, shares = positions[rows], problem.shares[rows]
        at_worker = problem.class_gradients(workers, own)  # (k, C, D)
        at_genie = problem.class_gradients(workers, np.broadcast_to(genie, own.shape))
        apart = np.subtract(own, genie, dtype=np.float64)
        parts.append(View(_mix(shares, at_worker), _mix(shares, at_genie), class_secants(at_worker, at_genie, apart)))
    return joined(parts)


def _mix(shares: Doubles, by_class: Rows) -> Doubles:
    """sum_c p_i(c) G_{i,c}, (k, C) and (k, C, D) -> (k, D)."""
    return np.stack([row @ gradients.astype(np.float64) for row, gradients in zip(shares, by_class, strict=True)])


def _greatest(values: Doubles) -> Doubles:
    """The greatest value of every column that is not NaN; NaN for a column without any."""
    return np.asarray(np.fmax.reduce(values, axis=0, initial=np.nan))


def _blocks(count: int, row_bytes: int) -> Iterator[slice]:
    size = max(1, _BLOCK_BYTES // row_bytes)
    for first in range(0, count, size):
        yield slice(first, first + size)
