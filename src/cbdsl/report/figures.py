"""Figures of runs: accuracy curves and partitions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter

from cbdsl.arrays import Indices
from cbdsl.data.partition import Split
from cbdsl.report.style import EVERYWHERE, INK, PALE, SHADES, SMALL, dress, new_figure, spread_labels
from cbdsl.runs.records import RoundRecord, Summary
from cbdsl.studies.sweep import FinishedRun
from cbdsl.util.formatting import format_bytes
from cbdsl.util.memory import require_memory


@dataclass(frozen=True, eq=False)
class Curve:
    """One line with its band."""

    label: str
    colour: str
    marker: str
    x: Sequence[float]
    rows: Sequence[Sequence[float]]  # of y, one a seed
    line: str = "-"

    @property
    def mean(self) -> list[float]:
        """The mean over seeds."""
        return [fmean(column) for column in zip(*self.rows, strict=True)]


def accuracy_curves(
    label: str, colour: str, marker: str, runs: Sequence[Sequence[RoundRecord]], line: str = "-"
) -> tuple[Curve, Curve]:
    """Test accuracy of some runs by round, and by the bytes that were uploaded until then, on average over the runs."""
    accuracy = [[record.test_accuracy for record in run] for run in runs]
    sent = [list(itertools.accumulate(record.uplink_bytes for record in run)) for run in runs]
    rounds = [record.round for record in runs[0]]
    bytes_sent = [fmean(column) for column in zip(*sent, strict=True)]
    return Curve(label, colour, marker, rounds, accuracy, line), Curve(
        label, colour, marker, bytes_sent, accuracy, line
    )


ACCURACY_HEAD = ("name", "seed", "round", "test_accuracy", "uplink_bytes_so_far")


def accuracy_rows(name: str, runs: Sequence[FinishedRun]) -> list[tuple[object, ...]]:
    """The numbers behind some runs' accuracy curves, under `ACCURACY_HEAD`."""
    return [
        (name, run.spec.seed, record.round, record.test_accuracy, sent)
        for run in runs
        for record, sent in zip(
            run.rounds, itertools.accumulate(record.uplink_bytes for record in run.rounds), strict=True
        )
    ]


def plot(
    axes: Axes, curves: Sequence[Curve], gap: float, labels: bool, within: tuple[float, float] | None = None
) -> None:
    """Draw curves; labels stay apart by a gap.

    within: a span of heights that labels keep to; then all stand at the right, behind the longest curve.
    """
    ends = []
    for curve in curves:
        mean = curve.mean
        every = max(1, len(mean) // 10)
        axes.plot(
            curve.x, mean, color=curve.colour, linewidth=2, linestyle=curve.line,
            marker=curve.marker, markersize=5, markevery=every,
        )  # fmt: skip
        if len(curve.rows) > 1:
            columns = list(zip(*curve.rows, strict=True))
            lowest, highest = list(map(min, columns)), list(map(max, columns))
            axes.fill_between(curve.x, lowest, highest, color=curve.colour, alpha=0.18, linewidth=0)
        last = max((i for i, value in enumerate(mean) if math.isfinite(value)), default=0)
        ends.append((curve, curve.x[last], mean[last]))
    if labels:
        logarithmic = axes.get_yscale() == "log"  # labels are moved apart as the eye sees them
        heights = spread_labels(
            [math.log10(end[2]) if logarithmic else end[2] for end in ends], gap, within or EVERYWHERE
        )
        right = max(end[1] for end in ends)
        for (curve, x_end, _), height in zip(ends, heights, strict=True):
            axes.annotate(
                curve.label,
                (right if within else x_end, 10**height if logarithmic else height),
                xytext=(9, 0),
                textcoords="offset points",
                va="center",
                color=curve.colour,
                fontsize=SMALL,
                annotation_clip=False,
            )


def dress_accuracy(by_round: Axes, by_byte: Axes) -> None:
    """Axes for accuracy: rounds at the left, bytes at the right."""
    dress(by_round, "by communication round")
    dress(by_byte, "by bytes uploaded, all workers together (log scale)")
    by_round.set_xlabel("communication round")
    by_round.set_ylabel("test accuracy")
    by_byte.set_xlabel("uplink payload")
    by_byte.set_xscale("log")
    by_byte.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value).replace(".0 ", " ")))
    by_byte.xaxis.set_minor_formatter(NullFormatter())
    by_round.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    whole_rounds(by_round)


def whole_rounds(axes: Axes) -> None:
    """Ticks at whole numbers alone, even if there is one round only."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


_PLOT_BLUE, _ORANGE = SHADES["cb-dsl-g"][0], SHADES["fedavg"][0]


def save_accuracy_plot(path: Path, summary: Summary, records: Sequence[RoundRecord]) -> None:
    """Test accuracy by round; marks where an upload was refuted, or where everybody uploads, left out."""
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    rounds = [line.round for line in records]
    accuracy = [line.test_accuracy for line in records]
    axes.plot(rounds, accuracy, color=_PLOT_BLUE, linewidth=2, marker="o", markersize=3.5)
    averaged = summary.conversation == "average"  # earlier versions recorded what was left out as refuted
    marked = [line for line in records if line.refuted or (averaged and line.declined)]
    if marked:
        heights, words = [line.test_accuracy for line in marked], "upload left out" if averaged else "upload refuted"
        axes.plot([line.round for line in marked], heights, "X", color=_ORANGE, markersize=10, label=words)
        axes.legend(frameon=False, loc="lower right")
    end = (rounds[-1], accuracy[-1])
    axes.annotate(f"{end[1]:.1%}", end, xytext=(-6, 8), textcoords="offset points", ha="right", color=_PLOT_BLUE)
    attack = f", {len(summary.byzantine)} Byzantine" if summary.byzantine else ""
    dress(axes, f"{summary.method}, shared: {summary.shared}, {summary.workers} workers{attack}, seed {summary.seed}")
    axes.set_xlabel("communication round")
    axes.set_ylabel("test accuracy")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=160)


_BLUE = SHADES["cb-dsl-g"][0]


def class_counts(parts: Split, labels: Indices, classes: int) -> Indices:
    """Samples of each class with each worker, (classes, workers)."""
    require_memory(8 * classes * len(parts.workers), "Counting classes and workers takes", "Ask for fewer workers.")
    columns = [np.bincount(labels[rows], minlength=classes) for rows in parts.workers]
    return np.stack(columns, axis=1).astype(np.int32)


def save_partition(path: Path, counts: Indices, title: str) -> None:
    """Draw workers against classes, and above it how many samples each worker holds. counts: (classes, workers)."""
    classes, workers = counts.shape
    figure = new_figure(8, 2.4 + min(3.2, 0.28 * classes))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2.4))
    above.stairs(counts.sum(axis=0), np.arange(workers + 1) - 0.5, fill=True, color=_BLUE)
    above.set_ylabel("samples")
    above.set_title(title, loc="left", fontsize=10, color=INK)
    above.spines[["top", "right"]].set_visible(False)
    shown = below.imshow(counts, aspect="auto", cmap="Blues", interpolation="nearest", vmin=0)
    below.set_xlabel("worker")
    below.set_ylabel("class")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.yaxis.set_major_locator(MaxNLocator(integer=True))
    bar = figure.colorbar(shown, ax=below, label="samples of the class")
    bar.outline.set_edgecolor(PALE)
    figure.savefig(path, dpi=160)
