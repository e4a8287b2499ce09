"""Figures of single runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from cbdsl.records import RoundRecord, Summary

_BLUE, _ORANGE, _INK, _PALE = "#0072B2", "#D55E00", "#222222", "#D0D0D0"  # Okabe and Ito: safe for colour-blind readers


def save_accuracy_plot(path: Path, summary: Summary, records: Sequence[RoundRecord]) -> None:
    """Test accuracy by round; marks where an upload was refuted."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rounds = [line.round for line in records]
    accuracy = [line.test_accuracy for line in records]
    axes.plot(rounds, accuracy, color=_BLUE, linewidth=2, marker="o", markersize=3.5)
    refuted = [line for line in records if line.refuted]
    if refuted and summary.method != "fedavg":
        heights = [line.test_accuracy for line in refuted]
        axes.plot([line.round for line in refuted], heights, "X", color=_ORANGE, markersize=10, label="upload refuted")
        axes.legend(frameon=False, loc="lower right")
    axes.annotate(
        f"{accuracy[-1]:.1%}",
        (rounds[-1], accuracy[-1]),
        xytext=(-6, 8),
        textcoords="offset points",
        ha="right",
        color=_BLUE,
    )
    attack = f", {len(summary.byzantine)} Byzantine" if summary.byzantine else ""
    axes.set_title(
        f"{summary.method}, shared: {summary.shared}, {summary.workers} workers{attack}, seed {summary.seed}",
        loc="left",
        fontsize=11,
        color=_INK,
    )
    axes.set_xlabel("communication round")
    axes.set_ylabel("test accuracy")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color=_PALE, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)
