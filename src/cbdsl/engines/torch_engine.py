"""The engines for any `nn.Module`: a loop over workers on the CPU, stacked models on a GPU.

On the CPU each worker is computed by itself on one thread, so its numbers do not depend on the other workers in the
stack; `torch.func.vmap`'s grouped kernels would tie a worker's rounding to its neighbours. Measured on the paper's CNN,
50 workers, two cores: vmap trains a tenth faster (76 against 85 ms per step) and scores 1.8 times slower.
"""

from __future__ import annotations

import copy
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from cbdsl.arrays import PADDING, Doubles, Floats, Indices, Samples, Seeds
from cbdsl.engines.augmentations import Augmentation
from cbdsl.engines.engine import (
    BETAS,
    CLIP_EPSILON,
    EPSILON,
    ExtraLoss,
    ModelOutputs,
    Sgd,
    TrainingBatch,
    check_classifies,
    check_corrections,
    check_one_model,
    check_sample_indices,
)
from cbdsl.engines.loss import CROSS_ENTROPY, Loss, targets_of
from cbdsl.engines.torch_loss import mean_loss, sample_losses
from cbdsl.errors import UserError
from cbdsl.models.batch_statistics import calibrate, hold_statistics, statistics_layers
from cbdsl.models.check_module import buffers_of, check_buffers, check_layers
from cbdsl.models.to_torch import trained_parameters

CPU = torch.device("cpu")
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # without it cuBLAS may add up in another order every time
_CHUNK = 250  # samples scored at once; fixed, because a sum's grouping shows in its last digits
_SMALL_CONVOLUTION = 64  # channels; below, torch's own convolution beats oneDNN's on batches this small
_BLOCK_BYTES = 2**30  # of models that train together, and what belongs to them; their samples come on top, each once
_MODELS = 8  # arrays of D numbers a worker: weights, gradients twice, velocity, start, correction, a step's own
_ACTIVATIONS = 30  # numbers that a network keeps for each of a sample's until it has its gradient; a guess
_CLOSE = 1e-3  # how far gradients of both ways may be apart; rounding alone is a thousand times closer
_Result = TypeVar("_Result")


class TorchEngine:
    """Trains and scores stacks of one module's models with torch, on the CPU."""

    name = "torch"

    def __init__(
        self,
        module: nn.Module,
        threads: int = 1,
        device: torch.device | None = None,
        loss: Loss = CROSS_ENTROPY,
        calibration: Floats | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        """device: for `StackedTorchEngine`, which makes torch deterministic there; None is the CPU.

        calibration: features (N, ...) whose statistics BatchNorm layers score with; without them they only train.
        augmentation: applied to the features of a batch in training, on the same generators as dropout.
        """
        check_layers(module, statistics=True)
        self._brings = device is not None  # samples go there first
        self._device, self.loss = device or CPU, loss
        self._module = copy.deepcopy(module).to(self._device, torch.float32)
        self._size = sum(each.numel() for each in trained_parameters(module).values())
        self._threads = threads
        self._augmentation = augmentation
        dropout = any(isinstance(layer, nn.modules.dropout._DropoutNd) for layer in module.modules())
        self._random = dropout or augmentation is not None
        self._plain_convolution = _has_only_small_convolutions(module)
        self._least = 2 if statistics_layers(self._module) else 1  # samples of a batch; one alone has no statistics
        self._calibration = None if calibration is None else torch.from_numpy(calibration).to(self._device)
        self._own = threading.local()

    @property
    def size(self) -> int:
        """D, the number of parameters of one model that train."""
        return self._size

    def train(
        self,
        weights: Floats,
        samples: Samples,
        batches: Indices,
        sgd: Sgd,
        seeds: Seeds | None = None,
        corrections: Floats | None = None,
        extra: ExtraLoss | None = None,
    ) -> Floats:
        """See `Engine.train`. The state of torch's global generator is restored."""
        if corrections is not None:
            corrections = check_corrections(corrections, weights.shape)
        features, labels, batches = self._tensors(samples, batches)
        result, rates = np.empty_like(weights), sgd.rates(batches)

        def train_worker(worker: int) -> None:
            if self._random and seeds is not None:
                seed_generators(int(seeds[worker]) % 2**63, self._device)
            model = self._load(weights[worker])
            model.module.train()
            memory = OptimiserMemory(model.flat, sgd)
            start = model.flat.clone() if sgd.proximal else None
            correction = None if corrections is None else torch.from_numpy(corrections[worker]).to(self._device)
            for number, row in enumerate(batches[worker]):
                chosen = torch.from_numpy(row[row != PADDING])
                if len(chosen) < self._least:
                    continue
                model.gradient.zero_()
                batch = features[chosen] if self._augmentation is None else self._augmentation(features[chosen])
                if extra is None:
                    total = mean_loss(self.loss, model.module(batch), labels[chosen])
                else:
                    total = self._loss_with_term(model.module, batch, labels[chosen], worker, extra)
                total.backward()  # type: ignore[no-untyped-call]
                with torch.no_grad():
                    clip_gradient(model.gradient, sgd.clip)
                    if start is not None:
                        model.gradient.add_(model.flat - start, alpha=sgd.proximal)
                    if correction is not None:
                        model.gradient.add_(correction)
                    rate = sgd.learning_rate if rates is None else float(rates[worker, number])
                    memory.step(model.flat, model.gradient, rate)
            check_buffers(model.constants, model.module)  # or the next worker would find what this one left
            result[worker] = model.flat.cpu().numpy()

        with keep_generators(self._device):
            before = generator_states(self._device)
            self._for_each(len(weights), train_worker, serial=self._random)
            if not self._random and not are_equal(generator_states(self._device), before):
                self._random = True  # a function draws, which no layer shows: once more, from the seeds
                set_generator_states(before, self._device)
                self._for_each(len(weights), train_worker, serial=True)
        return result

    def _loss_with_term(
        self, module: nn.Module, batch: Tensor, labels: Tensor, worker: int, extra: ExtraLoss
    ) -> Tensor:
        """Return the mean loss of a batch plus the method's own term."""
        others = {}
        for name, rows in extra.models.items():
            other = self._load(rows[worker], "other")
            other.module.train(bool(other.statistics))
            with torch.no_grad():
                others[name] = forward_with_hidden(other.module, batch)
        own = forward_with_hidden(module, batch)
        term: Tensor = extra.term(TrainingBatch(own.outputs, own.hidden, batch, labels, others))
        return mean_loss(self.loss, own.outputs, labels) + term

    def losses(self, weights: Floats, samples: Samples, indices: Indices, ceilings: Doubles | None = None) -> Doubles:
        """See `Engine.losses`."""
        features, labels, indices = self._tensors(samples, indices)

        def loss(worker: int) -> float:
            chosen = _chosen(indices, worker)
            ceiling = np.inf if ceilings is None else ceilings[worker]
            total = 0.0
            for logits, truth in self._outputs(weights[worker], features, labels, chosen):
                total += sample_losses(self.loss, logits, truth).cpu().sum(dtype=torch.float64).item()
                if total / len(chosen) > ceiling:  # losses are not negative: it can only grow
                    return np.inf
            return total / len(chosen) if len(chosen) else np.nan

        return np.array(self._for_each(len(weights), loss))

    def sample_losses(self, weights: Floats, samples: Samples, indices: Indices) -> Doubles:
        """See `Engine.sample_losses`. Chunks of samples are spread over the threads."""
        model = check_one_model(weights, self._size)
        features, labels, indices = self._tensors(samples, check_sample_indices(indices, len(samples)))
        chosen = torch.from_numpy(indices)

        def losses(chunk: int) -> Doubles:
            part = chosen[chunk * _CHUNK : (chunk + 1) * _CHUNK]
            [(logits, truth)] = self._outputs(model, features, labels, part)
            found: Doubles = sample_losses(self.loss, logits, truth).cpu().double().numpy()
            return found

        return np.concatenate([np.empty(0), *self._for_each(-(-len(chosen) // _CHUNK), losses)])

    def accuracies(self, weights: Floats, samples: Samples, indices: Indices) -> Doubles:
        """See `Engine.accuracies`."""
        check_classifies(self.loss)
        features, labels, indices = self._tensors(samples, indices)

        def accuracy(worker: int) -> float:
            chosen = _chosen(indices, worker)
            outputs = self._outputs(weights[worker], features, labels, chosen)
            correct = sum(
                int(((logits.argmax(1) == truth) & ~logits.isnan().any(1)).sum()) for logits, truth in outputs
            )
            return correct / len(chosen) if len(chosen) else np.nan

        return np.array(self._for_each(len(weights), accuracy))

    def outputs(self, weights: Floats, samples: Samples, indices: Indices) -> Floats:
        """See `Engine.outputs`."""
        model = check_one_model(weights, self._size)
        features = torch.from_numpy(samples.features[check_sample_indices(indices, len(samples))]).to(self._device)
        with _one_thread_per_operation(self._plain_convolution):
            chunks = self._outputs(model, features, features, torch.arange(len(features)))
            found = [made.cpu().numpy() for made, _ in chunks]
        return np.concatenate(found) if found else np.empty((0, 1), np.float32)

    def gradients(self, weights: Floats, samples: Samples, indices: Indices) -> Floats:
        """See `Engine.gradients`."""
        features, labels, indices = self._tensors(samples, indices)
        result = np.empty_like(weights)

        def gradient(worker: int) -> None:
            chosen = _chosen(indices, worker)
            model = self._load_scoring(weights[worker])
            model.gradient.zero_()
            for start in range(0, len(chosen), _CHUNK):
                part = chosen[start : start + _CHUNK]
                loss = sample_losses(self.loss, model.module(features[part]), labels[part]).sum()
                (loss / len(chosen)).backward()  # type: ignore[no-untyped-call]
            result[worker] = model.gradient.cpu().numpy()

        self._for_each(len(weights), gradient)
        return result

    def with_statistics_of(self, features: Floats) -> TorchEngine:
        """Return this engine, but with BatchNorm layers that score with the statistics of other features (N, ...)."""
        made = copy.copy(self)
        made._calibration = torch.from_numpy(np.ascontiguousarray(features)).to(self._device)
        return made

    def _outputs(
        self, weights: Floats, features: Tensor, labels: Tensor, chosen: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield logits and labels in chunks."""
        model = self._load_scoring(weights)
        with torch.inference_mode():
            for start in range(0, len(chosen), _CHUNK):
                part = chosen[start : start + _CHUNK]
                yield model.module(features[part]), labels[part]

    def _tensors(self, samples: Samples, indices: Indices) -> tuple[Tensor, Tensor, Indices]:
        """Return features and labels on the module's device, and the indices into them."""
        if self._brings:
            return bring_samples(samples, indices, self._device, self.loss)
        return torch.from_numpy(samples.features), _targets(samples, self.loss), indices

    def _load(self, weights: Floats, place: str = "model") -> _FlatModel:
        """Return this thread's copy of the module with these weights. place: which of its copies."""
        if not hasattr(self._own, place):
            setattr(self._own, place, _FlatModel(self._module))
        model: _FlatModel = getattr(self._own, place)
        with torch.no_grad():
            model.flat.copy_(torch.from_numpy(np.ascontiguousarray(weights)))
        return model

    def _load_scoring(self, weights: Floats) -> _FlatModel:
        """Return this thread's copy of the module with these weights, in evaluation mode."""
        model = self._load(weights)
        model.module.eval()
        if model.statistics:
            if self._calibration is None:
                raise ValueError("a module with BatchNorm is scored; give the engine samples for its statistics")
            calibrate(model.module, model.statistics, self._calibration)
            model.constants = buffers_of(model.module)
        return model

    def _for_each(self, count: int, work: Callable[[int], _Result], serial: bool = False) -> list[_Result]:
        """Run the work of every worker, each on one thread; return results in the order of workers."""
        with _one_thread_per_operation(self._plain_convolution):
            if serial or self._threads == 1 or count == 1:
                return [work(worker) for worker in range(count)]
            with ThreadPoolExecutor(self._threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                return list(pool.map(work, range(count)))


def forward_with_hidden(module: nn.Module, batch: Tensor) -> ModelOutputs:
    """Return a module's outputs and the input of its last linear layer; the outputs twice if it has none."""
    read: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
        for layer in module.modules()
        if isinstance(layer, nn.Linear)
    ]
    try:
        outputs = module(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return ModelOutputs(outputs, read[-1] if read else outputs)


class _FlatModel:
    """A module whose trained weights and gradients are views of two flat tensors, so that a step is one operation."""

    def __init__(self, module: nn.Module) -> None:
        self.module = copy.deepcopy(module)
        self.statistics = hold_statistics(self.module)
        self.constants = buffers_of(module)
        trained = trained_parameters(self.module).values()
        size, device = sum(each.numel() for each in trained), next(module.parameters()).device
        self.flat = torch.empty(size, device=device)  # (D,)
        self.gradient = torch.zeros(size, device=device)  # (D,)
        offset = 0
        for parameter in trained:
            part = slice(offset, offset + parameter.numel())
            parameter.data = self.flat[part].view(parameter.shape)
            parameter.grad = self.gradient[part].view(parameter.shape)
            offset = part.stop


class OptimiserMemory:
    """What an optimiser keeps between the steps of one model (D,) or several (U, D); `Sgd` has the formulas."""

    def __init__(self, flat: Tensor, sgd: Sgd) -> None:
        adam = sgd.optimiser != "sgd"
        self._sgd = sgd
        self.first = torch.zeros_like(flat) if adam or sgd.momentum else None  # v or m
        self.second = torch.zeros_like(flat) if adam else None  # s
        self._taken = np.zeros(flat.shape[:-1], np.int64)  # t

    def step(self, flat: Tensor, gradient: Tensor, rate: float | Floats, idle: Tensor | None = None) -> None:
        """Take a step in place. rate: one number, or one each, (U,). idle: rows that take no step."""
        kept = [
            (array, array[idle]) for array in (flat, self.first, self.second) if array is not None and idle is not None
        ]
        self._taken += 1
        if idle is not None:
            self._taken[idle.cpu().numpy()] -= 1
        self._move(flat, gradient, rate)
        for array, rows in kept:
            array[idle] = rows

    def _move(self, flat: Tensor, gradient: Tensor, rate: float | Floats) -> None:
        sgd = self._sgd
        if sgd.weight_decay and sgd.optimiser == "adamw":
            _subtract(flat, flat, rate * np.float64(sgd.weight_decay))
        elif sgd.weight_decay:
            gradient.add_(flat, alpha=sgd.weight_decay)
        if self.second is None or self.first is None:
            _subtract(flat, gradient if self.first is None else self.first.mul_(sgd.momentum).add_(gradient), rate)
            return
        self.first.mul_(BETAS[0]).add_(gradient, alpha=1 - BETAS[0])
        self.second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        taken = np.maximum(self._taken, 1)
        deviation = _scaled(self.second.sqrt(), 1 / np.sqrt(1 - BETAS[1] ** taken)).add_(EPSILON)
        _subtract(flat, self.first / deviation, rate / (1 - BETAS[0] ** taken))


def _subtract(flat: Tensor, change: Tensor, factor: float | Doubles | Floats) -> None:
    """Subtract factor * change in place; factor: one number, or one per row, (U,)."""
    if np.ndim(factor) == 0:
        flat.add_(change, alpha=-float(factor))
    else:
        flat.sub_(_scaled(change, factor))


def _scaled(values: Tensor, factor: float | Doubles | Floats) -> Tensor:
    """Return values times one number, or times one per row, (U,)."""
    if np.ndim(factor) == 0:
        return values * float(factor)
    return values * torch.from_numpy(np.asarray(factor, np.float32)).to(values.device)[:, None]


def clip_gradient(gradient: Tensor, clip: float) -> None:
    """Shorten gradients to a norm in place, for one model (D,) or several (U, D); 0: any norm."""
    if clip:
        norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
        gradient.mul_((clip / (norm + CLIP_EPSILON)).clamp_(max=1.0))


@contextmanager
def _one_thread_per_operation(plain_convolution: bool) -> Iterator[None]:
    """Keep torch from splitting operations over threads, which would change the last digits."""
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


class StackedTorchEngine:
    """Trains and scores stacks of one module's models on a GPU.

    A GPU is idle while it works on one small model, so training takes blocks of workers through `torch.func.vmap`.
    Scores and gradients are computed one model at a time, so a score does not depend on the other models, and the
    server measures exactly what a worker claimed.

    The same calls on the same device, driver and build of torch give the same numbers. A worker's training may differ
    in its last digits with the block that it is in, because kernels over a block may add up in another order. So the
    size of a block follows from the model and the batch alone, never from free memory. `TorchEngine` has no such
    dependence.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        block: int | None = None,
        loss: Loss = CROSS_ENTROPY,
        calibration: Floats | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        """block: how many workers train together; estimated if not given. The others: see `TorchEngine`."""
        self._alone = TorchEngine(
            module, device=device, loss=loss, calibration=calibration, augmentation=augmentation
        )  # fmt: skip
        self.loss = loss
        self._module = copy.deepcopy(module).to(device, torch.float32).train().requires_grad_(False)
        hold_statistics(self._module)
        self._constants = buffers_of(self._module)
        self._shapes = {name: parameter.shape for name, parameter in trained_parameters(module).items()}
        self._device, self._block = device, block
        self._stacks = None if augmentation is None else False  # None: not tried yet

    @property
    def name(self) -> str:
        """The name in reports. Another device gives other last digits."""
        return f"torch-{self._device.type}"

    @property
    def size(self) -> int:
        """D, the number of parameters of one model."""
        return self._alone.size

    @property
    def stacks(self) -> bool | None:
        """Whether the module can be trained stacked; None while it is not known."""
        return self._stacks

    def train(
        self,
        weights: Floats,
        samples: Samples,
        batches: Indices,
        sgd: Sgd,
        seeds: Seeds | None = None,
        corrections: Floats | None = None,
        extra: ExtraLoss | None = None,
    ) -> Floats:
        """See `Engine.train`. The states of torch's generators are restored."""
        if corrections is not None:
            corrections = check_corrections(corrections, weights.shape)
        block = self._block or workers_together(self.size, batches.shape[2], math.prod(samples.features.shape[1:]))
        result = np.empty_like(weights)
        with self._at_work():
            if extra is not None:
                return self._alone.train(weights, samples, batches, sgd, seeds, corrections, extra)
            if self._stacks is None and (batches != PADDING).any():
                self._stacks = self._can_stack(samples)
            for first in range(0, len(weights), block):
                rows = slice(first, first + block)
                own = None if corrections is None else corrections[rows]
                trained = self._train_block(weights[rows], samples, batches[rows], sgd, own) if self._stacks else None
                if trained is None:  # one after the other, each from its own seed
                    drawn = None if seeds is None else seeds[rows]
                    trained = self._alone.train(weights[rows], samples, batches[rows], sgd, drawn, own)
                result[rows] = trained
        return result

    def losses(self, weights: Floats, samples: Samples, indices: Indices, ceilings: Doubles | None = None) -> Doubles:
        """See `Engine.losses`."""
        with self._at_work():
            return self._alone.losses(weights, samples, indices, ceilings)

    def sample_losses(self, weights: Floats, samples: Samples, indices: Indices) -> Doubles:
        """See `Engine.sample_losses`."""
        with self._at_work():
            return self._alone.sample_losses(weights, samples, indices)

    def accuracies(self, weights: Floats, samples: Samples, indices: Indices) -> Doubles:
        """See `Engine.accuracies`."""
        with self._at_work():
            return self._alone.accuracies(weights, samples, indices)

    def outputs(self, weights: Floats, samples: Samples, indices: Indices) -> Floats:
        """See `Engine.outputs`."""
        with self._at_work():
            return self._alone.outputs(weights, samples, indices)

    def gradients(self, weights: Floats, samples: Samples, indices: Indices) -> Floats:
        """See `Engine.gradients`."""
        with self._at_work():
            return self._alone.gradients(weights, samples, indices)

    def with_statistics_of(self, features: Floats) -> StackedTorchEngine:
        """See `TorchEngine.with_statistics_of`."""
        made = copy.copy(self)
        made._alone = self._alone.with_statistics_of(features)
        return made

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        with deterministic(self._device), keep_generators(self._device):
            yield

    def _train_block(
        self, weights: Floats, samples: Samples, batches: Indices, sgd: Sgd, corrections: Floats | None
    ) -> Floats | None:
        """Train the models of one block together; return None if that is not possible.

        It depends on the block alone and nothing is stored, so a resumed run decides the same.
        """
        before = generator_states(self._device)
        try:
            trained = self._stacked_steps(weights, samples, batches, sgd, corrections)
        except MemoryError:
            raise
        except Exception as error:  # whatever a module does that vmap does not know; alone it works, or says why not
            if "out of memory" in str(error).lower():
                raise
            return None
        check_buffers(self._constants, self._module)
        return trained if are_equal(generator_states(self._device), before) else None

    def _stacked_steps(
        self, weights: Floats, samples: Samples, batches: Indices, sgd: Sgd, corrections: Floats | None
    ) -> Floats:
        features, labels, batches = bring_samples(samples, batches, self._device, self.loss)
        flat = torch.from_numpy(np.array(weights, np.float32)).to(self._device)  # (U, D)
        memory, rates = OptimiserMemory(flat, sgd), sgd.rates(batches)
        start = flat.clone() if sgd.proximal else None
        more = None if corrections is None else torch.from_numpy(corrections).to(self._device)
        for number in range(batches.shape[1]):
            batch = _Batch.of(batches[:, number], self._device)
            if batch is None:
                continue
            gradient = self._gradients(flat, features[batch.places], labels[batch.places], batch)
            clip_gradient(gradient, sgd.clip)
            if start is not None:
                gradient.add_(flat - start, alpha=sgd.proximal)
            if more is not None:
                gradient.add_(more)
            rate = sgd.learning_rate if rates is None else rates[:, number]
            memory.step(flat, gradient, rate, batch.idle if batch.rests else None)  # no samples, no step
        return flat.cpu().numpy()

    def _gradients(self, flat: Tensor, features: Tensor, labels: Tensor, batch: _Batch) -> Tensor:
        """Return the gradients of the mean loss of every model on its own batch, (U, D)."""
        parts = torch.split(flat, [shape.numel() for shape in self._shapes.values()], dim=1)
        stacked = {
            name: part.reshape(len(flat), *shape)  # (U, ...)
            for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)
        }
        found = vmap(grad(self._loss))(stacked, features, labels, batch.real, batch.counts)
        return torch.cat([found[name].reshape(len(flat), -1) for name in self._shapes], dim=1)

    def _loss(
        self, parameters: dict[str, Tensor], features: Tensor, labels: Tensor, real: Tensor, count: Tensor
    ) -> Tensor:
        """Return the mean loss of one model on its batch (B,) without the padding."""
        logits: Tensor = functional_call(self._module, parameters, (features,))
        return (sample_losses(self.loss, logits, labels) * real).sum() / count

    def _can_stack(self, samples: Samples) -> bool | None:
        """Return whether stacked training works: two models are trained stacked, with padding, and one by one.

        Results differ if the module draws random numbers, decides by values, does what vmap does not support, or mixes
        the samples of a batch. Return None if the samples do not tell.
        """
        some = samples.features[:1000].reshape(min(len(samples), 1000), -1)
        usable = np.flatnonzero(np.isfinite(some).all(1))
        others = usable[(some[usable] != some[usable[:1]]).any(1)]
        if len(others) == 0:  # from equal samples nobody can tell whether they depend on each other
            return None
        weights = np.stack([_drawn([*self._shapes.values()], seed) for seed in (0, 1)])
        batches = np.array([[[usable[0], others[0], others[-1]]], [[others[0], usable[0], PADDING]]], np.int32)
        together = self._train_block(weights, samples, batches, Sgd(1.0), None)
        if together is None:
            return False
        alone = self._alone.train(weights, samples, batches, Sgd(1.0))
        apart = np.linalg.norm(together - alone, axis=1)
        return bool((apart <= _CLOSE * np.linalg.norm(alone - weights, axis=1)).all())


class _Batch(NamedTuple):
    """One batch of every model of a block. Padding repeats the first sample of its row with weight 0.

    So if padding makes a NaN (zero times NaN), that sample would have made it anyway.
    """

    places: Tensor  # (U, B)
    real: Tensor  # (U, B), 1 or 0
    counts: Tensor  # (U,), at least 1
    idle: Tensor  # rows without any sample

    @property
    def rests(self) -> bool:
        """Whether there are rows without samples."""
        return len(self.idle) > 0

    @staticmethod
    def of(rows: Indices, device: torch.device) -> _Batch | None:
        """Build a batch from rows of indices (U, B); return None if all are empty."""
        real = rows != PADDING
        counts = real.sum(1)
        if not counts.any():
            return None
        places = np.where(real, rows, np.maximum(rows[:, :1], 0)).astype(np.int64)
        arrays = places, real.astype(np.float32), np.maximum(counts, 1).astype(np.float32), np.flatnonzero(counts == 0)
        return _Batch(*(torch.from_numpy(array).to(device) for array in arrays))


def workers_together(size: int, batch: int, numbers: int) -> int:
    """Return how many workers train together, from D, the samples per batch and the numbers per sample alone."""
    return max(1, _BLOCK_BYTES // (4 * (_MODELS * size + _ACTIVATIONS * batch * numbers)))


def _drawn(shapes: list[torch.Size], seed: int) -> Floats:
    """Draw weights of a usual size to try a module with, (D,); the same in every run."""
    generator = np.random.default_rng(seed)
    parts = [
        generator.normal(0.0, (shape[0] / shape.numel()) ** 0.5, shape.numel())  # one over the inputs of a unit
        if len(shape) > 1
        else generator.normal(0.5, 0.1, shape.numel())
        for shape in shapes
    ]
    return np.concatenate(parts).astype(np.float32)


def accelerators() -> list[str]:
    """Return the kinds of GPU that torch can use here, the best first."""
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return [name for name, there in found.items() if there]


def select_device(name: str) -> torch.device:
    """Return the device that a user asked for; "auto" is a GPU where there is one."""
    there = accelerators()
    if name == "auto":
        return torch.device(there[0]) if there else CPU
    if name != "cpu" and name not in there:
        raise UserError(
            f"The device {name} was asked for, but torch {torch.__version__} sees none here; it sees: "
            f"{', '.join(['cpu', *there])}. Use --device auto or --device cpu, or install torch for that GPU.",
            code="not-supported",
        )
    return torch.device(name)


def _targets(samples: Samples, loss: Loss) -> Tensor:
    """Return the labels (N,), or targets (N, C)."""
    if loss.reads_labels:
        return torch.from_numpy(samples.labels.astype(np.int64))
    return torch.from_numpy(targets_of(samples, loss))


def bring_samples(
    samples: Samples, indices: Indices, device: torch.device, loss: Loss = CROSS_ENTROPY
) -> tuple[Tensor, Tensor, Indices]:
    """Copy the indexed samples to a device; return features, labels or targets, and the indices into them.

    Every call copies anew: a cache might be out of date, and fill the device.
    """
    used, places = np.unique(indices, return_inverse=True)
    places = places.reshape(indices.shape)
    if len(used) and used[0] == PADDING:
        used, places = used[1:], places - 1  # padding comes first, and stays -1
    brought = samples.taken(used)
    features = torch.from_numpy(np.asarray(brought.features, np.float32)).to(device)
    return features, _targets(brought, loss).to(device), places.astype(np.int32)


def generator_states(device: torch.device) -> list[Tensor]:
    """Return the states of the generators of the CPU and of this device."""
    own = [] if device.type == "cpu" else [_backend(device).get_rng_state()]
    return [torch.get_rng_state(), *own]


def set_generator_states(states: list[Tensor], device: torch.device) -> None:
    """Set the generators to states that `generator_states` returned."""
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        _backend(device).set_rng_state(states[1])


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of this device."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        _backend(device).manual_seed(seed)


def are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Return whether nothing was drawn between two calls of `generator_states`."""
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


_GENERATORS = threading.RLock()


@contextmanager
def keep_generators(device: torch.device) -> Iterator[None]:
    """Restore the states of the generators at the end. They are the process's: engines in other threads wait."""
    with _GENERATORS:
        states = generator_states(device)
        try:
            yield
        finally:
            set_generator_states(states, device)


def _backend(device: torch.device) -> Any:  # noqa: ANN401 - torch.cuda or torch.mps, which share these functions
    return getattr(torch, device.type)


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Make torch deterministic on a device, in full float32 precision; restore all settings at the end.

    An operation without a deterministic form on the device is a UserError.
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
            "Use --device cpu, a smaller model, or a lower local.batch_size.",
            code="too-large",
        )
    if "deterministic" in text and device.type != "cpu":
        return UserError(
            f"The model has an operation that does not repeat its numbers on {device.type} "
            f"({text.splitlines()[0]}). Use --device cpu, or another layer.",
            code="not-supported",
        )
    return None


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:  # noqa: ANN401
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _readable(read: Callable[[], Any]) -> bool:
    """Return whether torch has a setting and can read it, which fails if its old and new names were mixed."""
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
