"""Small pictures of four classes, which a network learns in milliseconds, with room for a trigger in the corner."""

from __future__ import annotations

import numpy as np

from cbdsl.arrays import Floats, Indices
from cbdsl.data.dataset import Dataset

CLASSES, SIDE = 4, 8


def pictures(count: int, rng: np.random.Generator) -> tuple[Floats, Indices]:
    """A bright square for each class, and noise."""
    labels = rng.integers(0, CLASSES, count).astype(np.int32)
    features = 0.25 * rng.random((count, 1, SIDE, SIDE), np.float32)
    for picture, label in zip(features, labels, strict=True):
        row, column = 3 * (label // 2) + 1, 3 * (label % 2) + 1
        picture[0, row : row + 3, column : column + 3] += 0.5
    return features, labels


def picture_data(vectors: bool = False) -> Dataset:
    """A data set of them; vectors: without the axes of pictures."""
    rng = np.random.default_rng(3)
    (train, labels), (test, test_labels) = pictures(700, rng), pictures(100, rng)
    if vectors:
        train, test = train.reshape(len(train), -1), test.reshape(len(test), -1)
    return Dataset.from_arrays(train, labels, test, test_labels)
