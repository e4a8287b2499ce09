"""Positions and velocities in half the space: what is rounded, what is not, and that nobody becomes a liar by it."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import cbdsl
from cbdsl.algorithm.particles import bytes_of_row, halved, opened, stored, whole
from cbdsl.algorithm.worker import initial_particles
from cbdsl.errors import UserError
from cbdsl.runs.build import Experiment, UserParts, bytes_of_shard
from cbdsl.runs.loop import play_rounds
from cbdsl.runs.resolve import refuse_idle, resolve
from cbdsl.spec import Spec, SwarmSpec
from support.helpers import After, blobs, perceptron, small_spec

SMALL = SwarmSpec(storage="bfloat16")


def halves_spec(**settings: Any) -> Spec:  # noqa: ANN401 - any setting
    return small_spec(swarm__storage="bfloat16", **settings)


def run(spec: Spec, **more: Any) -> cbdsl.Result:  # noqa: ANN401
    return cbdsl.run(spec, model=perceptron, data=blobs(), **{"callbacks": [], **more})


@given(arrays.arrays(np.float32, 40, elements=st.floats(width=32, allow_nan=True, allow_infinity=True)))
def test_numbers_are_rounded_as_torch_rounds_them(values: np.ndarray[Any, Any]) -> None:
    expected = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(whole(halved(values)), expected)
    np.testing.assert_array_equal(whole(halved(expected)), expected)  # once rounded, it stays


def test_ties_go_to_the_even_number() -> None:
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)], np.float32)
    assert whole(halved(ties)).tolist() == [1.0, 1 + 4 * 2**-8, -1.0]


def test_a_nan_whose_bits_would_run_over_is_none_still() -> None:
    worst = np.array([0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(whole(halved(worst))).all()


def test_positions_and_velocities_take_half_the_space_and_the_personal_best_keeps_its_bits() -> None:
    stage = Experiment.prepare(resolve(halves_spec()), UserParts(model=perceptron, data=blobs()), 1)
    rows = replace(stage.memory_swarm.particles, personal_best=stage.initial + np.float32(1e-6))
    kept = stored(rows, SMALL)
    assert 2 * kept.positions.nbytes == 2 * kept.velocities.nbytes == rows.positions.nbytes
    assert opened(kept).personal_best.tobytes() == rows.personal_best.tobytes()
    assert bytes_of_row(1000, SMALL, 5) == 8017
    assert bytes_of_row(1000, SwarmSpec(), 5) == 12017
    usual = Experiment.prepare(resolve(small_spec()), UserParts(model=perceptron, data=blobs()), 1)
    saved = sum(array.nbytes for array in usual.memory_swarm.kept.values()) - sum(
        array.nbytes for array in stage.memory_swarm.kept.values()
    )
    workers = stage.spec.workers
    assert saved == workers * 4 * stage.engine.size == bytes_of_shard(usual, workers) - bytes_of_shard(stage, workers)


def test_rows_are_made_without_a_larger_copy_of_them() -> None:
    initial = np.ones((1, 10_000), np.float32)
    initial_particles(initial, 1, None, SMALL)
    tracemalloc.start()
    try:
        rows = initial_particles(initial, 400, None, SMALL)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    kept = sum(array.nbytes for array in vars(rows).values())
    assert kept == 400 * bytes_of_row(10_000, SMALL, 0)
    assert most < kept + 20 * initial.nbytes


@pytest.mark.parametrize("codec", ["none", "q4"])
@pytest.mark.parametrize("start", ["together", "apart"])
def test_claims_are_true_to_the_last_bit_and_it_learns_as_much(codec: str, start: str) -> None:
    settings = {"codec__up": codec, "codec__down": codec, "swarm__start": start, "rounds": 12}
    exact = {"verification__tolerance": 0.0, "defence__commitment": True}
    short = run(halves_spec(**settings, **exact))
    assert short.summary.banned == []
    assert short.summary.uploads > 0
    usual = run(small_spec(**settings))
    assert short.weights.tobytes() != usual.weights.tobytes()
    assert abs(short.summary.final_accuracy - usual.summary.final_accuracy) < 0.05


def test_grouping_and_threads_change_no_number() -> None:
    found = []
    for block, threads in ((100, 1), (1, 1), (2, 2)):
        stage = Experiment.prepare(resolve(halves_spec(rounds=6)), UserParts(model=perceptron, data=blobs()), threads)
        stage.memory_swarm.rows.block = block
        found.append([played.state.global_best.tobytes() for played in play_rounds(stage, stage.first_state())])
    assert found[0] == found[1] == found[2]


def test_a_run_that_was_stopped_goes_on_with_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbdsl.runs.loop._CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr("cbdsl.runs.loop._CHECKPOINT_SHARE", 0.0)
    expected = run(halves_spec(rounds=9))

    def stop(line: cbdsl.RoundRecord) -> None:
        if line.round == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(halves_spec(rounds=9), out=tmp_path / "run", callbacks=[After(stop)])
    found = cbdsl.resume(tmp_path / "run", model=perceptron, data=blobs(), callbacks=[])
    assert found.weights.tobytes() == expected.weights.tobytes()


@pytest.mark.parametrize("method", ["fedavg", "restart"])
def test_where_nothing_is_stored_the_setting_has_no_effect_and_is_refused(method: str) -> None:
    spec = resolve(halves_spec(method=method))
    assert spec.swarm.storage == "float32"
    with pytest.raises(UserError, match=r"swarm\.storage has no effect here"):
        refuse_idle([spec], ["swarm.storage"])


def test_runs_in_float32_keep_the_key_they_had() -> None:
    assert small_spec().key() == small_spec(swarm__storage="float32").key() != halves_spec().key()
