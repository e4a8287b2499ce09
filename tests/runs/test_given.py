from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

import cbdsl
from cbdsl.arrays import Doubles, Floats
from cbdsl.byzantine.attack import Attack, Situation
from cbdsl.byzantine.on_weights import Scaled
from cbdsl.errors import UserError
from cbdsl.methods.fedprox import FedProx
from cbdsl.protocol.messages import Claim, Order
from cbdsl.protocol.selection import Soup
from cbdsl.runs.stage import Stage
from helpers import blobs, perceptron, small_spec


@dataclass(frozen=True)
class Nudge(Attack):
    """Adds a number to every weight."""

    by: float = 0.5

    def upload(self, seen: Situation) -> Floats:
        return seen.model + np.float32(self.by)


def test_a_registered_part_given_as_an_object_is_recorded_by_name_with_its_settings() -> None:
    spec = small_spec(method="fedavg", attack__byzantine=1, rounds=1)
    result = cbdsl.run(spec, model=perceptron, data=blobs(), attack=Scaled(scale=3), method=FedProx(mu=0.5))
    assert (result.spec.attack.name, result.spec.method) == ("scaled", "fedprox")
    assert result.spec.options.of("scaled") == {"scale": 3}
    assert result.spec.options.of("fedprox") == {"mu": 0.5}
    by_name = small_spec(method="fedprox", attack__byzantine=1, attack__name="scaled", rounds=1).with_settings(
        {"options.scaled.scale": 3, "options.fedprox.mu": 0.5}
    )
    again = cbdsl.run(by_name, model=perceptron, data=blobs())
    np.testing.assert_array_equal(again.weights, result.weights)


def test_a_part_without_a_name_is_custom_and_has_to_be_given_again(tmp_path) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001
    spec = small_spec(method="fedavg", attack__byzantine=1, rounds=2)
    result = cbdsl.run(spec, model=perceptron, data=blobs(), attack=Nudge(by=9.0), out=tmp_path / "run")
    assert result.spec.attack.name == "custom"
    with pytest.raises(UserError, match=r"attack of this run was given in Python; give it again with attack="):
        cbdsl.resume(tmp_path / "run", model=perceptron, data=blobs())
    again = cbdsl.resume(tmp_path / "run", model=perceptron, data=blobs(), attack=Nudge(by=9.0))
    np.testing.assert_array_equal(again.weights, result.weights)


def test_a_selection_and_an_aggregator_can_be_objects_or_functions() -> None:
    souped = cbdsl.run(small_spec(rounds=2), model=perceptron, data=blobs(), selection=Soup(k=2))
    assert (souped.spec.selection.name, souped.spec.options.of("soup")) == ("soup", {"k": 2})

    def middle(rows: Doubles, attackers: int, trust: cbdsl.Trust) -> Doubles:  # noqa: ARG001
        return np.asarray(np.median(rows, axis=0))

    own = cbdsl.run(small_spec(method="fedavg", rounds=2), model=perceptron, data=blobs(), aggregator=middle)
    named = cbdsl.run(small_spec(method="fedavg", rounds=2), model=perceptron, data=blobs(), aggregator="median")
    assert own.spec.defence.aggregator == "custom"
    np.testing.assert_allclose(own.weights, named.weights, rtol=1e-6)


class Elsewhere:
    """Workers behind a wall: carries every call over it and counts."""

    def __init__(self, stage: Stage) -> None:
        self._inner, self.calls = stage.memory_swarm, 0

    def report(self, order: Order) -> Mapping[int, Claim]:
        self.calls += 1
        return self._inner.report(order)

    def upload(self, workers: Sequence[int]) -> Mapping[int, Floats]:
        self.calls += 1
        return self._inner.upload(workers)


def test_workers_can_live_elsewhere() -> None:
    made: list[Elsewhere] = []

    def make(stage: Stage) -> Elsewhere:
        made.append(Elsewhere(stage))
        return made[-1]

    away = cbdsl.run(small_spec(), model=perceptron, data=blobs(), swarm=make)
    home = cbdsl.run(small_spec(), model=perceptron, data=blobs())
    assert len(made) == 1
    assert made[0].calls >= 5
    np.testing.assert_array_equal(away.weights, home.weights)


def test_an_attack_without_attackers_is_refused() -> None:
    with pytest.raises(UserError, match=r"no worker is an attacker. Set attack\.byzantine"):
        cbdsl.run(small_spec(), model=perceptron, data=blobs(), attack=Nudge())
