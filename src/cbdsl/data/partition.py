"""Partitions: functions from labels to each worker's list of sample indices.

D_G = D_tr + D_sc and the server's private hold-out are drawn first and do not depend on the method: with the same seed
every method has the same data. Partitions do not see the test set; one that changes the features of its workers
(`Altering`) changes their own training samples only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from cbdsl import register
from cbdsl.arrays import Doubles, Floats, Indices, Labels, Samples
from cbdsl.data.overlap import (
    Draw,
    Sampler,
    sample_dirichlet,
    sample_iid,
    sample_ordered,
    sample_quantity,
    sample_shards,
    sample_similarity,
)
from cbdsl.errors import UserError
from cbdsl.rng import stream
from cbdsl.spec import DataSpec, Task
from cbdsl.util.computed import Computed
from cbdsl.util.memory import require_memory
from cbdsl.util.serialize import Bounds, check_value

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class Split:
    """Disjoint index lists into the training set."""

    shared_training: Indices  # D_tr
    shared_scoring: Indices  # D_sc
    holdout: Indices  # the server's own, never sent
    workers: Sequence[Indices]  # D_1 ... D_U; a tuple, or computed for each worker where they overlap
    tests: Sequence[Indices] = ()  # what each worker holds back, with data.local_test

    @property
    def owned(self) -> Sequence[Indices]:
        """All samples of each worker, with those that it holds back."""
        if not self.tests:
            return self.workers
        whole = Computed(lambda one: np.concatenate([self.workers[one], self.tests[one]]), len(self.workers))
        return whole if isinstance(self.workers, Computed) else tuple(whole)

    @property
    def most_samples(self) -> int:
        """The largest number of samples of a worker; of the first hundred workers with data.overlap."""
        known = self.workers[:100] if isinstance(self.workers, Computed) else self.workers
        return max(map(len, known))


@dataclass(frozen=True, eq=False)
class Pool:
    """The samples for the workers: all but D_G and the hold-out.

    >>> pool = Pool(np.arange(4, dtype=np.int32), np.array([0, 1, 0, 1], np.int32), None)
    >>> len(pool), pool.labels[pool.indices].tolist()
    (4, [0, 1, 0, 1])
    """

    indices: Indices  # (n,), sorted
    labels: Labels  # (N,), of the whole training set; targets (N, T) in a regression
    clients: Indices | None  # (N,): each sample's client, -1: of none; None: not known
    task: Task = "classification"
    features: Floats | None = None  # (N, ...), of the whole training set; None: not given

    def __len__(self) -> int:
        return len(self.indices)

    @cached_property
    def by_label(self) -> Indices:
        """The samples in order of label, or of their first target, (n,)."""
        keys = self.labels[self.indices].reshape(len(self), -1)[:, 0]
        return self.indices[np.argsort(keys, kind="stable")]


class Partition(Protocol):
    """Assigns the samples of a pool to workers. Its settings are keyword-only arguments.

    For `data.overlap` it also has a method `sampler(pool, spec)`, which is called once and returns a function that
    draws one worker's samples with the worker's own generator.

    >>> def equal_parts(pool, spec, workers, rng):
    ...     return np.array_split(pool.indices, workers)
    >>> [part.tolist() for part in equal_parts(Pool(np.arange(4), np.arange(4), None), None, 2, None)]
    [[0, 1], [2, 3]]
    """

    def __call__(self, pool: Pool, spec: DataSpec, workers: int, rng: np.random.Generator) -> Sequence[Indices]:
        """Return one non-empty list of indices from the pool per worker, depending on nothing but the arguments."""
        ...


@runtime_checkable
class Altering(Partition, Protocol):
    """A partition that also changes the features of each worker's samples; each sample has one worker."""

    def altered(self, features: Floats, worker: int, workers: int, rng: np.random.Generator) -> Floats:
        """Return a worker's changed features, in the shape (n, ...) of the given ones."""
        ...


def split(  # noqa: PLR0913 - a call names all but the first four
    labels: Labels,
    spec: DataSpec,
    workers: int,
    seed: int,
    clients: Indices | None = None,
    partition: Partition | None = None,
    secret: int = 0,
    *,
    task: Task = "classification",
    features: Floats | None = None,
) -> Split:
    """Draw the shared set and the hold-out, then assign the rest to the workers.

    If some samples belong to no client (-1), the shared set and the hold-out are drawn from those. If D_G comes from a
    file, the same samples are still set aside where possible, so that workers and hold-out do not change.
    partition: used instead of the spec's. secret: seed of the hold-out, unknown to workers; 0: the spec's seed.
    features: for partitions that deal by features.
    """
    sizes = (spec.shared_training, spec.shared_scoring, spec.holdout)
    free = np.arange(len(labels)) if clients is None or (clients >= 0).all() else np.flatnonzero(clients < 0)
    if spec.shared_source and sum(sizes) > len(free):  # D_G is in a file, and there are too few to set aside
        sizes = (0, 0, spec.holdout)
    if sum(sizes) > len(free):
        whose = "the training set has" if len(free) == len(labels) else "the samples of no client are"
        raise UserError(
            f"The shared training set ({sizes[0]:,}), the shared scoring set ({sizes[1]:,}) and the hold-out "
            f"({sizes[2]:,}) need {sum(sizes):,} samples, but {whose} {len(free):,}. Every method sets them aside, so "
            "that methods are compared on the same samples. Set data.shared_training, data.shared_scoring or "
            "data.holdout lower; the hold-out may be 0 unless the guard or tune uses it.",
            code="out-of-range",
        )
    order = free[stream(seed, "shared-set").permutation(len(free))].astype(np.int32)
    if secret:
        public = sum(sizes[:2])
        order[public:] = stream(secret, "hold-out").permutation(order[public:])
    training, scoring, holdout, rest = np.split(order, np.cumsum(sizes))
    owned = rest if len(free) == len(labels) else np.concatenate([rest, np.flatnonzero(np.asarray(clients) >= 0)])
    pool = Pool(np.sort(owned).astype(np.int32), labels, clients, task, features)
    deal = partition or register.partition.make(spec.partition, {})
    own: Sequence[Indices]
    if spec.overlap:
        own = sample_workers(deal, pool, spec, workers, seed)
    else:
        rows = deal(pool, spec, workers, stream(seed, "partition")) if workers else []
        _check_parts(rows, pool, workers, deal)
        own = tuple(np.asarray(row).astype(np.int32) for row in rows)
    if not spec.local_test:
        return Split(training, scoring, holdout, own)

    def divided(worker: int) -> tuple[Indices, Indices]:
        return hold_back(own[worker], spec.local_test, seed, worker)

    if spec.overlap:
        trained, tests = (Computed(partial(_part_of, divided, part), workers) for part in (0, 1))
        return Split(training, scoring, holdout, trained, tests)
    pairs = [divided(worker) for worker in range(workers)]
    return Split(training, scoring, holdout, *(tuple(pair[part] for pair in pairs) for part in (0, 1)))


def _part_of(divided: Callable[[int], tuple[Indices, Indices]], part: int, worker: int) -> Indices:
    return divided(worker)[part]


def hold_back(own: Indices, share: float, seed: int, worker: int) -> tuple[Indices, Indices]:
    """Return the samples that a worker trains on, in their order, and those that it holds back, sorted.

    Each part has at least one. The result depends on the arguments alone, so workers can be computed one by one.
    """
    if len(own) < 2:
        raise UserError(
            f"data.local_test={share:g} holds back some samples of every worker, and worker {worker} has {len(own)}. "
            "Give each worker two or more (a higher data.samples_per_worker, fewer workers), or leave it out.",
            code="out-of-range",
        )
    count = min(max(round(share * len(own)), 1), len(own) - 1)
    held = np.zeros(len(own), np.bool_)
    held[stream(seed, "local-test", worker=worker).permutation(len(own))[:count]] = True
    return own[~held], np.sort(own[held])


def find_sampler(deal: Partition) -> Sampler | None:
    """Return the sampler of a partition, with its settings; None if the partition has none."""
    found: Sampler | None = getattr(getattr(deal, "func", deal), "sampler", None)
    return found and partial(found, **getattr(deal, "keywords", {}))


def sample_workers(deal: Partition, pool: Pool, spec: DataSpec, workers: int, seed: int) -> Computed[Indices]:
    """Return the samples of each worker, drawn from the whole pool with its own stream at each access."""
    sampler = find_sampler(deal)
    if sampler is None:
        raise UserError(
            f"data.overlap needs a partition that can draw the samples of one worker, and {_name_of(deal)} deals all "
            "at once. Use iid, shards, dirichlet, similarity, quantile, cluster or quantity, or give it a `sampler`, "
            "as cbdsl.Partition describes.",
            code="conflict",
        )
    draw = sampler(pool, spec)

    def share(worker: int) -> Indices:
        row = np.asarray(draw(stream(seed, "partition", worker=worker)))
        places = np.searchsorted(pool.indices, row).clip(max=len(pool) - 1) if row.ndim == 1 else row
        if row.ndim != 1 or not len(row) or not np.array_equal(pool.indices[places], row):
            raise UserError(
                f"The sampler of the partition {_name_of(deal)} returned no samples for worker {worker}, or indices "
                "that are not in the pool. Check it with cbdsl.testing.check_partition.",
                code="invalid-part",
            )
        return row.astype(np.int32)

    parts = Computed(share, workers)
    if workers:
        parts[0]
    return parts


def _drawn_by(sampler: Sampler) -> Callable[[F], F]:
    """Return a decorator that adds a sampler to a partition function; both take the same settings."""

    def add(deal: F) -> F:
        vars(deal)["sampler"] = sampler
        return deal

    return add


def _of_classes(name: str, sampler: Sampler) -> Sampler:
    def checked(pool: Pool, spec: DataSpec) -> Draw:
        _require_classes(name, pool)
        return sampler(pool, spec)

    return checked


def _check_parts(rows: Sequence[Indices], pool: Pool, workers: int, deal: Partition) -> None:
    name = _name_of(deal)
    if len(rows) != workers:
        raise UserError(
            f"The partition {name} returns parts for {len(rows)} workers; there are {workers}.", code="invalid-part"
        )
    flat = all(np.ndim(row) == 1 for row in rows)
    known = flat and bool(np.isin(np.concatenate([*rows, pool.indices[:0]]), pool.indices).all())
    for worker, row in enumerate(rows):
        if not known and (np.ndim(row) != 1 or not np.isin(row, pool.indices).all()):
            raise UserError(
                f"The partition {name} gives worker {worker} indices that are not in the pool; give whole numbers from "
                "pool.indices, (n,) each. Try it with cbdsl.testing.check_partition.",
                code="invalid-part",
            )
        if not len(row):
            raise UserError(
                f"The partition {name} leaves worker {worker} without samples. Use fewer workers.", code="invalid-part"
            )


def alter_features(samples: Samples, parts: Split, partition: Partition, seed: int) -> Samples:
    """Return the training set as the workers see it: the same, unless the partition is `Altering`."""
    if not isinstance(partition, Altering) or not parts.workers:
        return samples
    name, held = _name_of(partition), np.concatenate(parts.owned)
    if len(np.unique(held)) < len(held):
        raise UserError(
            f"The partition {name} alters samples, and gives some of them to several workers.", code="invalid-part"
        )
    require_memory(samples.features.nbytes, "The training set, altered for each worker, takes", "Use a smaller one.")
    features = samples.features.copy()
    for worker, rows in enumerate(parts.owned):
        before = features[rows]
        own = partition.altered(before, worker, len(parts.workers), stream(seed, "features", worker=worker))
        if own.shape != before.shape or not np.isfinite(own).all():
            raise UserError(
                f"The partition {name} makes {own.shape} of worker {worker}'s features {before.shape}, or numbers that "
                "are not finite. Try it with cbdsl.testing.check_partition.",
                code="invalid-part",
            )
        features[rows] = own
    return Samples(features, samples.labels)


def _name_of(deal: Partition) -> str:
    named = getattr(deal, "func", deal)
    return getattr(named, "__qualname__", None) or type(named).__qualname__


@register.partition("iid")
@_drawn_by(sample_iid)
def iid(pool: Pool, spec: DataSpec, workers: int, rng: np.random.Generator) -> list[Indices]:
    """K_i distinct samples per worker, drawn at random."""
    count = spec.samples_per_worker
    _require(workers * count, len(pool), f"{workers:,} workers with {count:,} samples each")
    return list(rng.permutation(pool.indices)[: workers * count].reshape(workers, count))


@register.partition("shards")
@_drawn_by(_of_classes("shards", sample_shards))
def shards(pool: Pool, spec: DataSpec, workers: int, rng: np.random.Generator) -> list[Indices]:
    """Sort by label, cut into shards, give each worker the same number of shards at random (McMahan et al. 2017)."""
    _require_classes("shards", pool)
    available, each = len(pool) // spec.shard_size, spec.shards_per_worker
    if workers * each > available:
        raise UserError(
            f"{workers:,} workers with {each} shards of {spec.shard_size} samples each need {workers * each:,} shards, "
            f"but the {len(pool):,} samples beside the shared set and the hold-out make {available:,}. "
            "Use fewer workers, set data.shards_per_worker or data.shard_size lower, or let workers hold the same "
            "samples: --set data.overlap=true.",
            code="out-of-range",
        )
    cut = pool.by_label[: available * spec.shard_size].reshape(available, spec.shard_size)
    dealt = rng.permutation(available)[: workers * each].reshape(workers, each)
    return [cut[row].reshape(-1) for row in dealt]


@register.partition("dirichlet")
@_drawn_by(_of_classes("dirichlet", sample_dirichlet))
def dirichlet(pool: Pool, spec: DataSpec, workers: int, rng: np.random.Generator) -> list[Indices]:
    """K_i samples per worker, classes mixed in proportions drawn from Dirichlet(alpha * prior) (Hsu et al. 2019).

    When a class runs out, its proportion goes to the other classes.
    """
    _require_classes("dirichlet", pool)
    count = spec.samples_per_worker
    _require(workers * count, len(pool), f"{workers:,} workers with {count:,} samples each")
    shuffled, labels = rng.permutation(pool.indices), pool.labels
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


@register.partition("similarity")
@_drawn_by(_of_classes("similarity", sample_similarity))
def similarity(pool: Pool, spec: DataSpec, workers: int, rng: np.random.Generator) -> list[Indices]:
    """A share gamma of each worker's samples at random, the rest dealt in order of label (Karimireddy et al. 2020)."""
    _require_classes("similarity", pool)
    count = spec.samples_per_worker
    _require(workers * count, len(pool), f"{workers:,} workers with {count:,} samples each")
    used = rng.permutation(pool.indices)[: workers * count]
    alike = round(spec.similarity * count)
    mixed = used[: workers * alike].reshape(workers, alike)
    rest = used[workers * alike :]
    ordered = rest[np.argsort(pool.labels[rest], kind="stable")].reshape(workers, count - alike)
    return [np.concatenate(pair) for pair in zip(mixed, rng.permutation(ordered), strict=True)]


def _sample_quantiles(pool: Pool, spec: DataSpec) -> Draw:
    _require_targets(pool)
    return sample_ordered(pool.by_label, pool, spec)


@register.partition("quantile")
@_drawn_by(_sample_quantiles)
def quantile(pool: Pool, spec: DataSpec, workers: int, rng: np.random.Generator) -> list[Indices]:
    """K_i samples per worker from a few ranges of the target: sorted, cut into equal pieces, dealt at random.

    Each worker has `data.shards_per_worker` pieces. Of several targets, the first one counts.
    """
    _require_targets(pool)
    count = spec.samples_per_worker
    _require(workers * count, len(pool), f"{workers:,} workers with {count:,} samples each")
    used = rng.permutation(pool.indices)[: workers * count]
    return _deal_pieces(used, pool.labels[used].reshape(len(used), -1)[:, 0], spec, workers, rng)


def _require_targets(pool: Pool) -> None:
    if pool.task == "reconstruction":
        raise UserError(
            "The partition 'quantile' deals by target, and a reconstruction has none. Use cluster, iid, quantity, "
            "feature or by-client.",
            code="conflict",
        )


def _deal_pieces(
    used: Indices, keys: NDArray[Any], spec: DataSpec, workers: int, rng: np.random.Generator
) -> list[Indices]:
    """Sort samples by key, cut them into equal pieces, and deal each worker `data.shards_per_worker` at random."""
    pieces = np.array_split(used[np.argsort(keys, kind="stable")], workers * spec.shards_per_worker)
    dealt = rng.permutation(len(pieces)).reshape(workers, spec.shards_per_worker)
    return [np.concatenate([pieces[number] for number in row]) for row in dealt]


def _sample_clusters(pool: Pool, spec: DataSpec, *, clusters: int = 10) -> Draw:
    """Draw pieces of the samples in order of cluster."""
    features = _features_for_clusters(pool, clusters)
    shuffled = stream(0, "partition").permutation(pool.indices)  # the first ones determine the centres
    found = _find_clusters(features, shuffled, clusters)
    return sample_ordered(shuffled[np.argsort(found, kind="stable")], pool, spec)


@register.partition("cluster")
@_drawn_by(_sample_clusters)
def cluster(pool: Pool, spec: DataSpec, workers: int, rng: np.random.Generator, *, clusters: int = 10) -> list[Indices]:
    """K_i samples per worker from a few clusters of features: sorted by cluster, cut, dealt at random.

    Needs no labels. Clusters are found by k-means (Lloyd 1982). Each worker has `data.shards_per_worker` pieces.
    """
    features, count = _features_for_clusters(pool, clusters), spec.samples_per_worker
    _require(workers * count, len(pool), f"{workers:,} workers with {count:,} samples each")
    used = rng.permutation(pool.indices)[: workers * count]
    return _deal_pieces(used, _find_clusters(features, used, clusters), spec, workers, rng)


def _features_for_clusters(pool: Pool, clusters: int) -> Floats:
    check_value(clusters, Bounds(2, 1000), "options.cluster.clusters")
    if pool.features is None:
        raise UserError(
            "The partition 'cluster' needs the features of samples, and none were given. Use another partition.",
            code="missing-value",
        )
    return pool.features


_LEARNING = 2_000  # samples that determine the centres
_ITERATIONS = 10


def _find_clusters(features: Floats, used: Indices, clusters: int) -> Indices:
    """Return the cluster of each of the used samples, which are in random order, (n,).

    Sums go over the first axis, number by number, so that results are equal on every machine, unlike matrix products.
    """
    known = features[used[:_LEARNING]].reshape(min(_LEARNING, len(used)), -1)
    centres = known[:clusters].astype(np.float64)  # (k, F)
    for _ in range(_ITERATIONS):
        nearest = _nearest(known, centres)
        held = [np.flatnonzero(nearest == one) for one in range(len(centres))]
        centres = np.stack(
            [known[rows].mean(0, np.float64) if len(rows) else old for rows, old in zip(held, centres, strict=True)]
        )
    blocks = (used[start : start + _LEARNING] for start in range(0, len(used), _LEARNING))
    return np.concatenate([_nearest(features[rows].reshape(len(rows), -1), centres) for rows in blocks])


def _nearest(rows: Floats, centres: Doubles) -> Indices:
    """Return the number of the centre (k, F) that is nearest to each row (n, F)."""
    by_feature = np.ascontiguousarray(rows.T, np.float64)  # (F, n)
    distances = np.stack([np.square(by_feature - one[:, None]).sum(0) for one in centres])  # (k, n)
    return np.asarray(distances.argmin(0), np.int32)


def _sample_quantity(pool: Pool, spec: DataSpec, *, beta: float = 0.5, least: int = 10) -> Draw:
    _check_quantity(spec, beta, least)
    return sample_quantity(pool, spec, beta=beta, least=least)


@register.partition("quantity")
@_drawn_by(_sample_quantity)
def quantity(
    pool: Pool, spec: DataSpec, workers: int, rng: np.random.Generator, *, beta: float = 0.5, least: int = 10
) -> list[Indices]:
    """i.i.d. samples in unequal numbers: K_i samples on average, shares drawn from Dirichlet(beta) (Li et al. 2022).

    With a smaller beta fewer workers have most of the samples. least: samples that every worker has at least.
    """
    count = spec.samples_per_worker
    _check_quantity(spec, beta, least)
    _require(workers * count, len(pool), f"{workers:,} workers with {count:,} samples each on average")
    shares = np.cumsum(rng.dirichlet(np.full(workers, beta)))
    extra = np.rint(shares / shares[-1] * (workers * (count - least))).astype(int)
    ends = extra + least * np.arange(1, workers + 1)
    return np.split(rng.permutation(pool.indices)[: workers * count], ends[:-1])


def _check_quantity(spec: DataSpec, beta: float, least: int) -> None:
    check_value(beta, Bounds(0.0, above=True), "options.quantity.beta")
    check_value(least, Bounds(1), "options.quantity.least")
    if least > spec.samples_per_worker:
        raise UserError(
            f"options.quantity.least is {least}, above data.samples_per_worker, {spec.samples_per_worker}. Set it "
            "lower.",
            code="out-of-range",
        )


@register.partition("feature")
@dataclass(frozen=True)
class FeatureSkew:
    """i.i.d. samples whose features differ: each worker adds its own offset and noise, as sensors in the field do.

    The offset is one number per channel (a sample's first axis), drawn with deviation `shift`; the noise of worker i of
    U is Gaussian with deviation noise * (i + 1) / U, as in Li et al. 2022. Features have deviation 1 in the data sets
    here. D_G, the hold-out and the test set stay unchanged.
    """

    noise: float = 0.5
    shift: float = 0.5

    def __post_init__(self) -> None:
        for name in ("noise", "shift"):
            check_value(getattr(self, name), Bounds(0.0, 1000.0), f"options.feature.{name}")

    def __call__(self, pool: Pool, spec: DataSpec, workers: int, rng: np.random.Generator) -> list[Indices]:
        """K_i distinct samples per worker, drawn at random."""
        return iid(pool, spec, workers, rng)

    def altered(self, features: Floats, worker: int, workers: int, rng: np.random.Generator) -> Floats:
        """Add the worker's offset and noise."""
        channels = (features.shape[1], *(1 for _ in features.shape[2:]))
        offset = self.shift * rng.standard_normal(channels, np.float32)
        noise = self.noise * (worker + 1) / workers * rng.standard_normal(features.shape, np.float32)
        return np.asarray(features + offset + noise, np.float32)


@register.partition("by-client")
def by_client(pool: Pool, spec: DataSpec, workers: int, rng: np.random.Generator) -> list[Indices]:  # noqa: ARG001
    """Natural clients: each worker has the samples of one client; if there are more clients, random ones."""
    if pool.clients is None:
        raise UserError(
            "The partition 'by-client' needs each sample's client: an array train_clients of client numbers in the "
            ".npz, Dataset.from_arrays(..., clients=...), or cbdsl.run(..., clients=[...]).",
            code="missing-value",
        )
    owners = pool.clients[pool.indices]
    known = np.unique(owners[owners >= 0])
    if workers > len(known):
        raise UserError(
            f"There are {workers} workers, but samples of {len(known)} clients. Use fewer workers.", code="out-of-range"
        )
    chosen = known if workers == len(known) else np.sort(rng.permutation(known)[:workers])
    return [pool.indices[owners == client] for client in chosen]


def _require_classes(name: str, pool: Pool) -> None:
    if pool.task != "classification":
        others = "quantile, cluster, iid, quantity, feature or by-client"
        raise UserError(
            f"The partition '{name}' deals by class, and a {pool.task} has no classes. Use "
            f"{others.removeprefix('quantile, ') if pool.task == 'reconstruction' else others}.",
            code="conflict",
        )


def _require(needed: int, available: int, what: str) -> None:
    if needed > available:
        raise UserError(
            f"{what} need {needed:,} samples, but only {available:,} are left beside the shared set and the hold-out. "
            "Use fewer workers, set data.samples_per_worker lower, or let workers hold the same samples: "
            "--set data.overlap=true.",
            code="out-of-range",
        )
