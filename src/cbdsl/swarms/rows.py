"""Workers stacked in arrays, moved and scored by one engine: all of a swarm in this process, or a shard elsewhere.

Everybody here is honest. What row i computes depends on the worker's own number and state, never on which others share
its arrays; so any cut of a swarm into ranges of workers gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from cbdsl.arrays import Doubles, Floats, Indices
from cbdsl.methods.base import Method, play_part
from cbdsl.protocol.messages import Claim, Order, Upload, WorkerId, commitment_of
from cbdsl.workers.local import LocalWorkers, at_rest, content_of
from cbdsl.workers.storage import opened, stored
from cbdsl.workers.swarm import Particles

_BLOCK_BYTES = 16 * 2**20  # small enough that the allocator reuses it: fresh memory costs more than it holds


def workers_at_once(size: int) -> int:
    """How many workers of so many parameters are moved together: time and memory per worker do not grow with U."""
    return max(1, _BLOCK_BYTES // (4 * size))


class Rows:
    """Workers with numbers one after the other. The arrays are its own; between rounds they can be saved and put back.

    `kept` has them as they are stored, `particles` as rounds work on them.

    A round works on a block of rows at a time and writes the results back: it never has a second copy of the arrays.
    """

    def __init__(self, method: Method, workers: LocalWorkers, initial: Floats, commits: bool = False) -> None:
        """Initial weights: (1, D) for all or (k, D). commits: whether claims come with a digest of their model."""
        self._method, self._workers, self._commits = method, workers, commits
        self._first, self._received = workers.names[0], initial[0]
        self.block = workers_at_once(workers.engine.size)
        self.kept = at_rest(initial, len(workers.names), workers.codec, workers.swarm)

    @property
    def particles(self) -> Particles:
        """All workers in float32; where they are stored in less, a copy."""
        return opened(self.kept)

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
            for array, result in zip(vars(self.kept).values(), vars(stored(after, work.swarm)).values(), strict=True):
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
        return opened(Particles(*(array[rows] for array in vars(self.kept).values())))

    def _blocks(self, participants: Sequence[WorkerId]) -> Iterator[Indices]:
        rows = np.asarray(participants, dtype=np.int32) - np.int32(self._first)
        for start in range(0, len(rows), self.block):
            yield rows[start : start + self.block]
