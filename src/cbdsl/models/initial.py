"""The weights that a network starts from: those that torch would give it, drawn without torch.

torch fills a Conv2d or Linear with uniform numbers from its Mersenne Twister, one draw a number, first the weights and
then the bias: the order of flat weights. So all numbers of a network are one run of draws.

The bits are the same on every machine, which torch does not promise of its own. It computes x (b - a) + a in float32
from a 24-bit x; where the processor multiplies and adds in one step (with AVX2 or AVX-512) the result is rounded once,
and this module gives exactly that. Elsewhere (an x86 without them, or ATEN_CPU_CAPABILITY=default) torch rounds twice
and half of its numbers differ in the last bit. Here 24 bits times 24 bits fit into a double, so only the last
conversion rounds, on any processor.
"""

from __future__ import annotations

import math

import numpy as np

from cbdsl.arrays import Doubles, Floats
from cbdsl.engines.architecture import Architecture, Conv2d, Layer, Linear

_BITS = 24  # of every draw of 32: as many as a float32 has
_HALF = 2 ** (_BITS - 1)
_SLOPE = math.sqrt(5.0)  # torch's `a` of kaiming_uniform_ for dense layers and convolutions


def initial_weights(architecture: Architecture, seed: int) -> Floats:
    """Flat weights of a network as torch initialises them after `torch.manual_seed(seed)`, bit for bit, (D,)."""
    # RandomState, because its numbers never change with numpy's version. Of the seed, torch uses 32 bits as well.
    words = np.random.RandomState(seed & 0xFFFFFFFF).bytes(4 * architecture.size)
    draws = np.frombuffer(words, "<u4") & np.uint32(2**_BITS - 1)  # (D,), whole numbers below 2^24
    centred: Doubles = draws.astype(np.float64) - _HALF  # (D,), from -2^23 to 2^23 - 1
    offset = 0
    for count, bound in (part for layer in architecture.layers for part in _parameters(layer)):
        centred[offset : offset + count] *= float(np.float32(bound)) / _HALF  # exact
        offset += count
    return centred.astype(np.float32)


def _parameters(layer: Layer) -> list[tuple[int, float]]:
    """How many weights and how many biases a layer has, each with its bound; in the order of torch's arithmetic."""
    match layer:
        case Conv2d():
            inputs = layer.inputs * layer.kernel[0] * layer.kernel[1]
        case Linear():
            inputs = layer.inputs
        case _:
            return []
    gain = math.sqrt(2.0 / (1 + _SLOPE**2))
    weights = (layer.outputs * inputs, math.sqrt(3.0) * (gain / math.sqrt(inputs)))
    return [weights, (layer.outputs, 1 / math.sqrt(inputs))] if layer.bias else [weights]
