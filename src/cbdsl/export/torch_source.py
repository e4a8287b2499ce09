"""A network as a Python file that people can read: a torch module, and a function that loads its weights.

The weights are in a .safetensors beside it. Nothing of this package is needed to use the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from pprint import pformat

from cbdsl.arrays import Floats
from cbdsl.export.steps import Program, Step
from cbdsl.models.architecture import SAMPLES
from cbdsl.models.layers import (
    Add,
    AvgPool1d,
    AvgPool2d,
    Concat,
    Conv1d,
    Conv2d,
    Flatten,
    Gelu,
    GroupNorm,
    Hardswish,
    LayerNorm,
    LeakyRelu,
    Linear,
    MaxPool1d,
    MaxPool2d,
    Relu,
    Relu6,
    Scale,
    Sigmoid,
    Silu,
    Tanh,
)

_HEAD = '''\
"""A classifier trained with cbdsl, as a torch module; its weights are in the .safetensors file of the same name.

    network = load()
    logits = network(features)  # (N, *SHAPE) -> (N, {classes})

Features are {units}.
Needs torch and safetensors.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

SHAPE = {shape}
CLASSES = {names}


def load(path=Path(__file__).with_suffix(".safetensors")):
    """The trained network, ready to predict."""
    network = Network()
    network.load_state_dict(load_file(path))
    return network.eval()


'''

_CURVES = {
    Relu: "functional.relu({})", Relu6: "functional.relu6({})", Tanh: "torch.tanh({})", Sigmoid: "torch.sigmoid({})",
    Silu: "functional.silu({})", Hardswish: "functional.hardswish({})", Flatten: "{}.flatten(1)",
}  # fmt: skip


def torch_tensors(program: Program) -> dict[str, Floats]:
    """The weights under the names that the module has for them."""
    return {
        f"layer{step.number}.{name}": values.copy() for step in program.steps for name, values in step.tensors.items()
    }


def torch_source(program: Program) -> str:
    """The whole file."""
    names = list(program.card.class_names) or [str(label) for label in range(program.classes)]
    head = _HEAD.format(
        classes=program.classes, units=program.units(), shape=program.card.shape,
        names=pformat(names, width=100, compact=True),
    )  # fmt: skip
    made, run = ["        super().__init__()"], []
    if program.card.shape != program.graph.shape:
        run.append("        x = x.flatten(1)")
    for step in program.steps:
        module = _module(step)
        if module:
            made.append(f"        self.layer{step.number} = {module}")
        made += _constants(step)
        sources = ["x" if other == SAMPLES else f"x{other}" for other in step.reads]
        run.append(f"        x{step.number} = {_expression(step, sources)}")
    body = [
        "class Network(nn.Module):", "    def __init__(self):", *made, "", "    def forward(self, x):", *run,
        f"        return x{program.steps[-1].number}",
    ]  # fmt: skip
    return head + "\n".join(body) + "\n"


def _module(step: Step) -> str:
    """What builds the module of a layer that learns or normalises; empty for the others, which are functions."""
    match step.layer:
        case Conv1d() | Conv2d() as layer:
            return (
                f"nn.{type(layer).__name__}({layer.inputs}, {layer.outputs}, {layer.kernel}, stride={layer.stride}, "
                f"padding={layer.padding}, groups={layer.groups}, bias={layer.bias})"
            )
        case Linear() as layer:
            return f"nn.Linear({layer.inputs}, {layer.outputs}, bias={layer.bias})"
        case GroupNorm() as layer:
            return f"nn.GroupNorm({layer.groups}, {layer.channels}, eps={layer.epsilon}, affine={layer.affine})"
        case LayerNorm() as layer:
            return (
                f"nn.LayerNorm({layer.shape}, eps={layer.epsilon}, elementwise_affine={layer.affine}, "
                f"bias={layer.bias})"
            )
    return ""


def _constants(step: Step) -> list[str]:
    """What a `Scale` multiplies by and adds, as buffers: on the network's own device, and in no file of weights."""
    if not isinstance(step.layer, Scale):
        return []
    behind = (1,) * (len(step.shape) - 1)
    lines = []
    for name in ("factors", "offsets"):
        values = list(getattr(step.layer, name))
        tensor = f"torch.tensor({values}).view({(-1, *behind)})"
        lines.append(f'        self.register_buffer("{name}{step.number}", {tensor}, persistent=False)')
    return lines


def _expression(step: Step, sources: Sequence[str]) -> str:  # noqa: PLR0911 - one for every kind
    """What a step makes of what it reads."""
    source, number = sources[0], step.number
    match step.layer:
        case Conv1d() | Conv2d() | Linear() | GroupNorm() | LayerNorm():
            return f"self.layer{number}({source})"
        case Scale():
            return f"{source} * self.factors{number} + self.offsets{number}"
        case MaxPool1d() | MaxPool2d() | AvgPool1d() | AvgPool2d() as layer:
            kind = f"{'max' if isinstance(layer, MaxPool1d | MaxPool2d) else 'avg'}_pool{layer.AXES}d"
            return f"functional.{kind}({source}, {layer.kernel}, {layer.stride}, {layer.padding})"
        case LeakyRelu() as layer:
            return f"functional.leaky_relu({source}, {layer.slope})"
        case Gelu() as layer:
            return f'functional.gelu({source}, approximate="{"tanh" if layer.approximate else "none"}")'
        case Add():
            return " + ".join(sources)
        case Concat():
            return f"torch.cat([{', '.join(sources)}], 1)"
    return _CURVES[type(step.layer)].format(source)
