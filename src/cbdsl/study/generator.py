"""A small conditional generator (a variational autoencoder, Kingma and Welling 2014) and the engine that trains it.

The engine answers where a classifier's would, so a generator learns in the same rounds as any model: workers train it
on their own samples and send weights alone. It classifies nothing and keeps no sample.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from cbdsl.arrays import PADDING, Doubles, Floats, Indices, Samples, Seeds
from cbdsl.engines.arguments import one_model
from cbdsl.engines.base import Sgd
from cbdsl.engines.torch_engine import TorchEngine

HIDDEN, LATENT = 128, 10
_AT_ONCE = 500  # samples
_DECAYS, _EPSILON = (0.9, 0.999), 1e-8  # of Adam


class Kind(NamedTuple):
    """What a generator makes: samples of one shape, of so many classes."""

    shape: tuple[int, ...]
    classes: int
    shades: bool  # numbers from 0 to 1, such as those of an image; otherwise any, with deviations near 1

    @property
    def numbers(self) -> int:
        """How many there are in a sample."""
        return math.prod(self.shape)


class Generator(nn.Module):
    """From a class and LATENT random numbers to a sample; and for training, from a sample to such numbers."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.encode = nn.Sequential(
            nn.Linear(kind.numbers + kind.classes, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2 * LATENT)
        )
        self.decode = nn.Sequential(
            nn.Linear((LATENT + 1) * kind.classes, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, kind.numbers)
        )
        self.log_variance = nn.Parameter(torch.zeros(1), requires_grad=True)  # of numbers that are no shades

    def losses(self, features: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """The negative evidence lower bound of every sample, (N,). features: (N, numbers); noise: (N, LATENT)."""
        classes = one_hot(labels, self.kind.classes).float()
        middle, log_variance = self.encode(torch.cat([features, classes], 1)).chunk(2, 1)
        made = self._decoded(middle + noise * (log_variance / 2).exp(), classes)
        divergence = (middle.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
        if self.kind.shades:
            error = binary_cross_entropy_with_logits(made, features, reduction="none")
        else:
            error = ((made - features).square() / self.log_variance.exp() + self.log_variance) / 2
        losses: Tensor = error.sum(1) + divergence
        return losses

    def _decoded(self, latent: Tensor, classes: Tensor) -> Tensor:
        """Each class reads the latent numbers by weights of its own: or few samples leave the class to them, too."""
        own = torch.cat([latent, torch.ones(len(latent), 1)], 1)[:, None] * classes[:, :, None]  # (N, C, LATENT + 1)
        made: Tensor = self.decode(own.flatten(1))
        return made

    def samples(self, labels: Tensor, random: torch.Generator) -> Tensor:
        """One sample of each class given, (N, numbers)."""
        latent = torch.randn(len(labels), LATENT, generator=random)
        made = self._decoded(latent, one_hot(labels, self.kind.classes).float())
        if self.kind.shades:
            return made.sigmoid()
        return made + torch.randn(made.shape, generator=random) * (self.log_variance / 2).exp()


class GeneratorEngine(TorchEngine):
    """Trains and scores stacks of one generator's models; samples are rows of numbers, (N, numbers)."""

    def __init__(self, kind: Kind, threads: int = 1) -> None:
        super().__init__(Generator(kind), threads)

    def train(
        self,
        weights: Floats,
        samples: Samples,
        batches: Indices,
        sgd: Sgd,
        seeds: Seeds | None = None,
        corrections: Floats | None = None,
    ) -> Floats:
        """See `Engine.train`; by Adam, which starts anew on every call, and of `sgd` uses the learning rate alone."""
        assert seeds is not None
        assert corrections is None
        features, labels, batches = self._tensors(samples, batches)
        result, own_seeds = np.empty_like(weights), seeds

        def train_worker(worker: int) -> None:
            random = torch.Generator().manual_seed(int(own_seeds[worker]) % 2**63)
            model = self._load(weights[worker])
            mean, square = torch.zeros_like(model.flat), torch.zeros_like(model.flat)
            steps = 0
            for row in batches[worker]:
                chosen = torch.from_numpy(row[row != PADDING])
                if not len(chosen):
                    continue
                steps += 1
                noise = torch.randn(len(chosen), LATENT, generator=random)
                model.gradient.zero_()
                losses = _generator(model.module).losses(features[chosen], labels[chosen], noise)
                losses.mean().backward()  # type: ignore[no-untyped-call]
                with torch.no_grad():
                    mean.lerp_(model.gradient, 1 - _DECAYS[0])
                    square.mul_(_DECAYS[1]).addcmul_(model.gradient, model.gradient, value=1 - _DECAYS[1])
                    shrunk = (square / (1 - _DECAYS[1] ** steps)).sqrt_().add_(_EPSILON)
                    model.flat.addcdiv_(mean, shrunk, value=-sgd.learning_rate / (1 - _DECAYS[0] ** steps))
            result[worker] = model.flat.numpy()

        self._for_each(len(weights), train_worker)
        return result

    def sample_losses(self, weights: Floats, samples: Samples, indices: Indices) -> Doubles:
        """See `Engine.sample_losses`: the bound at the middle of what a sample is encoded as."""
        features, labels, indices = self._tensors(samples, indices)
        module = _generator(self._load(one_model(weights, self.size)).module)
        chosen = torch.from_numpy(indices)

        def losses(chunk: int) -> Doubles:
            part = chosen[chunk * _AT_ONCE : (chunk + 1) * _AT_ONCE]
            with torch.inference_mode():
                found: Doubles = module.losses(features[part], labels[part], torch.zeros(1, LATENT)).double().numpy()
            return found

        return np.concatenate([np.empty(0), *self._for_each(-(-len(chosen) // _AT_ONCE), losses)])

    def made(self, weights: Floats, count: int, seed: int) -> Samples:
        """Samples that a model makes, of all classes alike and in no order, (count, *shape)."""
        generator = _generator(self._load(one_model(weights, self.size)).module)
        random, kind = torch.Generator().manual_seed(seed), generator.kind
        labels = (torch.arange(count) % kind.classes)[torch.randperm(count, generator=random)]

        def make(_: int) -> Floats:
            with torch.inference_mode():
                found: Floats = generator.samples(labels, random).reshape(count, *kind.shape).numpy()
            return found

        [features] = self._for_each(1, make)
        return Samples(features, labels.numpy().astype(np.int32))


def _generator(module: nn.Module) -> Generator:
    assert isinstance(module, Generator)
    return module
