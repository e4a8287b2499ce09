"""Which engine runs a model."""

from __future__ import annotations

from torch import nn

from cbdsl.engines.base import Engine
from cbdsl.engines.torch_engine import TorchEngine
from cbdsl.errors import unknown

ENGINES = ("auto", "torch")


def make_engine(name: str, module: nn.Module, threads: int) -> Engine:
    """The engine that a spec names, for one network."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    return TorchEngine(module, threads)
