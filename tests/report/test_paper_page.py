"""The page as a reader has it: whole, self-contained, and the same in a real browser."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections import Counter
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from cbdsl.errors import UserError
from cbdsl.report.figures import spread_labels
from cbdsl.report.paper_page import write_reproduction
from cbdsl.studies.paper import EQUAL_WORK, FIGURES, LABELS, PAPER_CLAIMS, ReproductionPlan
from cbdsl.studies.reproduce import list_tasks, run_reproduction
from support.browser import browse, widths

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


def test_how_little_was_run_is_said_first_and_a_figure_comes_before_the_claims(made: Path) -> None:
    page = made.read_text()
    assert '<p class="lead">A quick look: 3 of 10 to 30 rounds, seeds 0 and 1. Not the paper' in page
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


def test_made_again_the_page_is_the_same_and_nothing_is_run_twice(made: Path) -> None:
    folder = made.parent
    stamps = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/summary.json")}
    before = made.read_text()
    (lost,) = list(folder.glob("runs/*"))[:1]
    shutil.rmtree(lost)
    again = write_reproduction(run_reproduction(TINY, folder, jobs=1), "cbdsl reproduce")
    assert again.read_text() == before
    after = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/summary.json")}
    assert {path for path in stamps if after[path] != stamps[path]} == {lost / "summary.json"}


def test_another_plan_does_not_mix_with_this_one(made: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="other seeds, regimes or rounds"):
        run_reproduction(ReproductionPlan(("paper",), (0,), 0.1), made.parent)
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty and not the folder of a reproduction"):
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


def test_a_browser_shows_all_figures_and_claims_and_asks_for_nothing_else(made: Path, tmp_path: Path) -> None:
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002, ARG002 - its name in the library
            asked.append(self.path)

    handler = partial(Handler, directory=str(made.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        shown = browse(f"http://127.0.0.1:{server.server_port}/report.html", tmp_path, "--dump-dom")
        server.shutdown()
    assert shown.count("<figure") == 2 * (len(FIGURES) + 1) + 1
    assert len(re.findall(r'<tr id="claim-', shown)) == len(PAPER_CLAIMS)
    assert asked == ["/report.html"]
    assert "default-src 'none'" in shown  # the browser itself refuses anything from elsewhere


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_wide_and_narrow_screens(made: Path, tmp_path: Path, width: int) -> None:
    assert widths(made, tmp_path, width) == (width, width)
