"""The real data sets, where they were fetched."""

from __future__ import annotations

import numpy as np
import pytest

from cbdsl.data import download
from cbdsl.data.catalogue import ENTRIES
from cbdsl.data.dataset import Dataset, load
from cbdsl.data.formats import TEST_PEOPLE
from support.refusals import refused_as


def fetched(name: str) -> Dataset:
    if not download.cached_file(name).is_file():
        pytest.skip(f"fetch it first: cbdsl data fetch {name}")
    return load(name)


def test_hapt_has_ten_thousand_windows_and_unseen_people() -> None:
    data = fetched("hapt")
    assert (len(data.train), len(data.test), data.shape, data.classes) == (7143, 2874, (6, 128), 6)
    assert len(data.train) + len(data.test) == 10_017
    assert data.clients is not None
    people = set(data.clients.tolist())
    assert people == set(range(1, 31)) - set(TEST_PEOPLE)
    values = data.train.features.astype(np.float64)
    np.testing.assert_allclose(values.mean(axis=(0, 2)), 0, atol=1e-4)
    np.testing.assert_allclose(values.std(axis=(0, 2)), 1, atol=1e-4)


def test_cifar10_is_whole() -> None:
    data = fetched("cifar10")
    assert (len(data.train), len(data.test), data.shape, data.classes) == (50_000, 10_000, (3, 32, 32), 10)
    assert np.bincount(data.train.labels).tolist() == [5000] * 10
    assert np.bincount(data.test.labels).tolist() == [1000] * 10
    sums = [data.train.features[:, channel].mean(dtype=np.float64) for channel in range(3)]
    np.testing.assert_allclose(sums, 0, atol=1e-3)


def test_fashion_mnist_is_whole() -> None:
    data = fetched("fashion-mnist")
    assert (len(data.train), len(data.test), data.shape, data.classes) == (60_000, 10_000, (1, 28, 28), 10)
    assert abs(float(data.train.features.mean(dtype=np.float64))) < 1e-4
    assert float(data.train.features.std(dtype=np.float64)) == pytest.approx(1.0, abs=1e-4)


def test_hapt_knows_the_names_of_its_classes_and_how_it_was_scaled() -> None:
    data = fetched("hapt")
    assert (len(data.class_names), data.class_names[0]) == (data.classes, "walking")
    assert data.scaling is not None
    assert (len(data.scaling.mean), data.scaling.shades) == (6, False)


def test_flights_are_of_sixteen_airlines_and_tested_on_other_days() -> None:
    data = fetched("flights")
    assert (len(data.train), len(data.test), data.shape, data.task) == (12_844, 3_211, (9,), "regression")
    assert data.target_names == ("air time",)
    assert data.clients is not None
    assert np.bincount(data.clients).tolist() == [
        1000,
        1000,
        568,
        1000,
        1000,
        1000,
        549,
        1000,
        273,
        1000,
        25,
        *[1000] * 4,
        429,
    ]
    minutes = data.in_unit(data.test.labels)
    assert (minutes.min() > 15, minutes.max() < 700) == (True, True)


def test_held_out_activities_are_the_anomalies() -> None:
    whole, data = fetched("hapt"), load("hapt-anomaly")
    assert len(data.train) == int((~np.isin(whole.train.labels, (1, 2))).sum())
    assert np.array_equal(data.test.labels, np.isin(whole.test.labels, (1, 2)))
    assert data.clients is not None
    assert (data.task, data.scaling, len(np.unique(data.clients))) == ("reconstruction", whole.scaling, 21)
    lying = load("hapt-anomaly", {"held_out": "lying"})
    assert np.array_equal(lying.test.labels, whole.test.labels == 5)
    with refused_as("unknown-name", "running"):
        load("hapt-anomaly", {"held_out": "running"})
    with refused_as("out-of-range", "held_out", "walking upstairs"):
        load("hapt-anomaly", {"held_out": ""})


def test_every_entry_is_pinned() -> None:
    for entry in ENTRIES.values():
        sums = [entry.content, entry.package.sha256, *(part.sha256 for part in entry.package.parts)]
        assert all(len(each) == 64 and set(each) <= set("0123456789abcdef") for each in sums)
        assert entry.licence
