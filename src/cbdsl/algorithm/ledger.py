"""Counts the messages of a run and their payload, by kind and direction.

Payload bytes only: scores as float32, round numbers as 32-bit integers, models as they are sent; not what a transport
adds (topics, headers, TLS). A message to many workers counts once per worker.
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
    """Messages of one kind: their number, and their payload bytes together."""

    kind: Kind
    messages: int
    payload: int

    @property
    def direction(self) -> Direction:
        """Up: worker to server. Down: server to worker."""
        return _DIRECTIONS[self.kind]


def order_traffic(workers: int) -> Traffic:
    """Count orders: the round's number, the inertia and the learning rate for each worker."""
    return Traffic("order", workers, workers * 3 * NUMBER_BYTES)


def claim_traffic(workers: int, commitments: int = 0) -> Traffic:
    """Count claims: one number per worker. commitments: bytes of all commitments."""
    return Traffic("score", workers, workers * NUMBER_BYTES + commitments)


def invitation_traffic(workers: int) -> Traffic:
    """Count invitations: the round's number for each invited worker."""
    return Traffic("invitation", workers, workers * NUMBER_BYTES)


def upload_traffic(models: int, payload: int) -> Traffic:
    """Count uploads. payload: bytes of all models."""
    return Traffic("upload", models, payload)


def broadcast_traffic(workers: int, payload: int) -> Traffic:
    """Count broadcasts of w^g. payload: bytes to all workers."""
    return Traffic("broadcast", workers, payload)


def payload(traffic: Iterable[Traffic], direction: Direction) -> int:
    """Return the payload bytes in one direction."""
    return sum(item.payload for item in traffic if item.direction == direction)


def by_kind(traffic: Iterable[Traffic]) -> dict[Kind, Traffic]:
    """Sum messages of the same kind."""
    total: dict[Kind, Traffic] = {}
    for item in traffic:
        before = total.get(item.kind, Traffic(item.kind, 0, 0))
        total[item.kind] = Traffic(item.kind, before.messages + item.messages, before.payload + item.payload)
    return total
