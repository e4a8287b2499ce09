"""A search for settings: judged on the hold-out alone, repeatable, resumable, and honest about what it found."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cbdsl.cli.app import app
from cbdsl.presets import preset
from cbdsl.report import tune_page
from cbdsl.runs.build import Experiment
from cbdsl.runs.resolve import resolve
from cbdsl.spec import read
from cbdsl.studies.pool import PoolProgress, run_task
from cbdsl.studies.sweep import Task
from cbdsl.studies.trial import TRIAL, Limits, Trial, median_limits, prepare_trial, read_trial, run_trial
from cbdsl.studies.tune import Axis, SearchPlan, Space, Tuning, build_searched_parts, describe_gain, run_search
from support.refusals import refused_as

START = replace(preset("paper-iid"), model="softmax", workers=4, rounds=3, shared="both").with_settings(
    {"data.shared_scoring": 60, "data.samples_per_worker": 30, "data.shared_training": 20, "data.holdout": 120}
)
SPACE = Space(START, (Axis("local.learning_rate", 1e-4, 1e-1, log=True), Axis("swarm.social", 0.0, 2.0)))
PLAN = SearchPlan(SPACE, budget=6, by=("swarm", "random"), confirm=1)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tuning, Path]:
    out = tmp_path_factory.mktemp("tuning")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("cbdsl.studies.sweep.run_pool", run_here)
        return run_search(PLAN, out), out


@pytest.mark.slow
def test_a_search_finds_settings_and_meets_the_spec_on_other_seeds(searched: tuple[Tuning, Path]) -> None:
    tuning, out = searched
    best = tuning.outcome.best
    assert best.score == min(one.score for one in tuning.candidates if not one.stopped)
    assert [run.spec.seed for run in tuning.outcome.found] == [START.seed + 1000]
    assert tuning.outcome.given[0].spec == replace(tuning.outcome.found[0].spec, local=START.local, swarm=START.swarm)
    assert read(out / "best.toml").local.learning_rate == best.values["local.learning_rate"]
    assert "points" in describe_gain(tuning)
    rows = list(csv.DictReader((out / "results.csv").open()))
    assert len(rows) == 12
    assert json.loads((out / "tuning.json").read_text())["best"]["search"] == best.search


def test_both_searches_begin_alike_and_the_spec_itself_is_tried_first(searched: tuple[Tuning, Path]) -> None:
    tuning, _ = searched
    swarm, random = ([one for one in tuning.candidates if one.search == name] for name in ("swarm", "random"))
    assert swarm[0].values["local.learning_rate"] == pytest.approx(START.local.learning_rate, rel=1e-3)
    assert swarm[0].values["swarm.social"] == pytest.approx(1.0)
    assert [one.values for one in swarm[: PLAN.generation]] == [one.values for one in random[: PLAN.generation]]


def test_a_finished_search_runs_nothing_again(searched: tuple[Tuning, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    tuning, out = searched
    monkeypatch.setattr("cbdsl.studies.pool.ProcessPoolExecutor", None)  # would be called if there were anything to do
    again = run_search(PLAN, out, jobs=1)
    assert [vars(one) for one in again.candidates] == [vars(one) for one in tuning.candidates]


def test_an_interrupted_search_ends_with_the_same_numbers(
    searched: tuple[Tuning, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbdsl.studies.sweep.run_pool", run_here)

    def stop(played: int, _total: int, _share: float) -> None:
        if played >= 5:
            raise KeyboardInterrupt

    alone = replace(PLAN, by=("swarm",), confirm=0)
    with pytest.raises(KeyboardInterrupt):
        run_search(alone, tmp_path, on_progress=stop)
    resumed = run_search(alone, tmp_path)
    before = [vars(one) for one in searched[0].candidates if one.search == "swarm"]
    assert [vars(one) for one in resumed.candidates] == before


def test_a_trial_never_sees_the_test_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> float:
        raise AssertionError("the test set was looked at")

    monkeypatch.setattr(Experiment, "test_accuracy", forbidden)
    monkeypatch.setattr(Experiment, "measure_final", forbidden)
    task = Task(START, TRIAL)
    prepare_trial(task, tmp_path, {})
    run_trial(task.spec, task.folder(tmp_path), 1, lambda _: None)
    trial = read_trial(task, tmp_path)
    assert len(trial.errors) == START.rounds
    assert not trial.stopped


def test_an_unpromising_trial_is_stopped(tmp_path: Path) -> None:
    task = Task(START, TRIAL)
    prepare_trial(task, tmp_path, {2: 0.0})
    run_trial(task.spec, task.folder(tmp_path), 1, lambda _: None)
    trial = read_trial(task, tmp_path)
    assert trial.stopped
    assert len(trial.errors) == 2


def test_the_median_of_those_before_is_the_limit() -> None:
    known = [Trial((0.9, 0.8, 0.7, 0.6, 0.5, 0.4), 1.0, False, 0), Trial((0.5, 0.4), 1.0, True, 0)]
    assert median_limits(known, 6) == pytest.approx({2: 0.6, 4: 0.6})
    assert median_limits([], 6) == {}  # an error is not above 1
    assert median_limits(known, 1) == {}


def test_a_loss_that_is_no_number_is_a_bad_score_and_not_a_crash() -> None:
    assert Trial((0.9,), float("inf"), False, 0).score == pytest.approx(0.901)


def run_here(tasks: Sequence[Task], out: Path, *_: object) -> Iterator[PoolProgress]:  # processes take long to start
    for task in tasks:
        rounds: list[object] = []
        run_task(task, task.folder(out), 1, rounds.append)
        yield PoolProgress(tuple(task.round_work for _ in rounds), ())


def test_a_search_connects_to_its_cluster_once_and_not_when_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    @contextmanager
    def connected(on: str) -> Iterator[None]:
        said.append(on)
        yield
        said.append("over")

    monkeypatch.setattr("cbdsl.studies.sweep.run_pool", run_here)
    monkeypatch.setattr("cbdsl.studies.tune.connect_ray", connected)
    run_search(PLAN, tmp_path, on="ray")
    assert said == ["ray", "over"]
    run_search(PLAN, tmp_path, on="ray")
    assert said == ["ray", "over"]


def test_another_plan_in_a_folder_finds_what_it_would_find_in_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbdsl.studies.sweep.run_pool", run_here)
    early = replace(PLAN, by=("swarm",), budget=12, confirm=0)
    whole = replace(early, early=False)
    fresh = [vars(one) for one in run_search(whole, tmp_path / "fresh").candidates]
    first = [vars(one) for one in run_search(early, tmp_path / "used").candidates]
    assert any(one["stopped"] for one in first)
    assert [vars(one) for one in run_search(whole, tmp_path / "used").candidates] == fresh
    assert not any(one["stopped"] for one in fresh)
    assert [vars(one) for one in run_search(early, tmp_path / "used").candidates] == first


def test_a_trial_of_another_search_stays_only_if_it_would_end_the_same(tmp_path: Path) -> None:
    task = Task(START, TRIAL)

    def tried(limits: Limits) -> int:
        prepare_trial(task, tmp_path, limits)
        again = not task.is_done(tmp_path)
        if again:
            run_trial(task.spec, task.folder(tmp_path), 1, lambda _: None)
        return len(read_trial(task, tmp_path).errors) if again else 0

    assert tried({2: 0.0}) == 2  # stopped
    assert tried({1: 1.0, 2: 0.0}) == 0  # and so it would be here
    assert tried({1: 0.0, 2: 1.0}) == 1
    assert tried({}) == START.rounds
    assert tried({1: 1.0, 2: 1.0}) == 0


@pytest.mark.slow
def test_two_searches_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    plan = replace(PLAN, by=("random",), budget=1, confirm=0)

    def meanwhile(*_: object) -> None:
        with refused_as("conflict", tmp_path):
            run_search(plan, tmp_path)

    run_search(plan, tmp_path, jobs=1, on_progress=meanwhile)
    (tmp_path / "file").write_text("")
    with refused_as("not-allowed", tmp_path / "file"):
        run_search(plan, tmp_path / "file")


@pytest.mark.parametrize(
    ("axes", "code", "fact"),
    [
        ((Axis("data.partition", choices=("iid", "nonsense", "shards")),), "unknown-name", "nonsense"),
        ((Axis("local.batch_size", choices=(5, "ten", 20)),), "wrong-type", "batch_size"),
        ((Axis("participation", 0.5, 4.0),), "out-of-range", "participation"),
        ((Axis("method", choices=("fedprox", "cb-dsl")), Axis("options.fedprox.mu", 0.0, 1.0)), "no-effect", "fedprox"),
        ((Axis("workers", 4, 8, whole=True), Axis("attack.byzantine", 0, 6, whole=True)), "out-of-range", "6"),
    ],
)
def test_a_value_that_cannot_be_tried_is_found_before_any_is(
    axes: tuple[Axis, ...], code: str, fact: str, tmp_path: Path
) -> None:
    start = START.with_settings({"shared": "default", "attack.name": "sign-flip"})
    with refused_as(code, fact):
        run_search(SearchPlan(Space(start, axes), budget=1, confirm=0), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_methods_that_are_tried_bring_their_own_shared_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbdsl.studies.sweep.run_pool", run_here)
    axes = (Axis("method", choices=("cb-dsl", "fedavg")),)
    spec = resolve(Space(START, axes).spec({"method": "fedavg"}, 0))
    assert spec.shared == "none"
    assert resolve(Space(START, axes, given={"shared": "both"}).spec({"method": "fedavg"}, 0)).shared == "both"
    tuning = run_search(SearchPlan(Space(START, axes), budget=3, confirm=1), tmp_path)
    specs = [read(path) for path in (tmp_path / "trials").glob("*/spec.toml")]
    assert {(spec.method, spec.shared) for spec in specs} == {("cb-dsl", "both"), ("fedavg", "none")}
    assert tuning.outcome.given[0].spec.shared == "both"  # the spec as it is
    assert read(tmp_path / "best.toml") == replace(tuning.outcome.found[0].spec, seed=START.seed)


def test_a_spec_that_cannot_be_run_itself_is_refused(tmp_path: Path) -> None:
    start = START.with_settings({"defence.aggregator": "median", "shared": "none"})
    space = Space(start, (Axis("method", choices=("fedavg", "fedprox")),))
    with refused_as("no-effect", "--spec"):
        run_search(SearchPlan(space, budget=1), tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "axis", "code", "fact"),
    [
        ({}, Axis("data.samples_per_worker", 10, 50_000, whole=True), "out-of-range", "data.samples_per_worker"),
        ({}, Axis("data.shared_source", choices=("", "none.npz")), "unreadable-file", "none.npz"),
        ({}, Axis("init", choices=("", "none.safetensors")), "unreadable-file", "none.safetensors"),
        ({"data.shared_source": "none.npz"}, Axis("swarm.social", 0.0, 2.0), "unreadable-file", "none.npz"),
    ],
)
def test_what_data_cannot_give_is_found_before_anything_is_tried(
    change: dict[str, object], axis: Axis, code: str, fact: str
) -> None:
    plan = SearchPlan(Space(START.with_settings(change), (axis,)), budget=1)
    with refused_as(code, fact):
        build_searched_parts(plan)
    build_searched_parts(PLAN)


@pytest.mark.parametrize(
    ("change", "code", "fact"),
    [
        ({"budget": 0}, "out-of-range", "--budget"),
        ({"seeds": 0}, "out-of-range", "--seeds"),
        ({"repeats": 0}, "out-of-range", "--repeat"),
        ({"confirm": -1}, "out-of-range", "--confirm"),
        ({"by": ("swarn",)}, "unknown-name", "swarm"),
        ({"by": ()}, "conflict", "random"),
        ({"by": ("swarm", "swarm")}, "conflict", "swarm,swarm"),
        ({"space": Space(START.with_settings({"data.holdout": 50}), SPACE.axes)}, "out-of-range", "50"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(change: dict[str, object], code: str, fact: str) -> None:
    with refused_as(code, fact):
        replace(PLAN, **change)  # type: ignore[arg-type]


def test_a_setting_that_changes_nothing_is_refused(tmp_path: Path) -> None:
    space = Space(replace(START, method="fedavg", shared="train"), (Axis("swarm.social", 0.0, 2.0),))
    with refused_as("no-effect", "swarm.social"):
        run_search(SearchPlan(space, budget=1), tmp_path)


def test_a_damaged_trial_says_what_to_do(tmp_path: Path) -> None:
    task = Task(START, TRIAL)
    task.folder(tmp_path).mkdir(parents=True)
    for content in ("{}", '{"errors": [], "loss": null, "stopped": false, "uplink_bytes": 0}'):
        (task.folder(tmp_path) / "trial.json").write_text(content)
        with refused_as("damaged-file", task.folder(tmp_path)):
            read_trial(task, tmp_path)


def test_the_page_has_what_was_found_first(searched: tuple[Tuning, Path]) -> None:
    tuning, out = searched
    page = tune_page.write_tuning_page(tuning, out, "cbdsl tune").read_text()
    best = str(tuning.outcome.best.values["local.learning_rate"])
    assert best in page[: page.index("<main>")]
    assert page.count("<svg") == 2
    assert (out / "figures" / "progress.pdf").stat().st_size > 1000


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("svg_only")
def test_the_page_is_drawn_where_nothing_is_wrong(searched: tuple[Tuning, Path], tmp_path: Path) -> None:
    right = tuple(replace(one, error=0.0, stopped=False) for one in searched[0].candidates)
    tune_page.write_tuning_page(replace(searched[0], candidates=right), tmp_path, "cbdsl tune")


@pytest.mark.slow
def test_a_search_that_was_killed_goes_on_and_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("model=softmax", "workers=4", "rounds=3", "data.shared_scoring=60", "data.samples_per_worker=30",
             "data.holdout=120")  # fmt: skip
    over = ["--over", "swarm.social=0..2", "--budget", "6", "--by", "swarm,tpe", "--confirm", "1", "--jobs", "1"]
    words = ["tune", "paper-iid", *(f"--set={setting}" for setting in small), *over, "--out"]
    process = subprocess.Popen([sys.executable, "-m", "cbdsl", *words, "killed"], cwd=tmp_path, stderr=subprocess.PIPE)
    while not list(tmp_path.glob("killed/trials/*/trial.json")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert not (tmp_path / "killed" / "results.jsonl").exists()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cbdsl.studies.sweep.run_pool", run_here)
    for out in ("killed", "whole"):
        done = CliRunner().invoke(app, [*words, out], catch_exceptions=False)
        assert "test set" in done.output
        assert (tmp_path / out / "tuning.html").exists()
    for name in ("results.jsonl", "tuning.json", "best.toml"):
        assert (tmp_path / "killed" / name).read_text() == (tmp_path / "whole" / name).read_text()


def test_without_optuna_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "cbdsl.studies.tune")
    with refused_as("missing-package", "pip install 'cbdsl[tune]'"):
        import_module("cbdsl.studies.tune")


@pytest.mark.parametrize(
    ("words", "code", "fact"),
    [
        (["--over", "swarm.sozial=0..2"], "unknown-setting", "swarm.social"),
        (["--over", "swarm.social=0..2", "--budget", "0"], "out-of-range", "--budget"),
        (["--over", "seed=0..4"], "not-supported", "seed"),
        (["--over", "swarm.social=0..2", "--over", "swarm.social=0..1"], "conflict", "swarm.social"),
        (["--over", "swarm.social=0..2", "--set", "swarm.social=1"], "conflict", "swarm.social"),
        (["--over", "swarm.social=0..2", "--method", "fedavg"], "no-effect", "swarm.social"),
        (["--over", "swarm.social=0..2", "--attack", "alie"], "no-effect", "attack"),
        (["--over", "swarm.social=0..2", "--set", "data.shared_source=none.npz"], "unreadable-file", "none.npz"),
    ],
)
def test_a_command_that_cannot_be_carried_out_leaves_nothing(
    words: list[str], code: str, fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refused_as(code, fact):
        CliRunner().invoke(app, ["tune", "paper-iid", *words], catch_exceptions=False)
    assert list(tmp_path.iterdir()) == []
