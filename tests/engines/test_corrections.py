"""Steps that are bent besides by their samples: FedProx's pull back to the start and SCAFFOLD's constant vector."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cbdsl.arrays import PADDING, Floats, Indices
from cbdsl.engines.engine import Sgd
from cbdsl.models.architecture import Architecture
from support.networks import (
    ENGINES,
    SMALL,
    architectures,
    distance,
    engine_of,
    initial,
    reference_training,
    samples_for,
)

BENT = Sgd(0.1, momentum=0.9, weight_decay=0.01, proximal=0.5)


def random_corrections(workers: int, size: int, seed: int = 3) -> Floats:
    return np.random.default_rng(seed).normal(0, 0.1, (workers, size)).astype(np.float32)


def random_batches(workers: int, steps: int, batch: int, samples: int = 60) -> Indices:
    """Batches of every length, the longest among them; one is empty."""
    rng = np.random.default_rng(1)
    batches = rng.integers(0, samples, (workers, steps, batch)).astype(np.int32)
    lengths = rng.integers(1, batch + 1, (workers, steps, 1))
    lengths[:, 0], lengths[:, 2] = batch, 0
    return np.where(np.arange(batch) < lengths, batches, np.int32(PADDING))


@pytest.mark.parametrize("name", ENGINES)
@given(
    architecture=architectures(),
    batch=st.integers(1, 40),
    momentum=st.sampled_from([0.0, 0.9]),
    decay=st.sampled_from([0.0, 0.01]),
    proximal=st.sampled_from([0.0, 0.1, 2.0]),
    corrected=st.booleans(),
)
def test_bent_steps_are_those_of_torch_in_double_precision(
    name: str, architecture: Architecture, batch: int, momentum: float, decay: float, proximal: float, corrected: bool
) -> None:
    samples, weights = samples_for(architecture, 60), initial(architecture, 2)
    batches, sgd = random_batches(2, 10, batch), Sgd(0.005, momentum, decay, proximal)
    corrections = random_corrections(2, architecture.size) if corrected else None
    trained = engine_of(name, architecture).train(weights, samples, batches, sgd, corrections=corrections)
    for worker in range(2):
        own = None if corrections is None else corrections[worker]
        expected = reference_training(architecture, weights[worker], samples, batches[worker], sgd, own)
        assert distance(trained[worker], expected) < 1e-5


@pytest.mark.parametrize("name", ENGINES)
def test_a_strong_pull_keeps_a_model_where_it_was_and_a_correction_alone_moves_it_straight(name: str) -> None:
    engine, samples, weights = engine_of(name, SMALL), samples_for(SMALL, 60), initial(SMALL, 2)
    batches, rate = random_batches(2, 40, 8), 0.001
    free = engine.train(weights, samples, batches, Sgd(rate))
    held = engine.train(weights, samples, batches, Sgd(rate, proximal=900.0))
    assert np.linalg.norm(held - weights) < 0.1 * np.linalg.norm(free - weights)
    corrections = 1e4 * random_corrections(2, SMALL.size)  # beside it the samples hardly count
    moved = engine.train(weights, samples, batches[:, :3], Sgd(rate), corrections=corrections)
    assert distance(moved - weights, -2 * rate * corrections) < 0.01  # of three batches one is empty


@pytest.mark.parametrize("name", ENGINES)
def test_rows_do_not_touch_each_other_and_neither_threads_nor_order_change_a_bit(name: str) -> None:
    samples, weights = samples_for(SMALL, 60), initial(SMALL, 7)
    batches, corrections = random_batches(7, 5, 21), random_corrections(7, SMALL.size)
    expected = engine_of(name, SMALL, 1).train(weights, samples, batches, BENT, corrections=corrections)
    order = np.random.default_rng(5).permutation(7)
    for threads in (1, 2, 3):
        engine = engine_of(name, SMALL, threads)
        found = engine.train(weights[order], samples, batches[order], BENT, corrections=corrections[order])
        assert np.array_equal(found, expected[order])
    for row in range(7):
        one = slice(row, row + 1)
        alone = engine.train(weights[one], samples, batches[one], BENT, corrections=corrections[one])
        assert np.array_equal(alone, expected[one])
    weights[3] = np.nan
    found = engine.train(weights, samples, batches, BENT, corrections=corrections)
    others = np.arange(7) != 3
    assert np.array_equal(found[others], expected[others])
    assert np.isnan(found[3]).all()


@pytest.mark.parametrize("name", ENGINES)
def test_without_samples_there_is_no_step_and_what_was_given_stays_as_it_was(name: str) -> None:
    engine, samples, weights = engine_of(name, SMALL), samples_for(SMALL, 60), initial(SMALL, 2)
    corrections, empty = random_corrections(2, SMALL.size), np.full((2, 3, 4), PADDING, np.int32)
    before, constant = weights.copy(), corrections.copy()
    assert np.array_equal(engine.train(weights, samples, empty, BENT, corrections=corrections), weights)
    engine.train(weights, samples, random_batches(2, 4, 5), BENT, corrections=corrections)
    assert np.array_equal(weights, before)
    assert np.array_equal(corrections, constant)


@pytest.mark.parametrize("name", ENGINES)
def test_corrections_may_have_another_layout_and_type(name: str) -> None:
    engine, samples, weights = engine_of(name, SMALL), samples_for(SMALL, 60), initial(SMALL, 3)
    batches, corrections = random_batches(3, 4, 5), random_corrections(3, SMALL.size)
    expected = engine.train(weights, samples, batches, BENT, corrections=corrections)
    strided = np.asfortranarray(np.repeat(corrections.astype(np.float64), 2, axis=0))[::2]
    found = engine.train(weights, samples, batches, BENT, corrections=strided)  # type: ignore[arg-type]
    assert np.array_equal(found, expected)


def with_one(value: float) -> Floats:
    corrections = np.zeros((2, SMALL.size), np.float32)
    corrections[1, 7] = value
    return corrections


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_correction_that_is_no_number_spoils_its_own_row_alone(name: str, value: float) -> None:
    samples, weights, batches = samples_for(SMALL, 60), initial(SMALL, 2), random_batches(2, 3, 4)
    plain, found = (
        engine_of(name, SMALL).train(weights, samples, batches, Sgd(0.1), corrections=rows)
        for rows in (with_one(0.0), with_one(value))
    )
    np.testing.assert_array_equal(found[0], plain[0])
    assert not np.isfinite(found[1]).all()


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    ("corrections", "words"),
    [
        (np.zeros(SMALL.size, np.float32), "corrections have shape"),
        (np.zeros((1, SMALL.size), np.float32), f"give \\(2, {SMALL.size}\\), one row for each model"),
        (np.zeros((3, SMALL.size), np.float32), "corrections have shape"),
        (np.zeros((2, SMALL.size - 1), np.float32), "corrections have shape"),
        (np.zeros((2, SMALL.size, 1), np.float32), "corrections have shape"),
        (np.float32(np.nan), "corrections have shape"),
        (np.zeros((2, SMALL.size), np.int32), "corrections have type int32"),
    ],
)
def test_wrong_corrections_are_an_error_with_a_reason(name: str, corrections: Floats, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine_of(name, SMALL).train(
            initial(SMALL, 2), samples_for(SMALL, 60), random_batches(2, 3, 4), Sgd(0.1), corrections=corrections
        )
