"""Local optimisers: SGD, Adam and AdamW with schedules and clipped gradients, as torch has them, on every engine."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from cbdsl.arrays import PADDING, Floats, Indices
from cbdsl.engines.engine import Sgd
from cbdsl.engines.numpy_steps import OptimiserState
from cbdsl.engines.torch_engine import StackedTorchEngine
from cbdsl.models.architecture import Architecture
from cbdsl.models.zoo import cnn
from cbdsl.spec import LocalSpec, Optimiser, Schedule
from support.networks import (
    ENGINES,
    SMALL,
    architectures,
    distance,
    engine_of,
    initial,
    module_of,
    needs_native,
    rates_of,
    reference_training,
    samples_for,
)

OPTIMISERS: tuple[Optimiser, ...] = get_args(Optimiser)
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
KINDS = [
    Sgd(0.01, clip=0.3),
    Sgd(0.01, momentum=0.9, weight_decay=0.01, clip=0.5),
    Sgd(0.01, momentum=0.9, schedule="cosine"),
    Sgd(0.01, schedule="warmup"),
    Sgd(5e-4, optimiser="adam"),
    Sgd(5e-4, weight_decay=0.05, optimiser="adam", schedule="decay"),
    Sgd(5e-4, weight_decay=0.05, optimiser="adamw", schedule="cosine", clip=1.0),
    Sgd(5e-4, proximal=0.5, optimiser="adamw", schedule="warmup"),
]


def batches(workers: int, steps: int, batch: int, samples: int = 60) -> Indices:
    """Batches of every length; some are empty, others in every row."""
    rng = np.random.default_rng(1)
    rows = rng.integers(0, samples, (workers, steps, batch)).astype(np.int32)
    lengths = rng.integers(1, batch + 1, (workers, steps, 1))
    lengths[rng.random((workers, steps, 1)) < 0.2] = 0
    return np.where(np.arange(batch) < lengths, rows, np.int32(PADDING))


@pytest.mark.parametrize("name", ENGINES)
@given(
    architecture=architectures(),
    batch=st.integers(1, 30),
    sgd=st.builds(
        Sgd,
        learning_rate=st.just(0.005),
        momentum=st.just(0.9),
        weight_decay=st.sampled_from([0.0, 0.1]),
        proximal=st.sampled_from([0.0, 0.3]),
        optimiser=st.sampled_from(OPTIMISERS),
        schedule=st.sampled_from(SCHEDULES),
        clip=st.sampled_from([0.0, 0.2, 100.0]),
    ),
    bent=st.booleans(),
)
def test_steps_are_those_of_torch_in_double_precision(
    name: str, architecture: Architecture, batch: int, sgd: Sgd, bent: bool
) -> None:
    samples, weights = samples_for(architecture, 60), initial(architecture, 2)
    rng = np.random.default_rng(3)
    # Where a gradient is nothing but rounding, Adam makes a whole step of it; a constant one hides that.
    corrections = rng.choice([-0.1, 0.1], weights.shape).astype(np.float32) if bent or sgd.optimiser != "sgd" else None
    rows = batches(2, 12, batch)
    trained = engine_of(name, architecture).train(weights, samples, rows, sgd, corrections=corrections)
    for worker in range(2):
        own = None if corrections is None else corrections[worker]
        expected = reference_training(architecture, weights[worker], samples, rows[worker], sgd, own)
        assert distance(trained[worker], expected) < 1e-4


@needs_native
@pytest.mark.parametrize("sgd", KINDS, ids=str)
def test_both_engines_agree_to_a_millionth_after_many_steps(sgd: Sgd) -> None:
    network = cnn((1, 28, 28), 10)
    samples, weights = samples_for(network, 200), initial(network, 2)
    rows = np.random.default_rng(2).integers(0, 200, (2, 30, 10)).astype(np.int32)
    rows[0, 7], rows[1, 11, 4:] = PADDING, PADDING
    native, torchs = (engine_of(name, network).train(weights, samples, rows, sgd) for name in ("native", "torch"))
    for worker in range(2):
        assert distance(native[worker], torchs[worker]) < 1e-6
    everything = np.arange(200, dtype=np.int32)
    losses = [engine_of(name, network).losses(native, samples, everything) for name in ("native", "torch")]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    both = [engine_of("native", network).losses(rows, samples, everything) for rows in (native, torchs)]
    np.testing.assert_allclose(both[0], both[1], rtol=1e-6)


@needs_native
@pytest.mark.parametrize("rate", [5e-4, 3e-3])
def test_both_engines_are_as_far_from_adam_in_double_precision(rate: float) -> None:
    network = cnn((1, 28, 28), 10)
    samples, weights = samples_for(network, 200), initial(network, 1)
    rows, sgd = np.random.default_rng(2).integers(0, 200, (1, 15, 10)).astype(np.int32), Sgd(rate, optimiser="adam")
    exact = reference_training(network, weights[0], samples, rows[0], sgd)
    native, torchs = (
        distance(engine_of(name, network).train(weights, samples, rows, sgd)[0], exact) for name in ("native", "torch")
    )
    assert native < 2 * torchs
    assert native < 2e-3 * rate


@pytest.mark.parametrize("sgd", KINDS, ids=str)
def test_models_that_train_together_train_as_alone(sgd: Sgd) -> None:
    samples, weights, rows = samples_for(SMALL, 60), initial(SMALL, 5), batches(5, 9, 6)
    together = StackedTorchEngine(module_of(SMALL), torch.device("cpu"))
    found = together.train(weights, samples, rows, sgd)
    assert together.stacks
    expected = engine_of("torch", SMALL).train(weights, samples, rows, sgd)
    for worker in range(5):
        assert distance(found[worker], expected[worker]) < 1e-5


@pytest.mark.parametrize("sgd", KINDS, ids=str)
def test_steps_in_numpy_are_those_of_the_engine(sgd: Sgd) -> None:
    samples, weights, rows = samples_for(SMALL, 60), initial(SMALL, 1), batches(1, 9, 6)
    engine, free = engine_of("torch", SMALL), replace(sgd, proximal=0.0)
    own, state, rates = weights[0], OptimiserState.start(SMALL.size), free.rates(rows)
    for number, row in enumerate(rows[0]):
        if row[0] >= 0:
            gradient = engine.gradients(own[None], samples, row)[0]
            rate = free.learning_rate if rates is None else float(rates[0, number])
            own, state = state.step(own, gradient, free, rate)
    assert distance(own, engine.train(weights, samples, rows, free)[0]) < 1e-5


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("sgd", KINDS, ids=str)
def test_neither_threads_nor_order_nor_earlier_calls_change_a_bit(name: str, sgd: Sgd) -> None:
    samples, weights, rows = samples_for(SMALL, 60), initial(SMALL, 5), batches(5, 6, 20)
    expected = engine_of(name, SMALL, 1).train(weights, samples, rows, sgd)
    engine, order = engine_of(name, SMALL, 3), np.array([3, 0, 4, 2, 1])
    for _ in range(2):  # nothing of the optimiser outlives a call
        assert np.array_equal(engine.train(weights[order], samples, rows[order], sgd), expected[order])
    assert not np.array_equal(expected, weights)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_a_clipped_gradient_moves_a_model_no_further_and_a_spoilt_one_spoils_its_row_alone(
    name: str, optimiser: Optimiser
) -> None:
    samples, weights, rows = samples_for(SMALL, 60), initial(SMALL, 3), batches(3, 1, 6)
    rows[:, 0] = np.arange(6)
    sgd = Sgd(1.0, optimiser="sgd", clip=0.01)
    moved = engine_of(name, SMALL).train(weights, samples, rows, sgd) - weights
    np.testing.assert_allclose(np.linalg.norm(moved, axis=1), 0.01, rtol=1e-2)
    weights[1, 5] = np.nan
    found = engine_of(name, SMALL).train(weights, samples, rows, replace(sgd, optimiser=optimiser))
    assert np.isnan(found[1]).all()
    assert np.isfinite(found[[0, 2]]).all()


def test_a_schedule_covers_the_steps_that_a_worker_takes() -> None:
    rows: Indices = np.zeros((2, 23, 4), np.int32)
    rows[1, [0, 5, 20]] = PADDING
    for schedule in SCHEDULES[1:]:
        sgd = Sgd(0.2, schedule=schedule)
        rates = sgd.rates(rows)
        assert rates is not None
        np.testing.assert_allclose(rates[0], rates_of(sgd, 23), rtol=1e-6)
        taken = (rows[1, :, 0] >= 0).nonzero()[0]
        np.testing.assert_allclose(rates[1, taken], rates_of(sgd, 20), rtol=1e-6)
    assert Sgd(0.2).rates(rows) is None
    warm = Sgd(1.0, schedule="warmup").rates(rows)
    assert warm is not None
    np.testing.assert_allclose(warm[0, :4], [1 / 3, 2 / 3, 1, 1], rtol=1e-6)


def test_settings_become_an_optimiser() -> None:
    local = LocalSpec(optimiser="adamw", schedule="warmup", clip=2.0, weight_decay=0.1, momentum=0.5)
    assert Sgd.of(local, 0.3, 0.7) == Sgd(0.3, 0.5, 0.1, 0.7, "adamw", "warmup", 2.0)
    assert Sgd.of(LocalSpec(), 0.3) == Sgd(0.3)


def adam_by_hand(start: Floats) -> Floats:
    return start - np.float32(0.1)  # the first step of Adam is the sign of the gradient


@pytest.mark.parametrize("name", ENGINES)
def test_the_first_step_of_adam_is_a_step_of_the_rate_in_every_weight(name: str) -> None:
    samples, weights = samples_for(SMALL, 60), initial(SMALL, 1)
    corrections = np.full_like(weights, 1e4)  # decides the sign
    found = engine_of(name, SMALL).train(
        weights, samples, batches(1, 1, 3)[:, :1] * 0, Sgd(0.1, optimiser="adam"), corrections=corrections
    )
    np.testing.assert_allclose(found[0], adam_by_hand(weights[0]), atol=1e-6)
