"""Baselines that nobody sends a message for: the server alone, every worker alone, and all samples in one place.

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
class Lessons:
    """Which samples each model of a baseline learns from."""

    samples: tuple[Indices, ...]  # one list for each of k models
    judges: int  # the first models: their mean loss on the hold-out decides which round counts

    @property
    def results(self) -> slice:
        """The models that are the result: those that do not judge, or all if all do."""
        return slice(self.judges % len(self.samples), None)


class AloneMethod(Method):
    """A method without messages.

    >>> ServerOnly().conversation
    'alone'
    """

    conversation = "alone"
    shared: ClassVar[Shared] = "none"
    remembers = False

    @abstractmethod
    def assign(self, parts: Split, shares_training: bool) -> Lessons:
        """Return who learns from which samples. shares_training: whether workers have D_tr, too."""

    def move(self, work: WorkerRound, rows: Particles, received: Floats) -> Particles:
        """Leave the workers as they are: nobody asks them."""
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

    def assign(self, parts: Split, shares_training: bool) -> Lessons:
        """See `AloneMethod.assign`."""
        del shares_training
        public = np.concatenate([parts.shared_training, parts.shared_scoring])
        if self.use == "all":
            return Lessons((public, np.concatenate([public, parts.holdout])), judges=1)
        return Lessons((parts.shared_training if self.use == "training" else public,), judges=1)


@register.method("local-only")
class LocalOnly(AloneMethod):
    """Every worker trains on its own samples; the accuracy is the mean over workers, and worker 0's model is saved."""

    title = "every worker alone"

    def assign(self, parts: Split, shares_training: bool) -> Lessons:
        """See `AloneMethod.assign`."""
        extra = parts.shared_training if shares_training else parts.shared_training[:0]
        return Lessons(tuple(np.concatenate([own, extra]) for own in parts.workers), judges=len(parts.workers))


@register.method("central")
class Central(AloneMethod):
    """All samples of workers and D_G in one place: what a swarm could reach at best with this model and optimiser."""

    title = "all data in one place"

    def assign(self, parts: Split, shares_training: bool) -> Lessons:
        """See `AloneMethod.assign`."""
        del shares_training
        return Lessons((np.concatenate([*parts.workers, parts.shared_training, parts.shared_scoring]),), judges=1)


@dataclass(frozen=True, eq=False)
class AloneTraining:
    """Trains the models of a baseline, and chooses the round that counts."""

    lessons: Lessons
    engine: Engine
    samples: Samples
    holdout: Indices
    local: LocalSpec
    seed: int

    def play(self, state: ServerState, order: Order, swarm: Swarm | None = None) -> tuple[ServerState, RoundLog]:
        """Train for a round. The state's score is the loss on the hold-out, its memory (2, k, D): current and best."""
        del swarm
        k = len(self.lessons.samples)
        current, best = state.memory if state.memory.size else np.repeat(state.global_best[None, None], k, 1)[[0, 0]]
        current = self._train(current, order)
        loss, after = self._loss(current), replace(state, round=order.round)
        if loss <= state.global_score and loss < np.inf:
            best, after = current, replace(after, global_score=loss, version=state.version + 1)
        memory = np.stack([current, best])
        return replace(after, memory=memory, global_best=self.models(memory)[0]), RoundLog(order.round, {}, {}, (), ())

    def train(self, initial: Floats) -> tuple[Floats, int]:
        """Train until the hold-out has seen no gain for some rounds; return the best model and its round."""
        state, best = ServerState(0, initial, np.inf), 0
        while state.round < MOST_EPOCHS and state.round < best + PATIENCE:
            order = Order(state.round + 1, "average", (), 0.0, self.local.learning_rate, None)
            after, _ = self.play(state, order)
            best = after.round if after.version > state.version else best
            state = after
        return state.global_best, best

    def models(self, memory: Floats) -> Floats:
        """Return the models that are the result so far, (m, D)."""
        return memory[1, self.lessons.results]

    def _train(self, models: Floats, order: Order) -> Floats:
        k = len(models)
        seeds = np.array([seed_of(self.seed, "alone", order.round, k + one) for one in range(k)], np.uint64)
        batches = stack_batches([
            draw_batches(own, self.local, stream(self.seed, "alone", order.round, one))
            for one, own in enumerate(self.lessons.samples)
        ])  # fmt: skip
        sgd = Sgd(order.learning_rate, self.local.momentum, self.local.weight_decay)
        return self.engine.train(np.ascontiguousarray(models), self.samples, batches, sgd, seeds)

    def _loss(self, models: Floats) -> float:
        """Return the mean loss of the models that judge; without a hold-out -inf."""
        if not len(self.holdout):
            return -np.inf  # so that the last round counts
        losses = self.engine.losses(models[: self.lessons.judges], self.samples, self.holdout)
        return float(np.nan_to_num(losses, nan=np.inf).mean())
