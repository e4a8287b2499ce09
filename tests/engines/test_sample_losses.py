"""Losses on single samples: what they are, and that on the native engine they are the very terms of a mean loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from cbdsl.arrays import Doubles, Indices, Samples
from cbdsl.engines.native_engine import NativeEngine
from cbdsl.engines.torch_engine import TorchEngine
from cbdsl.models.architecture import Architecture
from support.networks import (
    ENGINES,
    SMALL,
    architectures,
    engine_of,
    initial,
    module_of,
    needs_native,
    reference,
    samples_for,
)


def drawn(count: int, samples: int = 100, seed: int = 2) -> Indices:
    return np.random.default_rng(seed).integers(0, samples, count).astype(np.int32)


@pytest.mark.parametrize("name", ENGINES)
@given(architecture=architectures(), count=st.integers(1, 300))
def test_losses_of_single_samples_are_those_of_the_model_in_double_precision(
    name: str, architecture: Architecture, count: int
) -> None:
    samples, weights, indices = samples_for(architecture, 100), initial(architecture, 1)[0], drawn(count)
    found = engine_of(name, architecture).sample_losses(weights, samples, indices)
    logits = reference(architecture, weights)(torch.from_numpy(samples.features[indices]).double())
    labels = torch.from_numpy(samples.labels[indices]).long()
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none").detach().numpy()
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def mean_in_order(losses: Doubles) -> float:
    return float(np.cumsum(losses)[-1] / len(losses))


@needs_native
@given(architecture=architectures(), count=st.integers(1, 1200), threads=st.integers(1, 4))
def test_natively_their_sum_in_order_is_the_mean_loss_to_the_bit(
    architecture: Architecture, count: int, threads: int
) -> None:
    engine, samples, weights = (
        NativeEngine(architecture, threads),
        samples_for(architecture, 100),
        initial(architecture, 1),
    )
    indices = drawn(count)
    mean = mean_in_order(engine.sample_losses(weights[0], samples, indices))
    assert mean == engine.losses(weights, samples, indices)[0]  # shared by all workers
    assert mean == engine.losses(weights, samples, indices[None])[0]  # the worker's own


def test_on_torch_their_mean_is_the_mean_loss_up_to_rounding() -> None:
    engine, samples, weights = TorchEngine(module_of(SMALL), 2), samples_for(SMALL, 100), initial(SMALL, 1)
    indices = drawn(777)
    mean = mean_in_order(engine.sample_losses(weights[0], samples, indices))
    assert mean == pytest.approx(engine.losses(weights, samples, indices)[0], rel=1e-6)


@needs_native
@given(architecture=architectures(), seed=st.integers(0, 1000), parts=st.integers(1, 40), threads=st.integers(1, 4))
def test_natively_order_grouping_and_threads_never_change_a_bit(
    architecture: Architecture, seed: int, parts: int, threads: int
) -> None:
    samples, weights, indices = samples_for(architecture, 100), initial(architecture, 1)[0], drawn(220, seed=seed)
    expected = NativeEngine(architecture, 1).sample_losses(weights, samples, indices)
    engine = NativeEngine(architecture, threads)
    order = np.random.default_rng(seed).permutation(len(indices))
    assert np.array_equal(engine.sample_losses(weights, samples, indices[order]), expected[order])
    pieces = [engine.sample_losses(weights, samples, part) for part in np.array_split(indices, parts)]
    assert np.array_equal(np.concatenate(pieces), expected)


def test_on_torch_threads_never_change_a_bit() -> None:
    samples, weights, indices = samples_for(SMALL, 100), initial(SMALL, 1)[0], drawn(1001)
    expected = TorchEngine(module_of(SMALL), 1).sample_losses(weights, samples, indices)
    for threads in (2, 3):
        found = TorchEngine(module_of(SMALL), threads).sample_losses(weights, samples, indices)
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("name", ENGINES)
def test_no_sample_has_no_loss_and_a_sample_that_is_no_number_spoils_only_its_own(name: str) -> None:
    engine, samples, weights = engine_of(name, SMALL), samples_for(SMALL, 100), initial(SMALL, 1)[0]
    assert engine.sample_losses(weights, samples, np.zeros(0, np.int32)).shape == (0,)
    samples.features[50, 0, 3, 3] = np.nan
    broken = np.isnan(engine.sample_losses(weights, samples, np.arange(100, dtype=np.int32)))
    assert np.flatnonzero(broken).tolist() == [50]


@pytest.mark.parametrize("name", ENGINES)
def test_weights_and_indices_may_have_other_layouts_and_types(name: str) -> None:
    engine, samples, weights = engine_of(name, SMALL), samples_for(SMALL, 100), initial(SMALL, 1)[0]
    indices = drawn(70)
    expected = engine.sample_losses(weights, samples, indices)
    strided = np.repeat(weights.astype(np.float64), 2)[::2]
    given_indices = np.repeat(indices, 2)[::2].astype(np.int64)
    assert np.array_equal(engine.sample_losses(strided, samples, given_indices), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": np.zeros((1, SMALL.size), np.float32)}, f"give \\({SMALL.size},\\)"),
        ({"weights": np.zeros(SMALL.size - 1, np.float32)}, f"give \\({SMALL.size},\\)"),
        ({"weights": np.zeros(SMALL.size, np.int64)}, "weights have type int64"),
        ({"indices": np.zeros((1, 4), np.int32)}, "indices have shape"),
        ({"indices": np.int32(3)}, "indices have shape"),
        ({"indices": np.array([0, 30], np.int32)}, "sample 30 of 30"),
        ({"indices": np.array([0, -2], np.int32)}, "sample -2 of 30"),
        ({"indices": np.array([0, -1], np.int32)}, "give the samples alone"),
        ({"indices": np.zeros(3)}, "indices have type float64"),
    ],
)
def test_wrong_input_is_an_error_with_a_reason(name: str, change: dict[str, np.ndarray], words: str) -> None:
    weights, indices = change.get("weights", initial(SMALL, 1)[0]), change.get("indices", np.arange(30, dtype=np.int32))
    samples: Samples = samples_for(SMALL, 30)
    with pytest.raises(ValueError, match=words):
        engine_of(name, SMALL).sample_losses(weights, samples, indices)
