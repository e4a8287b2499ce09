"""Data sets that are computed, not downloaded: Friedman's function to predict, and machines whose faults to detect."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from cbdsl import register
from cbdsl.arrays import Doubles, Indices
from cbdsl.data.dataset import Dataset
from cbdsl.rng import stream
from cbdsl.util.serialize import Bounds, check_value

_MACHINES = 40  # natural clients
_CHANNELS, _LENGTH = 3, 32  # of a window of readings
_MOST = 10**7


@register.dataset("friedman")
@cache
def friedman(*, samples: int = 12_000, noise: float = 1.0) -> Dataset:
    """Friedman's function (1991): a target of five of ten uniform features, and noise; 2,000 test samples.

    y = 10 sin(pi x0 x1) + 20 (x2 - 1/2)^2 + 10 x3 + 5 x4 + noise. Its deviation is 4.9; the noise is the least RMSE.
    """
    check_value(samples, Bounds(100, _MOST), "options.friedman.samples")
    check_value(noise, Bounds(0.0, 1e6), "options.friedman.noise")
    rng = stream(0, "friedman")
    x = rng.random((samples + 2_000, 10), np.float32)
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    y = y + noise * rng.standard_normal(len(y))
    data = Dataset.from_arrays(
        x[:samples], y[:samples], x[samples:], y[samples:], "friedman", task="regression", target_names=("y",)
    )
    return replace(data, name="friedman")


@register.dataset("machines")
@cache
def machines(*, samples: int = 12_000) -> Dataset:
    """Vibrations of 40 machines, (3, 32) per window, each with its own speed and load: learn what is normal.

    Machines are the natural clients. Of 3,000 test windows a third has a fault: knocks, another speed, or wear.
    """
    check_value(samples, Bounds(_MACHINES, _MOST), "options.machines.samples")
    rng = stream(0, "machines")
    speeds, loads = rng.uniform(1.5, 3.0, _MACHINES), rng.uniform(0.7, 1.3, (_MACHINES, _CHANNELS))
    owners = np.arange(samples, dtype=np.int32) % _MACHINES
    train = _windows(owners, speeds, loads, rng)
    test_owners = rng.integers(0, _MACHINES, 3_000).astype(np.int32)
    faulty = (np.arange(3_000) % 3 == 0).astype(np.int32)
    kinds = rng.integers(0, 3, 3_000)
    changed = np.where((faulty == 1) & (kinds == 1), 1.35, 1.0)
    test = _windows(test_owners, speeds, loads, rng, changed)
    knocks, worn = np.flatnonzero(faulty * (kinds == 0)), np.flatnonzero(faulty * (kinds == 2))
    test[knocks, rng.integers(0, _CHANNELS, len(knocks)), rng.integers(0, _LENGTH, len(knocks))] += 2.5
    test[worn] += 0.35 * rng.standard_normal((len(worn), _CHANNELS, _LENGTH))
    data = Dataset.from_arrays(train, None, test, faulty, "machines", owners, task="reconstruction")
    return replace(data, name="machines")


def _windows(
    owners: Indices, speeds: Doubles, loads: Doubles, rng: np.random.Generator, changed: Doubles | float = 1.0
) -> Doubles:
    """Draw windows of the machines, (n, channels, length): two harmonics at a random phase, and noise."""
    count = len(owners)
    turns = (speeds[owners] * changed)[:, None] * np.arange(_LENGTH) / _LENGTH + rng.random(count)[:, None]  # (n, L)
    shift = np.arange(_CHANNELS)[:, None] / 4  # channels are a quarter of a turn apart
    angle = 2 * np.pi * (turns[:, None] + shift)
    wave = np.sin(angle) + 0.4 * np.sin(2 * angle)
    return np.asarray(loads[owners][:, :, None] * wave + 0.1 * rng.standard_normal((count, _CHANNELS, _LENGTH)))
