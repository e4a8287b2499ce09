from __future__ import annotations

import itertools

import numpy as np
import pytest

from cbdsl.runs.build import Experiment, UserParts, honest_workers
from cbdsl.runs.loop import play_rounds
from cbdsl.runs.resolve import resolve
from cbdsl.theory.constants import norms
from cbdsl.theory.trajectory import prepare_measurement, replay
from support.helpers import blobs, perceptron, small_spec
from support.refusals import refused_as


def test_a_replay_is_the_run() -> None:
    spec = small_spec()
    played = prepare_measurement(spec, 1, perceptron, blobs())
    assert len(list(play_rounds(played, played.first_state()))) == spec.rounds
    moves = list(replay(prepare_measurement(spec, 2, perceptron, blobs())))
    np.testing.assert_array_equal(moves[-1].after, played.memory_swarm.particles.positions)
    assert [move.round for move in moves] == [1, 2, 3, 4, 5]
    assert [move.inertia for move in moves] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    for earlier, later in itertools.pairwise(moves):
        np.testing.assert_array_equal(earlier.after, later.before)
        np.testing.assert_array_equal(earlier.before, later.previous)
    np.testing.assert_array_equal(moves[0].previous, moves[0].before)


@pytest.mark.parametrize("draw", ["worker", "parameter"])
def test_without_local_work_the_swarms_terms_are_the_whole_move(draw: str) -> None:
    spec = resolve(small_spec(method="pso", swarm__draw=draw))
    for move in replay(Experiment.prepare(spec, UserParts(model=perceptron, data=blobs()), 1)):
        rest = norms(move.displacement() - move.swarm_part())
        assert (rest <= 1e-5 * (1 + norms(move.displacement()))).all()


def test_attackers_are_left_out() -> None:
    experiment = prepare_measurement(small_spec(attack__byzantine=2), 1, perceptron, blobs())
    workers = honest_workers(experiment)
    assert sorted([*workers.tolist(), *experiment.byzantine]) == list(range(6))
    assert all(len(move.after) == 4 for move in replay(experiment))


@pytest.mark.parametrize("method", ["fedavg", "pso"])
def test_a_method_without_swarm_or_gradients_is_refused_with_the_ones_that_can(method: str) -> None:
    with refused_as("not-supported", method, "cb-dsl", "fedpso"):
        prepare_measurement(small_spec(method=method), 1, perceptron, blobs())


def test_a_swarm_of_attackers_alone_is_refused() -> None:
    with refused_as("out-of-range"):
        prepare_measurement(small_spec(attack__byzantine=6), 1, perceptron, blobs())
