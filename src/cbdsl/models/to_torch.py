"""Builds torch modules from descriptions; converts weights to and from flat arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cbdsl.arrays import Floats
from cbdsl.errors import UserError
from cbdsl.models.architecture import SAMPLES, Architecture
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
    Sigmoid,
    Silu,
    Tanh,
)


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


def module_weights(build: Callable[[], nn.Module], seed: int) -> Floats:
    """Flat weights of a module built under torch's own initialisation with the given seed, (D,).

    The state of torch's global generator is put back, so that a caller's own random numbers do not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return to_flat(build())


def module_of(architecture: Architecture) -> nn.Module:
    """One torch layer for every layer, in order: '0.weight' are the weights of layer 0."""
    parts = [_module(layer) for layer in architecture.layers]
    return nn.Sequential(*parts) if architecture.is_chain else GraphModule(parts, architecture.reads)


class GraphModule(nn.Module):
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


class SumModule(nn.Module):
    """`Add` in torch."""

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        """From first to last."""
        for other in others:
            first = first + other
        return first


class ConcatModule(nn.Module):
    """`Concat` in torch."""

    def forward(self, *tensors: Tensor) -> Tensor:
        """Along the channels."""
        return torch.cat(tensors, 1)


class ScaleModule(nn.Module):
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
            module = ScaleModule(layer)
        case Add():
            module = SumModule()
        case Concat():
            module = ConcatModule()
        case _:
            raise TypeError(f"{type(layer).__name__} is no layer")
    return module
