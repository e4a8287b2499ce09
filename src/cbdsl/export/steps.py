"""A saved model as the writers of other formats take it: step by step, each with its weights and the shapes around it.

What counts only while training is left out, and the scaling of features has become a layer, so that no writer needs to
know of either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cbdsl.arrays import Floats
from cbdsl.data.scaling import Scaling
from cbdsl.engines.architecture import SAMPLES, Architecture, ArchitectureError, Draft, Dropout, Layer, Scale, Shape
from cbdsl.errors import UserError
from cbdsl.models.saved import Card, SavedModel


@dataclass(frozen=True, eq=False)
class Step:
    """One layer: what it reads, the shapes of that, the shape it makes, and what it has learned."""

    number: int
    layer: Layer
    reads: tuple[int, ...]
    given: tuple[Shape, ...]
    shape: Shape
    tensors: dict[str, Floats]

    @property
    def count(self) -> int:
        """Numbers that it makes."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Program:
    """All steps, from a sample to its logits."""

    card: Card
    graph: Architecture
    steps: tuple[Step, ...]
    scaling: Scaling | None  # as the first step does it; none: features are taken as they are

    @property
    def inputs(self) -> int:
        """Numbers of a sample."""
        return math.prod(self.graph.shape)

    @property
    def classes(self) -> int:
        """Number of logits."""
        return self.graph.classes

    def units(self) -> str:
        """What the numbers of a sample are, for whoever uses the file."""
        if self.scaling is None:
            return "used as they are, as the training data were" if self.card.scaling is None else "scaled already"
        where = "bytes divided by 255" if self.scaling.shades else "as in the files of the training data"
        return f"{where}; they are scaled to mean 0 and deviation 1 inside"


def program_of(model: SavedModel, raw: bool = False) -> Program:
    """The steps of a model. raw: features come scaled already."""
    if not np.isfinite(model.weights).all():
        raise UserError(f"The model {model.source} has weights that are not finite: its training failed. Give another.")
    scaling = None if raw else model.card.scaling
    try:
        graph = _plain(model.graph, scaling)
    except ArchitectureError as error:
        raise UserError(f"The scaling of features in {model.source} cannot be written: {error}. Use --raw.") from error
    return Program(model.card, graph, tuple(_steps(graph, model.weights)), scaling)


def _plain(graph: Architecture, scaling: Scaling | None) -> Architecture:
    """The same network without dropout, which does nothing to a trained model, and with the scaling before it."""
    net, place = Draft(graph.shape), {SAMPLES: SAMPLES}
    if scaling is not None:
        each = graph.shape[0] // len(scaling.mean)  # more than 1 where a sample's axes count as one row
        factors = tuple(1 / spread for spread in scaling.deviation for _ in range(each))
        offsets = tuple(
            -middle / spread
            for middle, spread in zip(scaling.mean, scaling.deviation, strict=True)
            for _ in range(each)
        )
        place[SAMPLES] = net.add(Scale(factors, offsets))
    for number, (layer, reads) in enumerate(zip(graph.layers, graph.reads, strict=True)):
        sources = [place[other] for other in reads]
        place[number] = sources[0] if isinstance(layer, Dropout) else net.add(layer, *sources)
    return net.architecture()


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
