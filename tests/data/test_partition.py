from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cbdsl import register
from cbdsl.arrays import Samples
from cbdsl.data.dataset import Dataset
from cbdsl.data.partition import FeatureSkew, Split, alter_features, split
from cbdsl.errors import UserError
from cbdsl.presets import preset
from cbdsl.spec import DataSpec
from support.refusals import refused_as

LABELS = np.random.default_rng(3).integers(0, 10, 3000).astype(np.int32)
SMALL = DataSpec(samples_per_worker=40, shard_size=20, shared_training=50, shared_scoring=100, holdout=70)


def all_parts(parts: Split) -> list[np.ndarray]:
    return [parts.shared_training, parts.shared_scoring, parts.holdout, *parts.workers]


@pytest.mark.parametrize("partition", ["iid", "shards", "dirichlet", "similarity"])
@given(seed=st.integers(0, 1000), workers=st.integers(1, 40))
def test_every_partition_is_disjoint_and_of_the_size_asked_for(partition: str, seed: int, workers: int) -> None:
    parts = split(LABELS, replace(SMALL, partition=partition), workers, seed)
    together = np.concatenate(all_parts(parts))
    assert len(np.unique(together)) == len(together) == 220 + 40 * workers
    assert together.min() >= 0
    assert together.max() < len(LABELS)
    assert [len(part) for part in all_parts(parts)] == [50, 100, 70] + [40] * workers


@pytest.mark.parametrize("partition", ["iid", "shards", "dirichlet", "similarity"])
def test_a_seed_names_a_partition(partition: str) -> None:
    spec = replace(SMALL, partition=partition)
    first, again, other = (split(LABELS, spec, 5, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(np.concatenate(all_parts(first)), np.concatenate(all_parts(again)))
    assert not np.array_equal(np.concatenate(first.workers), np.concatenate(other.workers))


def test_the_shared_set_does_not_depend_on_the_partition() -> None:
    scoring = [
        split(LABELS, replace(SMALL, partition=name), 5, 1).shared_scoring
        for name in ("iid", "shards", "dirichlet", "similarity")
    ]
    assert all(np.array_equal(scoring[0], other) for other in scoring[1:])


def classes_held(parts: Split) -> float:
    return float(np.mean([len(np.unique(LABELS[own])) for own in parts.workers]))


def test_shards_give_each_worker_few_classes() -> None:
    assert classes_held(split(LABELS, replace(SMALL, partition="shards"), 30, 0)) <= 3


def test_shards_by_hand() -> None:
    labels = np.array([1, 0, 1, 0, 1, 0, 0, 1], dtype=np.int32)
    spec = DataSpec(
        partition="shards", shard_size=2, shards_per_worker=1, shared_training=0, shared_scoring=1, holdout=0
    )
    parts = split(labels, spec, 3, 0)
    left = sorted(set(range(8)) - set(parts.shared_scoring.tolist()), key=lambda i: (labels[i], i))
    shards = [left[0:2], left[2:4], left[4:6]]
    assert sorted(own.tolist() for own in parts.workers) == sorted(shards)


def test_a_small_alpha_concentrates_classes_and_a_large_one_mixes_them() -> None:
    few, many = (
        classes_held(split(LABELS, replace(SMALL, partition="dirichlet", dirichlet_alpha=alpha), 20, 0))
        for alpha in (0.01, 100.0)
    )
    assert few < 3
    assert many > 9


def test_similarity_goes_from_sorted_to_mixed() -> None:
    held = [
        classes_held(split(LABELS, replace(SMALL, partition="similarity", similarity=gamma), 20, 0))
        for gamma in (0.0, 0.2, 1.0)
    ]
    assert held[0] <= 2 < held[1] < held[2]
    assert held[2] > 9


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "similarity"])
def test_more_samples_than_there_are_is_an_error_with_the_numbers(partition: str) -> None:
    with pytest.raises(
        UserError, match=r"100 workers with 40 samples each need 4,000 samples, but only 2,780 are left"
    ):
        split(LABELS, replace(SMALL, partition=partition), 100, 0)


def test_too_many_shards_are_an_error_with_the_numbers(mnist: Dataset) -> None:
    spec = preset("paper-noniid").data
    with refused_as("out-of-range", "2,000", "55,400", "184"):
        split(mnist.train.labels, spec, 1000, 0)


def test_a_shared_set_larger_than_the_data_is_an_error_with_the_numbers() -> None:
    with refused_as("out-of-range", "3,070", "3,000"):
        split(LABELS, replace(SMALL, shared_training=2900), 1, 0)


def quantity(workers: int, seed: int, **options: float) -> Split:
    deal = register.partition.make("quantity", options)
    return split(LABELS, replace(SMALL, partition="quantity"), workers, seed, partition=deal)


@given(seed=st.integers(0, 1000), workers=st.integers(1, 40), beta=st.sampled_from([1e-3, 0.1, 1.0, 100.0]))
def test_quantities_differ_and_all_samples_asked_for_are_dealt_once(seed: int, workers: int, beta: float) -> None:
    parts = quantity(workers, seed, beta=beta, least=7)
    together = np.concatenate(parts.workers)
    assert len(np.unique(together)) == len(together) == 40 * workers
    assert min(map(len, parts.workers)) >= 7


def test_a_small_beta_gives_much_to_few_and_a_large_one_the_same_to_all() -> None:
    few, even = (sorted(map(len, quantity(20, 0, beta=beta, least=1).workers)) for beta in (0.05, 1000.0))
    assert few[-1] > 300
    assert few[10] < 10
    assert 30 < even[0] <= even[-1] < 50
    assert classes_held(quantity(20, 0, beta=1000.0)) > 9


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta": 0.0}, "options.quantity.beta must be above 0"),
        ({"beta": float("nan")}, "beta of the partition 'quantity' must be a finite number; given nan"),
        ({"least": 0}, "options.quantity.least must be at least 1"),
        ({"least": 41}, "options.quantity.least is 41, above data.samples_per_worker, 40"),
    ],
)
def test_quantities_out_of_range_are_errors(options: dict[str, float], words: str) -> None:
    with pytest.raises(UserError, match=words):
        quantity(3, 0, **options)


SEEN = Samples(np.zeros((3000, 2, 50), np.float32), LABELS)


def test_each_worker_sees_its_own_samples_with_an_offset_and_noise_of_its_own() -> None:
    skew = FeatureSkew(noise=0.4, shift=2.0)
    parts = split(LABELS, SMALL, 4, 1, partition=skew)
    plain = split(LABELS, replace(SMALL, partition="iid"), 4, 1)
    np.testing.assert_array_equal(np.concatenate(parts.workers), np.concatenate(plain.workers))
    seen = alter_features(SEEN, parts, skew, 1).features
    np.testing.assert_array_equal(SEEN.features, 0)  # what others hold is left alone
    shared = np.setdiff1d(np.arange(3000), np.concatenate(parts.workers))
    np.testing.assert_array_equal(seen[shared], 0)
    offsets = np.stack([seen[rows].mean(axis=(0, 2)) for rows in parts.workers])  # (4, 2)
    assert len(np.unique(np.round(offsets, 2))) == 8
    for worker, rows in enumerate(parts.workers):
        assert float((seen[rows] - offsets[worker][:, None]).std()) == pytest.approx(0.1 * (worker + 1), rel=0.1)


def test_what_a_worker_sees_is_named_by_the_seed_and_the_worker() -> None:
    skew = FeatureSkew()
    parts = split(LABELS, SMALL, 4, 1, partition=skew)
    first, again, other = (alter_features(SEEN, parts, skew, seed).features for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    none = FeatureSkew(noise=0.0, shift=0.0)
    np.testing.assert_array_equal(alter_features(SEEN, parts, none, 1).features, SEEN.features)
    assert alter_features(SEEN, parts, register.partition.make("iid", {}), 1) is SEEN


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_a_skew_out_of_range_is_an_error(value: float) -> None:
    with refused_as("out-of-range", "options.feature.noise", value):
        FeatureSkew(noise=value)


def test_a_skew_that_breaks_samples_or_deals_them_twice_is_an_error() -> None:
    class Twice(FeatureSkew):
        def __call__(self, pool: Any, spec: Any, workers: int, rng: Any) -> list[Any]:  # noqa: ANN401, ARG002
            return [pool.indices[:5]] * workers

    class Broken(FeatureSkew):
        def altered(self, features: Any, worker: int, workers: int, rng: Any) -> Any:  # noqa: ANN401, ARG002
            return features[:-1]

    for skew, words in (
        (Twice(), "gives some of them to several workers"),
        (Broken(), "makes .* of worker 0's features"),
    ):
        with pytest.raises(UserError, match=words):
            alter_features(SEEN, split(LABELS, SMALL, 4, 1, partition=skew), skew, 1)


def test_clusters_deal_by_features_without_labels() -> None:
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 4, 800)
    features = (10 * np.eye(4)[kinds] + rng.normal(size=(800, 4))).astype(np.float32).reshape(800, 2, 2)
    spec = DataSpec("made", "cluster", samples_per_worker=40, shards_per_worker=1, shared_scoring=10, holdout=10)
    deal = register.partition.make("cluster", {"clusters": 12})
    none = np.zeros(800, np.int32)
    first, again = (
        split(none, spec, 10, 3, partition=deal, task="reconstruction", features=features).workers for _ in range(2)
    )
    assert all(np.array_equal(*pair) for pair in zip(first, again, strict=True))
    assert len(np.unique(np.concatenate(first))) == 400
    assert np.mean([len(np.unique(kinds[rows])) for rows in first]) < 2
    with refused_as("missing-value", "features"):
        split(none, spec, 10, 3, task="reconstruction")
    few = register.partition.make("cluster", {"clusters": 1000})  # more than samples, all of them equal
    assert len(split(none, spec, 2, 3, partition=few, features=np.ones((800, 3), np.float32)).workers) == 2
