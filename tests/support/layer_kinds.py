"""A small network for every kind of layer, and weights and batches for any network."""

from __future__ import annotations

import numpy as np

from cbdsl.arrays import Floats, Indices
from cbdsl.models import layers
from cbdsl.models.architecture import SAMPLES, Architecture, Draft
from cbdsl.models.layers import Layer, Shape
from cbdsl.models.network import initial_weights

FEW, MANY = (3, 9, 7), (16, 7, 6)
"""Images with samples in the lanes, and with channels in the lanes while they are trained."""
LAYERS: list[tuple[Shape, Layer]] = [
    (FEW, layers.Conv2d(3, 5, (3, 2), (1, 1), True, (2, 1))),
    (FEW, layers.Conv2d(3, 6, (3, 3), (0, 2), False, (1, 1), 3)),
    (MANY, layers.Conv2d(16, 20, (3, 3), (1, 1))),
    (MANY, layers.Conv2d(16, 16, (3, 3), (1, 1), True, (2, 2), 16)),
    ((4, 19), layers.Conv1d(4, 6, (5,), (2,), True, (2,))),
    ((20, 11), layers.Conv1d(20, 17, (3,), (1,))),
    (FEW, layers.MaxPool2d((3, 2), (2, 2), (1, 1))),
    (FEW, layers.AvgPool2d((3, 2), (2, 1), (1, 0))),
    ((4, 19), layers.MaxPool1d((3,), (2,), (1,))),
    ((4, 19), layers.AvgPool1d((4,), (3,), (2,))),
    (FEW, layers.GroupNorm(3, 3)),
    (MANY, layers.GroupNorm(4, 16, epsilon=1e-3)),
    (FEW, layers.LayerNorm((9, 7))),
    ((23,), layers.LayerNorm((23,), bias=False)),
    (FEW, layers.Scale((0.5, -2.0, 3.0), (0.25,))),
    (FEW, layers.Dropout(0.3)),
    ((23,), layers.Linear(23, 13, bias=False)),
    *(
        ((23,), layer)
        for layer in (
            layers.Relu(),
            layers.Relu6(),
            layers.LeakyRelu(0.2),
            layers.Tanh(),
            layers.Sigmoid(),
            layers.Silu(),
            layers.Hardswish(),
            layers.Gelu(),
        )
    ),
    (FEW, layers.Gelu(approximate=True)),
    ((23,), layers.Softplus()),
    (MANY, layers.Softplus()),
    (FEW, layers.Tanh()),
    ((9, 4), layers.Gru(4, 6)),
    ((9, 4), layers.Gru(4, 21, bias=False, last=False)),
    ((9, 4), layers.Lstm(4, 19)),
    ((9, 4), layers.Lstm(4, 5, last=False)),
    ((4, 9), layers.Transpose()),
]


def network_with(shape: Shape, layer: Layer) -> Architecture:
    """A layer between others, so that gradients come to it from behind and leave it to the front."""
    net = Draft(shape)
    if len(shape) == 1:
        net.add(layers.Linear(shape[0], shape[0]))
    else:
        net.add((layers.Conv2d if len(shape) == 3 else layers.Conv1d)(shape[0], shape[0], (1,) * (len(shape) - 1)))
    net.add(layer)
    if len(net.shape_of(net.last)) > 1:
        net.add(layers.Flatten())
    net.add(layers.Linear(net.shape_of(net.last)[0], 5))
    return net.architecture()


def joined() -> Architecture:
    """Branches that are added up and put side by side."""
    net = Draft((4, 6, 6))
    one, other = net.add(layers.Conv2d(4, 4, (3, 3), (1, 1)), SAMPLES), net.add(layers.Conv2d(4, 4, (1, 1)), SAMPLES)
    net.add(layers.Concat(), net.add(layers.Add(), one, other, one), other, SAMPLES)
    net.add(layers.Flatten())
    net.add(layers.Linear(net.shape_of(net.last)[0], 5))
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
