"""Devices in a regression or a reconstruction: raw samples are scaled as announced, and claims are the simulator's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from cbdsl import Dataset, Spec
from cbdsl.algorithm.messages import Order
from cbdsl.arrays import Samples
from cbdsl.errors import UserError
from cbdsl.network.device_worker import DeviceWorker, parse_announcement
from cbdsl.network.samples import SharedLayout, pack_shared, read_samples, unpack_shared, write_samples
from cbdsl.network.session import announce, pack_shared_sets
from cbdsl.network.wire import OrderMessage, WireError
from cbdsl.runs.build import Experiment, UserParts
from cbdsl.runs.resolve import resolve
from support.refusals import refused_as

RNG = np.random.default_rng(5)
X = np.round(RNG.uniform(0, 40, (400, 3)), 3)
Y = np.round(30 + X[:, 0] - 2 * X[:, 1], 3)
SETTINGS: dict[str, Any] = {
    "workers": 2, "rounds": 2, "model": "mlp", "data.samples_per_worker": 40, "data.shared_training": 20,
    "data.shared_scoring": 50, "data.holdout": 20, "loss": "huber", "options.huber.delta": 0.5,
}  # fmt: skip
DATA = {
    "regression": Dataset.from_arrays(X[:300], Y[:300], X[300:], Y[300:], task="regression", target_names=("load",)),
    "reconstruction": Dataset.from_arrays(X[:300], None, X[300:], None, task="reconstruction"),
}


def prepared(task: str) -> Experiment:
    return Experiment.prepare(resolve(Spec().with_settings(SETTINGS)), UserParts(data=DATA[task]), 1)


def write_own(task: str, rows: np.ndarray, form: str, folder: Path) -> Path:
    """Write raw samples of the training set as a device has them."""
    path = folder / f"own.{form}"
    if form == "npz":
        labels = {"labels": Y[rows]} if task == "regression" else {}
        np.savez(path, features=X[rows], **labels)
        return path
    columns = [*X[rows].T]
    names = ["a", "b", "c"]
    if task == "regression":
        columns.insert(1, Y[rows])
        names.insert(1, "load")
    lines = [",".join(names), *(",".join(f"{value:.3f}" for value in line) for line in zip(*columns, strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("form", ["npz", "csv"])
@pytest.mark.parametrize("task", DATA)
def test_a_device_claims_what_the_simulated_worker_claims(task: str, form: str, tmp_path: Path) -> None:
    experiment = prepared(task)
    shared = pack_shared_sets(experiment)
    assignment = parse_announcement(announce(experiment, b"run-0001", shared))
    assert (assignment.task, assignment.loss.name, assignment.loss.setting) == (task, "huber", 0.5)
    assert assignment.target_scaling == DATA[task].target_scaling
    own = read_samples(write_own(task, experiment.split.workers[0], form, tmp_path))
    device = DeviceWorker(assignment, 0, own, shared, 1)
    state = experiment.first_state()
    device.start(state.global_best)
    order = OrderMessage(b"run-0001", 1, "swarm", b"\1", 0.5, 0.01, 0, bytes(16))
    claim = device.carry_out(order, state.global_best).claim
    swarm = experiment.memory_swarm
    expected = swarm.report(Order(1, "swarm", (0,), 0.5, 0.01, state.global_best))[0]
    assert claim is not None
    assert claim.score == pytest.approx(expected.score, rel=1e-5)


@pytest.mark.parametrize("task", DATA)
def test_a_device_is_told_of_frozen_weights_a_loss_and_an_optimiser(task: str, tmp_path: Path) -> None:
    outputs = DATA[task].outputs

    def tuned() -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs))
        module[0].requires_grad_(False)
        return module

    settings = {**SETTINGS, "model": "custom", "local.optimiser": "adam", "local.clip": 0.5}
    given = UserParts(model=tuned, data=DATA[task])
    experiment = Experiment.prepare(resolve(Spec().with_settings(settings)), given, 1)
    shared = pack_shared_sets(experiment)
    assignment = parse_announcement(announce(experiment, b"run-0001", shared))
    assert (assignment.size, assignment.frozen_bytes) == (7 * outputs, 4 * 24)
    assert (assignment.task, assignment.loss.name, assignment.spec.local.optimiser) == (task, "huber", "adam")
    device = DeviceWorker(
        assignment, 0, read_samples(write_own(task, experiment.split.workers[0], "npz", tmp_path)), shared, 1
    )
    first = experiment.first_state().global_best
    device.start(first)
    claim = device.carry_out(OrderMessage(b"run-0001", 1, "swarm", b"\1", 0.5, 0.01, 0, bytes(16)), first).claim
    assert claim is not None
    expected = experiment.memory_swarm.report(Order(1, "swarm", (0,), 0.5, 0.01, first))[0].score
    assert claim.score == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("task", DATA)
def test_samples_that_are_scaled_already_are_not_scaled_again(task: str, tmp_path: Path) -> None:
    experiment = prepared(task)
    own = experiment.dataset.train.taken(experiment.split.workers[0])
    write_samples(tmp_path / "own.npz", own, experiment.dataset.task)
    again = read_samples(tmp_path / "own.npz")
    assert np.array_equal(again.features, own.features)
    assert np.array_equal(again.labels, own.labels)
    shared = pack_shared_sets(experiment)
    device = DeviceWorker(parse_announcement(announce(experiment, b"run-0001", shared)), 0, again, shared, 1)
    assert np.array_equal(device._workers.held.scored.features[: len(own)], own.features)


def test_shared_samples_come_back_as_they_were() -> None:
    for task, outputs in (("regression", 1), ("reconstruction", 3)):
        samples = DATA[task].train.taken(np.arange(5, dtype=np.int32))
        packed = pack_shared(samples, DATA[task].task)
        layout = SharedLayout(2, 3, (3,), DATA[task].task, outputs)
        back = unpack_shared(packed, layout, outputs)
        assert np.array_equal(back.features, samples.features)
        assert np.array_equal(back.labels, samples.labels)
        with pytest.raises(WireError):
            unpack_shared(packed, SharedLayout(2, 3, (3,)), 3)
    bad = Samples(np.zeros((2, 3), np.float32), np.full((2, 1), np.nan, np.float32))
    with pytest.raises(WireError):
        unpack_shared(pack_shared(bad, "regression"), SharedLayout(1, 1, (3,), "regression", 1), 1)


@pytest.mark.parametrize(
    ("text", "code", "facts"),
    [
        ("a,b,c,lod\n1,2,3,4\n", "unknown-name", ("no column 'load'", "did you mean 'lod'")),
        ("a,b,c,load\n1,2,,4\n", "wrong-type", ("Line 2", "gap", "'c'")),
        ("a,b,c,load\n1,2,x,4\n", "wrong-type", ("Line 2", "'x'", "'c'")),
        ("a,b,c,load\n1,2,3\n", "wrong-shape", ("Line 2", "3 values", "4 columns")),
        ("a,b,c,load\n1,2,3,nan\n", "wrong-type", ("Line 2", "gap", "'load'")),
        ("a,b,load\n1,2,3\n", "wrong-shape", ("(3,)", "(2,)")),
        ("a,a,b,load\n1,2,3,4\n", "unreadable-file", ("line of names",)),
        ("a,b,c,load\n", "unreadable-file", ("1 lines",)),
    ],
)
def test_a_table_that_does_not_fit_is_refused(text: str, code: str, facts: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(text)
    assignment = parse_announcement(announce(prepared("regression"), b"run-0001", b""))
    with refused_as(code, *facts):
        DeviceWorker(assignment, 0, read_samples(tmp_path / "own.csv"), b"", 1)


def test_whole_numbers_are_targets_too_and_a_table_is_not_for_a_classifier(tmp_path: Path) -> None:
    experiment = prepared("regression")
    shared = pack_shared_sets(experiment)
    assignment = parse_announcement(announce(experiment, b"run-0001", shared))
    np.savez(tmp_path / "own.npz", features=X[:5], labels=np.round(Y[:5]).astype(int))
    device = DeviceWorker(assignment, 0, read_samples(tmp_path / "own.npz"), shared, 1)
    found = DATA["regression"].in_unit(device._workers.held.scored.labels[:5])
    assert found[:, 0] == pytest.approx(np.round(Y[:5]), abs=1e-3)
    np.savez(tmp_path / "two.npz", features=X[:5], labels=np.ones((5, 2)))
    with refused_as("wrong-shape", "2 targets", "1"):
        DeviceWorker(assignment, 0, read_samples(tmp_path / "two.npz"), shared, 1)
    labels = (Y > 0).astype(int)
    data = Dataset.from_arrays(X[:300], labels[:300], X[300:], labels[300:])
    settings = {key: value for key, value in SETTINGS.items() if "huber" not in str(key) + str(value)}
    classifier = Experiment.prepare(resolve(Spec().with_settings(settings)), UserParts(data=data), 1)
    table = read_samples(write_own("regression", np.arange(5), "csv", tmp_path))
    with refused_as("wrong-shape", "2 classes", "no labels"):
        DeviceWorker(parse_announcement(announce(classifier, b"run-0001", b"")), 0, table, b"", 1)
    with pytest.raises(UserError):
        read_samples(tmp_path / "missing.csv")
