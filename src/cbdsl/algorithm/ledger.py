"""Every message of a run and its payload, by kind and direction.

Counts payload bytes only: scores as float32, round numbers as 32-bit integers, models as they are sent. What a
transport adds (topics, headers, TLS) is its own affair. A message to many workers counts once for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["order", "broadcast", "score", "invitation", "upload"]
Direction = Literal["up", "down"]

NUMBER_BYTES = 4  # one float32 or one 32-bit integer

_DIRECTIONS: dict[Kind, Direction] = {
    "order": "down",  # start a round: its number, c0 and alpha
    "broadcast": "down",  # a model to the workers, only when it changed
    "score": "up",  # F^p, one number
    "invitation": "down",  # to one worker: upload your model
    "upload": "up",  # a model, believed or not
}


@dataclass(frozen=True)
class Traffic:
    """So many messages of one kind with so many payload bytes in all."""

    kind: Kind
    messages: int
    payload: int

    @property
    def direction(self) -> Direction:
        """Up: worker to server. Down: server to worker."""
        return _DIRECTIONS[self.kind]


def order_traffic(workers: int) -> Traffic:
    """The start of a round: its number, the inertia and the learning rate."""
    return Traffic("order", workers, workers * 3 * NUMBER_BYTES)


def claim_traffic(workers: int, commitments: int = 0) -> Traffic:
    """One number from each worker, and so many bytes of commitments in all."""
    return Traffic("score", workers, workers * NUMBER_BYTES + commitments)


def invitation_traffic(workers: int) -> Traffic:
    """The round number, to each invited worker."""
    return Traffic("invitation", workers, workers * NUMBER_BYTES)


def upload_traffic(models: int, payload: int) -> Traffic:
    """Models on their way up, so many bytes in all."""
    return Traffic("upload", models, payload)


def broadcast_traffic(workers: int, payload: int) -> Traffic:
    """w^g on its way down to so many workers, so many bytes in all."""
    return Traffic("broadcast", workers, payload)


def payload(traffic: Iterable[Traffic], direction: Direction) -> int:
    """Payload bytes in one direction."""
    return sum(item.payload for item in traffic if item.direction == direction)


def by_kind(traffic: Iterable[Traffic]) -> dict[Kind, Traffic]:
    """Add up messages of the same kind."""
    total: dict[Kind, Traffic] = {}
    for item in traffic:
        before = total.get(item.kind, Traffic(item.kind, 0, 0))
        total[item.kind] = Traffic(item.kind, before.messages + item.messages, before.payload + item.payload)
    return total
