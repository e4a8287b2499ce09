"""`data.overlap`: every worker draws its samples from the whole pool, by its own stream, when they are asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cbdsl import register
from cbdsl.arrays import Indices
from cbdsl.data.partition import Pool, Split, split
from cbdsl.spec import DataSpec, Task
from cbdsl.util.computed import Computed
from support.refusals import refused_as

LABELS = np.random.default_rng(3).integers(0, 10, 3000).astype(np.int32)
FEATURES = np.random.default_rng(4).normal(size=(3000, 2)).astype(np.float32)
SMALL = DataSpec(samples_per_worker=40, shard_size=20, shared_training=50, shared_scoring=100, holdout=70, overlap=True)
NAMES = ["iid", "shards", "dirichlet", "similarity", "cluster", "quantity"]


def drawn(name: str, workers: int, seed: int = 1, task: Task = "classification", **changes: Any) -> Split:  # noqa: ANN401
    """Return the parts of a partition with overlap; a setting of the partition has its name before it."""
    own = {key: value for key, value in changes.items() if key in register.partition.settings(name)}
    spec = replace(SMALL, partition=name, **{key: value for key, value in changes.items() if key not in own})
    labels = LABELS if task == "classification" else FEATURES[:, :1]
    return split(
        labels, spec, workers, seed, partition=register.partition.make(name, own), task=task, features=FEATURES
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_million_workers_draw_what_they_draw_whoever_else_is_asked(name: str) -> None:
    few, many = drawn(name, 5).workers, drawn(name, 10**6).workers
    assert len(many) == 10**6
    assert isinstance(many, Computed)
    for worker in (4, 0, 4):
        np.testing.assert_array_equal(few[worker], many[worker])
    last = many[10**6 - 1]
    assert len(np.unique(last)) == len(last)
    assert len(last) == 40 or name == "quantity"
    assert not np.array_equal(last, few[0])
    assert not np.array_equal(drawn(name, 5, seed=2).workers[4], few[4])


@pytest.mark.parametrize("name", NAMES)
def test_the_server_s_samples_reach_no_worker(name: str) -> None:
    parts, plain = drawn(name, 50), split(LABELS, replace(SMALL, overlap=False), 5, 1)
    for kind in ("shared_training", "shared_scoring", "holdout"):
        np.testing.assert_array_equal(getattr(parts, kind), getattr(plain, kind))
    private = np.concatenate([parts.shared_training, parts.shared_scoring, parts.holdout])
    assert not np.isin(np.concatenate(list(parts.workers)), private).any()


def classes_of(parts: Split) -> list[int]:
    return [len(np.unique(LABELS[own])) for own in parts.workers]


def test_skews_are_those_of_the_partitions_without_overlap() -> None:
    assert max(classes_of(drawn("shards", 30))) <= 4  # two shards, each of which may have a border
    assert np.mean(classes_of(drawn("dirichlet", 30, dirichlet_alpha=0.05))) < 4
    assert np.mean(classes_of(drawn("dirichlet", 30, dirichlet_alpha=100.0))) > 9
    assert max(classes_of(drawn("similarity", 30, similarity=0.0))) <= 2
    assert np.mean(classes_of(drawn("similarity", 30, similarity=1.0))) > 9
    sizes = [len(own) for own in drawn("quantity", 400, least=7).workers]
    assert min(sizes) >= 7
    assert 32 < np.mean(sizes) < 48
    assert max(sizes) > 100


def test_quantiles_are_few_ranges_of_the_target() -> None:
    parts = drawn("quantile", 20, task="regression", shards_per_worker=1)
    targets = FEATURES[:, 0]
    spans = [np.ptp(targets[own]) for own in parts.workers]
    assert np.median(spans) < 0.1 * np.ptp(targets)


def test_a_class_that_runs_out_leaves_its_share_to_the_others() -> None:
    parts = drawn("dirichlet", 20, dirichlet_alpha=0.01, samples_per_worker=700)
    assert [len(np.unique(own)) for own in parts.workers] == [700] * 20


@pytest.mark.parametrize("name", ["feature", "by-client"])
def test_a_partition_that_deals_all_at_once_is_refused(name: str) -> None:
    with refused_as("conflict", "data.overlap", "iid"):
        split(LABELS, replace(SMALL, partition=name), 5, 1, np.zeros(3000, np.int32) - 1)


@pytest.mark.parametrize("name", [*NAMES, "quantile"])
def test_more_samples_than_there_are_are_refused(name: str) -> None:
    settings: dict[str, Any] = {"least": 2_900} if name == "quantity" else {}
    with refused_as("out-of-range"):
        drawn(name, 5, samples_per_worker=2_900, shard_size=2_000, **settings)


class Nearby:
    """A partition of one's own: samples beside each other."""

    def __call__(self, pool: Pool, spec: DataSpec, workers: int, rng: np.random.Generator) -> list[Indices]:
        raise NotImplementedError

    def sampler(self, pool: Pool, spec: DataSpec) -> Any:  # noqa: ANN401
        def draw(rng: np.random.Generator) -> Indices:
            return pool.indices[int(rng.integers(len(pool) - spec.samples_per_worker)) :][: spec.samples_per_worker]

        return draw


def test_a_partition_of_one_s_own_can_draw() -> None:
    parts = split(LABELS, SMALL, 10**6, 1, partition=Nearby())
    assert len(parts.workers[77]) == 40
    assert np.ptp(parts.workers[77]) < 60


@pytest.mark.parametrize("row", [np.array([0, 3001]), np.zeros(0, np.int32), np.zeros((2, 2), np.int32)])
def test_a_sampler_that_draws_something_else_is_refused(row: Indices) -> None:
    class Odd(Nearby):
        def sampler(self, pool: Pool, spec: DataSpec) -> Any:  # noqa: ANN401, ARG002
            return lambda _: row

    with refused_as("invalid-part", "worker 0"):
        split(LABELS, SMALL, 5, 1, partition=Odd())
