"""One round of Algorithm 1, over any swarm that can report and upload.

The same function drives the simulator and a network. It knows no transport, no dataset and no model: weights are flat
arrays, and workers are numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cbdsl.arrays import Floats
from cbdsl.errors import UserError
from cbdsl.protocol import ledger
from cbdsl.protocol.ledger import Traffic
from cbdsl.protocol.messages import COMMITMENT_BYTES, Claim, Order, RoundLog, Swarm, Verdict, WorkerId, commitment_of
from cbdsl.protocol.selection import COPIED, Believed, Best, Combined, Selection, View, waiting_list
from cbdsl.protocol.state import NO_BACK_OFF, ServerState
from cbdsl.protocol.verification import Verifier, objection


@dataclass(frozen=True, eq=False)
class Policy:
    """How a server chooses, and how far it goes in one round."""

    selection: Selection = field(default_factory=Best)
    invitations: int = 0  # at most so many; 0: no limit
    commitment: bool = False  # whether a claim without a digest of its model is set aside


PAPER = Policy()


def play_round(
    state: ServerState, order: Order, swarm: Swarm, verifier: Verifier, policy: Policy = PAPER
) -> tuple[ServerState, RoundLog]:
    """Algorithm 1, lines 8 to 12: compare the scores, invite the best, verify, ban, go on to the next best."""
    answers = swarm.report(order)
    claims = {worker: answers[worker] for worker in order.participants if worker in answers}
    set_aside = {worker: reason for worker, claim in claims.items() if (reason := _objection(claim, policy))}
    scores = {worker: claim.score for worker, claim in claims.items() if worker not in set_aside}

    view = View(state, order.round, verifier)
    waiting = waiting_list(scores, state.back_offs, state.last_uploaded, order.round)
    verdicts: list[Verdict] = []
    believed: list[Believed] = []
    while not policy.invitations or len(verdicts) < policy.invitations:
        worker = policy.selection.invite(waiting, believed, view)
        if worker is None:
            break
        chosen = [one for one in waiting if one.worker == worker]
        if not chosen:
            raise UserError(_nonsense(policy, f"invites worker {worker!r}, who is not waiting"))
        waiting.remove(chosen[0])
        model = swarm.upload([worker]).get(worker)
        verdicts.append(_judge(worker, claims[worker], model, believed, view, policy))
        if model is not None and verdicts[-1].outcome == "accepted":
            believed.append(Believed(worker, claims[worker].score, model))

    combined = policy.selection.combine(believed, view) if believed else Combined()
    final = tuple(
        replace(one, outcome="declined", reason=combined.declined[one.worker])
        if one.worker in combined.declined and one.outcome == "accepted"
        else one
        for one in verdicts
    )
    after = _adopt(_remember(state, order, verdicts), combined, policy)
    traffic = (
        *start_traffic(order),
        ledger.scores(len(claims), sum(len(claim.commitment) for claim in claims.values())),
        ledger.invitations(len(final)),
        ledger.uploads(sum(verdict.outcome != "silent" for verdict in final), len(state.global_best)),
    )
    return after, RoundLog(order.round, claims, set_aside, final, traffic)


def _judge(
    worker: WorkerId, claim: Claim, model: Floats | None, believed: Sequence[Believed], view: View, policy: Policy
) -> Verdict:
    """What an invitation led to; "accepted" means believed so far, as the others of this round were."""
    if model is None:
        return Verdict(worker, "silent", claim.score)
    if policy.commitment and commitment_of(model) != claim.commitment:
        return Verdict(worker, "refuted", claim.score, reason="not the model that was promised")
    finding = view.verifier.check(claim.score, model, view.round)
    if not finding.believed:
        return Verdict(worker, "refuted", claim.score, finding.measured, finding.reason)
    useless = policy.selection.objection(Believed(worker, claim.score, model), believed, view)
    return Verdict(worker, "declined" if useless else "accepted", claim.score, finding.measured, useless)


def _remember(state: ServerState, order: Order, verdicts: Sequence[Verdict]) -> ServerState:
    """The server one round later, before w^g: who was refuted is banned, who was silent or sent a copy has to wait."""
    back_offs, last_uploaded = dict(state.back_offs), dict(state.last_uploaded)
    for verdict in verdicts:
        if verdict.outcome == "silent" or verdict.reason == COPIED:
            back_offs[verdict.worker] = back_offs.get(verdict.worker, NO_BACK_OFF).again(order.round)
        else:
            back_offs.pop(verdict.worker, None)
        if verdict.outcome != "silent":
            last_uploaded[verdict.worker] = verdict.claimed or 0.0
    refuted = {verdict.worker for verdict in verdicts if verdict.outcome == "refuted"}
    return replace(
        state,
        round=order.round,
        told=state.told | set(order.participants),
        banned=state.banned | refuted,
        back_offs=back_offs,
        last_uploaded=last_uploaded,
    )


def _adopt(state: ServerState, combined: Combined, policy: Policy) -> ServerState:
    """Eq. (7): the new w^g, if there is one; nobody has been told it yet."""
    if combined.model is None:
        return state
    if combined.model.shape != state.global_best.shape or not np.isfinite(combined.model).all():
        fault = f"a model of shape {combined.model.shape} or with numbers that are not finite"
        raise UserError(_nonsense(policy, f"makes {fault} of finite uploads of shape {state.global_best.shape}"))
    model = np.array(combined.model, np.float32)
    return replace(state, global_best=model, global_score=float(combined.score), told=frozenset())


def _nonsense(policy: Policy, what: str) -> str:
    kind = type(policy.selection)
    return (
        f"The selection {kind.__module__}.{kind.__qualname__} {what}. See the contract in cbdsl.Selection, and try it "
        "with cbdsl.testing.check_selection."
    )


def _objection(claim: Claim, policy: Policy) -> str:
    missing = policy.commitment and len(claim.commitment) != COMMITMENT_BYTES
    return objection(claim.score) or ("no commitment" if missing else "")


def start_traffic(order: Order) -> tuple[Traffic, Traffic]:
    """The messages of an order itself: its numbers to everybody, and w^g to those who do not have it."""
    size = 0 if order.global_best is None else len(order.global_best)
    return ledger.orders(len(order.participants)), ledger.broadcasts(order.receivers, size)
