"""Workers in this process: rows of stacked arrays, and attackers in their places."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cbdsl.algorithm.messages import Claim, Order, Upload, WorkerId, commitment_of
from cbdsl.algorithm.methods import Method, play_part
from cbdsl.algorithm.particles import Coefficients, Particles
from cbdsl.algorithm.worker import LocalWorkers, content_of, encode_content, initial_particles
from cbdsl.arrays import Doubles, Floats, Indices
from cbdsl.attacks.adversary import Adversary
from cbdsl.attacks.base import AttackContext
from cbdsl.codecs.base import Codec

_BLOCK_BYTES = 16 * 2**20  # small enough that the allocator reuses it: fresh memory costs more than it holds


def workers_at_once(size: int) -> int:
    """How many workers of so many parameters are moved together: time and memory per worker do not grow with U."""
    return max(1, _BLOCK_BYTES // (4 * size))


class WorkerRows:
    """Workers with numbers one after the other. The arrays are its own; between rounds they can be saved and put back.

    `kept` has them as they are stored, `particles` as rounds work on them.

    A round works on a block of rows at a time and writes the results back: it never has a second copy of the arrays.
    """

    def __init__(self, method: Method, workers: LocalWorkers, initial: Floats, commits: bool = False) -> None:
        """Initial weights: (1, D) for all or (k, D). commits: whether claims come with a digest of their model."""
        self._method, self._workers, self._commits = method, workers, commits
        self._first, self._received = workers.names[0], initial[0]
        self.block = workers_at_once(workers.engine.size)
        self.kept = initial_particles(initial, len(workers.names), workers.codec)

    @property
    def particles(self) -> Particles:
        """All workers in float32; where they are stored in less, a copy."""
        return self.kept

    def receive(self, model: Floats) -> None:
        """What the server sent, (V D,)."""
        self._received = model

    def carry_out(self, order: Order) -> dict[WorkerId, Claim]:
        """Algorithm 1, lines 3 to 5, for the participants among these workers; see `claims`."""
        if order.global_best is not None:
            self.receive(order.global_best)
        for rows in self._blocks(order.participants):
            work = self._workers.at(rows, order.round, order.inertia, order.learning_rate, order.version)
            after = play_part(self._method, work, self._taken(rows), self._received)
            for array, result in zip(vars(self.kept).values(), vars(after).values(), strict=True):
                array[rows] = result
        return self.claims(order)

    def claims(self, order: Order) -> dict[WorkerId, Claim]:
        """What the participants of an order say after it; nothing for "average"."""
        return {worker: self._claim(worker) for worker in order.participants if order.task == "swarm"}

    def models(self, workers: Sequence[WorkerId]) -> Floats:
        """What these workers would send, (k, V D)."""
        rows = [worker - self._first for worker in workers]
        chosen = slice(rows[0], rows[0] + 1) if len(rows) == 1 else rows
        return self._method.upload(self._taken(chosen))

    def scores(self, workers: Sequence[WorkerId]) -> Doubles:
        """F^p of these workers, (k,)."""
        return self.kept.personal_score[[worker - self._first for worker in workers]]

    def contents(self, workers: Sequence[WorkerId]) -> list[Upload]:
        """What these workers send when they are asked: models, or where there is a codec what it makes of them."""
        codec = self._workers.codec
        return [
            content_of(codec, self.kept, worker - self._first, np.asarray(self.models([worker])[0]))
            for worker in workers
        ]

    def _claim(self, worker: WorkerId) -> Claim:
        """What a worker sends: its best score as a float32, and a digest of its model where the server wants one."""
        score = float(np.float32(self.kept.personal_score[worker - self._first]))
        return Claim(score, commitment_of(self.models([worker])[0]) if self._commits else b"")

    def _taken(self, rows: Indices | list[int] | slice) -> Particles:
        return Particles(*(array[rows] for array in vars(self.kept).values()))

    def _blocks(self, participants: Sequence[WorkerId]) -> Iterator[Indices]:
        rows = np.asarray(participants, dtype=np.int32) - np.int32(self._first)
        for start in range(0, len(rows), self.block):
            yield rows[start : start + self.block]


class SimulatedSwarm(ABC):
    """U workers, of whom some lie. The liars sit here, in one place, and are shown what they may know."""

    note: str = ""  # what a user should know of where the workers live

    def __init__(self, adversary: Adversary, codec: Codec, received: Floats, commits: bool) -> None:
        """Received: what the server last sent, (V D,). commits: whether claims come with a digest of their model."""
        self._adversary, self._codec, self._commits = adversary, codec, commits
        self._received = received
        self._order: Order | None = None

    @abstractmethod
    def carry_out(self, order: Order) -> Mapping[WorkerId, Claim]:
        """Move everybody who takes part; what each would claim if all were honest."""

    @abstractmethod
    def models(self, workers: Sequence[WorkerId]) -> Floats:
        """What these workers would send if they were honest, (k, V D)."""

    @abstractmethod
    def scores(self, workers: Sequence[WorkerId]) -> Doubles:
        """And would claim, (k,)."""

    @abstractmethod
    def contents(self, workers: Sequence[WorkerId]) -> Sequence[Upload]:
        """And the messages themselves: models, or where there is a codec what it makes of them."""

    @property
    @abstractmethod
    def kept(self) -> Mapping[str, Any]:
        """The arrays of all workers by name, (U, ...) each, as they go into a checkpoint."""

    @abstractmethod
    def restore(self, particles: Particles | None, round_number: int, received: Floats) -> None:
        """Go on from saved arrays, none where workers remember nothing, and what the server last sent, (V D,)."""

    def saved(self, read: Callable[[], Particles | None], round_number: int) -> None:
        """What was kept after a round is on disk, and can be read from there; none: nothing was."""
        del read, round_number

    def report(self, order: Order) -> Mapping[WorkerId, Claim]:
        """See `Swarm.report`: Algorithm 1, lines 3 to 5."""
        if order.global_best is not None:
            self._received = order.global_best
        self._order = order
        claims = self.carry_out(order)
        if order.task == "average":
            return {}
        liars = self._adversary.workers
        return {worker: self._lie(worker) if worker in liars else claims[worker] for worker in order.participants}

    def upload(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, Upload]:
        """See `Swarm.upload`: what the method's workers send."""
        honest = [worker for worker in workers if worker not in self._adversary.workers]
        sent = dict(zip(honest, self.contents(honest), strict=True)) if honest else {}
        lies = {worker: self._sent(worker)[0] for worker in workers if worker in self._adversary.workers}
        answers: dict[WorkerId, Upload | None] = {**sent, **lies}
        return {worker: upload for worker in workers if (upload := answers[worker]) is not None}

    def _lie(self, worker: WorkerId) -> Claim:
        """What an attacker claims, and the model it commits itself to."""
        score = self._adversary.claim(self._situation(worker))
        return Claim(float(np.float32(score)), commitment_of(self._sent(worker)[1]) if self._commits else b"")

    def _sent(self, worker: WorkerId) -> tuple[Upload | None, Floats]:
        """What an attacker uploads (none: it stays silent), and the model it commits itself to, (V D,)."""
        assert self._order is not None
        honest = np.asarray(self.models([worker])[0])
        model = self._adversary.upload(self._situation(worker), self._order.round)
        if model is None:
            return None, self._received
        if np.array_equal(model, honest):
            return self.contents([worker])[0], honest
        return encode_content(self._codec, model, self._received, self._order.version)

    def _situation(self, worker: WorkerId) -> AttackContext:
        """What an attacker knows; the honest models of those who take part only if its attack needs them."""
        assert self._order is not None
        honest = scores = None
        if self._adversary.omniscient:
            others = [one for one in self._order.participants if one not in self._adversary.workers]
            honest, scores = self.models(others), self.scores(others)
        score, model = float(self.scores([worker])[0]), self.models([worker])[0]
        return self._adversary.situation(worker, self._order.round, model, score, self._received, honest, scores)


class LocalSwarm(SimulatedSwarm):
    """U workers in this process."""

    def __init__(
        self, method: Method, workers: LocalWorkers, initial: Floats, adversary: Adversary, commits: bool = False
    ) -> None:
        """Initial weights: (1, D) for all or (U, D). commits: whether claims come with a digest of their model."""
        super().__init__(adversary, workers.codec, initial[0], commits)
        self.workers, self.rows = workers, WorkerRows(method, workers, initial, commits)

    @property
    def particles(self) -> Particles:
        """All workers; see `Rows.particles`."""
        return self.rows.particles

    def carry_out(self, order: Order) -> Mapping[WorkerId, Claim]:
        """See `StackedSwarm.carry_out`."""
        return self.rows.carry_out(order)

    def models(self, workers: Sequence[WorkerId]) -> Floats:
        """See `StackedSwarm.models`."""
        return self.rows.models(workers)

    def scores(self, workers: Sequence[WorkerId]) -> Doubles:
        """See `StackedSwarm.scores`."""
        return self.rows.scores(workers)

    def contents(self, workers: Sequence[WorkerId]) -> Sequence[Upload]:
        """See `StackedSwarm.contents`."""
        return self.rows.contents(workers)

    @property
    def kept(self) -> Mapping[str, Any]:
        """See `StackedSwarm.kept`."""
        return vars(self.rows.kept)

    def restore(self, particles: Particles | None, round_number: int, received: Floats) -> None:
        """See `StackedSwarm.restore`."""
        del round_number
        if particles is not None:
            self.rows.kept = particles
        self._received = received
        self.rows.receive(received)

    def coefficients(self, workers: Indices, order: Order) -> Coefficients:
        """c1 and c2 that these workers draw in the round of an order."""
        return self.workers.at(workers, order.round, order.inertia, order.learning_rate).coefficients()
