"""Searches: they find the bottom of a bowl, stay in their ranges, and depend on their seed and their scores alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

from cbdsl.presets import preset
from cbdsl.spec import Spec
from cbdsl.studies import tune
from cbdsl.studies.pool import PoolProgress
from cbdsl.studies.sweep import Task
from cbdsl.studies.trial import TRIAL
from cbdsl.studies.tune import SEARCHES, Axis, SearchPlan, Space, SwarmSampler, TriedSettings, run_search
from cbdsl.util.files import write_json

START = replace(preset("paper-iid"), rounds=3).with_settings({"data.holdout": 100})
AXES = (Axis("swarm.social", 0.0, 1.0), Axis("swarm.cognitive", 0.0, 1.0))
BOTTOM = (0.7, 0.2)


def bowl(spec: Spec) -> float:
    return (spec.swarm.social - BOTTOM[0]) ** 2 + (spec.swarm.cognitive - BOTTOM[1]) ** 2


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Spec], float]], list[Task]]:
    """Replace trials by a function of their settings; the list has the tasks that were run."""
    run: list[Task] = []

    def install(error_of: Callable[[Spec], float]) -> list[Task]:
        def pool(tasks: Sequence[Task], out: Path, *_: object) -> Iterator[PoolProgress]:
            for task in tasks:
                run.append(task)
                errors = [error_of(task.spec)] * task.spec.rounds
                result = {"errors": errors, "loss": 0.0, "stopped": False, "uplink_bytes": 0}
                write_json(task.folder(out) / TRIAL.done_file, result)
                yield PoolProgress((), ())

        monkeypatch.setattr("cbdsl.studies.sweep.run_pool", pool)
        return run

    return install


def plan_of(name: str, seed: int = 3, axes: tuple[Axis, ...] = AXES, budget: int = 14) -> SearchPlan:
    return SearchPlan(Space(replace(START, seed=seed), axes), budget, (name,), confirm=0, early=False)


def values_of(candidates: Sequence[TriedSettings]) -> list[tuple[Any, ...]]:
    return [tuple(one.values.values()) for one in candidates]


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_stays_in_its_ranges_and_repeats_itself(name: str, tmp_path: Path, quick: Any) -> None:  # noqa: ANN401
    quick(bowl)
    axes = (*AXES, Axis("local.batch_size", choices=(5, 10)), Axis("local.epochs", 1, 3, whole=True))
    tried = values_of(run_search(plan_of(name, axes=axes), tmp_path / "a").candidates)
    assert len(tried) == 14
    assert all(0 <= social <= 1 and 0 <= cognitive <= 1 for social, cognitive, *_ in tried)
    assert {size for _, _, size, _ in tried} == {5, 10}
    assert {epochs for *_, epochs in tried} == {1, 2, 3}
    assert values_of(run_search(plan_of(name, axes=axes), tmp_path / "b").candidates) == tried
    assert values_of(run_search(plan_of(name, 4, axes), tmp_path / "c").candidates) != tried


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_that_fails_in_trials_is_resumed_as_the_same_search(name: str, tmp_path: Path, quick: Any) -> None:  # noqa: ANN401
    stops = [1, 6, 10]  # calls that fail: of trials 1, 5 and 8

    def fail(spec: Spec) -> float:
        if len(run) in stops:
            raise MemoryError
        return bowl(spec)

    quick(bowl)
    whole = run_search(plan_of(name), tmp_path / "whole")
    run = quick(fail)
    run.clear()
    for _ in stops:
        with pytest.raises(MemoryError):
            run_search(plan_of(name), tmp_path / "stopped")
    resumed = run_search(plan_of(name), tmp_path / "stopped")
    assert [vars(one) for one in resumed.candidates] == [vars(one) for one in whole.candidates]
    assert len(run) == 14 + len(stops)  # nothing twice but the trials that failed


@pytest.mark.parametrize("damage", [b"", b'{"op_code"', b"no JSON\n{}\n"])
def test_a_search_goes_on_without_its_journal(damage: bytes, tmp_path: Path, quick: Any) -> None:  # noqa: ANN401
    run = quick(bowl)
    first = run_search(plan_of("tpe"), tmp_path)
    (tmp_path / tune.JOURNAL).write_bytes(damage)
    (tmp_path / f"{tune.JOURNAL}.lock").symlink_to("of a process that was killed")
    again = run_search(plan_of("tpe"), tmp_path)
    assert [vars(one) for one in again.candidates] == [vars(one) for one in first.candidates]
    assert len(run) == 14


def test_a_longer_search_of_the_same_generations_goes_on(tmp_path: Path, quick: Any) -> None:  # noqa: ANN401
    run = quick(bowl)
    first = run_search(plan_of("tpe", budget=9), tmp_path)
    longer = run_search(plan_of("tpe", budget=12), tmp_path)
    assert values_of(longer.candidates)[:9] == values_of(first.candidates)
    assert len(run) == 12


def lowest(sampler: optuna.samplers.BaseSampler) -> float:
    def objective(trial: optuna.Trial) -> float:
        values = [float(axis.suggest(trial)) for axis in AXES]
        return float(np.sum(np.square(np.subtract(values, BOTTOM))))

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=sampler)
    study.optimize(objective, 96)
    return study.best_value


def test_a_swarm_gets_closer_to_the_bottom_of_a_bowl_than_chance() -> None:
    space = Space(START, AXES)
    swarms = [lowest(SwarmSampler(AXES, space.first_points(8, seed), seed)) for seed in range(5)]
    chance = [lowest(optuna.samplers.RandomSampler(seed)) for seed in range(5)]
    assert np.mean(swarms) < np.mean(chance) / 5


def test_a_swarm_moves_where_all_scores_are_the_same(tmp_path: Path, quick: Any) -> None:  # noqa: ANN401
    quick(lambda _spec: 1.0)
    tried = values_of(run_search(plan_of("swarm", budget=14), tmp_path).candidates)
    assert len(set(tried)) == len(tried)
    assert np.isfinite(tried).all()
