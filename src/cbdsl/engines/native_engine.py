"""The native engine: C++ kernels that train and score thousands of small models. It never imports torch.

Every argument is checked here, before a pointer is handed over: wrong input is an error with a sentence, never a
crash. `cbdsl.engines.native` finds the library; ctypes releases the GIL while it runs.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbdsl.arrays import PADDING, Doubles, Floats, Indices, Samples, Seeds
from cbdsl.engines.architecture import (
    Add,
    Architecture,
    AvgPool1d,
    AvgPool2d,
    Concat,
    Conv1d,
    Conv2d,
    Dropout,
    Flatten,
    Gelu,
    GroupNorm,
    Hardswish,
    Layer,
    LayerNorm,
    LeakyRelu,
    Linear,
    MaxPool1d,
    MaxPool2d,
    Relu,
    Relu6,
    Scale,
    Shape,
    Sigmoid,
    Silu,
    Tanh,
)
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

__all__ = [
    "NativeEngine",
    "NativeEngineError",
    "NativeInfo",
    "available",
    "default_threads",
    "info",
    "peak_multiply_adds",
]

LAYER_FIELDS = 12
"""Numbers that describe one layer to the library: a code, how many tensors it reads, and up to ten sizes."""


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
        """The network as the library takes it: layers, who reads whom, numbers that are not whole, a sample's shape."""
        network = self.architecture
        given = [network.shape if read[0] < 0 else network.shapes()[read[0]] for read in network.reads]
        rows = []
        for layer, read in zip(network.layers, network.reads, strict=True):
            code, *sizes = _codes(layer, given[len(rows)])
            rows.append((code, len(read), *sizes, *[0] * (LAYER_FIELDS - 2 - len(sizes))))
        table = np.array(rows, np.int32)  # (layers, LAYER_FIELDS)
        reads = np.array([other for read in network.reads for other in read], np.int32)
        numbers = [
            value for layer, shape in zip(network.layers, given, strict=True) for value in _numbers(layer, shape)
        ]
        constants = np.array(numbers, np.float32)
        shape = np.array((*_image(network.shape), len(network.shape)), np.int32)
        handle: int | None = self._library.cbdsl_create(
            _pointer(table), len(table), _pointer(reads), _pointer(constants), _pointer(shape)
        )
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
            seeds = np.ascontiguousarray(seeds, np.uint64)
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
            ceilings = np.ascontiguousarray(ceilings, np.float64)
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


_ACTIVATIONS: dict[type[Layer], int] = {Relu: 2, Tanh: 3, Sigmoid: 4, Relu6: 9, LeakyRelu: 10, Silu: 11, Hardswish: 12}


def _image(shape: Shape) -> Shape:
    """Shape of rows or series as that of images: (channels, height, width)."""
    return shape if len(shape) == 3 else (shape[0], 1, *shape[1:]) if len(shape) == 2 else (*shape, 1, 1)


def _pair(sizes: Shape, along: int) -> Shape:
    """Sizes of a kernel over one axis as those over two; along: what it is over the axis that is not there."""
    return sizes if len(sizes) == 2 else (along, sizes[0])


def _codes(layer: Layer, given: Shape) -> tuple[int, ...]:
    """One layer as the library reads it; see LayerCode in plan.hpp. given: the shape of what it reads first."""
    if type(layer) in _ACTIVATIONS:
        return (_ACTIVATIONS[type(layer)],)
    match layer:
        case Conv2d() | Conv1d():
            kernel, padding, stride = _pair(layer.kernel, 1), _pair(layer.padding, 0), _pair(layer.stride, 1)
            codes: tuple[int, ...] = (
                1, layer.inputs, layer.outputs, *kernel, *padding, layer.bias, *stride, layer.groups,
            )  # fmt: skip
        case MaxPool2d() | MaxPool1d() | AvgPool2d() | AvgPool1d():
            code = 5 if isinstance(layer, MaxPool2d | MaxPool1d) else 6
            codes = (code, *_pair(layer.kernel, 1), *_pair(layer.stride, 1), *_pair(layer.padding, 0))
        case Flatten():
            codes = (7,)
        case Linear():
            codes = (8, layer.inputs, layer.outputs, layer.bias)
        case Gelu():
            codes = (14 if layer.approximate else 13,)
        case GroupNorm():
            codes = (15, layer.groups, layer.affine, layer.affine)
        case LayerNorm():
            codes = (16, math.prod(layer.shape), layer.affine, layer.bias)
        case Dropout():
            codes = (17,)
        case Scale():
            codes = (18, given[0])
        case Add():
            codes = (19,)
        case Concat():
            codes = (20,)
        case _:
            raise TypeError(f"{type(layer).__name__} is no layer")
    return codes


def _numbers(layer: Layer, given: Shape) -> tuple[float, ...]:
    """What a layer is described by that is not whole."""
    match layer:
        case LeakyRelu():
            return (layer.slope,)
        case GroupNorm() | LayerNorm():
            return (layer.epsilon,)
        case Dropout():
            return (layer.chance,)
        case Scale():
            each = [values * given[0] if len(values) == 1 else values for values in (layer.factors, layer.offsets)]
            return (*each[0], *each[1])
    return ()
