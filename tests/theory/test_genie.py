from __future__ import annotations

import json

import numpy as np
import pytest

import cbdsl
from cbdsl.theory.genie import (
    Companion,
    Genie,
    divergence_curve,
    divergences,
    find_population,
    steps_of,
    summarise,
)
from cbdsl.theory.trajectory import prepare_measurement
from support.helpers import blobs, perceptron, small_spec


def test_divergence_by_hand() -> None:
    genie = np.array([3.0, 4.0], np.float32)
    rows = np.array([[3.0, 4.0], [6.0, 8.0], [3.0, 3.0]], np.float32)
    assert divergences(rows, genie) == pytest.approx([0.0, 1.0, 0.2])


def test_with_one_step_on_all_data_the_genie_follows_its_equation() -> None:
    spec = small_spec(local__batch_size=1000, local__steps=1, rounds=3)
    experiment = prepare_measurement(spec, 1, perceptron, blobs())
    genie = Genie.at_start(experiment)
    position, velocity = experiment.initial[0].astype(np.float64), np.zeros(experiment.engine.size)
    for number, inertia in enumerate((1.0, 0.5, 0.25), start=1):
        where = position.astype(np.float32)[None]
        gradient = experiment.engine.gradients(where, experiment.dataset.train, find_population(experiment))[0]
        velocity = inertia * velocity - 0.05 * gradient
        position = position + velocity
        genie = genie.move(number, inertia, 0.05)
        np.testing.assert_allclose(genie.position, position, atol=1e-5)
        np.testing.assert_allclose(genie.velocity, velocity, atol=1e-5)


def test_the_genie_holds_the_union_of_all_local_data_and_works_as_much_as_a_worker() -> None:
    experiment = prepare_measurement(small_spec(local__epochs=2), 1, perceptron, blobs())
    genie = Genie.at_start(experiment)
    assert sorted(genie.population) == sorted(np.concatenate(experiment.split.workers))
    assert genie.steps == 2 * 6  # 40 samples of its own and 20 shared, in batches of 10, twice
    assert (steps_of(experiment) == 12).all()
    np.testing.assert_array_equal(genie.position, experiment.initial[0])


def test_a_worker_that_holds_the_population_and_listens_to_nobody_is_the_genie() -> None:
    spec = small_spec(
        workers=1, shared="none", local__batch_size=40, swarm__cognitive=0, swarm__social=0, swarm__inertia=0.5
    )
    curve = divergence_curve(spec, 1, model=perceptron, data=blobs())
    assert max(row["high"] for row in curve) < 1e-5


def test_without_local_work_the_genie_rests() -> None:
    experiment = prepare_measurement(small_spec(local__epochs=0), 1, perceptron, blobs())
    genie = Genie.at_start(experiment)
    np.testing.assert_array_equal(genie.move(1, 1.0, 0.05).position, genie.position)


def test_the_curve_is_plain_numbers_and_the_same_on_any_number_of_threads() -> None:
    spec = small_spec(data__partition="shards")
    shown: list[int] = []
    curve = divergence_curve(spec, 1, lambda found: shown.append(found.round), model=perceptron, data=blobs())
    assert shown == [1, 2, 3, 4, 5]
    assert json.loads(json.dumps(curve)) == divergence_curve(spec, 2, model=perceptron, data=blobs())
    assert set(curve[0]) == {"round", "mean", "deviation", "low", "high", "median", "lost"}
    assert all(row["low"] <= row["mean"] <= row["high"] for row in curve)


def test_a_companion_sees_in_a_run_what_a_replay_shows_and_changes_nothing() -> None:
    spec = small_spec(data__partition="shards", attack__byzantine=1)
    companion = Companion()
    watched = cbdsl.run(spec, model=perceptron, data=blobs(), watch=companion)
    alone = cbdsl.run(spec, model=perceptron, data=blobs())
    np.testing.assert_array_equal(watched.weights, alone.weights)
    assert [found.to_json() for found in companion.curve] == divergence_curve(spec, 1, model=perceptron, data=blobs())


def test_workers_that_left_the_range_of_numbers_are_counted_and_left_out() -> None:
    found = summarise(3, np.array([0.5, np.inf, np.nan, 1.5]))
    assert found.to_json() == {
        "round": 3,
        "mean": 1.0,
        "deviation": 0.5,
        "low": 0.5,
        "high": 1.5,
        "median": 1.0,
        "lost": 2,
    }
    nobody = summarise(3, np.array([np.nan]))
    assert nobody.to_json() == {
        "round": 3,
        "mean": None,
        "deviation": None,
        "low": None,
        "high": None,
        "median": None,
        "lost": 1,
    }
