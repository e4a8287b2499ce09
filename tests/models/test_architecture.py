"""A network as plain data: sizes, JSON, which layers may read which, and what is refused with which words."""

from __future__ import annotations

import json

import pytest

from cbdsl.models.architecture import SAMPLES, Architecture, Draft
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
    Gru,
    Hardswish,
    Layer,
    LayerNorm,
    LeakyRelu,
    Linear,
    Lstm,
    MaxPool1d,
    MaxPool2d,
    Relu,
    Relu6,
    Scale,
    Sigmoid,
    Silu,
    Softplus,
    Tanh,
    Transpose,
)
from cbdsl.models.zoo import cnn

LENET = cnn((1, 28, 28), 10)
FOUR = Linear(4, 4)


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
    for layer in (
        MaxPool1d((3,), (2,), (1,)), AvgPool1d((2,), (2,)), Transpose(), Gru(6, 4, last=False), Lstm(4, 5, bias=False),
        Linear(5, 2),
    ):  # fmt: skip
        net.add(layer)
    graph = net.architecture()
    kinds = {type(layer) for architecture in (every_kind, graph) for layer in architecture.layers}
    assert kinds == set(LAYERS.values())
    for architecture in (LENET, every_kind, graph):
        assert Architecture.from_dict(json.loads(json.dumps(architecture.to_dict()))) == architecture


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
        (
            (9, 4),
            (Gru(5, 3),),
            "takes series \\(steps, 5\\) but is given .*; where the channels come first, put a Transpose",
        ),
        ((4,), (Lstm(4, 3),), "takes series"),
        ((9, 4), (Gru(4, 0),), "hidden is 0"),
        ((9, 4), (Lstm(4, 3, last=1),), "last is 1"),  # type: ignore[arg-type]
        ((2**20, 1), (Gru(1, 2**20),), "steps keep more than"),
        ((4,), (Transpose(),), "takes a series of two axes"),
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


@pytest.mark.parametrize(
    ("layers", "reads", "words"),
    [
        ((FOUR, Relu()), ((-1,),), "2 layers read 1 times; give one entry per layer"),
        ((FOUR, Relu(), Add()), ((-1,), (2,), (0, 1)), r"layer 1 \(relu\) reads layer 2; .*one direction"),
        ((FOUR, Relu()), ((0,), (0,)), r"layer 0 \(linear\) reads layer 0"),
        ((FOUR, Relu()), ((-1,), (-2,)), "reads layer -2"),
        ((FOUR, Relu(), Tanh()), ((-1,), (0,), (0,)), r"the result of layer 1 \(relu\) is never used; leave it out"),
        ((FOUR, Relu()), ((-1,), ()), r"the result of layer 0 \(linear\) is never used"),
        ((FOUR, Relu()), ((-1,), (0, -1)), "takes one tensor but is given 2"),
        ((FOUR, Add()), ((-1,), (0,) * 65), "takes 2 to 64 tensors but is given 65"),
        ((Linear(4, 3), Add()), ((-1,), (0, -1)), r"adds tensors of one shape but is given \(3,\) and \(4,\)"),
        ((Relu(), Concat(), Linear(4, 2)), ((-1,), (0,), (1,)), "takes 2 to 64 tensors but is given 1"),
    ],
)
def test_a_graph_that_is_none_is_refused_with_a_reason(
    layers: tuple[Layer, ...], reads: tuple[tuple[int, ...], ...], words: str
) -> None:
    with pytest.raises(ArchitectureError, match=words):
        Architecture((4,), layers, reads)


def test_channels_of_other_sizes_are_not_joined() -> None:
    layers = (MaxPool2d((2, 2), (2, 2)), Concat(), Flatten(), Linear(80, 2))
    with pytest.raises(ArchitectureError, match=r"layer 1 \(concat\): joins channels of one size but is given"):
        Architecture((4, 4, 4), layers, ((-1,), (0, -1), (1,), (2,)))


def test_a_graph_counts_what_its_layers_do() -> None:
    layers = (Conv1d(2, 4, (3,), (1,), groups=2), Add(), Concat(), Flatten(), Linear(80, 3))
    graph = Architecture((2, 10), layers, ((-1,), (0, 0), (1, 0), (2,), (3,)))
    assert not graph.is_chain
    assert graph.shapes() == [(4, 10), (4, 10), (8, 10), (80,), (3,)]
    assert graph.tensors() == {
        "0.weight": (4, 1, 3), "0.bias": (4,), "4.weight": (3, 80), "4.bias": (3,),
    }  # fmt: skip
    assert graph.multiply_adds() == [4 * 10 * 3, 0, 0, 0, 240]
    assert graph.training_multiply_adds() == 2 * 120 + 3 * 240
    assert Architecture((2, 10), layers, graph.reads) == graph


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
        ({"format": 2, "shape": [4], "layers": [{"kind": "rnn"}]}, "its kind must be one of"),
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
