"""Flat weights by the names of their layers, as a file of weights holds them. No torch."""

from __future__ import annotations

import math

from cbdsl.arrays import Floats
from cbdsl.engines.architecture import Architecture, Conv2d, Linear, Shape
from cbdsl.errors import UserError


def named_weights(architecture: Architecture, weights: Floats) -> dict[str, Floats]:
    """Views of flat weights (D,), each in its layer's shape: the names and arrays of the torch module's `state_dict`.

    A module from `cbdsl.engines.torch_modules.module_of` loads them.
    """
    if weights.shape != (architecture.size,):
        raise UserError(
            f"The model has {architecture.size:,} parameters, but the weights given have shape {weights.shape}."
        )
    named: dict[str, Floats] = {}
    offset = 0
    for number, layer in enumerate(architecture.layers):
        match layer:
            case Conv2d():
                shape: Shape = (layer.outputs, layer.inputs, *layer.kernel)
            case Linear():
                shape = (layer.outputs, layer.inputs)
            case _:
                continue
        parts = {"weight": shape} | ({"bias": shape[:1]} if layer.bias else {})
        for part, its_shape in parts.items():
            size = math.prod(its_shape)
            named[f"{number}.{part}"] = weights[offset : offset + size].reshape(its_shape)
            offset += size
    return named
