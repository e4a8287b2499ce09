from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn
from typer.testing import CliRunner

import cbdsl
from cbdsl.algorithm.messages import Claim, Order, Upload
from cbdsl.algorithm.methods import FedAvgM, FedProx
from cbdsl.algorithm.rotation import Soup
from cbdsl.arrays import Doubles, Floats
from cbdsl.attacks.attack import Attack, AttackContext
from cbdsl.attacks.weights import Scaled
from cbdsl.cli.app import app
from cbdsl.errors import UserError
from cbdsl.models.architecture import Architecture, from_module
from cbdsl.models.saved_model import ModelMetadata
from cbdsl.runs import resolve as resolve_module
from cbdsl.runs.build import Experiment, UserParts
from cbdsl.runs.loop import play_rounds
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec
from support.helpers import blobs, perceptron, run_until, small_spec
from support.refusals import refused_as


@dataclass(frozen=True)
class Nudge(Attack):
    """Adds a number to every weight."""

    by: float = 0.5

    def upload(self, seen: AttackContext) -> Floats:
        return seen.model + np.float32(self.by)


def test_a_registered_part_given_as_an_object_is_recorded_by_name_with_its_settings() -> None:
    spec = small_spec(method="fedavg", attack__byzantine=1, rounds=1)
    result = cbdsl.run(spec, model=perceptron, data=blobs(), attack=Scaled(scale=3), method=FedProx(mu=0.5))
    assert (result.spec.attack.name, result.spec.method) == ("scaled", "fedprox")
    assert result.spec.options.of("scaled") == {"honest_claim": False, "scale": 3}
    assert result.spec.options.of("fedprox") == {"mu": 0.5}
    by_name = small_spec(method="fedprox", attack__byzantine=1, attack__name="scaled", rounds=1).with_settings(
        {"options.scaled.scale": 3, "options.fedprox.mu": 0.5}
    )
    again = cbdsl.run(by_name, model=perceptron, data=blobs())
    np.testing.assert_array_equal(again.weights, result.weights)


def test_a_part_without_a_name_is_custom_and_has_to_be_given_again(tmp_path: Path) -> None:
    spec = small_spec(method="fedavg", attack__byzantine=1, rounds=2)
    result = cbdsl.run(spec, model=perceptron, data=blobs(), attack=Nudge(by=9.0), out=tmp_path / "run")
    assert result.spec.attack.name == "custom"
    with refused_as("missing-part", "attack="):
        cbdsl.resume(tmp_path / "run", model=perceptron, data=blobs())
    again = cbdsl.resume(tmp_path / "run", model=perceptron, data=blobs(), attack=Nudge(by=9.0))
    np.testing.assert_array_equal(again.weights, result.weights)


def test_a_selection_and_an_aggregator_can_be_objects_or_functions() -> None:
    souped = cbdsl.run(small_spec(rounds=2), model=perceptron, data=blobs(), selection=Soup(k=2))
    assert (souped.spec.selection.name, souped.spec.options.of("soup")) == ("soup", {"byzantine": 0.5, "k": 2})

    def middle(rows: Doubles, attackers: int, trust: cbdsl.TrustedReference) -> Doubles:  # noqa: ARG001
        return np.asarray(np.median(rows, axis=0))

    own = cbdsl.run(small_spec(method="fedavg", rounds=2), model=perceptron, data=blobs(), aggregator=middle)
    named = cbdsl.run(small_spec(method="fedavg", rounds=2), model=perceptron, data=blobs(), aggregator="median")
    assert own.spec.defence.aggregator == "custom"
    np.testing.assert_allclose(own.weights, named.weights, rtol=1e-6)


@pytest.mark.parametrize("kind", ["method", "attack", "aggregator", "selection", "partition"])
def test_a_class_where_an_object_is_wanted(kind: str) -> None:
    class Own(Nudge):
        pass

    spec = small_spec(attack__byzantine=1)
    with refused_as("wrong-type", f"{kind}=Own()"):
        cbdsl.run(spec, model=perceptron, data=blobs(), **{kind: Own})  # type: ignore[arg-type]


def test_a_registered_class_is_known_by_its_name() -> None:
    spec = small_spec(method="fedavg", attack__byzantine=1, rounds=1)
    result = cbdsl.run(spec, model=perceptron, data=blobs(), attack=Scaled)  # type: ignore[arg-type]
    assert result.spec.attack.name == "scaled"


class Elsewhere:
    """Workers behind a wall: carries every call over it and counts."""

    def __init__(self, stage: Experiment) -> None:
        self._inner, self.calls = stage.memory_swarm, 0

    def report(self, order: Order) -> Mapping[int, Claim]:
        self.calls += 1
        return self._inner.report(order)

    def upload(self, workers: Sequence[int]) -> Mapping[int, Upload]:
        self.calls += 1
        return self._inner.upload(workers)


def test_workers_can_live_elsewhere() -> None:
    made: list[Elsewhere] = []

    def make(stage: Experiment) -> Elsewhere:
        made.append(Elsewhere(stage))
        return made[-1]

    away = cbdsl.run(small_spec(), model=perceptron, data=blobs(), swarm=make)
    home = cbdsl.run(small_spec(), model=perceptron, data=blobs())
    assert len(made) == 1
    assert made[0].calls >= 5
    np.testing.assert_array_equal(away.weights, home.weights)


def test_an_attack_without_attackers_is_refused() -> None:
    with refused_as("no-effect", "attack.byzantine"):
        cbdsl.run(small_spec(), model=perceptron, data=blobs(), attack=Nudge())


def test_an_object_keeps_its_own_settings_whatever_the_spec_says() -> None:
    spec = small_spec(method="fedavg", attack__byzantine=1, attack__scale=2.0, rounds=1)
    result = cbdsl.run(spec, model=perceptron, data=blobs(), attack=Scaled(scale=7.0))
    assert result.spec.attack.scale == 0.0
    assert result.spec.options.of("scaled") == {"honest_claim": False, "scale": 7.0}


def test_data_made_from_a_registered_set_is_not_recorded_under_its_name(mnist: cbdsl.Dataset) -> None:
    few = replace(mnist, train=mnist.train.taken(np.arange(3000, dtype=np.int32)))
    spec = small_spec(rounds=1, model="softmax")
    assert cbdsl.run(spec, data=few).spec.data.source == "custom"
    assert cbdsl.run(spec, data=mnist).spec.data.source == "mnist"


def test_a_run_with_workers_elsewhere_does_not_go_on_without_them(tmp_path: Path) -> None:
    run_until(2, small_spec(), model=perceptron, data=blobs(), swarm=Elsewhere, out=tmp_path / "run")
    with refused_as("missing-part", "cbdsl.resume(..., swarm=...)"):
        cbdsl.resume(tmp_path / "run", model=perceptron, data=blobs())


class Doubling(cbdsl.SwarmMethod):
    """Would send two vectors where one was scored."""

    vectors = 2


class Broken(cbdsl.AveragingMethod):
    """Loses its numbers at the server."""

    def update(self, seen: cbdsl.ServerStep) -> tuple[Floats, Floats]:
        return seen.combined * np.float32(np.nan), seen.memory


class OldForm(FedAvgM):
    """Overrides `step`, as classes did before `update`."""

    def step(self, current: Floats, memory: Floats, combined: Floats, share: float) -> tuple[Floats, Floats]:
        return super().step(current, memory, combined, share)


def test_a_method_with_the_old_form_of_its_servers_half_works_and_warns() -> None:
    parts: dict[str, Any] = {"model": perceptron, "data": blobs()}
    with pytest.warns(DeprecationWarning, match="OldForm.step is now update"):
        found = cbdsl.run(small_spec(rounds=3), method=OldForm(), **parts)
    expected = cbdsl.run(small_spec(rounds=3), method=FedAvgM(), **parts)
    np.testing.assert_array_equal(found.weights, expected.weights)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"method": Doubling()}, "in a swarm an upload is one model"),
        ({"method": Broken()}, "The update of Broken gives numbers that are not finite"),
        ({"method": "fedavg", "selection": "soup"}, "FedAvg's defences are its aggregators"),
    ],
)
def test_parts_that_cannot_work_are_refused_by_name(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        cbdsl.run(small_spec(rounds=2), model=perceptron, data=blobs(), **parts)


class _Sized(Elsewhere):
    """Workers elsewhere that count as empty."""

    def __len__(self) -> int:
        return 0


def test_a_swarm_of_length_zero_is_used() -> None:
    made: list[_Sized] = []

    def make(experiment: Experiment) -> _Sized:
        made.append(_Sized(experiment))
        return made[-1]

    experiment = Experiment.prepare(resolve(small_spec()), UserParts(model=perceptron, data=blobs()), 1)
    swarm = make(experiment)
    next(play_rounds(experiment, experiment.first_state(), swarm))
    cbdsl.run(small_spec(rounds=1), model=perceptron, data=blobs(), swarm=make)
    assert [one.calls > 0 for one in made] == [True, True]


def test_a_module_is_built_once_for_the_engine_and_traced_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built, traced = 0, 0

    def build() -> nn.Module:
        nonlocal built
        built += 1
        return perceptron()

    def trace(module: nn.Module, shape: tuple[int, ...]) -> Architecture:
        nonlocal traced
        traced += 1
        return from_module(module, shape)

    monkeypatch.setattr("cbdsl.models.network.from_module", trace)
    spec = small_spec(rounds=1, attack__byzantine=1)
    result = cbdsl.run(spec, model=build, data=blobs(), out=tmp_path / "run")
    assert (built, traced) == (2, 1)  # the second one has the initial weights
    metadata = ModelMetadata.of(result.network)
    assert metadata.graph is result.network.description()


@pytest.mark.slow
def test_workers_that_cannot_be_reached_leave_no_folder_behind_in_optimised_python(tmp_path: Path) -> None:
    program = (
        "import cbdsl\n"
        "def unreachable(experiment): raise cbdsl.UserError('No cluster there.')\n"
        "spec = cbdsl.Spec(workers=2, rounds=1, model='softmax')\n"
        "try: cbdsl.run(spec, swarm=unreachable, out='run', threads=1)\n"
        "except cbdsl.UserError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "No cluster there.\n"
    assert list(tmp_path.iterdir()) == []


def test_a_spec_is_resolved_once_per_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = 0
    inner = resolve_module.resolve

    def counted(*arguments: Any) -> Spec:  # noqa: ANN401 - those of `resolve`
        nonlocal calls
        calls += 1
        return inner(*arguments)

    for place in ("cbdsl.cli.spec_options.resolve", "cbdsl.runs.resolve.resolve", "cbdsl.runs.loop.resolve"):
        monkeypatch.setattr(place, counted)
    monkeypatch.chdir(tmp_path)
    small = ["--workers", "2", "--rounds", "1", "--model", "softmax", "--set", "data.samples_per_worker=20"]
    done = CliRunner().invoke(app, ["run", *small, "--threads", "1", "--json"])
    assert (done.exit_code, calls) == (0, 1), done.output
