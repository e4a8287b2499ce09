"""Baselines without messages: the server alone, every worker alone, and all samples in one place.

They answer whether a swarm is worth its messages. A round is `local.epochs` passes over the samples. The result is the
models of the round with the lowest loss on the hold-out, so the test set never chooses the number of epochs.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import numpy as np

from cbdsl import register
from cbdsl.algorithm.messages import Order, RoundLog, ServerState, Swarm
from cbdsl.algorithm.methods import Method
from cbdsl.algorithm.particles import Particles
from cbdsl.algorithm.worker_round import WorkerRound, draw_batches, stack_batches
from cbdsl.arrays import Floats, Indices, Samples
from cbdsl.engines.engine import Engine, Sgd
from cbdsl.errors import unknown
from cbdsl.rng import seed_of, stream
from cbdsl.spec import LocalSpec, Shared

if TYPE_CHECKING:
    from cbdsl.data.partition import Split

MOST_EPOCHS = 60  # of the server alone, beside a run
PATIENCE = 15  # epochs without a gain on the hold-out after which it stops
Use = Literal["training", "shared", "all"]


@dataclass(frozen=True, eq=False)
class BaselineSamples:
    """Which samples each model of a baseline is trained on."""

    samples: tuple[Indices, ...]  # one list for each of k models
    deciding: int  # the first models, by number: their mean loss on the hold-out decides which round counts

    @property
    def results(self) -> slice:
        """The models that are the result: those that do not decide, or all if all do."""
        return slice(self.deciding % len(self.samples), None)


class AloneMethod(Method):
    """A method without messages.

    >>> ServerOnly().conversation
    'alone'
    """

    conversation = "alone"
    shared: ClassVar[Shared] = "none"
    remembers = False

    @abstractmethod
    def assign(self, parts: Split, shares_training: bool) -> BaselineSamples:
        """Return which model is trained on which samples. shares_training: whether workers have D_tr, too."""

    def move(self, work: WorkerRound, rows: Particles, received: Floats) -> Particles:
        """Leave the workers as they are."""
        del work, received
        return rows

    def upload(self, rows: Particles) -> Floats:
        """Return where the workers are."""
        return rows.positions


@register.method("server-only")
@dataclass(frozen=True)
class ServerOnly(AloneMethod):
    """The server trains on its own samples: D_tr (use=training), D_tr and D_sc (shared), or the hold-out too (all).

    With use=all the number of rounds is chosen by a model that learns from D_tr and D_sc, and holds for the other one.
    """

    use: Use = "shared"

    title = "the server alone"

    def __post_init__(self) -> None:
        if self.use not in get_args(Use):
            raise unknown("use of server-only", self.use, get_args(Use))

    def assign(self, parts: Split, shares_training: bool) -> BaselineSamples:
        """See `AloneMethod.assign`."""
        del shares_training
        public = np.concatenate([parts.shared_training, parts.shared_scoring])
        if self.use == "all":
            return BaselineSamples((public, np.concatenate([public, parts.holdout])), deciding=1)
        return BaselineSamples((parts.shared_training if self.use == "training" else public,), deciding=1)


@register.method("local-only")
@dataclass(frozen=True)
class LocalOnly(AloneMethod):
    """Every worker trains on its own samples; the accuracy is the mean over workers, and worker 0's model is saved.

    Models that never meet can also vote, for one upload per worker: the summary has the vote's accuracy, and how much
    of it stays right whatever any `attackers` of the workers vote (as the ensembles of Cao et al.
    2021, with one worker per model).
    """

    attackers: int = 20

    title = "every worker alone"

    def assign(self, parts: Split, shares_training: bool) -> BaselineSamples:
        """See `AloneMethod.assign`."""
        extra = parts.shared_training if shares_training else parts.shared_training[:0]
        return BaselineSamples(
            tuple(np.concatenate([own, extra]) for own in parts.workers), deciding=len(parts.workers)
        )


@register.method("central")
class Central(AloneMethod):
    """All samples of workers and D_G in one place: what a swarm could reach at best with this model and optimiser."""

    title = "all data in one place"

    def assign(self, parts: Split, shares_training: bool) -> BaselineSamples:
        """See `AloneMethod.assign`."""
        del shares_training
        return BaselineSamples(
            (np.concatenate([*parts.workers, parts.shared_training, parts.shared_scoring]),), deciding=1
        )


@dataclass(frozen=True, eq=False)
class AloneTraining:
    """Trains the models of a baseline, and chooses the round that counts."""

    assigned: BaselineSamples
    engine: Engine
    samples: Samples
    holdout: Indices
    local: LocalSpec
    seed: int

    def play(self, state: ServerState, order: Order, swarm: Swarm | None = None) -> tuple[ServerState, RoundLog]:
        """Train for a round. The state's score is the loss on the hold-out, its memory (2, k, D): current and best."""
        del swarm
        k = len(self.assigned.samples)
        current, best = state.memory if state.memory.size else np.repeat(state.global_best[None, None], k, 1)[[0, 0]]
        current = self._train(current, order)
        loss, after = self._loss(current), replace(state, round=order.round)
        if loss <= state.global_score and loss < np.inf:
            best, after = current, replace(after, global_score=loss, version=state.version + 1)
        memory = np.stack([current, best])
        return replace(after, memory=memory, global_best=self.models(memory)[0]), RoundLog(order.round, {}, {}, (), ())

    def train(self, initial: Floats) -> tuple[Floats, int]:
        """Train until the hold-out has seen no gain for some epochs; return the best model and its epoch."""
        by_epoch = replace(self, local=replace(self.local, epochs=1, steps=0))
        state, best = ServerState(0, initial, np.inf), 0
        while state.round < MOST_EPOCHS and state.round < best + PATIENCE:
            order = Order(state.round + 1, "average", (), 0.0, self.local.learning_rate, None)
            after, _ = by_epoch.play(state, order)
            best = after.round if after.version > state.version else best
            state = after
        return state.global_best, best

    def models(self, memory: Floats) -> Floats:
        """Return the models that are the result so far, (m, D)."""
        return memory[1, self.assigned.results]

    def _train(self, models: Floats, order: Order) -> Floats:
        k = len(models)
        seeds = np.array([seed_of(self.seed, "alone", order.round, k + one) for one in range(k)], np.uint64)
        batches = stack_batches([
            draw_batches(own, self.local, stream(self.seed, "alone", order.round, one))
            for one, own in enumerate(self.assigned.samples)
        ])  # fmt: skip
        sgd = Sgd.of(self.local, order.learning_rate)
        return self.engine.train(np.ascontiguousarray(models), self.samples, batches, sgd, seeds)

    def _loss(self, models: Floats) -> float:
        """Return the mean loss of the models that decide; without a hold-out -inf, so that the last round counts.

        Infinite where a model that was also trained on the hold-out is worse there than those that decide: it diverged.
        """
        if not len(self.holdout):
            return -np.inf
        losses = np.nan_to_num(self.engine.losses(models, self.samples, self.holdout), nan=np.inf)
        deciding = float(losses[: self.assigned.deciding].mean())
        return deciding if losses[self.assigned.results].mean() <= deciding else np.inf
