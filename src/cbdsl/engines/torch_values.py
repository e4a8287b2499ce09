"""The tensors of a module while it is read: which layer made each, how the module sees it, whose memory it shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from cbdsl.engines.architecture import ArchitectureError, Draft, Flatten, Layer, Shape
from cbdsl.engines.torch_order import Used
from cbdsl.engines.torch_sizes import BATCH, COMPARISONS, COMPUTED, asked_of, holds_batch


@dataclass(eq=False)
class Value:
    """A tensor of the module."""

    number: int  # of the layer that made it
    shape: Shape  # of a sample, as the module sees it
    memory: list[Value] = field(default_factory=list)  # all that may share its numbers, itself among them
    odd: str = ""  # why no layer can read it, where the module sees it in a shape that no layer makes
    changed: str = ""  # the line that changed it by way of another

    def __post_init__(self) -> None:
        self.memory.append(self)


class Tensors:
    """What is known of a module's tensors, sizes and constants, and the layers that made them so far."""

    def __init__(self, whole: nn.Module, module: nn.Module, shape: Shape) -> None:
        """whole: what is traced; module: the part of it whose parameters are flat weights."""
        self.sizes: dict[fx.Node, Any] = {}  # what was computed of shapes alone
        self.whole, self.module = whole, module
        self.draft = Draft(shape)
        self.lines: list[str] = []  # where every layer is written
        self.read_numbers: set[int] = set()
        self.used: list[Used] = []
        self.values: dict[fx.Node, Value] = {}
        self.tables: dict[fx.Node, Tensor] = {}  # parameters and constants

    def add(self, layer: Layer, label: str, line: str, *reads: int) -> int:
        """One layer more; label: what an error calls it, line: where it is written."""
        try:
            number = self.draft.add(layer, *reads)
        except ArchitectureError as error:
            raise ArchitectureError(f"{label}: {error}") from None
        self.read_numbers.update(reads)
        self.lines.append(line)
        return number

    def made(self, node: fx.Node, number: int) -> None:
        """A new tensor."""
        self.values[node] = Value(number, self.draft.shape_of(number))

    def changed(self, node: fx.Node, number: int, value: Value, line: str) -> None:
        """A tensor that was changed in place: whoever reads it from now on gets what this layer made."""
        for other in value.memory:
            if (other.number, other.shape) == (value.number, value.shape) and other is not value:
                other.number = number
            elif other is not value:
                other.changed = line
        value.number = number
        self.values[node] = value

    def seen(self, node: fx.Node, value: Value, shape: Shape, odd: str, line: str, row: bool = False) -> None:
        """The same numbers in another shape; odd: what to say if no layer makes that. row: add a Flatten anyway."""
        if value.changed:
            self.read(value, line)
        number, odd = value.number, odd if shape != self.draft.shape_of(value.number) else ""
        if len(shape) == 1 and (odd or row):
            number, odd = self.add(Flatten(), line, line, number), ""
        self.values[node] = Value(number, shape, value.memory, odd)

    def tensor(self, given: Any, line: str) -> Value:  # noqa: ANN401
        """What a layer made, or the samples."""
        if isinstance(given, fx.Node) and given in self.values:
            return self.values[given]
        self.refuse_parameter(given, line)
        raise ArchitectureError(f"{line}: it is given {given!r:.40} in place of what a layer made; use layers alone")

    def read(self, value: Value, line: str) -> int:
        """The number of the layer that made a tensor, for a layer that takes it as it is."""
        if value.changed:
            raise ArchitectureError(
                f"{line}: what it reads was changed in place in another shape by {value.changed}; write that without "
                "inplace"
            )
        if value.odd:
            raise ArchitectureError(value.odd)
        return value.number

    def refuse_parameter(self, given: Any, line: str) -> None:  # noqa: ANN401
        """Weights are native inside of layers alone."""
        if isinstance(given, fx.Node) and isinstance(self.tables.get(given), nn.Parameter):
            name = str(given.target).removeprefix("module.")
            raise ArchitectureError(
                f"{line}: it uses the weights {name} outside of a layer; use a layer that holds them"
            )

    def value(self, given: Any, line: str) -> Any:  # noqa: ANN401
        """An argument that is no tensor of samples, sizes and constants filled in."""
        if isinstance(given, list | tuple):
            return tuple(self.value(each, line) for each in given)
        if not isinstance(given, fx.Node):
            return given
        self.refuse_parameter(given, line)
        for known in (self.sizes, self.tables):
            if given in known:
                return known[given]
        raise ArchitectureError(f"{line}: it takes a second tensor; only sums and concatenations of tensors are native")

    def is_size(self, node: fx.Node) -> bool:
        """Work out what is asked of a tensor's shape, if that is what is asked."""
        first, *rest = node.args or (None,)
        if isinstance(first, fx.Node) and first not in self.sizes:
            shape: tuple[Any, ...] | None = None
            if first in self.values:
                shape = (BATCH, *self.values[first].shape)
            elif first in self.tables:
                shape = tuple(self.tables[first].shape)
            answer = None if shape is None else asked_of(shape, (node.target, *rest, *node.kwargs.values()))
            if answer is not None:
                self.sizes[node] = answer
            return answer is not None
        if node.target not in COMPUTED or not callable(node.target):
            return False
        try:
            values = [self.value(each, "") for each in node.args]
            if node.target in COMPARISONS and any(holds_batch(each) for each in values):
                return False
            self.sizes[node] = node.target(*values)
        except (ArchitectureError, TypeError, IndexError, ZeroDivisionError):
            return False
        return True
