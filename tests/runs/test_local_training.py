"""`local.optimiser`, `local.schedule` and `local.clip` in whole runs, wherever a worker or the server trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cbdsl
from cbdsl import register
from cbdsl.algorithm.round import rate_at
from cbdsl.algorithm.worker_round import draw_batches
from cbdsl.engines.engine import Sgd
from cbdsl.network.device_worker import parse_announcement
from cbdsl.network.session import announce
from cbdsl.rng import seed_of, stream
from cbdsl.runs import loop
from cbdsl.runs.build import make_trainer
from cbdsl.runs.resolve import refuse_idle, resolve
from cbdsl.spec import from_toml
from cbdsl.theory.trajectory import prepare_measurement
from support.bus import Bus
from support.helpers import blobs, perceptron, run_until, small_spec
from support.refusals import refused_as
from support.worker_threads import crew, play, prepared

ADAM: dict[str, Any] = {
    "local__optimiser": "adamw",
    "local__schedule": "cosine",
    "local__clip": 1.0,
    "local__weight_decay": 0.01,
    "local__learning_rate": 0.02,
    "local__epochs": 2,
}


@pytest.mark.parametrize("method", sorted(register.method.names()))
def test_every_method_trains_with_adam_or_refuses_it_with_the_reason(method: str, tmp_path: Path) -> None:
    spec = small_spec(method=method, **ADAM)
    if method == "scaffold":
        with refused_as("conflict", "scaffold", "local.optimiser=adamw", "local.schedule=cosine"):
            resolve(spec)
        return
    whole = cbdsl.run(spec, model=perceptron, data=blobs())
    assert whole.summary.banned == []
    plain = cbdsl.run(small_spec(method=method), model=perceptron, data=blobs())
    assert np.array_equal(whole.weights, plain.weights) == (method == "pso")
    if method != "pso":
        assert whole.summary.final_accuracy > 0.6
    run_until(3, spec, model=perceptron, data=blobs(), out=tmp_path / "run")
    assert np.array_equal(loop.resume(tmp_path / "run", model=perceptron, data=blobs()).weights, whole.weights)


def test_scaffold_clips_gradients_and_learns() -> None:
    spec = small_spec(method="scaffold", rounds=8, local__clip=0.5, local__decay=0.95)
    clipped = cbdsl.run(spec, model=perceptron, data=blobs())
    free = cbdsl.run(spec.with_settings({"local.clip": 0.0}), model=perceptron, data=blobs())
    assert clipped.summary.final_accuracy > 0.6
    assert not np.array_equal(clipped.weights, free.weights)
    with refused_as("conflict", "local.schedule=warmup"):
        resolve(spec.with_settings({"local.schedule": "warmup"}))


@pytest.mark.parametrize("settings", [{}, {"method": "fedprox", "shared": "none"}, {"engine": "torch"}])
def test_devices_train_as_the_simulator_does(settings: dict[str, Any], tmp_path: Path) -> None:
    spec = small_spec(**settings, **ADAM)
    stage, bus = prepared(spec), Bus()
    assert parse_announcement(announce(stage, b"run-0001", b"")).spec.local == spec.local
    if settings.get("engine") == "torch":
        return  # a module given in Python runs on a device natively alone
    with crew(bus, stage, tmp_path) as workers:
        served = play(bus, stage, tmp_path, workers.names)
    assert served.result.summary.banned == []
    assert np.array_equal(served.result.weights, cbdsl.run(spec, model=perceptron, data=blobs(), threads=1).weights)


def test_a_run_with_plain_sgd_is_announced_as_before_these_settings_were_there() -> None:
    text = announce(prepared(small_spec()), b"run-0001", b"").spec
    assert "optimiser" not in text
    assert "schedule" not in text
    assert "clip" not in text
    assert from_toml(text).local == small_spec().local
    with_adam = announce(prepared(small_spec(**ADAM)), b"run-0001", b"").spec
    assert from_toml(with_adam).local == small_spec(**ADAM).local


def test_what_the_server_trains_by_itself_is_trained_alike() -> None:
    stage = prepared(small_spec(**ADAM))
    spec, train, indices = stage.spec, stage.dataset.train, stage.split.shared_training
    rows = draw_batches(indices, spec.local, stream(spec.seed, "root", 3))
    seeds = np.array([seed_of(spec.seed, "root", 3, worker=1)], np.uint64)
    sgd = Sgd(0.02, 0.0, 0.01, 0.0, "adamw", "cosine", 1.0)
    expected = stage.engine.train(stage.initial, train, rows[None], sgd, seeds)[0]
    assert np.array_equal(make_trainer(spec, stage.engine, train, indices)(stage.initial[0], 3), expected)
    alone = [
        cbdsl.run(small_spec(method="server-only", **own), model=perceptron, data=blobs()).weights for own in ({}, ADAM)
    ]
    assert not np.array_equal(alone[0], alone[1])


@pytest.mark.parametrize("attack", ["label-flip", "neurotoxin", "memoriser", "copycat"])
def test_attackers_and_the_guard_train_with_it_and_nobody_honest_is_banned(attack: str) -> None:
    spec = small_spec(attack__name=attack, attack__byzantine=2, defence__guard=True, selection__name="rotation", **ADAM)
    summary = cbdsl.run(spec, model=perceptron, data=blobs()).summary
    assert summary.honest_banned == 0


@pytest.mark.parametrize("schedule", ["decay", "cosine", "warmup"])
def test_a_schedule_over_the_run_sets_the_rate_of_each_round_and_resumes_exactly(schedule: str, tmp_path: Path) -> None:
    spec = small_spec(method="fedavg", rounds=20, local__schedule=schedule, local__schedule_over="run")
    factors = {
        "decay": [1.0, 0.95, 0.5, 0.05],
        "cosine": [1.0, (1 + np.cos(np.pi / 20)) / 2, 0.5, (1 + np.cos(np.pi * 0.95)) / 2],
        "warmup": [0.5, 1.0, 1.0, 1.0],
    }[schedule]
    given = [spec.local.learning_rate * factor for factor in factors]
    assert [rate_at(spec, number) for number in (1, 2, 11, 20)] == pytest.approx(given)
    assert Sgd.of(spec.local, 0.1).schedule == "constant"
    whole = cbdsl.run(spec, model=perceptron, data=blobs())
    within = cbdsl.run(spec.with_settings({"local.schedule_over": "round"}), model=perceptron, data=blobs())
    assert not np.array_equal(whole.weights, within.weights)
    run_until(7, spec, model=perceptron, data=blobs(), out=tmp_path / "run")
    assert np.array_equal(loop.resume(tmp_path / "run", model=perceptron, data=blobs()).weights, whole.weights)


def test_a_schedule_over_the_run_is_the_same_on_both_engines_and_on_devices_and_fits_scaffold(tmp_path: Path) -> None:
    spec = small_spec(rounds=5, local__schedule="cosine", local__schedule_over="run", local__optimiser="adam")
    native = cbdsl.run(spec, model=perceptron, data=blobs(), threads=1)
    torch = cbdsl.run(spec.with_settings({"engine": "torch"}), model=perceptron, data=blobs())
    np.testing.assert_allclose(native.weights, torch.weights, atol=1e-4)
    stage, bus = prepared(spec), Bus()
    with crew(bus, stage, tmp_path) as workers:
        served = play(bus, stage, tmp_path, workers.names)
    assert np.array_equal(served.result.weights, native.weights)
    resolve(small_spec(method="scaffold", local__schedule="warmup", local__schedule_over="run"))


def test_a_schedule_over_the_run_without_effect_is_refused() -> None:
    key = "local.schedule_over"
    with refused_as("no-effect", key, "local.schedule=cosine"):
        refuse_idle([resolve(small_spec(local__schedule_over="run"))], [key])
    with refused_as("no-effect", key, "tenth"):
        spec = small_spec(rounds=10, local__schedule="warmup", local__schedule_over="run")
        refuse_idle([resolve(spec)], [key])


def test_momentum_beside_adam_has_no_effect_and_says_so() -> None:
    spec = resolve(small_spec(local__momentum=0.9, **ADAM))
    with refused_as("no-effect", "local.momentum", "Adam"):
        refuse_idle([spec], ["local.momentum"])
    refuse_idle([spec], ["local.optimiser", "local.schedule", "local.clip"])


def test_the_theorems_are_about_sgd() -> None:
    with refused_as("not-supported", "local.optimiser=adamw"):
        prepare_measurement(small_spec(**ADAM), 1, perceptron, blobs())
