"""Curves over seeds: the mean as a line, the span of the seeds as a band, the name at the line's end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter

from cbdsl.report.style import EVERYWHERE, SMALL, dress, spread_labels
from cbdsl.runs.records import RoundRecord
from cbdsl.study.sweep import Finished
from cbdsl.text import size


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


def accuracy_rows(name: str, runs: Sequence[Finished]) -> list[tuple[object, ...]]:
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
    by_byte.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value).replace(".0 ", " ")))
    by_byte.xaxis.set_minor_formatter(NullFormatter())
    by_round.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    whole_rounds(by_round)


def whole_rounds(axes: Axes) -> None:
    """Ticks at whole numbers alone, even if there is one round only."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
