"""The layer kinds of a network: their settings, checks, shapes and parameters.

A class describes all that does not depend on a back end; `LAYERS` lists the classes. The native kernel of an activation
is in engines/native/curves.hpp, that of any other kind starts at its `LayerCode` in engines/native/plan.hpp. Each other
back end has one table by class: torch in `to_torch`, ONNX in export/onnx_file.py, C in export/c_source.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

Shape: TypeAlias = tuple[int, ...]

LARGEST = 2**31 - 1
"""The largest size: kernels count with 32-bit integers."""


class ArchitectureError(ValueError):
    """A network that cannot be described, or whose layers do not fit together."""


def count_with_border(shape: Shape, padding: Shape) -> int:
    """Return how many numbers a sample with a border takes. The kernels make its rows a little longer."""
    sides = [side + 2 * pad for side, pad in zip(shape[1:], padding, strict=True)]
    return shape[0] * math.prod(sides[:-1]) * (sides[-1] + 3)


def is_size(value: object, least: int = 1) -> bool:
    """Return whether a value is an integer that a kernel can take."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


def _check_size(name: str, value: object) -> None:
    if not is_size(value):
        raise ArchitectureError(f"{name} is {value!r}; give a whole number of at least 1")


def _check_sizes(name: str, values: object, least: int, count: int | None) -> None:
    """Refuse anything but a tuple of sizes; count: how many, None for any number of them."""
    if not isinstance(values, tuple) or len(values) != (count or max(len(values), 1)):
        how_many = {1: "(one,)", 2: "a pair of"}.get(count or 0, "a few")
        raise ArchitectureError(f"{name} is {values!r}; give {how_many} whole numbers")
    if not all(is_size(value, least) for value in values):
        raise ArchitectureError(f"{name} is {values!r}; give whole numbers of at least {least}")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ArchitectureError(f"{name} is {value!r}; give true or false")


def _check_number(name: str, value: object, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ArchitectureError(f"{name} is {value!r}; give a number from {least:g} to {most:g}")


@dataclass(frozen=True)
class Layer:
    """One step of a network. Unless a class says otherwise, it takes one tensor."""

    name: ClassVar[str]  # in files and errors
    code: ClassVar[int]  # in the table for the kernels: see curves.hpp and plan.hpp
    in_place: ClassVar[bool] = False  # the result may overwrite the input
    by_channel: ClassVar[bool] = False  # channels do not mix, so they can be permuted before instead of after it
    proportional: ClassVar[bool] = False  # f(a x) = a f(x) for a > 0

    def output_shape(self, *given: Shape) -> Shape:
        """Return the shape of its result, or raise an ArchitectureError that says what would fit."""
        if len(given) != 1:
            raise ArchitectureError(f"takes one tensor but is given {len(given)}")
        self._check_settings()
        return self._output_shape(given[0])

    def _check_settings(self) -> None:
        """Refuse settings that are not allowed for any input."""

    def _output_shape(self, shape: Shape) -> Shape:
        return shape

    def tensors(self) -> dict[str, Shape]:
        """Return names and shapes of its parameters, in the order of flat weights."""
        return {}

    def multiply_adds(self, given: Shape, result: Shape) -> int:  # noqa: ARG002
        """Return the multiply-adds for one sample; layers without a matrix of weights count as 0."""
        return 0

    def fan_in(self) -> int:
        """Return the inputs of one output if initial weights are drawn at random, otherwise 0."""
        return 0

    def kernel_sizes(self) -> tuple[int, ...]:
        """Return the code and at most ten integers that describe the layer to the kernels."""
        return (self.code,)

    def kernel_constants(self) -> tuple[float, ...]:
        """Return the floats that describe the layer to the kernels."""
        return ()

    @property
    def size(self) -> int:
        """The number of its parameters."""
        return sum(math.prod(shape) for shape in self.tensors().values())


@dataclass(frozen=True)
class Activation(Layer):
    """A function of every number by itself."""

    in_place = True
    by_channel = True


@dataclass(frozen=True)
class Relu(Activation):
    """max(0, x)."""

    name, code, proportional = "relu", 2, True


@dataclass(frozen=True)
class Relu6(Activation):
    """min(max(0, x), 6)."""

    name, code = "relu6", 9


@dataclass(frozen=True)
class LeakyRelu(Activation):
    """x, and slope * x below zero."""

    slope: float = 0.01

    name, code, proportional = "leaky_relu", 10, True

    def _check_settings(self) -> None:
        _check_number("slope", self.slope, 0.0, 1.0)

    def kernel_constants(self) -> tuple[float, ...]:
        """Return the slope."""
        return (self.slope,)


@dataclass(frozen=True)
class Tanh(Activation):
    """The hyperbolic tangent."""

    name, code = "tanh", 3


@dataclass(frozen=True)
class Sigmoid(Activation):
    """1 / (1 + e^-x)."""

    name, code = "sigmoid", 4


@dataclass(frozen=True)
class Silu(Activation):
    """x / (1 + e^-x), also called swish."""

    name, code = "silu", 11


@dataclass(frozen=True)
class Hardswish(Activation):
    """x * min(max(x + 3, 0), 6) / 6."""

    name, code = "hardswish", 12


@dataclass(frozen=True)
class Softplus(Activation):
    """log(1 + e^x)."""

    name, code = "softplus", 21


@dataclass(frozen=True)
class Gelu(Activation):
    """x times the normal distribution function at x; by its tanh formula if approximate."""

    approximate: bool = False

    name, code = "gelu", 13

    def _check_settings(self) -> None:
        _check_flag("approximate", self.approximate)

    def kernel_sizes(self) -> tuple[int, ...]:
        """Return 13, or 14 for the tanh formula."""
        return (self.code + self.approximate,)


_AXES = {1: "series", 2: "images"}  # samples by the number of their axes beside the channels


def _pair(sizes: Shape, other: int) -> Shape:
    """Return sizes along two axes; other: the size along the height that a series does not have."""
    return sizes if len(sizes) == 2 else (other, *sizes)


@dataclass(frozen=True)
class _Convolution(Layer):
    """A convolution over AXES axes; weights (outputs, inputs / groups, *kernel), then (outputs,) if it has a bias."""

    inputs: int
    outputs: int
    kernel: Shape
    padding: Shape
    bias: bool
    stride: Shape
    groups: int

    code = 1
    AXES: ClassVar[int]

    def _check_settings(self) -> None:
        for name, least in (("kernel", 1), ("padding", 0), ("stride", 1)):
            _check_sizes(name, getattr(self, name), least, self.AXES)
        for name in ("inputs", "outputs", "groups"):
            _check_size(name, getattr(self, name))
        _check_flag("bias", self.bias)
        if self.inputs % self.groups or self.outputs % self.groups:
            raise ArchitectureError(
                f"its {self.inputs} inputs and {self.outputs} outputs do not split into {self.groups} groups"
            )

    def _output_shape(self, shape: Shape) -> Shape:
        if len(shape) != 1 + self.AXES or shape[0] != self.inputs:
            raise ArchitectureError(f"takes {_AXES[self.AXES]} of {self.inputs} channels but is given {shape}")
        if count_with_border(shape, self.padding) > LARGEST:
            raise ArchitectureError(f"its input with padding {self.padding} is more than {LARGEST:,} numbers; pad less")
        sides = [side + 2 * pad - size for side, pad, size in zip(shape[1:], self.padding, self.kernel, strict=True)]
        if min(sides) < 0:
            raise ArchitectureError(
                f"its kernel {self.kernel} does not fit into {shape[1:]}; use padding or a smaller kernel"
            )
        return (self.outputs, *(side // step + 1 for side, step in zip(sides, self.stride, strict=True)))

    def tensors(self) -> dict[str, Shape]:
        """Return weight (outputs, inputs of a group, *kernel) and bias (outputs,)."""
        return _with_bias((self.outputs, self.inputs // self.groups, *self.kernel), self.bias)

    def multiply_adds(self, given: Shape, result: Shape) -> int:  # noqa: ARG002
        """Return one for every tap at every place."""
        return math.prod(result) * self.fan_in()

    def fan_in(self) -> int:
        """Return the taps of one output."""
        return self.inputs // self.groups * math.prod(self.kernel)

    def kernel_sizes(self) -> tuple[int, ...]:
        """Return the code and all settings, those of a series as those of an image."""
        windows = (*_pair(self.kernel, 1), *_pair(self.padding, 0), self.bias, *_pair(self.stride, 1))
        return (self.code, self.inputs, self.outputs, *windows, self.groups)


@dataclass(frozen=True)
class Conv2d(_Convolution):
    """A convolution of images; weights (outputs, inputs / groups, *kernel), then (outputs,) if it has a bias."""

    padding: Shape = (0, 0)
    bias: bool = True
    stride: Shape = (1, 1)
    groups: int = 1

    name, AXES = "conv2d", 2


@dataclass(frozen=True)
class Conv1d(_Convolution):
    """A convolution of series; weights (outputs, inputs / groups, *kernel), then (outputs,) if it has a bias."""

    padding: Shape = (0,)
    bias: bool = True
    stride: Shape = (1,)
    groups: int = 1

    name, AXES = "conv1d", 1


@dataclass(frozen=True)
class Linear(Layer):
    """A dense layer; weights (outputs, inputs), then (outputs,) if it has a bias."""

    inputs: int
    outputs: int
    bias: bool = True

    name, code = "linear", 8

    def _check_settings(self) -> None:
        _check_size("inputs", self.inputs)
        _check_size("outputs", self.outputs)
        _check_flag("bias", self.bias)

    def _output_shape(self, shape: Shape) -> Shape:
        if shape != (self.inputs,):
            hint = "; put a Flatten before it" if len(shape) > 1 else ""
            raise ArchitectureError(f"takes {self.inputs} inputs but is given {shape}{hint}")
        return (self.outputs,)

    def tensors(self) -> dict[str, Shape]:
        """Return weight (outputs, inputs) and bias (outputs,)."""
        return _with_bias((self.outputs, self.inputs), self.bias)

    def multiply_adds(self, given: Shape, result: Shape) -> int:  # noqa: ARG002
        """Return one for every weight."""
        return self.inputs * self.outputs

    def fan_in(self) -> int:
        """Return the length of a row of weights."""
        return self.inputs

    def kernel_sizes(self) -> tuple[int, ...]:
        """Return the code and all settings."""
        return (self.code, self.inputs, self.outputs, self.bias)


@dataclass(frozen=True)
class _Recurrent(Layer):
    """A recurrent layer on a series (steps, inputs), in PyTorch's order of gates; GATES of them, each of `hidden` rows.

    last: whether the result is the state after the last step, (hidden,), or those after all steps, (steps, hidden).
    """

    inputs: int
    hidden: int
    bias: bool = True
    last: bool = True

    GATES: ClassVar[int]

    def _check_settings(self) -> None:
        _check_size("inputs", self.inputs)
        _check_size("hidden", self.hidden)
        _check_flag("bias", self.bias)
        _check_flag("last", self.last)

    def _output_shape(self, shape: Shape) -> Shape:
        if len(shape) != 2 or shape[1] != self.inputs:
            raise ArchitectureError(
                f"takes series (steps, {self.inputs}) but is given {shape}; where the channels come first, put a "
                "Transpose before it"
            )
        states = shape[0] * self.hidden * (5 if self.GATES == 3 else 7)
        if states > LARGEST:
            raise ArchitectureError(
                f"its {shape[0]} steps keep more than {LARGEST:,} numbers; use fewer steps or a smaller layer"
            )
        return (self.hidden,) if self.last else (shape[0], self.hidden)

    def tensors(self) -> dict[str, Shape]:
        """Return the weights of inputs and of states, then their biases, under the names that torch gives them."""
        rows = self.GATES * self.hidden
        weights = {"weight_ih_l0": (rows, self.inputs), "weight_hh_l0": (rows, self.hidden)}
        return weights | (dict.fromkeys(("bias_ih_l0", "bias_hh_l0"), (rows,)) if self.bias else {})

    def multiply_adds(self, given: Shape, result: Shape) -> int:  # noqa: ARG002
        """Return the multiply-adds: one per weight and step."""
        return given[0] * self.GATES * self.hidden * (self.inputs + self.hidden)

    def fan_in(self) -> int:
        """Return the size of a state, which bounds torch's initial weights."""
        return self.hidden

    def kernel_sizes(self) -> tuple[int, ...]:
        """Return the code and all settings."""
        return (self.code, self.inputs, self.hidden, self.bias, self.last)


@dataclass(frozen=True)
class Gru(_Recurrent):
    """Gated recurrent units: r, z = sigmoid(...), n = tanh(W x + r * (U h)), h' = (1 - z) * n + z * h."""

    name, code, GATES = "gru", 22, 3


@dataclass(frozen=True)
class Lstm(_Recurrent):
    """Long short-term memory: i, f, o = sigmoid(...), g = tanh(...), c' = f * c + i * g, h' = o * tanh(c')."""

    name, code, GATES = "lstm", 23, 4


@dataclass(frozen=True)
class Transpose(Layer):
    """A transposition of a series: (channels, steps) becomes (steps, channels)."""

    name, code = "transpose", 24

    def _output_shape(self, shape: Shape) -> Shape:
        if len(shape) != 2:
            raise ArchitectureError(f"takes a series of two axes but is given {shape}")
        return shape[::-1]


@dataclass(frozen=True)
class _Pooling(Layer):
    """A pooling over AXES axes; what does not fill a window at the end of an axis is dropped."""

    kernel: Shape
    stride: Shape
    padding: Shape

    by_channel = True
    proportional = True
    AXES: ClassVar[int]

    def _check_settings(self) -> None:
        for name, least in (("kernel", 1), ("stride", 1), ("padding", 0)):
            _check_sizes(name, getattr(self, name), least, self.AXES)
        if any(2 * pad > size for pad, size in zip(self.padding, self.kernel, strict=True)):
            raise ArchitectureError(f"its padding {self.padding} is more than half of its window {self.kernel}")

    def _output_shape(self, shape: Shape) -> Shape:
        if len(shape) != 1 + self.AXES or any(
            size > side + 2 * pad for size, side, pad in zip(self.kernel, shape[1:], self.padding, strict=True)
        ):
            raise ArchitectureError(
                f"its window {self.kernel} does not fit into {shape}; pool {_AXES[self.AXES]} at least that large"
            )
        sides = zip(shape[1:], self.kernel, self.stride, self.padding, strict=True)
        return (shape[0], *((side + 2 * pad - size) // step + 1 for side, size, step, pad in sides))

    def kernel_sizes(self) -> tuple[int, ...]:
        """Return the code and all settings, those of a series as those of an image."""
        return (self.code, *_pair(self.kernel, 1), *_pair(self.stride, 1), *_pair(self.padding, 0))


@dataclass(frozen=True)
class MaxPool2d(_Pooling):
    """The largest value of every window; padding is never the largest."""

    padding: Shape = (0, 0)

    name, code, AXES = "max_pool2d", 5, 2


@dataclass(frozen=True)
class MaxPool1d(_Pooling):
    """The largest value of every window of a series; padding is never the largest."""

    padding: Shape = (0,)

    name, code, AXES = "max_pool1d", 5, 1


@dataclass(frozen=True)
class AvgPool2d(_Pooling):
    """The mean of every window; padding counts as zeros."""

    padding: Shape = (0, 0)

    name, code, AXES = "avg_pool2d", 6, 2


@dataclass(frozen=True)
class AvgPool1d(_Pooling):
    """The mean of every window of a series; padding counts as zeros."""

    padding: Shape = (0,)

    name, code, AXES = "avg_pool1d", 6, 1


@dataclass(frozen=True)
class Flatten(Layer):
    """All axes become one, channels first."""

    name, code, by_channel, proportional = "flatten", 7, True, True

    def _output_shape(self, shape: Shape) -> Shape:
        return (math.prod(shape),)


@dataclass(frozen=True)
class GroupNorm(Layer):
    """Every group of channels gets mean 0 and deviation 1; then, if affine, a factor and an offset per channel."""

    groups: int
    channels: int
    affine: bool = True
    epsilon: float = 1e-5

    name, code, in_place = "group_norm", 15, True

    def _check_settings(self) -> None:
        _check_size("groups", self.groups)
        _check_size("channels", self.channels)
        _check_flag("affine", self.affine)
        _check_number("epsilon", self.epsilon, 0.0, 1.0)

    def _output_shape(self, shape: Shape) -> Shape:
        if shape[0] != self.channels:
            raise ArchitectureError(f"takes {self.channels} channels but is given {shape}")
        if self.channels % self.groups:
            raise ArchitectureError(f"its {self.channels} channels do not split into {self.groups} groups")
        return shape

    def tensors(self) -> dict[str, Shape]:
        """Return weight and bias, (channels,) each."""
        return {"weight": (self.channels,), "bias": (self.channels,)} if self.affine else {}

    def kernel_sizes(self) -> tuple[int, ...]:
        """Return the code, the groups, and whether there are factors and offsets."""
        return (self.code, self.groups, self.affine, self.affine)

    def kernel_constants(self) -> tuple[float, ...]:
        """Return epsilon."""
        return (self.epsilon,)


@dataclass(frozen=True)
class LayerNorm(Layer):
    """All of a sample, or its last axes, get mean 0 and deviation 1; then a factor and an offset for every place."""

    shape: Shape
    affine: bool = True
    bias: bool = True
    epsilon: float = 1e-5

    name, code, in_place = "layer_norm", 16, True

    def _check_settings(self) -> None:
        _check_sizes("shape", self.shape, 1, None)
        _check_flag("affine", self.affine)
        _check_flag("bias", self.bias)
        _check_number("epsilon", self.epsilon, 0.0, 1.0)

    def _output_shape(self, shape: Shape) -> Shape:
        if shape[-len(self.shape) :] != self.shape:
            raise ArchitectureError(f"normalises {self.shape} but is given {shape}; give the sizes of its last axes")
        return shape

    def tensors(self) -> dict[str, Shape]:
        """Return weight and bias, of the shape that is normalised."""
        names = ("weight", "bias") if self.bias else ("weight",)
        return dict.fromkeys(names, self.shape) if self.affine else {}

    def kernel_sizes(self) -> tuple[int, ...]:
        """Return the code, the numbers that share a mean, and whether there are factors and offsets."""
        return (self.code, math.prod(self.shape), self.affine, self.bias)

    def kernel_constants(self) -> tuple[float, ...]:
        """Return epsilon."""
        return (self.epsilon,)


@dataclass(frozen=True)
class Dropout(Layer):
    """In training every number becomes zero with this chance, and the others are scaled up to the same mean."""

    chance: float

    name, code, by_channel, proportional = "dropout", 17, True, True

    def _check_settings(self) -> None:
        _check_number("chance", self.chance, 0.0, 0.999)

    def kernel_constants(self) -> tuple[float, ...]:
        """Return the chance."""
        return (self.chance,)


@dataclass(frozen=True)
class Scale(Layer):
    """x * factors + offsets with constants: one number for all channels, or one per channel."""

    factors: tuple[float, ...] = (1.0,)
    offsets: tuple[float, ...] = (0.0,)

    name, code, in_place = "scale", 18, True

    def _output_shape(self, shape: Shape) -> Shape:
        for name in ("factors", "offsets"):
            values = getattr(self, name)
            if not isinstance(values, tuple) or len(values) not in {1, shape[0]}:
                raise ArchitectureError(
                    f"{name} are {values!r:.80}; give one number, or one for each of {shape[0]} channels"
                )
            for value in values:
                _check_number(name, value, -1e30, 1e30)
        return shape

    def kernel_sizes(self) -> tuple[int, ...]:
        """Return the code and how many constants there are."""
        return (self.code, len(self.factors), len(self.offsets))

    def kernel_constants(self) -> tuple[float, ...]:
        """Return factors and offsets."""
        return (*self.factors, *self.offsets)


_MOST_READ = 64  # tensors that one Add or Concat takes


@dataclass(frozen=True)
class Add(Layer):
    """The sum of tensors of one shape."""

    name, code, in_place = "add", 19, True

    def output_shape(self, *given: Shape) -> Shape:
        """Return the shape of all of them."""
        _check_several(given)
        if len(set(given)) != 1:
            raise ArchitectureError(f"adds tensors of one shape but is given {_format_shapes(given)}")
        return given[0]


@dataclass(frozen=True)
class Concat(Layer):
    """The channels of several tensors, one after the other."""

    name, code = "concat", 20

    def output_shape(self, *given: Shape) -> Shape:
        """Return the common size with the channels of all tensors."""
        _check_several(given)
        if len({(len(shape), shape[1:]) for shape in given}) != 1:
            raise ArchitectureError(f"joins channels of one size but is given {_format_shapes(given)}")
        return (sum(shape[0] for shape in given), *given[0][1:])


LAYERS: dict[str, type[Layer]] = {
    kind.name: kind
    for kind in (
        Conv2d, Conv1d, Linear, Relu, Relu6, LeakyRelu, Tanh, Sigmoid, Silu, Hardswish, Softplus, Gelu, MaxPool2d,
        MaxPool1d, AvgPool2d, AvgPool1d, Flatten, GroupNorm, LayerNorm, Dropout, Scale, Add, Concat, Gru,
        Lstm, Transpose,
    )
}  # fmt: skip
"""All layer kinds by name."""


def _with_bias(weight: Shape, bias: bool) -> dict[str, Shape]:
    return {"weight": weight, "bias": weight[:1]} if bias else {"weight": weight}


def _check_several(given: tuple[Shape, ...]) -> None:
    if not 2 <= len(given) <= _MOST_READ:
        raise ArchitectureError(f"takes 2 to {_MOST_READ} tensors but is given {len(given)}")


def _format_shapes(shapes: tuple[Shape, ...]) -> str:
    return " and ".join(str(shape) for shape in shapes[:4])
