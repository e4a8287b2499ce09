"""A run's network, described as data or built by a user's function: initial weights, named tensors, module.

torch is imported only for a module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cbdsl import register
from cbdsl.arrays import Doubles, Floats
from cbdsl.errors import UserError, unknown
from cbdsl.models.architecture import Architecture, describe_outputs, fits_outputs, from_module
from cbdsl.models.layers import ArchitectureError, Layer
from cbdsl.register import CUSTOM
from cbdsl.spec import Spec, Task

if TYPE_CHECKING:
    from torch import nn

_BITS = 24  # of every draw of 32: as many as a float32 has
_HALF = 2 ** (_BITS - 1)
_SLOPE = math.sqrt(5.0)  # torch's `a` of kaiming_uniform_ for dense layers and convolutions


def initial_weights(architecture: Architecture, seed: int) -> Floats:
    """Return the flat weights (D,) that torch draws after `torch.manual_seed(seed)`, equal to the bit."""
    # RandomState, because its numbers never change with numpy's version. Of the seed, torch uses 32 bits as well.
    drawn = sum(layer.size for layer in architecture.layers if layer.fan_in())
    words = np.random.RandomState(seed & 0xFFFFFFFF).bytes(4 * drawn)
    draws = np.frombuffer(words, "<u4") & np.uint32(2**_BITS - 1)  # whole numbers below 2^24
    centred: Doubles = draws.astype(np.float64) - _HALF  # from -2^23 to 2^23 - 1
    parts, used = [np.empty(0)], 0
    for layer in architecture.layers:
        for name, shape in layer.tensors().items():
            count = math.prod(shape)
            if not layer.fan_in():  # a factor and an offset that change nothing
                parts.append(np.full(count, name == "weight", np.float64))
                continue
            parts.append(centred[used : used + count] * (float(np.float32(_bound(layer, name))) / _HALF))  # exact
            used += count
    return np.concatenate(parts).astype(np.float32)


def _bound(layer: Layer, name: str) -> float:
    """Return the largest initial weight or bias, in the order of torch's arithmetic."""
    inputs = layer.fan_in()
    if name == "bias":
        return 1 / math.sqrt(inputs)
    gain = math.sqrt(2.0 / (1 + _SLOPE**2))
    return math.sqrt(3.0) * (gain / math.sqrt(inputs))


@dataclass(frozen=True, eq=False)
class Network:
    """A network for samples of one shape. Either a description, or a function that builds a module."""

    shape: tuple[int, ...]  # of a sample
    classes: int
    described: Architecture | None
    builder: Callable[[], nn.Module] | None = None

    @cached_property
    def subject(self) -> Architecture | nn.Module:
        """What an engine is chosen for: the description, or the user's module, built once."""
        return self.described if self.described is not None else self.build()

    @property
    def size(self) -> int:
        """D, the number of parameters."""
        if self.described is not None:
            return self.described.size
        return sum(int(np.prod(shape)) for _, shape in self.tensor_shapes())

    def description(self) -> Architecture:
        """Return the network as data; an ArchitectureError says what cannot be described."""
        if isinstance(self._description, ArchitectureError):
            raise self._description
        return self._description

    @cached_property
    def _description(self) -> Architecture | ArchitectureError:
        """The result of tracing the user's module, once: engine, attackers and the model's file use the same."""
        if isinstance(self.subject, Architecture):
            return self.subject
        try:
            return from_module(self.subject, self.shape)
        except ArchitectureError as error:
            return error

    def build(self) -> nn.Module:
        """Build a new torch module."""
        if self.builder is not None:
            import torch  # noqa: PLC0415

            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # tables that are drawn when a module is built are the same every time
                return self.builder()
        from cbdsl.models.to_torch import module_of  # noqa: PLC0415 - torch takes a second to load

        assert self.described is not None
        return module_of(self.described)

    def initial_weights(self, seed: int) -> Floats:
        """Return the weights (D,) that torch draws by default under this seed."""
        if self.described is not None:
            return initial_weights(self.described, seed)
        from cbdsl.models import to_torch  # noqa: PLC0415

        assert self.builder is not None
        return to_torch.module_weights(self.builder, seed)

    def module(self, weights: Floats) -> nn.Module:
        """Build a torch module with these weights, in evaluation mode."""
        from cbdsl.models.to_torch import load_flat  # noqa: PLC0415

        module = self.build()
        load_flat(module, weights)
        return module.eval()

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes of the parameters in the order of flat weights."""
        if self.described is None:
            module = self.subject
            yield from ((name, tuple(each.shape)) for name, each in module.named_parameters())  # type: ignore[union-attr]
            return
        yield from self.described.tensors().items()

    def tensors(self, weights: Floats) -> dict[str, Floats]:
        """Return flat weights (D,) as named tensors, with the constants of a user's module."""
        named, start = {}, 0
        for name, shape in self.tensor_shapes():
            end = start + int(np.prod(shape))
            named[name] = np.ascontiguousarray(weights[start:end]).reshape(shape)
            start = end
        if self.described is None:
            buffers = self.subject.state_dict().items()  # type: ignore[union-attr]
            named |= {name: each.detach().numpy() for name, each in buffers if name not in named}
        return named

    def flat(self, tensors: Mapping[str, Any], source: str) -> Floats:
        """Return named tensors as flat weights (D,); refuse those of another network."""
        parts = []
        for name, shape in self.tensor_shapes():
            if name not in tensors or tuple(tensors[name].shape) != shape:
                found = tuple(tensors[name].shape) if name in tensors else "missing"
                raise UserError(
                    f"{source} is not a model of this network: {name} should have the shape {shape} and is {found}.",
                    code="wrong-shape",
                )
            parts.append(np.asarray(tensors[name], np.float32).reshape(-1))
        return np.concatenate(parts)


def network_of(
    spec: Spec, shape: tuple[int, ...], classes: int, builder: object = None, task: Task = "classification"
) -> Network:
    """Return the network that a spec names, or that a user's function builds. classes: outputs of another task."""
    if builder is not None:
        return _checked(builder, shape, classes, task)
    if spec.model == CUSTOM:
        raise UserError("The model of this run was given in Python; give it again with model=...", code="invalid-part")
    make = register.model.make(spec.model, spec.options.of(spec.model))
    made = make(shape, classes)
    if not isinstance(made, Architecture):
        return _checked(lambda: make(shape, classes), shape, classes, task)
    if not fits_outputs(made.classes, classes, task):
        raise UserError(
            f"The model '{spec.model}' has {made.classes} outputs; {describe_outputs(classes, task)}.",
            code="wrong-shape",
        )
    return Network(shape, classes, made)


def _checked(builder: object, shape: tuple[int, ...], classes: int, task: Task) -> Network:
    """Return the network that a user's function builds, if it can be learned together; otherwise advice."""
    if isinstance(builder, str):
        raise unknown("model", builder, register.model.names(), register.OWN)
    try:
        from torch import nn  # noqa: PLC0415
    except ImportError as error:
        raise UserError(
            "A model of your own needs torch. Install it: pip install 'cbdsl[torch]'", code="missing-package"
        ) from error
    from cbdsl.models.check_module import check_trainable  # noqa: PLC0415

    if isinstance(builder, nn.Module):
        raise UserError(
            "model is a module that is built already; workers and tests need fresh ones. Give the class itself, or a "
            "function without arguments: model=lambda: Net(10).",
            code="wrong-type",
        )
    if not callable(builder):
        raise UserError(
            f"model is a {type(builder).__name__}; give a function without arguments that builds a module.",
            code="wrong-type",
        )
    network = Network(shape, classes, None, builder)
    try:
        module = network.subject
    except TypeError as error:
        raise UserError(
            f"model cannot be built without arguments ({error}). Bind them: model=lambda: Net(10).", code="invalid-part"
        ) from error
    if not isinstance(module, nn.Module):
        raise UserError(f"model builds a {type(module).__name__}, not a torch nn.Module.", code="wrong-type")
    check_trainable(module, shape, classes, task)
    return network


def read_tensors(path: Path) -> dict[str, Any]:
    """Read the named tensors of a .safetensors file."""
    from safetensors import SafetensorError  # noqa: PLC0415 - a device needs no models from files
    from safetensors.numpy import load  # noqa: PLC0415

    try:
        return load(path.read_bytes())
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UserError(
            f"The model {path} cannot be read ({error}). Give a finished run's folder or a .safetensors file.",
            code="unreadable-file",
        ) from error
