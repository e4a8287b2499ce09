"""A study on the field's data: the right runs under the right names, a table and a page, and nothing played twice."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cbdsl.data import download
from cbdsl.presets import preset
from cbdsl.report.comparison_page import write_study_page
from cbdsl.runs.resolve import resolve
from cbdsl.studies.benchmark_datasets import (
    ATTACK,
    BENCHMARKS,
    STUDY_METHODS,
    Study,
    StudyEntry,
    StudyPlan,
    describe_study,
    markdown_table,
    run_study,
    study_table,
)
from cbdsl.studies.sweep import FinishedRun
from support.finished_runs import make_run
from support.helpers import cbdsl
from support.refusals import refused_as

TINY = {
    "model": "softmax", "workers": 8, "rounds": 2, "data.samples_per_worker": 20, "data.shared_training": 20,
    "data.shared_scoring": 60, "data.holdout": 40, "local.epochs": 1,
}  # fmt: skip


@pytest.fixture
def windows(tmp_path: Path) -> str:
    """Made-up windows of ten people, in three classes that a line tells apart."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 900)
    features = np.eye(3)[labels][:, :, None] + 0.5 * rng.normal(size=(900, 3, 4))
    arrays = {
        "train_features": features[:700], "train_labels": labels[:700], "train_clients": np.arange(700) % 10,
        "test_features": features[700:], "test_labels": labels[700:],
    }  # fmt: skip
    np.savez(tmp_path / "windows.npz", **arrays)  # type: ignore[arg-type]
    return str(tmp_path / "windows.npz")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_study_starts_from_the_preset_of_its_name(name: str) -> None:
    start = preset(name)
    plan = StudyPlan(name)
    specs = plan.specs()
    assert plan.start == start
    assert resolve(start) in [replace(spec, attack=start.attack) for spec in specs]  # the preset is one of the runs
    assert len({spec.key() for spec in specs}) == len(specs) == len(STUDY_METHODS) * 3 * 2
    assert {spec.rounds for spec in specs} == {start.rounds}
    assert {spec.data for spec in specs} == {start.data}  # at one seed everybody sees the same samples
    assert {spec.attack.byzantine for spec in specs} == {0, BENCHMARKS[name].attackers}
    assert 0.08 <= BENCHMARKS[name].attackers / start.workers <= 0.12
    assert BENCHMARKS[name].in_turn < start.workers


def test_a_way_is_what_its_label_says() -> None:
    plan = StudyPlan("hapt")
    average = plan.spec("fedavg-tr", attacked=False, seed=1)
    assert (average.method, average.shared, average.seed, average.attack.byzantine) == ("fedavg", "train", 1, 0)
    swarm = plan.spec("cb-dsl", attacked=True, seed=0)
    assert (swarm.method, swarm.shared, swarm.selection.name, swarm.defence.guard) == ("cb-dsl", "both", "best", False)
    assert (swarm.attack.name, swarm.attack.scale) == (ATTACK["attack.name"], ATTACK["attack.scale"])
    turns = plan.spec("rotation", attacked=True, seed=0)
    assert (turns.method, turns.selection.name, turns.selection.k) == (
        "restart",
        "rotation",
        BENCHMARKS["hapt"].in_turn,
    )
    assert (turns.defence.guard, turns.defence.commitment, turns.codec.up, turns.codec.down) == (True, True, "q4", "q4")
    assert [plan.spec(way, attacked=False, seed=0).shared for way in STUDY_METHODS] == [
        "none",
        *["train"] * 3,
        "both",
        "both",
    ]


def test_a_quick_look_says_so_first() -> None:
    plan = StudyPlan("hapt", seeds=(0,), quick=True)
    assert plan.start.rounds < preset("hapt").rounds
    assert describe_study(plan).startswith(f"A quick look, not a result: {plan.start.rounds} of ")
    assert "one seed (0)" in describe_study(plan)
    assert not describe_study(StudyPlan("hapt")).startswith("A quick look")
    short = describe_study(StudyPlan("hapt", settings={"rounds": 2}))
    assert "Not the preset: rounds = 2." in short
    assert short.startswith("A quick look, not a result: 2 of ")
    assert describe_study(StudyPlan("hapt", seeds=(0,))).startswith(
        "A quick look, not a result: 30 rounds, one seed (0)."
    )


def test_what_is_not_there_is_named() -> None:
    with refused_as("unknown-name", "mnist", "hapt"):
        StudyPlan("mnist")
    with refused_as("unknown-name", "fedsgd", "fedavg-tr"):
        StudyPlan("hapt", ways=("fedsgd",))
    with refused_as("out-of-range"):
        StudyPlan("hapt", ways=())


def test_the_table_has_means_shares_and_bans() -> None:
    def runs(method: str, uplink: int, attackers: int) -> tuple[FinishedRun, ...]:
        return tuple(
            make_run([0.5, 0.8 + 0.1 * seed], uplink=uplink, method=method, seed=seed, attack__byzantine=attackers)
            for seed in (0, 1)
        )

    entries = (
        StudyEntry("FedAvg", runs("fedavg", 1000, 0), runs("fedavg", 1000, 2)),
        StudyEntry("CB-DSL + D_G", runs("cb-dsl", 10, 0), runs("cb-dsl", 10, 2)),
    )
    for entry in entries:
        for run in (*entry.clean, *entry.attacked):
            object.__setattr__(run.summary, "fedavg_model_uplink_bytes", 2000)
            object.__setattr__(run.summary, "banned", [3, 4] if run.spec.attack.byzantine else [])
            object.__setattr__(run.summary, "honest_banned", 1 if run.spec.attack.byzantine else 0)
            if run.spec.method == "fedavg":
                object.__setattr__(run.summary, "conversation", "average")
    study = Study(StudyPlan("hapt", seeds=(0, 1), ways=("fedavg", "cb-dsl")), entries)
    heads, rows = study_table(study)
    assert heads == ("", "clean", "attacked", "banned", "uplink", "of FedAvg's", "both ways")
    assert rows[0] == ("FedAvg", "85.0 ± 7.1 %", "85.0 ± 7.1 %", "–", "2.0 kB", "100.0 %", "6.0 kB")
    assert rows[1][3:] == ("2 of 4, and 2 honest", "20 B", "1.0 %", "60 B")
    assert markdown_table(study).splitlines()[1] == "| " + " | ".join(["---"] * 7) + " |"
    clean = Study(
        StudyPlan("hapt", seeds=(0, 1), attacked=False), tuple(StudyEntry(e.label, e.clean, ()) for e in entries)
    )
    assert study_table(clean)[0] == ("", "clean", "uplink", "of FedAvg's", "both ways")


@pytest.mark.slow
def test_a_study_leaves_a_folder_that_explains_itself_and_goes_on(tmp_path: Path, windows: str) -> None:
    settings = {**TINY, "data.source": windows}
    del settings["data.samples_per_worker"]  # it is by client
    out = tmp_path / "out"
    part = run_study(
        StudyPlan("hapt", (0,), ("fedavg", "cb-dsl", "rotation"), attacked=False, settings=settings), out, 1
    )
    stamps = {run.folder: (run.folder / "summary.json").stat().st_mtime_ns for run in part.runs}
    assert len(stamps) == 3
    whole = run_study(StudyPlan("hapt", (0, 1), ("fedavg", "cb-dsl", "rotation"), settings=settings), out, 1)
    assert len(whole.runs) == 12
    assert {run.folder: (run.folder / "summary.json").stat().st_mtime_ns for run in part.runs} == stamps
    assert whole.entries[1].share < 0.2
    page = write_study_page(whole, out, "cbdsl study hapt")
    text = page.read_text(encoding="utf-8")
    for label in ("FedAvg", "CB-DSL + D_G", "verified rotation"):
        assert label.replace(" ", "\u00a0") in text
    assert "drawn from the training set first" in text
    assert 0 < text.index("<figure") < text.index("<table")
    assert re.search(r"A quick look, not a result: 2 of \d+ rounds, seeds 0, 1\.\s+Highest without attackers", text)
    assert all(f'href="runs/{run.folder.name}/"' in text for run in whole.runs)
    rows = list(csv.DictReader((out / "results.csv").open()))
    assert len(rows) == 12
    assert {row["way"] for row in rows} == {"fedavg", "cb-dsl", "rotation"}
    assert all((out / row["folder"] / "spec.toml").exists() for row in rows)
    assert json.loads((out / "study.json").read_text())["name"] == "hapt"
    assert (out / "table.md").read_text().startswith(describe_study(whole.plan))
    assert {path.name for path in (out / "figures").iterdir()} == {
        f"study.{ending}" for ending in ("png", "svg", "pdf", "csv")
    }


def test_without_the_data_one_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing"))
    for words in (("run", "hapt"), ("study", "hapt"), ("study", "fashion"), ("run", "cifar10")):
        done = cbdsl(*words, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        source = preset(words[1]).data.source
        assert done.stderr.strip().endswith(f"Fetch it once: cbdsl data fetch {source}")
        assert done.stderr.count("data fetch") == 1


@pytest.mark.usefixtures("svg_only")
def test_the_command_prints_the_table_and_the_page(tmp_path: Path, windows: str) -> None:
    settings = {**TINY, "data.source": windows, "data.partition": "iid"}
    chosen = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    words = ("study", "fashion", "--quick", "--clean", "--ways", "fedavg-tr,cb-dsl", *chosen, "--jobs", "1")
    done = cbdsl(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("A quick look, not a result: 2 of ")
    assert lines[-1] == "page: study-fashion-quick/study.html"
    assert [line.split("  ")[0] for line in lines[2:-1]] == ["FedAvg + D_tr", "CB-DSL + D_G"]
    text = (tmp_path / "study-fashion-quick" / "study.html").read_text()
    assert '<p class="lead">A quick look, not a result' in text


def test_its_help_names_the_studies_and_the_ways(tmp_path: Path) -> None:
    said = " ".join(cbdsl("study", "--help", cwd=tmp_path).stdout.replace("│", " ").split())
    assert all(name in said for name in (*BENCHMARKS, *STUDY_METHODS))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_preset_runs_on_the_real_data(name: str, tmp_path: Path) -> None:
    source = preset(name).data.source
    if not download.cached_file(source).is_file():
        pytest.skip(f"fetch it first: cbdsl data fetch {source}")
    small = ["--set", "local.steps=1", "--model", "softmax", "--rounds", "1"]
    done = cbdsl("run", name, *small, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["workers"] == preset(name).workers
