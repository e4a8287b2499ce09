"""Reads and writes the file of a trained model: its weights, its network and how features were scaled.

The file is a .safetensors. Its metadata hold the network as a graph, the shape of a sample, the scaling of features and
the names of classes. Files may come from strangers: malformed ones raise a UserError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from cbdsl.arrays import Floats
from cbdsl.data.dataset import Scaling
from cbdsl.errors import UserError, shown, unknown
from cbdsl.models.architecture import Architecture
from cbdsl.models.layers import LARGEST, ArchitectureError
from cbdsl.models.network import Network, read_tensors
from cbdsl.register import CUSTOM
from cbdsl.spec import LOSSES_OF_TASKS, Task, init_file
from cbdsl.util.files import read_json
from cbdsl.util.formatting import single_line
from cbdsl.util.memory import require_memory
from cbdsl.util.serialize import Bounds, field_types, from_plain, setting, to_plain

if TYPE_CHECKING:
    from torch import nn

FORMAT = "1"
_BY_TASK = ("task", "loss", "loss_setting", "target_scaling", "target_names", "threshold")
_KEYS = ("graph", "obstacle", "shape", "scaling", "classes", "tensors", "frozen", *_BY_TASK)
_PREFIX = "cbdsl_"
_LONGEST = 2**24  # characters of one entry
_LONGEST_NAME = 100


class _DamagedError(ValueError):
    """Malformed metadata; the message is the end of a sentence."""


@dataclass(frozen=True)
class ModelMetadata:
    """The metadata of a model's file."""

    shape: Annotated[tuple[Annotated[int, Bounds(1, LARGEST)], ...], Bounds(1, 16)]  # of a sample
    graph: Architecture | None  # None if the network cannot be described
    tensors: tuple[Annotated[str, Bounds(0, 2**16)], ...]  # in the order of flat weights
    scaling: Scaling | None = None
    class_names: tuple[Annotated[str, Bounds(0, _LONGEST_NAME)], ...] = setting((), "of the classes", "classes")
    obstacle: str = ""  # why there is no graph
    frozen: tuple[Annotated[str, Bounds(0, 2**16)], ...] = ()  # those of `tensors` that did not train
    task: Task = "classification"
    loss: str = "cross-entropy"
    loss_setting: float = 0.0
    target_scaling: Scaling | None = None  # of a regression
    target_names: tuple[Annotated[str, Bounds(0, _LONGEST_NAME)], ...] = ()
    threshold: float | None = None  # of a reconstruction: what is above it is not normal

    @staticmethod
    def of(network: Network, scaling: Scaling | None = None, class_names: tuple[str, ...] = ()) -> ModelMetadata:
        """Return the metadata of a network and of the data that it was trained on."""
        graph, obstacle = None, ""
        try:
            graph = network.description()
        except ArchitectureError as error:
            obstacle = single_line(str(error))
        tensors = tuple(name for name, _ in network.tensor_shapes())
        names = tuple(single_line(str(name))[:_LONGEST_NAME] for name in class_names[: network.classes])
        return ModelMetadata(network.shape, graph, tensors, scaling, names, obstacle, network.frozen_names())

    def metadata(self) -> dict[str, str]:
        """Return the strings for a .safetensors file."""
        values = to_plain(replace(self, graph=None, obstacle=""))
        values["graph"] = None if self.graph is None else self.graph.to_dict()
        texts = {name: "" if value is None else json.dumps(value, allow_nan=False) for name, value in values.items()}
        for name in _BY_TASK:  # a classifier's file is as it always was
            if getattr(self, name) == getattr(ModelMetadata, name):
                del texts[name]
        texts |= {"format": FORMAT, "obstacle": self.obstacle}
        if not self.frozen:
            del texts["frozen"]
        return {f"{_PREFIX}{name}": text for name, text in texts.items()}

    @staticmethod
    def read(metadata: Mapping[str, str], source: str, again: str) -> ModelMetadata:
        """Read the metadata of a file; refuse missing or inconsistent ones.

        source: the file's name in errors. again: how to get a better file.
        """
        version = metadata.get(f"{_PREFIX}format")
        if version is None:
            raise UserError(
                f"{source} holds weights alone and does not say of which network: an earlier version or another "
                f"program wrote it. {again}",
                code="not-supported",
            )
        if version != FORMAT:
            raise UserError(
                f"{source} is written in format {version!r:.20}; this version reads {FORMAT}. {again}",
                code="not-supported",
            )
        try:
            given = {name: _value(metadata, name) for name in _KEYS}
            values = {"tensors": [], **{name: value for name, value in given.items() if value != ""}}
            values["graph"] = _graph(values.get("graph"))
            card = from_plain(ModelMetadata, values, defaults=True, unknown_key=_unknown_key)
            card._check()
        except (_DamagedError, UserError, ArchitectureError) as error:
            raise UserError(f"{source} is damaged or made up: {error} {again}", code="damaged-file") from error
        return card

    def _check(self) -> None:
        """Refuse names that cannot be printed, and parts that do not fit together."""
        for text in (*self.tensors, *self.frozen, *self.class_names, *self.target_names):
            if not text.isprintable():
                raise _DamagedError(f"one of its names is {shown(text)}, which cannot be printed.")
        if self.scaling is not None and len(self.scaling.mean) != self.shape[0]:
            raise _DamagedError(
                f"it scales {len(self.scaling.mean)} channels, and a sample of shape {self.shape} has {self.shape[0]}."
            )
        if not {*self.frozen} <= {*self.tensors}:
            raise _DamagedError(f"it says that {shown(min({*self.frozen} - {*self.tensors}))} is frozen, and has none.")
        if self.loss not in (*LOSSES_OF_TASKS[self.task], CUSTOM) or (
            self.loss == "huber" and not self.loss_setting > 0
        ):
            raise _DamagedError(f"its loss {shown(self.loss)} is not one of a {self.task}.")
        if (self.target_scaling is not None) != (self.task == "regression"):
            raise _DamagedError(f"the scaling of targets is {self.target_scaling}, and its task is {self.task}.")
        if self.graph is None:
            return
        wanted = self.graph.classes
        if self.target_scaling is not None and len(self.target_scaling.mean) != wanted:
            raise _DamagedError(f"it scales {len(self.target_scaling.mean)} targets of {wanted}.")
        if self.task == "reconstruction" and math.prod(self.shape) != wanted:
            raise _DamagedError(f"its network makes {wanted} numbers of a sample of shape {self.shape}.")
        if self.graph.shape not in {self.shape, (math.prod(self.shape),)}:
            raise _DamagedError(f"its network takes {self.graph.shape}, and a sample has the shape {self.shape}.")
        if len(self.class_names) > self.graph.classes:
            raise _DamagedError(f"it names {len(self.class_names)} classes of {self.graph.classes}.")


@dataclass(frozen=True, eq=False)
class SavedModel:
    """A trained model from a file."""

    card: ModelMetadata
    weights: Floats  # (P,), frozen ones included
    source: str

    @property
    def graph(self) -> Architecture:
        """The network as data; a UserError says why there is none."""
        if self.card.graph is None:
            raise UserError(
                f"The network of {self.source} is not described ({self.card.obstacle or 'no reason is given'}). Only "
                "torch can run it: build its module again and load the tensors of the file into it.",
                code="not-supported",
            )
        return self.card.graph

    @cached_property
    def model(self) -> nn.Module:
        """The model as a torch module in evaluation mode. It takes features that are scaled already."""
        return Network(self.graph.shape, self.graph.classes, self.graph).module(self.weights)

    def class_name(self, label: int) -> str:
        """Return the name of a class, or its number if it has none."""
        return self.card.class_names[label] if label < len(self.card.class_names) else str(label)


def file_of(card: ModelMetadata, tensors: Mapping[str, Any], notes: Mapping[str, str]) -> bytes:
    """Return the bytes of a model's file; the same for the same model. notes: more strings for its metadata."""
    from safetensors.numpy import save  # noqa: PLC0415 - a device that keeps no model does without

    metadata = {"format": "pt", **card.metadata(), **{f"{_PREFIX}{name}": text for name, text in notes.items()}}
    content = save(dict(tensors), metadata)
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))  # the library has them in any order
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[start:]


def notes_of(path: Path) -> dict[str, str]:
    """Read the strings in the metadata of a model's file; return {} if there is no such file."""
    from safetensors import SafetensorError  # noqa: PLC0415

    try:
        return {name.removeprefix(_PREFIX): text for name, text in _metadata(path).items()}
    except (OSError, SafetensorError):
        return {}


def load(source: Path | str) -> SavedModel:
    """Read the trained model of a run's folder or of a .safetensors file.

    >>> saved = load("runs/mine")  # doctest: +SKIP
    >>> logits = saved.model(features)  # doctest: +SKIP

    `model` is a torch module; it takes features that are scaled already, (N, *shape).
    """
    path = init_file(str(source))
    if not path.is_file():
        where = f"{source} has no model.safetensors" if path != Path(source) else f"{source} is not there"
        raise UserError(f"{where}. Give the folder of a finished run or a .safetensors file.", code="missing-file")
    is_run = path != Path(source)
    again = f"Write it again from the rest: cbdsl resume {source}" if is_run else "Give a model that `cbdsl run` wrote."
    require_memory(3 * path.stat().st_size, f"The model {path} takes", "Give a smaller one.")
    tensors = read_tensors(path)
    card = ModelMetadata.read(_metadata(path), str(path), again)
    return SavedModel(card, _flat(card, tensors, f"{path} is damaged or made up:", again), str(source))


def require_task(path: Path, task: Task) -> None:
    """Raise UserError if a model's file names another task than this one."""
    metadata = _metadata(path)
    known = _value(metadata, "task") or ("classification" if f"{_PREFIX}format" in metadata else task)
    if known != task:
        raise UserError(
            f"{path} is a model for {shown(known)}, and the data's task is {task}. Start from a model of that task, or "
            "leave --init out.",
            code="conflict",
        )


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import safe_open  # noqa: PLC0415 - a device needs no models from files

    with safe_open(path, framework="numpy") as file:  # it was read before, so it can be
        return dict(file.metadata() or {})


def _flat(card: ModelMetadata, tensors: Mapping[str, Any], damaged: str, again: str) -> Floats:
    """The tensors one after the other; an error unless they are what the card speaks of."""
    for name in card.tensors:
        if name not in tensors or tensors[name].dtype.kind != "f":
            found = f"holds {tensors[name].dtype}" if name in tensors else "is missing"
            raise UserError(f"{damaged} the tensor {shown(name)} {found}. {again}", code="damaged-file")
    parts = [np.asarray(tensors[name], np.float32).reshape(-1) for name in card.tensors]
    flat: Floats = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    if card.graph is not None and len(flat) != card.graph.size:
        raise UserError(
            f"{damaged} it has {len(flat):,} weights, its network {card.graph.size:,}. {again}", code="damaged-file"
        )
    return flat


def _value(metadata: Mapping[str, str], name: str) -> Any:  # noqa: ANN401 - what JSON holds
    text = metadata.get(f"{_PREFIX}{name}", "")
    if len(text) > _LONGEST:
        raise _DamagedError(f"its {name} is longer than {_LONGEST:,} characters.")
    if name == "obstacle" or not text:
        return single_line(text)
    try:
        return read_json(text)
    except ValueError as error:
        raise _DamagedError(f"its {name} is not JSON ({error}).") from error


def _graph(value: Any) -> Architecture | None:  # noqa: ANN401 - what JSON holds; `from_dict` refuses what is invalid
    if value is None:
        return None
    try:
        return Architecture.from_dict(value)
    except ArchitectureError as error:
        raise _DamagedError(f"its network cannot be: {single_line(str(error))}.") from error


def _unknown_key(name: str) -> UserError:
    return unknown("key", name, [each.key for kind in (ModelMetadata, Scaling) for each in field_types(kind)])
