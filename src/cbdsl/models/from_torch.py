"""Reads torch modules of users into an `Architecture`.

`read_module` follows a module with torch.fx, in training and in evaluation mode. `GraphReader` translates each
operation as it is recorded, so that shapes are known on the way: modules may compute with them and decide by them.
Shapes of views come from torch, on tensors without data. At the end the description is compared with the module on
random samples.
"""

from __future__ import annotations

import copy
import linecache
import math
import operator
import random
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from cbdsl.models import layers
from cbdsl.models.architecture import SAMPLES, Architecture, Draft
from cbdsl.models.layers import ArchitectureError, Layer, Shape
from cbdsl.models.to_torch import TORCH_LAYERS, ConcatModule, SumModule, TorchLayer, module_of

_TRACING = threading.Lock()  # torch.fx puts its own methods into nn.Module while it works
_HERE = Path(__file__).parent
_TORCH = Path(torch.__file__).parent
_BY_MODULE: dict[type[nn.Module], TorchLayer] = {row.module: row for row in TORCH_LAYERS}
_BY_FUNCTION = {function: row for row in TORCH_LAYERS for function in (*row.functions, *row.functions_in_place)}
_NAMES = ", ".join(kind.__name__ for kind in _BY_MODULE if kind.__module__.startswith("torch."))
_KNOWN = re.sub(r"(?P<kind>\w+)1d, (?P=kind)2d", r"\g<kind>1d/2d", _NAMES)
"""All torch layers that can be described, for errors."""


def read_module(module: nn.Module, shape: Shape) -> Architecture:
    """Describe a torch module for samples of `shape`; an ArchitectureError names the layer or line that prevents it."""
    training, in_order = _read(copy_module(module).train(), shape)
    scoring, _ = _read(copy_module(module).eval(), shape)
    if training.without_dropout() != scoring:
        raise ArchitectureError("its results differ in training and evaluation mode")
    _compare(copy_module(module), training, in_order)
    return training


def copy_module(module: nn.Module) -> nn.Module:
    """Return a copy on the CPU in float32, or raise ArchitectureError."""
    try:
        return copy.deepcopy(module).to("cpu", torch.float32)
    except Exception as error:
        raise ArchitectureError(f"it cannot be copied ({first_line(error)})") from error


def _read(module: nn.Module, shape: Shape) -> tuple[Architecture, bool]:
    """Return the description, and whether its layers are in the order of use."""
    for name, part in module.named_modules():
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks:
            raise ArchitectureError(f"{f'layer {name}' if name else 'the module'} has hooks; leave them out")
    whole = _SamplesOnly(module)
    graph = GraphReader(whole, module, shape)
    _trace(graph, whole)
    return graph.architecture()


class _SamplesOnly(nn.Module):
    """The module as engines call it: with samples alone, so that other arguments of forward keep their defaults."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, samples: Tensor) -> Any:  # noqa: ANN401
        return self.module(samples)


def _trace(graph: GraphReader, whole: nn.Module) -> None:
    """Trace a module, with a graph reader that follows every operation."""
    with _TRACING, torch.random.fork_rng(devices=[]):
        before = _generator_states()
        try:
            _Tracer(graph).trace(whole)
        except ArchitectureError:
            raise
        except _ComparisonError as error:
            raise ArchitectureError(f"{_line_of_error(error)}: {_DECISION}") from error
        except Exception as error:
            reason = "write x.size(0) for len(x)" if "'len'" in str(error) else first_line(error)
            raise ArchitectureError(f"{_line_of_error(error)}: torch.fx cannot follow it ({reason})") from error
        if _generator_states() != before:
            raise ArchitectureError("its forward draws random numbers")


def _generator_states() -> tuple[object, ...]:
    name, words, *rest = np.random.get_state()  # noqa: NPY002 - the generator that others use
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), name, np.asarray(words).tobytes(), *rest


class _BatchSize(int):
    """The number of samples, which is unknown while a module is read: a prime that no shape contains."""

    def _refuse(self, *_: object) -> bool:
        raise _ComparisonError

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _refuse
    __hash__ = int.__hash__

    def __repr__(self) -> str:
        return "the number of samples"


class _ComparisonError(Exception):
    """Raised where a module decides by the number of samples."""


_BATCH = _BatchSize(1_000_003)


class _Proxy(fx.Proxy):
    """A proxy that has a shape, and records `x += y` as such.

    torch.fx would record `x = x + y`, which other references to x miss.
    """

    tracer: _Tracer

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the tensor."""
        return self.tracer.reader.shape_of(self.node)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        """Place of the tensor: the CPU, where modules are read."""
        return torch.device("cpu")

    def dim(self) -> int:
        """Return the number of axes."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:  # noqa: ANN401 - a size or all of them
        """Return the sizes of the tensor, or that of one axis."""
        return self.shape if dim is None else self.shape[dim]

    def __iadd__(self, other: Any) -> fx.Proxy:  # noqa: ANN401
        return self._change(operator.iadd, other)

    def __isub__(self, other: Any) -> fx.Proxy:  # noqa: ANN401
        return self._change(operator.isub, other)

    def __imul__(self, other: Any) -> fx.Proxy:  # noqa: ANN401
        return self._change(operator.imul, other)

    def __itruediv__(self, other: Any) -> fx.Proxy:  # noqa: ANN401
        return self._change(operator.itruediv, other)

    def _change(self, function: Callable[..., Any], other: Any) -> fx.Proxy:  # noqa: ANN401
        return self.tracer.create_proxy("call_function", function, (self, other), {})


class _Tracer(fx.Tracer):
    """A tracer of torch.fx that hands every operation to a graph reader."""

    def __init__(self, reader: GraphReader) -> None:
        super().__init__()
        self.reader = reader

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the stand-in for a tensor."""
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module counts as one layer: torch's own, and subclasses of known ones."""
        return super().is_leaf_module(m, module_qualified_name) or isinstance(m, tuple(_BY_MODULE))

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401
        """Call a module. One outside of the traced module was made inside forward or belongs to another thread."""
        if all(m is not part for part in self.root.modules()):
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:  # noqa: ANN401
        """Record an operation and translate it, with the line of the user's code that asked for it."""
        node = super().create_node(*args, **kwargs)
        frame = sys._getframe(1)
        while frame.f_back is not None and not _is_user_code(frame.f_code):
            frame = frame.f_back
        self.reader.translate(node, _line(frame.f_code, frame.f_lineno))
        return node


def _is_user_code(code: CodeType) -> bool:
    return _is_user_file(code.co_filename)


@cache  # it is asked for every frame of every operation, and comparing paths is slow
def _is_user_file(name: str) -> bool:
    folders = Path(name).parents
    return _TORCH not in folders and _HERE not in folders


def _line(code: CodeType, number: int) -> str:
    text = linecache.getline(code.co_filename, number).strip()
    return f"line {number} of {Path(code.co_filename).name}" + (f" ({text:.80})" if text else "")


def _line_of_error(error: Exception) -> str:
    found, trace = "the module", error.__traceback__
    while trace is not None:
        if _is_user_code(trace.tb_frame.f_code):
            found = _line(trace.tb_frame.f_code, trace.tb_lineno)
        trace = trace.tb_next
    return found


def first_line(error: Exception) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(" .")


_COMPARISONS: tuple[object, ...] = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)

_ARITHMETIC: dict[object, str] = {
    **dict.fromkeys(("add", torch.add, operator.add), "add"),
    **dict.fromkeys(("add_", operator.iadd), "add_"),
    **dict.fromkeys(("sub", torch.sub, torch.subtract, operator.sub), "sub"),
    **dict.fromkeys(("sub_", operator.isub), "sub_"),
    **dict.fromkeys(("mul", torch.mul, torch.multiply, operator.mul), "mul"),
    **dict.fromkeys(("mul_", operator.imul), "mul_"),
    **dict.fromkeys(("div", torch.div, torch.true_divide, operator.truediv), "div"),
    **dict.fromkeys(("div_", operator.itruediv), "div_"),
    **dict.fromkeys(("neg", torch.neg, operator.neg), "neg"),
}
"""Element-wise arithmetic of two tensors, or of one and constants. A name that ends in _ changes the first."""

_VIEWS: dict[object, str] = {
    **dict.fromkeys(("view", "reshape", torch.reshape), "reshape"),
    **dict.fromkeys(("flatten", torch.flatten), "flatten"),
    **dict.fromkeys(("squeeze", torch.squeeze), "squeeze"),
    **dict.fromkeys(("unsqueeze", torch.unsqueeze), "unsqueeze"),
}

_TURNS: tuple[object, ...] = (
    "transpose", "swapaxes", "permute", torch.transpose, torch.swapaxes, torch.permute,
)  # fmt: skip

_MEANS: tuple[object, ...] = ("mean", torch.mean)

_JOINS: tuple[object, ...] = (torch.cat, torch.concat, torch.concatenate)


_DECISION = "the line compares tensor values or the number of samples; described networks cannot branch"
_PRODUCT = "products of tensors run on torch"
_HINTS = {
    "linear": "use nn.Linear",
    "conv1d": "use nn.Conv1d",
    "conv2d": "use nn.Conv2d",
    "batch_norm": "it mixes the samples of a batch; use nn.GroupNorm",
    "instance_norm": "use nn.InstanceNorm2d",
    "softmax": "the loss is taken of logits; leave it out",
    "log_softmax": "the loss is taken of logits; leave it out",
    **dict.fromkeys(("matmul", "bmm", "mm", "einsum", "scaled_dot_product_attention"), _PRODUCT),
    **dict.fromkeys(("dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"), "use F.dropout"),
    "_assert": "leave it out",
}
"""What to do about functions that are not native."""

_ADVICE: tuple[tuple[Any, str], ...] = (
    (nn.modules.dropout._DropoutNd, "it drops whole channels or uses another distribution; use nn.Dropout"),
    ((nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d), "the loss is taken of logits; leave it out"),
    (
        (nn.RNNBase, nn.RNNCellBase),
        "it runs on torch; nn.GRU and nn.LSTM are native",
    ),
    (
        (nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
         nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
        "attention multiplies tensors with each other; it runs on torch",
    ),
    ((nn.Embedding, nn.EmbeddingBag), "samples are numbers, not table indices; it runs on torch"),
    (nn.modules.lazy.LazyModuleMixin, "it has no sizes yet; write them out"),
)  # fmt: skip


class GraphReader:
    """Follows the operations of a module, and collects the layers that compute the same."""

    def __init__(self, whole: nn.Module, module: nn.Module, shape: Shape) -> None:
        """whole: what is traced; module: the part of it whose parameters are flat weights."""
        self.whole, self.module = whole, module
        self.draft = Draft(shape)
        self.lines: list[str] = []  # where every layer is written
        self.read_numbers: set[int] = set()
        self.used: list[UsedParameter] = []
        self.values: dict[fx.Node, TracedTensor] = {}
        self.tables: dict[fx.Node, Tensor] = {}  # parameters and constants
        self.recurrent: dict[fx.Node, RecurrentResult] = {}

    def architecture(self) -> tuple[Architecture, bool]:
        """Return the network with layers in the order of flat weights, and whether that is the order of use."""
        as_used = self.draft.architecture()
        ordered = _order_by_definition(as_used, self.used, self.module)
        return ordered, ordered is as_used

    def translate(self, node: fx.Node, line: str) -> None:
        """Translate one operation. line: where it is written."""
        match node.op:
            case "placeholder":
                self.values[node] = TracedTensor(SAMPLES, self.draft.shape)
            case "get_attr":
                self.tables[node] = _attribute(self.whole, str(node.target))
            case "call_module":
                self._call_layer(node, line)
            case "call_function" | "call_method":
                self._call_function(node, line)
            case _:
                self._end(node.args[0], line)

    def _call_layer(self, node: fx.Node, line: str) -> None:
        name = str(node.target).removeprefix("module").removeprefix(".")
        part = self.module.get_submodule(name)
        label = f"{f'layer {name}' if name else 'the module'} ({type(part).__name__})"
        given = [*node.args, *node.kwargs.values()]
        if isinstance(part, SumModule | ConcatModule):
            reads = [self.read(self.tensor_of(each, line), line) for each in given]
            layer = layers.Add() if isinstance(part, SumModule) else layers.Concat()
            self.add_tensor(node, self.add(layer, label, line, *reads))
            return
        if type(part) not in _BY_MODULE:
            raise ArchitectureError(f"{label} {_advice(part)}")
        if type(part) in {nn.GRU, nn.LSTM}:
            self._call_recurrent(node, part, label, line)
            return
        if len(given) != 1:
            raise ArchitectureError(f"{label} is given more than one tensor ({line})")
        value = self.tensor_of(given[0], line)
        self._use(part.parameters(recurse=False), label, line)
        if isinstance(part, nn.Flatten):
            self._view(node, "flatten", value, label, part.start_dim, part.end_dim)
        else:
            self._apply(node, part, value, label, line)

    def _use(self, parameters: Iterable[nn.Parameter], label: str, line: str) -> None:
        """Record that the next layer has these parameters."""
        for parameter in parameters:
            if sharing := [one.label for one in self.used if one.parameter is parameter]:
                again = f"is used twice ({line})" if sharing[0] == label else f"shares its weights with {sharing[0]}"
                raise ArchitectureError(f"{label} {again}; give every layer weights of its own")
            self.used.append(UsedParameter(label, parameter, len(self.lines)))

    def _call_recurrent(self, node: fx.Node, part: Any, label: str, line: str) -> None:  # noqa: ANN401
        """Record the call of a GRU or an LSTM; later uses of its result decide which layers compute it."""
        first, *states = [*node.args, *node.kwargs.values()]
        value = self.tensor_of(first, line)
        for state in states:
            tables = [self.constant_of(each, line) for each in (state if isinstance(state, list | tuple) else [state])]
            if any(not isinstance(each, Tensor) or bool(each.any()) for each in tables if each is not None):
                raise ArchitectureError(
                    f"{label} is given an initial state ({line}); only the default, zeros, is native"
                )
        layer = _BY_MODULE[type(part)].describe(label, part, value.shape)
        assert isinstance(layer, layers.Gru | layers.Lstm)
        try:
            states_shape = layer.output_shape(value.shape)
        except ArchitectureError as error:
            raise ArchitectureError(f"{label}: {error}") from None
        call = RecurrentCall(part, layer, label, self.read(value, line), states_shape)
        self.recurrent[node] = RecurrentResult(call, "result")

    def _index(self, node: fx.Node, line: str) -> None:
        """Translate an index. Only results of recurrent layers have one."""
        source, index = node.args
        result = self.recurrent.get(source) if isinstance(source, fx.Node) else None
        if result is None:
            raise ArchitectureError(f"{line}: {_explain_unknown(node)}")
        match result.part, index:
            case "result", 0:
                self.recurrent[node] = RecurrentResult(result.call, "states")
            case "result", 1:
                part = "last states" if isinstance(result.call.layer, layers.Gru) else "last states and cells"
                self.recurrent[node] = RecurrentResult(result.call, part)
            case "last states and cells", 0:
                self.recurrent[node] = RecurrentResult(result.call, "last states")
            case "last states and cells", 1:
                self.recurrent[node] = RecurrentResult(result.call, "cells")
            case _:
                if not result.is_last(index):
                    raise ArchitectureError(
                        f"{line}: of {result.call.label} the native engine has all states, the last step's state "
                        "out[:, -1], and the last layer's final state h[-1]"
                    )
                self.add_tensor(node, self._run(result.call, True, line))

    def _run(self, call: RecurrentCall, last: bool, line: str) -> int:
        """Return the number of the layer that computes the last state or all states; add the layers once."""
        if call.number is not None and call.last != last:
            raise ArchitectureError(
                f"{line}: both all states of {call.label} and its last state are used; use only one of them"
            )
        if call.number is None:
            number, count = call.read, call.module.num_layers
            parameters = list(call.module._parameters.values())  # layer by layer; attributes would be proxies
            each = len(parameters) // count
            for depth in range(count):
                inputs = call.layer.inputs if depth == 0 else call.layer.hidden
                self._use(parameters[depth * each : (depth + 1) * each], call.label, line)
                layer = replace(call.layer, inputs=inputs, last=last and depth == count - 1)
                number = self.add(layer, call.label, line, number)
            call.number, call.last = number, last
        return call.number

    def _is_only_end(self, given: Any) -> bool:  # noqa: ANN401
        """Return whether an argument is the last state of a recurrent layer as torch returns it, (1, N, H)."""
        result = self.recurrent.get(given) if isinstance(given, fx.Node) else None
        return result is not None and result.part == "last states" and result.shape[0] == 1

    def _turn(self, node: fx.Node, value: TracedTensor, line: str, *given: Any, **named: Any) -> None:  # noqa: ANN401
        """Translate a transposition of the channels and the steps of a series."""
        method = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        shape = _shape_after(method, value.shape, *given, **named)
        order = torch.empty(5, 7, 11, device="meta") if len(value.shape) == 2 else None
        turned = None if order is None or shape is None else tuple(getattr(order, method)(*given, **named).shape)
        if turned == (5, 7, 11):
            self.values[node] = value
        elif turned == (5, 11, 7):
            self.add_tensor(node, self.add(layers.Transpose(), line, line, self.read(value, line)))
        else:
            raise ArchitectureError(
                f"{line}: {method} of N samples of shape {value.shape} is not known; x.transpose(1, 2) of a series is"
            )

    def _apply(self, node: fx.Node, part: nn.Module, value: TracedTensor, label: str, line: str) -> None:
        layer = _BY_MODULE[type(part)].describe(label, part, value.shape)
        if layer is None:
            self.values[node] = value
            return
        if isinstance(layer, layers.Dropout) and not self.module.training:
            raise ArchitectureError(f"{label} drops numbers while it is scored, too; give it training=self.training")
        number = self.add(layer, label, line, self.read(value, line))
        if getattr(part, "inplace", False):
            self.change_in_place(node, number, value, line)
        else:
            self.add_tensor(node, number)

    def _call_function(self, node: fx.Node, line: str) -> None:
        target = node.target
        if target in _ARITHMETIC:
            self._compute(node, _ARITHMETIC[target], line)
            return
        if target in _JOINS:
            self._join(node, line)
            return
        if target is operator.getitem:
            self._index(node, line)
            return
        if target not in _BY_FUNCTION and target not in (*_VIEWS, *_MEANS, *_TURNS):
            raise ArchitectureError(f"{line}: {_explain_unknown(node)}")
        first, *rest = (*([node.kwargs["input"]] if "input" in node.kwargs else ()), *node.args) or (None,)
        if self._is_only_end(first) and _VIEWS.get(target) == "squeeze" and (*rest, *node.kwargs.values()) == (0,):
            self.add_tensor(node, self._run(self.recurrent[first].call, True, line))
            return
        value = self.tensor_of(first, line)
        given = [self.constant_of(each, line) for each in rest]
        named = {key: self.constant_of(each, line) for key, each in node.kwargs.items() if key != "input"}
        try:
            if target in _VIEWS:
                self._view(node, _VIEWS[target], value, line, *given, **named)
            elif target in _MEANS:
                self._mean(node, value, line, *given, **named)
            elif target in _TURNS:
                self._turn(node, value, line, *given, **named)
            else:
                part = _module_of_call(_BY_FUNCTION[target], target, value.shape, *given, **named)
                self._apply(node, part, value, line, line)
        except ArchitectureError:
            raise
        except (TypeError, ValueError) as error:
            raise ArchitectureError(f"{line}: {error}") from error

    def _end(self, output: Any, line: str) -> None:  # noqa: ANN401
        if not isinstance(output, fx.Node):
            count = f"{len(output)} outputs" if isinstance(output, list | tuple | dict) else f"{output!r}"
            raise ArchitectureError(f"its forward gives {count}, not one row of logits")
        last = self.read(self.tensor_of(output, line), line)
        for number, made in enumerate(self.lines):
            if number != last and number not in self.read_numbers:
                raise ArchitectureError(f"the result of {made} is never used; leave it out")

    def _compute(self, node: fx.Node, name: str, line: str) -> None:
        """Translate arithmetic of two tensors, or of one and constants."""
        operation, changes = name.removesuffix("_"), name.endswith("_")
        named = dict(node.kwargs)
        given = [*node.args, *(named.pop(key) for key in ("input", "other") if key in named)]
        if named.pop("alpha", 1) != 1 or named:
            raise ArchitectureError(f"{line}: {operation} with {', '.join(node.kwargs)} is not known; write it out")
        for each in given:
            self.refuse_parameter(each, line)
        tensors = [self.values[each] for each in given if isinstance(each, fx.Node) and each in self.values]
        if operation == "neg":
            number: int | None = self.add(
                layers.Scale((-1.0,)), line, line, *(self.read(each, line) for each in tensors)
            )
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
            self.change_in_place(node, number, tensors[0], line)
        else:
            self.add_tensor(node, number)

    def _combine(self, operation: str, tensors: list[TracedTensor], line: str) -> int | None:
        first, second = (self.read(each, line) for each in tensors)
        if operation == "sub":
            second = self.add(layers.Scale((-1.0,)), line, line, second)
        return self.add(layers.Add(), line, line, first, second) if operation in {"add", "sub"} else None

    def _scale(self, operation: str, given: list[Any], line: str) -> int | None:
        place = next(
            (place for place, each in enumerate(given) if isinstance(each, fx.Node) and each in self.values), 0
        )
        value = self.tensor_of(given[place], line)
        constants = [self.constant_of(each, line) for each in given if each is not given[place]]
        if len(constants) != 1:
            return None
        try:
            layer = _scale_layer(operation, constants[0], value.shape, constant_first=place == 1)
        except ArchitectureError as error:
            raise ArchitectureError(f"{line}: {error}") from None
        number = self.read(value, line)
        if layer is None:
            return None
        return number if layer == layers.Scale() else self.add(layer, line, line, number)

    def _join(self, node: fx.Node, line: str) -> None:
        """Translate a concatenation of channels."""
        tensors, dim = _tensors_and_axis(*node.args, **node.kwargs)
        values = [self.tensor_of(each, line) for each in tensors]
        reads = [self.read(each, line) for each in values]
        if not values or dim not in {1, -len(values[0].shape)}:
            raise ArchitectureError(f"{line}: it joins along axis {dim!r}; only channels are joined: dim=1")
        self.add_tensor(node, reads[0] if len(reads) == 1 else self.add(layers.Concat(), line, line, *reads))

    def _view(self, node: fx.Node, kind: str, value: TracedTensor, label: str, *given: Any, **named: Any) -> None:  # noqa: ANN401
        """Translate a view. Layers read it as a row, or in the shape that a layer made."""
        shape = _shape_after(kind, value.shape, *given, **named)
        if kind == "squeeze" and _shape_after(kind, value.shape, *given, batch=1, **named) != shape:
            shape = None  # one sample alone gives another shape
        sizes = given[0] if len(given) == 1 and isinstance(given[0], tuple) else (*given, *named.values())
        asked = ", ".join("N" if isinstance(size, _BatchSize) else str(size) for size in sizes)
        hint = ", or data of that shape" if value.number == SAMPLES else ""
        obstacle = (
            f"{label}: {kind}({asked}) of N samples of shape {value.shape} is not known; all "
            f"{math.prod(value.shape):,} numbers of a sample in a row are: x.flatten(1){hint}"
        )
        if shape is None:
            raise ArchitectureError(obstacle)
        self.add_view(node, value, shape, obstacle, label, row=kind == "flatten" and len(shape) == 1)

    def _mean(
        self,
        node: fx.Node,
        value: TracedTensor,
        line: str,
        dim: object = None,
        keepdim: bool = False,
        dtype: object = None,
    ) -> None:
        """Translate a mean over axes after the channels, which is a pooling."""
        if len(value.shape) == 2 and dim in {1, -2} and not keepdim:  # of the steps of a series, which come first
            turned = self.add(layers.Transpose(), line, line, self.read(value, line))
            value, dim = TracedTensor(turned, self.draft.shape_of(turned)), 2
        places, shape = _mean_axes(value.shape, dim), _shape_after("mean", value.shape, dim, keepdim)
        if places is None or shape is None or dtype is not None:
            raise ArchitectureError(
                f"{line}: a mean over {dim!r} of N samples of shape {value.shape} is not known; those over axes behind "
                "the channels are, such as x.mean((2, 3))"
            )
        inner = self.draft.shape_of(value.number)
        read = value.number if value.shape != inner and not value.changed else self.read(value, line)
        if value.shape == inner:
            window = tuple(side if place in places else 1 for place, side in enumerate(inner[1:], 2))
        elif len({*places}) == len(value.shape) - 1 and len(inner) > 1 and value.shape[0] == inner[0]:
            window = inner[1:]  # in any view this is the mean of a channel
        else:
            raise ArchitectureError(value.obstacle)
        pool = layers.AvgPool2d(window, window) if len(inner) == 3 else layers.AvgPool1d(window, window)
        pooled = self.add(pool, line, line, read)
        obstacle = f"{line}: a mean over some axes is known with keepdim=True alone; x.mean((2, 3)) makes rows"
        self.add_view(node, TracedTensor(pooled, self.draft.shape_of(pooled)), shape, obstacle, line)

    def add(self, layer: Layer, label: str, line: str, *reads: int) -> int:
        """Add a layer; return its number. label: its name in errors, line: where it is written."""
        try:
            number = self.draft.add(layer, *reads)
        except ArchitectureError as error:
            raise ArchitectureError(f"{label}: {error}") from None
        self.read_numbers.update(reads)
        self.lines.append(line)
        return number

    def add_tensor(self, node: fx.Node, number: int) -> None:
        """Record that an operation makes a new tensor, the result of a layer."""
        self.values[node] = TracedTensor(number, self.draft.shape_of(number))

    def change_in_place(self, node: fx.Node, number: int, value: TracedTensor, line: str) -> None:
        """Record that an operation changed a tensor in place: later readers get the result of this layer."""
        same = value.number, value.shape
        for other in value.aliases:
            if (other.number, other.shape) == same:
                other.number = number
            else:
                other.changed = line
        self.values[node] = value

    def add_view(
        self, node: fx.Node, value: TracedTensor, shape: Shape, obstacle: str, line: str, row: bool = False
    ) -> None:
        """Record a view of a tensor. obstacle: the error if no layer makes that shape. row: add a Flatten anyway."""
        if value.changed:
            self.read(value, line)
        number, obstacle = value.number, obstacle if shape != self.draft.shape_of(value.number) else ""
        if len(shape) == 1 and (obstacle or row):
            number, obstacle = self.add(layers.Flatten(), line, line, number), ""
        self.values[node] = TracedTensor(number, shape, value.aliases, obstacle)

    def tensor_of(self, given: Any, line: str) -> TracedTensor:  # noqa: ANN401
        """Return the tensor that an argument stands for."""
        if isinstance(given, fx.Node) and given in self.recurrent:
            self._read_states(given, line)
        if isinstance(given, fx.Node) and given in self.values:
            return self.values[given]
        self.refuse_parameter(given, line)
        raise ArchitectureError(
            f"{line}: it is given {given!r:.40}, which is not the result of a layer; use layers alone"
        )

    def _read_states(self, node: fx.Node, line: str) -> None:
        """Convert the result of a recurrent layer to a tensor if it is used as one."""
        result = self.recurrent[node]
        if node in self.values:
            return
        if result.part != "states":
            raise ArchitectureError(
                f"{line}: it reads the {result.part} of {result.call.label} as one tensor; native are out, h = ..., "
                "and then out, out[:, -1] or h[-1]"
            )
        self.add_tensor(node, self._run(result.call, False, line))

    def read(self, value: TracedTensor, line: str) -> int:
        """Return the number of the layer that made a tensor, for a layer that takes it as it is."""
        if value.changed:
            raise ArchitectureError(
                f"{line}: what it reads was changed in place in another shape by {value.changed}; write that without "
                "inplace"
            )
        if value.obstacle:
            raise ArchitectureError(value.obstacle)
        return value.number

    def refuse_parameter(self, given: Any, line: str) -> None:  # noqa: ANN401
        """Refuse a parameter that is used outside of a layer."""
        if isinstance(given, fx.Node) and isinstance(self.tables.get(given), nn.Parameter):
            name = str(given.target).removeprefix("module.")
            raise ArchitectureError(
                f"{line}: it uses the weights {name} outside of a layer; use a layer that holds them"
            )

    def constant_of(self, given: Any, line: str) -> Any:  # noqa: ANN401
        """Return the value of an argument that is not a tensor of samples."""
        if isinstance(given, list | tuple):
            return tuple(self.constant_of(each, line) for each in given)
        if not isinstance(given, fx.Node):
            return given
        self.refuse_parameter(given, line)
        if given in self.tables:
            return self.tables[given]
        raise ArchitectureError(f"{line}: it takes a second tensor; only sums and concatenations of tensors are native")

    def shape_of(self, node: fx.Node) -> tuple[int, ...]:
        """Return the shape of a tensor as the module sees it."""
        if node in self.recurrent and node not in self.values:
            return self.recurrent[node].shape
        return (_BATCH, *self.values[node].shape) if node in self.values else tuple(self.tables[node].shape)


@dataclass(eq=False)
class RecurrentCall:
    """A call of a GRU or an LSTM, before the use of its result is known."""

    module: Any
    layer: layers.Gru | layers.Lstm  # the first, with all of its states
    label: str
    read: int  # number of the layer it reads
    shape: Shape  # of all states of a sample
    number: int | None = None  # of the layer that computes the result, once that is known
    last: bool = False


@dataclass(frozen=True, eq=False)
class RecurrentResult:
    """The result of a call of a recurrent layer, or a part of it."""

    call: RecurrentCall
    part: str  # "result", "states" after all steps, "last states" of all layers, "cells", or "last states and cells"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor as the module sees it."""
        steps, hidden = self.call.shape
        return (_BATCH, steps, hidden) if self.part == "states" else (self.call.module.num_layers, _BATCH, hidden)

    def is_last(self, index: Any) -> bool:  # noqa: ANN401
        """Return whether an index takes the state of the last layer after the last step, for all samples."""
        axis = {"states": 1, "last states": 0}.get(self.part)  # of the steps, or of the layers
        places = list(index) if isinstance(index, tuple) else [index]
        if axis is None or len(places) <= axis:
            return False
        taken, count = places.pop(axis), self.shape[axis]
        return any(taken == one for one in (-1, count - 1)) and all(each == slice(None) for each in places)


@dataclass(eq=False)
class TracedTensor:
    """A tensor of the module, of which only the shape is known."""

    number: int  # of the layer that made it
    shape: Shape  # of a sample, as the module sees it
    aliases: list[TracedTensor] = field(default_factory=list)  # tensors that may share storage, itself included
    obstacle: str = ""  # the error if a layer reads it; empty if readable
    changed: str = ""  # the line that changed it in place through another view

    def __post_init__(self) -> None:
        self.aliases.append(self)


def _module_of_call(row: TorchLayer, function: object, shape: Shape, *args: Any, **kwargs: Any) -> nn.Module:  # noqa: ANN401
    """Return the module that computes what a function does with these arguments on samples of `shape`."""
    part = row.module(*args, **kwargs) if row.from_call is None else row.from_call(shape, *args, **kwargs)
    if function in row.functions_in_place:
        part.inplace = True  # type: ignore[assignment]  # not all classes have such an argument
    return part


def _attribute(whole: nn.Module, name: str) -> Tensor:
    """Return a parameter or constant of the module; getattr would return a proxy while torch.fx works."""
    owner, _, last = name.rpartition(".")
    part = whole.get_submodule(owner)
    found: Tensor = {**vars(part), **part._buffers, **part._parameters}[last]
    return found


def _tensors_and_axis(tensors: Any, dim: Any = 0, axis: Any = None, **_named: Any) -> tuple[Any, Any]:  # noqa: ANN401
    return tensors, dim if axis is None else axis


def _explain_unknown(node: fx.Node) -> str:
    """Explain why a function is not native, and what to do."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    if node.target in _COMPARISONS:
        return _DECISION
    if node.target is getattr:
        name = f".{node.args[1]}"
    if name in _HINTS:
        return f"{name} is not native: {_HINTS[name]}"
    return f"{name} is not one of {_KNOWN}, as layers or functions, nor a sum or concatenation"


def _advice(part: nn.Module) -> str:
    """Explain why a layer is not native, and what to use instead."""
    if isinstance(part, nn.modules.batchnorm._BatchNorm):
        return f"is not native: it mixes the samples of a batch. Replace {group_norm_instead(part)}"
    for kinds, words in _ADVICE:
        if isinstance(part, kinds):
            return f"is not native: {words}"
    return f"is not one of {_KNOWN}"


def group_norm_instead(part: nn.modules.batchnorm._NormBase) -> str:
    """Return what to write instead of a normalisation over a batch: '... by ...'."""
    channels = part.num_features
    affine = "" if part.affine else ", affine=False"
    return f"nn.{type(part).__name__}({channels}) by nn.GroupNorm({math.gcd(channels, 8)}, {channels}{affine})"


Numbers = tuple[float, ...]


def _scale_layer(operation: str, constant: Any, shape: Shape, constant_first: bool) -> layers.Scale | None:  # noqa: ANN401
    """Return the layer for an arithmetic operation with a constant, or None if there is none."""
    values = _constant_values(constant, shape)
    match operation, constant_first:
        case "add", _:
            return layers.Scale(offsets=values)
        case "sub", False:
            return layers.Scale(offsets=_map_values(values, lambda value: -value))
        case "sub", True:
            return layers.Scale((-1.0,), values)
        case "mul", _:
            return layers.Scale(values)
        case "div", False:
            return layers.Scale(_map_values(values, lambda value: 1 / value))
    return None


def _constant_values(constant: Any, shape: Shape) -> Numbers:  # noqa: ANN401
    """Return a constant as one number, or as one per channel."""
    if isinstance(constant, bool | _BatchSize) or not isinstance(constant, int | float | Tensor):
        raise ArchitectureError(f"it computes with {constant!r:.40}; only numbers and tables of numbers are known")
    table = torch.as_tensor(constant)
    if table.is_complex() or (table.dtype == torch.float64 and table.dim() > 0):
        raise ArchitectureError(f"the constant is {table.dtype}, so all later results would be; write .float()")
    axes = 1 + len(shape)
    sizes = (1,) * (axes - table.dim()) + tuple(table.shape)
    if len(sizes) != axes or (table.numel() != 1 and sizes != (1, shape[0], *(1,) * (axes - 2))):
        channels = (shape[0],) if axes == 2 else (shape[0], *(1,) * (axes - 2))
        raise ArchitectureError(
            f"its table has shape {tuple(table.shape)}; one number for all, or one per channel, {channels}, is native"
        )
    return tuple(table.detach().float().flatten().tolist())


def _map_values(values: Numbers, compute: Callable[[Tensor], Tensor]) -> Numbers:
    """Compute with torch in float32; -0 becomes 0."""
    return tuple((compute(torch.tensor(values)) + 0.0).tolist())


def _shape_after(method: str, shape: Shape, *given: Any, batch: int = _BATCH, **named: Any) -> Shape | None:  # noqa: ANN401
    """Return the shape of a sample after a method, called on a tensor without data; None if samples mix."""
    try:
        result = getattr(torch.empty(int(batch), *shape, device="meta"), method)(*given, **named)
    except (RuntimeError, IndexError, TypeError):
        return None
    return tuple(result.shape[1:]) if result.dim() > 1 and result.shape[0] == int(batch) else None


def _mean_axes(shape: Shape, dim: Any = None) -> tuple[int, ...] | None:  # noqa: ANN401
    """Return the axes of a mean, 1 being the channels; None unless all come after the channels."""
    places = _axes_from_front(dim, 1 + len(shape))
    return places if places and min(places) > 1 else None


def _axes_from_front(dims: Any, axes: int) -> tuple[int, ...] | None:  # noqa: ANN401
    """Return axes counted from the front; None if there are no such axes."""
    listed = dims if isinstance(dims, list | tuple) else (dims,)
    if not all(isinstance(each, int) and not isinstance(each, bool) and -axes <= each < axes for each in listed):
        return None
    return tuple(each % axes for each in listed)


@dataclass(frozen=True)
class UsedParameter:
    """A parameter, and the layer that uses it."""

    label: str  # the layer's name in errors
    parameter: nn.Parameter
    layer: int  # number of the layer


def _order_by_definition(architecture: Architecture, used: list[UsedParameter], module: nn.Module) -> Architecture:
    """Return the same graph with its layers in the order of flat weights, where branches allow it.

    Refuses a module that does not use all of its parameters, or not in an order in which layers can run.
    """
    labels = {one.layer: one.label for one in used}
    owners = {id(one.parameter): one.layer for one in used}
    for name, parameter in module.named_parameters():
        if id(parameter) not in owners:
            raise ArchitectureError(f"{name} is never used; leave it out")
    defined = list(dict.fromkeys(owners[id(parameter)] for parameter in module.parameters()))
    order = _layer_order(architecture, defined, labels)
    flat = [one.parameter for number in order for one in used if one.layer == number]
    if [id(one) for one in flat] != [id(one) for one in module.parameters()]:
        raise ArchitectureError(
            "the weights of its layers are not defined layer by layer; register them in their order"
        )
    if order == sorted(order):
        return architecture
    places = {old: new for new, old in enumerate(order)}
    return Architecture(
        architecture.shape,
        tuple(architecture.layers[number] for number in order),
        tuple(tuple(places.get(other, other) for other in architecture.reads[number]) for number in order),
    )


def _layer_order(architecture: Architecture, defined: list[int], labels: Mapping[int, str]) -> list[int]:
    """Return layers in the order of use, except that those with weights wait for those defined before them."""
    waiting, order, done = list(range(len(architecture.layers))), list[int](), {SAMPLES}
    coming = list(reversed(defined))
    while waiting:
        ready = next(
            (
                number
                for number in waiting
                if done.issuperset(architecture.reads[number]) and (number not in labels or number == coming[-1])
            ),
            None,
        )
        if ready is None:
            first, then = coming[-1], min(_ancestors(architecture, coming[-1]) & {*coming})
            raise ArchitectureError(
                f"{labels[first]} is defined before {labels[then]} but used after it; define layers in the order of "
                "their use"
            )
        if ready in labels:
            coming.pop()
        waiting.remove(ready)
        order.append(ready)
        done.add(ready)
    return order


def _ancestors(architecture: Architecture, number: int) -> set[int]:
    """Return all layers that one depends on."""
    found, open_ends = set[int](), [number]
    while open_ends:
        for other in architecture.reads[open_ends.pop()]:
            if other != SAMPLES and other not in found:
                found.add(other)
                open_ends.append(other)
    return found


def _compare(module: nn.Module, architecture: Architecture, in_order: bool) -> None:
    """Refuse a description that does not compute what the module does.

    in_order: layers are in the order of their use, so that dropout layers draw the same numbers.
    """
    drops = any(isinstance(layer, layers.Dropout) for layer in architecture.layers)
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.default_generator.manual_seed(0)  # the CPU alone: the generators of other devices are the user's
        again = module_of(architecture)
        with torch.no_grad():
            for parameter, other in zip(module.parameters(), again.parameters(), strict=True):
                other.copy_(parameter.add_(0.05 * torch.randn(parameter.shape)))  # zeros would hide a difference
                other.requires_grad_(parameter.requires_grad)
        features = torch.randn(3, *architecture.shape)
        loss_weights = torch.randn(3, architecture.classes)
        for training in (True, False) if in_order or not drops else (False,):
            try:
                found, expected = (
                    _output_and_gradients(each.train(training), features, loss_weights) for each in (again, module)
                )
            except Exception as error:
                raise ArchitectureError(f"it fails on three random samples ({first_line(error)})") from error
            if not _close(found, expected):
                raise ArchitectureError(
                    "its forward does more than torch.fx can see, such as a part without gradients or a choice of its "
                    "own; write it as layers alone"
                )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread; more do not pay for three samples."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _output_and_gradients(module: nn.Module, features: Tensor, loss_weights: Tensor) -> list[Tensor]:
    """Return the output and the gradients of all parameters, zeros for parameters without one."""
    module.zero_grad()
    torch.default_generator.manual_seed(1)  # the seed of dropout
    output = module(features.clone())
    if output.requires_grad:
        (output * loss_weights).sum().backward()
    return [output.detach(), *(_gradient(each) for each in module.parameters())]


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def _close(found: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    return all(
        one.shape == other.shape and bool((one - other).norm() <= 1e-3 * other.norm() + 1e-6)
        for one, other in zip(found, expected, strict=True)
    )
