"""Who holds which samples: pure functions from labels to disjoint lists of indices.

D_G = D_tr + D_sc and the server's private hold-out are drawn first and do not depend on the method, so that at one
seed every method sees the same data. Nothing here looks at features or at the test set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cbdsl.arrays import Indices
from cbdsl.errors import UserError
from cbdsl.rng import stream
from cbdsl.spec import DataSpec, PartitionName

Labels = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Split:
    """Disjoint index lists into the training set."""

    shared_training: Indices  # D_tr
    shared_scoring: Indices  # D_sc
    holdout: Indices  # the server's own, never sent to anybody
    workers: tuple[Indices, ...]  # D_1 ... D_U


def split(labels: Labels, spec: DataSpec, workers: int, seed: int) -> Split:
    """Draw the shared set and the hold-out, then deal the rest to the workers."""
    sizes = (spec.shared_training, spec.shared_scoring, spec.holdout)
    if sum(sizes) > len(labels):
        raise UserError(
            f"The shared training set ({sizes[0]:,}), the shared scoring set ({sizes[1]:,}) and the hold-out "
            f"({sizes[2]:,}) need {sum(sizes):,} samples, but the training set has {len(labels):,}. Ask for less."
        )
    order = stream(seed, "shared-set").permutation(len(labels)).astype(np.int32)
    ends = np.cumsum(sizes)
    training, scoring, holdout, pool = np.split(order, ends)
    rows = PARTITIONS[spec.partition](labels, np.sort(pool), spec, workers, stream(seed, "partition"))
    return Split(training, scoring, holdout, tuple(row.astype(np.int32) for row in rows))


def iid(_labels: Labels, pool: Indices, spec: DataSpec, workers: int, rng: np.random.Generator) -> list[Indices]:
    """K_i distinct samples each, drawn at random."""
    count = spec.samples_per_worker
    _demand(workers * count, len(pool), f"{workers:,} workers with {count:,} samples each")
    return list(rng.permutation(pool)[: workers * count].reshape(workers, count))


def shards(labels: Labels, pool: Indices, spec: DataSpec, workers: int, rng: np.random.Generator) -> list[Indices]:
    """Sort by label, cut into shards, give each worker the same number of shards at random (McMahan et al. 2017)."""
    available, each = len(pool) // spec.shard_size, spec.shards_per_worker
    if workers * each > available:
        raise UserError(
            f"{workers:,} workers with {each} shards of {spec.shard_size} samples each need {workers * each:,} shards, "
            f"but the {len(pool):,} samples beside the shared set and the hold-out make {available:,}. "
            "Ask for fewer workers, or set data.shards_per_worker or data.shard_size lower."
        )
    by_label = pool[np.argsort(labels[pool], kind="stable")]
    cut = by_label[: available * spec.shard_size].reshape(available, spec.shard_size)
    dealt = rng.permutation(available)[: workers * each].reshape(workers, each)
    return [cut[row].reshape(-1) for row in dealt]


def dirichlet(labels: Labels, pool: Indices, spec: DataSpec, workers: int, rng: np.random.Generator) -> list[Indices]:
    """K_i samples each, classes mixed in proportions drawn from Dirichlet(alpha * prior) (Hsu et al. 2019).

    When a class runs out, its proportion is shared by the classes that are left.
    """
    count = spec.samples_per_worker
    _demand(workers * count, len(pool), f"{workers:,} workers with {count:,} samples each")
    shuffled = rng.permutation(pool)
    classes = np.unique(labels[shuffled])
    left = [shuffled[labels[shuffled] == label] for label in classes]
    prior = np.array([len(part) for part in left]) / len(shuffled)
    rows = []
    for _ in range(workers):
        proportions = np.maximum(rng.dirichlet(spec.dirichlet_alpha * len(classes) * prior), 1e-12)
        taken: list[Indices] = []
        missing = count
        while missing:
            stock = np.array([len(part) for part in left])
            usable = np.where(stock > 0, proportions, 0.0)
            wanted = np.minimum(rng.multinomial(missing, usable / usable.sum()), stock)
            taken += [part[:number] for part, number in zip(left, wanted, strict=True)]
            left = [part[number:] for part, number in zip(left, wanted, strict=True)]
            missing -= int(wanted.sum())
        rows.append(np.concatenate(taken))
    return rows


def similarity(labels: Labels, pool: Indices, spec: DataSpec, workers: int, rng: np.random.Generator) -> list[Indices]:
    """A share gamma of each worker's samples at random, the rest dealt in order of label (Karimireddy et al. 2020)."""
    count = spec.samples_per_worker
    _demand(workers * count, len(pool), f"{workers:,} workers with {count:,} samples each")
    used = rng.permutation(pool)[: workers * count]
    alike = round(spec.similarity * count)
    mixed = used[: workers * alike].reshape(workers, alike)
    rest = used[workers * alike :]
    ordered = rest[np.argsort(labels[rest], kind="stable")].reshape(workers, count - alike)
    return [np.concatenate(pair) for pair in zip(mixed, rng.permutation(ordered), strict=True)]


Partition = Callable[[Labels, Indices, DataSpec, int, np.random.Generator], list[Indices]]

PARTITIONS: dict[PartitionName, Partition] = {
    "iid": iid,
    "shards": shards,
    "dirichlet": dirichlet,
    "similarity": similarity,
}


def _demand(needed: int, available: int, what: str) -> None:
    if needed > available:
        raise UserError(
            f"{what} need {needed:,} samples, but only {available:,} are left beside the shared set and the hold-out. "
            "Ask for fewer workers, or set data.samples_per_worker lower."
        )
