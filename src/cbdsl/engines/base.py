"""What every engine can do with a stack of models: train it, score it, differentiate it.

An engine knows one network and nothing of swarms, servers or rounds. Workers are rows: a stack is a
``(U, D)`` float32 array of flat weights, and row ``u`` of a result depends on row ``u`` of the
inputs alone. So the number of threads, and the order or grouping of workers, never change a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cbdsl.arrays import PADDING, Doubles, Floats, Indices, Samples, Seeds


@dataclass(frozen=True)
class Sgd:
    """Mini-batch SGD as torch.optim.SGD defines it; the momentum buffer starts at zero on every call.

    A step from w, of a model that a call began at w_0, with its own constant correction c:

        g = gradient + weight_decay * w + proximal * (w - w_0) + c
        v = momentum * v + g
        w = w - learning_rate * v
    """

    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal: float = 0.0  # mu of FedProx (Li et al., 2020): how strongly a model is held where the call found it


class Engine(Protocol):
    """One network, many models of it. The loss is the mean cross-entropy."""

    @property
    def name(self) -> str:
        """How a user selects this engine and how reports call it."""
        ...

    @property
    def size(self) -> int:
        """D, the number of parameters of one model."""
        ...

    def train(
        self,
        weights: Floats,
        samples: Samples,
        batches: Indices,
        sgd: Sgd,
        seeds: Seeds | None = None,
        corrections: Floats | None = None,
    ) -> Floats:
        """Take every model through its own batches, one SGD step a batch; return the new weights.

        weights: (U, D), left as it is. batches: (U, S, B) rows of `samples`; a short batch is padded
        with -1 at its end, a batch without samples is no step. seeds: (U,), for layers that draw
        random numbers while they train. corrections: (U, D), finite; row u is added to the gradient of
        every step of model u, as SCAFFOLD's c - c_u is (Karimireddy et al., 2020). See `Sgd` for a step.
        """
        ...

    def losses(self, weights: Floats, samples: Samples, indices: Indices, ceilings: Doubles | None = None) -> Doubles:
        """Mean loss of every model, (U,).

        indices: (N,), the same samples for all, or (U, N), a row a worker, padded with -1.
        ceilings: (U,); a worker whose loss is certain to exceed its ceiling may be given up and is
        then reported as +inf. Every other number is exact, so a minimum with the ceiling is too.
        """
        ...

    def sample_losses(self, weights: Floats, samples: Samples, indices: Indices) -> Doubles:
        """Loss of one model on every single sample, (N,), in the order of `indices`.

        weights: (D,), one model. indices: (N,), without padding. Their mean is what `losses` gives, up to rounding.
        """
        ...

    def accuracies(self, weights: Floats, samples: Samples, indices: Indices) -> Doubles:
        """Share of samples classified correctly, (U,); indices as in `losses`. Logits that hold a NaN are wrong."""
        ...

    def gradients(self, weights: Floats, samples: Samples, indices: Indices) -> Floats:
        """Gradient of the mean loss, (U, D); indices as in `losses`."""
        ...


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
