"""A network as the native library reads it: plain tables of numbers, in the order of plan.hpp."""

from __future__ import annotations

import math

import numpy as np

from cbdsl.engines.architecture import (
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
    Shape,
    Sigmoid,
    Silu,
    Tanh,
)

LAYER_FIELDS = 12
"""Numbers that describe one layer to the library: a code, how many tensors it reads, and up to ten sizes."""


class Table:
    """Layers, who reads whom, numbers that are not whole, and a sample's shape."""

    def __init__(self, network: Architecture) -> None:
        rows: list[tuple[int, ...]] = []
        for layer, read in zip(network.layers, network.reads, strict=True):
            code, *sizes = _codes(layer)
            rows.append((code, len(read), *sizes, *[0] * (LAYER_FIELDS - 2 - len(sizes))))
        self.layers = np.array(rows, np.int32)  # (layers, LAYER_FIELDS)
        self.reads = np.array([other for read in network.reads for other in read], np.int32)
        self.constants = np.array([value for layer in network.layers for value in _numbers(layer)], np.float32)
        self.shape = np.array((*_image(network.shape), len(network.shape)), np.int32)  # and how many axes it has


_ACTIVATIONS: dict[type[Layer], int] = {Relu: 2, Tanh: 3, Sigmoid: 4, Relu6: 9, LeakyRelu: 10, Silu: 11, Hardswish: 12}


def _image(shape: Shape) -> Shape:
    """Shape of rows or series as that of images: (channels, height, width)."""
    return shape if len(shape) == 3 else (shape[0], 1, *shape[1:]) if len(shape) == 2 else (*shape, 1, 1)


def _pair(sizes: Shape, along: int) -> Shape:
    """Sizes of a kernel over one axis as those over two; along: what it is over the axis that is not there."""
    return sizes if len(sizes) == 2 else (along, sizes[0])


def _codes(layer: Layer) -> tuple[int, ...]:  # noqa: PLR0912 - one case a kind
    """One layer as the library reads it; see LayerCode in plan.hpp."""
    if type(layer) in _ACTIVATIONS:
        return (_ACTIVATIONS[type(layer)],)
    match layer:
        case Conv2d() | Conv1d():
            kernel, padding, stride = _pair(layer.kernel, 1), _pair(layer.padding, 0), _pair(layer.stride, 1)
            codes: tuple[int, ...] = (
                1, layer.inputs, layer.outputs, *kernel, *padding, layer.bias, *stride, layer.groups,
            )  # fmt: skip
        case MaxPool2d() | MaxPool1d() | AvgPool2d() | AvgPool1d():
            code = 5 if isinstance(layer, MaxPool2d | MaxPool1d) else 6
            codes = (code, *_pair(layer.kernel, 1), *_pair(layer.stride, 1), *_pair(layer.padding, 0))
        case Flatten():
            codes = (7,)
        case Linear():
            codes = (8, layer.inputs, layer.outputs, layer.bias)
        case Gelu():
            codes = (14 if layer.approximate else 13,)
        case GroupNorm():
            codes = (15, layer.groups, layer.affine, layer.affine)
        case LayerNorm():
            codes = (16, math.prod(layer.shape), layer.affine, layer.bias)
        case Dropout():
            codes = (17,)
        case Scale():
            codes = (18, len(layer.factors), len(layer.offsets))
        case Add():
            codes = (19,)
        case Concat():
            codes = (20,)
        case _:
            raise TypeError(f"{type(layer).__name__} is no layer")
    return codes


def _numbers(layer: Layer) -> tuple[float, ...]:
    """What a layer is described by that is not whole."""
    match layer:
        case LeakyRelu():
            return (layer.slope,)
        case GroupNorm() | LayerNorm():
            return (layer.epsilon,)
        case Dropout():
            return (layer.chance,)
        case Scale():
            return (*layer.factors, *layer.offsets)
    return ()
