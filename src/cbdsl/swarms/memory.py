"""The swarm that lives in memory: all workers stacked in arrays, moved and scored by one engine.

Plays the workers' side of the protocol only. It never judges a claim and never sees the server's state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cbdsl.arrays import Doubles, Floats, Indices, Samples
from cbdsl.byzantine.adversary import Adversary
from cbdsl.byzantine.attacks import Situation
from cbdsl.data import Split
from cbdsl.engines.base import Engine, Sgd
from cbdsl.methods.table import method_of
from cbdsl.protocol.server import Claim, Order, WorkerId
from cbdsl.protocol.verification import commitment_of
from cbdsl.rng import seed_of, stream
from cbdsl.spec import Spec
from cbdsl.workers.batches import batches_of, padded, stacked
from cbdsl.workers.swarm import Coefficients, Particles, move, remember

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


class SimulatedSwarm:
    """U workers in this process. The arrays are its own; between rounds they can be saved and put back."""

    def __init__(
        self,
        spec: Spec,
        engine: Engine,
        samples: Samples,
        held: Holdings,
        initial: Floats,
        adversary: Adversary,
        names: Sequence[WorkerId] | None = None,
    ) -> None:
        """Initial weights: (1, D) for all or (U, D). names: the numbers behind the rows, if not 0 ... U - 1."""
        self._names = range(spec.workers) if names is None else names
        self._spec, self._engine, self._samples, self._held = spec, engine, samples, held
        self._adversary = adversary
        self._poison, self._poisoned = _poisoned(adversary, held, self._names)
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

    def report(self, order: Order) -> Mapping[WorkerId, Claim]:
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
        sent = {worker: self._sent(worker) for worker in workers}
        return {worker: model for worker, model in sent.items() if model is not None}

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
        poisoned = np.array([worker in self._poisoned for worker in workers])
        sgd = Sgd(order.learning_rate, local.momentum, local.weight_decay)
        trained = np.empty((len(workers), self._engine.size), np.float32)
        for rows, samples, held in (
            (~poisoned, self._samples, self._held.training),
            (poisoned, self._poison, self._poisoned),
        ):
            chosen = [int(worker) for worker in workers[rows]]
            if not chosen:
                continue
            names = [self._names[worker] for worker in chosen]
            streams = [stream(seed, "batches", order.round, name) for name in names]
            batches = stacked([batches_of(held[row], local, rng) for row, rng in zip(chosen, streams, strict=True)])
            seeds = np.array([seed_of(seed, "layers", order.round, name) for name in names], dtype=np.uint64)
            own = np.ascontiguousarray(start if rows.all() else start[rows])
            result = self._engine.train(own, samples, batches, sgd, seeds)
            if rows.all():
                return result
            trained[rows] = result
        return trained

    def _scores(self, positions: Floats, workers: Indices, ceilings: Doubles | None = None) -> Doubles:
        own = self._held.scoring if self._held.scoring.ndim == 1 else self._held.scoring[workers]
        return self._engine.losses(positions, self._samples, own, ceilings)

    def coefficients(self, workers: Indices, order: Order) -> Coefficients:
        """c1 ~ U(0, delta_1) and c2 ~ U(0, delta_2), for each worker from its own stream."""
        settings = self._spec.swarm
        width = self._engine.size if settings.draw == "parameter" else 1
        drawn = np.empty((2, len(workers), width), np.float32)
        for row, worker in enumerate(workers):
            drawn[:, row] = stream(self._spec.seed, "coefficients", order.round, self._names[worker]).random(
                (2, width), np.float32
            )
        drawn *= np.array([settings.cognitive, settings.social], np.float32)[:, None, None]
        return Coefficients(order.inertia, drawn[0], drawn[1])

    def _claim(self, worker: WorkerId) -> Claim:
        """What a worker sends: its best score as a float32, and a digest of its model where the server wants one."""
        score = float(self.particles.personal_score[worker])
        if self._names[worker] in self._adversary.workers:
            score = self._adversary.claim(self._situation(worker))
        commitment = b""
        if self._spec.defence.commitment:
            model = self._sent(worker)
            commitment = commitment_of(self._global_best if model is None else model)
        return Claim(float(np.float32(score)), commitment)

    def _sent(self, worker: WorkerId) -> Floats | None:
        """The model a worker uploads: w^p in a swarm, the trained one for FedAvg; what an attacker makes of it."""
        if self._names[worker] not in self._adversary.workers:
            return np.asarray(self._source[worker])
        return self._adversary.upload(self._situation(worker), self._round)

    @property
    def _source(self) -> Floats:
        average = method_of(self._spec).task == "average"
        return self.particles.positions if average else self.particles.personal_best

    def _situation(self, worker: WorkerId) -> Situation:
        """What an attacker knows; the honest models only if its attack needs them."""
        honest = scores = None
        if self._adversary.omniscient:
            rows = [number for number in range(self._spec.workers) if number not in self._adversary.workers]
            honest, scores = self._source[rows], self.particles.personal_score[rows]
        score = float(self.particles.personal_score[worker])
        return self._adversary.situation(
            self._names[worker], self._round, self._source[worker], score, self._global_best, honest, scores
        )

    def _blocks(self, participants: Sequence[WorkerId]) -> Iterator[Indices]:
        workers = np.asarray(participants, dtype=np.int32)
        for start in range(0, len(workers), self._block):
            yield workers[start : start + self._block]


def _poisoned(
    adversary: Adversary, held: Holdings, names: Sequence[WorkerId]
) -> tuple[Samples, dict[WorkerId, Indices]]:
    """What attackers train on instead of what they hold: all of it one after the other, and whose is which."""
    poisons = {row: adversary.training(name, held.training[row]) for row, name in enumerate(names)}
    parts = {worker: poison for worker, poison in poisons.items() if poison is not None}
    if not parts:
        return Samples(np.empty((0, 1), np.float32), np.empty(0, np.int32)), {}
    ends = np.cumsum([0, *map(len, parts.values())])
    return Samples.joined(list(parts.values())), {
        worker: np.arange(first, last, dtype=np.int32)
        for worker, first, last in zip(parts, ends, ends[1:], strict=False)
    }
