"""The engine for any `nn.Module`: a loop over workers, spread over threads.

Each worker is computed by itself on one thread, so its numbers do not depend on who else is in the stack;
`torch.func.vmap`'s grouped kernels would tie a worker's rounding to its neighbours. Measured in one run on the paper's
CNN, 50 workers, two cores: vmap trains a tenth faster (76 against 85 ms a step) and scores 1.8 times slower.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cbdsl.arrays import PADDING, Doubles, Floats, Indices, Samples, Seeds
from cbdsl.engines.arguments import corrections_for, one_model, sample_numbers
from cbdsl.engines.base import Sgd
from cbdsl.engines.check import buffers_of, check_buffers, check_layers
from cbdsl.engines.torch_device import (
    CPU,
    brought,
    generator_states,
    kept_generators,
    put_back,
    same_states,
    seed_generators,
)
from cbdsl.models.modules import parameter_count

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
