"""The networks that come with the package, and the way between a module and its flat weights.

Never trains anything: that is an engine's work.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from cbdsl.arrays import Floats
from cbdsl.errors import UserError

Shape = tuple[int, ...]


def cnn(shape: Shape, classes: int) -> nn.Module:
    """Table I of the paper: two convolutions, three dense layers; 44,426 parameters on MNIST."""
    if len(shape) != 3 or min(shape[1:]) < 16:
        raise UserError(
            f"The model 'cnn' needs images of shape (channels, height, width) with at least 16 x 16 pixels; "
            f"the data has shape {shape}. Choose --model mlp or --model softmax, or give a module of your own."
        )
    channels, height, width = shape
    pooled = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2, 2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2, 2),
        nn.Flatten(),
        nn.Linear(16 * pooled[0] * pooled[1], 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


def mlp(shape: Shape, classes: int) -> nn.Module:
    """One hidden layer of 64 units: 50,890 parameters on MNIST."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 64), nn.ReLU(), nn.Linear(64, classes))


def softmax(shape: Shape, classes: int) -> nn.Module:
    """Softmax regression: 7,850 parameters on MNIST, and a convex problem."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {"cnn": cnn, "mlp": mlp, "softmax": softmax}


def parameter_count(module: nn.Module) -> int:
    """D: how many numbers one model is."""
    return sum(parameter.numel() for parameter in module.parameters())


def to_flat(module: nn.Module) -> Floats:
    """Concatenate the parameters of a module in their own order, (D,); a copy."""
    parts = [parameter.detach().reshape(-1).to(torch.float32) for parameter in module.parameters()]
    return torch.cat(parts).numpy().copy()


def load_flat(module: nn.Module, weights: Floats) -> None:
    """Write flat weights (D,) into a module, in place."""
    expected = parameter_count(module)
    if weights.shape != (expected,):
        raise UserError(f"The model has {expected:,} parameters, but the weights given have shape {weights.shape}.")
    offset = 0
    with torch.no_grad():
        for parameter in module.parameters():
            count = parameter.numel()
            part = np.ascontiguousarray(weights[offset : offset + count])
            parameter.copy_(torch.from_numpy(part).reshape(parameter.shape))
            offset += count


def initial_weights(build: Callable[[], nn.Module], seed: int) -> Floats:
    """Flat weights of a module built under torch's own initialisation with the given seed, (D,).

    The state of torch's global generator is put back, so that a caller's own random numbers do not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return to_flat(build())
