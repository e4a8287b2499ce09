"""Runs that are not about classes: every conversation, the guard, both engines, files, attacks and bad input."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import cbdsl
from cbdsl import Dataset, Result, Spec
from cbdsl.cli.app import app
from cbdsl.engines.native_engine import available
from cbdsl.export.predict import predict_values, read_unseen
from cbdsl.runs.metrics import find_metric
from cbdsl.runs.records import RunTotals
from support.refusals import refused_as

RNG = np.random.default_rng(7)
X = RNG.uniform(-3, 3, (900, 3))
Y = 50 + 4 * X[:, 0] + 3 * np.abs(X[:, 1])
WAVES = np.sin(RNG.uniform(0, 6, (900, 1, 1)) + np.arange(12) / 3) * np.array([1.0, 0.5])[:, None]
MARKS = (np.arange(200) % 4 == 0).astype(int)
ODD = WAVES[700:] + MARKS[:, None, None] * RNG.normal(size=(200, 2, 12))
DATA = {
    "regression": Dataset.from_arrays(X[:700], Y[:700], X[700:], Y[700:], task="regression"),
    "reconstruction": Dataset.from_arrays(WAVES[:700], None, ODD, MARKS, task="reconstruction"),
}
SETTINGS: dict[str, Any] = {
    "workers": 6, "rounds": 5, "model": "mlp", "data.samples_per_worker": 60, "data.shared_training": 40,
    "data.shared_scoring": 80, "data.holdout": 80, "local.learning_rate": 0.05, "local.epochs": 3,
}  # fmt: skip
ROTATION = {
    "method": "restart", "selection.name": "rotation", "selection.k": 3, "defence.guard": True,
    "defence.commitment": True, "codec.up": "q4", "codec.down": "q4",
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "cb-dsl": {}, "rotation": ROTATION, "fedavg": {"method": "fedavg", "shared": "train"},
    "median": {"method": "fedavg", "defence.aggregator": "median"},
    "server-only": {"method": "server-only"}, "local-only": {"method": "local-only"}, "central": {"method": "central"},
}  # fmt: skip


def played(task: str, settings: Mapping[str, Any], **given: Any) -> Result:  # noqa: ANN401 - of `run`
    spec = Spec().with_settings({**SETTINGS, **settings})
    return cbdsl.run(spec, data=DATA[task], threads=1, callbacks=[], **given)


@pytest.mark.parametrize("task", DATA)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_learning_learns_every_task(task: str, way: str) -> None:
    result = played(task, WAYS[way])
    summary = result.summary
    first, metric = result.rounds[0], find_metric(summary.metric)
    assert (summary.task, summary.loss, summary.banned) == (task, "mse", [])
    assert list(summary.metrics) == (
        ["rmse", "mae", "r2", "loss"] if task == "regression" else ["auroc", "detection", "loss"]
    )
    assert np.isnan(summary.final_accuracy)
    assert summary.final_value == result.rounds[-1].value == summary.metrics[summary.metric]
    values = [line.value for line in result.rounds]
    assert (
        summary.best_value
        == (min(values) if metric.better == "lower" else max(values))
        == RunTotals.of(result.rounds).best
    )
    start, end = first.metrics["loss"], summary.metrics["loss"]
    assert start is not None
    assert end is not None
    assert end < start
    if task == "regression":
        assert summary.final_value < np.std(Y)


def test_results_are_in_the_unit_of_the_target() -> None:
    result = played("regression", {"rounds": 15, **WAYS["fedavg"]})
    found = result.predict(X[700:])
    assert found.shape == (200,)
    errors = found - Y[700:]
    assert result.summary.metrics["rmse"] == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-4)
    assert result.summary.metrics["mae"] == pytest.approx(np.mean(np.abs(errors)), rel=1e-4)
    assert result.summary.metrics["r2"] == pytest.approx(1 - np.mean(errors**2) / np.var(Y[700:]), rel=1e-4)
    assert np.sqrt(np.mean(errors**2)) < 1.5


def test_an_anomaly_detector_has_the_threshold_of_its_hold_out() -> None:
    result = played("reconstruction", {"rounds": 15, "options.detection.false_alarm": 0.1, **WAYS["fedavg"]})
    scores, card = result.anomaly_scores(ODD), result.card
    assert card is not None
    assert card.threshold is not None
    pairs = scores[MARKS == 1][:, None] - scores[MARKS == 0]
    assert result.summary.metrics["auroc"] == pytest.approx(np.mean(pairs > 0), abs=1e-9)
    assert result.summary.metrics["detection"] == np.mean(scores[MARKS == 1] > card.threshold)
    assert np.mean(scores[MARKS == 0] > card.threshold) < 0.2
    rebuilt = result.predict(ODD)
    assert rebuilt.shape == ODD.shape
    scaled = (rebuilt - ODD) / np.array(card.scaling.deviation)[:, None]  # type: ignore[union-attr]
    assert scores == pytest.approx(np.mean(scaled**2, (1, 2)), rel=1e-3)


@pytest.mark.skipif(available() is not None, reason=str(available()))
@pytest.mark.parametrize("loss", ["mse", "mae", "huber"])
@pytest.mark.parametrize("task", DATA)
def test_both_engines_train_the_same_model(task: str, loss: str) -> None:
    native, torch = (played(task, {"loss": loss, "engine": engine, "rounds": 2}) for engine in ("native", "torch"))
    assert (native.summary.engine, torch.summary.engine) == ("native", "torch")
    assert np.abs(native.weights - torch.weights).max() < 1e-4
    assert native.summary.final_value == pytest.approx(torch.summary.final_value, rel=1e-3)


def test_a_run_in_a_folder_is_resumed_and_its_summary_is_valid_json(tmp_path: Path) -> None:
    whole = played("regression", ROTATION, out=tmp_path / "run")
    content = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert content["final_accuracy"] is None
    assert content["metrics"] == whole.summary.metrics
    again = cbdsl.resume(tmp_path / "run", data=DATA["regression"], callbacks=[])
    assert (again.rounds, again.summary.metrics) == (whole.rounds, whole.summary.metrics)
    saved = cbdsl.load(tmp_path / "run")
    assert (saved.card.task, saved.card.loss, saved.card.threshold) == ("regression", "mse", None)
    assert saved.card.target_scaling == DATA["regression"].target_scaling
    assert "RMSE" in repr(whole)
    assert "lower is better" in repr(whole)


def test_the_command_line_names_the_metric_and_its_direction(tmp_path: Path) -> None:
    small = [f"--set={key}={value}" for key, value in SETTINGS.items() if key not in {"model", "rounds", "workers"}]
    words = ["run", "regression", "--rounds", "2", "--workers", "6", *small, "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, [*words, "--select", "rotation", "--set", "selection.k=2"])
    assert done.exit_code == 0, done.output
    assert "RMSE" in done.output
    assert "lower is better" in done.output
    assert "accuracy" not in done.output.replace("accuracy.png", "")


@pytest.mark.parametrize("attack", ["label-flip", "slow-drift", "memoriser", "liar", "crammer", "alie"])
def test_attacks_on_a_regression_do_no_harm_to_guarded_rotation(attack: str) -> None:
    result = played("regression", {**ROTATION, "attack.name": attack, "attack.byzantine": 1, "rounds": 6})
    assert result.summary.honest_banned == 0
    assert result.summary.final_value < np.std(Y)


def test_what_makes_no_sense_for_a_task_is_refused_with_a_reason() -> None:
    attacked = {"attack.byzantine": 1}
    for name, task in (("backdoor", "regression"), ("pair-flip", "regression"), ("label-flip", "reconstruction")):
        with refused_as("conflict", name, task):
            played(task, {**attacked, "attack.name": name})
    with refused_as("conflict", "cross-entropy", "regression", "mse"):
        played("regression", {"loss": "cross-entropy"})
    with refused_as("conflict", "shards", "no classes"):
        played("regression", {"data.partition": "shards"})
    with refused_as("unknown-name", "mes"):
        played("regression", {"loss": "mes"})
    with refused_as("wrong-shape", "10 outputs", "1 target"):
        played("regression", {}, model=lambda: nn.Linear(3, 10))
    classifier = cbdsl.run(
        Spec().with_settings({**SETTINGS, "rounds": 1}), threads=1, callbacks=[],
        data=Dataset.from_arrays(X[:700], (Y[:700] > 55).astype(int), X[700:], (Y[700:] > 55).astype(int)),
    )  # fmt: skip
    with refused_as("wrong-shape", "init has", "same network"):
        played("regression", {}, init=classifier)
    with refused_as("not-supported", "Anomaly scores"):
        classifier.anomaly_scores(X)


def test_a_classifier_has_metrics_as_well() -> None:
    labels = (Y > 55).astype(int) + (Y > 60)
    data = Dataset.from_arrays(X[:700], labels[:700], X[700:], labels[700:])
    result = cbdsl.run(Spec().with_settings(SETTINGS), data=data, threads=1, callbacks=[])
    found, truth = result.predict(X[700:]), labels[700:]
    assert list(result.summary.metrics) == ["accuracy", "macro-f1", "loss"]
    assert result.summary.metrics["accuracy"] == result.summary.final_accuracy == np.mean(found == truth)
    scores = []
    for one in range(3):
        right = np.sum((found == one) & (truth == one))
        scores.append(2 * right / (np.sum(found == one) + np.sum(truth == one)))
    assert result.summary.metrics["macro-f1"] == pytest.approx(np.mean(scores))


def test_a_model_that_ends_in_a_softmax_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    labels = (Y > 55).astype(int)
    data = Dataset.from_arrays(X[:700], labels[:700], X[700:], labels[700:])
    spec = Spec().with_settings({**SETTINGS, "rounds": 1})
    cbdsl.run(spec, data=data, model=lambda: nn.Sequential(nn.Linear(3, 2), nn.Softmax(1)), threads=1, callbacks=[])
    assert sum("softmax" in record.message for record in caplog.records) == 1


def tuned() -> nn.Module:
    """A network of which only the last layer trains."""
    module = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 1))
    module[0].requires_grad_(False)
    return module


@pytest.mark.parametrize("way", ["rotation", "fedavg"])
def test_a_frozen_layer_and_adam_learn_a_regression_on_both_engines(way: str, tmp_path: Path) -> None:
    settings = {**WAYS[way], "local.optimiser": "adam", "local.schedule": "cosine", "loss": "huber"}
    results = [
        played("regression", {**settings, "engine": engine}, model=tuned, baseline=True, out=tmp_path / engine)
        for engine in ("auto", "torch")
    ]
    for result in results:
        summary, alone = result.summary, result.summary.server_alone
        assert (summary.loss, summary.parameters, summary.banned) == ("huber", 41, [])
        assert summary.final_value < result.rounds[0].value
        assert alone is not None
        assert np.isfinite(alone.value)
    np.testing.assert_allclose(results[0].predict(X[700:]), results[1].predict(X[700:]), rtol=0.01)
    saved = cbdsl.load(tmp_path / "auto")
    assert (saved.card.task, saved.card.loss, saved.card.frozen) == ("regression", "huber", ("0.weight", "0.bias"))
    assert saved.weights.shape == (3 * 40 + 40 + 41,)
    np.savez(tmp_path / "unseen.npz", features=X[700:])
    numbers = predict_values(saved, read_unseen(tmp_path / "unseen.npz", saved)).outputs
    np.testing.assert_allclose(numbers.reshape(-1), results[0].predict(X[700:]).reshape(-1), rtol=1e-5)


def test_batch_statistics_of_a_reconstruction_are_those_of_the_saved_module() -> None:
    def normed() -> nn.Module:
        layers = nn.Linear(24, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 24)
        return nn.Sequential(nn.Flatten(), *layers)

    result = played("reconstruction", {"method": "fedavg", "local.optimiser": "adam"}, model=normed)
    assert result.summary.engine == "torch"
    assert result.summary.final_value > 0.6
    test = DATA["reconstruction"].test.features
    made = result.model(torch.from_numpy(test)).detach().numpy()
    expected = ((made - test.reshape(len(test), -1)) ** 2).mean(1)
    found = result.engine.sample_losses(result.weights, DATA["reconstruction"].test, np.arange(200, dtype=np.int32))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def quartic(outputs: Any, targets: Any) -> Any:  # noqa: ANN401 - torch tensors
    return ((outputs - targets) ** 4).mean(1)


def test_a_loss_of_one_s_own_is_trained_scored_and_verified(tmp_path: Path) -> None:
    result = played("regression", ROTATION, loss=quartic, out=tmp_path / "run")
    assert (result.summary.loss, result.summary.engine, result.summary.banned) == ("custom", "torch", [])
    assert result.rounds[-1].accepted
    scaled = DATA["regression"].test
    outputs = result.engine.outputs(result.weights, scaled, np.arange(200, dtype=np.int32))
    assert result.summary.metrics["loss"] == pytest.approx(np.mean((outputs - scaled.labels) ** 4.0), rel=1e-4)
    with refused_as("missing-part", "loss=..."):
        cbdsl.resume(tmp_path / "run", data=DATA["regression"], callbacks=[])
    again = cbdsl.resume(tmp_path / "run", data=DATA["regression"], loss=quartic, callbacks=[])
    assert again.summary.metrics == result.summary.metrics
    with refused_as("invalid-part", "(80,)", "(80, 1)", ".mean(1)"):
        played("regression", {}, loss=lambda outputs, targets: (outputs - targets) ** 2)
    with refused_as("invalid-part", "never negative"):
        played("regression", {}, loss=lambda outputs, targets: (outputs - targets).mean(1))
    with refused_as("not-supported", "given in Python"):
        played("regression", {"engine": "native"}, loss=quartic)
