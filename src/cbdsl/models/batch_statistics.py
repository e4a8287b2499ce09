"""Statistics of BatchNorm layers, which are neither sent nor averaged.

Training takes those of each batch. Scoring takes those of given samples: at the server of D_G, on a worker of its own.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

_CHUNK = 250  # samples whose statistics are averaged at a time


def statistics_layers(module: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers that keep statistics; not those that stay in evaluation mode while others train."""
    training = {name: part.training for name, part in module.named_modules()}
    module.train()
    found = [
        part
        for part in module.modules()
        if isinstance(part, _BatchNorm) and part.training and part.running_mean is not None
    ]
    for name, part in module.named_modules():
        part.training = training[name]
    return found


def norm_parameters(module: nn.Module) -> set[str]:
    """Return the names of the factors and offsets of BatchNorm layers."""
    layers = ((name, part) for name, part in module.named_modules() if isinstance(part, _BatchNorm))
    return {name for prefix, part in layers for name, _ in part.named_parameters(prefix)}


def hold_statistics(module: nn.Module) -> list[_BatchNorm]:
    """Keep the statistics of a module's layers as they are while it trains; return these layers."""
    layers = statistics_layers(module)
    for layer in layers:
        layer.track_running_stats = False  # in training torch then takes the batch's and leaves the kept ones alone
    return layers


def calibrate(module: nn.Module, layers: list[_BatchNorm], features: Tensor) -> None:
    """Set the statistics of layers to those of samples (N, ...), and the module to evaluation mode."""
    module.eval()
    for layer in layers:
        layer.track_running_stats, layer.momentum = True, None  # the mean over all batches since the reset
        layer.reset_running_stats()
        layer.train()
    with torch.no_grad():
        for rows in np.array_split(np.arange(len(features)), -(-len(features) // _CHUNK)):
            module(features[torch.from_numpy(rows)])
    for layer in layers:
        layer.track_running_stats = False
        layer.eval()
