"""The page of a search for settings: the best settings, the progress of the search, and all trials."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from cbdsl.report.figures import SHADES, new_figure, style_axes
from cbdsl.report.pages import Drawing, Table, save_drawing, write_page
from cbdsl.studies.tune import Tuning, describe_gain

_COLOURS = {"swarm": SHADES["cb-dsl-g"][0], "random": SHADES["fedavg"][0], "tpe": SHADES["cb-dsl-sc"][0]}
_MOST_ROWS = 200  # candidates in the table; all are in results.csv


def write_tuning_page(tuning: Tuning, out: Path, command: str) -> Path:
    """Write tuning.html and its figures; return the page."""
    figures = out / "figures"
    return write_page(
        out / "tuning.html",
        "tuning.html.j2",
        tuning=tuning,
        command=command,
        gain=describe_gain(tuning),
        progress=save_drawing(_draw_progress(tuning), figures / "progress", "The lowest error by the number of trials"),
        settings=save_drawing(_draw_settings(tuning), figures / "settings", "Error by setting"),
        trials=_tabulate_trials(tuning),
    )


def _draw_progress(tuning: Tuning) -> Drawing:
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    curves = {kind: tuning.curve(*kind) for kind in itertools.product(tuning.plan.by, range(tuning.plan.repeats))}
    for (name, repeat), curve in curves.items():
        label = name if repeat == 0 else None
        alone = tuning.plan.repeats == 1
        axes.step(
            range(1, len(curve) + 1), curve, where="post", color=_COLOURS[name], label=label,
            linewidth=2 if alone else 1.2, alpha=1.0 if alone else 0.75,
        )  # fmt: skip
    axes.legend(frameon=False)
    style_axes(axes, "best so far")
    if any(0 < error < math.inf for curve in curves.values() for error in curve):
        axes.set_yscale("log")  # the last improvements are small
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("trials")
    _style_errors(axes, tuning, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    rows = [(*kind, *one) for kind, curve in curves.items() for one in enumerate(curve, 1)]
    return Drawing(figure, ("search", "repeat", "tries", "lowest_error"), rows)


def _draw_settings(tuning: Tuning) -> Drawing:
    searched = tuning.plan.space.axes
    figure = new_figure(7, 2.6 * len(searched))
    for axes, axis in zip(figure.subplots(len(searched), 1, squeeze=False)[:, 0], searched, strict=True):
        for name in tuning.plan.by:
            for stopped in (True, False):
                own = [one for one in tuning.candidates if (one.search, one.stopped) == (name, stopped)]
                places = [str(one.values[axis.key]) if axis.choices else one.values[axis.key] for one in own]
                axes.scatter(
                    places, [one.error for one in own], s=16, color=_COLOURS[name], alpha=0.25 if stopped else 0.9
                )
        if axis.log:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
        style_axes(axes, "")
        axes.set_xlabel(axis.key)
        _style_errors(axes, tuning, 0)
    keys = [axis.key for axis in searched]
    rows = [(one.search, *(one.values[key] for key in keys), one.error, one.stopped) for one in tuning.candidates]
    return Drawing(figure, ("search", *keys, "error", "given_up"), rows)


def _style_errors(axes: Axes, tuning: Tuning, decimals: int) -> None:
    """Style the axis of errors: shares of a classifier, otherwise losses."""
    if not tuning.outcome.best.classifies:
        axes.set_ylabel("loss on the hold-out (lower is better)")
        return
    axes.set_ylabel("wrong on the hold-out")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=decimals))


def _tabulate_trials(tuning: Tuning) -> Table:
    keys = [axis.key for axis in tuning.plan.space.axes]
    best = sorted(tuning.candidates, key=lambda one: (one.stopped, one.score))[:_MOST_ROWS]
    rows = [
        (
            one.search, str(one.repeat), str(one.number), *(str(one.values[key]) for key in keys),
            one.error_text, "stopped early" if one.stopped else "all rounds",
        )
        for one in best
    ]  # fmt: skip
    return Table(("Search", "Repeat", "Trial", *keys, "On the hold-out", "End"), rows)
