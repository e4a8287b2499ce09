"""A sequential network as plain data: its layers, their sizes, the shape of one sample. It holds no weights.

A device describes its network with these few dataclasses, as code or as JSON, and never needs torch;
only `from_module` imports it. Whatever an `Architecture` accepts, the native
engine can run: every size is checked when it is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

if TYPE_CHECKING:
    from torch import nn

Pair: TypeAlias = tuple[int, int]
Shape: TypeAlias = tuple[int, ...]

LARGEST = 2**31 - 1
"""Sizes are 32-bit whole numbers for the kernels."""


@dataclass(frozen=True)
class Conv2d:
    """A convolution of stride 1; weights (outputs, inputs, *kernel), then (outputs,) if it has a bias."""

    inputs: int
    outputs: int
    kernel: Pair
    padding: Pair = (0, 0)
    bias: bool = True


@dataclass(frozen=True)
class Relu:
    """max(0, x)."""


@dataclass(frozen=True)
class Tanh:
    """The hyperbolic tangent."""


@dataclass(frozen=True)
class Sigmoid:
    """1 / (1 + e^-x)."""


@dataclass(frozen=True)
class MaxPool2d:
    """The largest value of every window; what is left over at the right and bottom is dropped."""

    kernel: Pair
    stride: Pair


@dataclass(frozen=True)
class AvgPool2d:
    """The mean of every window; what is left over at the right and bottom is dropped."""

    kernel: Pair
    stride: Pair


@dataclass(frozen=True)
class Flatten:
    """Channels, rows and columns become one axis, in this order."""


@dataclass(frozen=True)
class Linear:
    """A dense layer; weights (outputs, inputs), then (outputs,) if it has a bias."""

    inputs: int
    outputs: int
    bias: bool = True


Layer: TypeAlias = Conv2d | Relu | Tanh | Sigmoid | MaxPool2d | AvgPool2d | Flatten | Linear

LAYERS: dict[str, type[Layer]] = {
    "conv2d": Conv2d,
    "relu": Relu,
    "tanh": Tanh,
    "sigmoid": Sigmoid,
    "max_pool2d": MaxPool2d,
    "avg_pool2d": AvgPool2d,
    "flatten": Flatten,
    "linear": Linear,
}
NAMES = {kind: name for name, kind in LAYERS.items()}


class ArchitectureError(ValueError):
    """A network that cannot be described, or whose layers do not fit together."""


@dataclass(frozen=True)
class Architecture:
    """The layers of a classifier, from one sample of `shape` to its logits."""

    shape: Shape
    layers: tuple[Layer, ...]

    FORMAT: ClassVar[int] = 1

    def __post_init__(self) -> None:
        """Check every size once, so that no kernel ever meets a layer that does not fit."""
        if not self.shape or len(self.shape) not in {1, 3} or not all(_is_size(size) for size in self.shape):
            raise ArchitectureError(
                f"shape of a sample is {self.shape!r}; give (features,) or (channels, height, width), all at least 1"
            )
        if not self.layers:
            raise ArchitectureError("the network has no layers; give at least one Linear or Conv2d")
        shapes = self.shapes()
        if len(shapes[-1]) != 1:
            raise ArchitectureError(
                f"the last layer gives {shapes[-1]}, not one row of logits; end with Flatten or Linear"
            )
        if self.size == 0:
            raise ArchitectureError("the network has no parameters, so nothing can be trained; add a Linear or Conv2d")

    def shapes(self) -> list[Shape]:
        """Shape of a sample after every layer."""
        shapes: list[Shape] = []
        shape = self.shape
        for number, layer in enumerate(self.layers):
            try:
                shape = after(layer, shape)
            except ArchitectureError as error:
                name = NAMES.get(type(layer), type(layer).__name__)
                raise ArchitectureError(f"layer {number} ({name}): {error}") from None
            if math.prod(shape) > LARGEST:
                raise ArchitectureError(f"layer {number}: {shape} is more than {LARGEST:,} numbers; use smaller layers")
            shapes.append(shape)
        return shapes

    @property
    def classes(self) -> int:
        """Number of logits."""
        return self.shapes()[-1][0]

    @property
    def size(self) -> int:
        """D, the number of parameters."""
        return sum(_parameters(layer) for layer in self.layers)

    def multiply_adds(self) -> list[int]:
        """Multiply-adds of one sample through every layer; layers without weights count as none."""
        counts = []
        for layer, shape in zip(self.layers, self.shapes(), strict=True):
            match layer:
                case Conv2d(inputs=inputs, kernel=kernel):
                    counts.append(math.prod(shape) * inputs * kernel[0] * kernel[1])
                case Linear(inputs=inputs, outputs=outputs):
                    counts.append(inputs * outputs)
                case _:
                    counts.append(0)
        return counts

    def training_multiply_adds(self) -> int:
        """Multiply-adds of one sample forwards and backwards; the first layer's input needs no gradient."""
        counts = [count for count in self.multiply_adds() if count]
        return 3 * sum(counts) - counts[0]

    def entrance(self) -> int:
        """Numbers of one sample as the first layer reads it: with a border, where that layer is padded."""
        return _with_border(self.layers[0], self.shape)

    def room(self) -> int:
        """Numbers that one sample takes at most in an engine, forwards and backwards, borders among them.

        The network's input is kept in four groups of samples; so are rows, which are there in two orders, with
        gradients. An image between layers is there once with its gradient, and twice more before it is pooled.
        """
        shapes = [self.shape, *self.shapes()]
        total = 7 * math.prod(shapes[-1])
        for number, layer in enumerate(self.layers):
            copies = 7 if len(shapes[number]) == 1 else 2 if number else 5
            total += copies * _with_border(layer, shapes[number]) + 2 * _rounded_up(shapes[number + 1])
        return total

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings: what `json.dumps` takes and `from_dict` reads back."""
        layers = [
            {"kind": NAMES[type(layer)]} | {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(layer).items()}
            for layer in self.layers
        ]
        return {"format": self.FORMAT, "shape": list(self.shape), "layers": layers}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Architecture:
        """Read what `to_dict` wrote; say what is wrong with anything else."""
        if not isinstance(data, Mapping) or set(data) != {"format", "shape", "layers"}:
            raise ArchitectureError("an architecture is a table with exactly the keys format, shape and layers")
        if data["format"] != cls.FORMAT:
            raise ArchitectureError(f"format is {data['format']!r}; this version reads format {cls.FORMAT}")
        if not _is_list(data["shape"]) or not _is_list(data["layers"]):
            raise ArchitectureError("shape and layers must be lists")
        layers = tuple(_layer_from_dict(number, entry) for number, entry in enumerate(data["layers"]))
        return cls(tuple(data["shape"]), layers)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _layer_from_dict(number: int, entry: object) -> Layer:
    if not isinstance(entry, Mapping) or entry.get("kind") not in LAYERS:
        raise ArchitectureError(f"layer {number} is {entry!r}; its kind must be one of {', '.join(LAYERS)}")
    kind = LAYERS[entry["kind"]]
    make: Callable[..., Layer] = kind
    known = {field.name for field in fields(kind)}
    given = {key: tuple(value) if _is_list(value) else value for key, value in entry.items() if key != "kind"}
    if unknown := set(given) - known:
        raise ArchitectureError(
            f"layer {number} ({entry['kind']}): unknown {sorted(unknown)}; known are {sorted(known)}"
        )
    try:
        return make(**given)
    except TypeError as error:
        raise ArchitectureError(f"layer {number} ({entry['kind']}): {error}") from None


def _is_size(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


def _check_sizes(name: str, value: object, least: int = 1) -> None:
    sizes = value if isinstance(value, tuple) else (value,)
    if not all(_is_size(size, least) for size in sizes) or (isinstance(value, tuple) and len(value) != 2):
        raise ArchitectureError(f"{name} is {value!r}; give whole numbers of at least {least}")


def after(layer: Layer, shape: Shape) -> Shape:
    """Shape of a sample behind one layer, or an error that says what would fit."""
    match layer:
        case Conv2d():
            return _after_convolution(layer, shape)
        case MaxPool2d() | AvgPool2d():
            return _after_pool(layer, shape)
        case Flatten():
            return (math.prod(shape),)
        case Linear(inputs=inputs, outputs=outputs, bias=bias):
            _check_sizes("inputs", inputs)
            _check_sizes("outputs", outputs)
            _check_flag(bias)
            if shape != (inputs,):
                hint = "; put a Flatten before it" if len(shape) == 3 else ""
                raise ArchitectureError(f"takes {inputs} inputs but is given {shape}{hint}")
            return (outputs,)
        case Relu() | Tanh() | Sigmoid():
            return shape
    raise ArchitectureError(f"is a {type(layer).__name__}; known layers are {', '.join(LAYERS)}")


def _check_flag(bias: object) -> None:
    if not isinstance(bias, bool):
        raise ArchitectureError(f"bias is {bias!r}; give true or false")


def _after_convolution(layer: Conv2d, shape: Shape) -> Shape:
    _check_sizes("inputs", layer.inputs)
    _check_sizes("outputs", layer.outputs)
    _check_pair("kernel", layer.kernel, 1)
    _check_pair("padding", layer.padding, 0)
    _check_flag(layer.bias)
    if len(shape) != 3 or shape[0] != layer.inputs:
        raise ArchitectureError(f"takes images of {layer.inputs} channels but is given {shape}")
    if _with_border(layer, shape) > LARGEST:
        raise ArchitectureError(f"its input with padding {layer.padding} is more than {LARGEST:,} numbers; pad less")
    height = shape[1] + 2 * layer.padding[0] - layer.kernel[0] + 1
    width = shape[2] + 2 * layer.padding[1] - layer.kernel[1] + 1
    if height < 1 or width < 1:
        raise ArchitectureError(
            f"its kernel {layer.kernel} is larger than the image {shape[1:]}; use padding or a smaller kernel"
        )
    return (layer.outputs, height, width)


def _with_border(layer: Layer, shape: Shape) -> int:
    """Numbers of a sample as a layer reads it; rows of a convolution's input are a little longer than they look."""
    if not isinstance(layer, Conv2d):
        return math.prod(shape)
    height, width = (shape[1 + i] + 2 * layer.padding[i] for i in (0, 1))
    return shape[0] * height * (width + 3)


def _rounded_up(shape: Shape) -> int:
    return math.prod((*shape[:-1], shape[-1] + 3))


def _after_pool(layer: MaxPool2d | AvgPool2d, shape: Shape) -> Shape:
    _check_pair("kernel", layer.kernel, 1)
    _check_pair("stride", layer.stride, 1)
    if len(shape) != 3 or layer.kernel[0] > shape[1] or layer.kernel[1] > shape[2]:
        raise ArchitectureError(f"its window {layer.kernel} does not fit into {shape}; pool images at least that large")
    height, width = ((shape[1 + i] - layer.kernel[i]) // layer.stride[i] + 1 for i in (0, 1))
    return (shape[0], height, width)


def _check_pair(name: str, value: object, least: int) -> None:
    if not isinstance(value, tuple):
        raise ArchitectureError(f"{name} is {value!r}; give a pair of whole numbers")
    _check_sizes(name, value, least)


def _parameters(layer: Layer) -> int:
    match layer:
        case Conv2d(inputs=inputs, outputs=outputs, kernel=kernel, bias=bias):
            return outputs * inputs * kernel[0] * kernel[1] + outputs * bias
        case Linear(inputs=inputs, outputs=outputs, bias=bias):
            return outputs * inputs + outputs * bias
        case _:
            return 0


def from_module(module: nn.Module, shape: Shape) -> Architecture:
    """Describe a torch module that is one layer after the other, however it is written, for samples of `shape`.

    Flat weights of the description are those of the module. An ArchitectureError names the layer or line that has none.
    """
    from cbdsl.engines.torch_tracing import read_module  # noqa: PLC0415  # a device without torch never comes here

    return read_module(module, tuple(shape))
