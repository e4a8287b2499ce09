"""Workers in this process: `LocalSwarm` moves them and answers for them, honest or attacking.

A simulated swarm, a shard of one on a cluster and the one worker of a device are all a `LocalSwarm`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cbdsl.algorithm.messages import Claim, Order, Upload, WorkerId, commitment_of
from cbdsl.algorithm.methods import Method, encode_moved, kept_arrays
from cbdsl.algorithm.particles import Coefficients, Particles
from cbdsl.algorithm.worker_round import LocalWorkers, bytes_of_rows, initial_particles
from cbdsl.algorithm.worker_table import KeptRows, WorkerTable
from cbdsl.arrays import Doubles, Floats, Indices
from cbdsl.codecs.codec import Codec
from cbdsl.codecs.envelope import content_of
from cbdsl.spec import Spec
from cbdsl.util.npz import InBlocks

if TYPE_CHECKING:  # a device has no attacks
    from cbdsl.attacks.adversary import Adversary

_BLOCK_BYTES = 16 * 2**20  # small enough that the allocator reuses it: fresh memory costs more than it holds


def workers_at_once(size: int) -> int:
    """Return how many workers with `size` parameters are moved together, so that memory does not grow with U."""
    return max(1, _BLOCK_BYTES // (4 * size))


def bytes_of_state(method: Method, spec: Spec, size: int, codec: Codec, workers: int) -> tuple[int, int]:
    """Return the bytes that `workers` workers keep by the end of a run, and those of a round's other rows."""
    kept = kept_arrays(method, codec)
    rest = {each.name for each in fields(Particles)} - {*kept}
    cohort = min(workers, spec.participants)
    taking_part = min(workers, spec.participants * spec.rounds)
    return taking_part * bytes_of_rows(kept, size, codec), cohort * bytes_of_rows(rest, size, codec)


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

    @abstractmethod
    def personal(self, workers: Sequence[WorkerId]) -> dict[WorkerId, Floats]:
        """Return these workers' own models, (D,), of those that have taken part."""

    @property
    @abstractmethod
    def kept(self) -> Mapping[str, Any]:
        """The workers' rows for a checkpoint: n numbers as "workers", and arrays by name, (n, ...)."""

    @abstractmethod
    def restore(self, rows: KeptRows | None, round_number: int, received: Floats) -> None:
        """Continue from saved rows (None: workers keep nothing) and the server's last message, (V D,)."""

    def saved(self, read: Callable[[], KeptRows | None], round_number: int) -> None:
        """Note that a checkpoint was written after a round. read: maps its rows, or returns None if it has none."""
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
    """Workers with consecutive numbers. What they keep can be saved and replaced between rounds.

    Memory holds what the method keeps, for the workers that have taken part, and the rest of the last round's rows, for
    its participants. A round moves a block of rows at a time, so there is never a second copy of what is kept.
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
        self._initial = initial
        first = vars(initial_particles(initial[:1], 1, workers.codec))
        kept = {name: first[name] for name in kept_arrays(method, workers.codec)}
        self.table = WorkerTable(
            {name: (array.shape[1:], array.dtype) for name, array in kept.items()}, len(workers.names)
        )
        self._moved: dict[WorkerId, tuple[Mapping[str, Any], int]] = {}  # the rest of the last round: block and row

    def carry_out(self, order: Order) -> dict[WorkerId, Claim]:
        """Algorithm 1, lines 3 to 5, for the participants among these workers; see `claims`."""
        self._moved = {}
        self._add_newcomers(order.participants)
        for start in range(0, len(order.participants), self.block):
            chosen = order.participants[start : start + self.block]
            work = self.workers.at(
                self._rows_of(chosen), order.round, order.inertia, order.learning_rate, order.version
            )
            before = self._before(chosen)
            after = self._method.move(work, before, self._received)
            after = encode_moved(self._method, work, before, after, self._received)
            self._store(chosen, before, after)
        return self.claims(order)

    def _add_newcomers(self, workers: Sequence[WorkerId]) -> None:
        """Make rows for workers that take part for the first time."""
        new = [worker for worker in workers if worker not in self.table] if self.table.layout else []
        for start in range(0, len(new), self.block):
            part = new[start : start + self.block]
            self.table.add(part, vars(self._fresh(part)))

    def _fresh(self, workers: Sequence[WorkerId]) -> Particles:
        """Return the rows of some workers before their first round."""
        initial = self._initial if len(self._initial) == 1 else self._initial[self._rows_of(workers)]
        return initial_particles(initial, len(workers), self.workers.codec)

    def _before(self, workers: Sequence[WorkerId]) -> Particles:
        """Return the rows at the start of a round: kept arrays, and all others as before the first round."""
        names = [each.name for each in fields(Particles)]
        fresh = {} if len(self.table.layout) == len(names) else vars(self._fresh(workers))
        return Particles(
            **{name: self.table.take(name, workers) if name in self.table.layout else fresh[name] for name in names}
        )

    def _store(self, workers: Sequence[WorkerId], before: Particles, after: Particles) -> None:
        """Store the rows of a block: kept arrays in the table, the others until the next round."""
        rest = {}
        for name, given in vars(before).items():
            result = getattr(after, name)
            if not result.size:  # without a codec there are no packs
                result = given
            if name not in self.table.layout:
                rest[name] = result
            elif result is not given:
                self.table.put(name, workers, result)
        if rest:
            self._moved |= {worker: (rest, row) for row, worker in enumerate(workers)}

    def claims(self, order: Order) -> dict[WorkerId, Claim]:
        """Return what honest participants claim after an order: F^p as a float32, with a digest of their model.

        Nothing for "average", and no digest where the server does not ask for one.
        """
        if order.task == "average":
            return {}
        claims = {}
        for worker in order.participants:
            score = float(np.float32(self._row("personal_score", worker)[0]))
            claims[worker] = Claim(score, commitment_of(self._model(worker)) if self._commits else b"")
        return claims

    def models_and_scores(self, workers: Sequence[WorkerId]) -> tuple[Floats, Doubles]:
        """See `SwarmWithAttackers.models_and_scores`."""
        rows = self.take(workers)
        return self._method.upload(rows), rows.personal_score

    def contents(self, workers: Sequence[WorkerId]) -> list[Upload]:
        """See `SwarmWithAttackers.contents`."""
        found = []
        for worker in workers:
            pack, version = self._row("packs", worker)[0], int(self._row("versions", worker)[0])
            found.append(content_of(self.workers.codec, self._model(worker), pack, version))
        return found

    def personal(self, workers: Sequence[WorkerId]) -> dict[WorkerId, Floats]:
        """See `SwarmWithAttackers.personal`."""
        there = [worker for worker in workers if worker in self.table]
        rows = self._method.personal(self.take(there)) if there else None
        return {} if rows is None else dict(zip(there, rows, strict=True))

    @property
    def kept(self) -> Mapping[str, Any]:
        """See `SwarmWithAttackers.kept`."""
        table, count = self.table, len(self.table)
        arrays = {
            name: InBlocks((count, *shape), kind, partial(table.blocks, name))
            for name, (shape, kind) in table.layout.items()
        }
        return {"workers": table.workers, **arrays}

    def restore(self, rows: KeptRows | None, round_number: int, received: Floats) -> None:
        """See `SwarmWithAttackers.restore`. Arrays that are not kept are taken for those of the last round."""
        del round_number
        self._received = received
        if rows is None:
            return
        self.table = WorkerTable(self.table.layout, len(self.workers.names))
        for start in range(0, len(rows.workers), self.block):
            part = slice(start, start + self.block)
            self.table.add(rows.workers[part].tolist(), {name: rows.arrays[name][part] for name in self.table.layout})
        rest = {name: array for name, array in rows.arrays.items() if name not in self.table.layout}
        self._moved = {worker: (rest, row) for row, worker in enumerate(rows.workers.tolist())} if rest else {}

    def coefficients(self, workers: Indices, order: Order) -> Coefficients:
        """Return c1 and c2 as these workers draw them in the round of an order."""
        return self.workers.at(workers, order.round, order.inertia, order.learning_rate).coefficients()

    def _model(self, worker: WorkerId) -> Floats:
        return np.asarray(self.models_and_scores([worker])[0][0])

    def take(self, workers: Sequence[WorkerId]) -> Particles:
        """Return the rows of some workers: kept arrays, and the others as after the last round."""
        if not workers:
            return self._fresh(workers)
        rows: dict[str, Any] = {}
        for name in (each.name for each in fields(Particles)):
            found = [self._row(name, worker) for worker in workers]
            rows[name] = found[0] if len(found) == 1 else np.concatenate(found)
        return Particles(**rows)

    @property
    def particles(self) -> Particles:
        """The rows of all workers; see `take`."""
        return self.take(self.workers.names)

    def _row(self, name: str, worker: WorkerId) -> Any:  # noqa: ANN401 - an array of any type
        """Return one row of an array, (1, ...), without a copy."""
        if name in self.table.layout:
            if worker in self.table:
                return self.table.take(name, [worker])
        elif worker in self._moved:
            block, row = self._moved[worker]
            if name in block:
                return block[name][row : row + 1]
        return getattr(self._fresh([worker]), name)

    def _rows_of(self, workers: Sequence[WorkerId]) -> Indices:
        return np.asarray(workers, np.int32) - np.int32(self._first)
