"""What CB-DSL is compared with: FedAvg's round, over the same swarm and the same ledger (Sec. III.A).

FedPSO and plain PSO need no round of their own: they play the server's with another move or without verification, see
`methods.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from cbdsl.arrays import Doubles, Floats
from cbdsl.protocol import ledger
from cbdsl.protocol.server import Order, RoundLog, ServerState, Swarm, Verdict, WorkerId, start_traffic


def weighted_mean(models: Floats, shares: Doubles) -> Floats:
    """sum_i n_i w_i / sum_i n_i over rows of models (k, D) and shares (k,); (D,)."""
    total = np.zeros(models.shape[1])
    for model, share in zip(models, shares / shares.sum(), strict=True):  # row by row: no (k, D) copy in double
        total += share * model
    return total.astype(np.float32)


Combination = Callable[[ServerState, Sequence[WorkerId], Sequence[Floats]], Floats]
"""Takes the state, who sent a model, and the models; gives the new global model."""


def averaging(sizes: Mapping[WorkerId, int]) -> Combination:
    """FedAvg's own: models weighted by the number of samples behind them; with equal numbers that is Eq. (2)."""

    def combine(state: ServerState, workers: Sequence[WorkerId], models: Sequence[Floats]) -> Floats:  # noqa: ARG001
        return weighted_mean(np.stack(models), np.array([sizes[worker] for worker in workers], dtype=np.float64))

    return combine


def play_average_round(
    state: ServerState, order: Order, swarm: Swarm, combine: Combination
) -> tuple[ServerState, RoundLog]:
    """One round of FedAvg (McMahan et al. 2017): everybody trains from w_t, everybody uploads, the server combines.

    Nothing is verified: a model of another shape cannot be averaged and is left out, anything else is believed.
    """
    swarm.report(order)
    received = swarm.upload(order.participants)
    size = len(state.global_best)
    verdicts = tuple(_judge(worker, received.get(worker), size) for worker in order.participants)
    used = [verdict.worker for verdict in verdicts if verdict.outcome == "accepted"]
    after = replace(state, round=order.round, changed=True)
    if used:
        after = replace(after, global_best=combine(state, used, [received[worker] for worker in used]))
    traffic = (*start_traffic(order, size), ledger.uploads(len(received), size))
    return after, RoundLog(order.round, {}, {}, verdicts, traffic)


def _judge(worker: WorkerId, model: Floats | None, size: int) -> Verdict:
    if model is None:
        return Verdict(worker, "silent")
    return Verdict(worker, "accepted") if model.shape == (size,) else Verdict(worker, "refuted", reason="wrong shape")
