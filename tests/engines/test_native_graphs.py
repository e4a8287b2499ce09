"""Networks that are graphs, on the native engine: every layer, branches, many channels, the zoo, numbers left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn import functional

from cbdsl import register
from cbdsl.arrays import Floats, Samples
from cbdsl.engines.engine import Sgd
from cbdsl.engines.native_engine import NativeEngine, available
from cbdsl.models.architecture import Architecture, Draft
from cbdsl.models.layers import (
    Add,
    Conv1d,
    Conv2d,
    Dropout,
    Flatten,
    Gelu,
    GroupNorm,
    Hardswish,
    Layer,
    LayerNorm,
    LeakyRelu,
    Linear,
    MaxPool2d,
    Relu,
    Relu6,
    Silu,
)
from support.helpers import shape_for
from support.layer_kinds import moved
from support.networks import distance, graphs, reference, reference_loss, reference_training, samples_for

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_against_torch(architecture: Architecture, count: int, tolerance: float = 1e-4) -> None:
    """Losses and gradients of two models are those of torch in double precision."""
    engine = NativeEngine(architecture, threads=2)
    samples, weights = samples_for(architecture, 60), moved(architecture, 2)
    indices = np.random.default_rng(2).integers(0, 60, count).astype(np.int32)
    losses, gradients = engine.losses(weights, samples, indices), engine.gradients(weights, samples, indices)
    for worker in range(2):
        module = reference(architecture, weights[worker]).eval()
        loss = reference_loss(module, samples, indices)
        loss.backward()  # type: ignore[no-untyped-call]
        gradient = torch.cat([each.grad.flatten() for each in module.parameters() if each.grad is not None]).numpy()
        assert losses[worker] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
        assert distance(gradients[worker], gradient) < tolerance


@given(architecture=graphs(dropout=True), count=st.integers(1, 40))
def test_losses_and_gradients_of_any_graph_are_those_of_torch(architecture: Architecture, count: int) -> None:
    check_against_torch(architecture, count)


@given(architecture=graphs(dropout=True, wide=True, most=7), count=st.integers(1, 20))
def test_losses_and_gradients_of_many_channels_are_those_of_torch(architecture: Architecture, count: int) -> None:
    check_against_torch(architecture, count)


@given(
    architecture=st.one_of(graphs(), graphs(wide=True, most=6)),
    batch=st.integers(1, 20),
    momentum=st.sampled_from([0.0, 0.9]),
)
def test_weights_after_many_steps_on_any_graph_are_those_of_torch(
    architecture: Architecture, batch: int, momentum: float
) -> None:
    engine = NativeEngine(architecture, threads=2)
    samples, weights = samples_for(architecture, 60), moved(architecture, 2)
    batches = np.random.default_rng(1).integers(0, 60, (2, 15, batch)).astype(np.int32)
    batches[:, 3, 1:] = -1
    sgd = Sgd(0.005, momentum, 0.01, 0.1)
    trained = engine.train(weights, samples, batches, sgd, corrections=0.01 * weights)
    expected = reference_training(architecture, weights[1], samples, batches[1], sgd, 0.01 * weights[1])
    assert distance(trained[1], expected) < 2e-5


@pytest.mark.parametrize("name", register.model.names())
def test_every_network_of_the_zoo_is_that_of_torch(name: str) -> None:
    made = register.model.get(name)(shape_for(name), 10)
    assert isinstance(made, Architecture)
    check_against_torch(made, 11, 1e-3)  # deep ones meet the corner of a ReLU now and then


@pytest.mark.parametrize("name", ["har-cnn", "resnet8"])
def test_threads_company_and_order_never_change_a_bit_of_a_wide_network(name: str) -> None:
    network = register.model.get(name)(shape_for(name), 4)
    samples, weights = samples_for(network, 40), moved(network, 5)
    batches = np.random.default_rng(3).integers(0, 40, (5, 2, 7)).astype(np.int32)
    seeds = np.arange(5, dtype=np.uint64)
    expected = NativeEngine(network, 1).train(weights, samples, batches, Sgd(0.05, 0.9), seeds)
    order = np.array([3, 1, 4, 0, 2])
    for threads in (2, 5):
        engine = NativeEngine(network, threads)
        found = engine.train(weights[order], samples, batches[order], Sgd(0.05, 0.9), seeds[order])
        assert np.array_equal(found, expected[order])
        alone = engine.train(weights[2:3], samples, batches[2:3], Sgd(0.05, 0.9), seeds[2:3])
        assert np.array_equal(alone[0], expected[2])


CURVES: list[tuple[Layer, Callable[[torch.Tensor], torch.Tensor]]] = [
    (Relu6(), functional.relu6),
    (LeakyRelu(0.3), lambda x: functional.leaky_relu(x, 0.3)),
    (Silu(), functional.silu),
    (Hardswish(), functional.hardswish),
    (Gelu(), functional.gelu),
    (Gelu(approximate=True), lambda x: functional.gelu(x, approximate="tanh")),
]


@pytest.mark.parametrize(("layer", "exact"), CURVES, ids=[str(layer) for layer, _ in CURVES])
def test_curves_are_accurate_everywhere(layer: Layer, exact: Callable[[torch.Tensor], torch.Tensor]) -> None:
    points = np.linspace(-12, 12, 4001, dtype=np.float32)
    network = Architecture((1,), (layer, Linear(1, 2)))
    # Two logits, 0 and what the curve gives: their loss tells the curve.
    weights = np.array([[0, 1, 0, 0]], np.float32)
    samples = Samples(points[:, None], np.ones(len(points), np.int32))
    losses = NativeEngine(network).sample_losses(weights[0], samples, np.arange(len(points), dtype=np.int32))
    bent = exact(torch.from_numpy(points).double())
    expected = functional.softplus(-bent, threshold=100).numpy()
    assert np.abs(losses - expected).max() < 2e-6


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_no_number_spoils_its_own_model_alone(bad: float) -> None:
    network = register.model.get("har-cnn")((3, 32), 4)
    engine, samples, weights = NativeEngine(network, 2), samples_for(network, 30), moved(network, 3)
    batches = np.random.default_rng(3).integers(0, 30, (3, 2, 7)).astype(np.int32)
    clean = engine.train(weights, samples, batches, Sgd(0.05))
    weights[1, ::7] = bad
    found = engine.train(weights, samples, batches, Sgd(0.05))
    assert np.array_equal(found[[0, 2]], clean[[0, 2]])
    assert not np.isfinite(found[1]).all()
    assert not engine.losses(weights, samples, np.arange(30, dtype=np.int32))[1] < 1e9
    # And whoever comes next finds nothing of it in the memory that it worked in.
    assert np.array_equal(engine.train(weights[:1], samples, batches[:1], Sgd(0.05)), clean[:1])


def dropped(network: Architecture, batch: int, seed: int, steps: int = 1, rate: float = 1.0) -> Floats:
    """What SGD makes of weights that are zero, on samples of ones."""
    engine = NativeEngine(network, 1)
    samples = Samples(np.ones((batch, *network.shape), np.float32), np.zeros(batch, np.int32))
    weights = np.zeros((1, engine.size), np.float32)
    batches = np.tile(np.arange(batch, dtype=np.int32), (1, steps, 1))
    trained = engine.train(weights, samples, batches, Sgd(rate), np.array([seed], np.uint64))
    return np.asarray(trained[0])


def test_a_dropout_leaves_out_its_share_and_the_rest_makes_up_for_it() -> None:
    network = Architecture((4000,), (Dropout(0.25), Linear(4000, 2, bias=False)))
    change = dropped(network, 1, 5)[:4000] / 0.5  # the gradient is half of what the layer is given
    assert set(np.unique(change)) == {np.float32(0), np.float32(1 / 0.75)}
    assert np.mean(change == 0) == pytest.approx(0.25, abs=0.03)


def test_what_is_dropped_follows_seed_step_and_place_and_nothing_else() -> None:
    network = Architecture((300,), (Dropout(0.5), Linear(300, 2, bias=False)))
    first = dropped(network, 1, 5)
    assert np.array_equal(first, dropped(network, 1, 5))
    assert not np.array_equal(first, dropped(network, 1, 6))
    two_steps, two_samples = dropped(network, 1, 5, 2, 1e-4), dropped(network, 2, 5)
    assert len(np.unique(two_steps[:300])) > 2  # another choice in the second step
    assert len(np.unique(two_samples[:300])) == 3  # dropped by both, one or none: each sample for itself
    layers = (Dropout(0.5), Dropout(0.5), Linear(300, 2, bias=False))
    assert np.mean(dropped(Architecture((300,), layers), 1, 5)[:300] == 0) == pytest.approx(0.75, abs=0.1)


def test_channels_in_the_lanes_drop_what_samples_in_the_lanes_drop() -> None:
    def net(*before: Layer) -> Architecture:
        return Architecture((16, 3, 3), (*before, Dropout(0.5), Flatten(), Linear(144, 2, bias=False)))

    alone = dropped(net(), 2, 3)
    identity = np.eye(16, dtype=np.float32).reshape(-1)  # a convolution that changes nothing, and makes the plan wide
    wide = net(Conv2d(16, 16, (1, 1), bias=False))
    engine = NativeEngine(wide, 1)
    samples = Samples(np.ones((2, 16, 3, 3), np.float32), np.zeros(2, np.int32))
    weights = np.concatenate([identity, np.zeros(288, np.float32)])[None]
    batches = np.arange(2, dtype=np.int32).reshape(1, 1, 2)
    # The dropout is another layer of its network there, which is part of what it draws by: only shares can be the same.
    change = engine.train(weights, samples, batches, Sgd(1.0), np.array([3], np.uint64))[0, 256:]
    assert np.mean(change == 0) == pytest.approx(np.mean(alone == 0), abs=0.1)
    assert set(np.unique(np.abs(change))) == set(np.unique(np.abs(alone)))


def test_scoring_and_gradients_drop_nothing() -> None:
    network = Architecture((20,), (Linear(20, 30), Relu(), Dropout(0.9), Linear(30, 3)))
    plain = Architecture((20,), (Linear(20, 30), Relu(), Linear(30, 3)))
    samples, weights = samples_for(plain, 30), moved(plain, 1)
    indices = np.arange(30, dtype=np.int32)
    one, other = NativeEngine(network), NativeEngine(plain)
    assert np.array_equal(one.losses(weights, samples, indices), other.losses(weights, samples, indices))
    assert np.array_equal(one.gradients(weights, samples, indices), other.gradients(weights, samples, indices))


def test_wrong_seeds_are_an_error_with_a_reason() -> None:
    network = Architecture((20,), (Dropout(0.5), Linear(20, 3)))
    samples = samples_for(network, 5)
    with pytest.raises(ValueError, match=r"seeds have shape \(3,\); give one number for each of 1 workers"):
        NativeEngine(network).train(
            moved(network, 1), samples, np.zeros((1, 1, 2), np.int32), Sgd(0.1), np.zeros(3, np.uint64)
        )


def test_a_tensor_that_a_padded_convolution_and_a_dense_layer_read_is_whole_for_both() -> None:
    net = Draft((2, 6, 5))
    first = net.add(Conv2d(2, 3, (3, 3), (1, 1)))
    padded, bare = net.add(Conv2d(3, 2, (5, 5), (2, 2)), first), net.add(Conv2d(3, 2, (2, 2)), first)
    rows = [net.add(Flatten(), each) for each in (first, padded, bare)]
    heads = [net.add(Linear(net.shape_of(row)[0], 7), row) for row in rows]
    joined = net.add(Add(), *heads)
    bent = net.add(LayerNorm((7,)), joined)
    net.add(Linear(7, 4), net.add(Add(), bent, joined))
    check_against_torch(net.architecture(), 19)


def test_ties_in_a_pooling_with_a_border_are_won_by_the_first_and_never_by_the_border() -> None:
    network = Architecture(
        (1, 3, 3), (Conv2d(1, 1, (1, 1)), MaxPool2d((3, 3), (2, 2), (1, 1)), Flatten(), Linear(4, 2))
    )
    weights = np.array([[-1, -5, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0]], np.float32)  # all values are below zero
    samples = Samples(np.ones((2, 1, 3, 3), np.float32), np.zeros(2, np.int32))
    indices = np.arange(2, dtype=np.int32)
    engine = NativeEngine(network)
    module = reference(network, weights[0])
    loss = reference_loss(module, samples, indices)
    loss.backward()  # type: ignore[no-untyped-call]
    gradient = torch.cat([each.grad.flatten() for each in module.parameters() if each.grad is not None]).numpy()
    assert engine.losses(weights, samples, indices)[0] == pytest.approx(loss.item(), rel=1e-6)
    assert distance(engine.gradients(weights, samples, indices)[0], gradient) < 1e-6


def test_a_thread_takes_the_memory_that_the_engine_says() -> None:
    small = NativeEngine(Architecture((6, 128), (Conv1d(6, 2, (3,)), GroupNorm(1, 2), Flatten(), Linear(252, 6))))
    large = NativeEngine(register.model.get("resnet8")((3, 32, 32), 10))
    assert 4 * small.size < small.workspace < 10**6 < large.workspace < 40 * 10**6
