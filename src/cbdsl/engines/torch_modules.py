"""The torch module of a description: the way back from `torch_layers`. Parameters have torch's own first values."""

from __future__ import annotations

from torch import nn

from cbdsl.engines.architecture import (
    Architecture,
    AvgPool2d,
    Conv2d,
    Flatten,
    Layer,
    Linear,
    MaxPool2d,
    Relu,
    Sigmoid,
    Tanh,
)


def module_of(architecture: Architecture) -> nn.Sequential:
    """One torch layer for every layer, in order: '0.weight' are the weights of layer 0."""
    return nn.Sequential(*(_module(layer) for layer in architecture.layers))


def _module(layer: Layer) -> nn.Module:
    match layer:
        case Conv2d():
            module: nn.Module = nn.Conv2d(
                layer.inputs, layer.outputs, layer.kernel, padding=layer.padding, bias=layer.bias
            )
        case Relu():
            module = nn.ReLU()
        case Tanh():
            module = nn.Tanh()
        case Sigmoid():
            module = nn.Sigmoid()
        case MaxPool2d():
            module = nn.MaxPool2d(layer.kernel, layer.stride)
        case AvgPool2d():
            module = nn.AvgPool2d(layer.kernel, layer.stride)
        case Flatten():
            module = nn.Flatten()
        case Linear():
            module = nn.Linear(layer.inputs, layer.outputs, layer.bias)
    return module
