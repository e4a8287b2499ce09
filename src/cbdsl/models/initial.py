"""The weights that a network starts from: those that torch would give it, drawn without torch.

torch fills convolutions and dense layers with uniform numbers from its Mersenne Twister, one draw a number, first the
weights and then the bias: the order of flat weights. So they are one run of draws. Norms begin with ones and zeros.

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
from cbdsl.engines.architecture import Architecture, Layer

_BITS = 24  # of every draw of 32: as many as a float32 has
_HALF = 2 ** (_BITS - 1)
_SLOPE = math.sqrt(5.0)  # torch's `a` of kaiming_uniform_ for dense layers and convolutions


def initial_weights(architecture: Architecture, seed: int) -> Floats:
    """Flat weights of a network as torch initialises them after `torch.manual_seed(seed)`, bit for bit, (D,)."""
    # RandomState, because its numbers never change with numpy's version. Of the seed, torch uses 32 bits as well.
    drawn = sum(layer.size for layer in architecture.layers if layer.drawn_inputs())
    words = np.random.RandomState(seed & 0xFFFFFFFF).bytes(4 * drawn)
    draws = np.frombuffer(words, "<u4") & np.uint32(2**_BITS - 1)  # whole numbers below 2^24
    centred: Doubles = draws.astype(np.float64) - _HALF  # from -2^23 to 2^23 - 1
    parts, used = [np.empty(0)], 0
    for layer in architecture.layers:
        for name, shape in layer.tensors().items():
            count = math.prod(shape)
            if not layer.drawn_inputs():  # a factor and an offset that change nothing
                parts.append(np.full(count, name == "weight", np.float64))
                continue
            parts.append(centred[used : used + count] * (float(np.float32(_bound(layer, name))) / _HALF))  # exact
            used += count
    return np.concatenate(parts).astype(np.float32)


def _bound(layer: Layer, name: str) -> float:
    """How large a weight or a bias is at most; in the order of torch's arithmetic."""
    inputs = layer.drawn_inputs()
    if name == "bias":
        return 1 / math.sqrt(inputs)
    gain = math.sqrt(2.0 / (1 + _SLOPE**2))
    return math.sqrt(3.0) * (gain / math.sqrt(inputs))
