"""From a description to a torch module and back, and flat weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn

from cbdsl import register
from cbdsl.models.architecture import Architecture, from_module
from cbdsl.models.layers import Shape
from cbdsl.models.to_torch import load_flat, module_of, module_weights
from support.networks import architectures, graphs
from support.refusals import refused_as


@given(architectures())
def test_a_module_is_described_as_what_it_was_built_from(architecture: Architecture) -> None:
    assert from_module(module_of(architecture), architecture.shape) == architecture


@given(architectures() | graphs(dropout=True))
def test_a_module_takes_samples_and_gives_logits(architecture: Architecture) -> None:
    assert module_of(architecture)(torch.zeros(2, *architecture.shape)).shape == (2, architecture.classes)


def written_out(name: str, shape: Shape, classes: int) -> nn.Sequential:
    """The package's networks in torch's own words."""
    inputs = shape[0] * shape[1] * shape[2]
    if name == "softmax":
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, classes))
    pooled = [((side - 4) // 2 - 4) // 2 for side in shape[1:]]
    return nn.Sequential(
        nn.Conv2d(shape[0], 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2, 2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2, 2),
        nn.Flatten(),
        nn.Linear(16 * pooled[0] * pooled[1], 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 16, 16), (3, 32, 32), (2, 17, 30)])
@pytest.mark.parametrize("name", ["softmax", "mlp", "cnn"])
def test_the_packages_networks_are_the_same_layers_with_the_same_weights(name: str, shape: Shape) -> None:
    torch.manual_seed(3)
    built = module_of(register.model.get(name)(shape, 7))
    torch.manual_seed(3)
    expected = written_out(name, shape, 7)
    assert [type(layer) for layer in built.children()] == [type(layer) for layer in expected]
    assert from_module(expected, shape) == register.model.get(name)(shape, 7)
    assert list(built.state_dict()) == list(expected.state_dict())
    assert all(torch.equal(built.state_dict()[key], value) for key, value in expected.state_dict().items())
    inputs = torch.randn(3, *shape)
    assert torch.equal(built(inputs), expected(inputs))


def test_flat_weights_of_another_size_are_an_error() -> None:
    with refused_as("wrong-shape", "9 parameters", "(8,)"):
        load_flat(nn.Linear(2, 3), np.zeros(8, dtype=np.float32))


def test_initial_weights_follow_the_seed_and_leave_torch_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    first, again, other = (module_weights(lambda: nn.Linear(4, 4), seed) for seed in (5, 5, 6))
    assert torch.equal(torch.rand(1), expected)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
