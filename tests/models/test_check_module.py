"""Which modules a swarm can train, and what is said of those that it cannot."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cbdsl import register
from cbdsl.arrays import Samples
from cbdsl.engines.engine import Sgd
from cbdsl.engines.torch_engine import TorchEngine
from cbdsl.models.check_module import check_trainable
from cbdsl.models.to_torch import to_flat
from support.helpers import module_named, shape_for
from support.refusals import refused_as

SAMPLES = Samples(np.random.default_rng(5).uniform(0, 3, (20, 6)).astype(np.float32), np.arange(20, dtype=np.int32) % 3)


class Positions(nn.Module):
    """Adds a table that never changes; a NaN in a place that is not used is no change either."""

    table: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.cat([torch.linspace(0, 1, 6), torch.tensor([torch.nan])]))
        self.register_buffer("mask", torch.ones(6, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.table[:6]) * self.mask


class Average(nn.Module):
    """A running mean of one's own making. On zeros it stays zero."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Counter(nn.Module):
    """Counts its calls, in training or in scoring."""

    calls: Tensor

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.when = training
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training == self.when:
            self.calls += 1
        return x


class FrozenNorm(nn.BatchNorm1d):
    """Statistics that were learned elsewhere and stay as they are."""

    def train(self, mode: bool = True) -> FrozenNorm:  # noqa: ARG002
        return super().train(False)


class Whole(nn.Module):
    """What the advice says: the first step makes whole numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x.long()


class Pair(nn.Module):
    """Another output in training than in scoring."""

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return (x, x) if self.training else x


class Computed(nn.Module):
    """Holds a tensor that was computed from a parameter, so it cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 6))
        self.doubled = 2 * self.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.doubled.T


def ended(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Linear(6, 3))


@pytest.mark.parametrize(
    "module",
    [
        ended(),
        ended(Positions()),
        ended(nn.Dropout(0.5), nn.LayerNorm(6)),
        ended(nn.BatchNorm1d(6, track_running_stats=False)),
        ended(FrozenNorm(6)),
        ended().double(),
        nn.Sequential(Whole(), nn.Embedding(10, 4), nn.Flatten(), nn.Linear(24, 3)),
        nn.Linear(6, 5),  # more outputs than classes harm nobody
    ],
)
def test_a_module_that_can_be_trained_is_accepted_and_trains(module: nn.Module) -> None:
    check_trainable(module, (6,), 3)
    engine, weights = TorchEngine(module), to_flat(module)[None]
    trained = engine.train(weights, SAMPLES, np.array([[[0, 1, 2], [3, 4, 5]]], np.int32), Sgd(0.1))
    assert np.isfinite(trained).all()
    assert not np.array_equal(trained, weights)


@pytest.mark.parametrize("name", register.model.names())
def test_the_models_of_the_package_are_accepted(name: str) -> None:
    shape = shape_for(name)
    check_trainable(module_named(name, shape, 10), shape, 10)


def test_a_constant_table_is_part_of_the_model_on_every_thread() -> None:
    weights = np.stack([to_flat(ended()) for _ in range(4)])
    batches = np.arange(16, dtype=np.int32).reshape(4, 2, 2)
    moved = Samples(SAMPLES.features + np.linspace(0, 1, 6, dtype=np.float32), SAMPLES.labels)
    found = TorchEngine(ended(Positions()), threads=2).train(weights, SAMPLES, batches, Sgd(0.1))
    expected = TorchEngine(ended()).train(weights, moved, batches, Sgd(0.1))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("module", "refusal"),
    [
        (nn.Flatten(), ("invalid-part", "parameters")),
        (ended(nn.BatchNorm1d(6)), ("not-supported", "0.running_mean", "nn.BatchNorm1d(6)", "nn.GroupNorm(2, 6)")),
        (
            ended(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()),
            ("not-supported", "running_mean"),
        ),
        (ended(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))), ("not-supported", "parametrizations")),
        (ended(Counter(training=True)), ("not-supported", "0.calls")),
        (ended(Counter(training=False)), ("not-supported", "0.calls")),
        (nn.Linear(6, 2), ("wrong-shape", "2 outputs", "3 classes")),
        (nn.Sequential(nn.Linear(6, 3), nn.Flatten(0)), ("wrong-shape", "(6,)", "3 classes")),
        (nn.Sequential(nn.Linear(6, 3), nn.Unflatten(1, (1, 3))), ("wrong-shape", "(2, 1, 3)", "(2, 3)")),
        (nn.Sequential(nn.Linear(6, 3), Pair()), ("wrong-type", "tuple", "(N, 3)")),
        (nn.Sequential(nn.Linear(6, 3), Whole()), ("wrong-type", "torch.int64", "float32")),
        (nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(24, 3)), ("wrong-type", "float32", "x.long()")),
        (nn.Linear(5, 3), ("wrong-shape", "training", "(6,)", "mat1")),
        (Computed(), ("invalid-part", "parameters, buffers")),
    ],
)
def test_a_module_that_cannot_be_trained_is_refused_with_advice(module: nn.Module, refusal: tuple[str, ...]) -> None:
    with refused_as(*refusal) as caught:
        check_trainable(module, (6,), 3)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("threads", [1, 2])
def test_state_that_zeros_do_not_show_is_found_in_training(threads: int) -> None:
    module = ended(Average())
    check_trainable(module, (6,), 3)
    weights = np.stack([to_flat(module)] * 2)
    with refused_as("not-supported", "0.mean"):
        TorchEngine(module, threads).train(weights, SAMPLES, np.zeros((2, 1, 3), np.int32), Sgd(0.1))


def test_neither_the_module_nor_the_callers_random_numbers_change() -> None:
    module = ended(nn.Dropout(0.5), Counter(training=True), nn.BatchNorm1d(6, track_running_stats=False)).eval()
    module[0].train()  # type: ignore[index]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    flags = [part.training for part in module.modules()]
    good, state = ended(nn.Dropout(0.5)), torch.get_rng_state()
    check_trainable(good, (6,), 3)
    with refused_as("not-supported"):
        check_trainable(module, (6,), 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert [part.training for part in module.modules()] == flags
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_reconstruction_in_the_shape_of_a_sample_is_one_layer_away() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, 6), nn.Unflatten(1, (2, 3)))
    with refused_as("wrong-shape", "(2, 2, 3)", "End with nn.Flatten().") as caught:
        check_trainable(module, (2, 3), 6, "reconstruction")
    assert "nn.Linear" not in str(caught.value)
