"""One torch layer as plain data. Reads sizes only, never weights, and never changes a layer."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from cbdsl.engines.architecture import (
    ArchitectureError,
    AvgPool2d,
    Conv2d,
    Flatten,
    Layer,
    Linear,
    MaxPool2d,
    Pair,
    Relu,
    Sigmoid,
    Tanh,
)


def _pair(value: int | tuple[int, ...]) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def describe(label: str, part: nn.Module) -> Layer | None:
    """One torch layer as plain data; None for one that does nothing. label: what an error calls it."""
    # The exact class: a subclass may compute anything.
    found = DESCRIBE.get(type(part))
    if found is None:
        raise ArchitectureError(f"{label} is not one of {KNOWN}{_advice(part)}")
    return found(label, part)


def _advice(part: nn.Module) -> str:
    if isinstance(part, nn.modules.batchnorm._BatchNorm):
        return f": it mixes the samples of a batch. Replace {group_norm_instead(part)}"
    return ""


def group_norm_instead(part: nn.modules.batchnorm._NormBase) -> str:
    """What to write in place of a normalisation over the samples of a batch: '... by ...'."""
    channels = part.num_features
    affine = "" if part.affine else ", affine=False"
    return f"nn.{type(part).__name__}({channels}) by nn.GroupNorm({math.gcd(channels, 8)}, {channels}{affine})"


def _describe_flatten(label: str, part: nn.Flatten) -> Flatten:
    if (part.start_dim, part.end_dim) != (1, -1):
        raise ArchitectureError(f"{label} flattens dimensions {part.start_dim} to {part.end_dim}, not a whole sample")
    return Flatten()


def _describe_dropout(label: str, part: nn.Dropout) -> None:
    if part.p > 0:
        raise ArchitectureError(f"{label} draws random numbers while it trains")


def _describe_linear(_label: str, part: nn.Linear) -> Linear:
    return Linear(part.in_features, part.out_features, part.bias is not None)


def _describe_max_pool(label: str, part: nn.MaxPool2d) -> MaxPool2d:
    if _pair(part.padding) != (0, 0) or _pair(part.dilation) != (1, 1) or part.ceil_mode or part.return_indices:
        raise ArchitectureError(f"{label} has padding, dilation, ceil_mode or return_indices")
    return MaxPool2d(_pair(part.kernel_size), _pair(part.stride))


def _describe_average_pool(label: str, part: nn.AvgPool2d) -> AvgPool2d:
    if _pair(part.padding) != (0, 0) or part.ceil_mode or part.divisor_override:
        raise ArchitectureError(f"{label} has padding, ceil_mode or divisor_override")
    return AvgPool2d(_pair(part.kernel_size), _pair(part.stride))


def _describe_convolution(label: str, part: nn.Conv2d) -> Conv2d:
    kernel = _pair(part.kernel_size)
    if _pair(part.stride) != (1, 1) or _pair(part.dilation) != (1, 1) or part.groups != 1:
        raise ArchitectureError(f"{label} has a stride, dilation or groups other than 1")
    if part.padding_mode != "zeros":
        raise ArchitectureError(f"{label} pads with {part.padding_mode}, not with zeros")
    if part.padding == "same":
        if kernel[0] % 2 == 0 or kernel[1] % 2 == 0:
            raise ArchitectureError(f"{label} pads an even kernel on one side more than on the other")
        padding = (kernel[0] // 2, kernel[1] // 2)
    elif isinstance(part.padding, str):
        padding = (0, 0)
    else:
        padding = _pair(part.padding)
    return Conv2d(part.in_channels, part.out_channels, kernel, padding, part.bias is not None)


DESCRIBE: dict[type[nn.Module], Callable[..., Layer | None]] = {
    nn.Conv2d: _describe_convolution,
    nn.ReLU: lambda *_: Relu(),
    nn.Tanh: lambda *_: Tanh(),
    nn.Sigmoid: lambda *_: Sigmoid(),
    nn.MaxPool2d: _describe_max_pool,
    nn.AvgPool2d: _describe_average_pool,
    nn.Flatten: _describe_flatten,
    nn.Linear: _describe_linear,
    nn.Identity: lambda *_: None,
    nn.Dropout: _describe_dropout,
}

KNOWN = ", ".join(kind.__name__ for kind in DESCRIBE)
