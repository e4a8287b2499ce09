"""One torch layer as plain data. Reads sizes and constants only, never weights, and never changes a layer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from torch import nn

from cbdsl.engines.architecture import (
    ArchitectureError,
    AvgPool1d,
    AvgPool2d,
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
    Tanh,
)
from cbdsl.engines.torch_modules import Constants


def describe(label: str, part: nn.Module, shape: Shape) -> Layer | None:
    """One torch layer as plain data; None for one that does nothing.

    label: what an error calls it. shape: of the sample that it is given.
    """
    # The exact class: a subclass may compute anything.
    found = DESCRIBE.get(type(part))
    if found is None:
        raise ArchitectureError(f"{label} {_advice(part)}")
    return found(label, part, shape)


def _advice(part: nn.Module) -> str:
    """Why a layer is none that is known, and what would do."""
    if isinstance(part, nn.modules.batchnorm._BatchNorm):
        return f"is not native: it mixes the samples of a batch. Replace {group_norm_instead(part)}"
    for kinds, words in _ADVICE:
        if isinstance(part, kinds):
            return f"is not native: {words}"
    return f"is not one of {KNOWN}"


_ADVICE: tuple[tuple[Any, str], ...] = (
    (nn.modules.dropout._DropoutNd, "it drops whole channels, or in another way; use nn.Dropout"),
    ((nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d), "the loss is taken of logits; leave it out"),
    (
        (nn.RNNBase, nn.RNNCellBase),
        "a layer that remembers takes a sample step by step; it runs on torch. Conv1d layers are native",
    ),
    (
        (nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
         nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
        "attention multiplies tensors with each other; it runs on torch",
    ),
    ((nn.Embedding, nn.EmbeddingBag), "samples are numbers, not places in a table; it runs on torch"),
    (nn.modules.lazy.LazyModuleMixin, "it has no sizes yet; write them out"),
)  # fmt: skip


def group_norm_instead(part: nn.modules.batchnorm._NormBase) -> str:
    """What to write in place of a normalisation over the samples of a batch: '... by ...'."""
    channels = part.num_features
    affine = "" if part.affine else ", affine=False"
    return f"nn.{type(part).__name__}({channels}) by nn.GroupNorm({math.gcd(channels, 8)}, {channels}{affine})"


def _sizes(value: Any, axes: int) -> Shape:  # noqa: ANN401
    """One number for every axis, or as many as there are."""
    return (value,) * axes if isinstance(value, int) else tuple(value)


def _describe_convolution(label: str, part: nn.Conv1d | nn.Conv2d, _shape: Shape) -> Layer:
    kind, axes = (Conv2d, 2) if isinstance(part, nn.Conv2d) else (Conv1d, 1)
    kernel, stride = _sizes(part.kernel_size, axes), _sizes(part.stride, axes)
    if set(_sizes(part.dilation, axes)) != {1}:
        raise ArchitectureError(f"{label} has dilation {part.dilation}; only dilation 1 is native")
    if part.padding_mode != "zeros":
        raise ArchitectureError(f"{label} pads with {part.padding_mode}, not with zeros; use padding_mode='zeros'")
    if part.padding == "same":
        if any(size % 2 == 0 for size in kernel):
            raise ArchitectureError(
                f"{label} pads an even kernel on one side more than on the other; use an odd kernel or a number as "
                "padding"
            )
        padding = tuple(size // 2 for size in kernel)
    else:
        padding = (0,) * axes if isinstance(part.padding, str) else _sizes(part.padding, axes)
    bias = part.bias is not None
    return kind(part.in_channels, part.out_channels, kernel, padding, bias, stride, part.groups)


def _describe_linear(_label: str, part: nn.Linear, _shape: Shape) -> Layer:
    return Linear(part.in_features, part.out_features, part.bias is not None)


def _describe_max_pool(label: str, part: nn.MaxPool1d | nn.MaxPool2d, _shape: Shape) -> Layer:
    kind, axes = (MaxPool2d, 2) if isinstance(part, nn.MaxPool2d) else (MaxPool1d, 1)
    if set(_sizes(part.dilation, axes)) != {1} or part.ceil_mode or part.return_indices:
        raise ArchitectureError(f"{label} has dilation, ceil_mode or return_indices; leave them out")
    return kind(*(_sizes(value, axes) for value in (part.kernel_size, part.stride, part.padding)))


def _describe_average_pool(label: str, part: nn.AvgPool1d | nn.AvgPool2d, _shape: Shape) -> Layer:
    kind, axes = (AvgPool2d, 2) if isinstance(part, nn.AvgPool2d) else (AvgPool1d, 1)
    padding = _sizes(part.padding, axes)
    if part.ceil_mode or getattr(part, "divisor_override", None):
        raise ArchitectureError(f"{label} has ceil_mode or divisor_override; leave them out")
    if any(padding) and not part.count_include_pad:
        raise ArchitectureError(f"{label} leaves its border out of the mean; use count_include_pad=True or padding=0")
    return kind(_sizes(part.kernel_size, axes), _sizes(part.stride, axes), padding)


def _adaptive(kind: type[Layer], axes: int) -> Callable[[str, Any, Shape], Layer]:
    """A pooling to a given size is a plain one where that size divides the side."""

    def described(label: str, part: Any, shape: Shape) -> Layer:  # noqa: ANN401
        if getattr(part, "return_indices", False):
            raise ArchitectureError(f"{label} has return_indices; leave it out")
        if len(shape) != 1 + axes:
            raise ArchitectureError(f"{label} pools {axes} axes beside the channels but is given {shape}")
        given = part.output_size
        asked = tuple(given) if isinstance(given, list | tuple) else (given,) * axes
        sizes = [side if size is None else size for size, side in zip(asked, shape[1:], strict=True)]
        if any(size < 1 or side % size for size, side in zip(sizes, shape[1:], strict=True)):
            raise ArchitectureError(
                f"{label} makes {tuple(sizes)} of {shape[1:]}; only sizes that divide these are native, such as 1"
            )
        window = tuple(side // size for size, side in zip(sizes, shape[1:], strict=True))
        return kind(window, window)  # type: ignore[call-arg]

    return described


def _describe_group_norm(label: str, part: nn.GroupNorm, _shape: Shape) -> Layer:
    if part.affine and part.bias is None:
        raise ArchitectureError(f"{label} has factors but no offsets; use bias=True or affine=False")
    return GroupNorm(part.num_groups, part.num_channels, part.affine, part.eps)


def _describe_instance_norm(label: str, part: nn.InstanceNorm1d | nn.InstanceNorm2d, shape: Shape) -> Layer:
    if part.track_running_stats:
        raise ArchitectureError(f"{label} keeps running statistics; use track_running_stats=False")
    axes = 2 if isinstance(part, nn.InstanceNorm2d) else 1
    if len(shape) != 1 + axes:
        raise ArchitectureError(f"{label} takes {axes} axes beside the channels but is given {shape}")
    return GroupNorm(part.num_features, part.num_features, part.affine, part.eps)


def _describe_layer_norm(_label: str, part: nn.LayerNorm, _shape: Shape) -> Layer:
    affine = part.elementwise_affine
    return LayerNorm(tuple(part.normalized_shape), affine, part.bias is not None if affine else True, part.eps)


def _describe_dropout(_label: str, part: nn.Dropout, _shape: Shape) -> Layer | None:
    return Dropout(part.p) if part.training and part.p > 0 else None


def _describe_constants(_label: str, part: Constants, _shape: Shape) -> Layer:
    return Scale(tuple(part.factors.tolist()), tuple(part.offsets.tolist()))


DESCRIBE: dict[type[nn.Module], Callable[..., Layer | None]] = {
    nn.Conv1d: _describe_convolution,
    nn.Conv2d: _describe_convolution,
    nn.Linear: _describe_linear,
    nn.GroupNorm: _describe_group_norm,
    nn.LayerNorm: _describe_layer_norm,
    nn.InstanceNorm1d: _describe_instance_norm,
    nn.InstanceNorm2d: _describe_instance_norm,
    nn.ReLU: lambda *_: Relu(),
    nn.ReLU6: lambda *_: Relu6(),
    nn.LeakyReLU: lambda _label, part, _shape: LeakyRelu(part.negative_slope),
    nn.GELU: lambda _label, part, _shape: Gelu(part.approximate == "tanh"),
    nn.SiLU: lambda *_: Silu(),
    nn.Hardswish: lambda *_: Hardswish(),
    nn.Tanh: lambda *_: Tanh(),
    nn.Sigmoid: lambda *_: Sigmoid(),
    nn.MaxPool1d: _describe_max_pool,
    nn.MaxPool2d: _describe_max_pool,
    nn.AvgPool1d: _describe_average_pool,
    nn.AvgPool2d: _describe_average_pool,
    nn.AdaptiveAvgPool1d: _adaptive(AvgPool1d, 1),
    nn.AdaptiveAvgPool2d: _adaptive(AvgPool2d, 2),
    nn.AdaptiveMaxPool1d: _adaptive(MaxPool1d, 1),
    nn.AdaptiveMaxPool2d: _adaptive(MaxPool2d, 2),
    nn.Flatten: lambda *_: Flatten(),
    nn.Identity: lambda *_: None,
    nn.Dropout: _describe_dropout,
    Constants: _describe_constants,
}

_NAMES = ", ".join(kind.__name__ for kind in DESCRIBE if kind is not Constants)
KNOWN = re.sub(r"(?P<kind>\w+)1d, (?P=kind)2d", r"\g<kind>1d/2d", _NAMES)
"""All of them, as errors list them."""
