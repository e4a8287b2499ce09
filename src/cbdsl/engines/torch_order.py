"""The layers of a graph in the order of flat weights, which is the order in which a module defines its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from cbdsl.engines.architecture import Architecture, ArchitectureError


@dataclass(frozen=True)
class Used:
    """A parameter where a layer uses it."""

    label: str  # what an error calls the layer
    parameter: nn.Parameter
    layer: int  # number of the layer


def in_order_of_definition(architecture: Architecture, used: list[Used], module: nn.Module) -> Architecture:
    """The same graph, its layers moved where flat weights ask for it and branches allow it.

    Refuses a module that does not use all of its parameters, or not in an order in which layers can run.
    """
    labels = {one.layer: one.label for one in used}
    owners = {id(one.parameter): one.layer for one in used}
    for name, parameter in module.named_parameters():
        if id(parameter) not in owners:
            raise ArchitectureError(f"{name} is never used; leave it out")
    defined = list(dict.fromkeys(owners[id(parameter)] for parameter in module.parameters()))
    order = _sorted(architecture, defined, labels)
    flat = [one.parameter for number in order for one in used if one.layer == number]
    if [id(one) for one in flat] != [id(one) for one in module.parameters()]:
        raise ArchitectureError(
            "the weights of its layers are not defined layer by layer; register them in their order"
        )
    if order == sorted(order):
        return architecture
    places = {old: new for new, old in enumerate(order)}
    return Architecture(
        architecture.shape,
        tuple(architecture.layers[number] for number in order),
        tuple(tuple(places.get(other, other) for other in architecture.reads[number]) for number in order),
    )


def _sorted(architecture: Architecture, defined: list[int], labels: Mapping[int, str]) -> list[int]:
    """Layers in the order of their use, save that those with weights wait for those that are defined before them."""
    waiting, order, done = list(range(len(architecture.layers))), list[int](), {-1}
    coming = list(reversed(defined))
    while waiting:
        ready = next(
            (
                number
                for number in waiting
                if done.issuperset(architecture.reads[number]) and (number not in labels or number == coming[-1])
            ),
            None,
        )
        if ready is None:
            first, then = coming[-1], min(_before(architecture, coming[-1]) & {*coming})
            raise ArchitectureError(
                f"{labels[first]} is defined before {labels[then]} but used after it; define layers in the order of "
                "their use"
            )
        if ready in labels:
            coming.pop()
        waiting.remove(ready)
        order.append(ready)
        done.add(ready)
    return order


def _before(architecture: Architecture, number: int) -> set[int]:
    """All layers that one needs."""
    found, open_ends = set[int](), [number]
    while open_ends:
        for other in architecture.reads[open_ends.pop()]:
            if other >= 0 and other not in found:
                found.add(other)
                open_ends.append(other)
    return found
