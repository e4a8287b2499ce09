"""Networks of every supported layer, samples for them, and the truth in double precision to hold results against."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from cbdsl.arrays import Floats, Indices, Samples
from cbdsl.engines.engine import Engine, Sgd
from cbdsl.engines.native_engine import NativeEngine, available
from cbdsl.engines.torch_engine import TorchEngine
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
    Gru,
    Hardswish,
    Layer,
    LayerNorm,
    LeakyRelu,
    Linear,
    Lstm,
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
    Transpose,
)
from cbdsl.models.to_torch import module_of

__all__ = [
    "ENGINES", "POOL2", "SMALL", "architectures", "distance", "engine_of", "graphs", "initial", "module_of",
    "needs_native", "reference", "reference_loss", "reference_training", "samples_for",
]  # fmt: skip

needs_native = pytest.mark.skipif(available() is not None, reason="NO NATIVE ENGINE: install a C++ compiler")
ENGINES = [pytest.param("native", marks=needs_native), "torch"]

POOL2 = MaxPool2d((2, 2), (2, 2))
SMALL = Architecture((1, 8, 8), (Conv2d(1, 3, (3, 3)), Relu(), POOL2, Flatten(), Linear(27, 8), Tanh(), Linear(8, 4)))


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


def reference(architecture: Architecture, weights: Floats) -> nn.Module:
    """One model in torch, in double precision: the truth that float32 results are held against."""
    module = module_of(architecture).double()
    nn.utils.vector_to_parameters(torch.from_numpy(weights.astype(np.float64)), module.parameters())
    return module


def reference_loss(module: nn.Module, samples: Samples, indices: Indices) -> torch.Tensor:
    real = indices[indices >= 0]
    features, labels = torch.from_numpy(samples.features[real]).double(), torch.from_numpy(samples.labels[real]).long()
    return nn.functional.cross_entropy(module(features), labels)


def torch_optimiser(module: nn.Module, sgd: Sgd) -> torch.optim.Optimizer:
    rate, decay = sgd.learning_rate, sgd.weight_decay
    match sgd.optimiser:
        case "sgd":
            return torch.optim.SGD(module.parameters(), rate, momentum=sgd.momentum, weight_decay=decay)
        case "adam":
            return torch.optim.Adam(module.parameters(), rate, weight_decay=decay)
        case "adamw":
            return torch.optim.AdamW(module.parameters(), rate, weight_decay=decay)


def rates_of(sgd: Sgd, steps: int) -> list[float]:
    """The learning rates of a round of so many steps."""
    factors: dict[str, Callable[[int], float]] = {
        "constant": lambda _: 1.0,
        "decay": lambda step: 1 - step / steps,
        "cosine": lambda step: 0.5 + 0.5 * math.cos(math.pi * step / steps),
        "warmup": lambda step: min(1.0, (step + 1) / -(-steps // 10)),
    }
    return [sgd.learning_rate * factors[sgd.schedule](step) for step in range(steps)]


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
    optimizer = torch_optimiser(module, sgd)
    rates = iter(rates_of(sgd, int((batches[:, 0] >= 0).sum())))
    for batch in batches:
        if batch[0] >= 0:
            optimizer.param_groups[0]["lr"] = next(rates)
            optimizer.zero_grad()
            reference_loss(module, samples, batch).backward()  # type: ignore[no-untyped-call]
            if sgd.clip:
                nn.utils.clip_grad_norm_(module.parameters(), sgd.clip)
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


ACTIVATIONS: list[Layer] = [
    Relu(), Relu6(), LeakyRelu(), LeakyRelu(0.2), Tanh(), Sigmoid(), Silu(), Hardswish(), Gelu(),
    Gelu(approximate=True), Softplus(),
]  # fmt: skip


@st.composite
def graphs(draw: st.DrawFn, dropout: bool = False, most: int = 8, wide: bool = False) -> Architecture:
    """Classifiers of every layer there is on rows, series or images, with branches, sums and concatenations.

    dropout: whether numbers may be dropped. most: layers before the end, which joins all branches. wide: begin with a
    convolution of many channels, behind which channels stay many.
    """
    axes = draw(st.integers(1 if wide else 0, 2))
    net = Draft((draw(st.integers(1, 4 if axes else 12)), *(draw(st.integers(1, 9)) for _ in range(axes))))
    unread = set[int]()
    if wide:
        kernel = (draw(st.integers(1, 2)),) * axes
        first = (Conv2d if axes == 2 else Conv1d)(net.shape[0], draw(st.sampled_from([16, 20, 32])), kernel, kernel)
        unread = {net.add(first)}
    for number in range(len(unread), draw(st.integers(1 + len(unread), most))):
        # Mostly one layer after the other; sometimes from further back, which makes a branch.
        source = number - 1 if draw(st.integers(0, 3)) < 3 else draw(st.integers(SAMPLES, number - 1))
        reads = (source, *_fitting(draw, net, source, number))
        layer = _single(draw, net.shape_of(source), dropout) if len(reads) == 1 else _joining(draw, net, reads)
        unread = (unread | {net.add(layer, *reads)}) - {*reads}
    rows = [net.add(Flatten(), number) if len(net.shape_of(number)) > 1 else number for number in sorted(unread)]
    if len(rows) > 1:
        rows = [net.add(Concat(), *rows)]
    net.add(Linear(net.shape_of(rows[0])[0], draw(st.integers(2, 6)), draw(st.booleans())), rows[0])
    return net.architecture()


def _fitting(draw: st.DrawFn, net: Draft, source: int, count: int) -> list[int]:
    """Others that one result can be added to or joined with, if that is wanted."""
    if draw(st.integers(0, 3)) < 3:
        return []
    sides = net.shape_of(source)[1:]
    fit = [
        number
        for number in range(SAMPLES, count)
        if (len(net.shape_of(number)), net.shape_of(number)[1:]) == (1 + len(sides), sides)
    ]
    return draw(st.lists(st.sampled_from(fit), min_size=1, max_size=2))


def _joining(draw: st.DrawFn, net: Draft, reads: tuple[int, ...]) -> Layer:
    same = len({net.shape_of(number) for number in reads}) == 1
    small = sum(net.shape_of(number)[0] for number in reads) <= 60
    return Add() if same and (not small or draw(st.booleans())) else Concat()


def _single(draw: st.DrawFn, shape: Shape, dropout: bool) -> Layer:  # noqa: PLR0911 - one for every kind
    """A layer that takes one tensor of this shape."""
    kinds = ["weights", "weights", "activation", "norm", "scale", *(["dropout"] if dropout else [])]
    series = ["recurrent", "transpose"] if len(shape) == 2 else []
    match draw(st.sampled_from(kinds + (["pool", "pool", "flatten"] if len(shape) > 1 else []) + series)):
        case "weights" if len(shape) == 1:
            return Linear(shape[0], draw(st.integers(1, 12)), draw(st.booleans()))
        case "weights":
            return _convolution(draw, shape)
        case "norm":
            return _norm(draw, shape)
        case "pool":
            return _pool(draw, shape)
        case "flatten":
            return Flatten()
        case "recurrent":
            kind = draw(st.sampled_from([Gru, Lstm]))
            return kind(shape[1], draw(st.integers(1, 20)), draw(st.booleans()), draw(st.booleans()))
        case "transpose":
            return Transpose()
        case "dropout":
            return Dropout(draw(st.sampled_from([0.1, 0.5])))
        case "scale":
            values = st.floats(-2, 2, width=32)
            sizes = st.sampled_from([1, shape[0]])
            return Scale(*(tuple(draw(values) for _ in range(draw(sizes))) for _ in range(2)))
    return draw(st.sampled_from(ACTIVATIONS))


def _divisor(draw: st.DrawFn, number: int) -> int:
    return draw(st.sampled_from([part for part in range(1, number + 1) if number % part == 0]))


def _convolution(draw: st.DrawFn, shape: Shape) -> Layer:
    padding = tuple(draw(st.integers(0, 2)) for _ in shape[1:])
    kernel = tuple(draw(st.integers(1, min(side + 2 * pad, 5))) for side, pad in zip(shape[1:], padding, strict=True))
    groups, stride = _divisor(draw, shape[0]), tuple(draw(st.integers(1, 3)) for _ in kernel)
    kind = Conv2d if len(kernel) == 2 else Conv1d
    if shape[0] >= 16:  # many channels: all at once, or each by itself
        groups = draw(st.sampled_from([1, shape[0]]))
        outputs = shape[0] if groups > 1 else draw(st.sampled_from([16, 24, 32, 80]))
        return kind(shape[0], outputs, kernel, padding, draw(st.booleans()), stride, groups)
    return kind(shape[0], groups * draw(st.integers(1, 3)), kernel, padding, draw(st.booleans()), stride, groups)


def _pool(draw: st.DrawFn, shape: Shape) -> Layer:
    kinds = [MaxPool2d, AvgPool2d] if len(shape) == 3 else [MaxPool1d, AvgPool1d]
    if draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from(kinds))(shape[1:], shape[1:])
    kernel = tuple(draw(st.integers(1, min(side, 3))) for side in shape[1:])
    padding = tuple(draw(st.integers(0, size // 2)) for size in kernel)
    return draw(st.sampled_from(kinds))(kernel, tuple(draw(st.integers(1, 3)) for _ in kernel), padding)


def _norm(draw: st.DrawFn, shape: Shape) -> Layer:
    """Of enough numbers each: two that are nearly the same would become whatever rounding makes of them."""
    epsilon, affine = draw(st.sampled_from([1e-5, 1e-3])), draw(st.booleans())
    groups = _divisor(draw, shape[0])
    if draw(st.booleans()) and math.prod(shape) // groups >= 4:
        return GroupNorm(groups, shape[0], affine, epsilon)
    last = shape[draw(st.integers(0, len(shape) - 1)) :]
    if math.prod(last) >= 4:
        return LayerNorm(last, affine, not affine or draw(st.booleans()), epsilon)
    return Tanh()
