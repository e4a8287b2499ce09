"""The torch module of a description: the way back from `torch_layers`. Parameters have torch's own first values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cbdsl.engines.architecture import (
    SAMPLES,
    Add,
    Architecture,
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
    Sigmoid,
    Silu,
    Tanh,
)


def module_of(architecture: Architecture) -> nn.Module:
    """One torch layer for every layer, in order: '0.weight' are the weights of layer 0."""
    parts = [_module(layer) for layer in architecture.layers]
    return nn.Sequential(*parts) if architecture.is_chain else Wired(parts, architecture.reads)


class Wired(nn.Module):
    """Layers that read each other's results."""

    def __init__(self, parts: list[nn.Module], reads: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        for number, part in enumerate(parts):
            self.add_module(str(number), part)
        self.reads = reads

    def forward(self, samples: Tensor) -> Tensor:
        """Every layer once, in order; what nobody reads any more is let go."""
        last_reader = {other: number for number, read in enumerate(self.reads) for other in read}
        made = {SAMPLES: samples}
        for number, (part, read) in enumerate(zip(self.children(), self.reads, strict=True)):
            made[number] = part(*(made[other] for other in read))
            for other in {*read}:
                if last_reader[other] == number:
                    del made[other]
        return made[len(self.reads) - 1]


class Sum(nn.Module):
    """`Add` in torch."""

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        """From first to last."""
        for other in others:
            first = first + other
        return first


class Joined(nn.Module):
    """`Concat` in torch."""

    def forward(self, *tensors: Tensor) -> Tensor:
        """Along the channels."""
        return torch.cat(tensors, 1)


class Constants(nn.Module):
    """`Scale` in torch; its constants are no parameters, and part of no saved model."""

    factors: Tensor
    offsets: Tensor

    def __init__(self, layer: Scale) -> None:
        super().__init__()
        self.register_buffer("factors", torch.tensor(layer.factors), persistent=False)
        self.register_buffer("offsets", torch.tensor(layer.offsets), persistent=False)

    def forward(self, samples: Tensor) -> Tensor:
        """Channel by channel."""
        behind = (1,) * (samples.dim() - 2)
        return samples * self.factors.view(-1, *behind) + self.offsets.view(-1, *behind)


def _module(layer: Layer) -> nn.Module:  # noqa: PLR0912 - one case a layer
    match layer:
        case Conv2d() | Conv1d():
            kind: Any = nn.Conv2d if isinstance(layer, Conv2d) else nn.Conv1d  # their sizes are tuples of one length
            module: nn.Module = kind(
                layer.inputs, layer.outputs, layer.kernel, layer.stride, layer.padding,
                groups=layer.groups, bias=layer.bias,
            )  # fmt: skip
        case Linear():
            module = nn.Linear(layer.inputs, layer.outputs, layer.bias)
        case MaxPool2d():
            module = nn.MaxPool2d(layer.kernel, layer.stride, layer.padding)
        case MaxPool1d():
            module = nn.MaxPool1d(layer.kernel, layer.stride, layer.padding)
        case AvgPool2d():
            module = nn.AvgPool2d(layer.kernel, layer.stride, layer.padding)  # type: ignore[arg-type]
        case AvgPool1d():
            module = nn.AvgPool1d(layer.kernel, layer.stride, layer.padding)  # type: ignore[arg-type]
        case Relu():
            module = nn.ReLU()
        case Relu6():
            module = nn.ReLU6()
        case LeakyRelu():
            module = nn.LeakyReLU(layer.slope)
        case Tanh():
            module = nn.Tanh()
        case Sigmoid():
            module = nn.Sigmoid()
        case Silu():
            module = nn.SiLU()
        case Hardswish():
            module = nn.Hardswish()
        case Gelu():
            module = nn.GELU("tanh" if layer.approximate else "none")
        case Flatten():
            module = nn.Flatten()
        case GroupNorm():
            module = nn.GroupNorm(layer.groups, layer.channels, layer.epsilon, layer.affine)
        case LayerNorm():
            module = nn.LayerNorm(layer.shape, layer.epsilon, layer.affine, layer.bias)
        case Dropout():
            module = nn.Dropout(layer.chance)
        case Scale():
            module = Constants(layer)
        case Add():
            module = Sum()
        case Concat():
            module = Joined()
        case _:
            raise TypeError(f"{type(layer).__name__} is no layer")
    return module
