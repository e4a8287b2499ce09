"""A network as plain data: a graph of layers and the shape of one sample, without weights.

Only `from_module` imports torch. The native engine can run whatever an `Architecture` accepts: all sizes are checked
when it is made. The layers are in `layers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from cbdsl.models import layers as kinds
from cbdsl.models.layers import LARGEST, LAYERS, ArchitectureError, Layer, Shape, count_with_border, is_size
from cbdsl.spec import Task

if TYPE_CHECKING:
    from torch import nn

SAMPLES = -1
"""The number that stands for the samples in `Architecture.reads`."""


def fits_outputs(found: int, wanted: int, task: Task) -> bool:
    """Return whether a network with `found` outputs can be trained; a classifier may have more than classes."""
    return found >= wanted if task == "classification" else found == wanted


def describe_outputs(wanted: int, task: Task) -> str:
    """Describe how many outputs the data asks for."""
    if task == "reconstruction":
        return f"the task is reconstruction, and a sample has {wanted} numbers"
    if task == "regression":
        return f"the task is regression, and the data has {wanted} {'target' if wanted == 1 else 'targets'}"
    return f"the data has {wanted} classes"


@dataclass(frozen=True)
class Architecture:
    """The layers of a classifier, from one sample of `shape` to its logits, the result of the last layer.

    reads: for every layer the numbers of the layers whose results it takes, all before it; SAMPLES (-1) is the
    network's input. If left out, every layer reads the one before it.

    >>> from cbdsl.models.layers import Flatten, Linear, Relu
    >>> network = Architecture((1, 28, 28), (Flatten(), Linear(784, 64), Relu(), Linear(64, 10)))
    >>> network.size, network.classes
    (50890, 10)
    """

    shape: Shape
    layers: tuple[Layer, ...]
    reads: tuple[tuple[int, ...], ...] = ()

    FORMAT: ClassVar[int] = 2

    def __post_init__(self) -> None:
        """Check every size, so that no kernel is given a layer that does not fit."""
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
            raise ArchitectureError(f"{len(self.layers)} layers read {len(self.reads)} times; give one entry per layer")
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
            what = "the samples" if first == SAMPLES else f"the result of {self.label(first)}"
            raise ArchitectureError(f"{what} is never used; leave it out")

    def label(self, number: int) -> str:
        """Return the name of a layer for errors."""
        layer = self.layers[number]
        return f"layer {number} ({layer.name if _is_known(layer) else type(layer).__name__})"

    @property
    def is_chain(self) -> bool:
        """Whether every layer reads the one before it."""
        return self.reads == _in_a_row(len(self.layers))

    def shapes(self) -> list[Shape]:
        """Return the shape of a sample after every layer."""
        shapes: list[Shape] = []
        for number, (layer, read) in enumerate(zip(self.layers, self.reads, strict=True)):
            given = [self.shape if other == SAMPLES else shapes[other] for other in read]
            try:
                if not _is_known(layer):
                    raise ArchitectureError(f"is not a layer; known are {', '.join(LAYERS)}")
                shape = layer.output_shape(*given)
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
        """Return names and shapes of all parameters in the order of flat weights; '0.weight' belongs to layer 0."""
        return {
            f"{number}.{name}": shape
            for number, layer in enumerate(self.layers)
            for name, shape in layer.tensors().items()
        }

    def multiply_adds(self) -> list[int]:
        """Return the multiply-adds of one sample per layer; layers without a matrix of weights count as 0."""
        shapes = dict(enumerate(self.shapes())) | {SAMPLES: self.shape}
        return [layer.multiply_adds(shapes[self.reads[at][0]], shapes[at]) for at, layer in enumerate(self.layers)]

    def training_multiply_adds(self) -> int:
        """Return the multiply-adds of one sample in training; there is no gradient before the first weights."""
        learned = {SAMPLES: False}  # whether there are weights up to here
        total = 0
        for number, count in enumerate(self.multiply_adds()):
            before = any(learned[other] for other in self.reads[number])
            learned[number] = before or self.layers[number].size > 0
            total += (3 if before else 2) * count
        return total

    def entrance(self) -> int:
        """Return how many numbers one sample takes as the first layers read it: with the border of their padding."""
        if len(self.shape) == 1:
            return self.shape[0]
        paddings = [
            layer.padding
            for layer, read in zip(self.layers, self.reads, strict=True)
            if isinstance(layer, kinds.Conv1d | kinds.Conv2d) and SAMPLES in read
        ]
        widest = tuple(max(sides) for sides in zip(*paddings, strict=True))
        return count_with_border(self.shape, widest or (0,) * (len(self.shape) - 1))

    def numbers(self) -> int:
        """Return how many numbers one sample and the results of all layers take."""
        return sum(math.prod(shape) for shape in [self.shape, *self.shapes()])

    def without_dropout(self) -> Architecture:
        """Return the network as it scores: dropout does nothing then."""
        network, numbers = Draft(self.shape), {SAMPLES: SAMPLES}
        for number, (layer, read) in enumerate(zip(self.layers, self.reads, strict=True)):
            sources = [numbers[other] for other in read]
            numbers[number] = sources[0] if isinstance(layer, kinds.Dropout) else network.add(layer, *sources)
        return network.architecture()

    def to_dict(self) -> dict[str, Any]:
        """Return the network as lists, numbers and strings, for JSON and `from_dict`."""
        layers = []
        for number, layer in enumerate(self.layers):
            sizes = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(layer).items()}
            wired = {} if self.reads[number] == (number - 1,) else {"reads": list(self.reads[number])}
            layers.append({"kind": layer.name} | sizes | wired)
        return {"format": self.FORMAT, "shape": list(self.shape), "layers": layers}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Architecture:
        """Read what `to_dict` returned; raise an ArchitectureError with the reason for anything else."""
        if not isinstance(data, Mapping) or set(data) != {"format", "shape", "layers"}:
            raise ArchitectureError("an architecture is a table with exactly the keys format, shape and layers")
        if data["format"] != cls.FORMAT:
            raise ArchitectureError(f"format is {data['format']!r}; this version reads format {cls.FORMAT}")
        if not _is_list(data["shape"]) or not _is_list(data["layers"]):
            raise ArchitectureError("shape and layers must be lists")
        pairs = [_layer_from_dict(number, entry) for number, entry in enumerate(data["layers"])]
        return cls(tuple(data["shape"]), tuple(layer for layer, _ in pairs), tuple(read for _, read in pairs))


class Draft:
    """Builds an architecture layer by layer."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._layers: list[Layer] = []
        self._reads: list[tuple[int, ...]] = []
        self._shapes: dict[int, Shape] = {SAMPLES: shape}

    def add(self, layer: Layer, *reads: int) -> int:
        """Add a layer on the results `reads`, by default the last one; return the number of its result."""
        number = len(self._layers)
        self._reads.append(reads or (number - 1,))
        self._layers.append(layer)
        self._shapes[number] = layer.output_shape(*(self._shapes[other] for other in self._reads[-1]))
        return number

    def shape_of(self, number: int) -> Shape:
        """Return the shape of one result, or of the samples."""
        return self._shapes[number]

    @property
    def last(self) -> int:
        """The number of the last result."""
        return len(self._layers) - 1

    def architecture(self) -> Architecture:
        """Return the architecture, checked."""
        return Architecture(self.shape, tuple(self._layers), tuple(self._reads))


def _is_known(layer: object) -> bool:
    return type(layer) in LAYERS.values()


def _in_a_row(count: int) -> tuple[tuple[int, ...], ...]:
    return tuple((number - 1,) for number in range(count))


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _layer_from_dict(number: int, entry: object) -> tuple[Layer, tuple[int, ...]]:
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
    """Describe a torch module for samples of `shape`.

    The description's flat weights are those of the module. An ArchitectureError names the layer or line that cannot be
    described.
    """
    from cbdsl.models.from_torch import read_module  # noqa: PLC0415 - devices have no torch

    return read_module(module, tuple(shape))
