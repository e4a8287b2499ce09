from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbdsl.data.partition import Split, split
from cbdsl.data.sources import Dataset
from cbdsl.errors import UserError
from cbdsl.presets import preset
from cbdsl.spec_groups import DataSpec

LABELS = np.random.default_rng(3).integers(0, 10, 3000).astype(np.int32)
SMALL = DataSpec(samples_per_worker=40, shard_size=20, shared_training=50, shared_scoring=100, holdout=70)


def all_parts(parts: Split) -> list[np.ndarray]:
    return [parts.shared_training, parts.shared_scoring, parts.holdout, *parts.workers]


@pytest.mark.parametrize("partition", ["iid", "shards", "dirichlet", "similarity"])
@given(seed=st.integers(0, 1000), workers=st.integers(1, 40))
@settings(max_examples=20)
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
    with pytest.raises(UserError, match=r"need 2,000 shards, but the 55,400 samples .* make 184"):
        split(mnist.train.labels, spec, 1000, 0)


def test_a_shared_set_larger_than_the_data_is_an_error_with_the_numbers() -> None:
    with pytest.raises(UserError, match=r"need 3,070 samples, but the training set has 3,000"):
        split(LABELS, replace(SMALL, shared_training=2900), 1, 0)
