"""The way between a torch module and its flat weights.

Never trains anything: that is an engine's work. Networks are described in `cbdsl.models.zoo`, which needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from cbdsl.arrays import Floats
from cbdsl.errors import UserError


def parameter_count(module: nn.Module) -> int:
    """D: how many numbers one model is."""
    return sum(parameter.numel() for parameter in module.parameters())


def to_flat(module: nn.Module) -> Floats:
    """Concatenate the parameters of a module in their own order, (D,); a copy."""
    parts = [parameter.detach().reshape(-1).to(torch.float32) for parameter in module.parameters()]
    return torch.cat(parts).numpy().copy()


def load_flat(module: nn.Module, weights: Floats) -> None:
    """Write flat weights (D,) into a module, in place."""
    expected = parameter_count(module)
    if weights.shape != (expected,):
        raise UserError(f"The model has {expected:,} parameters, but the weights given have shape {weights.shape}.")
    offset = 0
    with torch.no_grad():
        for parameter in module.parameters():
            count = parameter.numel()
            part = np.ascontiguousarray(weights[offset : offset + count])
            parameter.copy_(torch.from_numpy(part).reshape(parameter.shape))
            offset += count


def initial_weights(build: Callable[[], nn.Module], seed: int) -> Floats:
    """Flat weights of a module built under torch's own initialisation with the given seed, (D,).

    The state of torch's global generator is put back, so that a caller's own random numbers do not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return to_flat(build())
