"""One network: its weights by name, as torch's state_dict would hold them, and back again."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given

from cbdsl.models.architecture import Architecture
from cbdsl.models.network import Network
from cbdsl.models.to_torch import module_of, to_flat
from cbdsl.models.zoo import softmax
from support.networks import architectures
from support.refusals import refused_as


@given(architectures())
def test_names_and_arrays_are_those_of_the_torch_module(architecture: Architecture) -> None:
    module = module_of(architecture)
    state = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    network = Network(architecture.shape, architecture.classes, architecture)
    named = network.tensors(to_flat(module))
    assert list(named) == list(state)
    for name, values in named.items():
        np.testing.assert_array_equal(values, state[name])
        assert values.dtype == np.float32
    fresh = module_of(architecture)
    fresh.load_state_dict({name: torch.from_numpy(values) for name, values in named.items()})
    np.testing.assert_array_equal(to_flat(fresh), to_flat(module))
    np.testing.assert_array_equal(network.flat(named, "a file"), to_flat(module))


def test_tensors_of_another_network_are_an_error() -> None:
    small, large = (Network((size,), 3, softmax((size,), 3)) for size in (2, 4))
    with refused_as("wrong-shape", "a file", "1.weight", "(3, 4)"):
        large.flat(small.tensors(np.zeros(9, np.float32)), "a file")
