"""One step of a network as calls of the functions in `c_helpers`, and the constants that they are given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cbdsl.engines.architecture import (
    Add,
    AvgPool1d,
    AvgPool2d,
    Concat,
    Conv1d,
    Conv2d,
    Flatten,
    Gelu,
    GroupNorm,
    Hardswish,
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
from cbdsl.export.int8 import Rounded
from cbdsl.export.steps import Step

_CURVES = {Relu: "relu", Relu6: "relu6", Tanh: "tanh_", Sigmoid: "sigmoid", Silu: "silu", Hardswish: "hardswish"}


@dataclass
class Code:
    """Calls, and the arrays that they name."""

    rounded: dict[int, Rounded]  # weights as whole numbers, by step; empty: all are floats
    calls: list[str] = field(default_factory=list)
    arrays: dict[str, NDArray[np.float32] | NDArray[np.int8]] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)

    def call(self, function: str, *arguments: object) -> None:
        """One call more."""
        self.called.add(function)
        self.calls.append(f"    {function}({', '.join(map(str, arguments))});")

    def constant(self, name: str, values: NDArray[np.float32] | NDArray[np.int8] | None) -> str:
        """The name of an array in the file; 0 where there is none."""
        if values is None:
            return "0"
        self.arrays[name] = values.reshape(-1)
        return name

    def weights(self, step: Step) -> tuple[str, ...]:
        """The weights of a convolution or a dense layer, the factors of whole numbers, the bias."""
        bias = self.constant(f"bias{step.number}", step.tensors.get("bias"))
        found = self.rounded.get(step.number)
        if found is None:
            return self.constant(f"weight{step.number}", step.tensors["weight"]), bias
        scales = self.constant(f"scale{step.number}", found.scales)
        return self.constant(f"weight{step.number}", found.numbers), scales, bias

    def step(self, step: Step, sources: Sequence[str], target: str) -> None:
        """The calls of one step. sources, target: where it reads and writes."""
        match step.layer:
            case Conv1d() | Conv2d():
                sizes = _size(step.given[0]), target, _size(step.shape), _window(step.layer)
                self.call("convolve", sources[0], *sizes, step.layer.groups, *self.weights(step))
            case Linear():
                self.call("dense", sources[0], step.layer.inputs, target, step.layer.outputs, *self.weights(step))
            case MaxPool1d() | MaxPool2d():
                sizes = _size(step.given[0]), target, _size(step.shape), _window(step.layer)
                self.call("max_pool", sources[0], *sizes)
            case AvgPool1d() | AvgPool2d():
                sizes = _size(step.given[0]), target, _size(step.shape), _window(step.layer)
                self.call("avg_pool", sources[0], *sizes)
            case GroupNorm() | LayerNorm() | Scale():
                self._norm(step, sources[0], target)
            case Add():
                self._add(sources, target, step.count)
            case Concat():
                self._join(step, sources, target)
            case Flatten():
                if sources[0] != target:
                    self.call("copy", sources[0], target, step.count)
            case LeakyRelu():
                self.call("leaky_relu", sources[0], target, step.count, number(step.layer.slope))
            case Gelu():
                self.call("gelu_by_tanh" if step.layer.approximate else "gelu", sources[0], target, step.count)
            case _:
                self.call(_CURVES[type(step.layer)], sources[0], target, step.count)

    def _norm(self, step: Step, source: str, target: str) -> None:
        """Norms, then a factor and an offset for each channel or place; of a `Scale` these alone."""
        layer, places = step.layer, math.prod(step.shape[1:])
        factors, offsets = step.tensors.get("weight"), step.tensors.get("bias")
        times, channels = 1, step.shape[0]
        if isinstance(layer, Scale):
            length = max(len(layer.factors), len(layer.offsets))
            factors, offsets = (
                np.resize(np.array(values, np.float32), length) for values in (layer.factors, layer.offsets)
            )
            channels, places = length, step.count // length
        elif isinstance(layer, GroupNorm):
            count = step.count // layer.groups
            self.call("normalise", source, target, layer.groups, count, number(layer.epsilon))
            source = target
        elif isinstance(layer, LayerNorm):
            channels, places = math.prod(layer.shape), 1
            times = step.count // channels
            self.call("normalise", source, target, times, channels, number(layer.epsilon))
            source = target
        if factors is not None:
            names = self.constant(f"factor{step.number}", factors), self.constant(f"offset{step.number}", offsets)
            self.call("stretch", source, target, times, channels, places, *names)

    def _add(self, sources: Sequence[str], target: str, count: int) -> None:
        """One after the other, beginning with the one that is overwritten, if any is."""
        first, second, *others = sorted(sources, key=lambda source: source != target)
        self.call("add", first, second, target, count)
        for other in others:
            self.call("add", target, other, target, count)

    def _join(self, step: Step, sources: Sequence[str], target: str) -> None:
        start = 0
        for source, shape in zip(sources, step.given, strict=True):
            self.call("copy", source, f"{target} + {start}", math.prod(shape))
            start += math.prod(shape)


def number(value: float) -> str:
    """A float as C writes it, to the bit."""
    text = f"{np.float32(value):.9g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


def _image(shape: Shape) -> Shape:
    """(channels, height, width) of a series or an image."""
    return shape if len(shape) == 3 else (shape[0], 1, shape[1])


def _size(shape: Shape) -> str:
    return f"(Size){{{', '.join(map(str, _image(shape)))}}}"


def _window(layer: Conv1d | Conv2d | MaxPool1d | MaxPool2d | AvgPool1d | AvgPool2d) -> str:
    kernel, stride, padding = layer.kernel, layer.stride, layer.padding
    if len(kernel) == 1:
        kernel, stride, padding = (1, *kernel), (1, *stride), (0, *padding)
    return f"(Window){{{', '.join(map(str, (*kernel, *stride, *padding)))}}}"
