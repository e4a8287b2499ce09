"""What attackers and aggregators remember is saved with the run, which has the same digits when it is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cbdsl
from cbdsl import testing
from cbdsl.algorithm.aggregators import TrustedReference, aggregate
from cbdsl.runs.build import Experiment, UserParts
from cbdsl.runs.resolve import resolve
from support.helpers import blobs, fresh_state, perceptron, run_until, small_spec
from support.refusals import refused_as
from support.stateful_parts import Momentum, SharedMomentum, drifting

ATTACKED: dict[str, Any] = {"attack__byzantine": 2, "rounds": 6}


@pytest.mark.parametrize("attack", [Momentum, SharedMomentum])
@pytest.mark.parametrize(
    "settings",
    [{}, {"method": "fedavg"}, {"method": "fedavg", "participation": 3}, {"method": "restart", "codec__up": "q4"}],
    ids=str,
)
def test_a_resumed_run_of_a_stateful_attack_has_the_same_digits(
    attack: type[cbdsl.Attack], settings: dict[str, Any], tmp_path: Path
) -> None:
    spec = small_spec(**ATTACKED, **settings)
    parts: dict[str, Any] = {"model": perceptron, "data": blobs()}
    whole = cbdsl.run(spec, attack=attack(), **parts)
    run_until(3, spec, out=tmp_path / "run", attack=attack(), **parts)
    resumed = cbdsl.resume(tmp_path / "run", attack=attack(), **parts)
    assert resumed.weights.tobytes() == whole.weights.tobytes()
    if settings.get("method") == "fedavg":
        assert not np.array_equal(whole.weights, cbdsl.run(spec, attack=cbdsl.Attack(), **parts).weights)


def test_attackers_remember_each_for_itself_only_in_rounds_in_which_they_take_part(tmp_path: Path) -> None:
    spec = small_spec(**ATTACKED, method="fedavg", participation=3)
    run_until(5, spec, out=tmp_path / "run", attack=Momentum(), model=perceptron, data=blobs())
    stage = Experiment.prepare(resolve(spec), UserParts(model=perceptron, data=blobs(), attack=Momentum()), 1)
    with np.load(tmp_path / "run" / "checkpoint.npz") as arrays:
        found = {name: int(arrays[name]) for name in arrays if name.endswith(".rounds")}
    last = {
        worker: max(n for n in range(1, 6) if worker in stage.server.participants(n, frozenset(), range(6)))
        for worker in stage.byzantine
    }
    assert found == {f"attackers.{worker}.rounds": number for worker, number in last.items()}


def test_a_resumed_run_of_a_rule_with_memory_has_the_same_digits(tmp_path: Path) -> None:
    spec = small_spec(method="fedavg", rounds=6)
    parts: dict[str, Any] = {"model": perceptron, "data": blobs(), "aggregator": drifting}
    whole = cbdsl.run(spec, **parts)
    run_until(3, spec, out=tmp_path / "run", **parts)
    assert cbdsl.resume(tmp_path / "run", **parts).weights.tobytes() == whole.weights.tobytes()


def test_parts_with_memory_keep_the_laws() -> None:
    testing.check_attack(Momentum)
    testing.check_attack(SharedMomentum)


def test_sizes_and_workers_follow_their_rows_when_they_are_sorted_and_filtered() -> None:
    models = [np.array([value, 0], np.float32) for value in (3.0, np.nan, 1.0, 2.0)]
    seen = []

    def rule(rows: Any, attackers: int, trust: TrustedReference) -> Any:  # noqa: ANN401
        seen.append((rows[:, 0].tolist(), attackers, trust.sizes.tolist(), trust.workers.tolist()))
        trust.memory["mark"] = np.ones(1)
        return rows.mean(0)

    trust = TrustedReference(
        np.zeros(2, np.float32), lambda: np.zeros(2, np.float32), lambda rows: rows.sum(1),
        sizes=np.array([30.0, 40.0, 10.0, 20.0]), workers=np.array([3, 4, 1, 2], np.int32),
    )  # fmt: skip
    aggregate("own", models, 2, trust, rule)
    assert seen == [([1.0, 2.0, 3.0], 1, [10.0, 20.0, 30.0], [1, 2, 3])]
    assert list(trust.memory) == ["mark"]


def test_the_mean_weighs_by_samples_or_counts_workers_equally() -> None:
    spec = small_spec(method="fedavg", data__partition="dirichlet", rounds=1)
    parts = UserParts(model=perceptron, data=blobs())
    rows = [np.full(3, value, np.float32) for value in range(6)]

    def combined(**options: Any) -> float:  # noqa: ANN401
        stage = Experiment.prepare(resolve(spec.with_settings(options)), parts, 1)
        return float(stage.server.combine(fresh_state(np.zeros(3, np.float32)), range(6), rows)[0][0])

    sizes = [len(own) for own in Experiment.prepare(resolve(spec), parts, 1).split.workers]
    assert combined() == pytest.approx(np.average(range(6), weights=sizes))
    assert combined(**{"options.mean.weights": "equal"}) == pytest.approx(2.5)
    with refused_as("unknown-name", "size, equal"):
        combined(**{"options.mean.weights": "both"})


def test_a_memory_that_cannot_be_saved_ends_the_run() -> None:
    def rule(rows: Any, attackers: int, trust: TrustedReference) -> Any:  # noqa: ANN401, ARG001
        trust.memory["words"] = np.array(["a"])
        return rows.mean(0)

    with refused_as("invalid-part", "words"):
        cbdsl.run(small_spec(method="fedavg", rounds=1), model=perceptron, data=blobs(), aggregator=rule)
