"""Which layers may read which, and what is counted of a graph."""

from __future__ import annotations

import pytest

from cbdsl.models.architecture import Architecture
from cbdsl.models.layers import (
    Add,
    ArchitectureError,
    Concat,
    Conv1d,
    Flatten,
    Layer,
    Linear,
    MaxPool2d,
    Relu,
    Tanh,
)

FOUR = Linear(4, 4)


@pytest.mark.parametrize(
    ("layers", "reads", "words"),
    [
        ((FOUR, Relu()), ((-1,),), "2 layers read 1 times; give one entry per layer"),
        ((FOUR, Relu(), Add()), ((-1,), (2,), (0, 1)), r"layer 1 \(relu\) reads layer 2; .*one direction"),
        ((FOUR, Relu()), ((0,), (0,)), r"layer 0 \(linear\) reads layer 0"),
        ((FOUR, Relu()), ((-1,), (-2,)), "reads layer -2"),
        ((FOUR, Relu(), Tanh()), ((-1,), (0,), (0,)), r"what layer 1 \(relu\) makes is never used; leave it out"),
        ((FOUR, Relu()), ((-1,), ()), r"what layer 0 \(linear\) makes is never used"),
        ((FOUR, Relu()), ((-1,), (0, -1)), "takes one tensor but is given 2"),
        ((FOUR, Add()), ((-1,), (0,)), "takes 2 to 64 tensors but is given 1"),
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
