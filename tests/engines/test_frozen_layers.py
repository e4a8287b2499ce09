"""Frozen layers: what trains moves as in torch, and what does not stays as it is, on every engine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from cbdsl.arrays import Floats, Indices, Samples
from cbdsl.engines.choose import choose_engine
from cbdsl.engines.engine import Engine, Sgd
from cbdsl.engines.loss import Loss
from cbdsl.engines.native_engine import NativeEngine
from cbdsl.engines.torch_engine import StackedTorchEngine, TorchEngine
from cbdsl.models.architecture import Architecture, from_module
from cbdsl.models.frozen_weights import FrozenWeights
from cbdsl.models.to_torch import freeze, frozen_of, module_of, to_flat, trained_parameters
from support.networks import ENGINES, SMALL, architectures, distance, graphs, needs_native, samples_for

BENT = Sgd(0.02, momentum=0.9, weight_decay=0.05, proximal=0.3)
WIDE = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3), nn.ReLU(),
    nn.Flatten(), nn.Linear(64, 4),
)  # fmt: skip


def engine_for(name: str, module: nn.Module, shape: tuple[int, ...]) -> Engine:
    if name == "native":
        return NativeEngine(from_module(module, shape), 2, frozen=frozen_of(module))
    return TorchEngine(module, 2)


def batches(workers: int, steps: int = 6, batch: int = 7) -> Indices:
    return np.random.default_rng(1).integers(0, 60, (workers, steps, batch)).astype(np.int32)


def frozen_by(architecture: Architecture, trains: Callable[[int], bool]) -> nn.Module:
    """A module of which parameter n trains if `trains(n)`; the last one always does."""
    torch.manual_seed(0)
    module = module_of(architecture)
    parameters = list(module.parameters())
    for number, parameter in enumerate(parameters[:-1]):
        parameter.requires_grad_(trains(number))
    return module


def expected_training(module: nn.Module, samples: Samples, rows: Indices, sgd: Sgd, correction: Floats) -> Floats:
    """One model of which what trains is trained by torch's SGD in double precision, (D,)."""
    frozen = frozen_of(module)
    twin = module_of(from_module(module, samples.features.shape[1:]))
    twin = (freeze(twin, frozen) if frozen else twin).double()
    twin.load_state_dict(dict(zip(twin.state_dict(), module.state_dict().values(), strict=True)))
    trained = list(trained_parameters(twin).values())
    start = nn.utils.parameters_to_vector(trained).detach().clone()
    optimizer = torch.optim.SGD(trained, sgd.learning_rate, momentum=sgd.momentum, weight_decay=sgd.weight_decay)
    features, labels = torch.from_numpy(samples.features).double(), torch.from_numpy(samples.labels).long()
    for row in rows:
        optimizer.zero_grad()
        own = nn.utils.parameters_to_vector(trained)
        loss = nn.functional.cross_entropy(twin(features[row]), labels[row])
        bend = sgd.proximal / 2 * ((own - start) ** 2).sum() + (own * torch.from_numpy(correction)).sum()
        (loss + bend).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    result: Floats = nn.utils.parameters_to_vector(trained).detach().numpy()
    return result


@pytest.mark.parametrize("name", ENGINES)
@given(architecture=st.one_of(architectures(), graphs()), pattern=st.integers(0, 2**12 - 1), bent=st.booleans())
def test_what_trains_is_trained_as_by_torch(name: str, architecture: Architecture, pattern: int, bent: bool) -> None:
    module = frozen_by(architecture, lambda number: bool(pattern >> number % 12 & 1))
    samples, sgd = samples_for(architecture, 60), BENT if bent else Sgd(0.02)
    start = np.concatenate([each.detach().numpy().ravel() for each in trained_parameters(module).values()])
    engine = engine_for(name, module, architecture.shape)
    assert engine.size == len(start)
    weights = np.stack([start, start])
    corrections = np.full_like(weights, 0.05 if bent else 0.0)
    found = engine.train(weights, samples, batches(2), sgd, corrections=corrections if bent else None)
    for worker in range(2):
        wanted = expected_training(module, samples, batches(2)[worker], sgd, corrections[worker].astype(np.float64))
        assert distance(found[worker], wanted) < 1e-4
    assert np.array_equal(weights[0], start)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("wide", [False, True], ids=["lanes of samples", "lanes of channels"])
def test_scores_and_gradients_are_those_of_the_whole_network(name: str, wide: bool) -> None:
    architecture = from_module(WIDE, (1, 8, 8)) if wide else SMALL
    module = frozen_by(architecture, lambda number: number > 1)
    samples, everything = samples_for(architecture, 60), np.arange(60, dtype=np.int32)
    engine, plain = engine_for(name, module, architecture.shape), engine_for(name, module_of(architecture), (1, 8, 8))
    frozen, whole = frozen_of(module), to_flat(module)
    assert frozen is not None
    rows = np.stack([whole[frozen.trains], 2 * whole[frozen.trains], -whole[frozen.trains]])
    filled = np.stack([frozen.fill(row) for row in rows])
    for indices in (everything, np.stack([everything[:20], everything[20:40], everything[40:]])):
        assert np.array_equal(engine.losses(rows, samples, indices), plain.losses(filled, samples, indices))
        assert np.array_equal(engine.accuracies(rows, samples, indices), plain.accuracies(filled, samples, indices))
        gradients = plain.gradients(filled, samples, indices)[:, frozen.trains]
        np.testing.assert_allclose(engine.gradients(rows, samples, indices), gradients, rtol=1e-5, atol=1e-7)
    found = engine.sample_losses(rows[1], samples, everything)
    assert np.array_equal(found, plain.sample_losses(filled[1], samples, everything))
    trained = engine.train(rows, samples, batches(3), Sgd(0.05))
    assert not np.allclose(trained, rows, atol=1e-4)
    assert np.isfinite(trained).all()


@needs_native
@pytest.mark.parametrize("loss", [Loss("mse"), Loss("huber", 0.3), Loss("mse", reconstructs=True)], ids=str)
def test_engines_agree_on_a_frozen_layer_with_a_loss_on_numbers_and_adam(loss: Loss) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 5))
    module[0].requires_grad_(False)
    rng, frozen, whole = np.random.default_rng(2), frozen_of(module), from_module(module, (5,))
    assert frozen is not None
    samples = Samples(*(rng.normal(size=(60, 5)).astype(np.float32) for _ in range(2)))
    native, other = NativeEngine(whole, 2, loss, frozen), TorchEngine(module, 2, loss=loss)
    start = np.stack([to_flat(module)[frozen.trains]] * 2)
    sgd = Sgd(0.01, weight_decay=0.01, optimiser="adam", schedule="cosine", clip=0.5)
    trained = native.train(start, samples, batches(2), sgd)
    assert np.abs(trained - start).max() > 1e-3
    np.testing.assert_allclose(trained, other.train(start, samples, batches(2), sgd), rtol=0, atol=1e-6)
    rows = np.arange(60, dtype=np.int32)
    made = native.outputs(trained[0], samples, rows)
    assert np.array_equal(made, NativeEngine(whole, 2, loss).outputs(frozen.fill(trained[0]), samples, rows))
    np.testing.assert_allclose(made, other.outputs(trained[0], samples, rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ENGINES)
def test_threads_and_company_change_no_bit(name: str) -> None:
    module = frozen_by(SMALL, lambda number: number != 2)
    samples, weights = samples_for(SMALL, 60), np.random.default_rng(0).normal(0, 0.2, (5, 2000)).astype(np.float32)
    engine = engine_for(name, module, SMALL.shape)
    weights = weights[:, : engine.size].copy()
    together = engine.train(weights, samples, batches(5), BENT)
    for worker in range(5):
        alone = engine.train(weights[[worker]], samples, batches(5)[[worker]], BENT)
        assert np.array_equal(alone[0], together[worker])


def test_stacked_training_leaves_frozen_layers_out() -> None:
    module = frozen_by(SMALL, lambda number: number > 1)
    samples = samples_for(SMALL, 60)
    weights = np.random.default_rng(0).normal(0, 0.2, (3, TorchEngine(module).size)).astype(np.float32)
    stacked = StackedTorchEngine(module, torch.device("cpu"))
    found = stacked.train(weights, samples, batches(3), BENT)
    assert stacked.stacks
    assert distance(found, TorchEngine(module).train(weights, samples, batches(3), BENT)) < 1e-5


@needs_native
def test_a_backbone_without_gradients_runs_natively_if_it_is_frozen() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
            self.body.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                features = torch.relu(self.body(x))
            return self.head(features)  # type: ignore[no-any-return]

    engine = choose_engine("auto", Frozen(), (6,), 1)
    assert (engine.engine.name, engine.engine.size, engine.note) == ("native", 27, "")
    trained = Frozen()
    trained.body.requires_grad_(True)
    assert "does more than torch.fx can see" in choose_engine("auto", trained, (6,), 1).note


@needs_native
def test_frozen_weights_of_another_network_are_an_error() -> None:
    with pytest.raises(ValueError, match="give one each"):
        NativeEngine(SMALL, 1, frozen=FrozenWeights(np.zeros(3, np.float32), np.ones(3, np.bool_)))
    with pytest.raises(ValueError, match="leave some to train"):
        NativeEngine(SMALL, 1, frozen=FrozenWeights(np.zeros(SMALL.size, np.float32), np.zeros(SMALL.size, np.bool_)))
