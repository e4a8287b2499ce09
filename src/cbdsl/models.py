"""The networks that come with the package, and the way between a module and its flat weights."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Shape = tuple[int, ...]


def cnn(shape: Shape, classes: int) -> nn.Module:
    """Table I of the paper: two convolutions, three dense layers; 44,426 parameters on MNIST."""
    channels, height, width = image_shape(shape)
    flat = 16 * ((height - 4) // 2 - 4) // 2 * (((width - 4) // 2 - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2, 2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2, 2),
        nn.Flatten(),
        nn.Linear(flat, 120),
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
