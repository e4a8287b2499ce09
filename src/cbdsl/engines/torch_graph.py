"""The operations of a traced module, followed one by one into a graph of described layers.

Layers and functions that the description knows become layers, sizes are computed, and anything else is an error that
names the line or the layer and, where there is a way, what would make it native. Tensors that share memory are known to
do so: what changes one in place is seen by whoever reads it later.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, fx, nn

from cbdsl.engines.architecture import (
    SAMPLES,
    Add,
    Architecture,
    ArchitectureError,
    AvgPool1d,
    AvgPool2d,
    Concat,
    Dropout,
    Layer,
    Scale,
)
from cbdsl.engines.torch_constants import scale
from cbdsl.engines.torch_functions import ARITHMETIC, FUNCTIONS, HINTS, JOINS, MEANS, NORMS, VIEWS
from cbdsl.engines.torch_layers import DESCRIBE, KNOWN, describe
from cbdsl.engines.torch_modules import Joined, Sum
from cbdsl.engines.torch_order import Used, in_order_of_definition
from cbdsl.engines.torch_sizes import BATCH, COMPARISONS, VIEWED, averaged
from cbdsl.engines.torch_values import Tensors, Value

_SEVERAL: dict[type[nn.Module], type[Layer]] = {Sum: Add, Joined: Concat}


class Graph(Tensors):
    """What was read of a module so far."""

    @staticmethod
    def is_layer(module: nn.Module) -> bool:
        """Whether it is not looked into."""
        return isinstance(module, (*DESCRIBE, *_SEVERAL))

    def architecture(self) -> tuple[Architecture, bool]:
        """All of it, layers in the order of flat weights; and whether that is the order of their use."""
        as_used = self.draft.architecture()
        ordered = in_order_of_definition(as_used, self.used, self.module)
        return ordered, ordered is as_used

    def follow(self, node: fx.Node, line: str) -> None:
        """One operation more; line: where it is written."""
        match node.op:
            case "placeholder":
                self.values[node] = Value(SAMPLES, self.draft.shape)
            case "get_attr":
                self.tables[node] = _table(self.whole, str(node.target))
            case "call_module":
                self._call_layer(node, line)
            case "call_function" | "call_method":
                if not self.is_size(node):
                    self._call_function(node, line)
            case _:
                self._end(node.args[0], line)

    def _call_layer(self, node: fx.Node, line: str) -> None:
        name = str(node.target).removeprefix("module").removeprefix(".")
        part = self.module.get_submodule(name)
        label = f"{f'layer {name}' if name else 'the module'} ({type(part).__name__})"
        given = [*node.args, *node.kwargs.values()]
        if type(part) in _SEVERAL:
            reads = [self.read(self.tensor(each, line), line) for each in given]
            self.made(node, self.add(_SEVERAL[type(part)](), label, line, *reads))
            return
        if type(part) not in DESCRIBE:
            describe(label, part, ())  # it says why not
        if len(given) != 1:
            raise ArchitectureError(f"{label} is given more than one tensor ({line})")
        value = self.tensor(given[0], line)
        for parameter in part.parameters(recurse=False):
            if sharing := [one.label for one in self.used if one.parameter is parameter]:
                again = f"is used twice ({line})" if sharing[0] == label else f"shares its weights with {sharing[0]}"
                raise ArchitectureError(f"{label} {again}; give every layer weights of its own")
            if not parameter.requires_grad:
                raise ArchitectureError(f"{label} has frozen weights; native training moves all weights")
            self.used.append(Used(label, parameter, len(self.lines)))
        if isinstance(part, nn.Flatten):
            self._view(node, "flatten", value, label, part.start_dim, part.end_dim)
        else:
            self._apply(node, part, value, label, line)

    def _apply(self, node: fx.Node, part: nn.Module, value: Value, label: str, line: str) -> None:
        layer = describe(label, part, value.shape)
        if layer is None:
            self.values[node] = value
            return
        if isinstance(layer, Dropout) and not self.module.training:
            raise ArchitectureError(f"{label} drops numbers while it is scored, too; give it training=self.training")
        number = self.add(layer, label, line, self.read(value, line))
        if getattr(part, "inplace", False):
            self.changed(node, number, value, line)
        else:
            self.made(node, number)

    def _call_function(self, node: fx.Node, line: str) -> None:
        target = node.target
        if target in ARITHMETIC:
            self._compute(node, ARITHMETIC[target], line)
            return
        if target in JOINS:
            self._join(node, line)
            return
        if target not in FUNCTIONS and target not in NORMS and target not in VIEWS and target not in MEANS:
            raise ArchitectureError(f"{line}: {_unknown(node)}")
        first, *rest = (*([node.kwargs["input"]] if "input" in node.kwargs else ()), *node.args) or (None,)
        value = self.tensor(first, line)
        given = [self.value(each, line) for each in rest]
        named = {key: self.value(each, line) for key, each in node.kwargs.items() if key != "input"}
        try:
            if target in VIEWS:
                self._view(node, VIEWS[target], value, line, *given, **named)
            elif target in MEANS:
                self._mean(node, value, line, *given, **named)
            else:
                shape = [value.shape] if target in NORMS else []
                make = NORMS[target] if target in NORMS else FUNCTIONS[target]
                self._apply(node, make(*shape, *given, **named), value, line, line)
        except ArchitectureError:
            raise
        except (TypeError, ValueError) as error:
            raise ArchitectureError(f"{line}: {error}") from error

    def _end(self, output: Any, line: str) -> None:  # noqa: ANN401
        if not isinstance(output, fx.Node):
            count = f"{len(output)} outputs" if isinstance(output, list | tuple | dict) else f"{output!r}"
            raise ArchitectureError(f"its forward gives {count}, not one row of logits")
        last = self.read(self.tensor(output, line), line)
        for number, made in enumerate(self.lines):
            if number != last and number not in self.read_numbers:
                raise ArchitectureError(f"what {made} makes is never used; leave it out")

    def _compute(self, node: fx.Node, name: str, line: str) -> None:
        """Arithmetic of two tensors, or of one and constants."""
        operation, changes = name.removesuffix("_"), name.endswith("_")
        named = dict(node.kwargs)
        given = [*node.args, *(named.pop(key) for key in ("input", "other") if key in named)]
        if named.pop("alpha", 1) != 1 or named:
            raise ArchitectureError(f"{line}: {operation} with {', '.join(node.kwargs)} is not known; write it out")
        for each in given:
            self.refuse_parameter(each, line)
        tensors = [self.values[each] for each in given if isinstance(each, fx.Node) and each in self.values]
        if operation == "neg":
            number: int | None = self.add(Scale((-1.0,)), line, line, *(self.read(each, line) for each in tensors))
        elif len(tensors) == 2:
            number = self._combine(operation, tensors, line)
        else:
            number = self._scale(operation, given, line)
        if number is None:
            raise ArchitectureError(
                f"{line}: {operation} is not known there; tensors are added to and subtracted from each other, and "
                "multiplied or divided by constants alone"
            )
        if changes and given[0] not in self.values:
            raise ArchitectureError(f"{line}: it changes a constant; compute a new tensor")
        if changes:
            self.changed(node, number, tensors[0], line)
        else:
            self.made(node, number)

    def _combine(self, operation: str, tensors: list[Value], line: str) -> int | None:
        first, second = (self.read(each, line) for each in tensors)
        if operation == "sub":
            second = self.add(Scale((-1.0,)), line, line, second)
        return self.add(Add(), line, line, first, second) if operation in {"add", "sub"} else None

    def _scale(self, operation: str, given: list[Any], line: str) -> int | None:
        place = next(
            (place for place, each in enumerate(given) if isinstance(each, fx.Node) and each in self.values), 0
        )
        value = self.tensor(given[place], line)
        constants = [self.value(each, line) for each in given if each is not given[place]]
        if len(constants) != 1:
            return None
        try:
            layer = scale(operation, constants[0], value.shape, constant_first=place == 1)
        except ArchitectureError as error:
            raise ArchitectureError(f"{line}: {error}") from None
        number = self.read(value, line)
        if layer is None or layer == Scale():
            return None if layer is None else number
        return self.add(layer, line, line, number)

    def _join(self, node: fx.Node, line: str) -> None:
        """Channels side by side."""
        tensors, dim = _tensors_and_axis(*node.args, **node.kwargs)
        values = [self.tensor(each, line) for each in tensors]
        reads = [self.read(each, line) for each in values]
        if not values or dim not in {1, -len(values[0].shape)}:
            raise ArchitectureError(f"{line}: it joins along axis {dim!r}; only channels are joined: dim=1")
        self.made(node, reads[0] if len(reads) == 1 else self.add(Concat(), line, line, *reads))

    def _view(self, node: fx.Node, kind: str, value: Value, label: str, *given: Any, **named: Any) -> None:  # noqa: ANN401
        """The numbers of a tensor in another shape: native as a row, and as they are."""
        shape = VIEWED[kind](value.shape, *given, **named)
        sizes = given[0] if len(given) == 1 and isinstance(given[0], tuple) else (*given, *named.values())
        asked = ", ".join("N" if size is BATCH else str(size) for size in sizes)
        hint = ", or data of that shape" if value.number == SAMPLES else ""
        odd = (
            f"{label}: {kind}({asked}) of N samples of shape {value.shape} is not known; all "
            f"{math.prod(value.shape):,} numbers of a sample in a row are: x.flatten(1){hint}"
        )
        if shape is None:
            raise ArchitectureError(odd)
        self.seen(node, value, shape, odd, label, row=kind == "flatten" and len(shape) == 1)

    def _mean(
        self,
        node: fx.Node,
        value: Value,
        line: str,
        dim: object = None,
        keepdim: bool = False,
        dtype: object = None,
    ) -> None:
        """A mean over axes behind the channels is a pooling."""
        places, inner = averaged(value.shape, dim), self.draft.shape_of(value.number)
        if places is None or dtype is not None:
            raise ArchitectureError(
                f"{line}: a mean over {dim!r} of N samples of shape {value.shape} is not known; those over axes behind "
                "the channels are, such as x.mean((2, 3))"
            )
        read = value.number if value.shape != inner and not value.changed else self.read(value, line)
        if value.shape == inner:
            window = tuple(side if place in places else 1 for place, side in enumerate(inner[1:], 2))
        elif len({*places}) == len(value.shape) - 1 and len(inner) > 1 and value.shape[0] == inner[0]:
            window = inner[1:]  # in whatever shape a module sees them, it is all numbers of a channel
        else:
            raise ArchitectureError(value.odd)
        pool = AvgPool2d(window, window) if len(inner) == 3 else AvgPool1d(window, window)
        pooled = self.add(pool, line, line, read)
        shape = tuple(1 if place in places else side for place, side in enumerate(value.shape, 1))
        if not keepdim:
            shape = tuple(side for place, side in enumerate(shape, 1) if place not in places)
        odd = f"{line}: a mean over some axes is known with keepdim=True alone; x.mean((2, 3)) makes rows"
        self.seen(node, Value(pooled, self.draft.shape_of(pooled)), shape, odd, line)


def _table(whole: nn.Module, name: str) -> Tensor:
    """A parameter or constant; while torch.fx works, asking for it by name gives what stands for it."""
    owner, _, last = name.rpartition(".")
    part = whole.get_submodule(owner)
    found: Tensor = {**vars(part), **part._buffers, **part._parameters}[last]
    return found


def _tensors_and_axis(tensors: Any, dim: Any = 0, axis: Any = None, **_named: Any) -> tuple[Any, Any]:  # noqa: ANN401
    return tensors, dim if axis is None else axis


def _unknown(node: fx.Node) -> str:
    """What is wrong with a function, and what to do."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    if node.target in COMPARISONS:
        return (
            "what is compared there is the values of a tensor or the number of samples; a described network takes no "
            "decisions"
        )
    if node.target is getattr:
        name = f".{node.args[1]}"
    if name in HINTS:
        return f"{name} is not native: {HINTS[name]}"
    return f"{name} is not one of {KNOWN}, as layers or functions, nor a sum or concatenation"
