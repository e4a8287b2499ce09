"""Natural clients: whose samples are whose is given, not drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cbdsl
from cbdsl.arrays import Samples
from cbdsl.data.dataset import Dataset, load
from cbdsl.errors import UserError
from cbdsl.runs.build import Experiment
from cbdsl.runs.result import Result
from support.helpers import CLASSES, FEATURES, blobs, small_spec

CLIENT_SIZES = (30, 5, 12)


def own(count: int, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, FEATURES)), rng.integers(0, CLASSES, count)


UNSAID = cbdsl.Spec().workers  # then there are as many workers as clients


def pairs() -> list[tuple[Any, Any]]:
    return [own(count, seed) for seed, count in enumerate(CLIENT_SIZES)]


def run(clients: Any, **arguments: Any) -> Result:  # noqa: ANN401
    settings = arguments.pop("settings", {})
    spec = small_spec(workers=UNSAID, model="softmax", rounds=3, **settings)
    return cbdsl.run(spec, **{"data": blobs(), "clients": clients, "callbacks": [], **arguments})


def as_samples(pair: tuple[Any, Any]) -> Samples:
    return Samples(np.asarray(pair[0], np.float32), np.asarray(pair[1], np.int32))


def as_dataset(pair: tuple[Any, Any]) -> Dataset:
    return Dataset.from_arrays(*pair, *pair)


@pytest.mark.parametrize("method", ["cb-dsl", "fedavg", "scaffold", "fedpso"])
def test_each_worker_holds_what_one_client_has(method: str) -> None:
    stages: list[Experiment] = []
    result = run(pairs(), settings={"method": method}, watch=lambda stage, _order: stages.append(stage))
    assert (result.spec.workers, result.spec.data.partition) == (3, "by-client")
    stage = stages[0]
    for worker, (features, labels) in enumerate(pairs()):
        held = stage.dataset.train.taken(stage.split.workers[worker])
        np.testing.assert_array_equal(held.features, np.asarray(features, np.float32))
        np.testing.assert_array_equal(held.labels, labels)
    common = np.concatenate([stage.split.shared_training, stage.split.shared_scoring, stage.split.holdout])
    assert common.max() < len(blobs().train)  # D_G and the hold-out are no client's
    np.testing.assert_array_equal(stage.dataset.test.features, blobs().test.features)


@pytest.mark.parametrize("method", ["cb-dsl", "fedavg"])
def test_any_kind_of_client_gives_the_same_run(method: str) -> None:
    plain, samples, datasets = pairs(), list(map(as_samples, pairs())), list(map(as_dataset, pairs()))
    mixed = [plain[0], samples[1], datasets[2]]
    found = [run(clients, settings={"method": method}).weights for clients in (plain, samples, datasets, mixed)]
    for weights in found[1:]:
        np.testing.assert_array_equal(weights, found[0])


def test_fedavg_weighs_clients_by_their_samples() -> None:
    """One step over all samples: the weighted mean of clients is one step over all clients' samples together."""
    settings = {"method": "fedavg", "rounds": 1, "local__batch_size": 100, "data__shared_training": 0}
    spec = small_spec(workers=UNSAID, model="softmax", **settings)
    apart = cbdsl.run(spec, data=blobs(), clients=pairs(), callbacks=[])
    features, labels = (np.concatenate(parts) for parts in zip(*pairs(), strict=True))
    together = cbdsl.run(spec, data=blobs(), clients=[(features, labels)], callbacks=[])
    np.testing.assert_allclose(apart.weights, together.weights, atol=1e-6)


@pytest.mark.parametrize(
    ("number", "client", "words"),
    [
        (1, (np.zeros((0, FEATURES)), np.zeros(0, int)), "Client 1 has no samples"),
        (1, Samples(np.zeros((0, FEATURES), np.float32), np.zeros(0, np.int32)), "Client 1 has no samples"),
        (2, own(4, 0)[0:1] * 2, "client 2"),
        (0, (np.zeros((4, 3)), np.zeros(4, int)), r"Client 0 has samples of shape \(3,\); the data's have \(8,\)"),
        (1, (np.zeros((4, FEATURES)), np.full(4, 3)), "Client 1 has the label 3; there are 3 classes"),
        (1, (np.zeros((4, FEATURES)), np.zeros(5, int)), "client 1"),
        (1, (np.full((4, FEATURES), np.nan), np.zeros(4, int)), "client 1"),
        (1, (np.zeros((4, FEATURES)), np.full(4, -1)), "client 1"),
        (1, 7, "Client 1 is a int"),
        (1, (np.zeros((4, FEATURES)),), "Client 1"),
    ],
)
def test_a_client_that_cannot_be_used_is_named(number: int, client: Any, words: str) -> None:  # noqa: ANN401
    clients: list[Any] = pairs()
    clients[number] = client
    with pytest.raises(UserError, match=words):
        run(clients)


def test_no_clients_and_two_ways_at_once_are_refused() -> None:
    with pytest.raises(UserError, match="clients is empty"):
        run([])
    with pytest.raises(UserError, match="clients and a partition"):
        run(pairs(), partition="iid")
    with pytest.raises(UserError, match="clients and a partition"):
        run(pairs(), partition=lambda pool, _spec, workers, _rng: np.array_split(pool.indices, workers))
    with pytest.raises(UserError, match="workers is 4, but 3 clients are given"):
        cbdsl.run(small_spec(workers=4, model="softmax"), data=blobs(), clients=pairs(), callbacks=[])
    with pytest.raises(UserError, match="participation"):
        run(pairs(), participation=4)
    assert run(pairs(), participation=2).rounds[0].participants == 2


def test_a_run_with_clients_goes_on_when_they_are_given_again(tmp_path: Path) -> None:
    whole = run(pairs(), out=tmp_path / "run")
    (tmp_path / "run" / "checkpoint.npz").unlink()
    with pytest.raises(UserError, match="clients"):
        cbdsl.resume(tmp_path / "run")
    again = cbdsl.resume(tmp_path / "run", data=blobs(), clients=pairs())
    np.testing.assert_array_equal(again.weights, whole.weights)


def stored(path: Path, clients: Any) -> str:  # noqa: ANN401
    data = blobs()
    arrays: dict[str, Any] = {
        "train_features": data.train.features,
        "train_labels": data.train.labels,
        "test_features": data.test.features,
        "test_labels": data.test.labels,
    }
    np.savez(path, **arrays, **({} if clients is None else {"train_clients": clients}))
    return str(path)


def by_client(source: str, **settings: object) -> Result:
    spec = small_spec(model="softmax", rounds=2, data__source=source, data__partition="by-client", **settings)
    return cbdsl.run(spec, callbacks=[])


def test_clients_of_an_npz_file(tmp_path: Path) -> None:
    whose = np.arange(600) % 6
    source = stored(tmp_path / "all.npz", whose)
    assert load(source).clients is not None
    stages: list[Experiment] = []
    spec = small_spec(model="softmax", rounds=1, data__source=source, data__partition="by-client")
    cbdsl.run(spec, watch=lambda stage, _order: stages.append(stage), callbacks=[])
    split = stages[0].split
    for worker, held in enumerate(split.workers):
        assert set(whose[held]) == {worker}
    dealt = np.concatenate([split.shared_training, split.shared_scoring, split.holdout, *split.workers])
    assert sorted(dealt) == list(range(600))  # D_G is drawn from all, and taken from whoever had it


def test_clients_of_an_npz_file_with_samples_of_nobody(tmp_path: Path) -> None:
    whose = np.where(np.arange(600) < 150, -1, np.arange(600) % 6)
    spec = small_spec(
        model="softmax", rounds=1, data__source=stored(tmp_path / "some.npz", whose), data__partition="by-client"
    )
    stages: list[Experiment] = []
    cbdsl.run(spec, watch=lambda stage, _order: stages.append(stage), callbacks=[])
    split = stages[0].split
    assert max(map(max, (split.shared_training, split.shared_scoring, split.holdout))) < 150
    for worker, held in enumerate(split.workers):
        np.testing.assert_array_equal(held, np.flatnonzero(whose == worker))


def test_of_more_clients_than_workers_some_are_drawn(tmp_path: Path) -> None:
    source = stored(tmp_path / "all.npz", np.arange(600) % 10)
    assert by_client(source).summary.workers == 6
    with pytest.raises(UserError, match="There are 11 workers, but samples of 10 clients"):
        by_client(source, workers=11)


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        (None, "needs each sample's client"),
        (np.arange(599), "one per training sample \\(600\\)"),
        (np.zeros(600), "whole numbers"),
        (np.full(600, -2), "whole numbers from 0"),
        (np.full(600, -1), "samples of 0 clients"),
    ],
)
def test_clients_of_an_npz_file_that_cannot_be_used(tmp_path: Path, clients: Any, words: str) -> None:  # noqa: ANN401
    with pytest.raises(UserError, match=words):
        by_client(stored(tmp_path / "bad.npz", clients))
