"""Functions and methods of tensors, by what torch.fx calls them: the layer that does the same, or what they compute."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from cbdsl.engines.architecture import Shape


def _max_pool(
    kind: type[nn.MaxPool1d | nn.MaxPool2d],
    kernel_size: Any,  # noqa: ANN401
    stride: Any = None,  # noqa: ANN401
    padding: Any = 0,  # noqa: ANN401
    dilation: Any = 1,  # noqa: ANN401
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> nn.Module:
    return kind(kernel_size, stride, padding, dilation, return_indices, ceil_mode)


def _dropout(p: float = 0.5, training: bool = True, inplace: bool = False) -> nn.Module:
    return nn.Dropout(p, inplace).train(training)


def _in_place(kind: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:  # noqa: ANN401
    """A layer that changes the tensor it is given; not all kinds have a word for that."""
    part = kind(*args, **kwargs)
    part.inplace = True  # type: ignore[assignment]
    return part


FUNCTIONS: dict[object, Callable[..., nn.Module]] = {
    **dict.fromkeys(("relu", torch.relu, functional.relu), nn.ReLU),
    **dict.fromkeys(("relu_", torch.relu_, functional.relu_), partial(_in_place, nn.ReLU)),
    functional.relu6: nn.ReLU6,
    functional.leaky_relu: nn.LeakyReLU,
    functional.leaky_relu_: partial(_in_place, nn.LeakyReLU),
    functional.gelu: nn.GELU,
    functional.silu: nn.SiLU,
    functional.hardswish: nn.Hardswish,
    **dict.fromkeys(("tanh", torch.tanh), nn.Tanh),
    **dict.fromkeys(("tanh_", torch.tanh_), partial(_in_place, nn.Tanh)),
    **dict.fromkeys(("sigmoid", torch.sigmoid), nn.Sigmoid),
    **dict.fromkeys(("sigmoid_", torch.sigmoid_), partial(_in_place, nn.Sigmoid)),
    **dict.fromkeys((functional.max_pool1d, torch.max_pool1d), partial(_max_pool, nn.MaxPool1d)),
    **dict.fromkeys((functional.max_pool2d, torch.max_pool2d), partial(_max_pool, nn.MaxPool2d)),
    functional.avg_pool1d: nn.AvgPool1d,
    functional.avg_pool2d: nn.AvgPool2d,
    functional.adaptive_avg_pool1d: nn.AdaptiveAvgPool1d,
    functional.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    functional.adaptive_max_pool1d: nn.AdaptiveMaxPool1d,
    functional.adaptive_max_pool2d: nn.AdaptiveMaxPool2d,
    **dict.fromkeys((functional.dropout, torch.dropout), _dropout),
    torch.dropout_: partial(_dropout, inplace=True),
    **dict.fromkeys(("contiguous", "float"), nn.Identity),  # samples are float32
}


def _layer_norm(
    _shape: Shape, normalized_shape: Shape, weight: None = None, bias: None = None, eps: float = 1e-5
) -> nn.Module:
    del weight, bias  # tensors were refused before
    return nn.LayerNorm(normalized_shape, eps, elementwise_affine=False)


def _group_norm(shape: Shape, num_groups: int, weight: None = None, bias: None = None, eps: float = 1e-5) -> nn.Module:
    del weight, bias
    return nn.GroupNorm(num_groups, shape[0], eps, affine=False)


NORMS: dict[object, Callable[..., nn.Module]] = {
    functional.layer_norm: _layer_norm,
    functional.group_norm: _group_norm,
}
"""Those that need the shape of a sample to be a layer."""

ARITHMETIC: dict[object, str] = {
    **dict.fromkeys(("add", torch.add, operator.add), "add"),
    **dict.fromkeys(("add_", operator.iadd), "add_"),
    **dict.fromkeys(("sub", torch.sub, torch.subtract, operator.sub), "sub"),
    **dict.fromkeys(("sub_", operator.isub), "sub_"),
    **dict.fromkeys(("mul", torch.mul, torch.multiply, operator.mul), "mul"),
    **dict.fromkeys(("mul_", operator.imul), "mul_"),
    **dict.fromkeys(("div", torch.div, torch.true_divide, operator.truediv), "div"),
    **dict.fromkeys(("div_", operator.itruediv), "div_"),
    **dict.fromkeys(("neg", torch.neg, operator.neg), "neg"),
}
"""What is computed number by number, of two tensors or of one and constants; one that ends in _ changes the first."""

VIEWS: dict[object, str] = {
    **dict.fromkeys(("view", "reshape", torch.reshape), "reshape"),
    **dict.fromkeys(("flatten", torch.flatten), "flatten"),
    **dict.fromkeys(("squeeze", torch.squeeze), "squeeze"),
    **dict.fromkeys(("unsqueeze", torch.unsqueeze), "unsqueeze"),
}
MEANS: tuple[object, ...] = ("mean", torch.mean)
JOINS: tuple[object, ...] = (torch.cat, torch.concat, torch.concatenate)

_PRODUCT = "products of tensors run on torch"
HINTS = {
    "linear": "use nn.Linear",
    "conv1d": "use nn.Conv1d",
    "conv2d": "use nn.Conv2d",
    "batch_norm": "it mixes the samples of a batch; use nn.GroupNorm",
    "instance_norm": "use nn.InstanceNorm2d",
    "softmax": "the loss is taken of logits; leave it out",
    "log_softmax": "the loss is taken of logits; leave it out",
    **dict.fromkeys(("matmul", "bmm", "mm", "einsum", "scaled_dot_product_attention"), _PRODUCT),
    **dict.fromkeys(("dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"), "use F.dropout"),
    "_assert": "leave it out",
}
"""What to do about a function that is none of these."""
