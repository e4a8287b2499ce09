"""Two workers with three samples each, softmax regression, whole batches: small enough to be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cbdsl.algorithm.ledger import Traffic
from cbdsl.algorithm.messages import ServerState
from cbdsl.arrays import Doubles, Floats
from cbdsl.data.dataset import Dataset
from cbdsl.runs.build import Experiment, UserParts
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec

FEATURES = np.array(
    [[0.0, 0.0], [1.0, 1.0], [1.0, 2.0], [0.5, -1.0], [-1.0, 0.0], [2.0, 0.5], [-0.5, 1.5], [0.0, -2.0]]
)
LABELS = np.array([0, 1, 0, 1, 1, 0, 0, 1])
OWNERS = np.array([-1, -1, 0, 0, 0, 1, 1, 1])  # the first two are D_sc
RATE, STEPS = 0.5, 3


def tiny_data() -> Dataset:
    return Dataset.from_arrays(FEATURES, LABELS, FEATURES, LABELS, clients=OWNERS)


def tiny_stage(method: str, **settings: Any) -> Experiment:  # noqa: ANN401 - settings of any kind
    """Workers 0 and 1 take three steps a round over all of their samples."""
    base: dict[str, Any] = {
        "method": method,
        "model": "softmax",
        "workers": 2,
        "rounds": 2,
        "data.partition": "by-client",
        "data.shared_training": 0,
        "data.shared_scoring": 2,
        "data.holdout": 0,
        "local.epochs": STEPS,
        "local.batch_size": 3,
        "local.learning_rate": RATE,
    }
    spec = Spec().with_settings(base | {key.replace("__", "."): value for key, value in settings.items()})
    return Experiment.prepare(resolve(spec), UserParts(data=tiny_data()))


def gradient(flat: Doubles, worker: int) -> Doubles:
    """Of the mean cross-entropy of softmax regression on all samples of a worker; weights (2, 2), then biases (2,)."""
    own = np.equal(OWNERS, worker)
    logits = FEATURES[own] @ flat[:4].reshape(2, 2).T + flat[4:]
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    excess = (chances - np.eye(2)[LABELS[own]]) / own.sum()
    return np.concatenate([(excess.T @ FEATURES[own]).reshape(-1), excess.sum(0)])


def played(stage: Experiment, rounds: Sequence[tuple[int, ...]]) -> tuple[list[Floats], list[tuple[Traffic, ...]]]:
    """The server's model after each round, and the messages; rounds: who takes part."""
    state: ServerState = stage.first_state()
    models, traffic = [], []
    for participants in rounds:
        order = replace(stage.server.order(state), participants=participants, receivers=len(participants))
        state, log = stage.server.play(state, order, stage.swarm)
        models.append(state.global_best)
        traffic.append(log.traffic)
    return models, traffic
