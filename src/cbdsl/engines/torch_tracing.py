"""A torch module of any class as plain data: torch.fx follows its forward, which must be made of layers that are known.

Works on copies and never changes a module. Tracing sees the operations on tensors and nothing else: not under which
context they ran, not what Python did between them. So what was read is held against the module at the end, on random
samples, outputs and gradients.
"""

from __future__ import annotations

import copy
import linecache
import operator
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from cbdsl.engines.architecture import SAMPLES, Architecture, ArchitectureError, Dropout, Layer, Shape
from cbdsl.engines.torch_graph import Graph
from cbdsl.engines.torch_modules import module_of

_TRACING = threading.Lock()  # torch.fx puts its own methods into nn.Module while it works
_HERE = Path(__file__).parent
_TORCH = Path(torch.__file__).parent


def read_module(module: nn.Module, shape: Shape) -> Architecture:
    """Describe a torch module for samples of `shape`; an ArchitectureError names the layer or line that cannot be."""
    training, in_order = _read(_copied(module).train(), shape)
    scoring, _ = _read(_copied(module).eval(), shape)
    if _without_dropout(training) != scoring:
        raise ArchitectureError("it computes something else while it trains than while it is scored")
    _compare(_copied(module), training, in_order)
    return training


def _without_dropout(architecture: Architecture) -> Architecture:
    """The network as it is scored."""
    made, layers, reads = {SAMPLES: SAMPLES}, list[Layer](), list[tuple[int, ...]]()
    for number, (layer, read) in enumerate(zip(architecture.layers, architecture.reads, strict=True)):
        if isinstance(layer, Dropout):
            made[number] = made[read[0]]
        else:
            made[number] = len(layers)
            layers.append(layer)
            reads.append(tuple(made[other] for other in read))
    return Architecture(architecture.shape, tuple(layers), tuple(reads))


def _copied(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module).to("cpu", torch.float32)
    except Exception as error:
        raise ArchitectureError(f"it cannot be copied ({_first_line(error)})") from error


def _read(module: nn.Module, shape: Shape) -> tuple[Architecture, bool]:
    """The description, and whether its layers are in the order of their use."""
    for name, part in module.named_modules():
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks:
            raise ArchitectureError(f"{f'layer {name}' if name else 'the module'} carries hooks; leave them out")
    whole = _Whole(module)
    graph = Graph(whole, module, shape)
    _trace(graph, whole)
    return graph.architecture()


class _Whole(nn.Module):
    """The module as engines call it: with samples alone, so that other arguments of its forward keep their defaults."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, samples: Tensor) -> Any:  # noqa: ANN401
        return self.module(samples)


def _trace(graph: Graph, whole: nn.Module) -> None:
    """Let a graph follow every operation of a module's forward."""
    with _TRACING, torch.random.fork_rng(devices=[]):
        before = _generators()
        try:
            _Tracer(graph).trace(whole)
        except ArchitectureError:
            raise
        except Exception as error:
            reason = "write x.size(0) for len(x)" if "'len'" in str(error) else _first_line(error)
            raise ArchitectureError(f"{_line_of_error(error)}: torch.fx cannot follow it ({reason})") from error
        if _generators() != before:
            raise ArchitectureError("its forward draws random numbers")


def _generators() -> tuple[object, ...]:
    numpy = np.random.get_state()  # noqa: NPY002 - the generator that others use
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), str(numpy)


class _Proxy(fx.Proxy):
    """Stands for a tensor; torch.fx itself takes `x += y` for `x = x + y`, which others who hold x do not see."""

    def __iadd__(self, other: Any) -> fx.Proxy:  # noqa: ANN401
        return self._computed(operator.iadd, other)

    def __isub__(self, other: Any) -> fx.Proxy:  # noqa: ANN401
        return self._computed(operator.isub, other)

    def __imul__(self, other: Any) -> fx.Proxy:  # noqa: ANN401
        return self._computed(operator.imul, other)

    def __itruediv__(self, other: Any) -> fx.Proxy:  # noqa: ANN401
        return self._computed(operator.itruediv, other)

    def _computed(self, function: Callable[..., Any], other: Any) -> fx.Proxy:  # noqa: ANN401
        return self.tracer.create_proxy("call_function", function, (self, other), {})


class _Tracer(fx.Tracer):
    """torch.fx, with a graph that follows it and knows the sizes."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """What a module's forward is given in place of a tensor."""
        return _Proxy(node, self)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """The sizes of a shape one by one; how many there are is known."""
        known = self._graph.sizes.get(obj.node)
        if not isinstance(known, tuple):
            return super().iter(obj)
        return iter([operator.getitem(obj, place) for place in range(len(known))])

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Layers of torch, and whatever is derived from one that is known: it may compute anything."""
        return super().is_leaf_module(m, module_qualified_name) or Graph.is_layer(m)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401
        """A module that is no part of the traced one was made on the way, or belongs to another thread."""
        if all(m is not part for part in self.root.modules()):
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:  # noqa: ANN401
        """Follow it, by the line of the user's own code where it was asked for."""
        node = super().create_node(*args, **kwargs)
        frame = sys._getframe(1)
        while frame.f_back is not None and not _is_users(frame.f_code):
            frame = frame.f_back
        self._graph.follow(node, _line(frame.f_code, frame.f_lineno))
        return node

    def to_bool(self, obj: fx.Proxy) -> bool:
        """A decision that depends on the shape of a sample alone is the same for all of them."""
        known = self._graph.sizes.get(obj.node)
        return super().to_bool(obj) if known is None else bool(known)


def _is_users(code: CodeType) -> bool:
    folders = Path(code.co_filename).parents
    return _TORCH not in folders and _HERE not in folders


def _line(code: CodeType, number: int) -> str:
    text = linecache.getline(code.co_filename, number).strip()
    return f"line {number} of {Path(code.co_filename).name}" + (f" ({text:.80})" if text else "")


def _line_of_error(error: Exception) -> str:
    found, trace = "the module", error.__traceback__
    while trace is not None:
        if _is_users(trace.tb_frame.f_code):
            found = _line(trace.tb_frame.f_code, trace.tb_lineno)
        trace = trace.tb_next
    return found


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(" .")


def _compare(module: nn.Module, architecture: Architecture, in_order: bool) -> None:
    """Refuse a description that does not compute what the module does.

    in_order: layers are in the order of their use, so that those which drop numbers draw the same ones.
    """
    drops = any(isinstance(layer, Dropout) for layer in architecture.layers)
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(0)
        again = module_of(architecture)
        with torch.no_grad():
            for parameter, other in zip(module.parameters(), again.parameters(), strict=True):
                other.copy_(parameter.add_(0.05 * torch.randn(parameter.shape)))  # zeros would hide a difference
        features = torch.randn(3, *architecture.shape)
        towards = torch.randn(3, architecture.classes)
        for training in (True, False) if in_order or not drops else (False,):
            try:
                found, expected = (_outcome(each.train(training), features, towards) for each in (again, module))
            except Exception as error:
                raise ArchitectureError(f"it fails on three random samples ({_first_line(error)})") from error
            if not _close(found, expected):
                raise ArchitectureError(
                    "its forward does more than torch.fx can see, such as a part without gradients or a choice of its "
                    "own; write it as layers alone"
                )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Three samples are not worth waking threads for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _outcome(module: nn.Module, features: Tensor, towards: Tensor) -> list[Tensor]:
    """The outputs, and the gradients of all parameters; zeros where there are none."""
    module.zero_grad()
    torch.manual_seed(1)  # what drops numbers draws them
    output = module(features.clone())
    if output.requires_grad:
        (output * towards).sum().backward()
    return [output.detach(), *(_gradient(each) for each in module.parameters())]


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def _close(found: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    return all(
        one.shape == other.shape and bool((one - other).norm() <= 1e-3 * other.norm() + 1e-6)
        for one, other in zip(found, expected, strict=True)
    )
