"""FedAvg's round, over the same swarm and the same ledger (Sec. III.A): everybody uploads, the server combines.

FedProx, SCAFFOLD and the server optimisers hold the same conversation with another training or another step, see
`cbdsl.methods`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from cbdsl.arrays import Doubles, Floats
from cbdsl.codecs.base import CodecError
from cbdsl.codecs.travel import Codecs
from cbdsl.errors import UserError
from cbdsl.methods.base import Method
from cbdsl.protocol import ledger
from cbdsl.protocol.messages import Order, RoundLog, Swarm, Upload, Verdict, WorkerId
from cbdsl.protocol.releases import STALE, StaleError, adopted, bytes_of, opened, packed
from cbdsl.protocol.rounds import start_traffic
from cbdsl.protocol.state import ServerState
from cbdsl.protocol.verification import flaw

Combination = Callable[[ServerState, Sequence[WorkerId], Sequence[Floats]], Floats]
"""Takes the state, who sent a model, and the models, each (V D,); gives their combination, (V D,)."""


MOST_MEDIANS = 3.0
"""A number of samples that a worker states itself counts up to so many times the median of all that were stated."""
_TAME = 1e12  # a finite step can be made from uploads below this


def weighted_mean(models: Floats, shares: Doubles) -> Floats:
    """sum_i n_i w_i / sum_i n_i over rows of models (k, D) and shares (k,); (D,). If all are 0, all count alike."""
    if not shares.any():
        shares = np.ones_like(shares)
    total = np.zeros(models.shape[1])
    for model, share in zip(models, shares / shares.sum(), strict=True):  # row by row: no (k, D) copy in double
        total += share * model
    return total.astype(np.float32)


def averaging(sizes: Mapping[WorkerId, int], stated: bool = False) -> Combination:
    """FedAvg's own: models weighted by the number of samples behind them; with equal numbers that is Eq. (2).

    stated: the numbers are the workers' own word, so that none of them counts for more than the others' allow.
    """

    def combine(state: ServerState, workers: Sequence[WorkerId], models: Sequence[Floats]) -> Floats:  # noqa: ARG001
        shares = np.array([sizes[worker] for worker in workers], dtype=np.float64)
        return weighted_mean(np.stack(models), np.minimum(shares, believable(shares)) if stated else shares)

    return combine


def believable(stated: Doubles) -> float:
    """The most that a stated number counts, by the lower median: liars in the minority cannot raise it above the truth.

    Where most state 0, everybody counts alike.
    """
    return MOST_MEDIANS * float(np.sort(stated)[(len(stated) - 1) // 2])


def play_average_round(
    state: ServerState,
    order: Order,
    swarm: Swarm,
    method: Method,
    combine: Combination,
    workers: int,
    codecs: Codecs | None = None,
) -> tuple[ServerState, RoundLog]:
    """Everybody who takes part trains and uploads, and the method's server makes a step of what they sent.

    Nothing is verified, so nothing is refuted: what is no model (another shape, numbers that are not finite) cannot be
    averaged and is left out, "declined"; anything else is believed. Nobody is banned: honest training can fail, too.
    """
    codecs = codecs or Codecs()
    swarm.report(order)
    received = swarm.upload(order.participants)
    size = method.vectors * len(state.global_best)
    judged = [_judge(worker, received.get(worker), state, codecs, size) for worker in order.participants]
    verdicts = tuple(verdict for verdict, _ in judged)
    models = {verdict.worker: model for verdict, model in judged if model is not None}
    after = replace(state, round=order.round, told={**state.told, **dict.fromkeys(order.participants, state.version)})
    if models:
        combined = combine(state, list(models), list(models.values()))
        model, memory = method.step(state.global_best, state.memory, combined, len(models) / workers)
        made = _checked(model, combined, state, method)
        if np.isfinite(made).all() and np.isfinite(memory).all():  # else uploads too wild to take a step on: stay
            after = adopted(replace(after, memory=memory), packed(made, state, codecs), codecs)
    traffic = (*start_traffic(order), ledger.uploads(len(received), sum(map(bytes_of, received.values()))))
    return after, RoundLog(order.round, {}, {}, verdicts, traffic)


def _checked(model: Floats, combined: Floats, state: ServerState, method: Method) -> Floats:
    """What a method's step made, as a model is sent; an error if it is none, and no upload is to blame."""
    made = np.asarray(model)
    lost = np.abs(combined).max(initial=0.0) < _TAME and not np.isfinite(made).all()
    if made.shape != state.global_best.shape or lost:
        what = "numbers that are not finite" if lost else f"shape {made.shape}"
        raise UserError(
            f"The step of {type(method).__qualname__} gives {what} for a model of shape {state.global_best.shape} and "
            "finite uploads. See the contract in cbdsl.Method, and try it with cbdsl.testing.check_method."
        )
    return made.astype(np.float32, copy=False)


def _judge(
    worker: WorkerId, upload: Upload | None, state: ServerState, codecs: Codecs, size: int
) -> tuple[Verdict, Floats | None]:
    if upload is None:
        return Verdict(worker, "silent"), None
    payload = bytes_of(upload)
    try:
        model = opened(upload, state, codecs, size)
        fault = flaw(model, size)
    except CodecError as error:
        fault = f"no model: {error}"
    except StaleError:
        fault = STALE
    if fault:
        return Verdict(worker, "declined", reason=f"left out: {fault}", payload=payload), None
    return Verdict(worker, "accepted", payload=payload), model
