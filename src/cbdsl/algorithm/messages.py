"""Messages between server and swarm, the log of a round, and the server's state: frozen values without behaviour."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from cbdsl.algorithm.ledger import Traffic
from cbdsl.arrays import Floats, NamedArrays

WorkerId = int
Outcome = Literal["accepted", "refuted", "declined", "silent"]
"""Declined: not shown to be false but of no use, or not a model where everybody uploads; no worker is banned for it."""

Upload = Floats | bytes  # a model, or what a codec made of it
COMMITMENT_BYTES = 16


@dataclass(frozen=True, eq=False)
class Order:
    """What the server sends at the start of a round.

    >>> order = Order(round=1, task="swarm", participants=(0, 1), inertia=0.5, learning_rate=0.01, global_best=None)
    >>> order.participants
    (0, 1)
    """

    round: int
    task: Literal["swarm", "average"]  # move and claim a score, or train from the model given and claim nothing
    participants: tuple[WorkerId, ...]
    inertia: float  # c0
    learning_rate: float  # alpha
    global_best: Floats | None  # w^g and what else the method sends, (V D,); None if all participants have it
    receivers: int = 0  # how many participants do not have it yet
    payload: int = 0  # bytes of w^g to all of them
    version: int = 0  # of w^g
    updates: tuple[bytes, ...] = ()  # the latest updates of w^g, the last of which leads to it
    members: int = 0  # how many workers the swarm has; 0: as many as the spec says


@dataclass(frozen=True)
class Claim:
    """What a worker sends in a round.

    >>> Claim(0.25).score
    0.25
    """

    score: float  # F^p, the one number of the paper
    commitment: bytes = b""  # a digest of the model, where the server asks for one


class Swarm(Protocol):
    """The workers, wherever they run. Any object with these two methods is a swarm.

    >>> class Silent:
    ...     def report(self, order): return {}
    ...     def upload(self, workers): return {}
    >>> Silent().upload([0])
    {}
    """

    def report(self, order: Order) -> Mapping[WorkerId, Claim]:
        """Carry an order out; return the claim of each worker that answered, and nothing for "average"."""
        ...

    def upload(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, Upload]:
        """Return the models of some workers; a worker that stays silent is missing."""
        ...


@runtime_checkable
class SwarmWithAbsentees(Swarm, Protocol):
    """A swarm that finds out in a round which participants are not there at all, and cost no messages."""

    def absentees(self) -> Collection[WorkerId]:
        """Return the participants of the current round that neither answered nor are connected."""
        ...


@dataclass(frozen=True)
class Verdict:
    """The outcome of one invitation, or of one upload where everybody uploads."""

    worker: WorkerId
    outcome: Outcome
    claimed: float | None = None
    measured: float | None = None
    reason: str = ""
    payload: int = 0  # bytes of the upload


@dataclass(frozen=True)
class RoundLog:
    """Everything that happened in a round."""

    round: int
    claims: Mapping[WorkerId, Claim]
    set_aside: Mapping[WorkerId, str]  # claims that could not be true, and why
    verdicts: tuple[Verdict, ...]
    traffic: tuple[Traffic, ...]
    absent: int = 0  # participants that were not there, see `SwarmWithAbsentees`

    def outcome(self, outcome: str) -> list[WorkerId]:
        """Return the workers with an outcome, in the order of invitation."""
        return [verdict.worker for verdict in self.verdicts if verdict.outcome == outcome]


def commitment_of(weights: Floats) -> bytes:
    """Return a digest of a model. A worker that sends it with its score can upload no other model afterwards."""
    return hashlib.blake2b(weights.astype("<f4").tobytes(), digest_size=COMMITMENT_BYTES).digest()


@dataclass(frozen=True)
class BackOff:
    """How often in a row a worker was silent, suspicious or stale, and until which round it is not invited."""

    times: int  # in a row
    until: int  # the last round in which it is passed over

    def again(self, round_number: int) -> BackOff:
        """Count one more time: the worker is passed over for 2, 4, 8 ... rounds."""
        return BackOff(self.times + 1, round_number + 2 ** (self.times + 1))


NO_BACK_OFF = BackOff(0, 0)


@dataclass(frozen=True, eq=False)
class ServerState:
    """The server after a round."""

    round: int  # t, the last round played
    global_best: Floats  # w^g, (D,)
    global_score: float  # F^g; +inf until an upload was believed
    version: int = 0  # of w^g: how many there have been
    told: Mapping[WorkerId, int] = field(default_factory=dict)  # the version that each worker has
    banned: frozenset[WorkerId] = frozenset()
    back_offs: Mapping[WorkerId, BackOff] = field(default_factory=dict)  # workers invited in vain
    last_uploaded: Mapping[WorkerId, float] = field(default_factory=dict)  # the claim behind each worker's last upload
    memory: Floats = field(default_factory=lambda: np.zeros(0, np.float32))  # the method's own, such as momentum
    rule_memory: NamedArrays = field(default_factory=dict)  # the aggregator's own
    references: tuple[Floats, ...] = ()  # the last versions of w^g, the current one last; only where a codec needs them
    updates: tuple[bytes, ...] = ()  # the updates that led to the last versions
