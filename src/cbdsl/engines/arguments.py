"""What callers give to engines, checked: wrong input is an error with a sentence that says what would be right."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbdsl.arrays import PADDING, Floats, Indices


def check_indices(name: str, indices: Indices, samples: int) -> None:
    """Refuse indices of any shape that name no sample, or hold padding before a sample."""
    if not indices.size:
        return
    lowest, highest = int(indices.min()), int(indices.max())
    if lowest < PADDING or highest >= samples:
        wrong = lowest if lowest < PADDING else highest
        raise ValueError(
            f"{name} name sample {wrong} of {samples}; allowed are 0 to {samples - 1}, and {PADDING} as padding"
        )
    if lowest == PADDING:
        real = indices != PADDING
        if np.any(real[..., 1:] & ~real[..., :-1]):
            raise ValueError(f"{name} hold padding ({PADDING}) before a sample; put all padding at the end of its row")


def floats(name: str, array: NDArray[Any]) -> Floats:
    """The array as float32 in the order of C, aligned; any other kind of number is refused."""
    array = np.asarray(array)
    if array.dtype.kind != "f":
        raise ValueError(f"{name} have type {array.dtype}; give float32")
    return np.require(array, np.float32, ["C", "A"])


def whole_numbers(name: str, array: NDArray[Any]) -> Indices:
    """The array as int32 in the order of C, aligned; any other kind of number is refused."""
    array = np.asarray(array)
    if array.dtype.kind not in "iu" and array.size:
        raise ValueError(f"{name} have type {array.dtype}; give int32")
    if array.dtype != np.int32 and array.size and (array.max() > np.iinfo(np.int32).max or array.min() < PADDING):
        raise ValueError(f"{name} reach from {array.min()} to {array.max()}; give numbers that fit into int32")
    return np.require(array, np.int32, ["C", "A"])


def corrections_for(corrections: Floats, shape: tuple[int, ...]) -> Floats:
    """What is added to every gradient, (U, D), a row for each model of a stack of this shape."""
    rows = floats("corrections", corrections)
    if rows.shape != shape:
        raise ValueError(f"corrections have shape {rows.shape}; give {shape}, one row for each model")
    return rows  # not checked to be finite: like weights that are not, they spoil their own row and no other


def one_model(weights: Floats, size: int) -> Floats:
    """The flat weights of a single model, (D,)."""
    model = floats("weights", weights)
    if model.shape != (size,):
        raise ValueError(f"weights have shape {model.shape}; give ({size},), the flat weights of one model")
    return model


def sample_numbers(indices: Indices, samples: int) -> Indices:
    """Samples that each get a number of their own, (N,); padding would leave a number without a sample."""
    indices = whole_numbers("indices", indices)
    if indices.ndim != 1:
        raise ValueError(f"indices have shape {indices.shape}; give (N,), one number a sample")
    check_indices("indices", indices, samples)
    if indices.size and indices.min() == PADDING:
        raise ValueError(f"indices hold padding ({PADDING}); give the samples alone")
    return indices
