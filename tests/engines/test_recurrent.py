"""GRU and LSTM natively: torch's losses, gradients and steps, the same bits in any company, and all that reads them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cbdsl.arrays import PADDING
from cbdsl.engines.choose import choose_engine
from cbdsl.engines.engine import Sgd
from cbdsl.engines.native_engine import NativeEngine
from cbdsl.models.architecture import Architecture, from_module
from cbdsl.models.frozen_weights import FrozenWeights
from cbdsl.models.layers import Gru, Layer, Linear, Lstm, Transpose
from support.layer_kinds import NETWORKS, moved
from support.networks import (
    distance,
    engine_of,
    needs_native,
    reference,
    reference_loss,
    reference_training,
    samples_for,
)

pytestmark = needs_native
SERIES = (3, 20)  # channels, steps


def stacked(kind: type[Gru | Lstm], *sizes: int, bias: bool = True) -> Architecture:
    """Recurrent layers on a series whose channels come first, and a dense one on the last state."""
    layers: list[Layer] = [Transpose()]
    for inputs, hidden in zip((SERIES[0], *sizes), sizes, strict=False):
        layers.append(kind(inputs, hidden, bias, last=False))
    layers[-1] = replace(layers[-1], last=True)  # type: ignore[call-arg]
    return Architecture(SERIES, (*layers, Linear(sizes[-1], 4)))


RECURRENT = {
    **{name: network for name, network in NETWORKS.items() if name.endswith(("Gru", "Lstm", "Transpose"))},
    "gru": stacked(Gru, 24), "grus": stacked(Gru, 7, 33, bias=False), "lstm": stacked(Lstm, 24),
    "lstms": stacked(Lstm, 18, 5),
}  # fmt: skip


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("count", [1, 16, 37])
def test_losses_of_both_engines_agree_to_a_millionth_and_gradients_are_those_of_torch(name: str, count: int) -> None:
    network = RECURRENT[name]
    samples, weights = samples_for(network, 60), moved(network, 2)
    indices = np.random.default_rng(2).integers(0, 60, count).astype(np.int32)
    native, torchs = (engine_of(engine, network) for engine in ("native", "torch"))
    losses = native.losses(weights, samples, indices)
    np.testing.assert_allclose(losses, torchs.losses(weights, samples, indices), rtol=1e-6)
    gradients = native.gradients(weights, samples, indices)
    for worker in range(2):
        module = reference(network, weights[worker])
        reference_loss(module, samples, indices).backward()  # type: ignore[no-untyped-call]
        exact = torch.cat([each.grad.flatten() for each in module.parameters() if each.grad is not None]).numpy()
        assert distance(gradients[worker], exact) < 1e-5


@pytest.mark.parametrize("name", ["gru", "grus", "lstm", "lstms"])
@pytest.mark.parametrize("sgd", [Sgd(0.05), Sgd(0.02, 0.9, 0.01, 0.1), Sgd(5e-4, optimiser="adam", clip=1.0)], ids=str)
def test_fifty_steps_are_those_of_torch(name: str, sgd: Sgd) -> None:
    network = RECURRENT[name]
    samples, weights = samples_for(network, 60), moved(network, 2)
    batches = np.random.default_rng(1).integers(0, 60, (2, 50, 21)).astype(np.int32)
    batches[:, 3, 1:], batches[0, 9] = PADDING, PADDING
    trained = NativeEngine(network, 2).train(weights, samples, batches, sgd)
    for worker in range(2):
        exact = reference_training(network, weights[worker], samples, batches[worker], sgd)
        assert distance(trained[worker], exact) < 2e-5


@pytest.mark.parametrize("name", RECURRENT)
def test_threads_company_and_order_never_change_a_bit(name: str) -> None:
    network = RECURRENT[name]
    samples, weights = samples_for(network, 40), moved(network, 4)
    batches = np.random.default_rng(3).integers(0, 40, (4, 3, 19)).astype(np.int32)
    order, everything = np.array([3, 1, 0, 2]), np.arange(40, dtype=np.int32)
    alone = NativeEngine(network, 1)
    expected, losses = alone.train(weights, samples, batches, Sgd(0.05)), alone.losses(weights, samples, everything)
    engine = NativeEngine(network, 3)
    assert np.array_equal(engine.train(weights[order], samples, batches[order], Sgd(0.05)), expected[order])
    assert np.array_equal(engine.losses(weights[order], samples, everything), losses[order])
    single = [engine.sample_losses(weights[0], samples, everything[at : at + 1]) for at in range(40)]
    assert np.array_equal(np.concatenate(single), alone.sample_losses(weights[0], samples, everything))


@pytest.mark.parametrize("name", ["gru", "lstm"])
@pytest.mark.parametrize("tensor", range(1, 7))
def test_any_one_tensor_may_train_alone(name: str, tensor: int) -> None:
    network = RECURRENT[name]
    samples, weights = samples_for(network, 30), moved(network, 2)
    sizes = [int(np.prod(shape)) for shape in network.tensors().values()]
    trains = np.repeat(np.arange(1, 1 + len(sizes)) == tensor, sizes)
    engine = NativeEngine(network, 2, frozen=FrozenWeights(weights[0], trains))
    everything = np.arange(30, dtype=np.int32)
    full = NativeEngine(network, 2).gradients(weights[:1], samples, everything)[0]
    found = engine.gradients(weights[:1, trains], samples, everything)[0]
    assert np.array_equal(found, full[trains])
    assert found.any()


@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_a_weight_that_is_nan_is_seen_and_spoils_no_other_model(name: str) -> None:
    network = RECURRENT[name]
    samples, weights = samples_for(network, 20), moved(network, 3)
    batches = np.random.default_rng(3).integers(0, 20, (3, 2, 7)).astype(np.int32)
    clean = NativeEngine(network).train(weights, samples, batches, Sgd(0.05))
    weights[1, 5] = np.nan
    engine, everything = NativeEngine(network), np.arange(20, dtype=np.int32)
    found = engine.train(weights, samples, batches, Sgd(0.05))
    assert np.array_equal(found[[0, 2]], clean[[0, 2]])
    assert np.isnan(found[1]).any()
    assert np.isnan(engine.losses(weights, samples, everything)).tolist() == [False, True, False]


class Tagger(nn.Module):
    """A module as a user writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(SERIES[0], 16, 2, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.gru(x.transpose(1, 2))
        logits: Tensor = self.head(self.drop(out[:, -1]))
        return logits


class Both(Tagger):
    """One that needs all states and the last one, which is not native."""

    def forward(self, x: Tensor) -> Tensor:
        out, h = self.gru(x.transpose(1, 2))
        logits: Tensor = self.head(out.mean(1) + h[-1])
        return logits


def test_a_users_module_runs_natively_and_what_does_not_runs_on_torch_with_the_reason() -> None:
    choice = choose_engine("auto", Tagger(), SERIES, 2)
    assert (choice.engine.name, choice.note) == ("native", "")
    samples = samples_for(from_module(Tagger(), SERIES), 10)
    weights = nn.utils.parameters_to_vector(Tagger().parameters()).detach().numpy()[None]
    batches = np.arange(10, dtype=np.int32)[None, None]
    assert choice.engine.train(weights, samples, batches, Sgd(0.1)).shape == weights.shape
    fallback = choose_engine("auto", Both(), SERIES, 2)
    assert fallback.engine.name == "torch"
    assert "its last state are used; use only one of them" in fallback.note
    assert fallback.engine.train(weights, samples, batches, Sgd(0.1)).shape == weights.shape
