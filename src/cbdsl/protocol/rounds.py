"""One round of Algorithm 1, over any swarm that can report and upload.

The same function drives the simulator and a network. It knows no transport, no dataset and no model: weights are flat
arrays, and workers are numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cbdsl.arrays import Floats
from cbdsl.codecs.base import CodecError
from cbdsl.codecs.travel import Codecs
from cbdsl.errors import UserError
from cbdsl.protocol import ledger
from cbdsl.protocol.ledger import Traffic
from cbdsl.protocol.messages import (
    COMMITMENT_BYTES,
    Claim,
    Order,
    Outcome,
    RoundLog,
    Swarm,
    Upload,
    Verdict,
    WorkerId,
    commitment_of,
)
from cbdsl.protocol.releases import STALE, StaleError, adopted, bytes_of, opened
from cbdsl.protocol.selection import CAUSES, Believed, Best, Combined, Selection, View, waiting_list
from cbdsl.protocol.state import NO_BACK_OFF, ServerState
from cbdsl.protocol.verification import Verifier, objection


@dataclass(frozen=True, eq=False)
class Policy:
    """How a server chooses, and how far it goes in one round."""

    selection: Selection = field(default_factory=Best)
    invitations: int = 0  # at most so many; 0: no limit
    commitment: bool = False  # whether a claim without a digest of its model is set aside
    codecs: Codecs = field(default_factory=Codecs)  # how models travel


PAPER = Policy()


def play_round(
    state: ServerState, order: Order, swarm: Swarm, verifier: Verifier, policy: Policy = PAPER
) -> tuple[ServerState, RoundLog]:
    """Algorithm 1, lines 8 to 12: compare the scores, invite the best, verify, ban, go on to the next best."""
    answers = swarm.report(order)
    claims = {worker: answers[worker] for worker in order.participants if worker in answers}
    set_aside = {worker: reason for worker, claim in claims.items() if (reason := _objection(claim, policy))}
    scores = {worker: claim.score for worker, claim in claims.items() if worker not in set_aside}

    view = View(state, order.round, verifier, policy.codecs)
    waiting = waiting_list(scores, state.back_offs, state.last_uploaded, order.round)
    verdicts: list[Verdict] = []
    uploads: dict[WorkerId, Upload] = {}
    believed: list[Believed] = []
    while not policy.invitations or len(verdicts) < policy.invitations:
        worker = policy.selection.invite(waiting, believed, view)
        if worker is None:
            break
        chosen = [one for one in waiting if one.worker == worker]
        if not chosen:
            raise UserError(_nonsense(policy, f"invites worker {worker!r}, who is not waiting"))
        waiting.remove(chosen[0])
        uploads |= {one: upload for one, upload in swarm.upload([worker]).items() if one == worker}
        verdict, model = _judge(worker, claims[worker], uploads.get(worker), believed, view, policy)
        verdicts.append(verdict)
        if model is not None and verdict.outcome == "accepted":
            believed.append(Believed(worker, claims[worker].score, model, uploads[worker]))

    combined = policy.selection.combine(believed, view) if believed else Combined()
    final = tuple(
        replace(one, outcome="declined", reason=combined.declined[one.worker])
        if one.worker in combined.declined and one.outcome == "accepted"
        else one
        for one in verdicts
    )
    after = _adopt(_remember(state, order, final), combined, believed, view, policy)
    traffic = (
        *start_traffic(order),
        ledger.scores(len(claims), sum(len(claim.commitment) for claim in claims.values())),
        ledger.invitations(len(final)),
        ledger.uploads(len(uploads), sum(map(bytes_of, uploads.values()))),
    )
    return after, RoundLog(order.round, claims, set_aside, final, traffic)


def _judge(
    worker: WorkerId, claim: Claim, upload: Upload | None, believed: Sequence[Believed], view: View, policy: Policy
) -> tuple[Verdict, Floats | None]:
    """What an invitation led to, and the model; "accepted" means believed so far, as the others of this round were."""
    if upload is None:
        return Verdict(worker, "silent", claim.score), None
    payload = bytes_of(upload)
    try:
        model = opened(upload, view.state, policy.codecs, len(view.state.global_best))
    except CodecError as error:
        return Verdict(worker, "refuted", claim.score, reason=f"no model: {error}", payload=payload), None
    except StaleError:
        return Verdict(worker, "declined", claim.score, reason=STALE, payload=payload), None
    if policy.commitment and commitment_of(model) != claim.commitment:
        reason = "not the model that was promised"
        return Verdict(worker, "refuted", claim.score, reason=reason, payload=payload), None
    finding = view.verifier.check(claim.score, model, view.round)
    if not finding.believed:
        return Verdict(worker, "refuted", claim.score, finding.measured, finding.reason, payload), None
    useless = policy.selection.objection(Believed(worker, claim.score, model), believed, view)
    outcome: Outcome = "declined" if useless else "accepted"
    return Verdict(worker, outcome, claim.score, finding.measured, useless, payload), model


def _remember(state: ServerState, order: Order, verdicts: Sequence[Verdict]) -> ServerState:
    """The server one round later, before w^g: who was refuted is banned, who was silent or is suspect has to wait."""
    back_offs, last_uploaded = dict(state.back_offs), dict(state.last_uploaded)
    for verdict in verdicts:
        if verdict.outcome == "silent" or verdict.reason in CAUSES or verdict.reason == STALE:
            back_offs[verdict.worker] = back_offs.get(verdict.worker, NO_BACK_OFF).again(order.round)
        else:
            back_offs.pop(verdict.worker, None)
        if verdict.outcome != "silent":
            last_uploaded[verdict.worker] = verdict.claimed or 0.0
    refuted = {verdict.worker for verdict in verdicts if verdict.outcome == "refuted"}
    return replace(
        state,
        round=order.round,
        told={**state.told, **dict.fromkeys(order.participants, state.version)},
        banned=state.banned | refuted,
        back_offs=back_offs,
        last_uploaded=last_uploaded,
    )


def _adopt(
    state: ServerState,
    combined: Combined,
    believed: Sequence[Believed],
    view: View,
    policy: Policy,
) -> ServerState:
    """Eq. (7): the new w^g, if there is one; nobody has been told it yet."""
    model, made, score = combined.model, combined.packed, float(combined.score)
    if model is None:
        return state
    if model.shape != state.global_best.shape or not np.isfinite(model).all():
        fault = f"a model of shape {model.shape} or with numbers that are not finite"
        raise UserError(_nonsense(policy, f"makes {fault} of finite uploads of shape {state.global_best.shape}"))
    if made is None or made.model is not model:
        made = view.packed(model, next((one for one in believed if one.model is model), None))
        if made.model is not model and view.verifier.score is not None:
            score = view.verifier.score(made.model)  # it is another model than the selection had
    memory = state.memory if combined.memory is None else combined.memory
    return adopted(replace(state, global_score=score, memory=memory), made, policy.codecs)


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
    return ledger.orders(len(order.participants)), ledger.broadcasts(order.receivers, order.payload)
