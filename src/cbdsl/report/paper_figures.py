"""The paper's figures, drawn from fresh runs: accuracy by round, accuracy by uploaded byte, weight divergence."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cbdsl.report.curves import Curve, accuracy_curves, dress_accuracy, plot, whole_rounds
from cbdsl.report.style import INK, MARKERS, SHADES, dress, new_figure
from cbdsl.study.paper import APPROACHES, DIVERGENCE_FIGURE, EQUAL_WORK, PaperFigure
from cbdsl.study.paper_claims import Evidence

LABELS = {key: approach.label for key, approach in APPROACHES.items()} | {EQUAL_WORK: "no D_G, equal steps"}

_TALL = 10.0  # divergence beyond this is drawn on a log scale


def draw(figure: PaperFigure, evidence: Evidence, published: bool) -> Figure:
    """One figure of the paper in one regime, with or without the published values."""
    painter = _divergence if figure.number == DIVERGENCE_FIGURE else _accuracy
    return painter(figure, evidence, published)


def _accuracy(figure: PaperFigure, evidence: Evidence, published: bool) -> Figure:
    canvas = new_figure(10.5, 4.3)
    by_round, by_byte = canvas.subplots(1, 2, sharey=True)
    pairs = [
        accuracy_curves(*_look(approach), evidence.rounds(figure.number, approach)) for approach in figure.approaches
    ]
    plot(by_round, [pair[0] for pair in pairs], gap=0.055, labels=True)
    plot(by_byte, [pair[1] for pair in pairs], gap=0.055, labels=False)
    if published:
        _published(by_round, figure, last=len(pairs[0][0].x))
    dress_accuracy(by_round, by_byte)
    by_round.set_ylim(0, 1.02)
    return canvas


def _divergence(figure: PaperFigure, evidence: Evidence, published: bool) -> Figure:
    canvas = new_figure(7.2, 4.3)
    axes = canvas.subplots()
    measured = {approach: evidence.divergence[approach] for approach in (*figure.approaches, EQUAL_WORK)}
    curves = [Curve(*_look(name), range(1, len(rows[0]) + 1), rows) for name, rows in measured.items()]
    finite = [value for curve in curves for row in curve.rows for value in row if math.isfinite(value) and value > 0]
    if max(finite) > _TALL:
        axes.set_yscale("log")
        plot(axes, curves, gap=0.055 * math.log10(max(finite) / min(finite)), labels=True)
    else:
        plot(axes, curves, gap=0.055 * max(finite), labels=True)
        axes.set_ylim(bottom=0)
    if published:
        _published(axes, figure, last=len(curves[0].x))
    dress(axes, "median over workers of ‖wᵢ − w genie‖ / ‖w genie‖, until most overflow")
    axes.set_xlabel("communication round")
    axes.set_ylabel("weight divergence")
    whole_rounds(axes)
    return canvas


def _look(approach: str) -> tuple[str, str, str]:
    return LABELS[approach], SHADES[approach][0], MARKERS[approach]


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
