"""The study `budget`: the server has what its point says, every way is what its label says, and the gain is paired."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from cbdsl.report.budget_page import draw_budget
from cbdsl.studies.label_budget import (
    BUDGET_DATA,
    BUDGETS,
    LABELS,
    BudgetPlan,
    BudgetStudy,
    budget_table,
    list_available,
)
from cbdsl.studies.sweep import FinishedRun
from support.finished_runs import make_run
from support.helpers import cbdsl
from support.refusals import refused_as


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_budget_counts_all_labelled_samples_of_the_server(budget: int) -> None:
    assert sum(BUDGETS[budget]) == budget
    for way in LABELS:
        data = BudgetPlan().spec("iid", way, budget, seed=3).data
        assert (data.shared_training, data.shared_scoring, data.holdout) == BUDGETS[budget]


@pytest.mark.parametrize("data", BUDGET_DATA)
def test_all_ways_of_a_point_have_the_same_data_model_and_optimiser(data: str) -> None:
    specs = [BudgetPlan().spec(data, way, 250, seed=1) for way in LABELS]
    assert len({(spec.data, spec.model, spec.local, spec.seed) for spec in specs}) == 1
    assert len({spec.key() for spec in specs}) == len(LABELS)


def test_the_server_alone_has_sixty_epochs_at_most_and_all_it_has() -> None:
    spec = BudgetPlan().spec("iid", "server-only", 100, 0)
    assert spec.rounds * spec.local.epochs == 60
    assert spec.options.of("server-only") == {"use": "all"}


def test_the_ceiling_is_run_once_per_seed_and_the_first_seed_comes_first() -> None:
    points = BudgetPlan(data=("iid",), seeds=(0, 1)).points()
    assert [point for point in points if point[1] == "central"] == [("iid", "central", 2150, seed) for seed in (0, 1)]
    assert [seed for *_, seed in points] == sorted(seed for *_, seed in points)
    assert len(set(points)) == len(points) == 2 * (4 * 4 + 1)


def finished(accuracy: float, folder: Path) -> FinishedRun:
    return make_run([accuracy], folder)


@pytest.fixture
def study(tmp_path: Path) -> BudgetStudy:
    plan = BudgetPlan(data=("iid",), seeds=(0, 1), budgets=(100, 250))
    level = {"server-only": 0.70, "fedavg-tr": 0.8, "cb-dsl": 0.75, "rotation": 0.85, "central": 0.9}
    runs = {
        point: finished(level[point[1]] + 0.01 * point[3] * (point[1] == "rotation"), tmp_path / str(number))
        for number, point in enumerate(plan.points())
    }
    return BudgetStudy(plan, runs)


def test_the_gain_is_paired_by_seed(study: BudgetStudy) -> None:
    gain = study.gain("iid", 100)
    assert gain.mean == pytest.approx(0.155)
    assert gain.deviation == pytest.approx(0.01 / 2**0.5)


def test_the_table_has_a_row_per_point_and_the_ceiling_in_each(study: BudgetStudy) -> None:
    heads, rows = budget_table(study)
    assert [row[1] for row in rows] == ["100", "250"]
    assert [row[heads.index("all data in one place")] for row in rows] == ["90.0 ± 0 %"] * 2
    assert rows[0][-1].startswith("+15.5")


def test_the_figure_has_the_numbers_of_every_run(study: BudgetStudy) -> None:
    drawn = draw_budget(study)
    assert len(drawn.rows) == len(study.runs)
    (axes,) = drawn.figure.axes
    assert [line.get_linestyle() for line in axes.get_lines()].count("--") == 2


def test_data_that_are_not_here_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert list_available(("iid", "hapt")) == (("iid",), ("hapt",))


def test_unknown_data_are_refused() -> None:
    with refused_as("unknown-name", "iris"):
        list_available(("iris",))


@pytest.mark.slow
def test_the_command_leaves_a_folder_and_goes_on_where_it_was(tmp_path: Path) -> None:
    words = ("study", "budget", "--data", "iid", "--quick", "--jobs", "2", "--out", "study")
    small = [word for text in ("model=softmax", "workers=4", "data.samples_per_worker=20") for word in ("--set", text)]
    first = cbdsl(*words, *small, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    with (tmp_path / "study" / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9
    assert json.loads((tmp_path / "study" / "study.json").read_text())["budgets"] == [100, 250]
    runs = {path: path.stat().st_mtime_ns for path in (tmp_path / "study").glob("runs/*/summary.json")}
    assert cbdsl(*words, *small, cwd=tmp_path).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in runs} == runs
    assert "server alone" in (tmp_path / "study" / "study.html").read_text()
    cbdsl(*words, "--clean", cwd=tmp_path).check_refused("no-effect", "--clean")
