"""The style of figures, and figures of runs: accuracy curves and partitions.

Colours can be told apart by colour-blind readers; there is one set for light pages and one for dark pages.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter
from numpy.typing import NDArray

from cbdsl.arrays import Indices
from cbdsl.data.partition import Split
from cbdsl.runs.metrics import Metric, Spread, find_metric
from cbdsl.runs.records import RoundRecord, Summary
from cbdsl.studies.sweep import FinishedRun
from cbdsl.util.formatting import format_bytes
from cbdsl.util.memory import require_memory

INK, PALE, PAPER = "#222222", "#d0d0d0", "#ffffff"
TEXT, SMALL = 10.5, 9.5  # points: on a page 14 and 12.7 pixels, as its tables and notes have
_PIXELS, _SHRINKS = 96, 0.75  # of an inch on a page; how far a figure may shrink before it scrolls

# Okabe and Ito's palette, lightened for dark pages. approach -> (light, dark)
SHADES = {
    "fedavg": ("#d55e00", "#ff8a3d"),
    "fedavg-tr": ("#b87900", "#f0b429"),
    "cb-dsl": ("#8a4f7d", "#e09fd0"),
    "cb-dsl-sc": ("#00805f", "#3fd0a8"),
    "cb-dsl-g": ("#0072b2", "#5bb8f5"),
    "cb-dsl-equal": ("#5b6770", "#a7b4be"),
}
MARKERS = {"fedavg": "s", "fedavg-tr": "D", "cb-dsl": "v", "cb-dsl-sc": "^", "cb-dsl-g": "o", "cb-dsl-equal": "x"}

_THEMED = {INK: "--ink", PALE: "--pale", PAPER: "--page"} | {light: f"--{key}" for key, (light, _) in SHADES.items()}


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure that needs no screen."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure


def style_axes(axes: Axes, title: str) -> None:
    """Set a title at the left, a pale grid and no box."""
    axes.set_title(title, loc="left", fontsize=TEXT, color=INK)
    axes.grid(color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_facecolor(PAPER)
    axes.spines[["top", "right"]].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(INK)
    axes.tick_params(colors=INK, labelsize=TEXT)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set(color=INK, fontsize=TEXT)


def save(figure: Figure, stem: Path) -> None:
    """Write a figure as PNG, SVG and PDF; the same figure gives the same bytes."""
    with mpl.rc_context({"svg.hashsalt": "cbdsl", "svg.fonttype": "none", "pdf.fonttype": 42}):
        figure.savefig(stem.with_suffix(".png"), dpi=160, metadata={"Software": None})
        figure.set_layout_engine("none")  # the layout is known now, and takes as long as drawing
        figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
        figure.savefig(stem.with_suffix(".pdf"), metadata={"CreationDate": None, "Producer": None, "Creator": None})


def make_themed_svg(figure: Figure, name: str, description: str) -> str:
    """Return a figure as an SVG element with the page's colours and font, not larger than its text."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
    return theme_svg(buffer.getvalue(), figure, name, description)


def theme_svg(svg: str, figure: Figure, name: str, description: str) -> str:
    """Return the SVG file of a figure as an element of a page, with the page's colours and font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for colour, variable in _THEMED.items():
        svg = svg.replace(colour, f"var({variable})")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{name}-", svg)
    width, height = (_PIXELS * inches for inches in figure.get_size_inches())
    size = f'width="{width:.0f}" height="{height:.0f}" style="min-width:{_SHRINKS * width:.0f}px" '
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt" ', size, svg, count=1)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(description)}" ', 1)


EVERYWHERE = (-math.inf, math.inf)


def spread_labels(heights: list[float], gap: float, within: tuple[float, float] = EVERYWHERE) -> list[float]:
    """Move labels as little as possible until neighbours are at least `gap` apart, and keep them within a span.

    Labels that do not fit into the span go beyond its lower end.
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = list(heights)
    for _ in range(50):
        for lower, upper in itertools.pairwise(order):
            overlap = gap - (placed[upper] - placed[lower])
            if overlap > 1e-9:
                placed[lower] -= overlap / 2
                placed[upper] += overlap / 2
    low, high = within
    for label in order if min(placed, default=low) < low else ():
        placed[label] = max(placed[label], low)
        low = placed[label] + gap
    for label in reversed(order) if max(placed, default=high) > high else ():
        placed[label] = min(placed[label], high)
        high = placed[label] - gap
    return placed


@dataclass(frozen=True, eq=False)
class Curve:
    """One line with its band."""

    label: str
    colour: str
    marker: str
    x: Sequence[float]
    rows: Sequence[Sequence[float]]  # of y, one per seed
    line: str = "-"

    @property
    def mean(self) -> list[float]:
        """Return the mean over seeds."""
        return [fmean(column) for column in zip(*self.rows, strict=True)]


def accuracy_curves(
    label: str, colour: str, marker: str, runs: Sequence[Sequence[RoundRecord]], line: str = "-"
) -> tuple[Curve, Curve]:
    """Return the main metric by round, and by uploaded bytes, as mean over some runs."""
    accuracy = [[record.value for record in run] for run in runs]
    sent = [list(itertools.accumulate(record.uplink_bytes for record in run)) for run in runs]
    rounds = [record.round for record in runs[0]]
    bytes_sent = [fmean(column) for column in zip(*sent, strict=True)]
    return Curve(label, colour, marker, rounds, accuracy, line), Curve(
        label, colour, marker, bytes_sent, accuracy, line
    )


ACCURACY_HEAD = ("name", "seed", "round", "test_accuracy", "uplink_bytes_so_far")


def metric_head(metric: str) -> tuple[str, ...]:
    """Return the heads of the numbers behind the curves of a metric."""
    return tuple(name.replace("accuracy", metric.replace("-", "_")) for name in ACCURACY_HEAD)


def accuracy_rows(name: str, runs: Sequence[FinishedRun]) -> list[tuple[object, ...]]:
    """Return the numbers of some runs' curves, under `metric_head`."""
    return [
        (name, run.spec.seed, record.round, record.value, sent)
        for run in runs
        for record, sent in zip(
            run.rounds, itertools.accumulate(record.uplink_bytes for record in run.rounds), strict=True
        )
    ]


def plot_curves(
    axes: Axes, curves: Sequence[Curve], gap: float, labels: bool, within: tuple[float, float] | None = None
) -> None:
    """Draw curves whose labels are at least a gap apart.

    within: a span of heights for the labels; then all are at the right of the longest curve.
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


def style_accuracy_axes(by_round: Axes, by_byte: Axes, metric: Metric | None = None) -> None:
    """Style axes for a metric, accuracy if None: by round at the left, by bytes at the right."""
    metric = metric or find_metric("accuracy")
    style_axes(by_round, "by communication round")
    style_axes(by_byte, "by bytes uploaded, all workers together (log scale)")
    by_round.set_xlabel("communication round")
    by_round.set_ylabel(describe_axis(metric))
    by_byte.set_xlabel("uplink payload")
    by_byte.set_xscale("log")
    by_byte.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value).replace(".0 ", " ")))
    by_byte.xaxis.set_minor_formatter(NullFormatter())
    if metric.is_share:
        by_round.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    set_integer_ticks(by_round)


def describe_axis(metric: Metric) -> str:
    """Return the label of an axis: the metric and, unless it is obvious, which direction is better."""
    title = metric.title if metric.title.startswith("test ") else f"test {metric.title}"
    return title if metric.is_share else f"{title} ({metric.better} is better)"


def set_integer_ticks(axes: Axes) -> None:
    """Set ticks at whole numbers, even for a single round."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


_BLUE, _ORANGE = SHADES["cb-dsl-g"][0], SHADES["fedavg"][0]


def mean_server_alone(runs: Sequence[FinishedRun]) -> float | None:
    """Return what the server reaches alone, on average over the seeds of some runs; None where it was not measured."""
    found = {run.spec.seed: run.summary.server_alone.value for run in runs if run.summary.server_alone}
    return fmean(found.values()) if found else None


def draw_server_alone(axes: Axes, value: float, metric: Metric | None = None) -> None:
    """Draw what the server reaches without a swarm as a dashed line. metric: accuracy if None."""
    text = (metric or find_metric("accuracy")).text(value, digits=1)
    axes.axhline(value, color=INK, linewidth=1.2, linestyle="--")
    axes.annotate(
        f"server alone (not in the paper) {text}", (0.01, value), xycoords=("axes fraction", "data"),
        xytext=(0, 4), textcoords="offset points", fontsize=SMALL, color=INK,
    )  # fmt: skip


def save_accuracy_plot(path: Path, summary: Summary, records: Sequence[RoundRecord]) -> None:
    """Plot the main metric by round; mark refuted uploads, or with averaging those that were left out."""
    metric = find_metric(summary.metric)
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    rounds = [line.round for line in records]
    values = [line.value for line in records]
    axes.plot(rounds, values, color=_BLUE, linewidth=2, marker="o", markersize=3.5)
    averaged = summary.conversation == "average"  # earlier versions recorded what was left out as refuted
    marked = [line for line in records if line.refuted or (averaged and line.declined)]
    if marked:
        heights, words = [line.value for line in marked], "upload left out" if averaged else "upload refuted"
        axes.plot([line.round for line in marked], heights, "X", color=_ORANGE, markersize=10, label=words)
        axes.legend(frameon=False, loc="lower right")
    if summary.server_alone is not None:
        draw_server_alone(axes, summary.server_alone.value, metric)
    end, alone = (rounds[-1], values[-1]), summary.server_alone
    below = alone is not None and alone.value > end[1]  # so that the dashed line does not cross the number
    if below:
        axes.margins(y=0.1)
    axes.annotate(
        metric.text(end[1], digits=1), end, xytext=(-6, -8 if below else 8), textcoords="offset points", ha="right",
        va="top" if below else "baseline", color=_BLUE,
    )  # fmt: skip
    attack = f", {len(summary.byzantine)} Byzantine" if summary.byzantine else ""
    style_axes(
        axes, f"{summary.method}, shared: {summary.shared}, {summary.workers} workers{attack}, seed {summary.seed}"
    )
    axes.set_xlabel("communication round")
    axes.set_ylabel(describe_axis(metric))
    if metric.is_share:
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=160)


def save_local_test(
    path: Path, summary: Summary, columns: Mapping[str, NDArray[Any]], records: Sequence[RoundRecord]
) -> None:
    """Draw each worker's main metric on held-back samples, the worst first, and by round if it was measured."""
    found = summary.local_test
    assert found is not None
    name = next(iter(found.metrics or found.personal), summary.metric)
    metric = find_metric(name)
    measured = [record for record in records if record.local_test is not None]
    figure = new_figure(7 + 4.5 * bool(measured), 4.2)
    every: list[Axes] = np.atleast_1d(figure.subplots(1, 1 + bool(measured), sharey=True)).tolist()
    kinds = (
        ("global model", _BLUE, "o", name, "metrics"),
        ("own models", _ORANGE, "s", f"personal_{name}", "personal"),
    )
    for label, colour, marker, column, part in kinds:
        if column not in columns:
            continue
        values = columns[column][np.isfinite(columns[column])]
        ordered = np.sort(values) if metric.better == "higher" else np.sort(values)[::-1]
        spread: Spread = getattr(found, part)[name]
        mean, worst = (metric.text(each, digits=1) for each in (spread.mean, spread.worst_tenth))
        text = f"{label}: mean {mean}, worst tenth {worst}"
        every[0].plot(np.arange(1, len(ordered) + 1), ordered, marker, color=colour, markersize=3.5, label=text)
        if spread.mean is not None:
            every[0].axhline(spread.mean, color=colour, linewidth=1.2, linestyle="--")
        for line, statistic in (("-", "mean"), (":", "worst_tenth")) if measured else ():
            points = [getattr(getattr(record.local_test, part)[name], statistic) for record in measured]
            heights = [math.nan if point is None else point for point in points]
            label_by_round = f"{label}, {statistic.replace('_', ' ')}"
            rounds = [record.round for record in measured]
            every[1].plot(rounds, heights, line, color=colour, linewidth=2, label=label_by_round)
    style_axes(every[0], f"{summary.method}: held-back samples of {found.workers:,} workers")
    every[0].set_xlabel("workers, the worst first")
    every[0].set_ylabel(metric.title if metric.is_share else f"{metric.title} ({metric.better} is better)")
    if metric.is_share:
        every[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for axes in every[1:]:
        style_axes(axes, "by communication round")
        axes.set_xlabel("communication round")
    for axes in every:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, fontsize=SMALL)
    figure.savefig(path, dpi=160)


def count_classes(parts: Split, labels: Indices, classes: int) -> Indices:
    """Count the samples of each class per worker, (classes, workers)."""
    require_memory(8 * classes * len(parts.workers), "Counting classes and workers takes", "Ask for fewer workers.")
    columns = [np.bincount(labels[rows], minlength=classes) for rows in parts.workers]
    return np.stack(columns, axis=1).astype(np.int32)


def save_partition(path: Path, counts: Indices, title: str) -> None:
    """Draw samples by class and worker, and above it by worker. counts: (classes, workers)."""
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
