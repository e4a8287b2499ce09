"""The operations of a traced module, followed one after the other: each takes what the one before it made.

Layers and functions that the description knows become layers, sizes are computed, and anything else is an error that
names the line or the layer and, where there is a way, what would make it native.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from cbdsl.engines.architecture import ArchitectureError, Flatten, Layer, Shape, after
from cbdsl.engines.torch_layers import DESCRIBE, KNOWN, describe


class _Size(Enum):
    BATCH = "the number of samples"


_BATCH = _Size.BATCH


def _max_pool(
    kernel_size: Any,  # noqa: ANN401
    stride: Any = None,  # noqa: ANN401
    padding: Any = 0,  # noqa: ANN401
    dilation: Any = 1,  # noqa: ANN401
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> nn.Module:
    return nn.MaxPool2d(kernel_size, stride, padding, dilation, return_indices, ceil_mode)


def _flatten(start_dim: int = 0, end_dim: int = -1) -> nn.Module:
    return nn.Flatten(start_dim, end_dim)


def _dropout(p: float = 0.5, training: bool = True, inplace: bool = False) -> nn.Module:
    return nn.Dropout(p, inplace) if training else nn.Identity()


FUNCTIONS: dict[object, Callable[..., nn.Module]] = {
    **dict.fromkeys(("relu", "relu_", torch.relu, torch.relu_, functional.relu), nn.ReLU),
    **dict.fromkeys(("tanh", "tanh_", torch.tanh, torch.tanh_), nn.Tanh),
    **dict.fromkeys(("sigmoid", "sigmoid_", torch.sigmoid, torch.sigmoid_), nn.Sigmoid),
    **dict.fromkeys((functional.max_pool2d, torch.max_pool2d), _max_pool),
    functional.avg_pool2d: nn.AvgPool2d,
    **dict.fromkeys(("flatten", torch.flatten), _flatten),
    **dict.fromkeys((functional.dropout, torch.dropout), _dropout),
    **dict.fromkeys(("contiguous", "float"), nn.Identity),  # samples are float32
}
"""Functions and methods of tensors, by what torch.fx calls them: the layer that does the same."""

RESHAPES: tuple[object, ...] = ("view", "reshape", torch.reshape)
ARITHMETIC: tuple[object, ...] = (operator.getitem, operator.mul, operator.floordiv, operator.add, operator.sub)
COMPARISONS: tuple[object, ...] = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)

HINTS = {
    "linear": "use nn.Linear",
    "conv2d": "use nn.Conv2d",
    "softmax": "leave it out: the loss is taken of logits",
    "log_softmax": "leave it out: the loss is taken of logits",
}


class Chain:
    """What was read of a module so far."""

    def __init__(self, module: nn.Module, shape: Shape) -> None:
        self.layers: list[Layer] = []
        self.parameters: list[tuple[str, nn.Parameter]] = []  # in the order of their use, with their layers
        self.sizes: dict[fx.Node, Any] = {}  # what was computed of shapes alone
        self._module = module
        self._shapes: dict[fx.Node, Shape] = {}  # of tensors
        self._shape = shape  # of the sample here
        self._last: fx.Node | None = None  # the operation that made it

    @staticmethod
    def is_layer(module: nn.Module) -> bool:
        """Whether it is not looked into."""
        return isinstance(module, tuple(DESCRIBE))

    def follow(self, node: fx.Node, line: str) -> None:
        """One operation more; line: where it is written."""
        match node.op:
            case "placeholder":
                self._made(node)
            case "call_module":
                self._call_layer(node, line)
            case "call_function" | "call_method":
                self._call_function(node, line)
            case "output":
                self._end(node.args[0], line)
            case _:  # a parameter or a table; whoever takes it is refused
                pass

    def _made(self, node: fx.Node) -> None:
        self._last = node
        self._shapes[node] = self._shape

    def _append(self, node: fx.Node, label: str, part: nn.Module) -> None:
        layer = describe(label, part)
        if layer is not None:
            try:
                self._shape = after(layer, self._shape)
            except ArchitectureError as error:
                raise ArchitectureError(f"{label}: {error}") from None
            self.layers.append(layer)
        self._made(node)

    def _call_layer(self, node: fx.Node, line: str) -> None:
        name = str(node.target).removeprefix("module").removeprefix(".")
        part = self._module.get_submodule(name)
        label = f"{f'layer {name}' if name else 'the module'} ({type(part).__name__})"
        if self._rest(node, line):
            raise ArchitectureError(f"{label} is given more than one tensor ({line})")
        for parameter in part.parameters(recurse=False):
            if sharing := [other for other, one in self.parameters if one is parameter]:
                again = f"is used twice ({line})" if sharing[0] == label else f"shares its weights with {sharing[0]}"
                raise ArchitectureError(f"{label} {again}; give every layer weights of its own")
            if not parameter.requires_grad:
                raise ArchitectureError(f"{label} has frozen weights")
            self.parameters.append((label, parameter))
        self._append(node, label, part)

    def _call_function(self, node: fx.Node, line: str) -> None:
        if self._is_size(node):
            return
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        make = FUNCTIONS.get(node.target)
        if node.target in COMPARISONS:
            raise ArchitectureError(
                f"{line}: what is compared there is the values of a tensor or the number of samples; a sequence of "
                "layers takes no decisions"
            )
        if make is None and node.target not in RESHAPES:
            hint = f"; {HINTS[name]}" if name in HINTS else ""
            raise ArchitectureError(
                f"{line}: {name} is not one of {KNOWN}, one after the other, as layers or functions{hint}"
            )
        given = self._rest(node, line)
        if make is None:
            self._reshape(node, given, line)
            return
        kwargs = {key: self._value(value, line) for key, value in node.kwargs.items() if key != "input"}
        try:
            part = make(*given, **kwargs)
        except (TypeError, ValueError) as error:
            raise ArchitectureError(f"{line}: {error}") from error
        self._append(node, line, part)

    def _rest(self, node: fx.Node, line: str) -> list[Any]:
        """What an operation is given beside the tensor, which must be the one that was made last."""
        tensor, *rest = (*node.args, *([node.kwargs["input"]] if "input" in node.kwargs else ())) or (None,)
        if tensor is not self._last:
            raise ArchitectureError(
                f"{line}: it does not take what was computed just before it; only layers one after the other are native"
            )
        return [self._value(each, line) for each in rest]

    def _value(self, given: Any, line: str) -> Any:  # noqa: ANN401
        """An argument that is no tensor, sizes filled in."""
        if isinstance(given, fx.Node):
            if given not in self.sizes:
                raise ArchitectureError(f"{line}: it takes a second tensor; only layers one after the other are native")
            return self.sizes[given]
        if isinstance(given, list | tuple):
            return tuple(self._value(each, line) for each in given)
        return given

    def _is_size(self, node: fx.Node) -> bool:
        """Work out what is asked of a tensor's shape, if that is what is asked."""
        first, *rest = node.args or (None,)
        if isinstance(first, fx.Node) and first in self._shapes:
            shape = (_BATCH, *self._shapes[first])
            asked = (node.target, *rest, *node.kwargs.values())
            if asked in [("size",), (getattr, "shape")]:
                self.sizes[node] = shape
            elif asked[0] == "size" and isinstance(place := asked[1], int) and -len(shape) <= place < len(shape):
                self.sizes[node] = shape[place]
            elif asked in [("dim",), (getattr, "ndim")]:
                self.sizes[node] = len(shape)
            return node in self.sizes
        if node.target not in ARITHMETIC + COMPARISONS or not callable(node.target):
            return False
        try:
            values = [self._value(each, "") for each in node.args]
            if node.target in COMPARISONS and any(_BATCH in _listed(each) for each in values):
                return False
            self.sizes[node] = node.target(*values)
        except (ArchitectureError, TypeError, IndexError, ZeroDivisionError):
            return False
        return True

    def _reshape(self, node: fx.Node, given: list[Any], line: str) -> None:
        """A view that makes rows of whole samples, or that changes nothing."""
        sizes: Sequence[Any] = given[0] if len(given) == 1 and isinstance(given[0], tuple) else given
        numbers = math.prod(self._shape)
        batch, *rest = sizes or (None,)
        known = [size for size in rest if size != -1]
        if len(known) == len(rest) - 1 and batch is _BATCH and all(isinstance(size, int) for size in known):
            rest = [numbers // max(math.prod(known), 1) if size == -1 else size for size in rest]
        if batch not in {_BATCH, -1} or node.kwargs or tuple(rest) not in {(numbers,), self._shape}:
            shown = ", ".join("N" if size is _BATCH else str(size) for size in sizes)
            raise ArchitectureError(
                f"{line}: it makes ({shown}) of N samples of shape {self._shape}; only all {numbers:,} numbers of a "
                "sample in a row are known: x.flatten(1)"
            )
        if tuple(rest) != self._shape:
            self._shape = (numbers,)
            self.layers.append(Flatten())
        self._made(node)

    def _end(self, output: Any, line: str) -> None:  # noqa: ANN401
        if not isinstance(output, fx.Node):
            count = f"{len(output)} outputs" if isinstance(output, list | tuple | dict) else f"{output!r}"
            raise ArchitectureError(f"its forward gives {count}, not one row of logits")
        if output is not self._last:
            raise ArchitectureError(f"{line}: what is returned is not what was computed last; leave out what is unused")


def _listed(value: Any) -> tuple[Any, ...]:  # noqa: ANN401
    return value if isinstance(value, tuple) else (value,)


def same_order(used: list[tuple[str, nn.Parameter]], module: nn.Module) -> None:
    """Refuse a module whose parameters are not used all, and in the order in which flat weights hold them."""
    order = {id(parameter): place for place, (_, parameter) in enumerate(used)}
    for name, parameter in module.named_parameters():
        if id(parameter) not in order:
            raise ArchitectureError(f"{name} is never used; leave it out")
    places = [order[id(parameter)] for parameter in module.parameters()]
    for place, expected in enumerate(places):
        if place != expected:
            raise ArchitectureError(
                f"{used[expected][0]} is defined before {used[place][0]} but used after it; define layers in the order "
                "of their use"
            )
