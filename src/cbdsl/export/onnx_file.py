"""Writes a network as an ONNX model: one node per layer where ONNX has that layer, otherwise a few.

Opset 17 is old enough for most programs. It has no reliable GroupNormalization and no Gelu, so these become simpler
nodes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from cbdsl.export.steps import Program, Step, error_factors
from cbdsl.models import layers
from cbdsl.models.architecture import SAMPLES

_OPSET, _IR_VERSION = 17, 8


def onnx_model(program: Program) -> bytes:
    """Return the bytes of the checked model, from `features` (N, *shape) to `logits` (N, classes).

    A regression returns `predictions` (N, T); a reconstruction `reconstructions` (N, numbers of a sample), `scores`
    (N, 1), and with a threshold `anomalies` (N, 1): whether a score is above it.
    """
    nodes, card = _Nodes(), program.card
    output = {"regression": "predictions", "reconstruction": "reconstructions"}.get(card.task, "logits")
    names = {SAMPLES: "features"}
    if program.card.shape != program.graph.shape:
        names[SAMPLES] = nodes.add("Flatten", ["features"], axis=1)
    for step in program.steps:
        names[step.number] = nodes.step(step, [names[other] for other in step.reads])
    nodes.add("Identity", [names[program.steps[-1].number]], output=output)
    outputs = [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["N", program.classes])]
    properties = {"classes": json.dumps(list(card.class_names)), "features": program.units()}
    if card.task == "regression":
        properties |= {"task": card.task, "targets": json.dumps(list(card.target_names))}
    if card.task == "reconstruction":
        nodes.score(program, output)
        outputs.append(helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 1]))
        if card.threshold is not None:
            nodes.add("Greater", ["scores", nodes.number(card.threshold)], output="anomalies")
            outputs.append(helper.make_tensor_value_info("anomalies", TensorProto.BOOL, ["N", 1]))
        properties |= {"task": card.task, "loss": card.loss, "threshold": json.dumps(card.threshold)}
    graph = helper.make_graph(
        nodes.made,
        "cbdsl",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["N", *program.card.shape])],
        outputs,
        nodes.constants,
    )
    opsets = [helper.make_opsetid("", _OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="cbdsl")
    helper.set_model_props(model, properties)
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString())


class _Nodes:
    """The nodes and constants of a graph that is being built."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.constants: list[Any] = []

    def add(self, kind: str, inputs: Sequence[str], output: str = "", skip: int = 0, **attributes: Any) -> str:  # noqa: ANN401
        """Add a node; return the name of its result. skip: how many results before that are left out."""
        name = output or f"{kind.lower()}_{len(self.made)}"
        self.made.append(helper.make_node(kind, list(inputs), [*[""] * skip, name], **attributes))
        return name

    def constant(self, values: NDArray[Any]) -> str:
        """Add a constant tensor; return its name."""
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def number(self, value: float) -> str:
        """Add one constant number; return its name."""
        return self.constant(np.array(value, np.float32))

    def score(self, program: Program, reconstructions: str) -> None:
        """Add the nodes of the anomaly score: the mean loss of the scaled errors of a sample."""
        flat = self.add("Flatten", ["features"], axis=1)
        factors = self.constant(error_factors(program).astype(np.float32))
        errors = self.add("Mul", [self.add("Sub", [flat, reconstructions]), factors])
        size = self.add("Abs", [errors])
        losses = size if program.card.loss == "mae" else self.add("Mul", [errors, errors])
        if program.card.loss == "huber":
            delta = program.card.loss_setting
            near = self.add("Mul", [losses, self.number(0.5)])
            far = self.add("Mul", [self.add("Sub", [size, self.number(delta / 2)]), self.number(delta)])
            losses = self.add("Where", [self.add("Greater", [size, self.number(delta)]), far, near])
        self.add("ReduceMean", [losses], output="scores", axes=[1], keepdims=1)

    def scale(self, source: str, shape: Sequence[int], factors: NDArray[Any], offsets: NDArray[Any]) -> str:
        """Add nodes for x * factors + offsets, channel by channel."""
        behind = (1,) * (len(shape) - 1)
        times, plus = (values.astype(np.float32).reshape(-1, *behind) for values in (factors, offsets))
        return self.add("Add", [self.add("Mul", [source, self.constant(times)]), self.constant(plus)])

    def reshape(self, source: str, shape: Sequence[int]) -> str:
        """Add a node that gives every sample another shape."""
        return self.add("Reshape", [source, self.constant(np.array([0, *shape], np.int64))])  # 0: keep the batch

    def step(self, step: Step, sources: Sequence[str]) -> str:
        """Add the nodes of one step; return the name of its result."""
        return _NODES[type(step.layer)](self, step, sources)


Sources = Sequence[str]


def _convolution(nodes: _Nodes, step: Step, sources: Sources) -> str:
    inputs = [*sources, *map(nodes.constant, step.tensors.values())]
    return nodes.add("Conv", inputs, group=step.layer.groups, **_window(step.layer))  # type: ignore[attr-defined]


def _max_pool(nodes: _Nodes, step: Step, sources: Sources) -> str:
    return nodes.add("MaxPool", sources, **_window(step.layer))


def _average_pool(nodes: _Nodes, step: Step, sources: Sources) -> str:
    return nodes.add("AveragePool", sources, count_include_pad=1, **_window(step.layer))


def _window(layer: Any) -> dict[str, Any]:  # noqa: ANN401 - a convolution or a pooling
    return {"kernel_shape": layer.kernel, "strides": layer.stride, "pads": (*layer.padding, *layer.padding)}


def _dense(nodes: _Nodes, step: Step, sources: Sources) -> str:
    return nodes.add("Gemm", [*sources, *map(nodes.constant, step.tensors.values())], transB=1)


def _layer_norm(nodes: _Nodes, step: Step, sources: Sources) -> str:
    layer: Any = step.layer
    factors = step.tensors.get("weight", np.ones(layer.shape, np.float32))
    offsets = [nodes.constant(step.tensors["bias"])] if "bias" in step.tensors else []
    inputs = [*sources, nodes.constant(factors), *offsets]
    return nodes.add("LayerNormalization", inputs, axis=-len(layer.shape), epsilon=float(layer.epsilon))


def _group_norm(nodes: _Nodes, step: Step, sources: Sources) -> str:
    layer: Any = step.layer
    rows = nodes.reshape(sources[0], (layer.groups, step.count // layer.groups))  # a group as one channel
    ones, zeros = (nodes.constant(np.full(layer.groups, value, np.float32)) for value in (1, 0))
    rows = nodes.add("InstanceNormalization", [rows, ones, zeros], epsilon=float(layer.epsilon))
    whole = nodes.reshape(rows, step.shape)
    if not layer.affine:
        return whole
    return nodes.scale(whole, step.shape, step.tensors["weight"], step.tensors["bias"])


def _recurrent(kind: str, order: Sequence[int], **attributes: Any) -> Callable[[_Nodes, Step, Sources], str]:  # noqa: ANN401
    """Return the table row of a recurrent layer. order: torch's gate numbers in the order of ONNX."""

    def add(nodes: _Nodes, step: Step, sources: Sources) -> str:
        layer: Any = step.layer
        gates = [values.reshape(len(order), layer.hidden, -1)[list(order)] for values in step.tensors.values()]
        weights = [values.reshape(1, len(order) * layer.hidden, -1) for values in gates[:2]]
        if layer.bias:
            weights.append(np.concatenate([values.reshape(1, -1) for values in gates[2:]], axis=1))
        rows = nodes.add("Transpose", sources, perm=(1, 0, 2))  # (steps, N, inputs)
        inputs = [rows, *map(nodes.constant, weights)]
        # The node's first result has all states, (steps, 1, N, hidden), its second the last one, (1, N, hidden).
        states = nodes.add(kind, inputs, skip=int(layer.last), hidden_size=layer.hidden, **attributes)
        rows = nodes.add("Squeeze", [states, nodes.constant(np.array([0 if layer.last else 1], np.int64))])
        return rows if layer.last else nodes.add("Transpose", [rows], perm=(1, 0, 2))

    return add


def _scale(nodes: _Nodes, step: Step, sources: Sources) -> str:
    layer: Any = step.layer
    return nodes.scale(sources[0], step.shape, np.array(layer.factors), np.array(layer.offsets))


def _leaky_relu(nodes: _Nodes, step: Step, sources: Sources) -> str:
    return nodes.add("LeakyRelu", sources, alpha=float(step.layer.slope))  # type: ignore[attr-defined]


def _gelu(nodes: _Nodes, step: Step, sources: Sources) -> str:
    source = sources[0]
    if step.layer.approximate:  # type: ignore[attr-defined]
        cube = nodes.add("Mul", [nodes.add("Mul", [source, source]), source])
        inner = nodes.add("Add", [source, nodes.add("Mul", [cube, nodes.number(0.044715)])])
        share = nodes.add("Tanh", [nodes.add("Mul", [inner, nodes.number(math.sqrt(2 / math.pi))])])
    else:
        share = nodes.add("Erf", [nodes.add("Mul", [source, nodes.number(math.sqrt(0.5))])])
    half = nodes.add("Mul", [source, nodes.number(0.5)])
    return nodes.add("Mul", [half, nodes.add("Add", [share, nodes.number(1.0)])])


def _node(kind: str, **attributes: Any) -> Callable[[_Nodes, Step, Sources], str]:  # noqa: ANN401
    """Return the row of a layer that is one node of ONNX."""
    return lambda nodes, _, sources: nodes.add(kind, sources, **attributes)


_NODES: dict[type[layers.Layer], Callable[[_Nodes, Step, Sources], str]] = {
    layers.Conv1d: _convolution,
    layers.Conv2d: _convolution,
    layers.Linear: _dense,
    layers.Relu: _node("Relu"),
    layers.Relu6: lambda nodes, _, sources: nodes.add("Clip", [*sources, nodes.number(0.0), nodes.number(6.0)]),
    layers.LeakyRelu: _leaky_relu,
    layers.Tanh: _node("Tanh"),
    layers.Sigmoid: _node("Sigmoid"),
    layers.Silu: lambda nodes, _, sources: nodes.add("Mul", [*sources, nodes.add("Sigmoid", sources)]),
    layers.Hardswish: _node("HardSwish"),
    layers.Softplus: _node("Softplus"),
    layers.Gelu: _gelu,
    layers.MaxPool1d: _max_pool,
    layers.MaxPool2d: _max_pool,
    layers.AvgPool1d: _average_pool,
    layers.AvgPool2d: _average_pool,
    layers.Flatten: _node("Flatten", axis=1),
    layers.GroupNorm: _group_norm,
    layers.LayerNorm: _layer_norm,
    layers.Gru: _recurrent("GRU", (1, 0, 2), linear_before_reset=1),
    layers.Lstm: _recurrent("LSTM", (0, 3, 1, 2)),
    layers.Transpose: _node("Transpose", perm=(0, 2, 1)),
    layers.Scale: _scale,
    layers.Add: _node("Sum"),
    layers.Concat: _node("Concat", axis=1),
}
"""How to write each layer kind; dropout was left out before."""
