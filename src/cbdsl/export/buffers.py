"""Where results lie while a network runs: one piece of memory, whose places are used again when nobody reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cbdsl.engines import curves
from cbdsl.engines.architecture import SAMPLES, Add, Flatten, GroupNorm, LayerNorm, Scale
from cbdsl.export.steps import Step

_OVERWRITES = (
    Scale, GroupNorm, LayerNorm, Add, curves.Relu, curves.Relu6, curves.LeakyRelu, curves.Tanh, curves.Sigmoid,
    curves.Silu, curves.Hardswish, curves.Gelu,
)  # fmt: skip
"""Layers whose result may lie where what they read does."""


@dataclass
class _Place:
    """Room for one result, or for several that follow each other: how much, and from which step to which."""

    size: int
    first: int
    last: int
    offset: int = 0


@dataclass(frozen=True)
class Plan:
    """Of every step's result where it begins; OUTPUT for the network's own. size: numbers in all."""

    offsets: dict[int, int] = field(default_factory=dict)
    size: int = 0


OUTPUT = -1
"""Stands for the caller's array instead of a place in memory."""


def plan(steps: Sequence[Step]) -> Plan:
    """Places for all results, few numbers in all: the largest first, each as low as it fits beside those it meets."""
    last_read = {other: step.number for step in steps for other in step.reads}
    place_of: dict[int, _Place | None] = {SAMPLES: None}  # none: what the caller gave
    places: list[_Place] = []
    for step in steps[:-1]:
        until = last_read[step.number]
        found = _shared(step, place_of)
        if found is None and not (isinstance(step.layer, Flatten) and place_of[step.reads[0]] is None):
            found = _Place(step.count, step.number, until)
            places.append(found)
        if found is not None:
            found.last = max(found.last, until)
        place_of[step.number] = found
    _arrange(places)
    offsets = {number: place.offset for number, place in place_of.items() if place is not None}
    size = max((place.offset + place.size for place in places), default=0)
    return Plan(offsets | {steps[-1].number: OUTPUT}, size)


def _shared(step: Step, place_of: dict[int, _Place | None]) -> _Place | None:
    """A place that the step's result can take over; none if it needs one of its own.

    Only what is read once may be overwritten: a sum that reads a tensor twice still needs it after its first term.
    """
    places = [place_of[other] for other in step.reads]
    if isinstance(step.layer, Flatten):
        return places[0]
    if isinstance(step.layer, _OVERWRITES):
        for place in places:
            if place is not None and place.last <= step.number and sum(place is other for other in places) == 1:
                return place
    return None


def _arrange(places: Sequence[_Place]) -> None:
    placed: list[_Place] = []
    for place in sorted(places, key=lambda one: -one.size):
        meets = [other for other in placed if other.first <= place.last and place.first <= other.last]
        for other in sorted(meets, key=lambda one: one.offset):
            if place.offset + place.size <= other.offset:
                break
            place.offset = max(place.offset, other.offset + other.size)
        placed.append(place)
