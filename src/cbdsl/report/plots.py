"""The figure of a single run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.ticker import MaxNLocator, PercentFormatter

from cbdsl.report.style import SHADES, dress, new_figure
from cbdsl.runs.records import RoundRecord, Summary

_BLUE, _ORANGE = SHADES["cb-dsl-g"][0], SHADES["fedavg"][0]


def save_accuracy_plot(path: Path, summary: Summary, records: Sequence[RoundRecord]) -> None:
    """Test accuracy by round; marks where an upload was refuted, or where everybody uploads, left out."""
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    rounds = [line.round for line in records]
    accuracy = [line.test_accuracy for line in records]
    axes.plot(rounds, accuracy, color=_BLUE, linewidth=2, marker="o", markersize=3.5)
    averaged = summary.conversation == "average"  # earlier versions recorded what was left out as refuted
    marked = [line for line in records if line.refuted or (averaged and line.declined)]
    if marked:
        heights, words = [line.test_accuracy for line in marked], "upload left out" if averaged else "upload refuted"
        axes.plot([line.round for line in marked], heights, "X", color=_ORANGE, markersize=10, label=words)
        axes.legend(frameon=False, loc="lower right")
    end = (rounds[-1], accuracy[-1])
    axes.annotate(f"{end[1]:.1%}", end, xytext=(-6, 8), textcoords="offset points", ha="right", color=_BLUE)
    attack = f", {len(summary.byzantine)} Byzantine" if summary.byzantine else ""
    dress(axes, f"{summary.method}, shared: {summary.shared}, {summary.workers} workers{attack}, seed {summary.seed}")
    axes.set_xlabel("communication round")
    axes.set_ylabel("test accuracy")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=160)
