"""Rows of sample indices: which samples a worker works on, in which order, as arrays that an engine takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cbdsl.arrays import PADDING, Indices
from cbdsl.spec_groups import LocalSpec


def padded(rows: Sequence[Indices]) -> Indices:
    """Rows of different lengths as one array, filled up with -1."""
    table = np.full((len(rows), max(map(len, rows))), PADDING, dtype=np.int32)
    for worker, row in enumerate(rows):
        table[worker, : len(row)] = row
    return table


def batches_of(samples: Indices, local: LocalSpec, rng: np.random.Generator) -> Indices:
    """A worker's batches in one round, (S, B): epochs in random order, the last batch of an epoch padded."""
    per_epoch = -(-len(samples) // local.batch_size)
    epochs = -(-local.steps // per_epoch) if local.steps else local.epochs
    table = np.full((epochs, per_epoch * local.batch_size), PADDING, dtype=np.int32)
    for epoch in table:
        epoch[: len(samples)] = rng.permutation(samples)
    rows = table.reshape(epochs * per_epoch, local.batch_size)
    return rows[: local.steps] if local.steps else rows


def stacked(rows: Sequence[Indices]) -> Indices:
    """Batches of several workers as one array, (k, S, B), short ones filled up with empty batches."""
    batches = np.full((len(rows), max(map(len, rows)), rows[0].shape[1]), PADDING, dtype=np.int32)
    for row, own in zip(batches, rows, strict=True):
        row[: len(own)] = own
    return batches
