"""A torch module of any class as plain data: torch.fx follows its forward, which must be one layer after the other.

Works on copies and never changes a module. Tracing sees the operations on tensors and nothing else: not under which
context they ran, not what Python did between them. So what was read is held against the module at the end, on random
samples, outputs and gradients.
"""

from __future__ import annotations

import copy
import linecache
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

from cbdsl.engines.architecture import Architecture, ArchitectureError, Shape
from cbdsl.engines.torch_chain import Chain, same_order
from cbdsl.engines.torch_modules import module_of

_TRACING = threading.Lock()  # torch.fx puts its own methods into nn.Module while it works
_HERE = Path(__file__).parent
_TORCH = Path(torch.__file__).parent


def read_module(module: nn.Module, shape: Shape) -> Architecture:
    """Describe a torch module for samples of `shape`; an ArchitectureError names the layer or line that cannot be."""
    training, scoring = (_read(_copied(module).train(mode), shape) for mode in (True, False))
    if training.layers != scoring.layers:
        raise ArchitectureError("it computes something else while it trains than while it is scored")
    _compare(_copied(module), training)
    return training


def _copied(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module).to("cpu", torch.float32)
    except Exception as error:
        raise ArchitectureError(f"it cannot be copied ({_first_line(error)})") from error


def _read(module: nn.Module, shape: Shape) -> Architecture:
    for name, part in module.named_modules():
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks:
            raise ArchitectureError(f"{f'layer {name}' if name else 'the module'} carries hooks")
    chain = Chain(module, shape)
    _trace(chain, module)
    same_order(chain.parameters, module)
    return Architecture(shape, tuple(chain.layers))


class _Whole(nn.Module):
    """The module as engines call it: with samples alone, so that other arguments of its forward keep their defaults."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, samples: Tensor) -> Any:  # noqa: ANN401
        return self.module(samples)


def _trace(chain: Chain, module: nn.Module) -> None:
    """Let a chain follow every operation of a module's forward."""
    with _TRACING, torch.random.fork_rng(devices=[]):
        before = _generators()
        try:
            _Tracer(chain).trace(_Whole(module))
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


class _Tracer(fx.Tracer):
    """torch.fx, with a chain that follows it and knows the sizes."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self._chain = chain

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Layers of torch, and whatever is derived from one that is known: it may compute anything."""
        return super().is_leaf_module(m, module_qualified_name) or Chain.is_layer(m)

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
        self._chain.follow(node, _line(frame.f_code, frame.f_lineno))
        return node

    def to_bool(self, obj: fx.Proxy) -> bool:
        """A decision that depends on the shape of a sample alone is the same for all of them."""
        known = self._chain.sizes.get(obj.node)
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


def _compare(module: nn.Module, architecture: Architecture) -> None:
    """Refuse a description that does not compute what the module does."""
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(0)
        again = module_of(architecture)
        with torch.no_grad():
            for parameter, other in zip(module.parameters(), again.parameters(), strict=True):
                other.copy_(parameter.add_(0.05 * torch.randn(parameter.shape)))  # zeros would hide a difference
        features = torch.randn(3, *architecture.shape)
        towards = torch.randn(3, architecture.classes)
        for training in (True, False):
            found, expected = (_outcome(each.train(training), features, towards) for each in (again, module))
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
