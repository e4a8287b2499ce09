"""Participants that vanish after the order or after their claim, in both conversations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import cbdsl
from cbdsl.spec import from_toml
from support.helpers import blobs, cbdsl as run_command, perceptron, small_spec
from support.refusals import refused_as


def play(**settings: object) -> cbdsl.Result:
    return cbdsl.run(small_spec(**settings), model=perceptron, data=blobs())


def numbers(result: cbdsl.Result) -> list[cbdsl.RoundRecord]:
    return [replace(line, seconds=0.0) for line in result.rounds]


def test_who_vanishes_after_the_order_claims_nothing_and_does_not_move() -> None:
    result = play(dropout__after_order=0.5, rounds=8)
    claims = [line.traffic["score"][0] for line in result.rounds]
    assert min(claims) > 0 or max(claims) < 6
    assert sum(claims) == pytest.approx(24, abs=8)
    assert all(line.participants == 6 for line in result.rounds)
    nobody = play(dropout__after_order=1.0)
    assert [line.traffic["score"][0] for line in nobody.rounds] == [0] * 5
    assert nobody.summary.uploads == 0


def test_who_vanishes_after_its_claim_is_silent_and_skipped_for_some_rounds() -> None:
    result = play(dropout__after_claim=0.5, rounds=8)
    assert all(line.traffic["score"][0] == 6 for line in result.rounds)
    silent = [(line.round, worker) for line in result.rounds for worker in line.silent]
    assert silent
    invited = {(line.round, verdict["worker"]) for line in result.rounds for verdict in line.verdicts}
    assert not [worker for number, worker in silent if (number + 1, worker) in invited]
    assert result.summary.banned == []


@pytest.mark.parametrize("when", ["after_order", "after_claim"])
def test_where_everybody_uploads_who_vanished_is_silent(when: str) -> None:
    result = play(method="fedavg", **{f"dropout__{when}": 0.5})
    assert all(len(line.silent) + len(line.accepted) == 6 for line in result.rounds)
    assert 0 < sum(len(line.silent) for line in result.rounds) < 30
    gone = play(method="fedavg", **{f"dropout__{when}": 1.0})
    assert gone.summary.uploads == 0
    assert len({line.test_accuracy for line in gone.rounds}) == 1


@pytest.mark.parametrize("method", ["cb-dsl", "fedavg", "scaffold"])
def test_drop_outs_are_the_same_after_a_resume(method: str, tmp_path: Path) -> None:
    both: dict[str, object] = {
        "method": method, "dropout__after_order": 0.3, "dropout__after_claim": 0.3, "swarm__inertia": [0.5, 0.5],
    }  # fmt: skip
    whole = play(rounds=6, **both)
    cbdsl.run(small_spec(rounds=3, **both), model=perceptron, data=blobs(), out=tmp_path / "run")
    resumed = cbdsl.resume(tmp_path / "run", rounds=6, model=perceptron, data=blobs())
    assert numbers(resumed) == numbers(whole)
    assert np.array_equal(resumed.weights, whole.weights)
    assert numbers(play(rounds=6, **both | {"seed": 1})) != numbers(whole)


def test_a_spec_without_drop_outs_is_as_it_was() -> None:
    assert "dropout" not in small_spec().to_toml()
    spec = small_spec(dropout__after_claim=0.25)
    assert from_toml(spec.to_toml()) == spec
    assert spec.key() != small_spec().key()


def test_real_workers_do_not_drop_out_by_a_setting(tmp_path: Path) -> None:
    words = ("--set", "dropout.after_order=0.5")
    run_command("run", "--method", "server-only", *words, cwd=tmp_path).check_refused("no-effect", "dropout")
    with refused_as("out-of-range"):
        small_spec(dropout__after_order=1.5)


@pytest.mark.cluster
def test_drop_outs_are_the_same_on_ray() -> None:
    pytest.importorskip("ray")
    spec = small_spec(model="softmax", dropout__after_order=0.3, dropout__after_claim=0.3)
    here, there = (cbdsl.run(spec, data=blobs(), on=on, shards=shards) for on, shards in ((None, None), ("ray", 2)))
    assert numbers(there) == numbers(here)
