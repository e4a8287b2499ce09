"""The server's round: Algorithm 1 (`play_round`), averaging (`play_average_round`), and `Server`, which builds orders.

The same functions serve the simulator and a network. Models are flat arrays, and workers are numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import numpy as np

from cbdsl.algorithm import ledger
from cbdsl.algorithm.alone import AloneTraining
from cbdsl.algorithm.broadcast import (
    STALE,
    StaleError,
    adopt_model,
    bytes_of,
    bytes_to_catch_up,
    decode_upload,
    encode_model,
)
from cbdsl.algorithm.ledger import Traffic
from cbdsl.algorithm.messages import (
    COMMITMENT_BYTES,
    NO_BACK_OFF,
    Claim,
    Order,
    Outcome,
    RoundLog,
    ServerState,
    Swarm,
    SwarmWithAbsentees,
    Upload,
    Verdict,
    WorkerId,
    commitment_of,
)
from cbdsl.algorithm.methods import Method, OwnWeights, ServerStep, update_server
from cbdsl.algorithm.particles import inertia_at
from cbdsl.algorithm.selection import (
    CAUSES,
    WORSENS,
    Best,
    RoundContext,
    Selection,
    SelectionResult,
    VerifiedUpload,
    waiting_list,
)
from cbdsl.algorithm.verification import Verifier, find_claim_flaw, find_model_flaw
from cbdsl.arrays import Bools, Doubles, Floats, NamedArrays
from cbdsl.codecs.codec import CodecError
from cbdsl.codecs.envelope import Codecs
from cbdsl.engines.engine import schedule_factors
from cbdsl.errors import UserError
from cbdsl.rng import stream
from cbdsl.spec import Spec


@dataclass(frozen=True, eq=False)
class ServerPolicy:
    """How a server selects models, and its limits in one round."""

    selection: Selection = field(default_factory=Best)
    invitations: int = 0  # at most this many per round; 0: no limit
    commitment: bool = False  # whether a claim needs a digest of its model
    codecs: Codecs = field(default_factory=Codecs)  # how models travel
    seed: int = 0  # for the random streams of selections and methods


PAPER = ServerPolicy()


def play_round(
    state: ServerState, order: Order, swarm: Swarm, verifier: Verifier, policy: ServerPolicy = PAPER
) -> tuple[ServerState, RoundLog]:
    """Play Algorithm 1, lines 8 to 12: compare the scores, invite the best, verify, ban, go on to the next best."""
    answers = swarm.report(order)
    claims = {worker: answers[worker] for worker in order.participants if worker in answers}
    reached = _without_absentees(order, swarm, state, policy.codecs)
    set_aside = {worker: reason for worker, claim in claims.items() if (reason := _objection(claim, policy))}
    scores = {worker: claim.score for worker, claim in claims.items() if worker not in set_aside}

    rng = stream(policy.seed, "server-step", order.round)
    view = RoundContext(state, order.round, verifier, policy.codecs, rng)
    waiting = waiting_list(scores, state.back_offs, state.last_uploaded, order.round)
    verdicts: list[Verdict] = []
    uploads: dict[WorkerId, Upload] = {}
    believed: list[VerifiedUpload] = []
    while not policy.invitations or len(verdicts) < policy.invitations:
        worker = policy.selection.invite(waiting, believed, view)
        if worker is None:
            break
        chosen = [one for one in waiting if one.worker == worker]
        if not chosen:
            raise _invalid_selection(policy, f"invites worker {worker!r}, which is not waiting")
        waiting.remove(chosen[0])
        uploads |= {one: upload for one, upload in swarm.upload([worker]).items() if one == worker}
        verdict, model = _judge_claim(worker, claims[worker], uploads.get(worker), believed, view, policy)
        verdicts.append(verdict)
        if model is not None and verdict.outcome == "accepted":
            score = max(claims[worker].score, float(np.float32(verdict.measured or 0.0)))
            believed.append(VerifiedUpload(worker, score, model, uploads[worker]))

    made = policy.selection.combine(believed, view) if believed else SelectionResult()
    combined = _accept(made, believed, view, policy)
    final = tuple(
        replace(one, outcome="declined", reason=combined.declined[one.worker])
        if one.worker in combined.declined and one.outcome == "accepted"
        else one
        for one in verdicts
    )
    after = _adopt(_remember(state, reached, final), combined, policy)
    traffic = (
        *start_traffic(reached),
        ledger.claim_traffic(len(claims), sum(len(claim.commitment) for claim in claims.values())),
        ledger.invitation_traffic(len(final)),
        ledger.upload_traffic(len(uploads), sum(map(bytes_of, uploads.values()))),
    )
    absent = len(order.participants) - len(reached.participants)
    return after, RoundLog(order.round, claims, set_aside, final, traffic, absent)


def _judge_claim(
    worker: WorkerId,
    claim: Claim,
    upload: Upload | None,
    believed: Sequence[VerifiedUpload],
    view: RoundContext,
    policy: ServerPolicy,
) -> tuple[Verdict, Floats | None]:
    """Verify an upload; return the verdict and the model. "accepted": the selection may still decline it."""
    if upload is None:
        return Verdict(worker, "silent", claim.score), None
    payload = bytes_of(upload)
    try:
        model = decode_upload(upload, view.state, policy.codecs, len(view.state.global_best))
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
    useless = finding.reason or policy.selection.objection(VerifiedUpload(worker, claim.score, model), believed, view)
    outcome: Outcome = "declined" if useless else "accepted"
    return Verdict(worker, outcome, claim.score, finding.measured, useless, payload), model


def _remember(state: ServerState, order: Order, verdicts: Sequence[Verdict]) -> ServerState:
    """Ban workers that were refuted, and back off from those that were silent or suspect; w^g is not changed yet."""
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


def _accept(
    combined: SelectionResult, believed: Sequence[VerifiedUpload], view: RoundContext, policy: ServerPolicy
) -> SelectionResult:
    """Return what a selection made, as workers will have it; without its model if that is worse in private than w^g."""
    model, made, score = combined.model, combined.packed, float(combined.score)
    if model is None:
        return combined
    current = view.state.global_best
    if model.shape != current.shape or not np.isfinite(model).all():
        fault = f"a model of shape {model.shape} or with numbers that are not finite"
        raise _invalid_selection(policy, f"returns {fault} for finite uploads of shape {current.shape}")
    if made is None or made.model is not model:
        made = view.encode(model, next((one for one in believed if one.model is model), None))
        if made.model is not model and view.verifier.score is not None:
            score = view.verifier.score(made.model)  # not the model that the selection scored
    if view.verifier.worsens(current, made.model):
        used = [one.worker for one in believed if one.worker not in combined.declined]
        return SelectionResult(declined={**combined.declined, **dict.fromkeys(used, WORSENS)})
    return replace(combined, model=made.model, packed=made, score=score)


def _adopt(state: ServerState, combined: SelectionResult, policy: ServerPolicy) -> ServerState:
    """Apply Eq. (7): the new w^g, if there is one; no worker has it yet."""
    if combined.memory is not None:
        state = replace(state, memory=combined.memory)
    if combined.packed is None or combined.model is None:
        return state
    return adopt_model(replace(state, global_score=combined.score), combined.packed, policy.codecs)


def _invalid_selection(policy: ServerPolicy, what: str) -> UserError:
    kind = type(policy.selection)
    return UserError(
        f"The selection {kind.__module__}.{kind.__qualname__} {what}. See the contract in cbdsl.Selection, and try it "
        "with cbdsl.testing.check_selection.",
        code="invalid-part",
    )


def _objection(claim: Claim, policy: ServerPolicy) -> str:
    missing = policy.commitment and len(claim.commitment) != COMMITMENT_BYTES
    return find_claim_flaw(claim.score) or ("no commitment" if missing else "")


def _without_absentees(order: Order, swarm: Swarm, state: ServerState, codecs: Codecs) -> Order:
    """Return the order as it reached workers: to no participant that is not there, and its w^g to fewer."""
    absent = set(swarm.absentees()) if isinstance(swarm, SwarmWithAbsentees) else set()
    if not absent:
        return order
    present = tuple(worker for worker in order.participants if worker not in absent)
    behind = [told for worker in present if (told := state.told.get(worker, 0)) < state.version]
    message = order.global_best  # None: all participants have it
    payload = 0 if message is None else sum(bytes_to_catch_up(state, told, message, codecs) for told in behind)
    return replace(order, participants=present, receivers=len(behind), payload=payload)


def start_traffic(order: Order) -> tuple[Traffic, Traffic]:
    """Count the messages of an order: its numbers to all participants, and w^g to those that do not have it."""
    return ledger.order_traffic(len(order.participants)), ledger.broadcast_traffic(order.receivers, order.payload)


MOST_MEDIANS = 3.0
"""How many times the median of all stated numbers of samples a stated number counts at most."""
_TAME = 1e12  # uploads below this allow a finite step


def weighted_mean(models: Floats, shares: Doubles) -> Floats:
    """Return sum_i n_i w_i / sum_i n_i for models (k, D) and shares (k,), (D,)."""
    total = np.zeros(models.shape[1])
    for model, share in zip(models, shares / shares.sum(), strict=True):  # row by row: no (k, D) copy in double
        total += share * model
    return total.astype(np.float32)


CombinationRule = Callable[[ServerState, Sequence[WorkerId], Sequence[Floats], Doubles], tuple[Floats, NamedArrays]]
"""Takes the state, the senders, their models, each (V D,), and sizes; returns the combined model and a memory."""


@dataclass(frozen=True, eq=False)
class Combination:
    """A server's rule for combining models if all workers upload; by default the mean weighted by samples.

    >>> combine = Combination({0: 1, 1: 3}.__getitem__)
    >>> combine(ServerState(0, np.zeros(1), np.inf), [0, 1], [np.zeros(1), np.ones(1)])[0]
    array([0.75], dtype=float32)
    """

    size_of: Callable[[WorkerId], int]  # a worker's number of samples
    stated: bool = False  # the numbers are what workers state, so each is limited by the others'
    rule: CombinationRule | None = None

    def __call__(
        self, state: ServerState, workers: Sequence[WorkerId], models: Sequence[Floats]
    ) -> tuple[Floats, NamedArrays]:
        """Combine models of some workers, each (V D,); return the result, (V D,), and the rule's memory."""
        sizes = np.array([self.size_of(worker) for worker in workers], dtype=np.float64)
        if self.stated:
            sizes = np.minimum(sizes, limit_stated_size(sizes))
        if not sizes.any():
            sizes = np.ones_like(sizes)
        return self.rule(state, workers, models, sizes) if self.rule else (weighted_mean(np.stack(models), sizes), {})


def limit_stated_size(stated: Doubles) -> float:
    """Return the most that a stated number counts, by the lower median: attackers in the minority cannot raise it.

    Where most state 0, all workers count equally.
    """
    return MOST_MEDIANS * float(np.sort(stated)[(len(stated) - 1) // 2])


def play_average_round(  # noqa: PLR0913 - the last two by name
    state: ServerState,
    order: Order,
    swarm: Swarm,
    method: Method,
    combine: Combination,
    workers: int,
    *,
    codecs: Codecs | None = None,
    seed: int = 0,
) -> tuple[ServerState, RoundLog]:
    """Play a round in which all participants train and upload, and the method's server updates the model.

    seed: for the random stream of the method's server.

    Nothing is verified, so nothing is refuted: an upload that is not a model (another shape, not finite) is left out,
    "declined"; all others are accepted. No worker is banned: honest training can diverge, too.
    """
    codecs = codecs or Codecs()
    swarm.report(order)
    received = swarm.upload(order.participants)
    reached = _without_absentees(order, swarm, state, codecs)
    size = method.vectors * len(state.global_best)
    judged = [_judge_upload(worker, received.get(worker), state, codecs, size) for worker in order.participants]
    verdicts = tuple(verdict for verdict, _ in judged)
    models = {verdict.worker: model for verdict, model in judged if model is not None}
    after = replace(state, round=order.round, told={**state.told, **dict.fromkeys(reached.participants, state.version)})
    if models:
        combined, remembered = combine(state, list(models), list(models.values()))
        after = replace(after, rule_memory=remembered)
        step = ServerStep(
            state.global_best, state.memory, combined, len(models) / (order.members or workers), order.round,
            tuple(models), len(order.participants), tuple(models.values()), stream(seed, "server-step", order.round),
        )  # fmt: skip
        model, memory = update_server(method, step)
        made = _checked(model, combined, state, method)
        if np.isfinite(made).all() and np.isfinite(memory).all():  # otherwise the uploads allow no finite step
            after = adopt_model(replace(after, memory=memory), encode_model(made, state, codecs), codecs)
    traffic = (*start_traffic(reached), ledger.upload_traffic(len(received), sum(map(bytes_of, received.values()))))
    absent = len(order.participants) - len(reached.participants)
    return after, RoundLog(order.round, {}, {}, verdicts, traffic, absent)


def _checked(model: Floats, combined: Floats, state: ServerState, method: Method) -> Floats:
    """Return the result of a method's update as float32; raise if it is not a model although the uploads are finite."""
    made = np.asarray(model)
    lost = np.abs(combined).max(initial=0.0) < _TAME and not np.isfinite(made).all()
    if made.shape != state.global_best.shape or lost:
        what = "numbers that are not finite" if lost else f"shape {made.shape}"
        raise UserError(
            f"The update of {type(method).__qualname__} gives {what} for a model of shape {state.global_best.shape} "
            "and finite uploads. See the contract in cbdsl.Method, and try it with cbdsl.testing.check_method.",
            code="invalid-part",
        )
    return made.astype(np.float32, copy=False)


def _judge_upload(
    worker: WorkerId, upload: Upload | None, state: ServerState, codecs: Codecs, size: int
) -> tuple[Verdict, Floats | None]:
    if upload is None:
        return Verdict(worker, "silent"), None
    payload = bytes_of(upload)
    try:
        model = decode_upload(upload, state, codecs, size)
        fault = find_model_flaw(model, size)
    except CodecError as error:
        fault = f"no model: {error}"
    except StaleError:
        fault = STALE
    if fault:
        return Verdict(worker, "declined", reason=f"left out: {fault}", payload=payload), None
    return Verdict(worker, "accepted", payload=payload), model


@dataclass(frozen=True, eq=False)
class Server:
    """A server without its state: what changes from round to round is in `ServerState`."""

    spec: Spec
    method: Method
    verifier: Verifier
    policy: ServerPolicy
    combine: Combination
    alone: AloneTraining | None = None  # only for methods without messages
    own: Bools | None = None  # (D,), weights that stay on each worker

    @property
    def worker_method(self) -> Method:
        """The workers' half of the method."""
        return self.method if self.own is None else OwnWeights(self.method, self.own)

    def first_state(self, initial: Floats) -> ServerState:
        """Return the state before round 1: an initial model (D,), and its score if there is a D_sc."""
        nothing = ServerState(0, np.zeros_like(initial), math.inf, memory=self.method.memory(len(initial)))
        state = adopt_model(nothing, encode_model(initial, nothing, self.policy.codecs), self.policy.codecs)
        score = self.verifier.score(state.global_best) if self.verifier.score else math.inf
        return replace(state, global_score=float(np.float32(score)))

    def order(self, state: ServerState, members: Sequence[WorkerId] | None = None) -> Order:
        """Return the order that starts the next round, with w^g if a participant does not have it.

        members: the workers that are in the swarm now, where workers join and leave; None: as many as the spec says.
        """
        number, spec = state.round + 1, self.spec
        members = range(spec.workers) if members is None else members
        participants = self.participants(number, state.banned, members)
        codecs, message = self.policy.codecs, self.method.broadcast(state.global_best, state.memory)
        behind = [told for worker in participants if (told := state.told.get(worker, 0)) < state.version]
        return Order(
            round=number,
            task="swarm" if self.method.conversation == "swarm" else "average",
            participants=participants,
            inertia=inertia_at(number, spec.rounds, spec.swarm.inertia),
            learning_rate=rate_at(spec, number),
            global_best=message if behind else None,
            receivers=len(behind),
            payload=sum(bytes_to_catch_up(state, told, message, codecs) for told in behind),
            version=state.version,
            updates=state.updates,
            members=len(members),
        )

    def models(self, state: ServerState) -> Floats:
        """Return the models that are the result so far, (m, D): w^g, or those of a baseline."""
        if self.alone is not None and state.memory.size:
            return self.alone.models(state.memory)
        return state.global_best[None]

    @property
    def play(self) -> Callable[[ServerState, Order, Swarm], tuple[ServerState, RoundLog]]:
        """Carry an order out with a swarm: `play_round`, or `play_average_round` where everybody uploads."""
        if self.alone is not None:
            return self.alone.play
        if self.method.conversation == "average":
            return partial(
                play_average_round,
                method=self.method,
                combine=self.combine,
                workers=self.spec.workers,
                codecs=self.policy.codecs,
                seed=self.policy.seed,
            )
        return partial(play_round, verifier=self.verifier, policy=self.policy)

    def participants(
        self, round_number: int, banned: frozenset[WorkerId], members: Sequence[WorkerId]
    ) -> tuple[WorkerId, ...]:
        """Return the participants of a round: all members but banned ones, or as many as the spec says, at random."""
        if self.alone is not None:
            return ()
        count = self.spec.participants_of(len(members))
        if count >= len(members):
            return tuple(sorted(set(members) - banned))
        places = max(self.spec.workers, max(members[-1:] if isinstance(members, range) else members) + 1)
        drawn = stream(self.spec.seed, "participation", round_number).permutation(places)  # numbers in use or not yet
        known = members if isinstance(members, range) else set(members)  # no set of a population
        able = (worker for worker in map(int, drawn) if worker in known and worker not in banned)
        return tuple(sorted(islice(able, count)))


def rate_at(spec: Spec, round_number: int) -> float:
    """Return a round's learning rate, including a schedule over the run."""
    rate = spec.local.learning_rate * spec.local.decay ** (round_number - 1)
    if spec.local.schedule_over == "round":
        return rate
    return rate * float(schedule_factors(spec.local.schedule, round_number - 1, spec.rounds))
