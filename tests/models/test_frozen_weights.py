"""Frozen weights: constants of a network beside what trains, and their names in a model's file."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st
from torch import nn

from cbdsl.models.check_module import check_trainable
from cbdsl.models.frozen_weights import FrozenWeights
from cbdsl.models.network import Network
from cbdsl.models.to_torch import freeze, frozen_of, to_flat
from support.refusals import refused_as


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_filling_and_ranges_invert_each_other(trains: list[bool]) -> None:
    mask = np.array(trains)
    frozen = FrozenWeights(np.arange(len(mask), dtype=np.float32), mask)
    whole = frozen.fill(np.full(frozen.size, -1, np.float32))
    assert whole.tolist() == [-1 if train else place for place, train in enumerate(trains)]
    again = FrozenWeights.of_runs(frozen.runs(), frozen.constants, len(mask))
    assert np.array_equal(again.trains, mask)
    assert np.array_equal(again.constants, frozen.constants)
    assert again.digest == frozen.digest


def test_a_digest_covers_values_and_places() -> None:
    values, trains = np.array([1, 2, 3], np.float32), np.array([False, True, False])
    digests = {
        FrozenWeights(values, trains).digest,
        FrozenWeights(values + 1, trains).digest,
        FrozenWeights(values[[0, 2, 1]], trains[[0, 2, 1]]).digest,
    }
    assert len(digests) == 3
    other = np.array([1, 9, 3], np.float32)  # what trains is no part of it
    assert FrozenWeights(other, trains).digest == FrozenWeights(values, trains).digest


def half_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    module[0].requires_grad_(False)
    module[2].bias.requires_grad_(False)
    return module


def test_a_network_knows_what_trains_and_keeps_all_of_it_in_its_tensors() -> None:
    network = Network((4,), 3, None, half_frozen)
    assert (network.size, network.whole_size) == (15, 43)
    assert network.frozen_names() == ("0.weight", "0.bias", "2.bias")
    weights = network.initial_weights(3)
    assert weights.shape == (15,)
    tensors = network.tensors(weights)
    assert tensors["2.weight"].ravel().tolist() == weights.tolist()
    assert np.array_equal(tensors["0.weight"], network.build()[0].weight.detach().numpy())  # type: ignore[index]
    assert np.array_equal(network.trained(network.flat(tensors, "a file")), weights)
    built = network.module(weights)
    assert all(np.array_equal(each.detach(), tensors[name]) for name, each in built.named_parameters())


def test_frozen_weights_are_equal_whatever_the_seed_of_the_run_is() -> None:
    network = Network((4,), 3, None, half_frozen)
    one, other = network.initial_weights(1), network.initial_weights(2)
    assert not np.array_equal(one, other)
    assert np.array_equal(network.tensors(one)["0.weight"], network.tensors(other)["0.weight"])


def test_other_frozen_weights_take_the_place_of_those_that_were_built() -> None:
    network = Network((4,), 3, None, half_frozen)
    whole = np.arange(43, dtype=np.float32)
    other = network.frozen_at(whole)
    assert np.array_equal(other.whole(other.trained(whole)), whole)
    built = other.build()
    assert np.array_equal(to_flat(built)[:25], whole[:25])
    assert [each.requires_grad for each in built.parameters()] == [False, False, True, False]
    described = Network((4,), 3, network.description(), constants=other.frozen)
    assert np.array_equal(to_flat(described.module(whole[25:40])), whole)
    assert other.frozen is not None
    assert network.frozen is not None
    assert other.frozen.digest != network.frozen.digest


def test_a_module_of_which_all_trains_has_no_frozen_weights() -> None:
    module = nn.Linear(3, 2)
    assert frozen_of(module) is None
    assert Network((3,), 2, None, lambda: nn.Linear(3, 2)).frozen_names() == ()
    frozen = FrozenWeights(np.full(8, 7, np.float32), np.array([True] * 6 + [False] * 2))
    before = to_flat(module)
    freeze(module, frozen)
    assert np.array_equal(to_flat(module), [*before[:6], 7, 7])


def test_a_module_that_is_frozen_whole_is_refused() -> None:
    with refused_as("invalid-part", "requires_grad"):
        check_trainable(nn.Linear(3, 2).requires_grad_(False), (3,), 2)
