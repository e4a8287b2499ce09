"""The swarm that lives in memory: all workers stacked in arrays, moved and scored by one engine; attackers among them.

Plays the workers' side of the protocol only. It never judges a claim and never sees the server's state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from cbdsl.arrays import Floats, Indices
from cbdsl.byzantine.adversary import Adversary
from cbdsl.byzantine.attack import Situation
from cbdsl.methods.base import Method, play_part
from cbdsl.protocol.messages import Claim, Order, Upload, WorkerId, commitment_of
from cbdsl.workers.local import LocalWorkers, at_rest, content_of, made_content
from cbdsl.workers.swarm import Coefficients, Particles

_BLOCK_BYTES = 16 * 2**20  # small enough that the allocator reuses it: fresh memory costs more than it holds


def workers_at_once(size: int) -> int:
    """How many workers of so many parameters are moved together: time and memory per worker do not grow with U."""
    return max(1, _BLOCK_BYTES // (4 * size))


class MemorySwarm:
    """U workers in this process. The arrays are its own; between rounds they can be saved and put back."""

    def __init__(
        self, method: Method, workers: LocalWorkers, initial: Floats, adversary: Adversary, commits: bool = False
    ) -> None:
        """Initial weights: (1, D) for all or (U, D). commits: whether claims come with a digest of their model."""
        self._method, self._workers, self._adversary, self._commits = method, workers, adversary, commits
        self._codec = workers.codec
        self._round, self._received, self._version = 0, initial[0], 0
        self._participants: Sequence[WorkerId] = range(len(workers.names))
        self._block = workers_at_once(workers.engine.size)
        self.particles = at_rest(initial, len(workers.names), workers.codec)

    def restore(self, particles: Particles, round_number: int, received: Floats) -> None:
        """Go on from saved arrays, and from what the server last sent, (V D,)."""
        self.particles, self._round, self._received = particles, round_number, received

    def report(self, order: Order) -> Mapping[WorkerId, Claim]:
        """See `Swarm.report`: Algorithm 1, lines 3 to 5."""
        if order.global_best is not None:
            self._received = order.global_best
        self._round, self._participants, self._version = order.round, order.participants, order.version
        for rows in self._blocks(order.participants):
            work = self._workers.at(rows, order.round, order.inertia, order.learning_rate, order.version)
            before = Particles(*(array[rows] for array in vars(self.particles).values()))
            after = play_part(self._method, work, before, self._received)
            for array, result in zip(vars(self.particles).values(), vars(after).values(), strict=True):
                array[rows] = result
        if order.task == "average":
            return {}
        return {worker: self._claim(worker) for worker in order.participants}

    def coefficients(self, workers: Indices, order: Order) -> Coefficients:
        """c1 and c2 that these workers draw in the round of an order."""
        return self._workers.at(workers, order.round, order.inertia, order.learning_rate).coefficients()

    def upload(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, Upload]:
        """See `Swarm.upload`: what the method's workers send."""
        sent = {worker: self._sent(worker)[0] for worker in workers}
        return {worker: upload for worker, upload in sent.items() if upload is not None}

    def _claim(self, worker: WorkerId) -> Claim:
        """What a worker sends: its best score as a float32, and a digest of its model where the server wants one."""
        score = float(self.particles.personal_score[worker])
        if worker in self._adversary.workers:
            score = self._adversary.claim(self._situation(worker))
        commitment = b""
        if self._commits:
            commitment = commitment_of(self._sent(worker)[1])
        return Claim(float(np.float32(score)), commitment)

    def _sent(self, worker: WorkerId) -> tuple[Upload | None, Floats]:
        """What a worker uploads (none: it stays silent), and the model it commits itself to, (V D,)."""
        honest = np.asarray(self._honest([worker])[0])
        if worker not in self._adversary.workers:
            return content_of(self._codec, self.particles, worker, honest), honest
        model = self._adversary.upload(self._situation(worker), self._round)
        if model is None:
            return None, self._received
        if np.array_equal(model, honest):
            return content_of(self._codec, self.particles, worker, honest), honest
        return made_content(self._codec, model, self._received, self._version)

    def _honest(self, workers: Sequence[WorkerId]) -> Floats:
        """What honest workers in these places would send, (k, V D)."""
        chosen = slice(workers[0], workers[0] + 1) if len(workers) == 1 else list(workers)
        return self._method.upload(Particles(*(array[chosen] for array in vars(self.particles).values())))

    def _situation(self, worker: WorkerId) -> Situation:
        """What an attacker knows; the honest models of those who take part only if its attack needs them."""
        honest = scores = None
        if self._adversary.omniscient:
            others = [row for row in self._participants if row not in self._adversary.workers]
            honest, scores = self._honest(others), self.particles.personal_score[others]
        score = float(self.particles.personal_score[worker])
        model = self._honest([worker])[0]
        return self._adversary.situation(worker, self._round, model, score, self._received, honest, scores)

    def _blocks(self, participants: Sequence[WorkerId]) -> Iterator[Indices]:
        workers = np.asarray(participants, dtype=np.int32)
        for start in range(0, len(workers), self._block):
            yield workers[start : start + self._block]
