"""A run's network, described as data or built by a user's function: initial weights, named tensors, module.

torch is imported only for a module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cbdsl import register
from cbdsl.arrays import Bools, Doubles, Floats
from cbdsl.errors import UserError, unknown
from cbdsl.models.architecture import Architecture, describe_outputs, fits_outputs, from_module
from cbdsl.models.frozen_weights import FrozenWeights
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
    if name != "weight":  # a bias, or anything of a recurrent layer
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
    constants: FrozenWeights | None = None  # of a description; a module has its own
    calibration: Floats | None = None  # features (N, *shape) whose statistics BatchNorm layers score with

    @cached_property
    def subject(self) -> Architecture | nn.Module:
        """What an engine is chosen for: the description, or the user's module, built once."""
        return self.described if self.described is not None else self.build()

    @cached_property
    def frozen(self) -> FrozenWeights | None:
        """The weights that do not train; None if all do."""
        if self.described is not None:
            return self.constants
        from cbdsl.models.to_torch import frozen_of  # noqa: PLC0415 - torch takes a second to load

        return frozen_of(self.subject)  # type: ignore[arg-type]  # a module

    @cached_property
    def keeps_statistics(self) -> bool:
        """Whether it has BatchNorm layers with statistics of their own."""
        if self.described is not None:
            return False
        from cbdsl.models.batch_statistics import statistics_layers  # noqa: PLC0415 - torch takes a second to load

        return bool(statistics_layers(self.subject))  # type: ignore[arg-type]  # a module

    def norm_places(self) -> Bools:
        """Return which of the D weights are factors and offsets of BatchNorm layers."""
        names: set[str] = set()
        if self.described is None:
            from cbdsl.models.batch_statistics import norm_parameters  # noqa: PLC0415 - torch takes a second to load

            names = norm_parameters(self.subject)  # type: ignore[arg-type]  # a module
        parts = [np.full(math.prod(shape), name in names) for name, shape in self.tensor_shapes()]
        places: Bools = np.concatenate(parts)
        return places if self.frozen is None else places[self.frozen.trains]

    @property
    def size(self) -> int:
        """D, the number of parameters that train."""
        return self.whole_size if self.frozen is None else self.frozen.size

    @property
    def whole_size(self) -> int:
        """P, the number of parameters, frozen ones included."""
        if self.described is not None:
            return self.described.size
        return sum(math.prod(shape) for _, shape in self.tensor_shapes())

    def whole(self, weights: Floats) -> Floats:
        """Return all weights of a model, (D,) -> (P,)."""
        return weights if self.frozen is None else self.frozen.fill(weights)

    def trained(self, whole: Floats) -> Floats:
        """Return the weights that train, (P,) -> (D,)."""
        return whole if self.frozen is None else whole[self.frozen.trains]

    def frozen_at(self, whole: Floats) -> Network:
        """Return the network with the frozen weights of a model, (P,)."""
        if self.frozen is None:
            return self
        frozen, builder = replace(self.frozen, values=whole), self.builder
        if builder is None:
            return replace(self, constants=frozen)

        def build() -> nn.Module:
            from cbdsl.models.to_torch import freeze  # noqa: PLC0415

            return freeze(builder(), frozen)

        return replace(self, builder=build)

    def frozen_names(self) -> tuple[str, ...]:
        """Return the names of the tensors that do not train at all."""
        if self.frozen is None:
            return ()
        edges = np.cumsum([math.prod(shape) for _, shape in self.tensor_shapes()])[:-1]
        parts = np.split(self.frozen.trains, edges)
        return tuple(name for (name, _), trains in zip(self.tensor_shapes(), parts, strict=True) if not trains.any())

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
        from cbdsl.models.to_torch import freeze, module_of  # noqa: PLC0415 - torch takes a second to load

        assert self.described is not None
        made = module_of(self.described)
        return made if self.constants is None else freeze(made, self.constants)

    def initial_weights(self, seed: int) -> Floats:
        """Return the weights (D,) that torch draws by default under this seed."""
        if self.described is not None:
            return self.trained(initial_weights(self.described, seed))
        from cbdsl.models import to_torch  # noqa: PLC0415

        assert self.builder is not None
        return self.trained(to_torch.module_weights(self.builder, seed))

    def module(self, weights: Floats) -> nn.Module:
        """Build a torch module with these weights, in evaluation mode."""
        from cbdsl.models.to_torch import load_flat  # noqa: PLC0415

        module = self.build()
        load_flat(module, self.whole(weights))
        if self.calibration is not None:
            import torch  # noqa: PLC0415

            from cbdsl.models.batch_statistics import calibrate, statistics_layers  # noqa: PLC0415

            calibrate(module, statistics_layers(module), torch.from_numpy(self.calibration))
        return module.eval()

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes of all parameters in the order of flat weights."""
        if self.described is None:
            module = self.subject
            yield from ((name, tuple(each.shape)) for name, each in module.named_parameters())  # type: ignore[union-attr]
            return
        yield from self.described.tensors().items()

    def tensors(self, weights: Floats) -> dict[str, Floats]:
        """Return flat weights (D,) as named tensors, with the frozen weights and the constants of a user's module."""
        named, start, whole = {}, 0, self.whole(weights)
        for name, shape in self.tensor_shapes():
            end = start + int(np.prod(shape))
            named[name] = np.ascontiguousarray(whole[start:end]).reshape(shape)
            start = end
        if self.described is None:
            module = self.subject if self.calibration is None else self.module(weights)
            buffers = module.state_dict().items()  # type: ignore[union-attr]
            named |= {name: each.detach().numpy() for name, each in buffers if name not in named}
        return named

    def flat(self, tensors: Mapping[str, Any], source: str) -> Floats:
        """Return named tensors as all weights of a model, (P,); refuse those of another network."""
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
    spec: Spec,
    shape: tuple[int, ...],
    classes: int,
    builder: object = None,
    task: Task = "classification",
    statistics: bool = False,
) -> Network:
    """Return the network that a spec names, or that a user's function builds.

    classes: how many there are, or the outputs of another task. statistics: see `check_trainable`.
    """
    if builder is not None:
        return _checked(builder, shape, classes, task, statistics)
    if spec.model == CUSTOM:
        raise UserError("The model of this run was given in Python; give it again with model=...", code="invalid-part")
    make = register.model.make(spec.model, spec.options.of(spec.model))
    made = make(shape, classes)
    if not isinstance(made, Architecture):
        return _checked(lambda: make(shape, classes), shape, classes, task, statistics)
    if not fits_outputs(made.classes, classes, task):
        raise UserError(
            f"The model '{spec.model}' has {made.classes} outputs; {describe_outputs(classes, task)}.",
            code="wrong-shape",
        )
    return Network(shape, classes, made)


def _checked(builder: object, shape: tuple[int, ...], classes: int, task: Task, statistics: bool) -> Network:
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
    check_trainable(module, shape, classes, task, statistics)
    return network


def read_tensors(path: Path) -> dict[str, Any]:
    """Read the named tensors of a .safetensors file."""
    from safetensors import SafetensorError  # noqa: PLC0415 - a device needs no models from files
    from safetensors.numpy import load  # noqa: PLC0415

    try:
        if not path.is_file():  # reading a device never ends, and a pipe may never start
            raise OSError("it is not a file" if path.exists() else "it does not exist")
        return load(path.read_bytes())
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UserError(
            f"The model {path} cannot be read ({error}). Give a finished run's folder or a .safetensors file.",
            code="unreadable-file",
        ) from error
