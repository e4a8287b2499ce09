from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from cbdsl.models.to_torch import load_flat, module_weights, parameter_count, to_flat
from support.helpers import module_named
from support.refusals import refused_as

SIZES = {"cnn": 44_426, "mlp": 50_890, "softmax": 7_850}


@pytest.mark.parametrize("name", SIZES)
def test_models_have_the_stated_size_and_one_output_per_class(name: str) -> None:
    module = module_named(name, (1, 28, 28), 10)
    assert parameter_count(module) == SIZES[name]
    assert module(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


@pytest.mark.parametrize("name", ["mlp", "softmax"])
@pytest.mark.parametrize("shape", [(20,), (4, 5), (2, 1, 2, 5)])
def test_modules_that_flatten_take_samples_of_any_shape(name: str, shape: tuple[int, ...]) -> None:
    assert module_named(name, shape, 3)(torch.zeros(2, *shape)).shape == (2, 3)


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with refused_as("unknown-name", "'cnm'", "'cnn'?", "cnn, mlp, softmax"):
        module_named("cnm", (1, 28, 28), 10)


def test_flat_weights_go_both_ways() -> None:
    source, target = (module_named("cnn", (1, 28, 28), 10) for _ in range(2))
    load_flat(target, to_flat(source))
    for a, b in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(a, b)


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
