"""The native engine: C++ kernels that train and score thousands of small models. It never imports torch.

Every argument is checked here, before a pointer is handed over: wrong input is an error with a sentence, never a
crash. `cbdsl.engines.native` finds the library; ctypes releases the GIL while it runs.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbdsl.arrays import PADDING, Doubles, Floats, Indices, Samples, Seeds
from cbdsl.engines.architecture import Architecture
from cbdsl.engines.arguments import (
    check_indices,
    corrections_for,
    floats,
    one_model,
    sample_numbers,
    whole_numbers,
)
from cbdsl.engines.base import Sgd
from cbdsl.engines.native import (
    NativeEngineError,
    NativeInfo,
    available,
    default_threads,
    info,
    library,
    peak_multiply_adds,
)
from cbdsl.engines.native_table import Table

__all__ = [
    "NativeEngine",
    "NativeEngineError",
    "NativeInfo",
    "available",
    "default_threads",
    "info",
    "peak_multiply_adds",
]


class NativeEngine:
    """One network on the native kernels; fulfils `base.Engine`."""

    name = "native"

    def __init__(self, architecture: Architecture, threads: int | None = None) -> None:
        """Prepare the kernels for one network; `threads` defaults to all processors of this process."""
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise ValueError(f"threads is {threads!r}; give a whole number of at least 1, or None for all processors")
        self.architecture = architecture
        self.threads = min(threads or default_threads(), 256)
        self._classes = architecture.classes
        self._library = library()[1]
        self._handle = self._create()
        if not self._handle:
            raise NativeEngineError("the native library refused this architecture; please report it with the model")
        weakref.finalize(self, self._library.cbdsl_destroy, self._handle)
        self.size = int(self._library.cbdsl_parameters(self._handle))
        if self.size != architecture.size:
            raise NativeEngineError("the native library is out of date with this package; install the package again")

    def _create(self) -> int | None:
        table = Table(self.architecture)
        handle: int | None = self._library.cbdsl_create(
            _pointer(table.layers), len(table.layers), _pointer(table.reads), _pointer(table.constants),
            _pointer(table.shape),
        )  # fmt: skip
        return handle

    @property
    def workspace(self) -> int:
        """Bytes that a thread takes while it works."""
        return int(self._library.cbdsl_workspace(self._handle))

    def train(
        self,
        weights: Floats,
        samples: Samples,
        batches: Indices,
        sgd: Sgd,
        seeds: Seeds | None = None,
        corrections: Floats | None = None,
    ) -> Floats:
        """Take every model through its own batches; see `Engine.train`. Without seeds all are zero."""
        stack = self._stack(weights)
        trained = np.empty_like(stack)  # (U, D)
        features, labels = self._samples(samples)
        batches = whole_numbers("batches", batches)
        if batches.ndim != 3 or len(batches) != len(stack):
            raise ValueError(f"batches have shape {batches.shape}; give (U, S, B) with U = {len(stack)} workers")
        check_indices("batches", batches, len(labels))
        for name in ("learning_rate", "momentum", "weight_decay", "proximal"):
            if not np.isfinite(getattr(sgd, name)):
                raise ValueError(f"{name} is {getattr(sgd, name)}; give a finite number")
        if corrections is not None:
            corrections = corrections_for(corrections, stack.shape)
        if seeds is not None:
            seeds = np.require(seeds, np.uint64, ["C", "A"])
            if seeds.shape != stack.shape[:1]:
                raise ValueError(f"seeds have shape {seeds.shape}; give one number for each of {len(stack)} workers")
        self._call(
            self._library.cbdsl_train, len(stack), _pointer(stack), _pointer(features), _pointer(labels),
            _pointer(batches), batches.shape[1], batches.shape[2], sgd.learning_rate, sgd.momentum, sgd.weight_decay,
            sgd.proximal, None if seeds is None else _pointer(seeds),
            None if corrections is None else _pointer(corrections), _pointer(trained), self.threads,
        )  # fmt: skip
        return trained

    def losses(self, weights: Floats, samples: Samples, indices: Indices, ceilings: Doubles | None = None) -> Doubles:
        """Mean loss of every model; see `Engine.losses`. A model without samples has the loss NaN."""
        return self._score(weights, samples, indices, ceilings)[0]

    def accuracies(self, weights: Floats, samples: Samples, indices: Indices) -> Doubles:
        """Share of samples classified correctly; see `Engine.accuracies`. Logits that hold a NaN are wrong."""
        return self._score(weights, samples, indices, None)[1]

    def gradients(self, weights: Floats, samples: Samples, indices: Indices) -> Floats:
        """Gradient of the mean loss; see `Engine.gradients`. A model without samples has NaN gradients."""
        stack = self._stack(weights)
        features, labels = self._samples(samples)
        indices = self._indices(indices, len(stack), len(labels))
        out = np.zeros_like(stack)
        self._call(
            self._library.cbdsl_gradients, len(stack), _pointer(stack), _pointer(features), _pointer(labels),
            _pointer(indices), indices.shape[-1], indices.ndim == 2, _pointer(out), self.threads,
        )  # fmt: skip
        return out

    def sample_losses(self, weights: Floats, samples: Samples, indices: Indices) -> Doubles:
        """Losses of one model on single samples, the terms that `losses` adds up; see `Engine.sample_losses`."""
        model = one_model(weights, self.size)
        features, labels = self._samples(samples)
        indices = sample_numbers(indices, len(labels))
        losses = np.empty(len(indices))  # (N,)
        self._call(
            self._library.cbdsl_sample_losses, _pointer(model), _pointer(features), _pointer(labels),
            _pointer(indices), len(indices), _pointer(losses), self.threads,
        )  # fmt: skip
        return losses

    def _score(
        self, weights: Floats, samples: Samples, indices: Indices, ceilings: Doubles | None
    ) -> tuple[Doubles, Doubles]:
        stack = self._stack(weights)
        features, labels = self._samples(samples)
        indices = self._indices(indices, len(stack), len(labels))
        if ceilings is not None:
            ceilings = np.require(ceilings, np.float64, ["C", "A"])
            if ceilings.shape != (len(stack),):
                raise ValueError(
                    f"ceilings have shape {ceilings.shape}; give one number for each of {len(stack)} workers"
                )
        losses, accuracies = np.empty(len(stack)), np.empty(len(stack))
        self._call(
            self._library.cbdsl_score, len(stack), _pointer(stack), _pointer(features), _pointer(labels),
            _pointer(indices), indices.shape[-1], indices.ndim == 2, None if ceilings is None else _pointer(ceilings),
            _pointer(losses), _pointer(accuracies), self.threads,
        )  # fmt: skip
        return losses, accuracies

    def _call(self, function: Any, *arguments: Any) -> None:  # noqa: ANN401
        if function(self._handle, *arguments) != 0:
            raise MemoryError(f"no memory for {self.threads} threads of the native engine; use fewer threads")

    def _stack(self, weights: Floats) -> Floats:
        stack = floats("weights", weights)
        if stack.ndim != 2 or stack.shape[1] != self.size:
            raise ValueError(
                f"weights have shape {stack.shape}; give (U, {self.size}), one row of flat weights a worker"
            )
        return stack

    def _samples(self, samples: Samples) -> tuple[Floats, Indices]:
        features = floats("features", samples.features)
        labels = whole_numbers("labels", samples.labels)
        if features.shape[1:] != self.architecture.shape:
            raise ValueError(
                f"features have shape {features.shape}; give (N, *shape), shape being {self.architecture.shape} here"
            )
        if labels.shape != features.shape[:1]:
            raise ValueError(f"labels have shape {labels.shape}; give one label for each of {len(features)} samples")
        if labels.size and (labels.min() < 0 or labels.max() >= self._classes):
            raise ValueError(
                f"labels lie in {labels.min()} to {labels.max()}; the network's classes are 0 to {self._classes - 1}"
            )
        return features, labels

    def _indices(self, indices: Indices, workers: int, samples: int) -> Indices:
        indices = whole_numbers("indices", indices)
        if indices.ndim not in {1, 2} or (indices.ndim == 2 and len(indices) != workers):
            raise ValueError(f"indices have shape {indices.shape}; give (N,) for all workers or ({workers}, N)")
        check_indices("indices", indices, samples)
        if indices.ndim == 1:
            indices = indices[: np.count_nonzero(indices != PADDING)]
        return indices


def _pointer(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)
