"""An augmentation of one's own: applied where a model trains and nowhere else, by every worker on its own numbers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cbdsl
from cbdsl import register
from cbdsl.arrays import Floats
from cbdsl.engines.engine import Sgd
from cbdsl.engines.torch_engine import StackedTorchEngine, TorchEngine
from cbdsl.network.device_worker import DeviceWorker, parse_announcement
from cbdsl.network.session import announce, pack_shared_sets
from cbdsl.runs import loop
from cbdsl.runs.build import Experiment, UserParts
from cbdsl.runs.resolve import resolve
from support.bus import Bus
from support.helpers import blobs, perceptron, run_until, small_spec
from support.networks import SMALL, initial, module_of, samples_for
from support.refusals import refused_as
from support.worker_threads import crew, play


def doubled(batch: Tensor) -> Tensor:
    return 2 * batch


def shaken(batch: Tensor) -> Tensor:
    return batch + 0.3 * torch.randn(batch.shape)


@pytest.mark.parametrize("stacked", [False, True])
def test_models_train_on_what_it_makes_and_are_scored_on_what_there_is(stacked: bool) -> None:
    samples, weights = samples_for(SMALL, 60), initial(SMALL, 3)
    batches = np.random.default_rng(0).integers(0, 60, (3, 4, 6)).astype(np.int32)
    module, place = module_of(SMALL), torch.device("cpu")
    engine: Any = (
        StackedTorchEngine(module, place, augmentation=doubled)
        if stacked
        else TorchEngine(module, augmentation=doubled)
    )
    plain, twice = TorchEngine(module), type(samples)(2 * samples.features, samples.labels)
    found = engine.train(weights, samples, batches, Sgd(0.1))
    assert np.array_equal(found, plain.train(weights, twice, batches, Sgd(0.1)))
    everything = np.arange(60, dtype=np.int32)
    assert np.array_equal(engine.losses(found, samples, everything), plain.losses(found, samples, everything))
    assert np.array_equal(engine.gradients(found, samples, everything), plain.gradients(found, samples, everything))


def test_a_worker_draws_from_its_own_seed_whoever_trains_beside_it() -> None:
    samples, weights = samples_for(SMALL, 60), np.repeat(initial(SMALL, 1), 3, axis=0)
    batches = np.repeat(np.random.default_rng(0).integers(0, 60, (1, 4, 6)).astype(np.int32), 3, axis=0)
    engine = TorchEngine(module_of(SMALL), 2, augmentation=shaken)
    seeds = np.array([5, 6, 5], np.uint64)
    before = torch.get_rng_state()
    found = engine.train(weights, samples, batches, Sgd(0.1), seeds)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(found[0], found[2])
    assert not np.array_equal(found[0], found[1])
    assert np.array_equal(engine.train(weights[1:2], samples, batches[1:2], Sgd(0.1), seeds[1:2])[0], found[1])


@pytest.mark.parametrize("method", ["cb-dsl", "fedavg", "server-only"])
def test_a_run_with_a_function_of_ones_own_repeats_and_resumes(method: str, tmp_path: Path) -> None:
    spec = small_spec(method=method)
    given: dict[str, Any] = {"model": perceptron, "data": blobs(), "augmentation": shaken}
    result = cbdsl.run(spec, out=tmp_path / "run", **given)
    assert (result.summary.engine, result.spec.local.augment) == ("torch", "custom")
    assert result.summary.banned == []
    assert result.summary.final_accuracy > 0.6
    plain = cbdsl.run(small_spec(method=method, engine="torch"), model=perceptron, data=blobs())
    assert not np.array_equal(result.weights, plain.weights)
    assert cbdsl.load(tmp_path / "run").graph.size == len(result.weights)  # described, so it can be exported
    run_until(3, spec, out=tmp_path / "stopped", **given)
    with refused_as("missing-part", "augmentation="):
        loop.resume(tmp_path / "stopped", model=perceptron, data=blobs())
    assert np.array_equal(loop.resume(tmp_path / "stopped", **given).weights, result.weights)


def test_one_with_a_name_has_settings_and_is_part_of_the_key() -> None:
    spec = small_spec(local__augment="noise")
    strong = spec.with_settings({"options.noise.deviation": 0.5})
    assert len({small_spec().key(), spec.key(), strong.key()}) == 3
    weights = [cbdsl.run(each, model=perceptron, data=blobs()).weights for each in (spec, strong)]
    assert not np.array_equal(weights[0], weights[1])
    named = cbdsl.run(small_spec(), model=perceptron, data=blobs(), augmentation="noise")
    assert np.array_equal(named.weights, weights[0])
    with refused_as("unknown-name", "nois"):
        resolve(small_spec(local__augment="nois"))
    with refused_as("no-effect", "options.noise"):
        resolve(small_spec().with_settings({"options.noise.deviation": 0.5}))
    with refused_as("not-supported", "augmentation"):
        cbdsl.run(spec.with_settings({"engine": "native"}), model=perceptron, data=blobs())


@pytest.mark.parametrize(
    ("wrong", "code", "fact"),
    [
        (lambda batch: batch[:, :3], "wrong-shape", "(2, 3)"),
        (lambda batch: batch.double(), "wrong-shape", "float64"),
        (lambda batch: batch.numpy(), "wrong-shape", "ndarray"),
        (lambda batch: batch @ torch.zeros(3), "invalid-part", "fails"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_before_the_run(wrong: Any, code: str, fact: str) -> None:  # noqa: ANN401
    with refused_as(code, "augmentation", fact):
        cbdsl.run(small_spec(), model=perceptron, data=blobs(), augmentation=wrong)


def named(**settings: Any) -> Experiment:  # noqa: ANN401
    return Experiment.prepare(
        resolve(small_spec(local__augment="noise", **settings)), UserParts(model=perceptron, data=blobs()), 1
    )


def test_devices_that_have_it_apply_it_and_others_say_what_they_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, bus = (
        named(rounds=3, workers=1),
        Bus(),
    )  # one worker in a process, as on a device: torch's generator is shared
    with crew(bus, stage, tmp_path) as workers:
        served = play(bus, stage, tmp_path, workers.names)
    assert served.result.summary.banned == []
    simulated = cbdsl.run(stage.spec, model=perceptron, data=blobs(), threads=1)
    np.testing.assert_allclose(served.result.weights, simulated.weights, atol=1e-5)
    shared = pack_shared_sets(stage)
    assignment = parse_announcement(announce(stage, b"run-0001", shared))
    monkeypatch.delitem(register.augmentation._parts, "noise")
    with refused_as("missing-part", "'noise'", "--plugin"):
        DeviceWorker(assignment, 0, blobs().test, shared, 1)


def test_a_function_given_in_python_is_not_announced_to_devices() -> None:
    spec = resolve(small_spec(local__augment="custom"))
    stage = Experiment.prepare(spec, UserParts(model=perceptron, data=blobs(), augmentation=doubled), 1)
    with refused_as("not-supported", "augmentation", "--plugin"):
        announce(stage, b"run-0001", b"")


def test_dropout_and_augmentation_draw_one_after_the_other() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.5), nn.Linear(6, 3))

    results = [cbdsl.run(small_spec(rounds=2), model=build, data=blobs(), augmentation=shaken) for _ in range(2)]
    assert np.array_equal(results[0].weights, results[1].weights)


def test_engines_in_several_threads_draw_what_they_draw_alone() -> None:
    """Torch's generator belongs to the process, so a training that draws must not run beside another one."""
    experiment = named(rounds=1)
    samples, rng = blobs().train, np.random.default_rng(3)
    batches = rng.integers(0, len(samples), (1, 40, 10)).astype(np.int32)

    engines = [
        Experiment.prepare(experiment.spec, UserParts(model=perceptron, data=blobs()), 1).engine for _ in range(6)
    ]

    def train(seed: int) -> Floats:
        return engines[seed].train(experiment.initial, samples, batches, Sgd(0.1), np.array([seed], np.uint64))

    alone = [train(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(train, range(6)))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)
