"""The swarm that lives in memory: all workers stacked in arrays, moved and scored by one engine.

Plays the workers' side of the protocol only. It never judges a claim and never sees the server's state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cbdsl.attacks import Attack
from cbdsl.data import Split
from cbdsl.engines.base import PADDING, Doubles, Engine, Floats, Indices, Samples, Sgd
from cbdsl.methods import method_of
from cbdsl.rng import seed_of, stream
from cbdsl.server import Order, WorkerId
from cbdsl.spec import LocalSpec, Spec
from cbdsl.swarm import Coefficients, Particles, move, remember

_BLOCK_BYTES = 16 * 2**20  # small enough that the allocator reuses it: fresh memory costs more than it holds


@dataclass(frozen=True, eq=False)
class Holdings:
    """Which samples each worker trains on and scores on."""

    training: tuple[Indices, ...]  # D_i, and D_tr where it is shared
    scoring: Indices  # (N,) D_sc, the same for all; or (U, N) each worker's own D_i, padded


def holdings(split: Split, spec: Spec) -> Holdings:
    """Who works with what (Sec. VI.C): without D_sc a worker scores on its own data."""
    extra = split.shared_training if spec.shares_training else split.shared_training[:0]
    training = tuple(np.concatenate([own, extra]) for own in split.workers)
    return Holdings(training, split.shared_scoring if spec.shares_scoring else padded(split.workers))


def workers_at_once(size: int) -> int:
    """How many workers of so many parameters are moved together: time and memory per worker do not grow with U."""
    return max(1, _BLOCK_BYTES // (4 * size))


def padded(rows: Sequence[Indices]) -> Indices:
    """Rows of different lengths as one array, filled up with -1."""
    table = np.full((len(rows), max(map(len, rows))), PADDING, dtype=np.int32)
    for worker, row in enumerate(rows):
        table[worker, : len(row)] = row
    return table


def batches_of(samples: Indices, local: LocalSpec, rng: np.random.Generator) -> Indices:
    """A worker's batches in one round, (S, B): epochs in random order, the last batch of an epoch padded."""
    per_epoch = -(-len(samples) // local.batch_size)
    epochs = -(-local.steps // per_epoch) if local.steps else local.epochs
    table = np.full((epochs, per_epoch * local.batch_size), PADDING, dtype=np.int32)
    for epoch in table:
        epoch[: len(samples)] = rng.permutation(samples)
    rows = table.reshape(epochs * per_epoch, local.batch_size)
    return rows[: local.steps] if local.steps else rows


class SimulatedSwarm:
    """U workers in this process. The arrays are its own; between rounds they can be saved and put back."""

    def __init__(
        self,
        spec: Spec,
        engine: Engine,
        samples: Samples,
        held: Holdings,
        initial: Floats,
        attackers: Mapping[WorkerId, Attack],
    ) -> None:
        """Initial weights: (1, D) for all or (U, D)."""
        self._spec, self._engine, self._samples, self._held = spec, engine, samples, held
        self._attackers = dict(attackers)
        self._gradients = method_of(spec).gradients
        self._round = 0
        self._global_best = initial[0]
        self._block = workers_at_once(engine.size)
        self.particles = Particles(
            positions=np.broadcast_to(initial, (spec.workers, engine.size)).copy(),
            velocities=np.zeros((spec.workers, engine.size), np.float32),
            personal_best=np.broadcast_to(initial, (spec.workers, engine.size)).copy(),
            personal_score=np.full(spec.workers, np.inf),
        )

    def restore(self, particles: Particles, round_number: int, global_best: Floats) -> None:
        """Go on from saved arrays."""
        self.particles, self._round, self._global_best = particles, round_number, global_best

    def report(self, order: Order) -> Mapping[WorkerId, float]:
        """See `Swarm.report`: Algorithm 1, lines 3 to 5."""
        if order.global_best is not None:
            self._global_best = order.global_best
        self._round = order.round
        for workers in self._blocks(order.participants):
            if order.task == "average":
                start = np.broadcast_to(self._global_best, (len(workers), self._engine.size))
                self.particles.positions[workers] = self._train(start, workers, order)
            else:
                self._move(workers, order)
        if order.task == "average":
            return {}
        return {worker: self._claim(worker) for worker in order.participants}

    def upload(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, Floats]:
        """See `Swarm.upload`: w^p for a swarm, the trained model for FedAvg."""
        average = method_of(self._spec).task == "average"
        source = self.particles.positions if average else self.particles.personal_best
        return {worker: self._sent(worker, source[worker]) for worker in workers}

    def _move(self, workers: Indices, order: Order) -> None:
        """Move, score and remember a block of workers."""
        rows = Particles(*(array[workers] for array in vars(self.particles).values()))
        if order.round == 1:  # Algorithm 1, initialisation: F^p_{i,0} = F_i(w_{i,0})
            rows = remember(rows, rows.positions, rows.velocities, self._scores(rows.positions, workers))
        settings = self._spec.swarm
        positions, velocities = move(
            rows,
            self._global_best,
            self.coefficients(workers, order),
            lambda start: self._train(start, workers, order),
            settings.sgd_from,
            settings.velocity,
        )
        after = remember(rows, positions, velocities, self._scores(positions, workers, rows.personal_score))
        for array, result in zip(vars(self.particles).values(), vars(after).values(), strict=True):
            array[workers] = result

    def _train(self, start: Floats, workers: Indices, order: Order) -> Floats:
        """Local SGD from given positions, (k, D); a new array."""
        if not self._gradients:
            return start.copy()
        seed, local = self._spec.seed, self._spec.local
        rows = [
            batches_of(self._held.training[worker], local, stream(seed, "batches", order.round, int(worker)))
            for worker in workers
        ]
        batches = np.full((len(rows), max(map(len, rows)), local.batch_size), PADDING, dtype=np.int32)
        for row, own in zip(batches, rows, strict=True):
            row[: len(own)] = own
        seeds = np.array([seed_of(seed, "layers", order.round, int(worker)) for worker in workers], dtype=np.uint64)
        sgd = Sgd(order.learning_rate, local.momentum, local.weight_decay)
        return self._engine.train(np.ascontiguousarray(start), self._samples, batches, sgd, seeds)

    def _scores(self, positions: Floats, workers: Indices, ceilings: Doubles | None = None) -> Doubles:
        own = self._held.scoring if self._held.scoring.ndim == 1 else self._held.scoring[workers]
        return self._engine.losses(positions, self._samples, own, ceilings)

    def coefficients(self, workers: Indices, order: Order) -> Coefficients:
        """c1 ~ U(0, delta_1) and c2 ~ U(0, delta_2), for each worker from its own stream."""
        settings = self._spec.swarm
        width = self._engine.size if settings.draw == "parameter" else 1
        drawn = np.empty((2, len(workers), width), np.float32)
        for row, worker in enumerate(workers):
            drawn[:, row] = stream(self._spec.seed, "coefficients", order.round, int(worker)).random(
                (2, width), np.float32
            )
        drawn *= np.array([settings.cognitive, settings.social], np.float32)[:, None, None]
        return Coefficients(order.inertia, drawn[0], drawn[1])

    def _claim(self, worker: WorkerId) -> float:
        """The one number a worker sends: its best score, as a float32."""
        score = float(self.particles.personal_score[worker])
        attack = self._attackers.get(worker)
        return float(np.float32(attack.claim(score) if attack else score))

    def _sent(self, worker: WorkerId, model: Floats) -> Floats:
        attack = self._attackers.get(worker)
        return attack.upload(model, stream(self._spec.seed, "attack", self._round, worker)) if attack else model

    def _blocks(self, participants: Sequence[WorkerId]) -> Iterator[Indices]:
        workers = np.asarray(participants, dtype=np.int32)
        for start in range(0, len(workers), self._block):
            yield workers[start : start + self._block]
