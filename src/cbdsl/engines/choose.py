"""Which engine runs a model: the native kernels where they can, torch for the rest, and a sentence that says why."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from cbdsl.engines import native_engine
from cbdsl.engines.architecture import from_module
from cbdsl.engines.base import Engine
from cbdsl.engines.native_engine import NativeEngine
from cbdsl.engines.torch_engine import TorchEngine
from cbdsl.errors import UserError, unknown

ENGINES = ("auto", "native", "torch")


@dataclass(frozen=True, eq=False)
class Choice:
    """An engine, and why it is not the fastest one (empty if it is, or if the user asked for it)."""

    engine: Engine
    note: str = ""


def choose_engine(name: str, module: nn.Module, shape: tuple[int, ...], threads: int) -> Choice:
    """The engine that a spec names, for one network and samples of one shape."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    if name == "torch":
        return Choice(TorchEngine(module, threads))
    obstacle = native_engine.available() or native_engine.supports(module, shape)
    if obstacle is None:
        return Choice(NativeEngine(from_module(module, shape), threads))
    if name == "native":
        raise UserError(f"The native engine was asked for, but {obstacle}. Use --engine auto or --engine torch.")
    return Choice(TorchEngine(module, threads), f"torch engine: {obstacle}")
