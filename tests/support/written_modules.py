"""Networks as people write them in torch, each with its description."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

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
    Layer,
    LayerNorm,
    Linear,
    MaxPool1d,
    MaxPool2d,
    Relu,
    Relu6,
    Scale,
    Silu,
)


class BasicBlock(nn.Module):
    """Of a ResNet, as torchvision writes it; `first` moves the shortcut to the front of the weights."""

    def __init__(self, inputs: int, outputs: int, stride: int, first: bool = False) -> None:
        super().__init__()
        shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(2, outputs))
        self.downsample = shortcut if first else None
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(2, outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(2, outputs)
        if inputs != outputs and not first:
            del self.downsample
            self.downsample = shortcut

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(BasicBlock(3, 4, 2, first), BasicBlock(4, 4, 1))
        self.pool, self.last = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.flatten(self.pool(self.blocks(x)), 1))  # type: ignore[no-any-return]


def residual(first: bool = False) -> Architecture:
    net = Draft((3, 8, 8))
    if first:
        net.add(Conv2d(3, 4, (1, 1), bias=False, stride=(2, 2)))
        shortcut = net.add(GroupNorm(2, 4))
    net.add(Conv2d(3, 4, (3, 3), (1, 1), False, (2, 2)), SAMPLES)
    net.add(GroupNorm(2, 4))
    net.add(Relu())
    net.add(Conv2d(4, 4, (3, 3), (1, 1), False))
    branch = net.add(GroupNorm(2, 4))
    if not first:
        net.add(Conv2d(3, 4, (1, 1), bias=False, stride=(2, 2)), SAMPLES)
        shortcut = net.add(GroupNorm(2, 4))
    net.add(Add(), branch, shortcut)
    before = net.add(Relu())
    for layer in (Conv2d(4, 4, (3, 3), (1, 1), False), GroupNorm(2, 4), Relu(), Conv2d(4, 4, (3, 3), (1, 1), False)):
        net.add(layer)
    branch = net.add(GroupNorm(2, 4))
    net.add(Add(), branch, before)
    return finished(net, Relu(), AvgPool2d((4, 4), (4, 4)), Flatten(), Linear(4, 5))


def finished(net: Draft, *layers: Layer) -> Architecture:
    for layer in layers:
        net.add(layer)
    return net.architecture()


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict(
            {"front": nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(nn.GELU(), nn.Dropout(0.4)))}
        )
        self.head = nn.ModuleList([nn.Flatten(), nn.LayerNorm(72), nn.Linear(72, 3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.body["front"](x)
        for part in self.head:
            x = part(x)
        return x


class Series(nn.Module):
    """Sensors: (channels, length)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(6, 8, 5, padding=2), nn.Conv1d(8, 8, 3, stride=2)
        self.pool, self.drop, self.last = nn.MaxPool1d(2), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.conv1(x)))
        x = functional.relu6(self.conv2(x)).mean(-1)
        return self.last(self.drop(x))  # type: ignore[no-any-return]


def series() -> Architecture:
    layers = [
        Conv1d(6, 8, (5,), (2,)), Relu(), MaxPool1d((2,), (2,)), Conv1d(8, 8, (3,), stride=(2,)), Relu6(),
    ]  # fmt: skip
    net = Draft((6, 32))
    for layer in layers:
        net.add(layer)
    (length,) = net.shape_of(net.last)[1:]

    return finished(net, AvgPool1d((length,), (length,)), Flatten(), Dropout(0.5), Linear(8, 4))


class Separable(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 6, 3, 2, 1, bias=False), nn.GroupNorm(3, 6), nn.ReLU6(inplace=True),
            nn.Conv2d(6, 6, 3, 1, 1, groups=6, bias=False), nn.InstanceNorm2d(6, affine=True), nn.ReLU6(inplace=True),
            nn.Conv2d(6, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
        )  # fmt: skip


def separable() -> Architecture:
    net = Draft((3, 8, 8))
    return finished(
        net,
        Conv2d(3, 6, (3, 3), (1, 1), False, (2, 2)), GroupNorm(3, 6), Relu6(),
        Conv2d(6, 6, (3, 3), (1, 1), False, groups=6), GroupNorm(6, 6), Relu6(),
        Conv2d(6, 8, (1, 1)), AvgPool2d((4, 4), (4, 4)), Flatten(), Linear(8, 3),
    )  # fmt: skip


class Dense(nn.Module):
    """Concatenations, as in Inception and DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.three = nn.Conv2d(2, 3, 1), nn.Conv2d(2, 4, 3, padding="same")
        self.grow = nn.Conv2d(9, 2, 3, padding=1)
        self.last = nn.Linear(11 * 3 * 3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.one(x), self.three(x), functional.max_pool2d(x, 3, 1, 1)], 1)
        x = torch.concat((x, functional.silu(self.grow(x))), dim=1)
        return self.last(functional.avg_pool2d(x, 2).view(x.size(0), -1))  # type: ignore[no-any-return]


def dense() -> Architecture:

    net = Draft((2, 6, 6))
    reads = [net.add(Conv2d(2, 3, (1, 1))), net.add(Conv2d(2, 4, (3, 3), (1, 1)), SAMPLES)]
    reads.append(net.add(MaxPool2d((3, 3), (1, 1), (1, 1)), SAMPLES))
    joined = net.add(Concat(), *reads)
    net.add(Conv2d(9, 2, (3, 3), (1, 1)))
    net.add(Concat(), joined, net.add(Silu()))
    return finished(net, AvgPool2d((2, 2), (2, 2)), Flatten(), Linear(99, 4))


class Functional(nn.Module):
    """Calls and constants; only layers with weights are modules."""

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.5, 0.25]).view(1, 2, 1, 1))
        self.register_buffer("std", torch.tensor(0.25))
        self.conv, self.hidden, self.last = nn.Conv2d(2, 3, 3), nn.Linear(12, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = (x - self.mean) / self.std
        x = functional.max_pool2d(functional.gelu(self.conv(2 * x - 1), approximate="tanh"), 2)
        x = self.hidden(x.flatten(1))
        x = functional.dropout(x, 0.3, self.training) * 0.5 + x
        return self.last(x)  # type: ignore[no-any-return]


def written() -> Architecture:
    net = Draft((2, 6, 6))
    scales = (
        Scale(offsets=(-0.5, -0.25)), Scale((4.0,)), Scale((2.0,)), Scale(offsets=(-1.0,)), Conv2d(2, 3, (3, 3)),
    )  # fmt: skip
    for layer in (*scales, Gelu(approximate=True), MaxPool2d((2, 2), (2, 2)), Flatten(), Linear(12, 5)):
        net.add(layer)
    hidden = net.last
    net.add(Dropout(0.3))
    net.add(Add(), net.add(Scale((0.5,))), hidden)
    return finished(net, Linear(5, 3))


def wrapped() -> Architecture:
    layers = (Conv2d(1, 2, (3, 3)), Gelu(), Dropout(0.4), Flatten(), LayerNorm((72,)), Linear(72, 3))
    return Architecture((1, 8, 8), layers)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Architecture]]] = {
    "wrapped": (Wrapped, wrapped),
    "residual": (Residual, residual),
    "residual, shortcut defined first": (lambda: Residual(first=True), lambda: residual(first=True)),
    "series": (Series, series),
    "separable": (Separable, separable),
    "concatenated": (Dense, dense),
    "functional": (Functional, written),
}
