"""The swarm that lives in memory: all workers stacked in arrays of this process, attackers among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cbdsl.arrays import Doubles, Floats, Indices
from cbdsl.byzantine.adversary import Adversary
from cbdsl.methods.base import Method
from cbdsl.protocol.messages import Claim, Order, Upload, WorkerId
from cbdsl.swarms.rows import Rows
from cbdsl.swarms.stacked import StackedSwarm
from cbdsl.workers.local import LocalWorkers
from cbdsl.workers.swarm import Coefficients, Particles


class MemorySwarm(StackedSwarm):
    """U workers in this process."""

    def __init__(
        self, method: Method, workers: LocalWorkers, initial: Floats, adversary: Adversary, commits: bool = False
    ) -> None:
        """Initial weights: (1, D) for all or (U, D). commits: whether claims come with a digest of their model."""
        super().__init__(adversary, workers.codec, initial[0], commits)
        self.workers, self.rows = workers, Rows(method, workers, initial, commits)

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
