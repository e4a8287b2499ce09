"""Networks of every supported layer, samples for them, and the truth in double precision to hold results against."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from cbdsl.arrays import Floats, Indices, Samples
from cbdsl.engines.architecture import (
    Architecture,
    AvgPool2d,
    Conv2d,
    Flatten,
    Layer,
    Linear,
    MaxPool2d,
    Relu,
    Sigmoid,
    Tanh,
)
from cbdsl.engines.base import Engine, Sgd
from cbdsl.engines.native_engine import NativeEngine, available
from cbdsl.engines.torch_engine import TorchEngine

needs_native = pytest.mark.skipif(available() is not None, reason="NO NATIVE ENGINE: install a C++ compiler")
ENGINES = [pytest.param("native", marks=needs_native), "torch"]

POOL2 = MaxPool2d((2, 2), (2, 2))
SMALL = Architecture((1, 8, 8), (Conv2d(1, 3, (3, 3)), Relu(), POOL2, Flatten(), Linear(27, 8), Tanh(), Linear(8, 4)))


def module_of(architecture: Architecture) -> nn.Sequential:
    parts: list[nn.Module] = []
    for layer in architecture.layers:
        match layer:
            case Conv2d():
                parts.append(
                    nn.Conv2d(layer.inputs, layer.outputs, layer.kernel, padding=layer.padding, bias=layer.bias)
                )
            case Linear():
                parts.append(nn.Linear(layer.inputs, layer.outputs, layer.bias))
            case MaxPool2d():
                parts.append(nn.MaxPool2d(layer.kernel, layer.stride))
            case AvgPool2d():
                parts.append(nn.AvgPool2d(layer.kernel, layer.stride))
            case Flatten():
                parts.append(nn.Flatten())
            case Relu():
                parts.append(nn.ReLU())
            case Tanh():
                parts.append(nn.Tanh())
            case Sigmoid():
                parts.append(nn.Sigmoid())
    return nn.Sequential(*parts)


def engine_of(name: str, architecture: Architecture, threads: int = 2) -> Engine:
    if name == "native":
        return NativeEngine(architecture, threads)
    return TorchEngine(module_of(architecture), threads)


def initial(architecture: Architecture, workers: int, seed: int = 0) -> Floats:
    """Weights as torch would start with them, (U, D)."""
    torch.manual_seed(seed)
    rows = [nn.utils.parameters_to_vector(module_of(architecture).parameters()).detach() for _ in range(workers)]
    return torch.stack(rows).numpy()


def samples_for(architecture: Architecture, count: int, seed: int = 0) -> Samples:
    generator = np.random.default_rng(seed)
    features = generator.standard_normal((count, *architecture.shape), dtype=np.float32)
    return Samples(features, generator.integers(0, architecture.classes, count).astype(np.int32))


def reference(architecture: Architecture, weights: Floats) -> nn.Sequential:
    """One model in torch, in double precision: the truth that float32 results are held against."""
    module = module_of(architecture).double()
    nn.utils.vector_to_parameters(torch.from_numpy(weights.astype(np.float64)), module.parameters())
    return module


def reference_loss(module: nn.Module, samples: Samples, indices: Indices) -> torch.Tensor:
    real = indices[indices >= 0]
    features, labels = torch.from_numpy(samples.features[real]).double(), torch.from_numpy(samples.labels[real]).long()
    return nn.functional.cross_entropy(module(features), labels)


def reference_training(
    architecture: Architecture,
    weights: Floats,
    samples: Samples,
    batches: Indices,
    sgd: Sgd,
    correction: Floats | None = None,
) -> Floats:
    module = reference(architecture, weights)
    start = torch.from_numpy(weights.astype(np.float64))  # (D,)
    constant = torch.from_numpy(np.zeros_like(weights) if correction is None else correction).double()  # (D,)
    optimizer = torch.optim.SGD(
        module.parameters(), sgd.learning_rate, momentum=sgd.momentum, weight_decay=sgd.weight_decay
    )
    for batch in batches:
        if batch[0] >= 0:
            optimizer.zero_grad()
            reference_loss(module, samples, batch).backward()  # type: ignore[no-untyped-call]
            own = nn.utils.parameters_to_vector(module.parameters()).detach()
            more = torch.split(sgd.proximal * (own - start) + constant, [one.numel() for one in module.parameters()])
            for parameter, part in zip(module.parameters(), more, strict=True):
                assert parameter.grad is not None
                parameter.grad += part.view(parameter.shape)
            optimizer.step()
    result: Floats = nn.utils.parameters_to_vector(module.parameters()).detach().numpy()
    return result


def distance(found: Floats, expected: Floats) -> float:
    return float(np.linalg.norm(found - expected) / max(float(np.linalg.norm(expected)), 1e-3))


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    """Sequential classifiers of every supported layer, in any order that fits."""
    choices: list[Layer] = [Relu(), Tanh(), Sigmoid()]
    activations = st.sampled_from(choices)
    layers: list[Layer] = []
    shape: tuple[int, ...]
    if draw(st.integers(0, 4)) == 0:
        shape = (draw(st.integers(1, 40)),)
    else:
        shape = (draw(st.integers(1, 3)), draw(st.integers(1, 13)), draw(st.integers(1, 13)))
    first, (channels, height, width) = shape, (*shape, 1, 1)[:3]
    for _ in range(draw(st.integers(0, 3)) if len(first) == 3 else 0):
        if draw(st.integers(0, 5)) == 0:
            layers.append(draw(activations))
        padding = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        kernel = tuple(
            draw(st.integers(1, min(side + 2 * pad, 8))) for side, pad in zip((height, width), padding, strict=True)
        )
        outputs = draw(st.integers(1, 9))
        layers.append(Conv2d(channels, outputs, (kernel[0], kernel[1]), padding, draw(st.booleans())))
        channels, height, width = (
            outputs,
            height + 2 * padding[0] - kernel[0] + 1,
            width + 2 * padding[1] - kernel[1] + 1,
        )
        activation = draw(st.none() | activations)
        pooling = draw(st.sampled_from([None, MaxPool2d, AvgPool2d]))
        pool_first = draw(st.booleans())
        if activation is not None and not pool_first:
            layers.append(activation)
        if pooling is not None:
            usual = draw(st.booleans()) and height > 1 and width > 1
            window = (2, 2) if usual else (draw(st.integers(1, min(height, 3))), draw(st.integers(1, min(width, 3))))
            stride = (2, 2) if usual else (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
            layers.append(pooling(window, stride))
            height, width = (height - window[0]) // stride[0] + 1, (width - window[1]) // stride[1] + 1
        if activation is not None and pool_first:
            layers.append(activation)
    if len(first) == 3:
        layers.append(Flatten())
    inputs = channels * height * width
    for _ in range(draw(st.integers(0, 2))):
        outputs = draw(st.integers(1, 40))
        layers.append(Linear(inputs, outputs, draw(st.booleans())))
        layers += [draw(activations)] if draw(st.booleans()) else []
        inputs = outputs
    layers.append(Linear(inputs, draw(st.integers(2, 11)), draw(st.booleans())))
    return Architecture(first, tuple(layers))
