"""Finished runs that are given more rounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import cbdsl
from cbdsl.runs.folder import RunFolder
from support.helpers import blobs, perceptron, small_spec
from support.refusals import refused_as

CONSTANT: dict[str, object] = {"swarm.inertia": [0.5, 0.5]}
WAYS: dict[str, dict[str, object]] = {
    "averaging": {"method": "fedavg", "participation": 0.5},
    "with a server's memory": {"method": "fedadam"},
    "with workers that remember": {"method": "scaffold"},
    "rotation": {"method": "restart", "selection.name": "rotation", "codec.up": "q4"},
    "swarm": CONSTANT,
    "attacked": {**CONSTANT, "attack.byzantine": 1, "attack.name": "liar"},
    "alone": {"method": "server-only"},
}


def numbers(result: cbdsl.Result) -> list[cbdsl.RoundRecord]:
    return [replace(line, seconds=0.0) for line in result.rounds]


@pytest.mark.parametrize("way", WAYS)
def test_a_prolonged_run_has_the_numbers_of_a_long_one(way: str, tmp_path: Path) -> None:
    spec, given = small_spec(rounds=2).with_settings(WAYS[way]), {"model": perceptron, "data": blobs()}
    cbdsl.run(spec, out=tmp_path / "run", **given)  # type: ignore[arg-type]
    longer = cbdsl.resume(tmp_path / "run", rounds=5, **given)  # type: ignore[arg-type]
    whole = cbdsl.run(spec.with_settings({"rounds": 5}), **given)  # type: ignore[arg-type]
    assert numbers(longer) == numbers(whole)
    assert np.array_equal(longer.weights, whole.weights)
    assert longer.summary.spec_key == whole.summary.spec_key == longer.spec.key()
    assert cbdsl.load(tmp_path / "run").summary == longer.summary
    assert cbdsl.resume(tmp_path / "run", **given).summary == longer.summary  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({}, "swarm.inertia"),
        ({"method": "fedavg", "local.schedule": "cosine", "local.schedule_over": "run"}, "schedule"),
    ],
)
def test_a_schedule_over_all_rounds_cannot_be_prolonged(
    settings: dict[str, object], setting: str, tmp_path: Path
) -> None:
    cbdsl.run(small_spec(rounds=2).with_settings(settings), model=perceptron, data=blobs(), out=tmp_path / "run")
    with refused_as("conflict", setting):
        cbdsl.resume(tmp_path / "run", rounds=5, model=perceptron, data=blobs())
    assert cbdsl.resume(tmp_path / "run", rounds=2, model=perceptron, data=blobs()).summary.rounds == 2


def test_a_run_cannot_be_shortened_and_a_studys_run_stays_under_its_name(tmp_path: Path) -> None:
    spec, given = small_spec(rounds=3, method="fedavg"), {"model": perceptron, "data": blobs()}
    result = cbdsl.run(spec, out=tmp_path / "run", **given)  # type: ignore[arg-type]
    with refused_as("out-of-range", "3"):
        cbdsl.resume(tmp_path / "run", rounds=2, **given)  # type: ignore[arg-type]
    (tmp_path / "run").rename(tmp_path / result.spec.key())
    with refused_as("conflict", "study"):
        cbdsl.resume(tmp_path / result.spec.key(), rounds=5, **given)  # type: ignore[arg-type]


def test_a_crash_while_a_run_is_prolonged_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, given = small_spec(rounds=2, method="fedavg"), {"model": perceptron, "data": blobs()}
    cbdsl.run(spec, out=tmp_path / "run", **given)  # type: ignore[arg-type]
    saved = RunFolder.save_checkpoint

    def save_and_crash(*args: object) -> None:
        saved(*args)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(RunFolder, "save_checkpoint", save_and_crash)
        with pytest.raises(KeyboardInterrupt):
            cbdsl.resume(tmp_path / "run", rounds=4, **given)  # type: ignore[arg-type]
    whole = cbdsl.run(spec.with_settings({"rounds": 4}), **given)  # type: ignore[arg-type]
    assert numbers(cbdsl.resume(tmp_path / "run", rounds=4, **given)) == numbers(whole)  # type: ignore[arg-type]
