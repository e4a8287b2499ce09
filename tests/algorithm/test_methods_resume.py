"""A run that was stopped goes on to the same numbers: every method, by name and as an object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cbdsl
from cbdsl import register
from cbdsl.algorithm.methods import FedAdam, Scaffold
from cbdsl.arrays import Floats
from cbdsl.runs import loop
from cbdsl.runs.records import RoundRecord
from support.helpers import blobs, small_spec
from support.refusals import refused_as


class StoppedError(RuntimeError):
    """Ends a run."""


class StopAfter(cbdsl.Callback):
    """Ends a run after its third round."""

    def round(self, record: RoundRecord) -> None:
        if record.round == 3:
            raise StoppedError


class Halfway(cbdsl.AveragingMethod):
    """Not registered; its server goes half of the way, and remembers the last step."""

    def memory(self, size: int) -> Floats:
        return np.zeros(size, np.float32)

    def update(self, seen: cbdsl.ServerStep) -> tuple[Floats, Floats]:
        step = np.asarray(0.5 * (seen.combined - seen.current) + 0.25 * seen.memory, np.float32)
        return seen.current + step, step


OBJECTS = [Halfway(), FedAdam(rate=0.05), Scaffold()]


def numbers(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


@pytest.mark.parametrize("often", [True, False])  # with checkpoints, and stopped before the first one
@pytest.mark.parametrize("method", [*register.method.names(), *OBJECTS])
def test_stopped_and_resumed(method: Any, often: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN401
    if often:
        monkeypatch.setattr(loop, "_CHECKPOINT_SECONDS", 0.0)
        monkeypatch.setattr(loop, "_CHECKPOINT_SHARE", 0.0)
    spec = small_spec(model="softmax", rounds=6, participation=4)
    whole = cbdsl.run(spec, method=method, data=blobs(), out=tmp_path / "whole", callbacks=[])
    with pytest.raises(StoppedError):
        cbdsl.run(spec, method=method, data=blobs(), out=tmp_path / "stopped", callbacks=[StopAfter()])
    assert (tmp_path / "stopped" / "checkpoint.npz").exists() == often
    again = None if isinstance(method, str) else method
    result = cbdsl.resume(tmp_path / "stopped", method=again, data=blobs(), callbacks=[])
    np.testing.assert_array_equal(result.weights, whole.weights)
    assert numbers(tmp_path / "stopped") == numbers(tmp_path / "whole")


def test_a_method_without_a_name_has_to_be_given_again(tmp_path: Path) -> None:
    spec = small_spec(model="softmax", rounds=2)
    result = cbdsl.run(spec, method=Halfway(), data=blobs(), out=tmp_path / "run", callbacks=[])
    assert result.spec.method == "custom"
    with refused_as("missing-part", "method="):
        cbdsl.resume(tmp_path / "run", data=blobs())
    with refused_as("wrong-run"):
        cbdsl.resume(tmp_path / "run", data=blobs(), method=Scaffold())
