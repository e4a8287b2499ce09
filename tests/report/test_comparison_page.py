from __future__ import annotations

import csv
import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from markupsafe import escape

from cbdsl.report.comparison_page import (
    MOST_CURVES,
    describe_figure,
    draw,
    draw_figure,
    select_groups,
    tabulate_groups,
    write_comparison_page,
)
from cbdsl.report.figures import SHADES
from cbdsl.report.pages import Drawing
from cbdsl.runs.records import ServerAlone
from cbdsl.studies.compare import Comparison, group_results
from cbdsl.studies.sweep import FinishedRun
from support.browser import widths
from support.finished_runs import make_run


def many(count: int, out: Path = Path()) -> Comparison:
    return group_results([
        make_run([0.2, 0.5 + 0.01 * number], out / f"run {number}", local__epochs=1 + number, seed=seed)
        for number in range(count)
        for seed in (0, 1)
    ])  # fmt: skip


def test_the_figure_has_a_named_line_for_every_group() -> None:
    by_round, by_byte = draw(many(8)).figure.axes
    assert [text.get_text() for text in by_round.texts] == [
        *(f"epochs {number}" for number in range(1, 7)), "- - epochs 7", "- - epochs 8",
    ]  # fmt: skip
    looks = {(line.get_color(), line.get_linestyle()) for line in by_round.lines}
    assert len(looks) == len(by_round.lines) == len(by_byte.lines) == 8


def test_labels_stay_apart_and_inside() -> None:
    axes = draw(many(12)).figure.axes[0]
    low, high = axes.get_ylim()
    heights = sorted(text.xy[1] for text in axes.texts)  # type: ignore[attr-defined]
    assert low <= heights[0]
    assert heights[-1] <= high
    assert min(b - a for a, b in itertools.pairwise(heights)) >= 0.99 * 0.055 * (high - low)


def page_of(comparison: Comparison, out: Path, title: str = "Runs") -> str:
    return write_comparison_page(comparison, out / "page.html", title).read_text(encoding="utf-8")


def test_of_many_groups_the_best_are_drawn() -> None:
    found = many(MOST_CURVES + 3)
    assert [group.label for group in select_groups(found)] == [f"epochs {n}" for n in range(4, MOST_CURVES + 4)]
    assert f"{MOST_CURVES} of {MOST_CURVES + 3} groups" in describe_figure(found)
    assert str(MOST_CURVES) not in describe_figure(many(2))


def test_curves_of_other_lengths_and_one_round_alone_can_be_drawn() -> None:
    by_round, _ = draw(group_results([make_run([0.5]), make_run([0.5, 0.6, 0.7], method="fedavg")])).figure.axes
    assert {text.xy[0] for text in by_round.texts} == {3}  # type: ignore[attr-defined]
    by_round, _ = draw(group_results([make_run([0.5])])).figure.axes
    assert [tick for tick in by_round.get_xticks() if 0.9 < tick < 1.1] == [1]


@pytest.mark.usefixtures("svg_only")
def test_the_page_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    found = group_results([
        make_run([0.5, 0.9], tmp_path / "a & b" / "one", data__source="/data/<b>", seed=0),
        make_run([0.5, 0.8], tmp_path / "two", data__source="mnist", local__epochs=3, seed=0),
    ])  # fmt: skip
    text = page_of(found, tmp_path / "out", "Runs <compared>")
    lead = text.partition('<p class="lead">')[2].partition("</p>")[0]
    assert "<b>&lt;b&gt;</b>, 90.0 %, on one seed" in lead
    assert re.findall("<code>(.*?)</code>", lead) == ["data.source", "local.epochs"]
    assert "<b>/data" not in text
    assert '<a href="../a%20%26%20b/one/">one</a>' in text
    first = tabulate_groups(found).rows[0][0]
    assert (first.text, first.note) == ("<b>", "data.source /data/<b>, local.epochs 1")  # type: ignore[union-attr]
    assert all(f"<li>{escape(note)}</li>" in text for note in found.notes)
    assert len(found.notes) == 1
    assert not re.findall(r"""(?:src|href)=["'](?!#|\.\./|data:text/csv)[^"']*["']""", text)
    assert text.count("<script") == 1
    assert not re.findall(r"url\((?!#)", text)
    assert text.count("<svg ") == 1
    assert text.count("var(--cb-dsl-g)") > 1
    assert 0 < text.index("<figure") < text.index("<table")


@pytest.mark.slow
def test_the_page_fits_wide_and_narrow_screens(tmp_path: Path) -> None:
    runs = [
        make_run(
            [0.5, 0.9 - 0.03 * seed], tmp_path / f"{index}", 10 ** (5 + index) + 98_765 * seed, model=model,
            data__samples_per_worker=100 + index, data__partition=kind, attack__byzantine=index,
            local__learning_rate=0.01 * (1 + index), seed=seed,
        )
        for index, (model, kind) in enumerate([("cnn", "iid"), ("mlp", "dirichlet"), ("softmax", "similarity")])
        for seed in range(12)
    ]  # fmt: skip
    found = group_results(runs)
    page = write_comparison_page(found, tmp_path / "page.html", "Runs")
    for width in (360, 721, 1280):
        assert widths(page, width) == (width, width)


def test_the_papers_approaches_look_the_same_on_every_page() -> None:
    runs = [make_run([0.5, 0.6], method=method) for method in ("fedpso", "fedavg", "cb-dsl")]
    found = group_results(runs)
    named = [replace(group, label=label) for group, label in zip(found.groups, ("x", "FedAvg", "y"), strict=True)]
    by_round = draw(replace(found, groups=tuple(named))).figure.axes[0]
    assert by_round.lines[1].get_color() == SHADES["fedavg"][0]
    assert len({line.get_color() for line in by_round.lines}) == 3


@pytest.mark.usefixtures("svg_only")
def test_the_numbers_of_the_figure_are_beside_it_and_on_the_page(tmp_path: Path) -> None:
    found = many(2)
    figure = draw_figure(found, tmp_path / "figures" / "sweep")
    rows = list(csv.DictReader((tmp_path / "figures" / "sweep.csv").open()))
    assert [row["test_accuracy"] for row in rows] == ["0.2", "0.5", "0.2", "0.5", "0.2", "0.51", "0.2", "0.51"]
    assert [row["uplink_bytes_so_far"] for row in rows[:2]] == ["1000", "2000"]
    assert {row["name"] for row in rows} == {group.label for group in found.groups}
    assert figure.file == "sweep.csv"
    assert figure.numbers.encode() == (tmp_path / "figures" / "sweep.csv").read_bytes()


def with_server_alone(run: FinishedRun, accuracy: float) -> FinishedRun:
    return replace(run, summary=replace(run.summary, server_alone=ServerAlone(accuracy, 350, 12)))


def dashes(drawn: Drawing) -> list[list[float]]:
    """The heights of dashed lines, by panel."""
    return [
        [float(np.asarray(line.get_ydata())[0]) for line in axes.get_lines() if line.get_linestyle() == "--"]
        for axes in drawn.figure.axes
    ]


def test_what_the_server_reaches_alone_is_a_dashed_line_over_the_seeds() -> None:
    runs = [with_server_alone(make_run([0.5, 0.7], Path(f"run{seed}"), seed=seed), 0.6 + 0.1 * seed) for seed in (0, 1)]
    assert dashes(draw(group_results(runs))) == [[pytest.approx(0.65)]] * 2
    others = [with_server_alone(make_run([0.4, 0.5], Path("other"), data__shared_scoring=50), 0.3)]
    assert dashes(draw(group_results([*runs, *others]))) == [[], []]  # other samples: there is no such line for both


def test_a_method_without_messages_has_a_height_instead_of_a_curve_by_bytes() -> None:
    runs = [make_run([0.5, 0.7], Path("swarm")), make_run([0.6, 0.65], Path("alone"), uplink=0, method="server-only")]
    by_round, by_byte = draw(group_results(runs)).figure.axes
    assert [len(axes.get_lines()) for axes in (by_round, by_byte)] == [2, 2]
    assert sorted(len(np.asarray(line.get_xdata())) for line in by_byte.get_lines()) == [2, 2]
    assert [float(np.asarray(line.get_ydata())[-1]) for line in by_byte.get_lines()] == [0.7, 0.65]
