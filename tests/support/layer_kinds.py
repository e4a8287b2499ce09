"""A small network for every kind of layer, and weights and batches for any network."""

from __future__ import annotations

import numpy as np

from cbdsl.arrays import Floats, Indices
from cbdsl.models.architecture import SAMPLES, Architecture, Draft
from cbdsl.models.layers import (
    Add,
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
    Softplus,
    Tanh,
)
from cbdsl.models.network import initial_weights

FEW, MANY = (3, 9, 7), (16, 7, 6)
"""Images with samples in the lanes, and with channels in the lanes while they are trained."""
LAYERS: list[tuple[Shape, Layer]] = [
    (FEW, Conv2d(3, 5, (3, 2), (1, 1), True, (2, 1))),
    (FEW, Conv2d(3, 6, (3, 3), (0, 2), False, (1, 1), 3)),
    (MANY, Conv2d(16, 20, (3, 3), (1, 1))),
    (MANY, Conv2d(16, 16, (3, 3), (1, 1), True, (2, 2), 16)),
    ((4, 19), Conv1d(4, 6, (5,), (2,), True, (2,))),
    ((20, 11), Conv1d(20, 17, (3,), (1,))),
    (FEW, MaxPool2d((3, 2), (2, 2), (1, 1))),
    (FEW, AvgPool2d((3, 2), (2, 1), (1, 0))),
    ((4, 19), MaxPool1d((3,), (2,), (1,))),
    ((4, 19), AvgPool1d((4,), (3,), (2,))),
    (FEW, GroupNorm(3, 3)),
    (MANY, GroupNorm(4, 16, epsilon=1e-3)),
    (FEW, LayerNorm((9, 7))),
    ((23,), LayerNorm((23,), bias=False)),
    (FEW, Scale((0.5, -2.0, 3.0), (0.25,))),
    (FEW, Dropout(0.3)),
    ((23,), Linear(23, 13, bias=False)),
    *(((23,), layer) for layer in (Relu(), Relu6(), LeakyRelu(0.2), Tanh(), Sigmoid(), Silu(), Hardswish(), Gelu())),
    (FEW, Gelu(approximate=True)),
    ((23,), Softplus()),
    (MANY, Softplus()),
    (FEW, Tanh()),
]


def network_with(shape: Shape, layer: Layer) -> Architecture:
    """A layer between others, so that gradients come to it from behind and leave it to the front."""
    net = Draft(shape)
    if len(shape) == 1:
        net.add(Linear(shape[0], shape[0]))
    else:
        net.add((Conv2d if len(shape) == 3 else Conv1d)(shape[0], shape[0], (1,) * (len(shape) - 1)))
    net.add(layer)
    if len(net.shape_of(net.last)) > 1:
        net.add(Flatten())
    net.add(Linear(net.shape_of(net.last)[0], 5))
    return net.architecture()


def joined() -> Architecture:
    """Branches that are added up and put side by side."""
    net = Draft((4, 6, 6))
    one, other = net.add(Conv2d(4, 4, (3, 3), (1, 1)), SAMPLES), net.add(Conv2d(4, 4, (1, 1)), SAMPLES)
    net.add(Concat(), net.add(Add(), one, other, one), other, SAMPLES)
    net.add(Flatten())
    net.add(Linear(net.shape_of(net.last)[0], 5))
    return net.architecture()


NETWORKS = {
    f"{number}-{type(layer).__name__}": network_with(shape, layer) for number, (shape, layer) in enumerate(LAYERS)
}
NETWORKS["joined"] = joined()


def moved(network: Architecture, workers: int) -> Floats:
    """First weights, moved a little, so that factors of norms are not all one, (U, D)."""
    rng = np.random.default_rng(7)
    rows = [initial_weights(network, seed) for seed in range(workers)]
    return np.stack([row + 0.05 * rng.standard_normal(len(row)).astype(np.float32) for row in rows])


def batches_for(workers: int, samples: int, steps: int = 5, size: int = 7) -> Indices:
    """Batches of every worker's own, one of them short, (U, S, B)."""
    batches = np.random.default_rng(1).integers(0, samples, (workers, steps, size)).astype(np.int32)
    batches[:, 1, 2:] = -1
    return batches
