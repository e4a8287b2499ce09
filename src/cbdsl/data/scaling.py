"""How the features of a file become what a network is given: less their channel's mean, in deviations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbdsl.arrays import Floats
from cbdsl.errors import UserError, shown

SCALES = ("feature_mean", "feature_deviation")
SHADES = np.arange(256) / 255.0  # (256,)
_AT_ONCE = 2**18  # numbers
_LARGEST = 1e30


@dataclass(frozen=True)
class Scaling:
    """Means and deviations, one a channel. shades: the training set held bytes, of which 255 counts as 1."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    shades: bool = False

    def __post_init__(self) -> None:
        """Numbers that a float32 can hold, and deviations to divide by."""
        for name in ("mean", "deviation"):
            values = getattr(self, name)
            if not isinstance(values, tuple) or not values or not all(map(_is_number, values)):
                raise UserError(f"the {name} of features is {shown(values)}; give a finite number for each channel.")
        if len(self.mean) != len(self.deviation) or min(self.deviation) < 1 / _LARGEST:
            raise UserError(
                f"features have {len(self.mean)} means and {len(self.deviation)} deviations from {min(self.deviation)};"
                " give as many of both, the deviations above 0."
            )
        if not isinstance(self.shades, bool):
            raise UserError(f"shades is {shown(self.shades)}; give true or false.")

    @staticmethod
    def of(arrays: Mapping[str, NDArray[Any]]) -> Scaling | None:
        """That of a data set's arrays; none if they are used as they are."""
        if SCALES[0] not in arrays:
            return None
        mean, deviation = (tuple(map(float, arrays[name])) for name in SCALES)
        return Scaling(mean, deviation, arrays["train_features"].dtype == np.uint8)

    def apply(self, features: NDArray[Any]) -> Floats:
        """Features (N, C, ...) as a file holds them, made what the network takes."""
        return scaled(features, np.array(self.mean), np.array(self.deviation))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST  # NaN is not


def scaled(
    features: NDArray[Any], mean: NDArray[Any] | None = None, deviation: NDArray[Any] | None = None
) -> NDArray[Any]:
    """Features (N, C, ...) less their channel's mean, in deviations, as float32; as they are if neither is given.

    mean, deviation: (C,). Bytes are shades: 255 counts as 1.
    """
    if mean is None and deviation is None:
        return features
    channels = features.shape[1:2]
    for name, values in zip(SCALES, (mean, deviation), strict=True):
        if values is None or values.shape != channels or not np.isfinite(values).all():
            found = "nothing" if values is None else f"{values.dtype} {values.shape}"
            raise UserError(f"{name} must hold a finite number for each channel, {channels}; given {found}.")
    assert mean is not None
    assert deviation is not None
    if not (deviation > 0).all():
        raise UserError(f"feature_deviation must be above 0; given {deviation.tolist()}.")
    result = np.empty(features.shape, np.float32)
    at_once = max(1, _AT_ONCE // max(1, features[:1].size))
    for channel, (middle, spread) in enumerate(zip(mean, deviation, strict=True)):
        shades = np.asarray((SHADES - middle) / max(spread, 1e-6), np.float32)
        for start in range(0, len(features), at_once):
            part = slice(start, start + at_once), channel
            with np.errstate(over="ignore"):  # what is too large for a float32 is infinite, and refused later
                values = np.asarray(features[part])
                result[part] = shades[values] if values.dtype == np.uint8 else (values - np.float64(middle)) / spread
    return result
