"""The native engine: C++ kernels that train and score thousands of small models. It never imports torch.

All arguments are checked before a pointer is passed on, so wrong input is an error and never a crash. ctypes releases
the GIL while the library runs.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from cbdsl.arrays import PADDING, Doubles, Floats, Indices, Samples, Seeds
from cbdsl.engines.engine import (
    Sgd,
    as_float32,
    as_int32,
    check_classifies,
    check_corrections,
    check_indices,
    check_one_model,
    check_sample_indices,
)
from cbdsl.engines.loss import CROSS_ENTROPY, Loss, targets_of
from cbdsl.models.architecture import Architecture
from cbdsl.models.frozen_weights import FrozenWeights
from cbdsl.models.layers import Shape
from cbdsl.spec import Optimiser

HERE = Path(__file__).parent / "native"


class NativeEngineError(RuntimeError):
    """The library is missing, or refused a call."""


@dataclass(frozen=True)
class NativeInfo:
    """Facts about the library for `cbdsl doctor`."""

    library: str
    instructions: str
    lanes: int  # samples in one vector register
    compiler: str
    kernels: str  # a digest of the sources it was built from
    threads: int


def available() -> str | None:
    """Return None if the library loads, otherwise the reason why not."""
    try:
        library()
    except NativeEngineError as error:
        return str(error)
    return None


def info() -> NativeInfo:
    """Describe the loaded library; raise NativeEngineError if there is none."""
    path, loaded = library()
    return NativeInfo(
        library=path.name,
        instructions=loaded.cbdsl_instructions().decode(),
        lanes=loaded.cbdsl_lanes(),
        compiler=loaded.cbdsl_compiler().decode(),
        kernels=loaded.cbdsl_kernels().decode(),
        threads=default_threads(),
    )


def default_threads() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_multiply_adds(threads: int | None = None, seconds: float = 0.2) -> float:
    """Measure the multiply-adds per second of this machine with all data in registers."""
    return float(library()[1].cbdsl_peak(threads or default_threads(), seconds))


@cache
def library() -> tuple[Path, Any]:
    """Load the best library for this processor, once."""
    built = sorted(HERE.glob("_lanes*.so")) + sorted(HERE.glob("_lanes*.dylib"))
    if not built:
        raise NativeEngineError(
            "the native engine was not built when the package was installed; install a C++ compiler "
            "(g++ or clang++) and install the package again, or use the torch engine"
        )
    by_level = {path.name.split(".")[0].removeprefix("_lanes"): path for path in built}
    try:
        if "" not in by_level:
            baseline = _load(by_level["_v1"])
            fitting = (f"_v{level}" for level in range(baseline[1].cbdsl_level(), 1, -1))
            return next((_load(by_level[level]) for level in fitting if level in by_level), baseline)
        path, loaded = _load(by_level[""])  # built for one machine: this one, unless it was copied
        if loaded.cbdsl_level() < loaded.cbdsl_needed_level():
            raise NativeEngineError(
                "the native engine was built for another processor; install the package again on this machine, "
                "or with CBDSL_PORTABLE=1 for several"
            )
        return path, loaded
    except (OSError, KeyError, AttributeError) as error:
        raise NativeEngineError(f"the native engine does not load ({error}); install the package again") from None


def _load(path: Path) -> tuple[Path, Any]:
    library = ctypes.CDLL(str(path))
    pointer, whole, large, double = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "cbdsl_create": (pointer, [pointer, whole, pointer, pointer, pointer, whole, ctypes.c_float]),
        "cbdsl_freeze": (None, [pointer] * 3),
        "cbdsl_destroy": (None, [pointer]),
        "cbdsl_parameters": (large, [pointer]),
        "cbdsl_workspace": (large, [pointer]),
        "cbdsl_train": (whole, [pointer, large, *[pointer] * 4, *[large] * 2, *[pointer] * 5, whole]),
        "cbdsl_gradients": (whole, [pointer, large, *[pointer] * 4, large, whole, pointer, whole]),
        "cbdsl_score": (whole, [pointer, large, *[pointer] * 4, large, whole, pointer, pointer, pointer, whole]),
        "cbdsl_sample_losses": (whole, [pointer, *[pointer] * 4, large, pointer, whole]),
        "cbdsl_outputs": (whole, [pointer, *[pointer] * 3, large, pointer, whole]),
        "cbdsl_lanes": (whole, []),
        "cbdsl_compiler": (ctypes.c_char_p, []),
        "cbdsl_kernels": (ctypes.c_char_p, []),
        "cbdsl_instructions": (ctypes.c_char_p, []),
        "cbdsl_level": (whole, []),
        "cbdsl_needed_level": (whole, []),
        "cbdsl_peak": (double, [whole, double]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return path, library


_STEP = ("learning_rate", "momentum", "weight_decay", "proximal", "clip")  # numbers of a step, in the library's order
OPTIMISERS: tuple[str, ...] = get_args(Optimiser)
LAYER_FIELDS = 12
"""Integers per layer: its code, how many tensors it reads, and up to ten sizes."""


class LayerTable:
    """A network as the library reads it: layers, their inputs, their constants and the shape of a sample."""

    def __init__(self, network: Architecture) -> None:
        rows: list[tuple[int, ...]] = []
        for layer, read in zip(network.layers, network.reads, strict=True):
            code, *sizes = layer.kernel_sizes()
            rows.append((code, len(read), *sizes, *[0] * (LAYER_FIELDS - 2 - len(sizes))))
        self.layers = np.array(rows, np.int32)  # (layers, LAYER_FIELDS)
        self.reads = np.array([other for read in network.reads for other in read], np.int32)
        constants = [value for layer in network.layers for value in layer.kernel_constants()]
        self.constants = np.array(constants, np.float32)
        self.shape = np.array((*_image(network.shape), len(network.shape)), np.int32)  # and the number of its axes


def _image(shape: Shape) -> Shape:
    """Return the shape of rows, series or images as (channels, height, width)."""
    return shape if len(shape) == 3 else (shape[0], 1, *shape[1:]) if len(shape) == 2 else (*shape, 1, 1)


class NativeEngine:
    """One network on the native kernels; implements `Engine`."""

    name = "native"

    def __init__(
        self,
        architecture: Architecture,
        threads: int | None = None,
        loss: Loss = CROSS_ENTROPY,
        frozen: FrozenWeights | None = None,
    ) -> None:
        """Prepare the kernels for one network; `threads` defaults to all processors of this process."""
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise ValueError(f"threads is {threads!r}; give a whole number of at least 1, or None for all processors")
        self.architecture, self.loss = architecture, loss
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
        if frozen is not None:
            self._freeze(frozen)

    def _create(self) -> int | None:
        table = LayerTable(self.architecture)
        handle: int | None = self._library.cbdsl_create(
            _pointer(table.layers), len(table.layers), _pointer(table.reads), _pointer(table.constants),
            _pointer(table.shape), self.loss.code, self.loss.setting,
        )  # fmt: skip
        return handle

    def _freeze(self, frozen: FrozenWeights) -> None:
        values, trains = as_float32("frozen weights", frozen.values), frozen.trains.astype(np.uint8)
        if values.shape != (self.size,) or trains.shape != (self.size,):
            raise ValueError(
                f"frozen weights have shapes {values.shape} and {trains.shape}; give one each of {self.size} weights"
            )
        if not frozen.size:
            raise ValueError("all weights are frozen; leave some to train")
        self._library.cbdsl_freeze(self._handle, _pointer(trains), _pointer(values))
        self.size = frozen.size

    @property
    def workspace(self) -> int:
        """Bytes of working memory per thread."""
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
        """See `Engine.train`. Without seeds all are zero."""
        stack = self._stack(weights)
        trained = np.empty_like(stack)  # (U, D)
        features, labels = self._samples(samples)
        batches = as_int32("batches", batches)
        if batches.ndim != 3 or len(batches) != len(stack):
            raise ValueError(f"batches have shape {batches.shape}; give (U, S, B) with U = {len(stack)} workers")
        check_indices("batches", batches, len(labels))
        for name in _STEP:
            if not np.isfinite(getattr(sgd, name)):
                raise ValueError(f"{name} is {getattr(sgd, name)}; give a finite number")
        if corrections is not None:
            corrections = check_corrections(corrections, stack.shape)
        if seeds is not None:
            seeds = np.require(seeds, np.uint64, ["C", "A"])
            if seeds.shape != stack.shape[:1]:
                raise ValueError(f"seeds have shape {seeds.shape}; give one number for each of {len(stack)} workers")
        step = np.array([*(getattr(sgd, name) for name in _STEP), OPTIMISERS.index(sgd.optimiser)], np.float32)
        rates = sgd.rates(batches)
        self._call(
            self._library.cbdsl_train, len(stack), _pointer(stack), _pointer(features), _pointer(labels),
            _pointer(batches), batches.shape[1], batches.shape[2], _pointer(step),
            None if rates is None else _pointer(rates), None if seeds is None else _pointer(seeds),
            None if corrections is None else _pointer(corrections), _pointer(trained), self.threads,
        )  # fmt: skip
        return trained

    def losses(self, weights: Floats, samples: Samples, indices: Indices, ceilings: Doubles | None = None) -> Doubles:
        """See `Engine.losses`. A model without samples has the loss NaN."""
        return self._score(weights, samples, indices, ceilings)[0]

    def accuracies(self, weights: Floats, samples: Samples, indices: Indices) -> Doubles:
        """See `Engine.accuracies`."""
        check_classifies(self.loss)
        return self._score(weights, samples, indices, None)[1]

    def gradients(self, weights: Floats, samples: Samples, indices: Indices) -> Floats:
        """See `Engine.gradients`. A model without samples has NaN gradients."""
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
        """See `Engine.sample_losses`. These are the terms that `losses` adds up."""
        model = check_one_model(weights, self.size)
        features, labels = self._samples(samples)
        indices = check_sample_indices(indices, len(labels))
        losses = np.empty(len(indices))  # (N,)
        self._call(
            self._library.cbdsl_sample_losses, _pointer(model), _pointer(features), _pointer(labels),
            _pointer(indices), len(indices), _pointer(losses), self.threads,
        )  # fmt: skip
        return losses

    def outputs(self, weights: Floats, samples: Samples, indices: Indices) -> Floats:
        """See `Engine.outputs`."""
        model = check_one_model(weights, self.size)
        features = self._features(samples)
        indices = check_sample_indices(indices, len(features))
        outputs = np.empty((len(indices), self._classes), np.float32)  # (N, C)
        self._call(
            self._library.cbdsl_outputs, _pointer(model), _pointer(features), _pointer(indices), len(indices),
            _pointer(outputs), self.threads,
        )  # fmt: skip
        return outputs

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
        stack = as_float32("weights", weights)
        if stack.ndim != 2 or stack.shape[1] != self.size:
            raise ValueError(
                f"weights have shape {stack.shape}; give (U, {self.size}), one row of flat weights per worker"
            )
        return stack

    def _features(self, samples: Samples) -> Floats:
        features = as_float32("features", samples.features)
        if features.shape[1:] != self.architecture.shape:
            raise ValueError(
                f"features have shape {features.shape}; give (N, *shape), shape being {self.architecture.shape} here"
            )
        return features

    def _samples(self, samples: Samples) -> tuple[Floats, NDArray[Any]]:
        """Return features, and labels (N,) or targets (N, C)."""
        features = self._features(samples)
        if not self.loss.reads_labels:
            return features, targets_of(samples, self.loss, self._classes)
        labels = as_int32("labels", samples.labels)
        if labels.shape != features.shape[:1]:
            raise ValueError(f"labels have shape {labels.shape}; give one label for each of {len(features)} samples")
        if labels.size and (labels.min() < 0 or labels.max() >= self._classes):
            raise ValueError(
                f"labels lie in {labels.min()} to {labels.max()}; the network's classes are 0 to {self._classes - 1}"
            )
        return features, labels

    def _indices(self, indices: Indices, workers: int, samples: int) -> Indices:
        indices = as_int32("indices", indices)
        if indices.ndim not in {1, 2} or (indices.ndim == 2 and len(indices) != workers):
            raise ValueError(f"indices have shape {indices.shape}; give (N,) for all workers or ({workers}, N)")
        check_indices("indices", indices, samples)
        if indices.ndim == 1:
            indices = indices[: np.count_nonzero(indices != PADDING)]
        return indices


def _pointer(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)
