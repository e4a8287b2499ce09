"""Law: with a guard no selection ever adopts a model that is worse in private, whatever the attack."""

from __future__ import annotations

import numpy as np
import pytest

import cbdsl
from cbdsl import register
from cbdsl.runs.build import Experiment
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec

ATTACKS = [name for name in register.attack.names() if name not in ("absent", "staller")]
SELECTIONS = {"best": {}, "soup": {}, "rotation": {}, "agreement": {"options.rotation.agreement": True}}


def private_losses(spec: Spec) -> list[float]:
    """The loss of w^g on the whole hold-out, before the first round and after each."""
    experiment = Experiment.prepare(resolve(spec))
    measure, state = experiment.server.verifier.loss, experiment.first_state()
    assert measure is not None
    losses = [measure(state.global_best)]
    for _ in range(spec.rounds):
        state, _ = experiment.server.play(state, experiment.server.order(state), experiment.swarm)
        losses.append(measure(state.global_best))
    return losses


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_private_loss_never_rises(attack: str) -> None:
    for place, (selection, settings) in enumerate(SELECTIONS.items()):
        spec = cbdsl.preset("small-iid").with_settings({
            "workers": 5, "rounds": 2, "model": "softmax", "local.epochs": 1, "data.samples_per_worker": 20,
            "data.shared_training": 20, "data.shared_scoring": 40, "data.holdout": 40, "seed": place,
            "attack.name": attack, "attack.byzantine": 3, "defence.declared": 3, "init": "",
            "selection.k": 0 if selection == "best" else 3,
            "selection.name": selection if selection != "agreement" else "rotation", **settings,
        })  # fmt: skip
        losses = private_losses(spec)
        assert (np.diff(losses) <= 0).all(), (selection, losses)
