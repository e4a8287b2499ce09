"""A network as an ONNX model: one node a layer where ONNX has such a layer, otherwise a few.

Opset 17 is old enough for most programs that run such files. It has no GroupNormalization that they agree on and no
Gelu, so these are written with simpler nodes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

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

_OPSET, _IR_VERSION = 17, 8
_CURVES = {Relu: "Relu", Tanh: "Tanh", Sigmoid: "Sigmoid", Hardswish: "HardSwish"}


def onnx_model(program: Program) -> bytes:
    """The model, checked, as the bytes of its file: `features` (N, *shape) become `logits` (N, classes)."""
    nodes = _Nodes()
    names = {SAMPLES: "features"}
    if program.card.shape != program.graph.shape:
        names[SAMPLES] = nodes.add("Flatten", ["features"], axis=1)
    for step in program.steps:
        names[step.number] = nodes.step(step, [names[other] for other in step.reads])
    nodes.add("Identity", [names[program.steps[-1].number]], output="logits")
    graph = helper.make_graph(
        nodes.made,
        "cbdsl",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["N", *program.card.shape])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", program.classes])],
        nodes.constants,
    )
    opsets = [helper.make_opsetid("", _OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="cbdsl")
    helper.set_model_props(model, {"classes": json.dumps(list(program.card.class_names)), "features": program.units()})
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString())


class _Nodes:
    """A graph in the making."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.constants: list[Any] = []

    def add(self, kind: str, inputs: Sequence[str], output: str = "", **attributes: Any) -> str:  # noqa: ANN401
        """One node more; the name of its result."""
        name = output or f"{kind.lower()}_{len(self.made)}"
        self.made.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def constant(self, values: NDArray[Any]) -> str:
        """The name of a constant tensor."""
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def number(self, value: float) -> str:
        """The name of one constant number."""
        return self.constant(np.array(value, np.float32))

    def step(self, step: Step, sources: Sequence[str]) -> str:  # noqa: PLR0911 - one for every kind
        """The nodes of one step; the name of its result."""
        source = sources[0]
        match step.layer:
            case Conv1d() | Conv2d() | MaxPool1d() | MaxPool2d() | AvgPool1d() | AvgPool2d():
                return self._windows(step, source)
            case Linear():
                return self.add("Gemm", [source, *map(self.constant, step.tensors.values())], transB=1)
            case GroupNorm() | LayerNorm():
                return self._norm(step, source)
            case Scale() as layer:
                return self._stretched(source, step, np.array(layer.factors), np.array(layer.offsets))
            case Add():
                return self.add("Sum", sources)
            case Concat():
                return self.add("Concat", sources, axis=1)
            case Flatten():
                return self.add("Flatten", [source], axis=1)
            case LeakyRelu() as layer:
                return self.add("LeakyRelu", [source], alpha=float(layer.slope))
            case Relu6():
                return self.add("Clip", [source, self.number(0.0), self.number(6.0)])
            case Silu():
                return self.add("Mul", [source, self.add("Sigmoid", [source])])
            case Gelu() as layer:
                return self._gelu(source, layer.approximate)
        return self.add(_CURVES[type(step.layer)], [source])

    def _windows(self, step: Step, source: str) -> str:
        """A convolution or a pool."""
        layer: Any = step.layer
        around = {"kernel_shape": layer.kernel, "strides": layer.stride, "pads": (*layer.padding, *layer.padding)}
        if isinstance(layer, Conv1d | Conv2d):
            inputs = [source, *map(self.constant, step.tensors.values())]
            return self.add("Conv", inputs, group=layer.groups, **around)
        if isinstance(layer, MaxPool1d | MaxPool2d):
            return self.add("MaxPool", [source], **around)
        return self.add("AveragePool", [source], count_include_pad=1, **around)

    def _norm(self, step: Step, source: str) -> str:
        """Mean 0 and deviation 1 of every group or of the last axes; then factors and offsets, if there are any."""
        layer = step.layer
        factors, offsets = step.tensors.get("weight"), step.tensors.get("bias")
        if isinstance(layer, LayerNorm):
            given = np.ones(layer.shape, np.float32) if factors is None else factors
            inputs = [source, self.constant(given), *([] if offsets is None else [self.constant(offsets)])]
            return self.add("LayerNormalization", inputs, axis=-len(layer.shape), epsilon=float(layer.epsilon))
        assert isinstance(layer, GroupNorm)
        count = step.count // layer.groups
        rows = self._reshaped(source, (layer.groups, count))  # a group is what an instance norm calls a channel
        ones, zeros = (self.constant(np.full(layer.groups, value, np.float32)) for value in (1, 0))
        rows = self.add("InstanceNormalization", [rows, ones, zeros], epsilon=float(layer.epsilon))
        whole = self._reshaped(rows, step.shape)
        return whole if factors is None or offsets is None else self._stretched(whole, step, factors, offsets)

    def _stretched(self, source: str, step: Step, factors: NDArray[Any], offsets: NDArray[Any]) -> str:
        """x * factors + offsets, channel by channel."""
        behind = (1,) * (len(step.shape) - 1)
        times, plus = (values.astype(np.float32).reshape(-1, *behind) for values in (factors, offsets))
        return self.add("Add", [self.add("Mul", [source, self.constant(times)]), self.constant(plus)])

    def _reshaped(self, source: str, shape: Sequence[int]) -> str:
        return self.add("Reshape", [source, self.constant(np.array([0, *shape], np.int64))])  # 0: as many samples

    def _gelu(self, source: str, approximate: bool) -> str:
        if approximate:
            cube = self.add("Mul", [self.add("Mul", [source, source]), source])
            inner = self.add("Add", [source, self.add("Mul", [cube, self.number(0.044715)])])
            share = self.add("Tanh", [self.add("Mul", [inner, self.number(math.sqrt(2 / math.pi))])])
        else:
            share = self.add("Erf", [self.add("Mul", [source, self.number(math.sqrt(0.5))])])
        half = self.add("Mul", [source, self.number(0.5)])
        return self.add("Mul", [half, self.add("Add", [share, self.number(1.0)])])
