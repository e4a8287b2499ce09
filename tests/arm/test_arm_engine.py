"""The engine's kernels on ARM: vectors of four, and the numbers of this machine on every layer."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from cbdsl import register
from cbdsl.arrays import Doubles, Samples
from cbdsl.engines.engine import Sgd
from cbdsl.engines.native_engine import NativeEngine
from cbdsl.models.architecture import Architecture
from cbdsl.models.layers import LAYERS, Linear, Relu, Sigmoid, Tanh
from cbdsl.runs.result import log_probabilities
from support.emulated import MACHINES, Machine, call, emulated, engine_program
from support.helpers import shape_for
from support.layer_kinds import NETWORKS, batches_for, moved
from support.networks import distance, graphs, needs_native, samples_for

pytestmark = [pytest.mark.arm, needs_native]
NEAR = 1e-5
few = settings(max_examples=12, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
ALIGNED = ["-O1", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error", "-Wno-maybe-uninitialized"]


def far(found: Doubles, expected: Doubles) -> float:
    """The largest difference, as a part of the largest number where that is above 1."""
    return float(np.abs(found - expected).max() / max(1.0, float(np.abs(expected).max())))


def differences(network: Architecture, machine: Machine, *changed: str, little: bool = False) -> dict[str, float]:
    """How far results there are from those here. changed: flags of the compiler. little: one model, few samples."""
    here, workers = NativeEngine(network, 2), 1 if little else 2
    samples, weights = samples_for(network, 30), moved(network, workers)
    indices = np.random.default_rng(2).integers(0, 30, 3 if little else 13).astype(np.int32)
    batches = batches_for(workers, 30, 2, 4) if little else batches_for(workers, 30, 5, 7)
    seeds = np.array([5, 2**63 + 9], np.uint64)[:workers]
    sgd, plain = Sgd(0.01, 0.9, 0.01, 0.1), Sgd(0.01)
    with emulated(network, machine, *changed) as there:
        assert there.size == here.size
        both = (there, here)
        looked = samples.features[: len(indices) // 2]
        logits = [log_probabilities(one, weights[0], looked, network.classes) for one in both]
        losses = [one.losses(weights, samples, indices) for one in both]
        own = [one.losses(weights, samples, batches[:, 0]) for one in both]
        gradients = [one.gradients(weights, samples, indices) for one in both]
        trained = [one.train(weights, samples, batches, sgd, seeds, 0.01 * weights) for one in both]
        plainly = [one.train(weights, samples, batches[:, :, :3], plain, seeds) for one in both]
    return {
        "logits": far(*logits), "scores": max(far(*losses), far(*own)), "gradients": distance(*gradients),
        "trained": max(distance(*trained), distance(*plainly)),
    }  # fmt: skip


def assert_near(found: dict[str, float], most: float = NEAR) -> None:
    assert {what: value for what, value in found.items() if not value < most} == {}


@pytest.mark.parametrize("machine", MACHINES)
def test_vectors_of_four_are_multiplied_and_added_at_once(machine: Machine) -> None:
    text = call(f"{machine.compiler}-objdump", "-d", engine_program(machine), text=True).stdout
    assert len(re.findall(machine.multiply_add, text)) > 1000
    with emulated(NETWORKS["joined"], machine) as engine:
        assert (engine.instructions, engine.lanes) == ("NEON", 4)


def test_every_kind_of_layer_is_among_the_networks() -> None:
    assert {type(layer) for network in NETWORKS.values() for layer in network.layers} == set(LAYERS.values())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("machine", MACHINES)
def test_every_layer_computes_what_it_does_here(machine: Machine, name: str) -> None:
    assert_near(differences(NETWORKS[name], machine))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("wide", [False, True])
def test_any_graph_computes_what_it_does_here(machine: Machine, wide: bool) -> None:
    @few
    @given(architecture=graphs(dropout=True, wide=wide, most=7))
    def check(architecture: Architecture) -> None:
        assert_near(differences(architecture, machine))

    check()


@pytest.mark.parametrize("name", register.model.names())
@pytest.mark.parametrize("machine", MACHINES)
def test_every_network_of_the_zoo_computes_what_it_does_here(machine: Machine, name: str) -> None:
    network = register.model.get(name)(shape_for(name), 10)
    assert isinstance(network, Architecture)
    assert_near(differences(network, machine, little=True))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_no_number_is_seen_and_spoils_no_other_model(machine: Machine, bad: float) -> None:
    for name in ("0-Conv2d", "2-Conv2d", "11-GroupNorm", "18-Relu6"):
        network = NETWORKS[name]
        samples, weights = samples_for(network, 9), moved(network, 3)
        indices, batches = np.arange(9, dtype=np.int32), batches_for(3, 9)
        with emulated(network, machine) as there:
            clean = there.train(weights, samples, batches, Sgd(0.01))
            weights[1, ::5] = bad
            found = there.train(weights, samples, batches, Sgd(0.01))
            losses, accuracies = there._scores(weights, samples, indices)
        assert np.array_equal(found[[0, 2]], clean[[0, 2]])
        assert not np.isfinite(found[1]).all()
        assert np.isnan(losses[1]) if np.isnan(bad) else not losses[1] < 1e9
        assert np.isfinite(losses[[0, 2]]).all()
        assert accuracies[1] == 0 or not np.isnan(bad)


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_too_small_for_a_normal_float_are_nought_as_they_are_here(machine: Machine) -> None:
    network = Architecture((6,), (Linear(6, 5), Tanh(), Linear(5, 4), Sigmoid(), Linear(4, 3)))
    here, samples = NativeEngine(network, 1), samples_for(network, 12)
    batches = batches_for(3, 12)
    tiny = np.array([[1e-39], [1e-45], [1.2e-38]], np.float32) * np.sign(moved(network, 3))
    with emulated(network, machine) as there:
        for sgd in (Sgd(1e-38), Sgd(0.1), Sgd(1e-3, 0.9, 1e-38)):
            found, expected = (one.train(tiny, samples, batches, sgd) for one in (there, here))
            assert np.allclose(found, expected, rtol=1e-5, atol=1e-37)
            normal = np.abs(found[found != 0])
            assert not normal.size or normal.min() >= np.finfo(np.float32).tiny
        indices = np.arange(12, dtype=np.int32)
        assert far(there.losses(tiny, samples, indices), here.losses(tiny, samples, indices)) < 1e-7


@pytest.mark.parametrize("machine", MACHINES)
def test_curves_are_accurate_everywhere_and_ends_are_ends(machine: Machine) -> None:
    points = np.concatenate([np.linspace(-110, 110, 4001), [0.0, -0.0, 1e-30, -1e-30, 3e38, -3e38]]).astype(np.float32)
    samples = Samples(points[:, None], np.ones(len(points), np.int32))
    everything = np.arange(len(points), dtype=np.int32)
    for layer in (Sigmoid(), Tanh(), Relu()):
        network = Architecture((1,), (layer, Linear(1, 2)))
        weights = np.array([0, 1, 0, 0], np.float32)
        with emulated(network, machine) as there:
            found = there.sample_losses(weights, samples, everything)
        expected = NativeEngine(network).sample_losses(weights, samples, everything)
        assert np.abs(found - expected).max() < 2e-6
        assert found.min() >= 0


@pytest.mark.parametrize("machine", MACHINES)
def test_threads_company_and_order_never_change_a_bit_there_either(machine: Machine) -> None:
    network = NETWORKS["2-Conv2d"]
    samples, weights, batches = samples_for(network, 20), moved(network, 4), batches_for(4, 20)
    order = np.array([2, 0, 3, 1])
    with emulated(network, machine) as there:
        whole = there.train(weights, samples, batches, Sgd(0.05, 0.9))
        assert np.array_equal(there.train(weights[order], samples, batches[order], Sgd(0.05, 0.9)), whole[order])
        assert np.array_equal(there.train(weights[3:], samples, batches[3:], Sgd(0.05, 0.9)), whole[3:])


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("changed", [("-O0",), ALIGNED], ids=["O0", "undefined"])
def test_no_number_hangs_on_the_optimiser_and_no_address_on_alignment(machine: Machine, changed: list[str]) -> None:
    for name in ("0-Conv2d", "2-Conv2d", "3-Conv2d", "11-GroupNorm", "15-Dropout", "joined"):
        assert_near(differences(NETWORKS[name], machine, *changed, little=True))
