"""A network as plain data: a graph of layers, and the shape of one sample. It holds no weights and no code.

A device describes its network with these few dataclasses, as code or as JSON, and never needs torch; only
`from_module` imports it. Whatever an `Architecture` accepts, the native engine can run: every size is checked when it
is made. The layers themselves are in `layers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from cbdsl.models.layers import (
    LARGEST,
    LAYERS,
    NAMES,
    Add,
    ArchitectureError,
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
    bordered,
    is_size,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "LARGEST", "LAYERS", "NAMES", "SAMPLES", "Add", "Architecture", "ArchitectureError", "AvgPool1d", "AvgPool2d",
    "Concat", "Conv1d", "Conv2d", "Draft", "Dropout", "Flatten", "Gelu", "GroupNorm", "Hardswish", "Layer", "LayerNorm",
    "LeakyRelu", "Linear", "MaxPool1d", "MaxPool2d", "Relu", "Relu6", "Scale", "Shape", "Sigmoid", "Silu",
    "Tanh", "from_module",
]  # fmt: skip

SAMPLES = -1
"""What stands for the samples where a layer says which layers it reads."""


@dataclass(frozen=True)
class Architecture:
    """The layers of a classifier, from one sample of `shape` to its logits, which are what the last layer makes.

    reads: for every layer the numbers of the layers whose results it takes, SAMPLES for the network's own input; all
    come before it. Left out, every layer reads the one before it.
    """

    shape: Shape
    layers: tuple[Layer, ...]
    reads: tuple[tuple[int, ...], ...] = ()

    FORMAT: ClassVar[int] = 2

    def __post_init__(self) -> None:
        """Check every size once, so that no kernel ever meets a layer that does not fit."""
        if not 1 <= len(self.shape) <= 3 or not all(is_size(size) for size in self.shape):
            raise ArchitectureError(
                f"shape of a sample is {self.shape!r}; give (features,), (channels, length) or (channels, height, "
                "width), all at least 1"
            )
        if not self.layers:
            raise ArchitectureError("the network has no layers; give at least one Linear or Conv2d")
        if not self.reads:
            object.__setattr__(self, "reads", _in_a_row(len(self.layers)))
        self._check_reads()
        shapes = self.shapes()
        if len(shapes[-1]) != 1:
            raise ArchitectureError(
                f"the last layer gives {shapes[-1]}, not one row of logits; end with Flatten or Linear"
            )
        if self.size == 0:
            raise ArchitectureError("the network has no parameters, so nothing can be trained; add a Linear or Conv2d")

    def _check_reads(self) -> None:
        if len(self.reads) != len(self.layers):
            raise ArchitectureError(f"{len(self.layers)} layers read {len(self.reads)} times; give one entry a layer")
        for number, read in enumerate(self.reads):
            for other in read:
                if not is_size(other, SAMPLES) or other >= number:
                    raise ArchitectureError(
                        f"{self.label(number)} reads layer {other!r:.40}; it may read those before it, or {SAMPLES}, "
                        "the samples: a network runs in one direction"
                    )
        unread = set(range(SAMPLES, len(self.layers) - 1)) - {other for read in self.reads for other in read}
        if unread:
            first = min(unread)
            what = "what the samples hold" if first == SAMPLES else f"what {self.label(first)} makes"
            raise ArchitectureError(f"{what} is never used; leave it out")

    def label(self, number: int) -> str:
        """A layer as errors call it."""
        kind = type(self.layers[number])
        return f"layer {number} ({NAMES.get(kind, kind.__name__)})"

    @property
    def is_chain(self) -> bool:
        """Whether every layer reads the one before it."""
        return self.reads == _in_a_row(len(self.layers))

    def shapes(self) -> list[Shape]:
        """Shape of a sample after every layer."""
        shapes: list[Shape] = []
        for number, (layer, read) in enumerate(zip(self.layers, self.reads, strict=True)):
            given = [self.shape if other == SAMPLES else shapes[other] for other in read]
            try:
                if type(layer) not in NAMES:
                    raise ArchitectureError(f"is no layer; known are {', '.join(LAYERS)}")
                shape = layer.after(*given)
            except ArchitectureError as error:
                raise ArchitectureError(f"{self.label(number)}: {error}") from None
            if math.prod(shape) > LARGEST:
                raise ArchitectureError(
                    f"{self.label(number)}: {shape} is more than {LARGEST:,} numbers; use smaller layers"
                )
            shapes.append(shape)
        return shapes

    @property
    def classes(self) -> int:
        """Number of logits."""
        return self.shapes()[-1][0]

    @property
    def size(self) -> int:
        """D, the number of parameters."""
        return sum(layer.size for layer in self.layers)

    def tensors(self) -> dict[str, Shape]:
        """Names and shapes of all parameters in the order of flat weights: '0.weight' are the weights of layer 0."""
        return {
            f"{number}.{name}": shape
            for number, layer in enumerate(self.layers)
            for name, shape in layer.tensors().items()
        }

    def multiply_adds(self) -> list[int]:
        """Multiply-adds of one sample through every layer; layers without a matrix of weights count as none."""
        return [layer.multiply_adds(shape) for layer, shape in zip(self.layers, self.shapes(), strict=True)]

    def training_multiply_adds(self) -> int:
        """Multiply-adds of one sample forwards and backwards; before the first weights no gradient is needed."""
        learned = {SAMPLES: False}  # whether there are weights up to here
        total = 0
        for number, count in enumerate(self.multiply_adds()):
            before = any(learned[other] for other in self.reads[number])
            learned[number] = before or self.layers[number].size > 0
            total += (3 if before else 2) * count
        return total

    def entrance(self) -> int:
        """Numbers of one sample as the first layers read it: with a border, where they are padded."""
        return (
            bordered(self.shape, self._border() or (0,) * (len(self.shape) - 1))
            if len(self.shape) > 1
            else self.shape[0]
        )

    def numbers(self) -> int:
        """Numbers that one sample and all results of its layers are."""
        return sum(math.prod(shape) for shape in [self.shape, *self.shapes()])

    def _border(self) -> Shape:
        """The widest padding among the convolutions that read the samples."""
        paddings = [
            layer.padding
            for layer, read in zip(self.layers, self.reads, strict=True)
            if isinstance(layer, Conv1d | Conv2d) and SAMPLES in read
        ]
        return tuple(max(sides) for sides in zip(*paddings, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings: what `json.dumps` takes and `from_dict` reads back."""
        layers = []
        for number, layer in enumerate(self.layers):
            sizes = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(layer).items()}
            wired = {} if self.reads[number] == (number - 1,) else {"reads": list(self.reads[number])}
            layers.append({"kind": NAMES[type(layer)]} | sizes | wired)
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
        pairs = [_layer_from_dict(number, entry) for number, entry in enumerate(data["layers"])]
        return cls(tuple(data["shape"]), tuple(layer for layer, _ in pairs), tuple(read for _, read in pairs))


class Draft:
    """An architecture in the making: layer after layer, each on the results of those it names."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._layers: list[Layer] = []
        self._reads: list[tuple[int, ...]] = []
        self._shapes: dict[int, Shape] = {SAMPLES: shape}

    def add(self, layer: Layer, *reads: int) -> int:
        """One layer more, on what was made last unless told otherwise; the number of its result."""
        number = len(self._layers)
        self._reads.append(reads or (number - 1,))
        self._layers.append(layer)
        self._shapes[number] = layer.after(*(self._shapes[other] for other in self._reads[-1]))
        return number

    def shape_of(self, number: int) -> Shape:
        """Shape of one result, or of the samples."""
        return self._shapes[number]

    @property
    def last(self) -> int:
        """Number of what was made last."""
        return len(self._layers) - 1

    def architecture(self) -> Architecture:
        """All of it, checked."""
        return Architecture(self.shape, tuple(self._layers), tuple(self._reads))


def _in_a_row(count: int) -> tuple[tuple[int, ...], ...]:
    return tuple((number - 1,) for number in range(count))


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _layer_from_dict(number: int, entry: object) -> tuple[Layer, tuple[int, ...]]:
    """One layer, and what it reads."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("kind"), str) or entry["kind"] not in LAYERS:
        raise ArchitectureError(f"layer {number} is {entry!r:.200}; its kind must be one of {', '.join(LAYERS)}")
    kind = LAYERS[entry["kind"]]
    known = {field.name for field in fields(kind)}
    given = {key: tuple(value) if _is_list(value) else value for key, value in entry.items() if key != "kind"}
    reads = given.pop("reads", (number - 1,))
    if not isinstance(reads, tuple):
        raise ArchitectureError(f"layer {number} ({entry['kind']}): reads is {reads!r:.80}; give a list of layers")
    if unknown := set(given) - known:
        raise ArchitectureError(
            f"layer {number} ({entry['kind']}): unknown {sorted(unknown)}; known are {sorted(known)} and reads"
        )
    try:
        return kind(**given), reads
    except TypeError as error:
        raise ArchitectureError(f"layer {number} ({entry['kind']}): {error}") from None


def from_module(module: nn.Module, shape: Shape) -> Architecture:
    """Describe a torch module, however it is written, for samples of `shape`.

    Flat weights of the description are those of the module. An ArchitectureError names the layer or line that has none.
    """
    from cbdsl.models.from_torch import read_module  # noqa: PLC0415  # a device without torch never comes here

    return read_module(module, tuple(shape))
