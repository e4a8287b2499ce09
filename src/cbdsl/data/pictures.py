"""Images of packages as arrays: CIFAR-10 out of PNGs, Fashion-MNIST out of IDX files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbdsl.data.png import read_png
from cbdsl.data.sources import Scale, read_idx
from cbdsl.errors import UserError

_TRAINING = tuple(f"data_batch_{number}.png" for number in range(1, 6))
_MEAN, _DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # what everybody normalises with
_CLOTHES: Scale = (0.28604059698879547, 0.3530242445149226)  # as `scale_of` counts them; known, so the same everywhere


def cifar10(parts: Mapping[str, bytes], batch: int = 10_000) -> dict[str, NDArray[Any]]:
    """Images (N, 3, 32, 32) and labels; a row of a PNG is one image, its pixels line by line."""
    train = np.concatenate([_images(parts[name], batch) for name in _TRAINING])
    return {
        "train_features": train,
        "train_labels": _labels(parts["train_lables.json"], 5 * batch),
        "test_features": _images(parts["test_batch.png"], batch),
        "test_labels": _labels(parts["test_lables.json"], batch),
        "feature_mean": np.array(_MEAN),
        "feature_deviation": np.array(_DEVIATION),
    }


def _images(content: bytes, count: int) -> NDArray[np.uint8]:
    pixels = read_png(content, height=count, width=32 * 32, channels=3)
    return np.ascontiguousarray(pixels.reshape(count, 32, 32, 3).transpose(0, 3, 1, 2))


def _labels(content: bytes, count: int) -> NDArray[np.int32]:
    try:
        labels = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"The labels of CIFAR-10 cannot be read ({error}).") from error
    whole = isinstance(labels, list) and all(type(label) is int and 0 <= label < 10 for label in labels)
    if not whole or len(labels) != count:
        raise UserError(f"The labels of CIFAR-10 are not {count:,} whole numbers from 0 to 9.")
    return np.array(labels, np.int32)


def fashion_mnist(parts: Mapping[str, bytes], shop: Path) -> dict[str, NDArray[Any]]:
    """Images (N, 1, 28, 28) and labels; scaled as the same files in a folder are. shop: a folder for them meanwhile."""
    for name, content in parts.items():
        (shop / name).write_bytes(content)
    arrays: dict[str, NDArray[Any]] = {}
    for word, stem in (("train", "train"), ("test", "t10k")):
        images = read_idx(shop / f"{stem}-images-idx3-ubyte.gz", dimensions=3)
        arrays[f"{word}_features"] = images[:, None]
        arrays[f"{word}_labels"] = read_idx(shop / f"{stem}-labels-idx1-ubyte.gz", dimensions=1).astype(np.int32)
    return {**arrays, "feature_mean": np.array(_CLOTHES[:1]), "feature_deviation": np.array(_CLOTHES[1:])}
