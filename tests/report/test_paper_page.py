"""The page of a reproduction."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cbdsl.report.figures import spread_labels
from cbdsl.report.paper_page import _format_scale, describe_attackers, describe_regime, write_reproduction
from cbdsl.spec import AttackSpec, Spec
from cbdsl.studies.paper import EQUAL_WORK, FIGURES, FULL_PLAN, LABELS, PAPER_CLAIMS, ReproductionPlan
from cbdsl.studies.reproduce import list_tasks, run_reproduction
from support.browser import tab, widths
from support.refusals import refused_as

pytestmark = pytest.mark.slow

TINY = ReproductionPlan(
    regimes=("paper", "script"),
    seeds=(0, 1),
    rounds_share=0.1,
    settings=(
        ("model", "softmax"),
        ("workers", 5),
        ("data.shared_scoring", 60),
        ("data.shared_training", 30),
        ("data.samples_per_worker", 30),
        ("data.shard_size", 20),
    ),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reproduction(
        run_reproduction(TINY, tmp_path_factory.mktemp("reproduction") / "out", jobs=2), "cbdsl reproduce"
    )


def test_the_page_has_every_figure_and_every_claim(made: Path) -> None:
    page = made.read_text()
    for figure in FIGURES:
        for regime in TINY.regimes:
            assert f'id="figure{figure.number}-{regime}"' in page
    assert page.count("<svg ") == 2 * (len(FIGURES) + 1) + 1
    for claim in PAPER_CLAIMS:
        assert f'id="claim-{claim.id}"' in page


def test_the_page_fetches_nothing(made: Path) -> None:
    page = made.read_text()
    assert not re.findall(
        r"""(?:src|href)=["'](?!#|data:text/csv)[^"']*["']""", page.replace('xlink:href="#', 'href="#')
    )
    assert "@import" not in page
    assert not re.findall(r"url\((?!#)", page)
    assert page.count("<script") == 1


def test_the_size_of_the_runs_comes_first_and_a_figure_before_the_claims(made: Path) -> None:
    page = made.read_text()
    lead = page.partition('<p class="lead">')[2].partition("</p>")[0]
    assert lead.startswith("A quick look: 3 of 10 to 30 rounds, seeds 0 and 1.")
    assert "workers = 5" in lead
    assert 0 < page.index("<figure") < page.index("<table")
    assert all(f"<dt><b>{name}</b></dt>" in page for name in ("D_G", "D_tr", "D_sc", "U"))


def test_a_figures_numbers_have_the_names_of_the_claims(made: Path) -> None:
    rows = list(csv.DictReader((made.parent / "figures" / "figure2-paper.csv").open()))
    assert {row["name"] for row in rows} == {LABELS[approach] for approach in FIGURES[1].approaches}
    assert {row["seed"] for row in rows} == {"0", "1"}
    said = " ".join(row["measured"] for row in json.loads((made.parent / "claims.json").read_text()))
    assert all(LABELS[name] in said for name in ("fedavg", "cb-dsl", "cb-dsl-sc", "cb-dsl-g"))
    assert "cb-dsl" not in said
    divergence = list(csv.DictReader((made.parent / "figures" / "figure5-paper.csv").open()))
    assert {row["name"] for row in divergence} == {LABELS[name] for name in ("cb-dsl", "cb-dsl-g", EQUAL_WORK)}


def test_claims_are_written_with_what_was_measured(made: Path) -> None:
    rows = json.loads((made.parent / "claims.json").read_text())
    assert len(rows) == 2 * len(PAPER_CLAIMS)
    assert all({"id", "claim", "figure", "regime", "verdict", "measured"} <= set(row) for row in rows)


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf", ".csv"])
def test_every_figure_is_a_file_for_a_paper(made: Path, ending: str) -> None:
    names = {path.stem for path in (made.parent / "figures").glob(f"*{ending}")}
    expected = {f"figure{figure.number}-{regime}" for figure in FIGURES for regime in TINY.regimes}
    assert names == expected | {"theorem2-paper", "theorem2-script", "overview"}


def test_made_again_the_results_are_the_same_and_nothing_is_run_twice(made: Path) -> None:
    folder = made.parent
    stamps = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/summary.json")}
    before = (folder / "claims.json").read_bytes()
    (lost,) = list(folder.glob("runs/*"))[:1]
    shutil.rmtree(lost)
    run_reproduction(TINY, folder, jobs=1)
    assert (folder / "claims.json").read_bytes() == before
    after = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/summary.json")}
    assert {path for path in stamps if after[path] != stamps[path]} == {lost / "summary.json"}


def test_another_plan_does_not_mix_with_this_one(made: Path, tmp_path: Path) -> None:
    with refused_as("exists-already", "other seeds"):
        run_reproduction(ReproductionPlan(("paper",), (0,), 0.1), made.parent)
    (tmp_path / "precious.txt").write_text("mine")
    with refused_as("exists-already", "not empty"):
        run_reproduction(TINY, tmp_path)


def test_figures_share_runs_and_theory_brings_its_own_curve() -> None:
    tasks = list_tasks(TINY)
    assert len(tasks) == len(set(tasks))
    # Of the 2 * 2 * 16 runs, those of Figure 5 that no theory replays are watched; equal work has no run of its own.
    assert Counter(task.kind.name for task in tasks) == {"run": 60, "watched": 4, "theory": 4, "divergence": 4}


def test_labels_are_moved_apart_as_little_as_possible() -> None:
    assert spread_labels([0.2, 0.8], 0.1) == [0.2, 0.8]
    low, high = spread_labels([0.50, 0.52], 0.1)
    assert high - low == pytest.approx(0.1)
    assert low + high == pytest.approx(1.02)


def test_a_browser_loads_nothing_but_the_page(made: Path) -> None:
    with tab() as shown:
        shown.open(made.as_uri())
        assert shown.value("performance.getEntriesByType('resource').length") == 0
        assert shown.value("document.querySelectorAll('figure svg').length") == 2 * (len(FIGURES) + 1) + 1
        assert shown.value("document.querySelectorAll('tr[id^=claim-]').length") == len(PAPER_CLAIMS)
        assert shown.value("document.querySelectorAll('th button').length") > 0  # the script is allowed


def test_the_page_fits_wide_and_narrow_screens(made: Path) -> None:
    for width in (360, 1280):
        assert widths(made, width) == (width, width)


def test_regimes_are_described_by_their_presets() -> None:
    assert describe_regime("paper", FULL_PLAN) == "as the text says: one epoch of plain SGD per round"
    assert describe_regime("script", FULL_PLAN).endswith("3 epochs, momentum 0.9, learning rate halved every round")
    changed = ReproductionPlan(("paper",), (0,), 1.0, (("local.epochs", 2),))
    assert describe_regime("paper", changed).endswith("with other settings: 2 epochs of plain SGD per round")


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ((), ("Figures 3 and 4", "1 of 50", "liar (scale 10)")),
        ((("attack.scale", 0.5), ("workers", 8)), ("Figures 3 and 4", "1 of 8", "liar (scale 0.5)")),
        ((("attack.name", "zero"), ("attack.byzantine", 3)), ("Figures 1, 2, 3, 4 and 5", "3 of 50", "zero.")),
    ],
)
def test_the_attackers_are_those_that_were_run(settings: tuple[tuple[str, Any], ...], facts: tuple[str, ...]) -> None:
    found = describe_attackers(ReproductionPlan(("script",), (0,), 1.0, settings))
    assert [fact for fact in facts if fact not in found] == []


def test_no_attackers_are_described_where_there_are_none() -> None:
    assert describe_attackers(ReproductionPlan(("paper",), (0,), 1.0, (("attack.byzantine", 0),))) == ""


def test_an_attack_that_finds_its_own_strength_has_no_scale() -> None:
    assert _format_scale(Spec(attack=AttackSpec("alie"))) == _format_scale(Spec(attack=AttackSpec("mimic"))) == ""
    assert _format_scale(Spec(attack=AttackSpec("alie", scale=1.5))) == " (scale 1.5)"
