"""Workers in this process: `LocalSwarm` moves them and answers for them, honest or attacking.

A simulated swarm, a shard of one on a cluster and the one worker of a device are all a `LocalSwarm`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cbdsl.algorithm.messages import Claim, Order, Upload, WorkerId, commitment_of
from cbdsl.algorithm.methods import Method, encode_moved
from cbdsl.algorithm.particles import Coefficients, Particles
from cbdsl.algorithm.worker_round import LocalWorkers, initial_particles
from cbdsl.arrays import Doubles, Floats, Indices
from cbdsl.codecs.envelope import content_of

if TYPE_CHECKING:  # a device has no attacks
    from cbdsl.attacks.adversary import Adversary

_BLOCK_BYTES = 16 * 2**20  # small enough that the allocator reuses it: fresh memory costs more than it holds


def workers_at_once(size: int) -> int:
    """Return how many workers with `size` parameters are moved together, so that memory does not grow with U."""
    return max(1, _BLOCK_BYTES // (4 * size))


class SwarmWithAttackers(ABC):
    """Workers of which some may attack: an attacker is moved as an honest worker, and its answers are replaced."""

    note: str = ""  # what a user should know about where the workers run

    def __init__(self, received: Floats, adversary: Adversary | None, commits: bool) -> None:
        """received: what the server last sent, (V D,). commits: whether claims contain a digest of their model."""
        self._received, self.adversary, self._commits = received, adversary, commits
        self._attackers: frozenset[WorkerId] = adversary.workers if adversary else frozenset()

    @abstractmethod
    def carry_out(self, order: Order) -> Mapping[WorkerId, Claim]:
        """Move the participants; return what each would claim if all were honest, and nothing for "average"."""

    @abstractmethod
    def models_and_scores(self, workers: Sequence[WorkerId]) -> tuple[Floats, Doubles]:
        """Return what these workers would send, (k, V D), and claim, (k,), if they were honest."""

    @abstractmethod
    def contents(self, workers: Sequence[WorkerId]) -> Sequence[Upload]:
        """Return the uploads of these workers if they were honest: models, encoded where there is a codec."""

    @property
    @abstractmethod
    def kept(self) -> Mapping[str, Any]:
        """The arrays of all workers by name, (U, ...) each, as they go into a checkpoint."""

    @abstractmethod
    def restore(self, particles: Particles | None, round_number: int, received: Floats) -> None:
        """Continue from saved arrays (None: workers remember nothing) and what the server last sent, (V D,)."""

    def saved(self, read: Callable[[], Particles | None], round_number: int) -> None:
        """Note that a checkpoint was written after a round. read: maps its arrays, or returns None if it has none."""
        del read, round_number

    def begin_round(self, order: Order) -> None:
        """Take over what the server sent, before anything is computed."""
        if order.global_best is not None:
            self._received = order.global_best
        if self.adversary is not None:
            self.adversary.begin_round(order, self._received)

    def report(self, order: Order) -> dict[WorkerId, Claim]:
        """See `Swarm.report`: Algorithm 1, lines 3 to 5."""
        self.begin_round(order)
        claims = self.carry_out(order)
        if self.adversary is not None:
            self.adversary.remember(self)
        answered = [worker for worker in order.participants if worker in claims]
        return {worker: self._attack(worker) if worker in self._attackers else claims[worker] for worker in answered}

    def upload(self, workers: Sequence[WorkerId]) -> dict[WorkerId, Upload]:
        """See `Swarm.upload`."""
        honest = [worker for worker in workers if worker not in self._attackers]
        answers: dict[WorkerId, Upload] = dict(zip(honest, self.contents(honest), strict=True)) if honest else {}
        for worker in workers:
            if self.adversary is not None and worker in self._attackers:
                content = self.adversary.send(worker, self).content
                if content is not None:
                    answers[worker] = content
        return {worker: answers[worker] for worker in workers if worker in answers}

    def _attack(self, worker: WorkerId) -> Claim:
        """Return what an attacker claims, and a digest of the model that it commits itself to."""
        assert self.adversary is not None
        score = float(np.float32(self.adversary.claim(worker, self)))
        return Claim(score, commitment_of(self.adversary.send(worker, self).model) if self._commits else b"")


class LocalSwarm(SwarmWithAttackers):
    """Workers with consecutive numbers, as rows of arrays. Between rounds the arrays can be saved and replaced.

    A round moves a block of rows at a time and writes the results back, so there is never a second copy of the arrays.
    """

    def __init__(
        self,
        method: Method,
        workers: LocalWorkers,
        initial: Floats,
        adversary: Adversary | None = None,
        commits: bool = False,
    ) -> None:
        """initial: weights, (1, D) for all or (U, D). commits: whether claims contain a digest of their model."""
        super().__init__(initial[0], adversary, commits)
        self._method, self.workers, self._first = method, workers, workers.names[0]
        self.block = workers_at_once(workers.engine.size)
        self.particles = initial_particles(initial, len(workers.names), workers.codec)

    def carry_out(self, order: Order) -> dict[WorkerId, Claim]:
        """Algorithm 1, lines 3 to 5, for the participants among these workers; see `claims`."""
        for rows in self._blocks(order.participants):
            work = self.workers.at(rows, order.round, order.inertia, order.learning_rate, order.version)
            before = self._take(rows)
            after = self._method.move(work, before, self._received)
            after = encode_moved(self._method, work, before, after, self._received)
            for name, array in vars(self.particles).items():
                if (result := getattr(after, name)).size:  # without a codec there are no packs
                    array[rows] = result
        return self.claims(order)

    def claims(self, order: Order) -> dict[WorkerId, Claim]:
        """Return what honest participants claim after an order: F^p as a float32, with a digest of their model.

        Nothing for "average", and no digest where the server does not ask for one.
        """
        if order.task == "average":
            return {}
        claims = {}
        for worker in order.participants:
            score = float(np.float32(self.particles.personal_score[worker - self._first]))
            claims[worker] = Claim(score, commitment_of(self._model(worker)) if self._commits else b"")
        return claims

    def models_and_scores(self, workers: Sequence[WorkerId]) -> tuple[Floats, Doubles]:
        """See `SwarmWithAttackers.models_and_scores`."""
        rows = self._take(np.asarray(workers, np.int32) - np.int32(self._first))
        return self._method.upload(rows), rows.personal_score

    def contents(self, workers: Sequence[WorkerId]) -> list[Upload]:
        """See `SwarmWithAttackers.contents`."""
        found = []
        for worker in workers:
            row = worker - self._first
            pack, version = self.particles.packs[row], int(self.particles.versions[row])
            found.append(content_of(self.workers.codec, self._model(worker), pack, version))
        return found

    @property
    def kept(self) -> Mapping[str, Any]:
        """See `SwarmWithAttackers.kept`."""
        return vars(self.particles)

    def restore(self, particles: Particles | None, round_number: int, received: Floats) -> None:
        """See `SwarmWithAttackers.restore`."""
        del round_number
        if particles is not None:
            self.particles = particles
        self._received = received

    def coefficients(self, workers: Indices, order: Order) -> Coefficients:
        """Return c1 and c2 as these workers draw them in the round of an order."""
        return self.workers.at(workers, order.round, order.inertia, order.learning_rate).coefficients()

    def _model(self, worker: WorkerId) -> Floats:
        return np.asarray(self.models_and_scores([worker])[0][0])

    def _take(self, rows: Indices) -> Particles:
        """Return some rows: views if it is one, copies otherwise."""
        chosen = slice(rows[0], rows[0] + 1) if len(rows) == 1 else rows
        return Particles(*(array[chosen] for array in vars(self.particles).values()))

    def _blocks(self, participants: Sequence[WorkerId]) -> Iterator[Indices]:
        rows = np.asarray(participants, dtype=np.int32) - np.int32(self._first)
        for start in range(0, len(rows), self.block):
            yield rows[start : start + self.block]
