"""The server that a spec names: ties the pure rules of `protocol` to an engine and to data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cbdsl import register
from cbdsl.arrays import Doubles, Floats, Indices, Samples
from cbdsl.codecs.travel import codecs_of
from cbdsl.data import Split
from cbdsl.engines.base import Engine, Sgd
from cbdsl.errors import UserError
from cbdsl.methods.base import Method
from cbdsl.protocol.aggregators import Rule, Trust, aggregate, demand, parse
from cbdsl.protocol.fedavg import Combination, averaging
from cbdsl.protocol.messages import WorkerId
from cbdsl.protocol.rounds import Policy
from cbdsl.protocol.selection import Selection
from cbdsl.protocol.server import Server, rate_at
from cbdsl.protocol.state import ServerState
from cbdsl.protocol.verification import HoldOut, Verifier, copying, guarded, measuring, trusting
from cbdsl.rng import seed_of, stream
from cbdsl.spec import Spec
from cbdsl.workers.batches import batches_of
from cbdsl.workers.local import scorer


@dataclass(frozen=True, eq=False)
class Parts:
    """What a user brings as objects instead of by name; none: what the spec names."""

    method: Method | None = None
    selection: Selection | None = None
    aggregator: Rule | None = None


def server_of(spec: Spec, engine: Engine, samples: Samples, split: Split, given: Parts, secret: int = 0) -> Server:
    """The server of a spec. secret: what workers do not know; 0: the seed decides."""
    method = given.method or method_of(spec)
    selection = given.selection or selection_of(spec)
    cap = spec.defence.invitations and max(spec.defence.invitations, max(spec.defence.declared, 0) + selection.most)
    return Server(
        spec,
        method,
        verifier_of(spec, method, engine, samples, split, secret),
        Policy(selection, cap, spec.defence.commitment, codecs_of(spec)),
        combination_of(spec, engine, samples, split, given.aggregator),
    )


def method_of(spec: Spec) -> Method:
    """The method that a spec names, with its settings."""
    made = register.method.make(spec.method, spec.options.of(spec.method))
    if not isinstance(made, Method):
        raise UserError(f"The method '{spec.method}' is a {type(made).__name__}; it must be a cbdsl.Method.")
    return made


def selection_of(spec: Spec) -> Selection:
    """The selection that a spec names, with its settings; `selection.k` is a short way to `options.NAME.k`."""
    name, options = spec.selection.name, dict(spec.options.of(spec.selection.name))
    if "momentum" in register.selection.settings(name):
        options["momentum"] = spec.server.momentum
    if spec.selection.k:
        if "k" not in register.selection.settings(name):
            raise UserError(f"The selection '{name}' has no k; given selection.k={spec.selection.k}. Leave it out.")
        options["k"] = spec.selection.k
    made = register.selection.make(name, options)
    if not isinstance(made, Selection):
        raise UserError(f"The selection '{name}' is a {type(made).__name__}; it must be a cbdsl.Selection.")
    return made


def verifier_of(
    spec: Spec, method: Method, engine: Engine, samples: Samples, split: Split, secret: int = 0
) -> Verifier:
    """How the server of a spec judges uploads: it can measure only where D_sc is shared."""
    if not (method.conversation == "swarm" and method.verifies and spec.shares_scoring):
        return trusting(engine.size)
    plain = measuring(scorer(engine, samples, split.shared_scoring), engine.size, spec.verification.tolerance)
    trains = spec.shares_training and method.gradients and len(split.shared_training)
    if trains:
        plain = replace(plain, copies=copying(trainer(spec, engine, samples, split.shared_training)))
    if not spec.defence.guard:
        return plain

    def private(weights: Floats, round_number: int) -> Doubles:
        """A random half of the hold-out, another one every round."""
        drawn = stream(secret or spec.seed, "hold-out", round_number).permutation(split.holdout)
        return batch_losses(engine, weights, samples, drawn[: -(-len(drawn) // 2)])

    holdout = HoldOut(lambda weights: batch_losses(engine, weights, samples, split.shared_scoring), private)
    train = trainer(spec, engine, samples, split.shared_training, secret) if trains else None
    return guarded(plain, holdout, spec.defence.false_alarm, train)


def batch_losses(engine: Engine, weights: Floats, samples: Samples, indices: Indices) -> Doubles:
    """Mean losses of a model on batches of samples, as even as can be, at most a hundred, (B,)."""
    batches = np.array_split(engine.sample_losses(weights, samples, indices), min(100, len(indices)))
    # Added in their order, one by one, as the native engine does: np.sum's pairs show in the last digits.
    return np.array([np.cumsum(batch)[-1] / len(batch) for batch in batches])


def combination_of(
    spec: Spec, engine: Engine, samples: Samples, split: Split, given: Rule | None = None
) -> Combination:
    """How a server combines models where everybody uploads one. given: a rule of the user's own."""
    name, declared = spec.defence.aggregator, spec.defence.declared
    if name == "mean" and given is None:
        return averaging({worker: len(own) for worker, own in enumerate(split.workers)})
    if given is None:
        demand(name, spec.workers, declared)
    plain = name.rpartition("+")[2]
    if plain == "fltrust" and not len(split.shared_training):
        raise UserError(f"The aggregator '{name}' trains on D_tr at the server; data.shared_training is 0.")
    rule: Rule = given or register.aggregator.make(parse(name)[1], spec.options.of(plain))
    train = trainer(spec, engine, samples, split.shared_training)

    def combine(state: ServerState, workers: Sequence[WorkerId], models: Sequence[Floats]) -> Floats:  # noqa: ARG001
        def root() -> Floats:
            return train(state.global_best, state.round + 1)

        def losses(rows: Floats) -> Doubles:
            return engine.losses(rows, samples, split.shared_scoring)

        return aggregate(name, models, declared, Trust(state.global_best, root, losses), rule)

    return combine


def trainer(
    spec: Spec, engine: Engine, samples: Samples, indices: Indices, secret: int = 0
) -> Callable[[Floats, int], Floats]:
    """What the server makes of a model in a round, when it trains it as workers do, on samples of its own.

    secret: decides the order of samples, if it is not 0, so that nobody knows the server's step to the digit.
    """
    seed = secret or spec.seed

    def train(weights: Floats, round_number: int) -> Floats:
        rows = batches_of(indices, spec.local, stream(seed, "root", round_number))
        seeds = np.array([seed_of(seed, "root", round_number, worker=1)], dtype=np.uint64)
        sgd = Sgd(rate_at(spec, round_number), spec.local.momentum, spec.local.weight_decay)
        return np.asarray(engine.train(weights[None], samples, rows[None], sgd, seeds)[0])

    return train
