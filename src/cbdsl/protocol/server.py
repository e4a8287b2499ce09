"""The parameter server: one round of Algorithm 1, over any swarm that can report and upload.

The same function drives the simulator and a network. It knows no transport, no dataset and no model: weights are flat
arrays, and workers are numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from cbdsl.arrays import Floats
from cbdsl.protocol import ledger
from cbdsl.protocol.ledger import Traffic
from cbdsl.protocol.selection import NO_BACK_OFF, BackOff, Policy, queue, soup
from cbdsl.protocol.verification import COMMITMENT_BYTES, Verifier, commitment_of, objection

PAPER = Policy()
NO_GAIN = "it does not beat the global best"
NOT_USED = "it is not in the soup"
WORSENS = "the global model would get worse on the private hold-out"
COPIED = "hardly more than a copy of the global model or of another upload"

WorkerId = int
Outcome = Literal["accepted", "refuted", "declined", "silent"]  # declined: true, but of no use; nobody is banned for it


@dataclass(frozen=True, eq=False)
class Order:
    """What the server says at the start of a round."""

    round: int
    task: Literal["swarm", "average"]  # move and claim a score, or train from the model given and claim nothing
    participants: tuple[WorkerId, ...]
    inertia: float  # c0
    learning_rate: float  # alpha
    global_best: Floats | None  # w^g, only when it changed since the last order


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

    def upload(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, Floats]:
        """Fetch the models of the workers named; one that stays silent is missing from the answer."""
        ...


@dataclass(frozen=True)
class Verdict:
    """What became of one invitation."""

    worker: WorkerId
    outcome: Outcome
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
    back_offs: Mapping[WorkerId, BackOff] = field(default_factory=dict)  # who was invited and did not deliver
    last_uploaded: Mapping[WorkerId, float] = field(default_factory=dict)  # the claim behind each worker's last upload


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


def play_round(
    state: ServerState, order: Order, swarm: Swarm, verifier: Verifier, policy: Policy = PAPER
) -> tuple[ServerState, RoundLog]:
    """Algorithm 1, lines 8 to 12: compare the scores, invite the best, verify, ban, go on to the next best.

    With a soup (K > 1) the K best are invited whether they beat F^g or not: their average may beat it all the same.
    """
    answers = swarm.report(order)
    claims = {worker: answers[worker] for worker in order.participants if worker in answers}
    set_aside = {worker: reason for worker, claim in claims.items() if (reason := _objection(claim, policy))}
    scores = {worker: claim.score for worker, claim in claims.items() if worker not in set_aside}

    verdicts: list[Verdict] = []
    believed: dict[WorkerId, Floats] = {}
    for claimed, worker in queue(scores, state.back_offs, state.last_uploaded, order.round):
        if len(believed) == policy.soup or (policy.invitations and len(verdicts) == policy.invitations):
            break
        if policy.soup == 1 and not claimed < state.global_score:  # if nobody beats F^g, w^g is kept (line 10)
            continue
        model = swarm.upload([worker]).get(worker)
        verdicts.append(_judge(worker, claims[worker], model, state, verifier, policy, list(believed.values())))
        if model is not None and verdicts[-1].outcome == "accepted":
            believed[worker] = model

    after, final = _combine(_remember(state, verdicts), verdicts, believed, verifier, policy)
    traffic = (
        *start_traffic(order, len(state.global_best)),
        ledger.scores(len(claims), sum(len(claim.commitment) for claim in claims.values())),
        ledger.invitations(len(final)),
        ledger.uploads(sum(verdict.outcome != "silent" for verdict in final), len(state.global_best)),
    )
    return after, RoundLog(order.round, claims, set_aside, final, traffic)


def _judge(
    worker: WorkerId,
    claim: Claim,
    model: Floats | None,
    state: ServerState,
    verifier: Verifier,
    policy: Policy,
    others: Sequence[Floats],
) -> Verdict:
    """What an invitation led to; "accepted" means believed so far, as the others of this round were."""
    if model is None:
        return Verdict(worker, "silent", claim.score)
    if policy.commitment and commitment_of(model) != claim.commitment:
        return Verdict(worker, "refuted", claim.score, reason="not the model that was promised")
    finding = verifier.check(claim.score, model, state.round + 1)
    if not finding.believed:
        return Verdict(worker, "refuted", claim.score, finding.measured, finding.reason)
    if policy.soup == 1 and verifier.worsens and verifier.worsens(state.global_best, model, state.round + 1):
        return Verdict(worker, "declined", claim.score, finding.measured, WORSENS)
    if policy.soup > 1 and verifier.copies and verifier.copies(state.global_best, others, model, state.round + 1):
        return Verdict(worker, "declined", claim.score, finding.measured, COPIED)
    return Verdict(worker, "accepted", claim.score, finding.measured)


def _remember(state: ServerState, verdicts: Sequence[Verdict]) -> ServerState:
    """The server one round later, before w^g: who was refuted is banned, who was silent or sent a copy has to wait."""
    back_offs, last_uploaded = dict(state.back_offs), dict(state.last_uploaded)
    for verdict in verdicts:
        if verdict.outcome == "silent" or verdict.reason == COPIED:
            back_offs[verdict.worker] = back_offs.get(verdict.worker, NO_BACK_OFF).again(state.round + 1)
        else:
            back_offs.pop(verdict.worker, None)
        if verdict.outcome != "silent":
            last_uploaded[verdict.worker] = verdict.claimed or 0.0
    refuted = {verdict.worker for verdict in verdicts if verdict.outcome == "refuted"}
    return replace(
        state,
        round=state.round + 1,
        changed=False,
        banned=state.banned | refuted,
        back_offs=back_offs,
        last_uploaded=last_uploaded,
    )


def _combine(
    state: ServerState,
    verdicts: Sequence[Verdict],
    believed: Mapping[WorkerId, Floats],
    verifier: Verifier,
    policy: Policy,
) -> tuple[ServerState, tuple[Verdict, ...]]:
    """Eq. (7), or a soup of what was believed: the new w^g, if there is one, and the verdicts that go with it."""
    if not believed:
        return state, tuple(verdicts)
    made: tuple[Floats, float] | None
    if policy.soup > 1 and verifier.score is not None:
        made, reasons = _brew(state, believed, verifier, verifier.score)
    else:  # F^g is the claim, so that its holder does not beat it by rounding
        worker, model = next(iter(believed.items()))
        claimed = next(verdict.claimed for verdict in verdicts if verdict.worker == worker) or 0.0
        made, reasons = (model, claimed), dict.fromkeys(set(believed) - {worker}, NOT_USED)
    if made is not None:
        state = replace(state, global_best=made[0].copy(), global_score=made[1], changed=True)
    final = [
        replace(one, outcome="declined", reason=reasons[one.worker]) if one.worker in reasons else one
        for one in verdicts
    ]
    return state, tuple(final)


def _brew(
    state: ServerState,
    believed: Mapping[WorkerId, Floats],
    verifier: Verifier,
    score: Callable[[Floats], float],
) -> tuple[tuple[Floats, float] | None, dict[WorkerId, str]]:
    """A soup that beats w^g, with its score, if there is one; and why models are not in it.

    An average that would make w^g worse on the private hold-out is tried again without the model that does worst there.
    """
    left = dict(believed)
    reasons: dict[WorkerId, str] = {}
    while left:
        workers, models = list(left), list(left.values())
        average, found, used = soup(models, score)
        if not found < state.global_score:  # w^g costs no upload: what does not beat it may still improve it
            average, found, used = soup([state.global_best, *models], score)
            used = [index - 1 for index in used[1:]]
        if not (used and found < state.global_score):
            return None, reasons | dict.fromkeys(workers, NO_GAIN)
        if verifier.worsens is None or not verifier.worsens(state.global_best, average, state.round):
            return (average, found), reasons | dict.fromkeys(set(workers) - {workers[one] for one in used}, NOT_USED)
        worst = workers[0]
        for worker in workers[1:]:
            worst = worker if verifier.worsens(left[worst], left[worker], state.round) else worst
        reasons[worst] = WORSENS
        del left[worst]
    return None, reasons


def _objection(claim: Claim, policy: Policy) -> str:
    missing = policy.commitment and len(claim.commitment) != COMMITMENT_BYTES
    return objection(claim.score) or ("no commitment" if missing else "")


def start_traffic(order: Order, size: int) -> tuple[Traffic, Traffic]:
    """The messages of an order itself: its numbers to everybody, and w^g if it carries it."""
    count = len(order.participants)
    return ledger.orders(count), ledger.broadcasts(count if order.global_best is not None else 0, size)


def fresh_state(initial: Floats, score: float = math.inf) -> ServerState:
    """The server before round 1: it knows an initial model that nobody has been sent yet."""
    return ServerState(round=0, global_best=initial, global_score=score, changed=True)
