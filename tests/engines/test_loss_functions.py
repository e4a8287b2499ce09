"""Losses of both engines: against their definitions in numpy, and against each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cbdsl.arrays import Samples
from cbdsl.engines.engine import Engine, Sgd
from cbdsl.engines.loss import CROSS_ENTROPY, Loss, make_loss
from cbdsl.engines.native_engine import NativeEngine, available
from cbdsl.engines.torch_engine import CPU, StackedTorchEngine, TorchEngine
from cbdsl.models.architecture import Architecture
from cbdsl.models.layers import Conv1d, Flatten, Linear, Relu, Tanh
from cbdsl.models.network import initial_weights
from cbdsl.models.to_torch import module_of
from cbdsl.spec import Spec
from support.refusals import refused_as

MSE, MAE, HUBER = Loss("mse"), Loss("mae"), Loss("huber", 0.3)
PLAIN = Architecture((5,), (Linear(5, 9), Tanh(), Linear(9, 3)))
SERIES = Architecture((2, 12), (Conv1d(2, 4, (3,)), Relu(), Flatten(), Linear(40, 24)))


def samples_of(network: Architecture, loss: Loss, count: int = 300) -> Samples:
    rng = np.random.default_rng(1)
    features = rng.standard_normal((count, *network.shape)).astype(np.float32)
    if loss.reads_labels:
        return Samples(features, rng.integers(0, network.classes, count).astype(np.int32))
    if loss.reconstructs:
        return Samples(features, np.zeros(count, np.int32))
    return Samples(features, rng.standard_normal((count, network.classes)).astype(np.float32))


def engines(network: Architecture, loss: Loss) -> list[Engine]:
    found: list[Engine] = [
        TorchEngine(module_of(network), 2, loss=loss),
        StackedTorchEngine(module_of(network), CPU, loss=loss),
    ]
    return found if available() is not None else [NativeEngine(network, 2, loss), *found]


def by_definition(loss: Loss, outputs: np.ndarray, samples: Samples) -> np.ndarray:
    """Compute the loss of every sample in double precision."""
    outputs = outputs.astype(np.float64)
    if loss.reads_labels:
        logs = outputs - np.log(np.exp(outputs).sum(1, keepdims=True))
        own = logs[np.arange(len(outputs)), samples.labels]
        return np.asarray(-((1 - loss.setting) * own + loss.setting * logs.mean(1)))
    targets = samples.features.reshape(len(samples), -1) if loss.reconstructs else samples.labels
    errors = np.abs(outputs - targets)
    each = {
        "mse": errors**2,
        "mae": errors,
        "huber": np.where(errors <= loss.setting, errors**2 / 2, loss.setting * (errors - loss.setting / 2)),
    }[loss.name]
    return np.asarray(each.mean(1))


CASES = [
    (PLAIN, CROSS_ENTROPY), (PLAIN, Loss("cross-entropy", 0.1)), (PLAIN, MSE), (PLAIN, MAE), (PLAIN, HUBER),
    (SERIES, Loss("mse", reconstructs=True)), (SERIES, Loss("huber", 0.3, reconstructs=True)),
]  # fmt: skip


@pytest.mark.parametrize(("network", "loss"), CASES, ids=lambda value: getattr(value, "name", ""))
def test_engines_agree_with_the_definition_and_with_each_other(network: Architecture, loss: Loss) -> None:
    samples = samples_of(network, loss)
    weights = np.stack([initial_weights(network, seed) for seed in (3, 4)])
    rows = np.random.default_rng(2).permutation(300)[:203].astype(np.int32)
    batches = np.random.default_rng(3).integers(0, 300, (2, 6, 21)).astype(np.int32)
    batches[:, 2, 13:] = -1
    module = module_of(network)
    torch.nn.utils.vector_to_parameters(torch.from_numpy(weights[0]), module.parameters())
    outputs = module(torch.from_numpy(samples.features[rows])).detach().numpy()
    expected = by_definition(loss, outputs, samples.taken(rows))
    trained = []
    for engine in engines(network, loss):
        assert np.abs(engine.outputs(weights[0], samples, rows) - outputs).max() < 1e-5
        assert np.abs(engine.sample_losses(weights[0], samples, rows) - expected).max() < 1e-6
        assert engine.losses(weights, samples, rows)[0] == pytest.approx(expected.mean(), abs=1e-6)
        assert engine.losses(weights, samples, rows, np.full(2, 1e-3)).tolist() == [np.inf, np.inf]
        trained.append([
            engine.train(weights, samples, batches, Sgd(0.1, 0.9)), engine.gradients(weights, samples, rows),
        ])  # fmt: skip
    for other in trained[1:]:
        for ours, theirs in zip(trained[0], other, strict=True):
            assert np.abs(ours - theirs).max() < 2e-5
    slope = trained[0][1][0].astype(np.float64)
    step = weights[0] - np.float32(0.05) * trained[0][1][0]
    engine = engines(network, loss)[0]
    before, after = engine.losses(np.stack([weights[0], step]), samples, rows)
    assert before - after == pytest.approx(0.05 * slope @ slope, rel=0.15)


@pytest.mark.parametrize("loss", [MSE, MAE, HUBER])
def test_a_loss_that_is_not_a_number_is_not_hidden(loss: Loss) -> None:
    samples = samples_of(PLAIN, loss)
    weights = np.full((1, PLAIN.size), np.nan, np.float32)
    for engine in engines(PLAIN, loss):
        assert np.isnan(engine.losses(weights, samples, np.arange(20, dtype=np.int32), np.zeros(1))).all()
        assert np.isnan(engine.gradients(weights, samples, np.arange(20, dtype=np.int32))).any()


def test_only_a_classifier_has_an_accuracy_and_targets_must_fit_the_outputs() -> None:
    samples, weights = samples_of(PLAIN, MSE), np.zeros((1, PLAIN.size), np.float32)
    rows = np.arange(4, dtype=np.int32)
    for engine in engines(PLAIN, MSE):
        with pytest.raises(ValueError, match="only a classifier"):
            engine.accuracies(weights, samples, rows)
    engine = engines(PLAIN, MSE)[0]
    with pytest.raises(ValueError, match="a number for each output"):
        engine.losses(weights, Samples(samples.features, np.zeros(300, np.int32)), rows)


def test_the_loss_of_a_run_is_the_spec_s_or_the_task_s() -> None:
    assert make_loss(Spec()) == CROSS_ENTROPY
    assert make_loss(Spec(), "regression") == Loss("mse")
    assert make_loss(Spec(), "reconstruction") == Loss("mse", reconstructs=True)
    assert make_loss(Spec(loss="huber"), "regression") == Loss("huber", 1.0)
    assert make_loss(Spec(loss="huber").with_settings({"options.huber.delta": 0.2}), "regression").setting == 0.2
    smoothed = Spec(loss="cross-entropy").with_settings({"options.cross-entropy.smoothing": 0.1})
    assert make_loss(smoothed).setting == 0.1
    with refused_as("conflict", "cross-entropy", "regression", "mse or mae or huber"):
        make_loss(Spec(loss="cross-entropy"), "regression")
    with refused_as("conflict", "mse", "classification", "data.task"):
        make_loss(Spec(loss="mse"))
    with refused_as("unknown-name", "mes", "mse"):
        make_loss(Spec(loss="mes"))
    with refused_as("unknown-setting", "no setting 'delta'"):
        make_loss(Spec().with_settings({"options.mse.delta": 1.0}), "regression")
