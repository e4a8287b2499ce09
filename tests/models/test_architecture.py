"""A network as plain data: sizes, JSON, and what is refused with which words."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
from torch import nn

from cbdsl.models.architecture import SAMPLES, Architecture, Draft, from_module
from cbdsl.models.layers import (
    LAYERS,
    Add,
    ArchitectureError,
    AvgPool1d,
    AvgPool2d,
    Concat,
    Conv1d,
    Conv2d,
    Dropout,
    Flatten,
    Gelu,
    GroupNorm,
    Hardswish,
    Layer,
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
    Softplus,
    Tanh,
)

LENET = Architecture(
    (1, 28, 28),
    (
        Conv2d(1, 6, (5, 5)),
        Relu(),
        MaxPool2d((2, 2), (2, 2)),
        Conv2d(6, 16, (5, 5)),
        Relu(),
        MaxPool2d((2, 2), (2, 2)),
        Flatten(),
        Linear(256, 120),
        Relu(),
        Linear(120, 84),
        Relu(),
        Linear(84, 10),
    ),
)


def test_sizes_of_the_papers_network_are_those_of_its_table() -> None:
    assert LENET.size == 44_426
    assert LENET.classes == 10
    assert LENET.shapes()[5] == (16, 4, 4)
    assert sum(LENET.multiply_adds()) == 6 * 24 * 24 * 25 + 16 * 8 * 8 * 150 + 256 * 120 + 120 * 84 + 84 * 10
    assert LENET.training_multiply_adds() == 3 * sum(LENET.multiply_adds()) - 6 * 24 * 24 * 25


def test_an_architecture_survives_json() -> None:
    every_kind = Architecture(
        (3, 9, 7),
        (
            Conv2d(3, 4, (3, 1), (1, 0), bias=False),
            Tanh(),
            AvgPool2d((2, 3), (1, 2)),
            Conv2d(4, 2, (2, 2)),
            Sigmoid(),
            MaxPool2d((2, 2), (3, 1)),
            Relu(),
            Flatten(),
            Linear(2 * 2 * 1, 5, bias=False),
        ),
    )
    net = Draft((3, 8))
    net.add(Conv1d(3, 3, (3,), (1,), bias=False, groups=3))
    branch = net.add(GroupNorm(3, 3, affine=False))
    others: list[Layer] = [
        Relu6(), LeakyRelu(0.2), Silu(), Hardswish(), Softplus(), Gelu(approximate=True), Dropout(0.5),
        Scale((2.0,), (0.1, 0.2, 0.3)), LayerNorm((8,), bias=False, epsilon=1e-3),
    ]  # fmt: skip
    for layer in others:
        net.add(layer)
    net.add(Concat(), net.add(Add(), net.last, branch), SAMPLES)
    for layer in (MaxPool1d((3,), (2,), (1,)), AvgPool1d((2,), (2,)), Flatten(), Linear(12, 2)):
        net.add(layer)
    graph = net.architecture()
    kinds = {type(layer) for architecture in (every_kind, graph) for layer in architecture.layers}
    assert kinds == set(LAYERS.values())
    for architecture in (LENET, every_kind, graph):
        assert Architecture.from_dict(json.loads(json.dumps(architecture.to_dict()))) == architecture


def test_a_nested_module_is_read_in_the_order_of_its_parameters() -> None:
    module = nn.Sequential(
        OrderedDict(
            features=nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.Identity(), nn.ReLU(), nn.MaxPool2d(2)),
            rest=nn.Sequential(nn.Flatten(), nn.Dropout(0.0), nn.Linear(4 * 4 * 4, 7, bias=False), nn.Tanh()),
        )
    )
    architecture = from_module(module, (3, 8, 8))
    assert architecture.layers == (
        Conv2d(3, 4, (3, 3), (1, 1)),
        Relu(),
        MaxPool2d((2, 2), (2, 2)),
        Flatten(),
        Linear(64, 7, bias=False),
        Tanh(),
    )
    assert architecture.size == sum(parameter.numel() for parameter in module.parameters())
    assert architecture.shapes()[-1] == module(torch.zeros(1, 3, 8, 8)).shape[1:]


def test_one_activation_object_may_stand_in_several_places() -> None:
    relu = nn.ReLU()
    module = nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 3), relu)
    assert len(from_module(module, (4,)).layers) == 4


def _hooked() -> nn.Module:
    module = nn.Linear(4, 3)
    module.register_forward_hook(lambda *_: None)
    return module


def _frozen() -> nn.Module:
    module = nn.Linear(4, 4)
    module.weight.requires_grad_(False)
    return module


class _Subclass(nn.Linear):
    pass


_SHARED = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Sequential(nn.Conv2d(1, 2, 3, dilation=2)), "dilation"),
        (nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect")), "reflect"),
        (nn.Sequential(nn.Conv2d(1, 2, 4, padding="same")), "even kernel"),
        (nn.Sequential(nn.MaxPool2d(2, ceil_mode=True)), "ceil_mode"),
        (nn.Sequential(nn.AvgPool2d(2, padding=1, count_include_pad=False)), "count_include_pad"),
        (nn.Sequential(nn.AvgPool2d(2, divisor_override=3)), "divisor_override"),
        (nn.Sequential(nn.Flatten(2)), "layer 0 \\(Flatten\\): flatten\\(2, -1\\)"),
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout1d(0.5)), "layer 1 \\(Dropout1d\\)"),
        (
            nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.BatchNorm1d(4))),
            "layer 1.0 \\(BatchNorm1d\\)",
        ),
        (nn.LSTM(4, 4), "LSTM"),
        (_hooked(), "hooks"),
        (_frozen(), "frozen"),
        (_Subclass(4, 3), "_Subclass"),
        (nn.Sequential(_SHARED, nn.ReLU(), _SHARED), "layer 0 .*used twice"),
    ],
)
def test_a_module_that_cannot_be_described_is_refused_by_name(module: nn.Module, words: str) -> None:
    with pytest.raises(ArchitectureError, match=words):
        from_module(module, (4,))


@pytest.mark.parametrize(
    ("shape", "layers", "words"),
    [
        ((), (Linear(1, 1),), "shape of a sample"),
        ((4, 4), (Linear(16, 4),), "put a Flatten before it"),
        ((1, 2, 3, 4), (Flatten(), Linear(24, 2)), "shape of a sample"),
        ((4, 0), (Flatten(), Linear(1, 1)), "shape of a sample"),
        ((0,), (Linear(1, 1),), "shape of a sample"),
        ((4,), (), "no layers"),
        ((4,), (Relu(),), "no parameters"),
        ((1, 4, 4), (Conv2d(1, 2, (3, 3)),), "end with Flatten"),
        ((1, 4, 4), (Linear(16, 2),), "put a Flatten before it"),
        ((4,), (Linear(5, 2),), "takes 5 inputs"),
        ((4,), (Conv2d(1, 2, (1, 1)),), "images of 1 channels"),
        ((3, 4, 4), (Conv2d(1, 2, (1, 1)),), "images of 1 channels"),
        ((1, 4, 4), (Conv2d(1, 2, (5, 1)),), "does not fit into \\(4, 4\\)"),
        ((1, 4, 4), (Conv2d(1, 2, (0, 1)),), "kernel is"),
        ((1, 4, 4), (Conv2d(1, 2, (1, 1), (-1, 0)),), "padding is"),
        ((1, 4, 4), (Conv2d(1, 2, 3),), "give a pair"),  # type: ignore[arg-type]
        ((1, 4, 4), (Conv2d(1, 2, (3, 3), bias="no"),), "bias is"),  # type: ignore[arg-type]
        ((1, 4, 4), (MaxPool2d((5, 1), (1, 1)),), "does not fit"),
        ((1, 4, 4), (MaxPool2d((1, 1), (0, 1)),), "stride is"),
        ((1, 4, 4), (Flatten(), MaxPool2d((1, 1), (1, 1))), "does not fit"),
        ((1, 4, 4), (Flatten(), Conv2d(16, 1, (1, 1))), "images of 16"),
        ((1, 4, 4), (Conv2d(1, 2, (3, 3), stride=(0, 1)),), "stride is"),
        ((4, 4, 4), (Conv2d(4, 6, (3, 3), groups=4),), "do not split into 4 groups"),
        ((4, 9), (Conv1d(3, 2, (3,)),), "series of 3 channels"),
        ((4, 9), (Conv1d(4, 2, (3, 3)),), "kernel is"),  # as an image would have it
        ((4, 9), (Conv2d(4, 2, (3, 3)),), "images of 4 channels"),
        ((4, 9), (MaxPool1d((3,), (1,), (2,)),), "more than half of its window"),
        ((4, 9), (AvgPool1d((10,), (1,)),), "does not fit"),
        ((4,), (LeakyRelu(2.0),), "slope is 2.0; give a number from 0 to 1"),
        ((4,), (Gelu("tanh"),), "approximate is"),  # type: ignore[arg-type]
        ((4,), (GroupNorm(3, 4),), "do not split into 3 groups"),
        ((4,), (GroupNorm(1, 5),), "takes 5 channels"),
        ((4,), (LayerNorm((5,)),), "give the sizes of its last axes"),
        ((4,), (LayerNorm(()),), "shape is"),
        ((4,), (Dropout(1.0),), "chance is 1.0"),
        ((4,), (Dropout(float("nan")),), "chance is nan"),
        ((4,), (Scale((1.0, 2.0)),), "one for each of 4 channels"),
        ((4,), (Scale(offsets=(float("inf"),)),), "offsets is inf"),
        ((4,), (Scale([2.0]),), "factors are"),  # type: ignore[arg-type]
        ((4,), (Add(),), "takes 2 to 64 tensors but is given 1"),
        ((4,), ("relu",), "is not a layer; known are"),
        ((4,), (Linear(4, True),), "outputs is True"),
        ((4,), (Linear(4, 2**31),), "outputs is"),
    ],
)
def test_layers_that_do_not_fit_are_refused_with_a_reason(
    shape: tuple[int, ...], layers: tuple[Layer, ...], words: str
) -> None:
    with pytest.raises(ArchitectureError, match=words):
        Architecture(shape, layers)


def table(layer: dict[str, object]) -> dict[str, object]:
    return {"format": 2, "shape": [4], "layers": [layer]}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "exactly the keys"),
        ([], "exactly the keys"),
        ({"format": 1, "shape": [4], "layers": []}, "reads format 2"),
        ({"format": 2, "shape": 4, "layers": []}, "must be lists"),
        ({"format": 2, "shape": [4], "layers": ["relu"]}, "its kind must be one of"),
        ({"format": 2, "shape": [4], "layers": [{"kind": "lstm"}]}, "its kind must be one of"),
        ({"format": 2, "shape": [4], "layers": [{"kind": "linear", "size": 3}]}, "unknown \\['size'\\]"),
        ({"format": 2, "shape": [4], "layers": [{"kind": "linear", "inputs": 4}]}, "outputs"),
        ({"format": 2, "shape": [4], "layers": [{"kind": "linear", "inputs": "4", "outputs": 2}]}, "inputs is '4'"),
        ({"format": 2, "shape": ["4"], "layers": [{"kind": "linear", "inputs": 4, "outputs": 2}]}, "shape of a sample"),
        (table({"kind": "linear", "inputs": 4, "outputs": 2, "reads": 0}), "give a list of layers"),
        (table({"kind": "linear", "inputs": 4, "outputs": 2, "reads": ["0"]}), "reads layer '0'"),
        (table({"kind": "linear", "inputs": 4, "outputs": 2, "reads": [True]}), "reads layer True"),
        (table({"kind": "linear", "inputs": 4, "outputs": 2, "reads": [0]}), "a network runs in one direction"),
        (table({"kind": "linear", "inputs": 4, "outputs": 2, "reads": [-2]}), "reads layer -2"),
        (table({"kind": "scale", "factors": "2"}), "factors are"),
    ],
)
def test_a_wrong_table_is_refused_with_a_reason(data: object, words: str) -> None:
    with pytest.raises(ArchitectureError, match=words):
        Architecture.from_dict(data)  # type: ignore[arg-type]


def test_a_device_needs_no_torch_to_describe_and_run_a_network() -> None:
    program = (
        "import sys; import cbdsl.engines.native_engine; from cbdsl.models.architecture import Architecture; "
        "from cbdsl.models.layers import Linear; "
        "assert Architecture((4,), (Linear(4, 2),)).size == 10; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
