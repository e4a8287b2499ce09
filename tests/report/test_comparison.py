from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from browser import widths
from cbdsl.report.comparison import MOST_CURVES, build, draw, drawn, keep
from cbdsl.study.compare import Comparison, group_results
from finished_runs import finished


def many(count: int, out: Path = Path()) -> Comparison:
    return group_results([
        finished([0.2, 0.5 + 0.01 * number], out / f"run {number}", local__epochs=1 + number, seed=seed)
        for number in range(count)
        for seed in (0, 1)
    ])  # fmt: skip


def test_the_figure_has_a_named_line_for_every_group() -> None:
    by_round, by_byte = draw(many(8)).axes
    assert [text.get_text() for text in by_round.texts] == [
        *(f"epochs {number}" for number in range(1, 7)), "- - epochs 7", "- - epochs 8",
    ]  # fmt: skip
    looks = {(line.get_color(), line.get_linestyle()) for line in by_round.lines}
    assert len(looks) == len(by_round.lines) == len(by_byte.lines) == 8


def test_labels_stay_apart_and_inside() -> None:
    figure = draw(many(12))
    axes = figure.axes[0]
    low, high = axes.get_ylim()
    heights = sorted(text.xy[1] for text in axes.texts)  # type: ignore[attr-defined]
    assert low <= heights[0]
    assert heights[-1] <= high
    assert min(b - a for a, b in itertools.pairwise(heights)) >= 0.99 * 0.055 * (high - low)


def test_of_many_groups_the_best_are_drawn_and_the_page_says_so(tmp_path: Path) -> None:
    found = many(MOST_CURVES + 3)
    assert [group.label for group in drawn(found)] == [f"epochs {n}" for n in range(4, MOST_CURVES + 4)]
    text = build(found, keep(found, tmp_path / "figure"), tmp_path, "Runs", "table.csv")
    assert f"The {MOST_CURVES} groups of {MOST_CURVES + 3} that end best." in text


def test_curves_of_other_lengths_and_one_round_alone_can_be_drawn() -> None:
    by_round, _ = draw(group_results([finished([0.5]), finished([0.5, 0.6, 0.7], method="fedavg")])).axes
    assert {text.xy[0] for text in by_round.texts} == {3}  # type: ignore[attr-defined]
    by_round, _ = draw(group_results([finished([0.5])])).axes
    assert [tick for tick in by_round.get_xticks() if 0.9 < tick < 1.1] == [1]


def test_the_page_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    found = group_results([
        finished([0.5, 0.9], tmp_path / "a & b" / "one", data__source="/data/<b>", seed=0),
        finished([0.5, 0.8], tmp_path / "two", data__source="mnist", local__epochs=3, seed=0),
    ])  # fmt: skip
    text = build(found, keep(found, tmp_path / "figure"), tmp_path / "out", "Runs <compared>", "table.csv")
    assert "<b>/data" not in text
    assert "Best at the end: <b>&lt;b&gt;</b>, 90.0 %" in text
    assert '<a href="../a%20%26%20b/one/">one</a>' in text
    assert "which differ in <code>data.source</code> and <code>local.epochs</code>" in text
    assert "data.source /data/&lt;b&gt;, local.epochs 1" in text  # the label names one of the two
    assert "accuracies are not of the same test set" in text
    assert not re.findall(r"""(?:src|href)=["'](?!#|\.\./)[^"']*["']""", text)
    assert "<script" not in text
    assert not re.findall(r"url\((?!#)", text)
    assert text.count("<svg ") == 1
    assert text.count("var(--cb-dsl-g)") > 1


@pytest.mark.parametrize("width", [390, 721, 1280])
def test_the_page_fits_wide_and_narrow_screens(tmp_path: Path, width: int) -> None:
    runs = [
        finished(
            [0.5, 0.9 - 0.03 * seed], tmp_path / f"{index}", 10 ** (5 + index) + 98_765 * seed, model=model,
            data__samples_per_worker=100 + index, data__partition=kind, attack__byzantine=index,
            local__learning_rate=0.01 * (1 + index), seed=seed,
        )
        for index, (model, kind) in enumerate([("cnn", "iid"), ("mlp", "dirichlet"), ("softmax", "similarity")])
        for seed in range(12)
    ]  # fmt: skip
    found = group_results(runs)
    page = tmp_path / "page.html"
    page.write_text(build(found, keep(found, tmp_path / "figure"), tmp_path, "Runs", "table.csv"), encoding="utf-8")
    assert widths(page, tmp_path, width) == (width, width)
