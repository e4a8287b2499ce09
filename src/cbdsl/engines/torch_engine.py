"""The engine for any `nn.Module`: a loop over workers, spread over threads.

Each worker is computed by itself on one thread, so its numbers do not depend on who else is in the stack;
`torch.func.vmap`'s grouped kernels would tie a worker's rounding to its neighbours. Measured in one run on the paper's
CNN, 50 workers, two cores: vmap trains a tenth faster (76 against 85 ms a step) and scores 1.8 times slower.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cbdsl.arrays import PADDING, Doubles, Floats, Indices, Samples, Seeds
from cbdsl.engines.base import Sgd, corrections_for, one_model, sample_numbers
from cbdsl.errors import UserError
from cbdsl.models.from_torch import buffers_of, check_buffers, check_layers
from cbdsl.models.to_torch import parameter_count

CPU = torch.device("cpu")

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # without it cuBLAS may add up in another order every time


def accelerators() -> list[str]:
    """The kinds of GPU that torch can use here, the best first; empty if there are none."""
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return [name for name, there in found.items() if there]


def device_named(name: str) -> torch.device:
    """The device that a user asked for; "auto" is a GPU where there is one."""
    there = accelerators()
    if name == "auto":
        return torch.device(there[0]) if there else CPU
    if name != "cpu" and name not in there:
        raise UserError(
            f"The device {name} was asked for, but torch {torch.__version__} sees none here; it sees: "
            f"{', '.join(['cpu', *there])}. Use --device auto or --device cpu, or install torch for that GPU."
        )
    return torch.device(name)


def brought(samples: Samples, indices: Indices, device: torch.device) -> tuple[Tensor, Tensor, Indices]:
    """Features and labels on a device, of those samples alone that are named, and the indices into them.

    They are brought anew for every call: what would be kept there might be out of date, and fill the device.
    """
    used, places = np.unique(indices, return_inverse=True)
    places = places.reshape(indices.shape)
    if len(used) and used[0] == PADDING:
        used, places = used[1:], places - 1  # padding comes first, and stays -1
    features = torch.from_numpy(np.asarray(samples.features[used], np.float32)).to(device)
    labels = torch.from_numpy(samples.labels[used].astype(np.int64)).to(device)
    return features, labels, places.astype(np.int32)


def generator_states(device: torch.device) -> list[Tensor]:
    """The states of the generators that a module on this device may draw from: the CPU's, and the device's own."""
    own = [] if device.type == "cpu" else [_backend(device).get_rng_state()]
    return [torch.get_rng_state(), *own]


def put_back(states: list[Tensor], device: torch.device) -> None:
    """Set the generators to states that `generator_states` gave."""
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        _backend(device).set_rng_state(states[1])


def seed_generators(seed: int, device: torch.device) -> None:
    """Start the same generators from a seed; no other device's."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        _backend(device).manual_seed(seed)


def same_states(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether nothing was drawn between two calls of `generator_states`."""
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """Put the states of the generators back at the end."""
    states = generator_states(device)
    try:
        yield
    finally:
        put_back(states, device)


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Make torch repeat itself on a device, to the bit, and keep float32 whole; afterwards all is as it was.

    An operation that has no such form on the device is a UserError.
    """
    workspace = os.environ.get(_WORKSPACE)
    saved = [(write, read()) for read, write in _SETTINGS if _readable(read)]
    try:
        _be_strict()
        yield
    except RuntimeError as error:  # torch has no class of its own for what is told from the text
        if explained := _explained(error, device):
            raise explained from error
        raise
    finally:
        for write, value in saved:
            write(value)
        os.environ.pop(_WORKSPACE, None)
        if workspace is not None:
            os.environ[_WORKSPACE] = workspace


def _be_strict() -> None:
    os.environ[_WORKSPACE] = ":4096:8"
    torch.set_num_threads(1)  # how an operation is split over threads shows in its last digits
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # it would choose a kernel by its speed at the moment
    torch.set_float32_matmul_precision("highest")  # TF32 has ten bits of mantissa
    torch.backends.cudnn.allow_tf32 = False


def _explained(error: RuntimeError, device: torch.device) -> UserError | None:
    text = str(error)
    if "out of memory" in text.lower():
        return UserError(
            f"The device {device.type} has not enough free memory for this model ({text.splitlines()[0]}). "
            "Use --device cpu, a smaller model, or a lower local.batch_size."
        )
    if "deterministic" in text and device.type != "cpu":
        return UserError(
            f"The model has an operation that does not repeat its numbers on {device.type} "
            f"({text.splitlines()[0]}). Use --device cpu, or another layer."
        )
    return None


def _backend(device: torch.device) -> Any:  # noqa: ANN401 - torch.cuda or torch.mps, which share these functions
    return getattr(torch, device.type)


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:  # noqa: ANN401
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _readable(read: Callable[[], Any]) -> bool:
    """Whether this torch has a setting, and can say what it is: it cannot if old and new names of it were mixed."""
    try:
        read()
    except (AttributeError, RuntimeError):
        return False
    return True


# How to read and how to write each setting that `_be_strict` changes; precision has old names and, since torch 2.9, new
# ones, which are written last because the old ones change them too.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (_determinism, lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1])),
    _attribute(torch.backends.cudnn, "deterministic"),
    _attribute(torch.backends.cudnn, "benchmark"),
    _attribute(torch.backends.cuda.matmul, "allow_tf32"),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _attribute(torch.backends.cudnn, "allow_tf32"),
    _attribute(torch.backends.cuda.matmul, "fp32_precision"),
    *(
        _attribute(getattr(torch.backends.cudnn, name), "fp32_precision")
        for name in ("conv", "rnn")
        if hasattr(torch.backends.cudnn, name)
    ),
)


_CHUNK = 250  # samples scored at once; fixed, because a sum's grouping shows in its last digits
_SMALL_CONVOLUTION = 64  # channels; below, torch's own convolution beats oneDNN's on batches this small

_Result = TypeVar("_Result")


class TorchEngine:
    """Trains and scores stacks of one module's models with torch, on the CPU."""

    name = "torch"

    def __init__(self, module: nn.Module, threads: int = 1, device: torch.device | None = None) -> None:
        """device: for `StackedTorchEngine`, which sees to it that torch repeats itself there; none is the CPU."""
        check_layers(module)
        self._brings = device is not None  # samples go there first
        self._device = device or CPU
        self._module = copy.deepcopy(module).to(self._device, torch.float32)
        self._size = parameter_count(module)
        self._threads = threads
        self._random = any(isinstance(layer, nn.modules.dropout._DropoutNd) for layer in module.modules())
        self._plain_convolution = _has_only_small_convolutions(module)
        self._own = threading.local()

    @property
    def size(self) -> int:
        """D, the number of parameters of one model."""
        return self._size

    def train(
        self,
        weights: Floats,
        samples: Samples,
        batches: Indices,
        sgd: Sgd,
        seeds: Seeds | None = None,
        corrections: Floats | None = None,
    ) -> Floats:
        """See `Engine.train`. The state of torch's global generator is put back."""
        if corrections is not None:
            corrections = corrections_for(corrections, weights.shape)
        features, labels, batches = self._tensors(samples, batches)
        result = np.empty_like(weights)

        def train_worker(worker: int) -> None:
            if self._random and seeds is not None:
                seed_generators(int(seeds[worker]) % 2**63, self._device)
            model = self._load(weights[worker])
            model.module.train()
            velocity = torch.zeros_like(model.flat) if sgd.momentum else None
            start = model.flat.clone() if sgd.proximal else None
            correction = None if corrections is None else torch.from_numpy(corrections[worker]).to(self._device)
            for row in batches[worker]:
                chosen = torch.from_numpy(row[row != PADDING])
                if len(chosen) == 0:
                    continue
                model.gradient.zero_()
                cross_entropy(model.module(features[chosen]), labels[chosen]).backward()  # type: ignore[no-untyped-call]
                with torch.no_grad():
                    if start is not None:
                        model.gradient.add_(model.flat - start, alpha=sgd.proximal)
                    if correction is not None:
                        model.gradient.add_(correction)
                    step(model.flat, model.gradient, velocity, sgd)
            check_buffers(model.constants, model.module)  # or the next worker would find what this one left
            result[worker] = model.flat.cpu().numpy()

        with kept_generators(self._device):
            before = generator_states(self._device)
            self._for_each(len(weights), train_worker, serial=self._random)
            if not self._random and not same_states(generator_states(self._device), before):
                self._random = True  # a function draws, which no layer shows: once more, from the seeds
                put_back(before, self._device)
                self._for_each(len(weights), train_worker, serial=True)
        return result

    def losses(self, weights: Floats, samples: Samples, indices: Indices, ceilings: Doubles | None = None) -> Doubles:
        """See `Engine.losses`."""
        features, labels, indices = self._tensors(samples, indices)

        def loss(worker: int) -> float:
            chosen = _chosen(indices, worker)
            ceiling = np.inf if ceilings is None else ceilings[worker]
            total = 0.0
            for logits, truth in self._outputs(weights[worker], features, labels, chosen):
                total += cross_entropy(logits, truth, reduction="none").cpu().sum(dtype=torch.float64).item()
                if total / len(chosen) > ceiling:  # losses are not negative: it can only grow
                    return np.inf
            return total / len(chosen) if len(chosen) else np.nan

        return np.array(self._for_each(len(weights), loss))

    def sample_losses(self, weights: Floats, samples: Samples, indices: Indices) -> Doubles:
        """See `Engine.sample_losses`. Chunks of samples are spread over the threads."""
        model = one_model(weights, self._size)
        features, labels, indices = self._tensors(samples, sample_numbers(indices, len(samples)))
        chosen = torch.from_numpy(indices)

        def losses(chunk: int) -> Doubles:
            part = chosen[chunk * _CHUNK : (chunk + 1) * _CHUNK]
            [(logits, truth)] = self._outputs(model, features, labels, part)
            found: Doubles = cross_entropy(logits, truth, reduction="none").cpu().double().numpy()
            return found

        return np.concatenate([np.empty(0), *self._for_each(-(-len(chosen) // _CHUNK), losses)])

    def accuracies(self, weights: Floats, samples: Samples, indices: Indices) -> Doubles:
        """See `Engine.accuracies`."""
        features, labels, indices = self._tensors(samples, indices)

        def accuracy(worker: int) -> float:
            chosen = _chosen(indices, worker)
            outputs = self._outputs(weights[worker], features, labels, chosen)
            correct = sum(
                int(((logits.argmax(1) == truth) & ~logits.isnan().any(1)).sum()) for logits, truth in outputs
            )
            return correct / len(chosen) if len(chosen) else np.nan

        return np.array(self._for_each(len(weights), accuracy))

    def gradients(self, weights: Floats, samples: Samples, indices: Indices) -> Floats:
        """See `Engine.gradients`."""
        features, labels, indices = self._tensors(samples, indices)
        result = np.empty_like(weights)

        def gradient(worker: int) -> None:
            chosen = _chosen(indices, worker)
            model = self._load(weights[worker])
            model.module.eval()
            model.gradient.zero_()
            for start in range(0, len(chosen), _CHUNK):
                part = chosen[start : start + _CHUNK]
                loss = cross_entropy(model.module(features[part]), labels[part], reduction="sum")
                (loss / len(chosen)).backward()  # type: ignore[no-untyped-call]
            result[worker] = model.gradient.cpu().numpy()

        self._for_each(len(weights), gradient)
        return result

    def _outputs(
        self, weights: Floats, features: Tensor, labels: Tensor, chosen: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits and labels, chunk after chunk."""
        model = self._load(weights)
        model.module.eval()
        with torch.inference_mode():
            for start in range(0, len(chosen), _CHUNK):
                part = chosen[start : start + _CHUNK]
                yield model.module(features[part]), labels[part]

    def _tensors(self, samples: Samples, indices: Indices) -> tuple[Tensor, Tensor, Indices]:
        """Features and labels where the module is, and the indices into them."""
        if self._brings:
            return brought(samples, indices, self._device)
        return torch.from_numpy(samples.features), torch.from_numpy(samples.labels.astype(np.int64)), indices

    def _load(self, weights: Floats) -> _FlatModel:
        """This thread's own copy of the module, with these weights in it."""
        if not hasattr(self._own, "model"):
            self._own.model = _FlatModel(self._module)
        model: _FlatModel = self._own.model
        with torch.no_grad():
            model.flat.copy_(torch.from_numpy(np.ascontiguousarray(weights)))
        return model

    def _for_each(self, count: int, work: Callable[[int], _Result], serial: bool = False) -> list[_Result]:
        """Run the work of every worker, each on one thread; the results in the order of workers."""
        with _one_thread_per_operation(self._plain_convolution):
            if serial or self._threads == 1 or count == 1:
                return [work(worker) for worker in range(count)]
            with ThreadPoolExecutor(self._threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                return list(pool.map(work, range(count)))


class _FlatModel:
    """A module whose parameters and gradients are views of two flat tensors, so that a step is one operation."""

    def __init__(self, module: nn.Module) -> None:
        self.module = copy.deepcopy(module)
        self.constants = buffers_of(module)
        size = parameter_count(module)
        device = next(module.parameters()).device
        self.flat = torch.empty(size, device=device)  # (D,)
        self.gradient = torch.zeros(size, device=device)  # (D,)
        offset = 0
        for parameter in self.module.parameters():
            part = slice(offset, offset + parameter.numel())
            parameter.requires_grad_(True)
            parameter.data = self.flat[part].view(parameter.shape)
            parameter.grad = self.gradient[part].view(parameter.shape)
            offset = part.stop


def step(flat: Tensor, gradient: Tensor, velocity: Tensor | None, sgd: Sgd) -> None:
    """One step of torch.optim.SGD, in place; of one model, (D,), or of several, (U, D)."""
    if sgd.weight_decay:
        gradient.add_(flat, alpha=sgd.weight_decay)
    if velocity is not None:
        gradient = velocity.mul_(sgd.momentum).add_(gradient)
    flat.add_(gradient, alpha=-sgd.learning_rate)


@contextmanager
def _one_thread_per_operation(plain_convolution: bool) -> Iterator[None]:
    """Keep torch from splitting operations over threads: how it splits them shows in the last digits."""
    threads, onednn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = bool(onednn) and not plain_convolution  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.mkldnn.enabled = onednn


def _chosen(indices: Indices, worker: int) -> Tensor:
    row = indices if indices.ndim == 1 else indices[worker]
    return torch.from_numpy(row[row != PADDING])


def _has_only_small_convolutions(module: nn.Module) -> bool:
    layers = [layer for layer in module.modules() if isinstance(layer, nn.modules.conv._ConvNd)]
    return bool(layers) and all(max(layer.in_channels, layer.out_channels) < _SMALL_CONVOLUTION for layer in layers)
