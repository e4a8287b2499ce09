"""The server that a spec names: how it judges uploads, how it combines them, how far it goes in a round.

Ties the pure rules of `verification`, `selection` and `aggregators` to an engine and to data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from cbdsl.protocol.aggregators import Trust, aggregate, demand
from cbdsl.protocol.fedavg import Combination, averaging
from cbdsl.workers.batches import batches_of, padded
from cbdsl.data import Split
from cbdsl.arrays import Doubles, Floats, Indices, Samples
from cbdsl.engines.base import Engine, Sgd
from cbdsl.errors import UserError
from cbdsl.methods.table import method_of
from cbdsl.rng import seed_of, stream
from cbdsl.protocol.selection import Policy
from cbdsl.protocol.server import ServerState, WorkerId
from cbdsl.spec import Spec
from cbdsl.protocol.verification import HoldOut, Verifier, guarded, copying, measuring, trusting


def policy_of(spec: Spec) -> Policy:
    """How far the server goes in a round."""
    defence = spec.defence
    cap = defence.invitations and max(defence.invitations, max(defence.declared, 0) + defence.soup)
    return Policy(defence.soup, cap, defence.commitment)


def verifier_of(spec: Spec, engine: Engine, samples: Samples, parts: Split) -> Verifier:
    """How the server of a spec judges uploads: it can measure only where D_sc is shared."""
    method = method_of(spec)
    if not (method.task == "swarm" and method.verifies and spec.shares_scoring):
        if spec.defence.guard or spec.defence.soup > 1:
            raise UserError(
                "The guard and the soup need a method that verifies uploads on a shared D_sc; this one does not. "
                "Use cb-dsl with --shared both (or score); FedAvg's defences are its aggregators."
            )
        return trusting(engine.size)

    plain = measuring(scorer(engine, samples, parts.shared_scoring), engine.size, spec.verification.tolerance)
    if spec.defence.soup > 1 and spec.shares_training and method.gradients and len(parts.shared_training):
        plain = replace(plain, copies=copying(trainer(spec, engine, samples, parts.shared_training)))
    if not spec.defence.guard:
        return plain

    def private(weights: Floats, round_number: int) -> Doubles:
        """A random half of the hold-out, another one every round."""
        drawn = stream(spec.seed, "hold-out", round_number).permutation(parts.holdout)
        return _batch_losses(engine, weights, samples, drawn[: -(-len(drawn) // 2)])

    holdout = HoldOut(lambda weights: _batch_losses(engine, weights, samples, parts.shared_scoring), private)
    return guarded(plain, holdout, spec.defence.false_alarm)


def scorer(engine: Engine, samples: Samples, indices: Indices) -> Callable[[Floats], float]:
    """A model's loss on some samples, always in full."""
    return lambda weights: float(engine.losses(weights[None], samples, indices)[0])


def _batch_losses(engine: Engine, weights: Floats, samples: Samples, indices: Indices) -> Doubles:
    """Mean losses of a model on batches of samples, as even as can be, at most a hundred, (B,)."""
    rows = padded(np.array_split(indices, min(100, len(indices))))
    copies = np.ascontiguousarray(np.broadcast_to(weights, (len(rows), len(weights))))
    return engine.losses(copies, samples, rows)


def combination_of(spec: Spec, engine: Engine, samples: Samples, parts: Split) -> Combination:
    """How FedAvg's server combines models."""
    name, declared = spec.defence.aggregator, spec.defence.declared
    demand(name, spec.workers, declared)
    if name == "mean":
        return averaging({worker: len(own) for worker, own in enumerate(parts.workers)})
    if name.rpartition("+")[2] == "fltrust" and not len(parts.shared_training):
        raise UserError(f"The aggregator '{name}' trains on D_tr at the server; data.shared_training is 0.")

    train = trainer(spec, engine, samples, parts.shared_training)

    def combine(state: ServerState, workers: Sequence[WorkerId], models: Sequence[Floats]) -> Floats:  # noqa: ARG001
        def root() -> Floats:
            return train(state.global_best, state.round + 1)

        def losses(rows: Floats) -> Doubles:
            return engine.losses(rows, samples, parts.shared_scoring)

        return aggregate(name, models, declared, Trust(state.global_best, root, losses))

    return combine


def trainer(spec: Spec, engine: Engine, samples: Samples, indices: Indices) -> Callable[[Floats, int], Floats]:
    """What the server makes of a model in a round, when it trains it as workers do, on samples of its own."""

    def train(weights: Floats, round_number: int) -> Floats:
        rows = batches_of(indices, spec.local, stream(spec.seed, "root", round_number))
        seeds = np.array([seed_of(spec.seed, "root", round_number, worker=1)], dtype=np.uint64)
        sgd = Sgd(rate_at(spec, round_number), spec.local.momentum, spec.local.weight_decay)
        return np.asarray(engine.train(weights[None], samples, rows[None], sgd, seeds)[0])

    return train


def rate_at(spec: Spec, round_number: int) -> float:
    """The learning rate of a round."""
    return spec.local.learning_rate * spec.local.decay ** (round_number - 1)
