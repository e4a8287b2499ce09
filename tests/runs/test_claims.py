"""Every worker's claim is recorded, in few bytes, and kept in step with the rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cbdsl
from cbdsl.runs.folder import RunFolder
from cbdsl.runs.records import NO_CLAIMS
from support.helpers import blobs, perceptron, small_spec


class StopError(RuntimeError):
    """Stops a run."""


class StopAfter(cbdsl.callbacks.Callback):
    def __init__(self, number: int) -> None:
        self.number = number

    def round(self, record: cbdsl.RoundRecord) -> None:
        if record.round == self.number:
            raise StopError


def test_claims_of_all_workers_are_recorded(tmp_path: Path) -> None:
    spec = small_spec(attack__byzantine=1)
    result = cbdsl.run(spec, model=perceptron, data=blobs(), out=tmp_path / "run")
    claims = result.claims
    assert len(claims) == sum(line.traffic["score"][0] for line in result.rounds)
    assert (tmp_path / "run" / "claims.bin").stat().st_size == 12 * len(claims)
    first = claims[claims["round"] == 1]
    assert first["worker"].tolist() == list(range(6))
    for line in result.rounds:
        own = dict(claims[claims["round"] == line.round][["worker", "score"]].tolist())
        assert all(own[verdict["worker"]] == np.float32(verdict["claimed"]) for verdict in line.verdicts)
    assert np.array_equal(cbdsl.load(tmp_path / "run").claims, claims)
    assert np.array_equal(cbdsl.run(spec, model=perceptron, data=blobs()).claims, claims)


def test_a_resumed_run_has_each_claim_once(tmp_path: Path) -> None:
    whole = cbdsl.run(small_spec(), model=perceptron, data=blobs())
    with pytest.raises(StopError):
        cbdsl.run(small_spec(), model=perceptron, data=blobs(), out=tmp_path / "run", callbacks=[StopAfter(3)])
    with (tmp_path / "run" / "claims.bin").open("ab") as file:
        file.write(b"torn")
    resumed = cbdsl.resume(tmp_path / "run", model=perceptron, data=blobs())
    assert np.array_equal(resumed.claims, whole.claims)
    assert RunFolder(tmp_path / "run").claims().dtype == NO_CLAIMS.dtype


def test_where_nobody_claims_there_is_nothing_to_record(tmp_path: Path) -> None:
    result = cbdsl.run(small_spec(method="fedavg"), model=perceptron, data=blobs(), out=tmp_path / "run")
    assert len(result.claims) == 0
    assert not (tmp_path / "run" / "claims.bin").exists()


def test_metrics_by_round_change_no_number(tmp_path: Path) -> None:
    plain = cbdsl.run(small_spec(), model=perceptron, data=blobs())
    result = cbdsl.run(small_spec(), model=perceptron, data=blobs(), metrics=True, out=tmp_path / "run")
    assert np.array_equal(plain.weights, result.weights)
    assert all(set(line.metrics) >= {"accuracy", "macro-f1", "loss"} for line in result.rounds)
    assert [line.metrics["accuracy"] for line in result.rounds] == [line.test_accuracy for line in plain.rounds]
    assert result.rounds[-1].metrics == result.summary.metrics == plain.summary.metrics
    assert result.summary.best_accuracy == plain.summary.best_accuracy
    assert cbdsl.load(tmp_path / "run").rounds == result.rounds
    assert not plain.rounds[0].metrics
