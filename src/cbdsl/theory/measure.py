"""Measure one run against both theorems: replay it beside its genie and judge what was seen."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cbdsl.data import Dataset
from cbdsl.errors import UserError
from cbdsl.runs.stage import ModelBuilder, Stage, holdings, honest_workers
from cbdsl.spec import Spec
from cbdsl.theory import theorem1, theorem2
from cbdsl.theory.genie import Divergence, Genie, OnDivergence, divergences, population_of, steps_of, summarise
from cbdsl.theory.observe import GenieStep, observe
from cbdsl.theory.problem import EngineProblem
from cbdsl.theory.report import TheoryResult
from cbdsl.theory.trajectory import Move, replay, stage_of


def measure(
    spec: Spec,
    threads: int | None = None,
    on_round: OnDivergence | None = None,
    *,
    model: ModelBuilder | None = None,
    data: Dataset | None = None,
) -> TheoryResult:
    """Play a spec again and put both theorems beside it; `on_round` is called with the divergence after every round."""
    return measure_stage(stage_of(spec, threads, model, data), on_round)


def measure_stage(stage: Stage, on_round: OnDivergence | None = None) -> TheoryResult:
    """The same for a stage that was prepared and not yet played."""
    spec, workers = stage.spec, honest_workers(stage)
    held = holdings(stage.split, stage.dataset.train, spec).training
    problem = EngineProblem(
        stage.engine,
        stage.dataset.train,
        [held[worker].indices for worker in workers],
        population_of(stage),
        stage.dataset.classes,
    )
    work = np.maximum(steps_of(stage)[workers] / (1 - spec.local.momentum), 1.0)  # momentum lengthens every step
    curve: list[Divergence] = []

    def steps() -> Iterator[tuple[Move, GenieStep]]:
        for move, step in beside_genie(stage):
            yield move, step
            curve.append(summarise(move.round, divergences(move.after, step.after)))
            if on_round is not None:
                on_round(curve[-1])

    with np.errstate(invalid="ignore", over="ignore"):  # a worker may leave the range of numbers; it is left out
        seen = observe(problem, steps(), (spec.swarm.cognitive, spec.swarm.social), work)
    if not seen.kept.any():
        raise UserError(
            "No worker's weights stay finite in this run; there is nothing to measure. Set local.learning_rate lower."
        )
    whole_rates = [one.learning_rate * float(work.mean()) for one in seen.descents]
    return TheoryResult(
        spec_key=spec.key(),
        preset=spec.preset,
        method=spec.method,
        shared=spec.shared,
        partition=spec.data.partition,
        seed=spec.seed,
        engine=stage.engine.name,
        parameters=stage.engine.size,
        workers=int(seen.kept.sum()),
        lost=int((~seen.kept).sum()),
        rounds=spec.rounds,
        steps=float(work.mean()),
        divergence=tuple(curve),
        constants=theorem1.constants_of(seen.descents),
        theorem1=theorem1.judge(seen.descents, seen.last_squared_gradient, seen.first_loss, whole_rates),
        theorem2=theorem2.judge(
            seen.gaps, seen.whole_gaps, (problem.shares[seen.kept], problem.population), seen.lipschitz, seen.start
        ),
    )


def beside_genie(stage: Stage) -> Iterator[tuple[Move, GenieStep]]:
    """Every move of the swarm with the genie's move of the same round."""
    genie = Genie.at_start(stage)
    for move in replay(stage):
        moved = genie.moved(move.round, move.inertia, move.learning_rate)
        yield move, GenieStep(genie.position, genie.velocity, moved.position)
        genie = moved
