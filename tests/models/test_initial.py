"""First weights are torch's own, bit for bit, without torch."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from cbdsl import register
from cbdsl.arrays import Floats
from cbdsl.models import to_torch
from cbdsl.models.architecture import Architecture
from cbdsl.models.layers import Linear
from cbdsl.models.network import initial_weights
from cbdsl.models.to_torch import module_of
from support.helpers import shape_for
from support.networks import architectures

EDGES = (0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**64 - 1, -1)
SEEDS = st.integers(0, 2**63 - 1) | st.sampled_from(EDGES)


def rounds_once() -> bool:
    """Whether torch multiplies and adds in one step on this machine."""
    torch.manual_seed(0)
    torch_way = torch.empty(1000).uniform_(-0.2, 0.2).numpy()
    draws = np.random.RandomState(0).randint(0, 2**32, 1000, dtype=np.uint32) % 2**24
    bound = np.float32(0.2)
    return not np.array_equal(torch_way, draws.astype(np.float32) / np.float32(2**24) * (bound + bound) - bound)


one_rounding = pytest.mark.skipif(not rounds_once(), reason="torch rounds twice on this machine: the last bit differs")


def torch_way(architecture: Architecture, seed: int) -> Floats:
    return to_torch.module_weights(lambda: module_of(architecture), seed)


def same_bits(first: Floats, second: Floats) -> bool:
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()


@one_rounding
@given(architectures(), SEEDS)
def test_any_network_starts_as_torch_starts_it(architecture: Architecture, seed: int) -> None:
    assert same_bits(initial_weights(architecture, seed), torch_way(architecture, seed))


@one_rounding
@pytest.mark.parametrize("name", register.model.names())
@given(seed=SEEDS)
def test_the_packages_networks_start_as_torch_starts_them(name: str, seed: int) -> None:
    network = register.model.get(name)(shape_for(name), 10)
    assert same_bits(initial_weights(network, seed), torch_way(network, seed))


@one_rounding
@given(st.integers(1, 200_000), st.booleans(), SEEDS)
def test_wide_layers_have_torchs_bounds(inputs: int, bias: bool, seed: int) -> None:
    network = Architecture((inputs,), (Linear(inputs, 2, bias),))
    assert same_bits(initial_weights(network, seed), torch_way(network, seed))


@given(st.integers(0, 2**32 - 1), st.integers(1, 50))
def test_every_number_is_the_exact_one_rounded_once(seed: int, inputs: int) -> None:
    drawn = np.random.RandomState(seed).randint(0, 2**32, 3, dtype=np.uint32) % 2**24
    weights = initial_weights(Architecture((inputs,), (Linear(inputs, 3, bias=False),)), seed)
    bound = Fraction(float(np.float32(1 / np.sqrt(inputs))))
    for draw, weight in zip(drawn, weights, strict=False):
        exact = Fraction(int(draw), 2**24) * 2 * bound - bound
        neighbours = (np.nextafter(weight, np.float32(side)) for side in (-np.inf, np.inf))
        error = abs(Fraction(float(weight)) - exact)
        assert all(error <= abs(Fraction(float(other)) - exact) for other in neighbours)


def test_these_weights_never_change() -> None:
    weights = initial_weights(Architecture((3,), (Linear(3, 2),)), 2**40 + 7)
    expected = "e82b253d cf11b2be 08413c3e 5882393e 3ffe9dbe 7f37b1bd 362cadbe ea66193e"
    assert weights.astype("<f4").tobytes().hex(" ", 4) == expected


def test_nobody_elses_random_numbers_change() -> None:
    torch_state, numpy_state = torch.random.get_rng_state(), str(np.random.get_state())  # noqa: NPY002
    initial_weights(register.model.get("mlp")((4,), 2), 5)
    assert torch.equal(torch_state, torch.random.get_rng_state())
    assert numpy_state == str(np.random.get_state())  # noqa: NPY002
