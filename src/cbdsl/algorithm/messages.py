"""What server and swarm say to each other, and what a round leaves behind. Plain frozen values, no behaviour."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from cbdsl.algorithm.ledger import Traffic
from cbdsl.arrays import Floats

WorkerId = int
Outcome = Literal["accepted", "refuted", "declined", "silent"]
"""Declined: not shown to be false, but of no use, or no model where everybody uploads; nobody is banned for it."""

Upload = Floats | bytes  # the numbers, or where there is a codec what it made of them
COMMITMENT_BYTES = 16


@dataclass(frozen=True, eq=False)
class Order:
    """What the server says at the start of a round."""

    round: int
    task: Literal["swarm", "average"]  # move and claim a score, or train from the model given and claim nothing
    participants: tuple[WorkerId, ...]
    inertia: float  # c0
    learning_rate: float  # alpha
    global_best: Floats | None  # w^g (with what else the method sends), only if a participant does not have it yet
    receivers: int = 0  # how many participants do not have it yet
    payload: int = 0  # bytes in all that take it to them
    version: int = 0  # of w^g
    updates: tuple[bytes, ...] = ()  # what leads to it from the version before them all, where differences are sent
    members: int = 0  # how many workers the swarm has; 0: as many as the spec says


@dataclass(frozen=True)
class Claim:
    """What a worker sends in a round."""

    score: float  # F^p, the one number of the paper
    commitment: bytes = b""  # a digest of the model behind it, where the server asks for one


class Swarm(Protocol):
    """The workers, wherever they live."""

    def report(self, order: Order) -> Mapping[WorkerId, Claim]:
        """Carry the order out; return one claim from each worker that answered (none for "average")."""
        ...

    def upload(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, Upload]:
        """Fetch the models of the workers named; one that stays silent is missing from the answer."""
        ...


@dataclass(frozen=True)
class Verdict:
    """What became of one invitation, or of one upload where everybody uploads."""

    worker: WorkerId
    outcome: Outcome
    claimed: float | None = None
    measured: float | None = None
    reason: str = ""
    payload: int = 0  # bytes of the upload


@dataclass(frozen=True)
class RoundLog:
    """Everything that happened in a round; metrics, reports and theory derive from it."""

    round: int
    claims: Mapping[WorkerId, Claim]
    set_aside: Mapping[WorkerId, str]  # claims that could not be true, and why
    verdicts: tuple[Verdict, ...]
    traffic: tuple[Traffic, ...]

    def outcome(self, outcome: str) -> list[WorkerId]:
        """The workers with this outcome, in the order in which they were invited."""
        return [verdict.worker for verdict in self.verdicts if verdict.outcome == outcome]


def commitment_of(weights: Floats) -> bytes:
    """A digest of a model, to be sent with its score: whoever sent it can upload no other model afterwards."""
    return hashlib.blake2b(weights.astype("<f4").tobytes(), digest_size=COMMITMENT_BYTES).digest()


@dataclass(frozen=True)
class BackOff:
    """A worker that was invited in vain: it did not deliver, or nothing but a copy of w^g."""

    times: int  # in a row
    until: int  # the last round in which it is passed over

    def again(self, round_number: int) -> BackOff:
        """One more time: it is passed over for 2, 4, 8 ... rounds."""
        return BackOff(self.times + 1, round_number + 2 ** (self.times + 1))


NO_BACK_OFF = BackOff(0, 0)


@dataclass(frozen=True, eq=False)
class ServerState:
    """The server after a round."""

    round: int  # t, the last round played
    global_best: Floats  # w^g, (D,)
    global_score: float  # F^g; +inf while nothing was believed
    version: int = 0  # of w^g: how many there were
    told: Mapping[WorkerId, int] = field(default_factory=dict)  # the version that each worker has
    banned: frozenset[WorkerId] = frozenset()
    back_offs: Mapping[WorkerId, BackOff] = field(default_factory=dict)  # who was invited in vain
    last_uploaded: Mapping[WorkerId, float] = field(default_factory=dict)  # the claim behind each worker's last upload
    memory: Floats = field(default_factory=lambda: np.zeros(0, np.float32))  # the method's own, such as momentum
    references: tuple[Floats, ...] = ()  # the last versions of w^g, the present one last; only where a codec needs them
    updates: tuple[bytes, ...] = ()  # what led from the last version that was put out whole to this one
