"""The engine for any `nn.Module` on a GPU: models of many workers stacked, and trained by one vectorised call a step.

A GPU is idle while it works on one small model, so training takes blocks of workers through `torch.func.vmap`. Scores
and gradients are taken one model at a time: so a model's score does not depend on who else is scored, and the server
measures to the bit what a worker claimed.

Promised: the same calls on the same device, driver and build of torch give the same numbers. Not promised: that a
worker's training is the same to the bit whatever block it is in, for kernels over a block add up in an order that may
depend on the block. So the size of a block follows from the model and the batch alone, never from memory that happens
to be free; and a worker's last digits may change with who else takes part in a round. `TorchEngine` has no such ties.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from cbdsl.arrays import PADDING, Doubles, Floats, Indices, Samples, Seeds
from cbdsl.engines.base import Sgd, corrections_for
from cbdsl.engines.torch_engine import (
    TorchEngine,
    brought,
    deterministic,
    generator_states,
    kept_generators,
    same_states,
    step,
)
from cbdsl.models.from_torch import buffers_of, check_buffers

_BLOCK_BYTES = 2**30  # of models that train together, and what belongs to them; their samples come on top, each once
_MODELS = 8  # arrays of D numbers a worker: weights, gradients twice, velocity, start, correction, a step's own
_ACTIVATIONS = 30  # numbers that a network keeps for each of a sample's until it has its gradient; a guess
_CLOSE = 1e-3  # how far gradients of both ways may be apart; rounding alone is a thousand times closer


def workers_together(size: int, batch: int, numbers: int) -> int:
    """How many workers train together: by D, the samples in a batch and the numbers in a sample, and nothing else."""
    return max(1, _BLOCK_BYTES // (4 * (_MODELS * size + _ACTIVATIONS * batch * numbers)))


class StackedTorchEngine:
    """Trains stacks of one module's models by blocks on a torch device, and scores them one by one there."""

    def __init__(self, module: nn.Module, device: torch.device, block: int | None = None) -> None:
        """block: how many workers train together; reckoned if not given."""
        self._alone = TorchEngine(module, device=device)  # refuses what no engine can train
        self._module = copy.deepcopy(module).to(device, torch.float32).train().requires_grad_(False)
        self._constants = buffers_of(self._module)
        self._names = [name for name, _ in module.named_parameters()]
        self._shapes = [parameter.shape for parameter in module.parameters()]
        self._device, self._block = device, block
        self._stacks: bool | None = None  # not tried yet

    @property
    def name(self) -> str:
        """How reports call this engine: another device gives other last digits."""
        return f"torch-{self._device.type}"

    @property
    def size(self) -> int:
        """D, the number of parameters of one model."""
        return self._alone.size

    @property
    def stacks(self) -> bool | None:
        """Whether the module can be trained stacked; none while it is not known."""
        return self._stacks

    def train(
        self,
        weights: Floats,
        samples: Samples,
        batches: Indices,
        sgd: Sgd,
        seeds: Seeds | None = None,
        corrections: Floats | None = None,
    ) -> Floats:
        """See `Engine.train`. The states of torch's generators are put back."""
        if corrections is not None:
            corrections = corrections_for(corrections, weights.shape)
        block = self._block or workers_together(self.size, batches.shape[2], math.prod(samples.features.shape[1:]))
        result = np.empty_like(weights)
        with self._at_work():
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

    def gradients(self, weights: Floats, samples: Samples, indices: Indices) -> Floats:
        """See `Engine.gradients`."""
        with self._at_work():
            return self._alone.gradients(weights, samples, indices)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        with deterministic(self._device), kept_generators(self._device):
            yield

    def _train_block(
        self, weights: Floats, samples: Samples, batches: Indices, sgd: Sgd, corrections: Floats | None
    ) -> Floats | None:
        """Train the models of one block together; none if it cannot be done with them.

        That depends on the block alone, and nothing is remembered: a run that is resumed finds the same.
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
        return trained if same_states(generator_states(self._device), before) else None

    def _stacked_steps(
        self, weights: Floats, samples: Samples, batches: Indices, sgd: Sgd, corrections: Floats | None
    ) -> Floats:
        features, labels, batches = brought(samples, batches, self._device)
        flat = torch.from_numpy(np.array(weights, np.float32)).to(self._device)  # (U, D)
        velocity = torch.zeros_like(flat) if sgd.momentum else None
        start = flat.clone() if sgd.proximal else None
        more = None if corrections is None else torch.from_numpy(corrections).to(self._device)
        for number in range(batches.shape[1]):
            batch = _Batch.of(batches[:, number], self._device)
            if batch is None:
                continue
            gradient = self._gradients(flat, features[batch.places], labels[batch.places], batch)
            if start is not None:
                gradient.add_(flat - start, alpha=sgd.proximal)
            if more is not None:
                gradient.add_(more)
            resting = [(array, array[batch.idle]) for array in (flat, velocity) if array is not None and batch.rests]
            step(flat, gradient, velocity, sgd)
            for array, rows in resting:  # no samples, no step
                array[batch.idle] = rows
        return flat.cpu().numpy()

    def _gradients(self, flat: Tensor, features: Tensor, labels: Tensor, batch: _Batch) -> Tensor:
        """Gradients of the mean loss of every model on its own batch, (U, D)."""
        parts = torch.split(flat, [shape.numel() for shape in self._shapes], dim=1)
        stacked = {
            name: part.reshape(len(flat), *shape)  # (U, ...)
            for name, part, shape in zip(self._names, parts, self._shapes, strict=True)
        }
        found = vmap(grad(self._loss))(stacked, features, labels, batch.real, batch.counts)
        return torch.cat([found[name].reshape(len(flat), -1) for name in self._names], dim=1)

    def _loss(
        self, parameters: dict[str, Tensor], features: Tensor, labels: Tensor, real: Tensor, count: Tensor
    ) -> Tensor:
        """Mean loss of one model on the real places of its batch, (B,) of them with padding."""
        logits: Tensor = functional_call(self._module, parameters, (features,))
        return (cross_entropy(logits, labels, reduction="none") * real).sum() / count

    def _can_stack(self, samples: Samples) -> bool | None:
        """Whether the module can be trained stacked: two models are, with padding, and one by one, and must agree.

        They do not if the module draws random numbers, decides by values, works in ways that vmap does not know, or
        if samples of a batch depend on each other, as they do where a layer takes the mean of a batch. That is not
        for the samples to decide: none if they do not tell.
        """
        some = samples.features[:1000].reshape(min(len(samples), 1000), -1)
        usable = np.flatnonzero(np.isfinite(some).all(1))
        others = usable[(some[usable] != some[usable[:1]]).any(1)]
        if len(others) == 0:  # from equal samples nobody can tell whether they depend on each other
            return None
        weights = np.stack([_drawn(self._shapes, seed) for seed in (0, 1)])
        batches = np.array([[[usable[0], others[0], others[-1]]], [[others[0], usable[0], PADDING]]], np.int32)
        together = self._train_block(weights, samples, batches, Sgd(1.0), None)
        if together is None:
            return False
        alone = self._alone.train(weights, samples, batches, Sgd(1.0))
        apart = np.linalg.norm(together - alone, axis=1)
        return bool((apart <= _CLOSE * np.linalg.norm(alone - weights, axis=1)).all())


class _Batch(NamedTuple):
    """One batch of every model of a block. A place without a sample repeats the first of its row, and does not count.

    So what a padded place does to the numbers (zero times NaN is NaN), its sample does to them anyway.
    """

    places: Tensor  # (U, B)
    real: Tensor  # (U, B), 1 or 0
    counts: Tensor  # (U,), at least 1
    idle: Tensor  # rows without any sample

    @property
    def rests(self) -> bool:
        """Whether there is such a row."""
        return len(self.idle) > 0

    @staticmethod
    def of(rows: Indices, device: torch.device) -> _Batch | None:
        """The batch of these rows of places, (U, B); none if all of them are empty."""
        real = rows != PADDING
        counts = real.sum(1)
        if not counts.any():
            return None
        places = np.where(real, rows, np.maximum(rows[:, :1], 0)).astype(np.int64)
        arrays = places, real.astype(np.float32), np.maximum(counts, 1).astype(np.float32), np.flatnonzero(counts == 0)
        return _Batch(*(torch.from_numpy(array).to(device) for array in arrays))


def _drawn(shapes: list[torch.Size], seed: int) -> Floats:
    """Weights of a usual size to try a module with, (D,); the same in every run, so that all runs find the same."""
    generator = np.random.default_rng(seed)
    parts = [
        generator.normal(0.0, (shape[0] / shape.numel()) ** 0.5, shape.numel())  # one over the inputs of a unit
        if len(shape) > 1
        else generator.normal(0.5, 0.1, shape.numel())
        for shape in shapes
    ]
    return np.concatenate(parts).astype(np.float32)
