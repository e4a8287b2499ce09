"""A swarm whose workers are rows of arrays, wherever those are: attackers speak in their places, rows can be kept.

Plays the workers' side of the protocol only. It never judges a claim and never sees the server's state. How honest
workers move is `rows`' affair; where the rows live is that of the classes which extend this one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cbdsl.arrays import Doubles, Floats
from cbdsl.byzantine.adversary import Adversary
from cbdsl.byzantine.attack import Situation
from cbdsl.codecs.base import Codec
from cbdsl.protocol.messages import Claim, Order, Upload, WorkerId, commitment_of
from cbdsl.workers.local import made_content
from cbdsl.workers.swarm import Particles


class StackedSwarm(ABC):
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
        return made_content(self._codec, model, self._received, self._order.version)

    def _situation(self, worker: WorkerId) -> Situation:
        """What an attacker knows; the honest models of those who take part only if its attack needs them."""
        assert self._order is not None
        honest = scores = None
        if self._adversary.omniscient:
            others = [one for one in self._order.participants if one not in self._adversary.workers]
            honest, scores = self.models(others), self.scores(others)
        score, model = float(self.scores([worker])[0]), self.models([worker])[0]
        return self._adversary.situation(worker, self._order.round, model, score, self._received, honest, scores)
