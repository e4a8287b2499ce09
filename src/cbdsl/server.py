"""The parameter server: one round of Algorithm 1, over any swarm that can report and upload.

The same function drives the simulator and a network. It knows no transport, no dataset and no model: weights are flat
arrays, and workers are numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from cbdsl import ledger
from cbdsl.engines.base import Floats
from cbdsl.ledger import Traffic
from cbdsl.verification import Verifier, objection

WorkerId = int


@dataclass(frozen=True, eq=False)
class Order:
    """What the server says at the start of a round."""

    round: int
    task: Literal["swarm", "average"]  # move and claim a score, or train from the model given and claim nothing
    participants: tuple[WorkerId, ...]
    inertia: float  # c0
    learning_rate: float  # alpha
    global_best: Floats | None  # w^g, only when it changed since the last order


class Swarm(Protocol):
    """The workers, wherever they live."""

    def report(self, order: Order) -> Mapping[WorkerId, float]:
        """Carry the order out; return one claimed score from each worker that answered (none for "average")."""
        ...

    def upload(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, Floats]:
        """Fetch the models of the workers named; one that stays silent is missing from the answer."""
        ...


@dataclass(frozen=True)
class Verdict:
    """What became of one invitation."""

    worker: WorkerId
    outcome: Literal["accepted", "refuted", "silent"]
    claimed: float | None = None
    measured: float | None = None
    reason: str = ""


@dataclass(frozen=True, eq=False)
class ServerState:
    """What the server knows between rounds."""

    round: int  # t, the last round played
    global_best: Floats  # w^g, (D,)
    global_score: float  # F^g; +inf while nothing was believed
    changed: bool  # whether the workers still have to be told w^g
    banned: frozenset[WorkerId] = frozenset()


@dataclass(frozen=True)
class RoundLog:
    """Everything that happened in a round; metrics, reports and theory derive from it."""

    round: int
    claims: Mapping[WorkerId, float]
    set_aside: Mapping[WorkerId, str]  # claims that could not be true, and why
    verdicts: tuple[Verdict, ...]
    traffic: tuple[Traffic, ...]

    def outcome(self, outcome: str) -> list[WorkerId]:
        """The workers with this outcome, in the order in which they were invited."""
        return [verdict.worker for verdict in self.verdicts if verdict.outcome == outcome]


def next_order(
    state: ServerState,
    task: Literal["swarm", "average"],
    workers: Sequence[WorkerId],
    inertia: float,
    learning_rate: float,
) -> Order:
    """The order that starts the next round: to everybody who is not banned, with w^g only if it is news."""
    participants = tuple(worker for worker in workers if worker not in state.banned)
    news = state.global_best if state.changed else None
    return Order(state.round + 1, task, participants, inertia, learning_rate, news)


def play_round(state: ServerState, order: Order, swarm: Swarm, verify: Verifier) -> tuple[ServerState, RoundLog]:
    """Algorithm 1, lines 8 to 12: compare the scores, invite the best, verify, ban, go on to the next best."""
    answers = swarm.report(order)
    claims = {worker: answers[worker] for worker in order.participants if worker in answers}
    set_aside = {worker: reason for worker, claim in claims.items() if (reason := objection(claim))}
    by_score = sorted((claim, worker) for worker, claim in claims.items() if worker not in set_aside)

    after = replace(state, round=order.round, changed=False)
    verdicts: list[Verdict] = []
    for claimed, worker in by_score:
        if not claimed < state.global_score:  # nobody left beats F^g: keep w^g (line 10)
            break
        model = swarm.upload([worker]).get(worker)
        if model is None:
            verdicts.append(Verdict(worker, "silent", claimed))
            continue
        finding = verify(claimed, model)
        if finding.believed:  # Eq. (7); F^g is the claim, so that its holder does not beat it by rounding
            verdicts.append(Verdict(worker, "accepted", claimed, finding.measured))
            after = replace(after, global_best=model.copy(), global_score=claimed, changed=True)
            break
        verdicts.append(Verdict(worker, "refuted", claimed, finding.measured, finding.reason))
        after = replace(after, banned=after.banned | {worker})

    traffic = (
        *start_traffic(order, len(state.global_best)),
        ledger.scores(len(claims)),
        ledger.invitations(len(verdicts)),
        ledger.uploads(sum(verdict.outcome != "silent" for verdict in verdicts), len(state.global_best)),
    )
    return after, RoundLog(order.round, claims, set_aside, tuple(verdicts), traffic)


def start_traffic(order: Order, size: int) -> tuple[Traffic, Traffic]:
    """The messages of an order itself: its numbers to everybody, and w^g if it carries it."""
    count = len(order.participants)
    return ledger.orders(count), ledger.broadcasts(count if order.global_best is not None else 0, size)


def fresh_state(initial: Floats, score: float = math.inf) -> ServerState:
    """The server before round 1: it knows an initial model that nobody has been sent yet."""
    return ServerState(round=0, global_best=initial, global_score=score, changed=True)
