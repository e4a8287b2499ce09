"""Runs of a module of which a part is frozen: what is sent, what is kept, and from what such a run may start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import cbdsl
from cbdsl.export.predict import predict, read_unseen
from cbdsl.network.device_worker import parse_announcement
from cbdsl.network.session import announce, pack_shared_sets
from cbdsl.network.wire import WireError
from cbdsl.runs import loop
from cbdsl.runs.build import Experiment, UserParts
from cbdsl.runs.resolve import resolve
from support.bus import Bus
from support.helpers import blobs, perceptron, run_until, small_spec
from support.refusals import refused_as
from support.worker_threads import crew, play

ALL, TRAINED = 8 * 6 + 6 + 6 * 3 + 3, 6 * 3 + 3


def tuned() -> nn.Module:
    """The perceptron of which only the last layer trains."""
    module = perceptron()
    module[0].requires_grad_(False)  # type: ignore[index]
    return module


def experiment(build: Any = tuned, **settings: Any) -> Experiment:  # noqa: ANN401
    spec = resolve(replace(small_spec(**settings), model="custom"))
    return Experiment.prepare(spec, UserParts(model=build, data=blobs()), 1)


@pytest.mark.parametrize("engine", ["auto", "torch"])
@pytest.mark.parametrize("method", ["cb-dsl", "fedavg", "scaffold"])
def test_what_is_frozen_stays_as_it_was_and_what_trains_learns(engine: str, method: str, tmp_path: Path) -> None:
    spec = small_spec(engine=engine, method=method, rounds=12, local__learning_rate=0.3)
    result = cbdsl.run(spec, model=tuned, data=blobs(), out=tmp_path / "run")
    assert result.weights.shape == (TRAINED,)
    assert result.summary.parameters == TRAINED
    assert result.summary.final_accuracy > 0.6
    assert np.array_equal(result.model[0].weight.detach().numpy(), tuned_weights()["0.weight"])  # type: ignore[index]
    saved = cbdsl.load(tmp_path / "run")
    assert saved.card.frozen == ("0.weight", "0.bias")
    assert saved.weights.shape == (ALL,)
    features = blobs().test.features
    logits = saved.model(torch.from_numpy(features)).detach().numpy()
    assert np.array_equal(logits.argmax(1), result.predict(features))
    np.savez(tmp_path / "unseen.npz", features=features)
    assert predict(saved, read_unseen(tmp_path / "unseen.npz", saved)).labels.tolist() == logits.argmax(1).tolist()


def tuned_weights() -> dict[str, Any]:
    network = experiment().network
    return network.tensors(network.initial_weights(0))


def test_bytes_are_those_of_the_weights_that_train() -> None:
    spec = small_spec(method="fedavg", rounds=2)
    part, whole = (cbdsl.run(spec, model=build, data=blobs()).summary for build in (tuned, perceptron))
    assert part.uplink_bytes < 0.5 * whole.uplink_bytes
    assert whole.uplink_bytes - part.uplink_bytes == 2 * 6 * 4 * (ALL - TRAINED)
    assert whole.downlink_bytes - part.downlink_bytes == 2 * 6 * 4 * (ALL - TRAINED)


@pytest.mark.parametrize("codec", ["q4", "topk"])
def test_verified_runs_with_codecs_ban_nobody(codec: str) -> None:
    summary = cbdsl.run(small_spec(codec__up=codec, codec__down="q4", rounds=8), model=tuned, data=blobs()).summary
    assert summary.banned == []
    assert summary.uploads > 0


def test_a_run_starts_from_a_model_of_which_all_was_trained_and_tunes_its_head(tmp_path: Path) -> None:
    before = cbdsl.run(small_spec(rounds=8), model=perceptron, data=blobs(), out=tmp_path / "before")
    starts: tuple[Any, ...] = (before, tmp_path / "before", before.weights)
    results = [
        cbdsl.run(small_spec(rounds=2), model=tuned, data=blobs(), out=tmp_path / f"after{number}", init=init)
        for number, init in enumerate(starts)
    ]
    body = load_file(tmp_path / "before" / "model.safetensors")["0.weight"]
    for number, result in enumerate(results):
        assert np.array_equal(result.weights, results[0].weights)
        assert np.array_equal(load_file(tmp_path / f"after{number}" / "model.safetensors")["0.weight"], body)
    assert not np.array_equal(body, tuned_weights()["0.weight"])
    again = cbdsl.run(small_spec(rounds=1), model=tuned, data=blobs(), init=results[0])
    assert np.array_equal(again.model[0].weight.detach().numpy(), body)  # type: ignore[index]
    with refused_as("wrong-shape", "75"):
        cbdsl.run(small_spec(rounds=1), model=tuned, data=blobs(), init=np.zeros(20, np.float32))


def test_a_key_covers_the_frozen_values(tmp_path: Path) -> None:
    def other() -> nn.Module:
        module = tuned()
        nn.init.constant_(module[0].bias, 0.25)  # type: ignore[index]
        return module

    assert len({experiment(build).key for build in (tuned, other, perceptron)}) == 3
    assert experiment().key == experiment().key
    spec = small_spec(rounds=6)
    stopped = tmp_path / "stopped"
    run_until(3, spec, model=tuned, data=blobs(), out=stopped)
    with refused_as("wrong-run"):
        loop.resume(stopped, model=other, data=blobs())
    resumed = loop.resume(stopped, model=tuned, data=blobs())
    assert np.array_equal(resumed.weights, cbdsl.run(spec, model=tuned, data=blobs()).weights)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("settings", [{}, {"method": "fedavg", "shared": "none"}])
def test_devices_get_the_frozen_weights_and_keep_the_whole_model(
    settings: dict[str, Any], native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, bus = experiment(**settings), Bus()
    if not native:
        monkeypatch.setattr("cbdsl.engines.native_engine.available", lambda: "the native engine was not built")
    with crew(bus, stage, tmp_path) as workers:
        served = play(bus, stage, tmp_path, workers.names)
        for thread in workers.threads.values():
            thread.join(20)
    simulated = cbdsl.run(small_spec(**settings), model=tuned, data=blobs(), threads=1)
    np.testing.assert_allclose(served.result.weights, simulated.weights, rtol=0, atol=0 if native else 1e-5)
    assert served.result.summary.banned == []
    there, here = cbdsl.load(tmp_path / "run"), cbdsl.load(tmp_path / "w0" / "model.safetensors")
    assert here.card == there.card
    assert here.card.frozen == ("0.weight", "0.bias")
    assert np.array_equal(here.weights, there.weights)


def test_frozen_weights_that_cannot_be_sent_are_refused_with_the_reason() -> None:
    def strange() -> nn.Module:
        module = nn.Sequential(nn.Linear(8, 6), nn.PReLU(), nn.Linear(6, 3))
        module[0].requires_grad_(False)
        return module

    stage = experiment(strange)
    with refused_as("not-supported", "frozen weights", "layer 1 (PReLU)"):
        announce(stage, b"run-0001", pack_shared_sets(stage))
    stage = experiment(engine="torch")
    with refused_as("not-supported", "frozen weights", "the torch engine was asked for"):
        announce(stage, b"run-0001", pack_shared_sets(stage))


@pytest.mark.parametrize(
    "ranges", [[], [[0, 0]], [[-1, 4]], [[60, 16]], [[0, 30], [20, 30]], [[0, 27], [27, 27]], [[0]], "x", [[0, 2**40]]]
)
def test_an_announcement_of_frozen_weights_that_cannot_be_is_refused(ranges: object) -> None:
    stage = experiment()
    shared = pack_shared_sets(stage)
    announcement = announce(stage, b"run-0001", shared)
    assignment = parse_announcement(announcement)
    assert assignment.frozen is not None
    assert assignment.frozen.tolist() == [[0, ALL - TRAINED]]
    tree = json.loads(announcement.architecture) | {"frozen": ranges}
    with pytest.raises(WireError):
        parse_announcement(replace(announcement, architecture=json.dumps(tree)))
    with pytest.raises(WireError):
        parse_announcement(replace(announcement, shared_size=4 * (ALL - TRAINED) - 1))
    with pytest.raises(WireError):
        assignment.network(shared[:-4] + np.array([np.nan], "<f4").tobytes())
    with pytest.raises(WireError):
        assignment.network(b"")
