from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from cbdsl.arrays import PADDING, Samples, Seeds
from cbdsl.engines.engine import Engine, Sgd
from cbdsl.engines.torch_engine import CPU, StackedTorchEngine, TorchEngine
from cbdsl.models.to_torch import load_flat, to_flat
from support.helpers import module_named

RNG = np.random.default_rng(5)
KINDS: list[Callable[[nn.Module], Engine]] = [TorchEngine, lambda module: StackedTorchEngine(module, CPU)]
IMAGES = Samples(RNG.normal(size=(80, 1, 16, 16)).astype(np.float32), RNG.integers(0, 4, 80).astype(np.int32))


def network() -> nn.Module:
    return module_named("cnn", (1, 16, 16), 4)


def stack(workers: int) -> np.ndarray:
    torch.manual_seed(0)
    return np.stack([to_flat(network()) for _ in range(workers)])


def batches(workers: int, steps: int = 3, size: int = 5) -> np.ndarray:
    chosen = np.random.default_rng(1).integers(0, 80, (workers, steps, size)).astype(np.int32)
    chosen[:, -1, -2:] = PADDING  # a short last batch
    chosen[0, 0] = PADDING  # no step at all
    return chosen


def test_losses_accuracies_and_gradients_are_those_of_the_module() -> None:
    weights, engine = stack(2), TorchEngine(network())
    shared = np.arange(60, dtype=np.int32)
    module = network()
    load_flat(module, weights[1])
    module = copy.deepcopy(module).double()
    logits = module(torch.from_numpy(IMAGES.features[:60]).double())
    labels = torch.from_numpy(IMAGES.labels[:60]).long()
    loss = nn.functional.cross_entropy(logits, labels)
    loss.backward()  # type: ignore[no-untyped-call]
    assert engine.losses(weights, IMAGES, shared)[1] == pytest.approx(loss.item(), rel=1e-6)
    assert engine.accuracies(weights, IMAGES, shared)[1] == (logits.argmax(1) == labels).double().mean().item()
    gradient = np.concatenate([p.grad.reshape(-1).numpy() for p in module.parameters() if p.grad is not None])
    np.testing.assert_allclose(engine.gradients(weights, IMAGES, shared)[1], gradient, rtol=1e-4, atol=1e-6)


def test_each_worker_may_have_samples_of_its_own() -> None:
    weights, engine = stack(2), TorchEngine(network())
    own = np.array([[1, 2, 3], [7, PADDING, PADDING]], dtype=np.int32)
    losses = engine.losses(weights, IMAGES, own)
    assert losses[0] == engine.losses(weights[:1], IMAGES, own[0])[0]
    assert losses[1] == engine.losses(weights[1:], IMAGES, own[1, :1])[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_ceiling_stops_early_and_changes_no_minimum(kind: Callable[[nn.Module], Engine]) -> None:
    weights, engine = stack(4), kind(network())
    many = np.tile(np.arange(80, dtype=np.int32), 10)  # more than one chunk
    exact = engine.losses(weights, IMAGES, many)
    ceilings = exact * np.array([0.2, 0.999, 1.0, 2.0])
    capped = engine.losses(weights, IMAGES, many, ceilings)
    np.testing.assert_array_equal(np.minimum(capped, ceilings), np.minimum(exact, ceilings))
    np.testing.assert_array_equal(capped[2:], exact[2:])
    assert capped[0] == np.inf


@pytest.mark.parametrize("kind", KINDS)
def test_nan_weights_score_nan_even_with_a_ceiling(kind: Callable[[nn.Module], Engine]) -> None:
    weights = stack(1)
    weights[0, 0] = np.nan
    engine, some = kind(network()), np.arange(10, dtype=np.int32)
    assert np.isnan(engine.losses(weights, IMAGES, some, np.array([0.1]))[0])
    assert engine.accuracies(weights, IMAGES, some)[0] == 0


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_numbers_do_not_depend_on_threads_or_on_the_order_of_workers(threads: int) -> None:
    weights, chosen, shared = stack(5), batches(5), np.arange(80, dtype=np.int32)
    alone, other = TorchEngine(network(), 1), TorchEngine(network(), threads)
    order = np.array([3, 0, 4, 2, 1])
    sgd = Sgd(0.05, 0.9)
    np.testing.assert_array_equal(
        alone.train(weights, IMAGES, chosen, sgd)[order], other.train(weights[order], IMAGES, chosen[order], sgd)
    )
    np.testing.assert_array_equal(
        alone.losses(weights, IMAGES, shared)[order], other.losses(weights[order], IMAGES, shared)
    )
    np.testing.assert_array_equal(
        alone.gradients(weights, IMAGES, shared)[order], other.gradients(weights[order], IMAGES, shared)
    )


def test_dropout_draws_from_the_seeds_given_and_not_when_scoring() -> None:
    def dropping() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(256, 4))

    weights = np.zeros((3, 1028), dtype=np.float32)
    chosen = np.tile(batches(1, steps=2)[:, 1:], (3, 1, 1))
    seeds = np.array([1, 1, 2], dtype=np.uint64)
    engine = TorchEngine(dropping(), threads=2)
    first, same, different = engine.train(weights, IMAGES, chosen, Sgd(0.1), seeds)
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, different)
    every = np.arange(80, dtype=np.int32)
    np.testing.assert_array_equal(engine.losses(weights, IMAGES, every), engine.losses(weights, IMAGES, every))


class FunctionalDropout(nn.Module):
    """Draws random numbers, and none of its layers shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(256, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped = nn.functional.dropout(x.flatten(1), 0.5, training=self.training)
        return self.last(dropped)  # type: ignore[no-any-return]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_function_that_draws_does_so_from_the_seeds_as_a_layer_does(threads: int) -> None:
    weights, chosen, seeds = np.zeros((4, 1028), np.float32), batches(4), np.arange(4, dtype=np.uint64)
    layers = TorchEngine(nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(256, 4)))
    engine = TorchEngine(FunctionalDropout(), threads)
    for _ in range(2):
        expected = layers.train(weights, IMAGES, chosen, Sgd(0.1), seeds)
        np.testing.assert_array_equal(engine.train(weights, IMAGES, chosen, Sgd(0.1), seeds), expected)


@pytest.mark.parametrize("seeds", [np.array([1, 2], dtype=np.uint64), None])
@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.RReLU()])
def test_the_callers_random_numbers_do_not_change(seeds: Seeds | None, layer: nn.Module) -> None:
    engine = TorchEngine(nn.Sequential(nn.Flatten(), layer, nn.Linear(256, 4)))
    torch.manual_seed(99)
    before = torch.get_rng_state()
    engine.train(np.zeros((2, 1028), dtype=np.float32), IMAGES, batches(2), Sgd(0.1), seeds)
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_draws_what_torch_draws_after_the_seed_is_set() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(256, 4))
    weights, chosen, seed = to_flat(module)[None], batches(1, steps=2)[:, 1:], 2**63 + 5
    trained = TorchEngine(module).train(weights, IMAGES, chosen, Sgd(0.1), np.array([seed], dtype=np.uint64))
    own = chosen[0, 0][chosen[0, 0] != PADDING]
    torch.manual_seed(seed % 2**63)
    loss = nn.functional.cross_entropy(
        module(torch.from_numpy(IMAGES.features[own])), torch.from_numpy(IMAGES.labels[own]).long()
    )
    loss.backward()  # type: ignore[no-untyped-call]
    gradient = np.concatenate([one.grad.reshape(-1).numpy() for one in module.parameters() if one.grad is not None])
    np.testing.assert_allclose(trained[0], weights[0] - np.float32(0.1) * gradient, rtol=1e-5, atol=1e-6)


def test_the_callers_torch_settings_are_put_back() -> None:
    torch.set_num_threads(2)
    TorchEngine(network()).losses(stack(1), IMAGES, np.arange(4, dtype=np.int32))
    assert torch.get_num_threads() == 2
    assert torch.backends.mkldnn.enabled
