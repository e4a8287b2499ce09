"""Flat weights by name: what torch's state_dict would hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given

from cbdsl.engines.architecture import Architecture
from cbdsl.engines.torch_modules import module_of
from cbdsl.errors import UserError
from cbdsl.models.flat import named_weights
from cbdsl.models.modules import to_flat
from cbdsl.models.zoo import softmax
from networks import architectures


@given(architectures())
def test_names_and_arrays_are_those_of_the_torch_module(architecture: Architecture) -> None:
    module = module_of(architecture)
    state = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    named = named_weights(architecture, to_flat(module))
    assert list(named) == list(state)
    for name, values in named.items():
        np.testing.assert_array_equal(values, state[name])
        assert values.dtype == np.float32
    fresh = module_of(architecture)
    fresh.load_state_dict({name: torch.from_numpy(values) for name, values in named.items()})
    np.testing.assert_array_equal(to_flat(fresh), to_flat(module))


def test_weights_of_another_size_are_an_error() -> None:
    with pytest.raises(UserError, match=r"has 9 parameters, but the weights given have shape \(8,\)"):
        named_weights(softmax((2,), 3), np.zeros(8, np.float32))
