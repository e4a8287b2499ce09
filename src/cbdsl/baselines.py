"""What CB-DSL is compared with: FedAvg's round, over the same swarm and the same ledger (Sec. III.A).

FedPSO and plain PSO need no round of their own: they play the server's with another move or without verification, see
`methods.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from cbdsl import ledger
from cbdsl.engines.base import Doubles, Floats
from cbdsl.server import Order, RoundLog, ServerState, Swarm, Verdict, WorkerId, start_traffic


def weighted_mean(models: Floats, shares: Doubles) -> Floats:
    """sum_i n_i w_i / sum_i n_i over rows of models (k, D) and shares (k,); (D,)."""
    total = np.zeros(models.shape[1])
    for model, share in zip(models, shares / shares.sum(), strict=True):  # row by row: no (k, D) copy in double
        total += share * model
    return total.astype(np.float32)


def play_average_round(
    state: ServerState, order: Order, swarm: Swarm, sizes: Mapping[WorkerId, int]
) -> tuple[ServerState, RoundLog]:
    """One round of FedAvg (McMahan et al. 2017): everybody trains from w_t, everybody uploads, the server averages.

    Models are weighted by the number of samples behind them; with equal numbers that is Eq. (2). Nothing is verified: a
    model of another shape cannot be averaged and is left out, anything else is believed.
    """
    swarm.report(order)
    received = swarm.upload(order.participants)
    size = len(state.global_best)
    verdicts = tuple(_judge(worker, received.get(worker), size) for worker in order.participants)
    used = [verdict.worker for verdict in verdicts if verdict.outcome == "accepted"]
    after = replace(state, round=order.round, changed=True)
    if used:
        shares = np.array([sizes[worker] for worker in used], dtype=np.float64)
        after = replace(after, global_best=weighted_mean(np.stack([received[worker] for worker in used]), shares))
    traffic = (*start_traffic(order, size), ledger.uploads(len(received), size))
    return after, RoundLog(order.round, {}, {}, verdicts, traffic)


def _judge(worker: WorkerId, model: Floats | None, size: int) -> Verdict:
    if model is None:
        return Verdict(worker, "silent")
    return Verdict(worker, "accepted") if model.shape == (size,) else Verdict(worker, "refuted", reason="wrong shape")
