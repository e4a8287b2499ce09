"""Prepares a saved model for export: steps with weights and shapes, a plan of buffers, weights of eight bits.

Dropout is left out and the scaling of features is a layer, so that no format needs to handle them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cbdsl.arrays import Floats
from cbdsl.data.dataset import Scaling
from cbdsl.errors import UserError
from cbdsl.models import layers
from cbdsl.models.architecture import SAMPLES, Architecture
from cbdsl.models.layers import ArchitectureError, Layer, Shape
from cbdsl.models.saved_model import ModelMetadata, SavedModel
from cbdsl.register import CUSTOM


@dataclass(frozen=True, eq=False)
class Step:
    """One layer with its inputs, shapes and weights."""

    number: int
    layer: Layer
    reads: tuple[int, ...]
    given: tuple[Shape, ...]
    shape: Shape
    tensors: dict[str, Floats]

    @property
    def count(self) -> int:
        """How many numbers it computes."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Program:
    """All steps, from a sample to its logits."""

    card: ModelMetadata
    graph: Architecture  # of a regression or a reconstruction, up to results in the unit of the data
    steps: tuple[Step, ...]
    scaling: Scaling | None  # as in the first step; None: features are used as they are

    @property
    def inputs(self) -> int:
        """How many numbers a sample has."""
        return math.prod(self.graph.shape)

    @property
    def classes(self) -> int:
        """Number of logits."""
        return self.graph.classes

    def units(self) -> str:
        """Return a sentence about the numbers of a sample, for users of the file."""
        if self.scaling is None:
            return "used as they are, as the training data were" if self.card.scaling is None else "scaled already"
        where = "bytes divided by 255" if self.scaling.shades else "as in the files of the training data"
        return f"{where}; they are scaled to mean 0 and deviation 1 inside"


def program_of(model: SavedModel, raw: bool = False) -> Program:
    """Return the steps of a model. raw: features are scaled already."""
    if not np.isfinite(model.weights).all():
        raise UserError(
            f"The model {model.source} has weights that are not finite: its training failed. Give another.",
            code="damaged-file",
        )
    if model.card.loss == CUSTOM and model.card.task == "reconstruction":
        raise UserError(
            f"The anomaly scores of {model.source} are those of a loss that was given in Python, which other programs "
            "do not have.",
            code="not-supported",
        )
    scaling = None if raw else model.card.scaling
    try:
        graph = model.graph.without_dropout()
        graph = graph if scaling is None else _scaled(graph, scaling)
        graph = _in_unit(graph, model.card.target_scaling if model.card.task == "regression" else scaling, model.card)
    except ArchitectureError as error:
        raise UserError(
            f"The scaling of features in {model.source} cannot be written: {error}. Use --raw.", code="not-supported"
        ) from error
    return Program(model.card, graph, tuple(_steps(graph, model.weights)), scaling)


def _scaled(graph: Architecture, scaling: Scaling) -> Architecture:
    """Return the same network with the scaling of features as its first layer."""
    each = graph.shape[0] // len(scaling.mean)  # more than 1 where the axes of a sample count as one row
    pairs = [pair for pair in zip(scaling.mean, scaling.deviation, strict=True) for _ in range(each)]
    factors = tuple(1 / deviation for _, deviation in pairs)
    offsets = tuple(-mean / deviation for mean, deviation in pairs)
    reads = tuple(tuple(other + 1 for other in read) for read in graph.reads)
    return Architecture(graph.shape, (layers.Scale(factors, offsets), *graph.layers), ((SAMPLES,), *reads))


def error_factors(program: Program) -> NDArray[np.float64]:
    """Return what each number's error of a reconstruction is multiplied by in the anomaly score, (numbers,)."""
    deviation = np.array(program.scaling.deviation if program.scaling else (1.0,))
    return np.repeat(1 / deviation, program.classes // len(deviation))


def _in_unit(graph: Architecture, scaling: Scaling | None, card: ModelMetadata) -> Architecture:
    """Return the same network with a last layer that undoes the scaling; a classifier has none to undo."""
    if scaling is None or card.task == "classification":
        return graph
    each = graph.classes // len(scaling.mean)
    factors = tuple(deviation for deviation in scaling.deviation for _ in range(each))
    offsets = tuple(mean for mean in scaling.mean for _ in range(each))
    last = len(graph.layers) - 1
    return Architecture(graph.shape, (*graph.layers, layers.Scale(factors, offsets)), (*graph.reads, (last,)))


def _steps(graph: Architecture, weights: Floats) -> list[Step]:
    shapes = {SAMPLES: graph.shape} | dict(enumerate(graph.shapes()))
    steps, start = [], 0
    for number, (layer, reads) in enumerate(zip(graph.layers, graph.reads, strict=True)):
        tensors = {}
        for name, shape in layer.tensors().items():
            end = start + math.prod(shape)
            tensors[name] = weights[start:end].reshape(shape)
            start = end
        steps.append(Step(number, layer, reads, tuple(shapes[other] for other in reads), shapes[number], tensors))
    return steps


@dataclass
class _BufferSpan:
    """Memory for one result, or for several that overwrite each other, from one step to another."""

    size: int
    first: int
    last: int
    offset: int = 0


@dataclass(frozen=True)
class BufferPlan:
    """Where the result of every step begins, OUTPUT for the last. size: how many numbers all take."""

    offsets: dict[int, int] = field(default_factory=dict)
    size: int = 0


OUTPUT = -1
"""The offset that stands for the caller's array."""


def plan_buffers(steps: Sequence[Step]) -> BufferPlan:
    """Plan memory for all results: the largest first, each at the lowest offset that is free while it lives."""
    last_read = {other: step.number for step in steps for other in step.reads}
    place_of: dict[int, _BufferSpan | None] = {SAMPLES: None}  # None: the array of the caller
    places: list[_BufferSpan] = []
    for step in steps[:-1]:
        until = last_read[step.number]
        found = _shared(step, place_of)
        if found is None and not (isinstance(step.layer, layers.Flatten) and place_of[step.reads[0]] is None):
            found = _BufferSpan(step.count, step.number, until)
            places.append(found)
        if found is not None:
            found.last = max(found.last, until)
        place_of[step.number] = found
    _arrange(places)
    offsets = {number: place.offset for number, place in place_of.items() if place is not None}
    size = max((place.offset + place.size for place in places), default=0)
    return BufferPlan(offsets | {steps[-1].number: OUTPUT}, size)


def _shared(step: Step, place_of: dict[int, _BufferSpan | None]) -> _BufferSpan | None:
    """Return the memory that a result can overwrite, or None.

    A sum that reads a tensor twice still needs it after its first term, so such a tensor is not overwritten.
    """
    places = [place_of[other] for other in step.reads]
    if isinstance(step.layer, layers.Flatten):
        return places[0]
    if step.layer.in_place:
        for place in places:
            if place is not None and place.last <= step.number and sum(place is other for other in places) == 1:
                return place
    return None


def _arrange(places: Sequence[_BufferSpan]) -> None:
    placed: list[_BufferSpan] = []
    for place in sorted(places, key=lambda one: -one.size):
        meets = [other for other in placed if other.first <= place.last and place.first <= other.last]
        for other in sorted(meets, key=lambda one: one.offset):
            if place.offset + place.size <= other.offset:
                break
            place.offset = max(place.offset, other.offset + other.size)
        placed.append(place)


_MOST = 127


@dataclass(frozen=True, eq=False)
class RoundedWeights:
    """The weights of one layer as integers from -127 to 127, with a factor for every output."""

    numbers: NDArray[np.int8]  # (outputs, ...)
    scales: Floats  # (outputs,)

    def floats(self) -> Floats:
        """Return the weights as floats again."""
        behind = (1,) * (self.numbers.ndim - 1)
        return np.asarray(self.numbers * self.scales.reshape(-1, *behind), np.float32)


def round_weights(steps: Sequence[Step]) -> dict[tuple[int, str], RoundedWeights]:
    """Return the rounded matrices of convolutions, dense and recurrent layers, by step and name.

    Biases and norms stay floats.
    """
    kinds = layers.Conv1d | layers.Conv2d | layers.Linear | layers.Gru | layers.Lstm
    return {
        (step.number, name): _round(values)
        for step in steps
        if isinstance(step.layer, kinds)
        for name, values in step.tensors.items()
        if values.ndim > 1
    }


def rounded_flat(steps: Sequence[Step]) -> Floats:
    """Return the flat weights (D,) of the rounded model, to measure its accuracy on any engine."""
    made = round_weights(steps)
    parts = [
        made[step.number, name].floats() if (step.number, name) in made else values
        for step in steps
        for name, values in step.tensors.items()
    ]
    return np.concatenate([part.reshape(-1) for part in parts])


def _round(weights: Floats) -> RoundedWeights:
    rows = np.abs(weights.reshape(len(weights), -1)).max(axis=1)
    scales = np.asarray(np.where(rows > 0, rows / _MOST, 1.0), np.float32)
    scales[scales == 0] = 1.0  # smaller than a float32 can say: all of the row is 0
    behind = (1,) * (weights.ndim - 1)
    numbers = np.clip(np.rint(weights / scales.reshape(-1, *behind)), -_MOST, _MOST)
    return RoundedWeights(numbers.astype(np.int8), scales)
