"""What an average leaves out is recorded with its reason, and nobody calls it refuted: FedAvg checks no claims."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import cbdsl
from cbdsl.attacks.attack import Attack, AttackContext
from cbdsl.report import figures
from cbdsl.report.figures import new_figure
from cbdsl.runs.records import RoundRecord
from cbdsl.watch.run_state import RunView, ViewerPosition
from support.helpers import blobs, perceptron, small_spec


class Broken(Attack):
    def upload(self, seen: AttackContext) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return np.full_like(seen.model, np.nan)


def played(method: str, folder: Path | None = None, **settings: object) -> cbdsl.Result:
    spec = small_spec(method=method, rounds=2, **settings)
    attack = Broken() if spec.attack.byzantine else None
    return cbdsl.run(spec, model=perceptron, data=blobs(), attack=attack, out=folder, callbacks=[])


@pytest.mark.parametrize("method", ["fedavg", "fedadam", "scaffold"])
def test_averaging_rounds_say_who_was_left_out_and_why(method: str) -> None:
    result = played(method, attack__byzantine=1)
    worker = result.summary.byzantine[0]
    reason = "left out: weights that are not finite"
    for line in result.rounds:
        assert (line.declined, line.refuted, line.banned) == ([worker], [], [])
        assert line.verdicts == [
            {"worker": worker, "outcome": "declined", "claimed": None, "measured": None, "reason": reason}
        ]
        assert line.wasted_bytes == line.uplink_bytes // 6


def test_bytes_that_are_no_model_are_left_out_too() -> None:
    result = played("fedavg", attack__byzantine=1, codec__up="q8")
    for line in result.rounds:
        assert [one["worker"] for one in line.verdicts] == line.declined == result.summary.byzantine
        assert line.verdicts[0]["reason"].startswith("left out: ")


def test_an_average_that_leaves_nothing_out_has_no_verdicts() -> None:
    assert [(line.verdicts, line.declined) for line in played("fedavg").rounds] == [([], [])] * 2


def test_the_summary_says_left_out_of_averages_alone() -> None:
    assert "of uploads that were left out" in str(played("fedavg", attack__byzantine=1))
    lied = cbdsl.run(small_spec(attack__byzantine=1, rounds=2), model=perceptron, data=blobs(), callbacks=[])
    assert "of uploads that were refuted or declined" in str(lied)


def legend_of(
    result: cbdsl.Result, lines: Sequence[RoundRecord], path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The words of the figure's legend."""
    figure = new_figure(7, 4.2)
    monkeypatch.setattr(figures, "new_figure", lambda *_: figure)
    figures.save_accuracy_plot(path / "accuracy.png", result.summary, lines)
    legend = figure.axes[0].get_legend()
    return [text.get_text() for text in legend.get_texts()] if legend else []


def test_the_figure_says_left_out_of_averages_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    averaged = played("fedavg", attack__byzantine=1)
    assert legend_of(averaged, averaged.rounds, tmp_path, monkeypatch) == ["upload left out"]
    lied = cbdsl.run(small_spec(attack__byzantine=1, rounds=2), model=perceptron, data=blobs(), callbacks=[])
    assert legend_of(lied, lied.rounds, tmp_path, monkeypatch) == ["upload refuted"]
    clean = played("fedavg")
    assert legend_of(clean, clean.rounds, tmp_path, monkeypatch) == []


def test_folders_of_earlier_versions_which_said_refuted_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = played("fedavg", tmp_path / "run", attack__byzantine=1)
    path = tmp_path / "run" / "rounds.jsonl"
    earlier = [json.loads(line) for line in path.read_text().splitlines()]
    for line in earlier:
        line["refuted"], line["declined"], line["verdicts"] = line["declined"], [], []
    path.write_text("".join(json.dumps(line) + "\n" for line in earlier))
    lines = cbdsl.resume(tmp_path / "run", model=perceptron, data=blobs(), attack=Broken(), callbacks=[]).rounds
    assert [line.refuted for line in lines] == [result.summary.byzantine] * 2
    assert legend_of(result, lines, tmp_path, monkeypatch) == ["upload left out"]
    view = RunView(tmp_path / "run")
    assert view.collect_news(ViewerPosition())[0]["verdicts"] == []
    assert view.progress.counts[result.summary.byzantine[0]].refuted == 2


def test_the_page_shows_who_was_left_out(tmp_path: Path) -> None:
    result = played("fedavg", tmp_path / "run", attack__byzantine=1)
    view = RunView(tmp_path / "run")
    worker = result.summary.byzantine[0]
    shown = [str(worker), "declined", None, None, "left out: weights that are not finite"]
    assert view.collect_news(ViewerPosition())[0]["verdicts"] == [shown]
    assert (view.progress.counts[worker].declined, view.progress.counts[worker].ban) == (2, "")
