"""Participants that drop out of a round, for simulations: after the order, or after their claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cbdsl.algorithm.messages import Claim, Order, Swarm, Upload, WorkerId
from cbdsl.rng import stream
from cbdsl.spec import DropoutSpec


class SwarmWithDropOuts:
    """A swarm in which some participants drop out until the next round.

    One that drops out after the order has received w^g and does nothing. One that drops out after its claim has moved,
    but its upload is missing: as on a network it is silent, and is skipped for some rounds. Drop-outs depend only on
    the seed and the round, so they are the same on any machines and after a resume.
    """

    def __init__(self, swarm: Swarm, dropout: DropoutSpec, seed: int) -> None:
        self._swarm, self._dropout, self._seed = swarm, dropout, seed
        self._gone: frozenset[WorkerId] = frozenset()

    def report(self, order: Order) -> Mapping[WorkerId, Claim]:
        """See `Swarm.report`."""
        draws = stream(self._seed, "dropout", order.round).random((2, len(order.participants)))
        here, answering = draws[0] >= self._dropout.after_order, draws[1] >= self._dropout.after_claim
        staying = tuple(worker for worker, stays in zip(order.participants, here, strict=True) if stays)
        reached = [worker for worker, stays in zip(order.participants, here & answering, strict=True) if stays]
        self._gone = frozenset(order.participants).difference(reached)
        return self._swarm.report(replace(order, participants=staying))

    def upload(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, Upload]:
        """See `Swarm.upload`."""
        reached = [worker for worker in workers if worker not in self._gone]
        return self._swarm.upload(reached) if reached else {}


def with_drop_outs(swarm: Swarm, dropout: DropoutSpec, seed: int) -> Swarm:
    """Return a swarm whose participants drop out as a spec demands; the swarm itself if none do."""
    return SwarmWithDropOuts(swarm, dropout, seed) if dropout != DropoutSpec() else swarm
