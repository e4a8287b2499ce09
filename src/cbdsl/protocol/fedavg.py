"""FedAvg's round, over the same swarm and the same ledger (Sec. III.A): everybody uploads, the server combines.

FedProx, SCAFFOLD and the server optimisers hold the same conversation with another training or another step, see
`cbdsl.methods`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from cbdsl.arrays import Doubles, Floats
from cbdsl.errors import UserError
from cbdsl.methods.base import Method
from cbdsl.protocol import ledger
from cbdsl.protocol.messages import Order, RoundLog, Swarm, Verdict, WorkerId
from cbdsl.protocol.rounds import start_traffic
from cbdsl.protocol.state import ServerState

Combination = Callable[[ServerState, Sequence[WorkerId], Sequence[Floats]], Floats]
"""Takes the state, who sent a model, and the models, each (V D,); gives their combination, (V D,)."""


def weighted_mean(models: Floats, shares: Doubles) -> Floats:
    """sum_i n_i w_i / sum_i n_i over rows of models (k, D) and shares (k,); (D,)."""
    total = np.zeros(models.shape[1])
    for model, share in zip(models, shares / shares.sum(), strict=True):  # row by row: no (k, D) copy in double
        total += share * model
    return total.astype(np.float32)


def averaging(sizes: Mapping[WorkerId, int]) -> Combination:
    """FedAvg's own: models weighted by the number of samples behind them; with equal numbers that is Eq. (2)."""

    def combine(state: ServerState, workers: Sequence[WorkerId], models: Sequence[Floats]) -> Floats:  # noqa: ARG001
        return weighted_mean(np.stack(models), np.array([sizes[worker] for worker in workers], dtype=np.float64))

    return combine


def play_average_round(
    state: ServerState, order: Order, swarm: Swarm, method: Method, combine: Combination, workers: int
) -> tuple[ServerState, RoundLog]:
    """Everybody who takes part trains and uploads, and the method's server makes a step of what they sent.

    Nothing is verified: a model of another shape cannot be averaged and is left out, anything else is believed.
    """
    swarm.report(order)
    received = swarm.upload(order.participants)
    size = method.vectors * len(state.global_best)
    verdicts = tuple(_judge(worker, received.get(worker), size) for worker in order.participants)
    used = [verdict.worker for verdict in verdicts if verdict.outcome == "accepted"]
    after = replace(state, round=order.round, told=frozenset())
    if used:
        combined = combine(state, used, [received[worker] for worker in used])
        model, memory = method.step(state.global_best, state.memory, combined, len(used) / workers)
        after = replace(after, global_best=_checked(model, combined, state, method), memory=memory)
    traffic = (*start_traffic(order), ledger.uploads(len(received), size))
    return after, RoundLog(order.round, {}, {}, verdicts, traffic)


def _checked(model: Floats, combined: Floats, state: ServerState, method: Method) -> Floats:
    """What a method's step made, as a model is sent; an error if it is none."""
    made = np.asarray(model)
    lost = np.isfinite(combined).all() and not np.isfinite(made).all()
    if made.shape != state.global_best.shape or lost:
        what = "numbers that are not finite" if lost else f"shape {made.shape}"
        raise UserError(
            f"The step of {type(method).__qualname__} gives {what} for a model of shape {state.global_best.shape} and "
            "finite uploads. See the contract in cbdsl.Method, and try it with cbdsl.testing.check_method."
        )
    return made.astype(np.float32, copy=False)


def _judge(worker: WorkerId, model: Floats | None, size: int) -> Verdict:
    if model is None:
        return Verdict(worker, "silent")
    return Verdict(worker, "accepted") if model.shape == (size,) else Verdict(worker, "refuted", reason="wrong shape")
