"""The trajectory of a run, one move at a time: the spec is run again, and only the present move is kept.

Equal specs give equal numbers, so a replay is the run. Attackers are left out: the theorems are about workers that
follow Eq. (5).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cbdsl.algorithm.methods import Method, SwarmMethod
from cbdsl.arrays import Doubles
from cbdsl.data.dataset import Dataset
from cbdsl.errors import UserError
from cbdsl.register import method as methods
from cbdsl.runs.build import Experiment, ModelBuilder, UserParts, build_method, honest_workers
from cbdsl.runs.loop import play_rounds
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec
from cbdsl.theory.constants import Rows


@dataclass(frozen=True, eq=False)
class SwarmMove:
    """One round of Eq. (5) for some workers: all inputs and the result."""

    round: int  # t + 1
    inertia: float  # c0
    learning_rate: float  # alpha
    cognitive: Rows  # c1, (k, 1) or (k, D)
    social: Rows  # c2, (k, 1) or (k, D)
    previous: Rows  # w_{i,t-1}, (k, D); w_{i,0} itself in the first round
    before: Rows  # w_{i,t}
    personal_best: Rows  # w^p_{i,t}
    global_best: Rows  # w^g_t, (D,)
    after: Rows  # w_{i,t+1}

    def rows(self, chosen: slice) -> SwarmMove:
        """Return the same move of some of the workers."""
        names = ("cognitive", "social", "previous", "before", "personal_best", "after")
        return replace(self, **{name: vars(self)[name][chosen] for name in names})

    def velocity(self) -> Doubles:
        """Return v_{i,t} = w_{i,t} - w_{i,t-1}."""
        return np.subtract(self.before, self.previous, dtype=np.float64)

    def personal_velocity(self) -> Doubles:
        """Return v^p_{i,t} = w^p_{i,t} - w_{i,t-1}."""
        return np.subtract(self.personal_best, self.previous, dtype=np.float64)

    def social_velocity(self) -> Doubles:
        """Return v^g_t = w^g_t - w_{i,t-1} for each worker."""
        return np.subtract(self.global_best, self.previous, dtype=np.float64)

    def displacement(self) -> Doubles:
        """Return v_{i,t+1} = w_{i,t+1} - w_{i,t}."""
        return np.subtract(self.after, self.before, dtype=np.float64)

    def own_weight(self) -> Doubles:
        """Return c0 - c1 - c2, the remaining weight of v_{i,t}; (k, 1) or (k, D)."""
        return self.inertia - self.cognitive.astype(np.float64) - self.social

    def swarm_part(self) -> Doubles:
        """Return (c0 - c1 - c2) v + c1 v^p + c2 v^g: the move without its local work."""
        part = self.own_weight() * self.velocity()
        part += self.cognitive * self.personal_velocity()
        part += self.social * self.social_velocity()
        return part


def _moves(method: type[Method]) -> bool:
    """Return whether a method's workers move by Eq. (5), with gradients."""
    return method.gradients and getattr(method, "move", None) is SwarmMethod.move


def prepare_measurement(
    spec: Spec, threads: int | None, model: ModelBuilder | None = None, data: Dataset | None = None
) -> Experiment:
    """Build a run to be measured; only swarms that learn by gradients have a theory here."""
    method = build_method(spec)
    if not _moves(type(method)):
        able = [name for name in methods.names() if _moves(methods.get(name))]
        raise UserError(
            f"The theorems are about swarms that move by Eq. (5) with gradients; the method of this run is "
            f"'{spec.method}'. Measure a run of one of: {', '.join(able)}.",
            code="not-supported",
        )
    if (spec.local.optimiser, spec.local.schedule, spec.local.clip) != ("sgd", "constant", 0.0):
        raise UserError(
            f"The theorems are about SGD; given local.optimiser={spec.local.optimiser}, local.schedule="
            f"{spec.local.schedule}, local.clip={spec.local.clip:g}. Use sgd, constant and 0.",
            code="not-supported",
        )
    if spec.attack.byzantine == spec.workers:
        raise UserError(
            f"All {spec.workers} workers are attackers; none is left to measure. Use fewer attackers.",
            code="out-of-range",
        )
    experiment = Experiment.prepare(resolve(spec), UserParts(model=model, data=data), threads)
    if experiment.dataset.task != "classification":
        raise UserError(
            f"The theorems speak of classes; the task of this run is {experiment.dataset.task}. Measure a classifier.",
            code="not-supported",
        )
    return experiment


def replay(experiment: Experiment) -> Iterator[SwarmMove]:
    """Yield the moves of a prepared experiment; each is overwritten by the next."""
    workers, swarm = honest_workers(experiment), experiment.memory_swarm
    state = experiment.first_state()
    rows = swarm.take(workers.tolist())
    previous = before = rows.positions.copy()  # one row is a view
    personal_best, global_best = rows.personal_best.copy(), state.global_best
    for played in play_rounds(experiment, state, measured=False):
        drawn = swarm.coefficients(workers, played.order)
        rows = swarm.take(workers.tolist())
        after = rows.positions.copy()
        yield SwarmMove(
            played.order.round, drawn.inertia, played.order.learning_rate, drawn.cognitive, drawn.social, previous,
            before, personal_best, global_best, after,
        )  # fmt: skip
        previous, before = before, after
        personal_best, global_best = rows.personal_best.copy(), played.state.global_best
