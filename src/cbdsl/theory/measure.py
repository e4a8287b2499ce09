"""Measures one run against both theorems: repeats it beside its genie and compares bounds and measurements."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from cbdsl.arrays import Doubles, Indices
from cbdsl.data.dataset import Dataset
from cbdsl.errors import UserError
from cbdsl.runs.build import Experiment, ModelBuilder, honest_workers, make_worker_data
from cbdsl.spec import Spec
from cbdsl.theory import theorem1, theorem2
from cbdsl.theory.constants import (
    DirectionBounds,
    EngineProblem,
    MeasuredConstants,
    Problem,
    Rows,
    ValueRange,
    inner,
    join_blocks,
    norms,
    select_workers,
)
from cbdsl.theory.genie import (
    Divergence,
    Genie,
    OnDivergence,
    divergences,
    find_population,
    steps_of,
    summarise,
)
from cbdsl.theory.theorem1 import CoefficientBounds, Descent, RateBound, Theorem1, measure_descent
from cbdsl.theory.theorem2 import DistanceBound, GenieGap, GenieMove, GradientSet, Theorem2, class_secants, measure_gap
from cbdsl.theory.trajectory import SwarmMove, prepare_measurement, replay
from cbdsl.util.serialize import from_plain, to_plain

_BLOCK_BYTES = 64 * 2**20  # class gradients held at once


@dataclass(frozen=True, eq=False)
class GenieStep:
    """One round of the genie worker."""

    before: Rows  # w^g_t, (D,)
    velocity: Rows  # v^g_t
    after: Rows  # w^g_{t+1}


@dataclass(frozen=True, eq=False)
class Observations:
    """A whole trajectory, reduced to scalars."""

    descents: tuple[Descent, ...]  # one a round
    gaps: tuple[GenieGap, ...]  # with alpha the learning rate
    whole_gaps: tuple[GenieGap, ...]  # with alpha the rate times the steps of a round
    lipschitz: Doubles  # L_c, (C,)
    start: Doubles  # ||w_{i,0} - w^g_0||, (U,)
    first_loss: Doubles  # F_i(w_{i,0}), (U,)
    last_squared_gradient: Doubles  # ||grad F_i(w_{i,T})||^2, (U,)
    kept: NDArray[
        np.bool_
    ]  # of all workers observed, those whose weights and gradients stay finite: the U of everything above


def observe(
    problem: Problem, steps: Iterable[tuple[SwarmMove, GenieStep]], pulls: tuple[float, float], work: Doubles
) -> Observations:
    """Follow a trajectory and measure it; a worker whose numbers do not stay finite is left out.

    pulls: delta_1 and delta_2. work: the local work of a round in steps of size alpha, (U,).
    """
    descents: list[Descent] = []
    gaps: list[GenieGap] = []
    whole_gaps: list[GenieGap] = []
    lipschitz: list[Doubles] = []
    view: GradientSet | None = None
    for move, genie in steps:
        if view is None:
            view = _measure_gradients(problem, move.before, genie.before)
            loss = first_loss = problem.losses(move.before)
            start = norms(np.subtract(move.before, genie.before, dtype=np.float64))
        after = _measure_gradients(problem, move.after, genie.after)
        next_loss = problem.losses(move.after)
        weights = CoefficientBounds(move.inertia, *pulls)
        genie_move = GenieMove(genie.before, genie.after, genie.velocity, problem.population_gradients(genie.before))
        rates = np.full(len(work), move.learning_rate)
        parts = []
        for rows in _blocks(len(work), move.after.shape[1] * 4):
            block, seen = move.rows(rows), view.rows(rows)
            shared = (problem.shares[rows], problem.population, seen)
            parts.append((
                measure_descent(block, weights, seen.gradient, after.gradient[rows], (next_loss - loss)[rows]),
                measure_gap(block, genie_move, *shared, rates[rows]),
                measure_gap(block, genie_move, *shared, (rates * work)[rows]),
            ))  # fmt: skip
        descents.append(join_blocks([part[0] for part in parts]))
        gaps.append(join_blocks([part[1] for part in parts]))
        whole_gaps.append(join_blocks([part[2] for part in parts]))
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
        tuple(select_workers(one, kept) for one in descents),
        tuple(select_workers(one, kept) for one in gaps),
        tuple(select_workers(one, kept) for one in whole_gaps),
        np.nan_to_num(_greatest(np.concatenate([seen[kept] for seen in lipschitz]))),
        start[kept],
        first_loss[kept],
        last[kept],
        kept,
    )


def _measure_gradients(problem: Problem, positions: Rows, genie: Rows) -> GradientSet:
    """Return gradients at the workers' positions and at the genie's, by class and combined."""
    parts = []
    for rows in _blocks(len(positions), positions.shape[1] * len(problem.population) * 4):
        workers: Indices = np.arange(len(positions), dtype=np.int32)[rows]
        own, shares = positions[rows], problem.shares[rows]
        at_worker = problem.class_gradients(workers, own)  # (k, C, D)
        at_genie = problem.class_gradients(workers, np.broadcast_to(genie, own.shape))
        apart = np.subtract(own, genie, dtype=np.float64)
        parts.append(
            GradientSet(_mix(shares, at_worker), _mix(shares, at_genie), class_secants(at_worker, at_genie, apart))
        )
    return join_blocks(parts)


def _mix(shares: Doubles, by_class: Rows) -> Doubles:
    """Return sum_c p_i(c) G_{i,c}, (k, C) and (k, C, D) -> (k, D)."""
    return np.stack([row @ gradients.astype(np.float64) for row, gradients in zip(shares, by_class, strict=True)])


def _greatest(values: Doubles) -> Doubles:
    """Return the greatest value of every column; NaN for a column of NaN."""
    return np.asarray(np.fmax.reduce(values, axis=0, initial=np.nan))


def _blocks(count: int, row_bytes: int) -> Iterator[slice]:
    size = max(1, _BLOCK_BYTES // row_bytes)
    for first in range(0, count, size):
        yield slice(first, first + size)


@dataclass(frozen=True)
class TheoryResult:
    """theory.json: the divergence of Fig. 5, the constants of Sec. IV and both theorems, on one run."""

    spec_key: str
    preset: str
    method: str
    shared: str
    partition: str
    seed: int
    engine: str
    parameters: int  # D
    workers: int  # that were measured: all but attackers and the lost
    lost: int  # workers whose weights did not stay finite
    rounds: int  # T
    steps: float  # how many steps of size alpha the local work of a round amounts to
    divergence: tuple[Divergence, ...]  # one a round
    constants: MeasuredConstants
    theorem1: Theorem1
    theorem2: Theorem2

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON; a number that is not finite is null."""
        return to_plain(self)  # type: ignore[no-any-return]

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> TheoryResult:
        """Invert `to_json`, except that null becomes NaN; raise UserError if a field is missing."""
        return from_plain(TheoryResult, values, nan=True)

    def to_text(self) -> str:
        """Return the JSON text."""
        return json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n"


def make_table(result: TheoryResult) -> Table:
    """Return both theorems as a table, one row per form."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "bound", "measured", "tightness", "verdict"):
        table.add_column(name, justify="left" if name in ("", "verdict") else "right")
    first, second = result.theorem1, result.theorem2
    for name, rate in (
        ("Theorem 1, printed", first.printed),
        ("  alpha: a whole round", first.printed_whole),
        ("Theorem 1, corrected", first.corrected),
        ("Theorem 1, on the moves", first.played),
    ):
        table.add_row(
            name,
            format_number(rate.bound),
            format_number(rate.measured),
            format_number(rate.tightness),
            _short_rate(rate),
        )
    for name, bound in (
        ("Theorem 2, printed", second.printed),
        ("  alpha: a whole round", second.printed_whole),
        ("Theorem 2, corrected", second.corrected),
        ("  beta round by round", second.played),
        ("  alpha: a whole round", second.corrected_whole),
    ):
        last = bound.rounds[-1]
        table.add_row(
            name,
            format_number(last.bound),
            format_number(last.measured),
            format_number(last.tightness),
            _short(bound.held, bound.checked),
        )
    return table


def constants_table(constants: MeasuredConstants) -> Table:
    """Return the bounds that Sec. IV assumes, as measured."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("direction", "cosine q", "ratio u", "product q u"):
        table.add_column(name, justify="left" if name == "direction" else "right")
    for name, bounds in _directions(constants):
        table.add_row(name, format_range(bounds.cosine), format_range(bounds.ratio), format_range(bounds.product))
    return table


def _directions(constants: MeasuredConstants) -> list[tuple[str, DirectionBounds]]:
    return [
        ("own velocity v", constants.velocity),
        ("personal best v^p", constants.personal),
        ("global best v^g", constants.social),
        ("local work", constants.local),
    ]


def describe_result(result: TheoryResult) -> list[str]:
    """Describe the findings in sentences."""
    first, second, curve = result.theorem1, result.theorem2, result.divergence
    last = second.corrected.rounds[-1].terms
    total = sum(vars(last).values())
    shares = ", ".join(f"{name} {value / total:.0%}" for name, value in vars(last).items()) if total else "all 0"
    return [
        f"Model divergence: {format_number(curve[0].mean)} after round 1, {format_number(curve[-1].mean)} ± "
        f"{format_number(curve[-1].deviation)} after round {curve[-1].round}; EMD {_mean(second.emd):.3f} on average."
        + (f" Left out: {result.lost} workers whose weights did not stay finite." if result.lost else ""),
        f"L is at least {format_number(result.constants.smoothness)} (secants); the descent lemma needs "
        f"{format_number(result.constants.curvature)} on the moves made.",
        f"Theorem 1 as printed {describe_rate(first.printed)}; corrected, it {describe_rate(first.corrected)}; over "
        f"the moves of the run, it {describe_rate(first.played)}.",
        f"Remark 1 (CB-DSL faster than FedAvg): {_remark(first.remark_printed)} as printed, "
        f"{_remark(first.remark_corrected)} corrected. Of the progress along -grad F, {first.swarm_share:.0%} came "
        f"from the swarm's terms; {first.uphill:,} of {first.moves:,} moves went uphill.",
        f"Theorem 2 as printed {describe_distance(second.printed)}; corrected, it "
        f"{describe_distance(second.corrected)}. Its last bound is made of: {shares}.",
    ]


def _short_rate(rate: RateBound) -> str:
    return _short(rate.held, rate.speaks) if rate.speaks else "gives no bound"


def _short(held: int, of: int) -> str:
    return f"holds, {held:,} of {of:,}" if held == of else f"fails, holds on {held:,} of {of:,}"


def describe_rate(rate: RateBound) -> str:
    """Describe one form of Theorem 1 in words."""
    if not rate.speaks:
        worst = "is not defined" if math.isnan(rate.phi.low) else f"= {format_number(rate.phi.low)}, not positive"
        return f"gives no bound: Phi_E {worst}"
    of_whom = "" if rate.speaks == rate.workers else f", and gives no bound for {rate.workers - rate.speaks}"
    word = "holds" if rate.held == rate.speaks else "fails"
    return f"{word} for {rate.held} of {rate.speaks} workers{of_whom}"


def describe_distance(bound: DistanceBound) -> str:
    """Describe one form of Theorem 2 in words."""
    if bound.holds:
        return f"holds on all {bound.checked:,} worker-rounds, {format_range(bound.tightness)} times what is measured"
    return f"fails on {bound.checked - bound.held:,} of {bound.checked:,} worker-rounds"


def format_number(value: float) -> str:
    """Format a number; a dash for NaN."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "infinite"
    return f"{value:.3g}"


def format_range(values: ValueRange) -> str:
    """Format a range."""
    return f"{format_number(values.low)} … {format_number(values.high)}"


def _remark(values: ValueRange) -> str:
    if math.isnan(values.low):
        return "not defined"
    if values.low > 0:
        return "met in every round"
    return "met in some rounds" if values.high > 0 else "met in no round"


def _mean(values: tuple[float, ...]) -> float:
    return math.fsum(values) / len(values)


def measure(
    spec: Spec,
    threads: int | None = None,
    on_round: OnDivergence | None = None,
    *,
    model: ModelBuilder | None = None,
    data: Dataset | None = None,
) -> TheoryResult:
    """Repeat a spec and measure both theorems on it; `on_round` is called with the divergence after every round."""
    return measure_experiment(prepare_measurement(spec, threads, model, data), on_round)


def measure_experiment(experiment: Experiment, on_round: OnDivergence | None = None) -> TheoryResult:
    """Measure both theorems on an experiment that was prepared and not yet run."""
    spec, workers = experiment.spec, honest_workers(experiment)
    held = make_worker_data(experiment.split, experiment.dataset.train, spec).training
    problem = EngineProblem(
        experiment.engine,
        experiment.dataset.train,
        [held[worker].indices for worker in workers],
        find_population(experiment),
        experiment.dataset.classes,
    )
    work = np.maximum(steps_of(experiment)[workers] / (1 - spec.local.momentum), 1.0)  # momentum lengthens every step
    curve: list[Divergence] = []

    def steps() -> Iterator[tuple[SwarmMove, GenieStep]]:
        for move, step in replay_beside_genie(experiment):
            yield move, step
            curve.append(summarise(move.round, divergences(move.after, step.after)))
            if on_round is not None:
                on_round(curve[-1])

    with np.errstate(invalid="ignore", over="ignore"):  # a worker may leave the range of numbers; it is left out
        seen = observe(problem, steps(), (spec.swarm.cognitive, spec.swarm.social), work)
    if not seen.kept.any():
        raise UserError(
            "No worker's weights stay finite in this run; there is nothing to measure. Set local.learning_rate lower.",
            code="out-of-range",
        )
    whole_rates = [one.learning_rate * float(work.mean()) for one in seen.descents]
    return TheoryResult(
        spec_key=spec.key(),
        preset=spec.preset,
        method=spec.method,
        shared=spec.shared,
        partition=spec.data.partition,
        seed=spec.seed,
        engine=experiment.engine.name,
        parameters=experiment.engine.size,
        workers=int(seen.kept.sum()),
        lost=int((~seen.kept).sum()),
        rounds=spec.rounds,
        steps=float(work.mean()),
        divergence=tuple(curve),
        constants=theorem1.measure_constants(seen.descents),
        theorem1=theorem1.judge(seen.descents, seen.last_squared_gradient, seen.first_loss, whole_rates),
        theorem2=theorem2.judge(
            seen.gaps, seen.whole_gaps, (problem.shares[seen.kept], problem.population), seen.lipschitz, seen.start
        ),
    )


def replay_beside_genie(experiment: Experiment) -> Iterator[tuple[SwarmMove, GenieStep]]:
    """Yield every move of the swarm with the genie's move of the same round."""
    genie = Genie.at_start(experiment)
    for move in replay(experiment):
        moved = genie.move(move.round, move.inertia, move.learning_rate)
        yield move, GenieStep(genie.position, genie.velocity, moved.position)
        genie = moved
