"""The paper's figures, drawn from fresh runs: accuracy by round, accuracy by uploaded byte, weight divergence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter

from cbdsl.report.style import INK, MARKERS, SHADES, dress, new_figure, spread_labels
from cbdsl.study.paper import APPROACHES, DIVERGENCE_FIGURE, EQUAL_WORK, PaperFigure
from cbdsl.study.paper_claims import Evidence
from cbdsl.text import size

LABELS = {key: approach.label for key, approach in APPROACHES.items()} | {EQUAL_WORK: "no D_G, equal steps"}

_TALL = 10.0  # divergence beyond this is drawn on a log scale

Curve = tuple[str, Sequence[float], Sequence[Sequence[float]]]  # approach, x, a row of y for each seed


def draw(figure: PaperFigure, evidence: Evidence, published: bool) -> Figure:
    """One figure of the paper in one regime, with or without the published values."""
    painter = _divergence if figure.number == DIVERGENCE_FIGURE else _accuracy
    return painter(figure, evidence, published)


def _accuracy(figure: PaperFigure, evidence: Evidence, published: bool) -> Figure:
    canvas = new_figure(10.5, 4.3)
    by_round, by_byte = canvas.subplots(1, 2, sharey=True)
    rounds: list[Curve] = []
    uplink: list[Curve] = []
    for approach in figure.approaches:
        runs = evidence.rounds(figure.number, approach)
        accuracy = [[line.test_accuracy for line in run] for run in runs]
        sent = [list(itertools.accumulate(line.uplink_bytes for line in run)) for run in runs]
        rounds.append((approach, [line.round for line in runs[0]], accuracy))
        uplink.append((approach, [fmean(column) for column in zip(*sent, strict=True)], accuracy))
    _plot(by_round, rounds, gap=0.055, labels=True)
    _plot(by_byte, uplink, gap=0.055, labels=False)
    if published:
        _published(by_round, figure, last=len(rounds[0][1]))
    dress(by_round, "by communication round")
    dress(by_byte, "by bytes uploaded, all workers together (log scale)")
    by_round.set_xlabel("communication round")
    by_round.set_ylabel("test accuracy")
    by_byte.set_xlabel("uplink payload")
    by_byte.set_xscale("log")
    by_byte.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value).replace(".0 ", " ")))
    by_byte.xaxis.set_minor_formatter(NullFormatter())
    by_round.set_ylim(0, 1.02)
    by_round.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    by_round.xaxis.set_major_locator(MaxNLocator(integer=True))
    return canvas


def _divergence(figure: PaperFigure, evidence: Evidence, published: bool) -> Figure:
    canvas = new_figure(7.2, 4.3)
    axes = canvas.subplots()
    curves: list[Curve] = [
        (approach, range(1, len(evidence.divergence[approach][0]) + 1), evidence.divergence[approach])
        for approach in (*figure.approaches, EQUAL_WORK)
    ]
    finite = [value for _, _, rows in curves for row in rows for value in row if math.isfinite(value) and value > 0]
    if max(finite) > _TALL:
        axes.set_yscale("log")
        _plot(axes, curves, gap=0.055 * math.log10(max(finite) / min(finite)), labels=True)
    else:
        _plot(axes, curves, gap=0.055 * max(finite), labels=True)
        axes.set_ylim(bottom=0)
    if published:
        _published(axes, figure, last=len(curves[0][1]))
    dress(axes, "median over workers of ‖wᵢ − w genie‖ / ‖w genie‖, until most overflow")
    axes.set_xlabel("communication round")
    axes.set_ylabel("weight divergence")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return canvas


def _plot(axes: Axes, curves: Sequence[Curve], gap: float, labels: bool) -> None:
    """Mean over seeds as a line, the span of the seeds as a band, the approach's name at the line's end."""
    ends = []
    for approach, x, rows in curves:
        colour = SHADES[approach][0]
        columns = list(zip(*rows, strict=True))
        mean = [fmean(column) for column in columns]
        every = max(1, len(mean) // 10)
        axes.plot(x, mean, color=colour, linewidth=2, marker=MARKERS[approach], markersize=5, markevery=every)
        if len(rows) > 1:
            axes.fill_between(
                x, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.18, linewidth=0
            )
        last = max((i for i, value in enumerate(mean) if math.isfinite(value)), default=0)
        ends.append((approach, x[last], mean[last]))
    if labels:
        logarithmic = axes.get_yscale() == "log"  # labels are moved apart as the eye sees them
        heights = spread_labels([math.log10(end[2]) if logarithmic else end[2] for end in ends], gap)
        for (approach, x_end, _), height in zip(ends, heights, strict=True):
            axes.annotate(
                LABELS[approach],
                (x_end, 10**height if logarithmic else height),
                xytext=(9, 0),
                textcoords="offset points",
                va="center",
                color=SHADES[approach][0],
                fontsize=9.5,
                annotation_clip=False,
            )


def _published(axes: Axes, figure: PaperFigure, last: int) -> None:
    """Hollow stars where a value was read off the published plot; a bar where it was a range."""
    at = figure.published_round or last
    if at > last:
        return
    for approach, (low, high) in figure.published.items():
        colour = SHADES[approach][0]
        axes.plot([at, at], [low, high], color=colour, linewidth=1.2)
        axes.plot([at], [(low + high) / 2], marker="*", markersize=13, markerfacecolor="none", markeredgecolor=colour)
    axes.plot(
        [],
        [],
        marker="*",
        markersize=11,
        markerfacecolor="none",
        markeredgecolor=INK,
        linestyle="none",
        label="published",
    )
    axes.legend(frameon=False, loc="lower right" if figure.number != DIVERGENCE_FIGURE else "best", labelcolor=INK)
