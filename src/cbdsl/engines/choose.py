"""Which engine runs a network: the native kernels where they can, torch for the rest, and a sentence that says why.

torch is imported only when it is to run the network, so a described network on the native engine never needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbdsl.engines import native_engine
from cbdsl.engines.architecture import Architecture, ArchitectureError, from_module
from cbdsl.engines.base import Engine
from cbdsl.engines.native_engine import NativeEngine
from cbdsl.errors import UserError, missing, unknown

if TYPE_CHECKING:
    from torch import nn

ENGINES = ("auto", "native", "torch")


@dataclass(frozen=True, eq=False)
class Choice:
    """An engine, and why it is not the fastest one (empty if it is, or if the user asked for it)."""

    engine: Engine
    note: str = ""


def choose_engine(name: str, network: Architecture | nn.Module, shape: tuple[int, ...], threads: int) -> Choice:
    """The engine that a spec names, for one network and samples of one shape."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    if name == "torch":
        return Choice(_torch_engine(network, threads, "the torch engine was asked for"))
    obstacle = native_engine.available()
    if obstacle is None:
        try:
            return Choice(NativeEngine(_described(network, shape), threads))
        except ArchitectureError as error:
            obstacle = f"the native engine cannot run this model: {error}"
    if name == "native":
        raise UserError(f"The native engine was asked for, but {obstacle}. Use --engine auto or --engine torch.")
    return Choice(_torch_engine(network, threads, obstacle), f"torch engine: {obstacle}")


def _described(network: Architecture | nn.Module, shape: tuple[int, ...]) -> Architecture:
    """A network as data, for samples of this shape; an ArchitectureError says what stands against it."""
    if not isinstance(network, Architecture):
        return from_module(network, shape)
    if network.shape != shape:
        Architecture(shape, network.layers, network.reads)  # it may say more
        raise ArchitectureError(f"it takes samples of shape {network.shape}, not {shape}")
    return network


def _torch_engine(network: Architecture | nn.Module, threads: int, why: str) -> Engine:
    try:
        from cbdsl.engines.torch_engine import TorchEngine  # noqa: PLC0415 - it may be missing, and takes seconds
        from cbdsl.engines.torch_modules import module_of  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise missing("torch", "torch", why) from error
    return TorchEngine(module_of(network) if isinstance(network, Architecture) else network, threads)
