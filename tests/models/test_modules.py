from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from cbdsl.errors import UserError
from cbdsl.models.modules import MODELS, cnn, initial_weights, load_flat, parameter_count, to_flat

SIZES = {"cnn": 44_426, "mlp": 50_890, "softmax": 7_850}


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_stated_size_and_one_output_per_class(name: str) -> None:
    module = MODELS[name]((1, 28, 28), 10)
    assert parameter_count(module) == SIZES[name]
    assert module(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 32, 32), (2, 17, 30)])
def test_the_cnn_fits_other_images(shape: tuple[int, int, int]) -> None:
    assert cnn(shape, 7)(torch.zeros(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("shape", [(8,), (1, 12, 28)])
def test_the_cnn_refuses_what_it_cannot_see(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="at least 16 x 16"):
        cnn(shape, 3)


def test_flat_weights_go_both_ways() -> None:
    source, target = cnn((1, 28, 28), 10), cnn((1, 28, 28), 10)
    load_flat(target, to_flat(source))
    for a, b in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(a, b)


def test_flat_weights_of_another_size_are_an_error() -> None:
    with pytest.raises(UserError, match=r"has 9 parameters, but the weights given have shape \(8,\)"):
        load_flat(nn.Linear(2, 3), np.zeros(8, dtype=np.float32))


def test_initial_weights_follow_the_seed_and_leave_torch_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    first, again, other = (initial_weights(lambda: nn.Linear(4, 4), seed) for seed in (5, 5, 6))
    assert torch.equal(torch.rand(1), expected)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
