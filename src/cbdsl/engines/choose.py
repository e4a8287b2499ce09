"""Chooses the engine for a network: the native kernels where they can run it, otherwise torch.

torch is imported only if it runs the network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from cbdsl.engines import native_engine
from cbdsl.engines.augmentations import Augmentation
from cbdsl.engines.engine import Engine
from cbdsl.engines.loss import CROSS_ENTROPY, Loss
from cbdsl.engines.native_engine import NativeEngine
from cbdsl.errors import UserError, missing, unknown
from cbdsl.models.architecture import Architecture, from_module
from cbdsl.models.frozen_weights import FrozenWeights
from cbdsl.models.layers import ArchitectureError
from cbdsl.models.network import Network
from cbdsl.spec import Device

if TYPE_CHECKING:
    from torch import nn

ENGINES = ("auto", "native", "torch")
DEVICES: tuple[str, ...] = get_args(Device)
_GPUS = ("cuda", "mps")


@dataclass(frozen=True, eq=False)
class Choice:
    """An engine, and why it is not the fastest one ("" if it is, or if the user asked for it)."""

    engine: Engine
    note: str = ""


def check_device(name: str, device: str) -> None:
    """Refuse an unknown engine or device, or a combination that does not work."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    if device not in DEVICES:
        raise unknown("device", device, DEVICES)
    if name == "native" and device in _GPUS:
        raise UserError(
            f"The native engine runs on the CPU, but the device {device} was asked for. Use --engine torch (or auto) "
            f"with --device {device}, or --engine native alone.",
            code="conflict",
        )


def choose_engine(
    name: str,
    network: Architecture | nn.Module | Network,
    shape: tuple[int, ...],
    threads: int,
    device: str = "auto",
    loss: Loss = CROSS_ENTROPY,
    augmentation: Augmentation | None = None,
) -> Choice:
    """Build the engine that a spec names, for one network and samples of one shape.

    device: where torch computes; a GPU means torch. "auto" is a GPU only where torch has to run the network anyway.
    augmentation: applied in training; it means torch.
    """
    check_device(name, device)
    if name == "torch" or device in _GPUS:
        asked = "the torch engine" if name == "torch" else f"the device {device}"
        return Choice(_torch_engine(network, threads, f"{asked} was asked for", device, loss, augmentation))
    obstacle = native_engine.available()
    if loss.function is not None:
        obstacle = "the loss was given in Python"
    if augmentation is not None:
        obstacle = "an augmentation changes tensors of torch"
    if obstacle is None:
        try:
            return Choice(NativeEngine(_described(network, shape), threads, loss, _frozen(network)))
        except ArchitectureError as error:
            obstacle = f"the native engine cannot run this model: {error}"
    if name == "native":
        raise UserError(
            f"The native engine was asked for, but {obstacle}. Use --engine auto or --engine torch.",
            code="not-supported",
        )
    engine = _torch_engine(network, threads, obstacle, device, loss, augmentation)
    return Choice(engine, f"{engine.name} engine: {obstacle}")


def _frozen(network: Architecture | nn.Module | Network) -> FrozenWeights | None:
    if isinstance(network, Network):
        return network.frozen
    if isinstance(network, Architecture):
        return None
    from cbdsl.models.to_torch import frozen_of  # noqa: PLC0415 - here is a module, so torch is loaded

    return frozen_of(network)


def _described(network: Architecture | nn.Module | Network, shape: tuple[int, ...]) -> Architecture:
    """Return a network as data, for samples of this shape; an ArchitectureError says what prevents it."""
    if isinstance(network, Network):
        if network.described is None:
            return network.description()
        network = network.described
    if not isinstance(network, Architecture):
        return from_module(network, shape)
    if network.shape != shape:
        Architecture(shape, network.layers, network.reads)  # it may say more
        raise ArchitectureError(f"it takes samples of shape {network.shape}, not {shape}")
    return network


def _torch_engine(
    network: Architecture | nn.Module | Network,
    threads: int,
    why: str,
    device: str,
    loss: Loss,
    augmentation: Augmentation | None,
) -> Engine:
    """Return the engine that loops over workers, which is faster on the CPU, or the stacked one for a GPU."""
    try:
        from cbdsl.engines.torch_engine import (  # noqa: PLC0415
            CPU,
            StackedTorchEngine,
            TorchEngine,
            select_device,
        )
        from cbdsl.models.to_torch import module_of  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise missing("torch", "torch", why) from error
    place = select_device(device)
    calibration = network.calibration if isinstance(network, Network) else None
    if isinstance(network, Network):
        network = network.subject if network.described is None else network.build()
    module = module_of(network) if isinstance(network, Architecture) else network
    if place == CPU:
        return TorchEngine(module, threads, loss=loss, calibration=calibration, augmentation=augmentation)
    return StackedTorchEngine(module, place, loss=loss, calibration=calibration, augmentation=augmentation)
