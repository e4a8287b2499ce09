"""The page of a search for settings: the best settings, the progress of the search, and all trials."""

from __future__ import annotations

import itertools
import math
from html import escape
from pathlib import Path

from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from cbdsl.report.figures import SHADES, new_figure, style_axes
from cbdsl.report.html import Drawing, Section, method_section, save_drawing, table, write_page
from cbdsl.studies.tune import Tuning, describe_gain

_COLOURS = {"swarm": SHADES["cb-dsl-g"][0], "random": SHADES["fedavg"][0], "tpe": SHADES["cb-dsl-sc"][0]}
_MOST_ROWS = 200  # candidates in the table; all are in results.csv


def write_tuning_page(tuning: Tuning, out: Path, command: str) -> Path:
    """Write tuning.html and its figures; return the page."""
    figures = out / "figures"
    several = f"Each line is one of {tuning.plan.repeats} searches." if tuning.plan.repeats > 1 else ""
    words = f"The lowest share of the hold-out that is wrong, by the number of trials. {several}"
    progress = save_drawing(_draw_progress(tuning), figures / "progress", words, words)
    dots = "A dot is a trial; pale ones were stopped early."
    settings = save_drawing(_draw_settings(tuning), figures / "settings", "Error by setting", dots)
    sections = [
        Section("progress", "Search", "Progress of the search", progress),
        Section("settings", "Settings", "Error by setting", settings),
        Section("tries", "Trials", "All trials", _tabulate_trials(tuning)),
        _tuning_method(tuning, command),
    ]
    return write_page(out / "tuning.html", "Search for settings", _lead(tuning), sections)


def _lead(tuning: Tuning) -> str:
    best = tuning.outcome.best
    found = ", ".join(f"{escape(key)} = {escape(str(value))}" for key, value in best.values.items())
    return (
        f"Best of {len(tuning.candidates):,} trials: <strong>{found}</strong>; {best.error:.2%} of the server's "
        f"hold-out wrong. On the test set: {escape(describe_gain(tuning))}."
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
    axes.set_ylabel("wrong on the hold-out")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
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
        style_axes(axes, "")
        axes.set_xlabel(axis.key)
        axes.set_ylabel("wrong on the hold-out")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    keys = [axis.key for axis in searched]
    rows = [(one.search, *(one.values[key] for key in keys), one.error, one.stopped) for one in tuning.candidates]
    return Drawing(figure, ("search", *keys, "error", "given_up"), rows)


def _tabulate_trials(tuning: Tuning) -> str:
    keys = [axis.key for axis in tuning.plan.space.axes]
    best = sorted(tuning.candidates, key=lambda one: (one.stopped, one.score))[:_MOST_ROWS]
    rows = [
        (
            escape(one.search), str(one.repeat), str(one.number),
            *(escape(str(one.values[key])) for key in keys),
            f"{one.error:.2%}", "stopped early" if one.stopped else "",
        )
        for one in best
    ]  # fmt: skip
    return table(("Search", "Repeat", "Trial", *keys, "Wrong on the hold-out", ""), rows, wide=True)


def _tuning_method(tuning: Tuning, command: str) -> Section:
    plan, start = tuning.plan, tuning.plan.space.start
    stopped = sum(one.stopped for one in tuning.candidates)
    early = (
        "After a third and after two thirds of its rounds a trial is stopped if it has more errors than half of the "
        f"earlier trials had by then; {stopped:,} of {len(tuning.candidates):,} were. "
        if plan.early
        else ""
    )
    runs = f"{plan.seeds} runs, seeds from {start.seed}" if plan.seeds > 1 else f"one run, seed {start.seed}"
    text = (
        f". A trial is {runs}, of {start.rounds} rounds with {start.workers} workers, judged on the server's hold-out "
        f"of {start.data.holdout:,} samples, which no worker holds. {early}The test set was not used until the search "
        "was over, and then on other seeds. Every search begins with the same points, the spec's own among them where "
        "the ranges contain it."
    )
    files = (
        "<code>results.csv</code> and <code>results.jsonl</code> (one row per trial), <code>best.toml</code> (the spec "
        "with the best settings), <code>tuning.json</code>, <code>figures/</code>, <code>trials/</code> (every trial) "
        "and <code>runs/</code> (the confirmation). The same command continues a stopped search."
    )
    return method_section(command, text, files)
