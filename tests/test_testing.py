"""Every built-in part keeps the laws, and for every law there is a part that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cbdsl
from cbdsl import register, testing
from cbdsl.arrays import Samples
from cbdsl.data import download
from cbdsl.data.catalogue import ENTRIES
from cbdsl.data.dataset import Dataset
from cbdsl.data.partition import FeatureSkew
from cbdsl.models.architecture import Architecture
from cbdsl.models.layers import Linear
from support.helpers import blobs, perceptron, shape_for

Situation = cbdsl.AttackContext
Rng = np.random.Generator


@pytest.mark.parametrize("name", register.attack.names())
def test_attacks_of_the_package(name: str) -> None:
    testing.check_attack(name)


@pytest.mark.parametrize("name", register.aggregator.names())
def test_aggregators_of_the_package(name: str) -> None:
    testing.check_aggregator(name)


@pytest.mark.parametrize("name", register.selection.names())
def test_selections_of_the_package(name: str) -> None:
    testing.check_selection(name)


@pytest.mark.parametrize("name", register.method.names())
def test_methods_of_the_package(name: str) -> None:
    testing.check_method(name)


@pytest.mark.parametrize("name", register.codec.names())
def test_codecs_of_the_package(name: str) -> None:
    testing.check_codec(name)


@pytest.mark.parametrize("name", register.partition.names())
def test_partitions_of_the_package(name: str) -> None:
    testing.check_partition(name)


@pytest.mark.parametrize("name", register.model.names())
def test_models_of_the_package(name: str) -> None:
    testing.check_model(name, shape_for(name))


def test_models_of_a_user() -> None:
    testing.check_model(perceptron, (8,), 3)
    testing.check_model(lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(shape[0], classes)), (8,), 3)


@pytest.mark.parametrize("name", register.augmentation.names())
def test_augmentations_of_the_package(name: str) -> None:
    testing.check_augmentation(name)
    testing.check_augmentation(name, (5,))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda batch: batch[1:], "a float32 tensor of its shape"),
        (lambda batch: batch.double(), "Of .* it makes torch.float64"),
        (lambda batch: batch.numpy(), "it makes ndarray"),
        (lambda batch: batch / 0, "is finite"),
        (lambda batch: batch + np.random.default_rng().random(), "the same seed of torch"),
        (lambda batch: batch @ torch.zeros(3), "It raises"),
    ],
)
def test_augmentations_that_break_a_law(change: Any, words: str) -> None:  # noqa: ANN401
    with pytest.raises(AssertionError, match=words):
        testing.check_augmentation(change)


def test_an_augmentation_may_change_its_batch_in_place() -> None:
    testing.check_augmentation(lambda batch: batch.mul_(2))


@pytest.mark.parametrize("name", register.dataset.names())
def test_data_sets_of_the_package(name: str) -> None:
    if name.removesuffix("-anomaly") in ENTRIES and not download.cached_file(name.removesuffix("-anomaly")).is_file():
        pytest.skip(f"fetch it first: cbdsl data fetch {name}")
    testing.check_dataset(name)


# Partitions, models and data sets that break a law.


@pytest.mark.parametrize(
    ("deal", "words"),
    [
        (lambda pool, _spec, workers, _rng: [pool.indices] * (workers + 1), "as many lists as workers"),
        (lambda pool, _spec, workers, _rng: [pool.indices[:0]] * workers, "no worker goes without samples"),
        (lambda _pool, _spec, workers, _rng: [np.arange(5)] * workers, r"whole numbers from pool.indices.*\[0\]"),
        (lambda pool, _spec, workers, _rng: [pool.indices[:4] * 1.0] * workers, "whole numbers"),
        (
            lambda pool, _spec, workers, _rng: [np.random.default_rng().permutation(pool.indices)] * workers,
            "the same generator deals the same samples",
        ),
        (lambda pool, _spec, _workers, rng: rng.shuffle(pool.indices) or [pool.indices], "changed the pool in place"),
        (lambda pool, _spec, workers, _rng: np.split(pool.indices, workers), "it works with 2 workers. It raises"),
    ],
)
def test_partitions_that_break_a_law(deal: Any, words: str) -> None:  # noqa: ANN401
    with pytest.raises(AssertionError, match=words):
        testing.check_partition(deal)


class Fixed(FeatureSkew):
    """Keeps the laws, with no noise at all."""

    def altered(self, features: Any, worker: int, workers: int, rng: Rng) -> Any:  # noqa: ANN401, ARG002
        return features + 1


class Drifting(Fixed):
    def altered(self, features: Any, worker: int, workers: int, rng: Rng) -> Any:  # noqa: ANN401, ARG002
        return features + np.random.default_rng().random(dtype=np.float32)


class InPlace(Fixed):
    def altered(self, features: Any, worker: int, workers: int, rng: Rng) -> Any:  # noqa: ANN401, ARG002
        features += 1
        return features


class Shorter(Fixed):
    def altered(self, features: Any, worker: int, workers: int, rng: Rng) -> Any:  # noqa: ANN401, ARG002
        return features[1:]


class Endless(Fixed):
    def altered(self, features: Any, worker: int, workers: int, rng: Rng) -> Any:  # noqa: ANN401, ARG002
        return features * np.float32(np.inf)


class DealtTwice(Fixed):
    def __call__(self, pool: Any, spec: Any, workers: int, rng: Rng) -> list[Any]:  # noqa: ANN401, ARG002
        return [pool.indices[:5]] * workers


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Drifting, "alters samples in the same way"),
        (InPlace, "changed the features in place"),
        (Shorter, "finite numbers of the same shape"),
        (Endless, "finite numbers of the same shape"),
        (DealtTwice, "deals each of them once"),
    ],
)
def test_partitions_that_alter_samples_and_break_a_law(kind: type[FeatureSkew], words: str) -> None:
    testing.check_partition(Fixed())
    with pytest.raises(AssertionError, match=words):
        testing.check_partition(kind())


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda pool, _rng: pool.indices[[0, 0]], "all different"),
        (lambda pool, _rng: np.random.default_rng().permutation(pool.indices)[:5], "in any order of workers"),
        (lambda _pool, _rng: np.arange(3), "draws one worker's samples"),
    ],
)
def test_partitions_that_draw_and_break_a_law(draw: Any, words: str) -> None:  # noqa: ANN401
    class Drawing:
        def __call__(self, pool: Any, spec: Any, workers: int, rng: Rng) -> list[Any]:  # noqa: ANN401, ARG002
            return [pool.indices[:5]] * workers

        def sampler(self, pool: Any, spec: Any) -> Any:  # noqa: ANN401, ARG002
            return lambda rng: draw(pool, rng)

    with pytest.raises(AssertionError, match=words):
        testing.check_partition(Drawing())


class Normalised(nn.Module):
    """Every sample is held against those beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(features - features.roll(1, 0))
        return outputs


SAME = perceptron()


class Unseeded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        with torch.no_grad():
            self.layer.bias[0] = float(np.random.default_rng().normal())

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(features)
        return outputs


class Exploding(Unseeded):
    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.layer.bias[0] = 0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return super().forward(features) / 0.0


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Normalised, "Normalised breaks a law: a sample's outputs do not depend on the samples beside it"),
        (lambda: SAME, "every call builds a fresh module"),
        (Unseeded, "one seed draws the same finite weights"),
        (Exploding, "every sample has a finite loss"),
        (lambda: nn.Linear(8, 2), "it works with samples"),
        (lambda: nn.Linear(5, 3), "it works with samples"),
        (lambda shape, _classes: Architecture(shape, (Linear(8, 2),)), "it has 2 outputs for 3 classes"),
    ],
)
def test_models_that_break_a_law(model: Any, words: str) -> None:  # noqa: ANN401
    with pytest.raises(AssertionError, match=words):
        testing.check_model(model, (8,), 3)


def broken_data(**changes: Any) -> Callable[[], Dataset]:  # noqa: ANN401
    return lambda: replace(blobs(), **changes)


GOOD = blobs()


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (lambda: GOOD.train, "gives a cbdsl.Dataset"),
        (broken_data(train=Samples(GOOD.train.features * np.float32(np.inf), GOOD.train.labels)), "finite"),
        (broken_data(train=Samples(GOOD.train.features[:-1], GOOD.train.labels)), "one row for each label"),
        (broken_data(test=Samples(GOOD.test.features[:, :4], GOOD.test.labels)), "samples have one shape"),
        (broken_data(test=Samples(GOOD.test.features, GOOD.test.labels.astype(np.int64))), "labels are int32"),
        (broken_data(classes=2), "from 0 to classes - 1"),
        (broken_data(clients=np.zeros(3, np.int32)), "clients are whole numbers"),
        (lambda: blobs(seed=int(np.random.default_rng().integers(1 << 30))), "every call gives the same data"),
        (lambda: 1 / 0, "it works when it is loaded. It raises ZeroDivisionError"),
    ],
)
def test_data_sets_that_break_a_law(load: Any, words: str) -> None:  # noqa: ANN401
    with pytest.raises(AssertionError, match=words):
        testing.check_dataset(load)
