from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cbdsl
from cbdsl.errors import UserError
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec
from cbdsl.studies.reproduce import RUN_AND_DIVERGENCE
from cbdsl.studies.sweep import Task, grid, parse_axis, plan_sweep, run_all, run_tasks, write_table
from support.refusals import refused_as

SMALL = Spec(model="softmax", workers=4, rounds=3).with_settings(
    {"data.shared_scoring": 60, "data.samples_per_worker": 20}
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed=0..3", ("seed", [0, 1, 2, 3])),
        ("swarm.inertia=0.5,0.9", ("swarm.inertia", [0.5, 0.9])),
        ("swarm.inertia=[1, 0],0.9", ("swarm.inertia", [[1, 0], 0.9])),
        ("method=cb-dsl,fedavg", ("method", ["cb-dsl", "fedavg"])),
        ("seed=7", ("seed", [7])),
        ("attack=alie,ipm", ("attack.name", ["alie", "ipm"])),
        ("aggregator=krum,median", ("defence.aggregator", ["krum", "median"])),
    ],
)
def test_an_axis_is_a_setting_and_its_values(text: str, expected: tuple[str, list[Any]]) -> None:
    assert parse_axis(text) == expected


@pytest.mark.parametrize("text", ["seed=", "seed", "seed=3..1"])
def test_an_axis_without_values_is_an_error(text: str) -> None:
    with pytest.raises(UserError):
        parse_axis(text)


def test_a_grid_is_every_combination() -> None:
    points = grid(SMALL, [("seed", [0, 1]), ("local.epochs", [1, 2, 3])])
    assert [(point.seed, point.local.epochs) for point in points] == [(s, e) for s in (0, 1) for e in (1, 2, 3)]
    assert len({point.key() for point in points}) == 6
    with refused_as("conflict", "seed"):
        grid(SMALL, [("seed", [0]), ("seed", [1])])


@pytest.mark.slow
def test_a_sweep_plays_each_spec_once_and_a_larger_one_only_what_is_new(tmp_path: Path) -> None:
    specs = grid(SMALL, [("seed", [0, 1]), ("method", ["cb-dsl", "fedavg"])])
    first = run_all(specs, tmp_path, jobs=2)
    assert [(r.spec.seed, r.spec.method) for r in first] == [(s, m) for s in (0, 1) for m in ("cb-dsl", "fedavg")]
    stamps = {r.folder: (r.folder / "summary.json").stat().st_mtime_ns for r in first}
    progress: list[tuple[int, int, float]] = []
    again = run_all([*specs, *grid(SMALL, [("seed", [2])])], tmp_path, 1, lambda *counts: progress.append(counts))
    assert {r.folder: (r.folder / "summary.json").stat().st_mtime_ns for r in again[:4]} == stamps
    swarm, average = (Task(resolve(spec)).work for spec in specs[:2])
    assert swarm > average  # which scores no model
    assert progress[0][:2] == (12, 15)
    assert progress[0][2] == pytest.approx((2 * swarm + 2 * average) / (3 * swarm + 2 * average))
    assert progress[-1] == (15, 15, 1.0)
    write_table(again, ["seed", "method"], tmp_path)
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [float(row["final_accuracy"]) for row in rows] == [line["final_accuracy"] for line in lines]
    assert [r.summary.final_accuracy for r in again] == [line["final_accuracy"] for line in lines]


def test_equal_specs_are_one_run(tmp_path: Path) -> None:
    results = run_all([SMALL, SMALL.with_settings({"shared": "both"})], tmp_path, 1)  # "both" is the default's meaning
    assert results[0].folder == results[1].folder
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.slow
def test_a_sweep_that_was_killed_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    settings = ("model=softmax", "rounds=6", "workers=10")
    words = ["sweep", "paper-iid", "--over", "seed=0..2", *(f"--set={one}" for one in settings), "--jobs", "2"]
    command = [sys.executable, "-m", "cbdsl", *words]
    process = subprocess.Popen([*command, "--out", str(tmp_path / "killed")], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while not list(tmp_path.glob("killed/runs/*/rounds.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(3)  # the processes of the pool notice that they are alone
    for out in ("killed", "whole"):
        done = subprocess.run([*command, "--out", str(tmp_path / out)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    results = [
        [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in path.read_text().splitlines()]
        for path in (tmp_path / "killed" / "results.jsonl", tmp_path / "whole" / "results.jsonl")
    ]
    assert results[0] == results[1]


@pytest.mark.slow
def test_a_failing_run_stops_the_sweep_with_its_own_message(tmp_path: Path) -> None:
    with refused_as("task-failed", "9,000"):
        run_all([SMALL, SMALL.with_settings({"workers": 9000})], tmp_path, 2)


@pytest.mark.slow
def test_a_watched_run_leaves_run_and_curve_however_it_got_there(tmp_path: Path) -> None:
    task = Task(resolve(SMALL), RUN_AND_DIVERGENCE)
    fresh, resumed = tmp_path / "fresh", tmp_path / "resumed"
    run_all([SMALL], resumed, 1)  # as if it had been stopped between the run and its curve
    for out in (fresh, resumed):
        assert not task.is_done(out)
        run_tasks([task], out, 1)
        assert task.is_done(out)
    curves = [(task.folder(out) / "divergence.json").read_bytes() for out in (fresh, resumed)]
    assert curves[0] == curves[1]
    summary = Task(task.spec).folder(fresh) / "summary.json"
    before = json.loads(summary.read_text())
    summary.unlink()
    assert not task.is_done(fresh)
    run_tasks([task], fresh, 1)
    after = json.loads(summary.read_text())
    assert {key: after[key] for key in after if key != "seconds"} == {
        key: before[key] for key in before if key != "seconds"
    }


def test_one_damaged_file_in_a_sweep_is_named_and_the_other_runs_are_finished(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in "abc":
        arrays: dict[str, Any] = {f"{part}_features": rng.normal(size=(400, 5)) for part in ("train", "test")}
        arrays |= {f"{part}_labels": rng.integers(0, 3, 400) for part in ("train", "test")}
        np.savez(tmp_path / f"{name}.npz", **arrays)
    damaged = tmp_path / "b.npz"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    start = SMALL.with_settings({"data.holdout": 50, "data.shared_training": 20, "rounds": 1})
    points = grid(start, [("data.source", [str(tmp_path / f"{name}.npz") for name in "abc"])])
    with refused_as("task-failed", "1 of 3", "b.npz cannot be read"):
        run_all(points, tmp_path / "out", jobs=1)
    assert [Task(resolve(point)).is_done(tmp_path / "out") for point in points] == [True, False, True]


@pytest.mark.parametrize("text", [f"seed=0..{10**15}", f"seed=0..{'9' * 5000}", "seed=" + "[" * 5000])
def test_a_grid_without_end_is_an_error(text: str) -> None:
    with pytest.raises(UserError):
        grid(SMALL, [parse_axis(text)])


def test_combinations_that_differ_only_in_a_setting_without_effect_are_one_run() -> None:
    plan = plan_sweep(SMALL, [("method", ["cb-dsl", "fedavg"]), ("swarm.inertia", [0.5, 0.9]), ("seed", [0, 1])])
    assert [(one.method, one.swarm.inertia[0]) for one in plan.specs[::2]] == [
        ("cb-dsl", 0.5), ("cb-dsl", 0.9), ("fedavg", 1.0),
    ]  # fmt: skip
    assert plan.note.startswith("2 of 8 combinations are the same run as another one, and run once. swarm.inertia")
    attacked = plan_sweep(SMALL, [("attack.byzantine", [0, 1]), ("attack.name", ["alie", "liar"])])
    assert [(one.attack.byzantine, one.attack.name) for one in attacked.specs] == [
        (0, "liar"), (1, "alie"), (1, "liar"),
    ]  # fmt: skip
    rules = plan_sweep(SMALL, [("method", ["cb-dsl", "fedavg"]), ("defence.aggregator", ["mean", "median"])])
    assert len(rules.specs) == 3
    assert plan_sweep(SMALL, [("seed", [0, 0])]).note == ""
    with refused_as("no-effect", "swarm.inertia"):
        plan_sweep(SMALL, [("method", ["fedavg"]), ("swarm.inertia", [0.5, 0.9])])


@pytest.mark.slow
def test_a_sweeps_tables_hold_all_runs_of_its_folder(tmp_path: Path) -> None:
    def table() -> list[dict[str, str]]:
        return list(csv.DictReader((tmp_path / "results.csv").open()))

    assert [run.spec.seed for run in cbdsl.sweep(SMALL, {"seed": [3, 2]}, out=tmp_path, jobs=1)] == [3, 2]
    assert [row["seed"] for row in table()] == ["3", "2"]
    more = cbdsl.sweep(SMALL, {"seed": [1], "local.epochs": [2]}, out=tmp_path, jobs=1)
    assert [run.spec.seed for run in more] == [1]
    assert [(row["seed"], row["local.epochs"]) for row in table()] == [("1", "2"), ("2", "1"), ("3", "1")]
    (tmp_path / "runs" / Task(resolve(SMALL.with_settings({"seed": 3}))).spec.key() / "rounds.jsonl").unlink()
    cbdsl.sweep(SMALL, {"seed": [1, 2]}, out=tmp_path, jobs=1)  # a damaged run of an earlier sweep is left out
    assert [row["seed"] for row in table()] == ["1", "1", "2"]


@pytest.mark.slow
def test_a_sweep_over_two_tasks_keeps_the_runs_of_both(tmp_path: Path) -> None:
    sizes = {"shared_training": 10, "shared_scoring": 20, "holdout": 20, "samples_per_worker": 20}
    spec = Spec(workers=2, rounds=1, model="mlp").with_settings({f"data.{key}": size for key, size in sizes.items()})
    runs = cbdsl.sweep(spec, {"data.source": ["mnist", "friedman"]}, out=tmp_path / "both", jobs=1)
    assert [run.summary.metric for run in runs] == ["accuracy", "rmse"]
    with (tmp_path / "both" / "results.csv").open() as file:
        assert [row["data.source"] for row in csv.DictReader(file)] == ["mnist", "friedman"]


def test_a_script_without_a_main_guard_can_sweep(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import cbdsl\n"
        "print('started')\n"
        "spec = cbdsl.Spec(workers=2, rounds=1, model='softmax').with_settings({'data.samples_per_worker': 20})\n"
        "print(len(cbdsl.sweep(spec, {'seed': range(2)}, jobs=2)))\n"
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "started\n2\n"), done.stderr
    assert done.stderr == ""
