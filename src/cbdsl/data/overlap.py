"""Samplers that draw one worker's samples if workers may hold the same ones (`data.overlap`).

A sampler is built once from the pool, and draws the samples of one worker with that worker's own generator. So a worker
costs nothing until it takes part, and there may be more workers than samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cbdsl.arrays import Indices
from cbdsl.errors import UserError
from cbdsl.spec import DataSpec

if TYPE_CHECKING:
    from cbdsl.data.partition import Pool

Draw = Callable[[np.random.Generator], Indices]
"""Returns the samples of one worker, all different, from the worker's generator."""
Sampler = Callable[..., Draw]
"""Takes a pool and the settings of data, and the partition's own settings by name; returns a draw."""


def require_samples(count: int, pool: Pool, what: str) -> None:
    """Raise UserError if a worker needs more samples than the pool has."""
    if count > len(pool):
        raise UserError(
            f"{what} {count:,} samples, and {len(pool):,} are left beside the shared set and the hold-out. Set "
            "data.samples_per_worker (for shards: data.shards_per_worker or data.shard_size) lower.",
            code="out-of-range",
        )


def sample_iid(pool: Pool, spec: DataSpec) -> Draw:
    """Draw K_i samples at random."""
    require_samples(spec.samples_per_worker, pool, "Each worker has")
    return lambda rng: rng.choice(pool.indices, spec.samples_per_worker, replace=False)


def sample_pieces(ordered: Indices, size: int, pieces: int, rng: np.random.Generator) -> Indices:
    """Cut ordered samples into equal pieces, and return several different ones drawn at random."""
    starts = rng.choice(len(ordered) // size, pieces, replace=False) * size
    return np.concatenate([ordered[start : start + size] for start in starts])


def sample_shards(pool: Pool, spec: DataSpec) -> Draw:
    """Draw shards of the samples in order of label."""
    size, each = spec.shard_size, spec.shards_per_worker
    require_samples(size * each, pool, "The shards of a worker have")
    return lambda rng: sample_pieces(pool.by_label, size, each, rng)


def sample_ordered(ordered: Indices, pool: Pool, spec: DataSpec) -> Draw:
    """Draw K_i samples in `data.shards_per_worker` pieces of samples in some order."""
    count, each = spec.samples_per_worker, spec.shards_per_worker
    size = -(-count // each)
    require_samples(size * each, pool, "The pieces of a worker have")
    return lambda rng: sample_pieces(ordered, size, each, rng)[:count]


def sample_dirichlet(pool: Pool, spec: DataSpec) -> Draw:
    """Draw proportions of classes from Dirichlet(alpha * prior), and K_i samples in them."""
    count = spec.samples_per_worker
    require_samples(count, pool, "Each worker has")
    own = pool.labels[pool.indices]
    members = [pool.indices[own == label] for label in np.unique(own)]
    stock = np.array([len(part) for part in members])
    prior = spec.dirichlet_alpha * len(members) * stock / len(pool)

    def draw(rng: np.random.Generator) -> Indices:
        proportions, taken = np.maximum(rng.dirichlet(prior), 1e-12), np.zeros_like(stock)
        while missing := count - int(taken.sum()):  # if a class runs out, its share goes to the others
            usable = np.where(stock > taken, proportions, 0.0)
            taken += np.minimum(rng.multinomial(missing, usable / usable.sum()), stock - taken)
        drawn = (rng.choice(part, number, replace=False) for part, number in zip(members, taken, strict=True))
        return np.concatenate(list(drawn))

    return draw


def sample_similarity(pool: Pool, spec: DataSpec) -> Draw:
    """Draw a share gamma of K_i samples at random, and the rest as one piece of the samples in order of label."""
    count = spec.samples_per_worker
    alike = round(spec.similarity * count)
    size = count - alike
    require_samples(count, pool, "Each worker has")

    def draw(rng: np.random.Generator) -> Indices:
        start = int(rng.integers(len(pool) // size)) * size if size else 0
        others = rng.choice(len(pool) - size, alike, replace=False)  # places beside the piece
        places: Indices = np.concatenate([others + size * (others >= start), start + np.arange(size)])
        return pool.by_label[places]

    return draw


def sample_quantity(pool: Pool, spec: DataSpec, *, beta: float, least: int) -> Draw:
    """Draw a number of samples, K_i on average and at least `least`, and as many samples at random.

    Dirichlet(beta) shares of many workers are independent Gamma(beta) numbers, divided by their mean.
    """
    require_samples(least, pool, "Each worker has at least")
    extra = spec.samples_per_worker - least

    def draw(rng: np.random.Generator) -> Indices:
        count: Any = least + np.rint(extra * rng.gamma(beta) / beta)
        return rng.choice(pool.indices, int(min(count, len(pool))), replace=False)

    return draw
