"""Small data and specs that tests share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from cbdsl import register
from cbdsl.data.sources import Dataset
from cbdsl.engines.torch_modules import module_of
from cbdsl.spec import Spec

FEATURES, CLASSES = 8, 3


def blobs(train: int = 600, test: int = 150, seed: int = 7) -> Dataset:
    """Three clouds of points in eight dimensions, somewhat mixed: learnable in milliseconds."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(CLASSES, FEATURES))

    def draw(count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        labels = rng.integers(0, CLASSES, count)
        return centres[labels] + rng.normal(size=(count, FEATURES)), labels

    return Dataset.from_arrays(*draw(train), *draw(test), name="blobs")


def perceptron() -> nn.Module:
    """A small network for the blobs."""
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def small_spec(**settings: object) -> Spec:
    """A run on the blobs that takes a fraction of a second; keywords use __ for a dot."""
    base: dict[str, object] = {
        "workers": 6,
        "rounds": 5,
        "data.samples_per_worker": 40,
        "data.shared_training": 20,
        "data.shared_scoring": 60,
        "data.holdout": 30,
        "data.shard_size": 20,
        "local.learning_rate": 0.05,
    }
    base |= {key.replace("__", "."): value for key, value in settings.items()}
    return Spec().with_settings(base)


SMALL = [
    "--model",
    "softmax",
    "--workers",
    "4",
    "--set",
    "data.shared_scoring=200",
    "--set",
    "data.samples_per_worker=50",
]


def cbdsl(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command as a user would."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "cbdsl", *words], cwd=cwd, capture_output=True, text=True, check=False, env=environment
    )


def module_named(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """One of the package's networks as a torch module."""
    return module_of(register.model.get(name)(shape, classes))
