"""The layer kinds of a network: their settings, shapes and checks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

Shape: TypeAlias = tuple[int, ...]

LARGEST = 2**31 - 1
"""Sizes are 32-bit whole numbers for the kernels."""


class ArchitectureError(ValueError):
    """A network that cannot be described, or whose layers do not fit together."""


def bordered(shape: Shape, padding: Shape) -> int:
    """Numbers of a sample with a border; its rows are a little longer than they look."""
    sides = [side + 2 * pad for side, pad in zip(shape[1:], padding, strict=True)]
    return shape[0] * math.prod(sides[:-1]) * (sides[-1] + 3)


def is_size(value: object, least: int = 1) -> bool:
    """Whether it is a whole number that a kernel can take."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


def check_size(name: str, value: object) -> None:
    """Refuse what is no size."""
    if not is_size(value):
        raise ArchitectureError(f"{name} is {value!r}; give a whole number of at least 1")


def check_sizes(name: str, values: object, least: int, count: int | None) -> None:
    """Refuse what is not so many sizes; count: None for any number of them."""
    if not isinstance(values, tuple) or len(values) != (count or max(len(values), 1)):
        how_many = {1: "(one,)", 2: "a pair of"}.get(count or 0, "a few")
        raise ArchitectureError(f"{name} is {values!r}; give {how_many} whole numbers")
    if not all(is_size(value, least) for value in values):
        raise ArchitectureError(f"{name} is {values!r}; give whole numbers of at least {least}")


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither true nor false."""
    if not isinstance(value, bool):
        raise ArchitectureError(f"{name} is {value!r}; give true or false")


def check_number(name: str, value: object, least: float, most: float) -> None:
    """Refuse what is no number between two others."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ArchitectureError(f"{name} is {value!r}; give a number from {least:g} to {most:g}")


@dataclass(frozen=True)
class Layer:
    """One step of a network. It takes one tensor, unless it says otherwise."""

    def after(self, *given: Shape) -> Shape:
        """Shape of a sample behind it, or an ArchitectureError that says what would fit."""
        if len(given) != 1:
            raise ArchitectureError(f"takes one tensor but is given {len(given)}")
        return self._after(given[0])

    def _after(self, shape: Shape) -> Shape:
        return shape

    def tensors(self) -> dict[str, Shape]:
        """What it learns: names and shapes, in the order of flat weights."""
        return {}

    def multiply_adds(self, result: Shape) -> int:  # noqa: ARG002
        """Of one sample, with this result; layers without a matrix of weights count as none."""
        return 0

    def drawn_inputs(self) -> int:
        """Numbers that one output is made of, where weights are drawn at random; 0 where they are not."""
        return 0

    @property
    def size(self) -> int:
        """Numbers that it learns."""
        return sum(math.prod(shape) for shape in self.tensors().values())


@dataclass(frozen=True)
class Relu(Layer):
    """max(0, x)."""


@dataclass(frozen=True)
class Relu6(Layer):
    """max(0, x), and 6 at most."""


@dataclass(frozen=True)
class LeakyRelu(Layer):
    """x, and slope * x below zero."""

    slope: float = 0.01

    def _after(self, shape: Shape) -> Shape:
        check_number("slope", self.slope, 0.0, 1.0)
        return shape


@dataclass(frozen=True)
class Tanh(Layer):
    """The hyperbolic tangent."""


@dataclass(frozen=True)
class Sigmoid(Layer):
    """1 / (1 + e^-x)."""


@dataclass(frozen=True)
class Silu(Layer):
    """x / (1 + e^-x), also called swish."""


@dataclass(frozen=True)
class Hardswish(Layer):
    """x * min(max(x + 3, 0), 6) / 6."""


@dataclass(frozen=True)
class Gelu(Layer):
    """x times the normal distribution's share below x; by its tanh formula if approximate."""

    approximate: bool = False

    def _after(self, shape: Shape) -> Shape:
        check_flag("approximate", self.approximate)
        return shape


_MOST_READ = 64  # tensors that one Add or Concat takes


@dataclass(frozen=True)
class _Convolution(Layer):
    """What Conv1d and Conv2d share; they differ in how many axes there are beside the channels."""

    inputs: int
    outputs: int
    kernel: Shape
    padding: Shape
    bias: bool
    stride: Shape
    groups: int

    AXES: ClassVar[int]

    def _after(self, shape: Shape) -> Shape:
        for name, least in (("kernel", 1), ("padding", 0), ("stride", 1)):
            check_sizes(name, getattr(self, name), least, self.AXES)
        for name in ("inputs", "outputs", "groups"):
            check_size(name, getattr(self, name))
        check_flag("bias", self.bias)
        if self.inputs % self.groups or self.outputs % self.groups:
            raise ArchitectureError(
                f"its {self.inputs} inputs and {self.outputs} outputs do not split into {self.groups} groups"
            )
        if len(shape) != 1 + self.AXES or shape[0] != self.inputs:
            raise ArchitectureError(f"takes {_WHAT[self.AXES]} of {self.inputs} channels but is given {shape}")
        if bordered(shape, self.padding) > LARGEST:
            raise ArchitectureError(f"its input with padding {self.padding} is more than {LARGEST:,} numbers; pad less")
        sides = [side + 2 * pad - size for side, pad, size in zip(shape[1:], self.padding, self.kernel, strict=True)]
        if min(sides) < 0:
            raise ArchitectureError(
                f"its kernel {self.kernel} does not fit into {shape[1:]}; use padding or a smaller kernel"
            )
        return (self.outputs, *(side // step + 1 for side, step in zip(sides, self.stride, strict=True)))

    def tensors(self) -> dict[str, Shape]:
        """weight (outputs, inputs of a group, *kernel), bias (outputs,)."""
        return _with_bias((self.outputs, self.inputs // self.groups, *self.kernel), self.bias)

    def multiply_adds(self, result: Shape) -> int:
        """One for every tap at every place."""
        return math.prod(result) * self.drawn_inputs()

    def drawn_inputs(self) -> int:
        """Taps of one output."""
        return self.inputs // self.groups * math.prod(self.kernel)


@dataclass(frozen=True)
class Conv2d(_Convolution):
    """A convolution of images; weights (outputs, inputs / groups, *kernel), then (outputs,) if it has a bias."""

    padding: Shape = (0, 0)
    bias: bool = True
    stride: Shape = (1, 1)
    groups: int = 1

    AXES: ClassVar[int] = 2


@dataclass(frozen=True)
class Conv1d(_Convolution):
    """A convolution of series; weights (outputs, inputs / groups, *kernel), then (outputs,) if it has a bias."""

    padding: Shape = (0,)
    bias: bool = True
    stride: Shape = (1,)
    groups: int = 1

    AXES: ClassVar[int] = 1


@dataclass(frozen=True)
class Linear(Layer):
    """A dense layer; weights (outputs, inputs), then (outputs,) if it has a bias."""

    inputs: int
    outputs: int
    bias: bool = True

    def _after(self, shape: Shape) -> Shape:
        check_size("inputs", self.inputs)
        check_size("outputs", self.outputs)
        check_flag("bias", self.bias)
        if shape != (self.inputs,):
            hint = "; put a Flatten before it" if len(shape) > 1 else ""
            raise ArchitectureError(f"takes {self.inputs} inputs but is given {shape}{hint}")
        return (self.outputs,)

    def tensors(self) -> dict[str, Shape]:
        """weight (outputs, inputs), bias (outputs,)."""
        return _with_bias((self.outputs, self.inputs), self.bias)

    def multiply_adds(self, result: Shape) -> int:  # noqa: ARG002
        """One for every weight."""
        return self.inputs * self.outputs

    def drawn_inputs(self) -> int:
        """A row of weights."""
        return self.inputs


@dataclass(frozen=True)
class _Pooling(Layer):
    """What all pooling shares; what is left over at the end of an axis is dropped."""

    kernel: Shape
    stride: Shape
    padding: Shape

    AXES: ClassVar[int]

    def _after(self, shape: Shape) -> Shape:
        for name, least in (("kernel", 1), ("stride", 1), ("padding", 0)):
            check_sizes(name, getattr(self, name), least, self.AXES)
        if any(2 * pad > size for pad, size in zip(self.padding, self.kernel, strict=True)):
            raise ArchitectureError(f"its padding {self.padding} is more than half of its window {self.kernel}")
        if len(shape) != 1 + self.AXES or any(
            size > side + 2 * pad for size, side, pad in zip(self.kernel, shape[1:], self.padding, strict=True)
        ):
            raise ArchitectureError(
                f"its window {self.kernel} does not fit into {shape}; pool {_WHAT[self.AXES]} at least that large"
            )
        sides = zip(shape[1:], self.kernel, self.stride, self.padding, strict=True)
        return (shape[0], *((side + 2 * pad - size) // step + 1 for side, size, step, pad in sides))


@dataclass(frozen=True)
class MaxPool2d(_Pooling):
    """The largest value of every window; the border never wins."""

    padding: Shape = (0, 0)

    AXES: ClassVar[int] = 2


@dataclass(frozen=True)
class MaxPool1d(_Pooling):
    """The largest value of every window of a series; the border never wins."""

    padding: Shape = (0,)

    AXES: ClassVar[int] = 1


@dataclass(frozen=True)
class AvgPool2d(_Pooling):
    """The mean of every window; a border of zeros counts."""

    padding: Shape = (0, 0)

    AXES: ClassVar[int] = 2


@dataclass(frozen=True)
class AvgPool1d(_Pooling):
    """The mean of every window of a series; a border of zeros counts."""

    padding: Shape = (0,)

    AXES: ClassVar[int] = 1


@dataclass(frozen=True)
class Flatten(Layer):
    """All axes become one, channels first."""

    def _after(self, shape: Shape) -> Shape:
        return (math.prod(shape),)


@dataclass(frozen=True)
class GroupNorm(Layer):
    """Every group of channels gets mean 0 and deviation 1; then, if affine, a factor and an offset a channel."""

    groups: int
    channels: int
    affine: bool = True
    epsilon: float = 1e-5

    def _after(self, shape: Shape) -> Shape:
        check_size("groups", self.groups)
        check_size("channels", self.channels)
        check_flag("affine", self.affine)
        check_number("epsilon", self.epsilon, 0.0, 1.0)
        if shape[0] != self.channels:
            raise ArchitectureError(f"takes {self.channels} channels but is given {shape}")
        if self.channels % self.groups:
            raise ArchitectureError(f"its {self.channels} channels do not split into {self.groups} groups")
        return shape

    def tensors(self) -> dict[str, Shape]:
        """weight and bias, (channels,) each."""
        return {"weight": (self.channels,), "bias": (self.channels,)} if self.affine else {}


@dataclass(frozen=True)
class LayerNorm(Layer):
    """All of a sample, or its last axes, get mean 0 and deviation 1; then a factor and an offset for every place."""

    shape: Shape
    affine: bool = True
    bias: bool = True
    epsilon: float = 1e-5

    def _after(self, shape: Shape) -> Shape:
        check_sizes("shape", self.shape, 1, None)
        check_flag("affine", self.affine)
        check_flag("bias", self.bias)
        check_number("epsilon", self.epsilon, 0.0, 1.0)
        if shape[-len(self.shape) :] != self.shape:
            raise ArchitectureError(f"normalises {self.shape} but is given {shape}; give the sizes of its last axes")
        return shape

    def tensors(self) -> dict[str, Shape]:
        """weight and bias, of the shape that is normalised."""
        names = ("weight", "bias") if self.bias else ("weight",)
        return dict.fromkeys(names, self.shape) if self.affine else {}


@dataclass(frozen=True)
class Dropout(Layer):
    """While training, every number is zero with this chance, and the rest grow by as much as is lost."""

    chance: float

    def _after(self, shape: Shape) -> Shape:
        check_number("chance", self.chance, 0.0, 0.999)
        return shape


@dataclass(frozen=True)
class Scale(Layer):
    """x * factors + offsets, constants: one number for all, or one a channel."""

    factors: tuple[float, ...] = (1.0,)
    offsets: tuple[float, ...] = (0.0,)

    def _after(self, shape: Shape) -> Shape:
        for name in ("factors", "offsets"):
            values = getattr(self, name)
            if not isinstance(values, tuple) or len(values) not in {1, shape[0]}:
                raise ArchitectureError(
                    f"{name} are {values!r:.80}; give one number, or one for each of {shape[0]} channels"
                )
            for value in values:
                check_number(name, value, -1e30, 1e30)
        return shape


@dataclass(frozen=True)
class Add(Layer):
    """The sum of tensors of one shape."""

    def after(self, *given: Shape) -> Shape:
        """As they are."""
        _check_several(given)
        if len(set(given)) != 1:
            raise ArchitectureError(f"adds tensors of one shape but is given {_listed(given)}")
        return given[0]


@dataclass(frozen=True)
class Concat(Layer):
    """Tensors side by side: the channels of all of them."""

    def after(self, *given: Shape) -> Shape:
        """As many channels as all have together."""
        _check_several(given)
        if len({(len(shape), shape[1:]) for shape in given}) != 1:
            raise ArchitectureError(f"joins channels of one size but is given {_listed(given)}")
        return (sum(shape[0] for shape in given), *given[0][1:])


LAYERS: dict[str, type[Layer]] = {
    "conv2d": Conv2d,
    "conv1d": Conv1d,
    "linear": Linear,
    "relu": Relu,
    "relu6": Relu6,
    "leaky_relu": LeakyRelu,
    "tanh": Tanh,
    "sigmoid": Sigmoid,
    "silu": Silu,
    "hardswish": Hardswish,
    "gelu": Gelu,
    "max_pool2d": MaxPool2d,
    "max_pool1d": MaxPool1d,
    "avg_pool2d": AvgPool2d,
    "avg_pool1d": AvgPool1d,
    "flatten": Flatten,
    "group_norm": GroupNorm,
    "layer_norm": LayerNorm,
    "dropout": Dropout,
    "scale": Scale,
    "add": Add,
    "concat": Concat,
}
NAMES = {kind: name for name, kind in LAYERS.items()}

_WHAT = {1: "series", 2: "images"}  # what samples with so many axes beside the channels are


def _with_bias(weight: Shape, bias: bool) -> dict[str, Shape]:
    return {"weight": weight, "bias": weight[:1]} if bias else {"weight": weight}


def _check_several(given: tuple[Shape, ...]) -> None:
    if not 2 <= len(given) <= _MOST_READ:
        raise ArchitectureError(f"takes 2 to {_MOST_READ} tensors but is given {len(given)}")


def _listed(shapes: tuple[Shape, ...]) -> str:
    return " and ".join(str(shape) for shape in shapes[:4])
