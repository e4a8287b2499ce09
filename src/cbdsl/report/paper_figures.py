"""The paper's figures, drawn from fresh runs, and one of them all: how every approach ended, beside the published."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from cbdsl.report.curves import (
    ACCURACY_HEAD,
    Curve,
    accuracy_curves,
    accuracy_rows,
    dress_accuracy,
    plot,
    whole_rounds,
)
from cbdsl.report.drawing import Drawing
from cbdsl.report.style import INK, MARKERS, SHADES, TEXT, dress, new_figure
from cbdsl.study.paper import DIVERGENCE_FIGURE, EQUAL_WORK, FIGURES, LABELS, PaperFigure
from cbdsl.study.paper_claims import DIVERGED, Evidence, diverged

_TALL = 10.0  # divergence beyond this is drawn on a log scale


def draw(figure: PaperFigure, evidence: Evidence, published: bool) -> Drawing:
    """One figure of the paper in one regime, with or without the published values."""
    painter = _divergence if figure.number == DIVERGENCE_FIGURE else _accuracy
    return painter(figure, evidence, published)


def _accuracy(figure: PaperFigure, evidence: Evidence, published: bool) -> Drawing:
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
    rows = [
        row
        for approach in figure.approaches
        for row in accuracy_rows(LABELS[approach], evidence.runs[figure.number, approach])
    ]
    return Drawing(canvas, ACCURACY_HEAD, rows)


def _divergence(figure: PaperFigure, evidence: Evidence, published: bool) -> Drawing:
    canvas = new_figure(8.4, 4.3)
    axes = canvas.subplots()
    measured = {approach: evidence.divergence[approach] for approach in (*figure.approaches, EQUAL_WORK)}
    curves = [
        Curve(
            LABELS[name] + ": diverged" * any(map(diverged, evidence.final_divergence(name))),
            *_look(name)[1:],
            range(1, len(rows[0]) + 1),
            rows,
        )
        for name, rows in measured.items()
    ]
    seen = [value for curve in curves for row in curve.rows for value in row if math.isfinite(value) and value > 0]
    finite = [min(value, DIVERGED) for value in seen]
    if max(finite) > _TALL:
        axes.set_yscale("log")
        span = (math.log10(min(finite)), math.log10(max(finite)))
        plot(axes, curves, gap=0.055 * (span[1] - span[0]), labels=True, within=span)
        axes.set_ylim(min(finite) / 1.2, max(finite) * 1.2)
    else:
        plot(axes, curves, gap=0.055 * max(finite), labels=True)
        axes.set_ylim(0, 1.08 * max(finite))
    if published:
        _published(axes, figure, last=len(curves[0].x))
    dress(axes, "median over workers of ‖wᵢ − w genie‖ / ‖w genie‖")
    axes.set_xlabel("communication round")
    axes.set_ylabel("weight divergence")
    whole_rounds(axes)
    seeds = [run.spec.seed for run in evidence.runs[figure.number, figure.approaches[0]]]
    rows = [
        (LABELS[name], seed, number, value)
        for name, found in measured.items()
        for seed, curve in zip(seeds, found, strict=True)
        for number, value in enumerate(curve, 1)
    ]
    return Drawing(canvas, ("name", "seed", "round", "weight_divergence"), rows)


_REGIME_MARKERS = {"paper": "o", "script": "D"}
_ENDS = FIGURES[: DIVERGENCE_FIGURE - 1]  # those that show accuracy


def overview(evidence: Sequence[Evidence], published: bool) -> Drawing:
    """Where every approach of every figure ended up, beside the published value, at the round where that was read."""
    canvas = new_figure(10.5, 5.2)
    panels = canvas.subplots(2, 2, sharex=True, height_ratios=(5, 3))
    rows = []
    for axes, figure in zip(panels.flat, _ENDS, strict=True):
        for height, approach in enumerate(figure.approaches):
            colour = SHADES[approach][0]
            for place, item in enumerate(evidence):
                level = height + (0.3 * place - 0.15) * (
                    len(evidence) > 1
                )  # so that two regimes do not hide each other
                runs = item.rounds(figure.number, approach)
                at = min(figure.published_round or len(runs[0]), len(runs[0]))
                values = [run[at - 1].test_accuracy for run in runs]
                axes.plot([min(values), max(values)], [level, level], color=colour, linewidth=1.2)
                axes.plot(fmean(values), level, _REGIME_MARKERS[item.regime], color=colour, markersize=6)
                rows += [(figure.number, LABELS[approach], item.regime, at, value) for value in values]
            if published:
                low, high = figure.published[approach]
                axes.plot([low, high], [height, height], color=colour, linewidth=1.2)
                axes.plot((low + high) / 2, height, "*", markersize=13, markerfacecolor="none", markeredgecolor=colour)
                rows.append((figure.number, LABELS[approach], "published", figure.published_round, (low + high) / 2))
        axes.set_yticks(range(len(figure.approaches)), [LABELS[name] for name in figure.approaches])
        axes.set_ylim(len(figure.approaches) - 0.5, -0.5)
        dress(axes, f"Figure {figure.number}: {figure.title}")
    for axes in panels[1]:
        axes.set_xlabel("test accuracy", fontsize=TEXT, color=INK)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return Drawing(canvas, ("figure", "name", "regime", "round", "test_accuracy"), rows)


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
    axes.legend(
        frameon=False,
        loc="best",
        labelcolor=INK,
        fontsize=TEXT,
    )
