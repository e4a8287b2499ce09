"""The page of a search for settings: what was found, how the search got there, and everything that was tried."""

from __future__ import annotations

import itertools
import math
from html import escape
from pathlib import Path

from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from cbdsl.report.html import Drawing, Section, document, keep, table
from cbdsl.report.style import SHADES, dress, new_figure
from cbdsl.studies.tune import Tuning, verdict
from cbdsl.util.files import write_atomically

_COLOURS = {"swarm": SHADES["cb-dsl-g"][0], "random": SHADES["fedavg"][0], "tpe": SHADES["cb-dsl-sc"][0]}
_SHOWN = 200  # candidates in the table; all are in results.csv


def write(tuning: Tuning, out: Path, command: str) -> Path:
    """Write tuning.html and its figures."""
    figures = out / "figures"
    words = f"The lowest share of the hold-out that is wrong, by the number of tries. {_spread_words(tuning)}"
    progress = keep(_progress(tuning), figures / "progress", words, words)
    places = keep(_places(tuning), figures / "settings", "Error by setting", "A dot is a try; pale ones were given up.")
    sections = [
        Section("progress", "Search", "How the search got there", progress),
        Section("settings", "Settings", "Where good settings lie", places),
        Section("tries", "Tries", "What was tried", _tries(tuning)),
        Section("method", "Method", "How this was made", _method(tuning, command)),
    ]  # fmt: skip
    path = out / "tuning.html"
    write_atomically(path, document("Settings that were searched", _lead(tuning), sections).encode())
    return path


def _lead(tuning: Tuning) -> str:
    best = tuning.outcome.best
    found = ", ".join(f"{escape(key)} = {escape(str(value))}" for key, value in best.values.items())
    return (
        f"Best of {len(tuning.candidates):,} tries: <strong>{found}</strong>; {best.error:.2%} of the server's "
        f"hold-out wrong. On the test set: {escape(verdict(tuning))}."
    )


def _progress(tuning: Tuning) -> Drawing:
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
    dress(axes, "best so far")
    if any(0 < error < math.inf for curve in curves.values() for error in curve):
        axes.set_yscale("log")  # the last steps are the small ones
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("tries")
    axes.set_ylabel("wrong on the hold-out")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    rows = [(*kind, *one) for kind, curve in curves.items() for one in enumerate(curve, 1)]
    return Drawing(figure, ("search", "repeat", "tries", "lowest_error"), rows)


def _places(tuning: Tuning) -> Drawing:
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
        dress(axes, "")
        axes.set_xlabel(axis.key)
        axes.set_ylabel("wrong on the hold-out")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    keys = [axis.key for axis in searched]
    rows = [(one.search, *(one.values[key] for key in keys), one.error, one.stopped) for one in tuning.candidates]
    return Drawing(figure, ("search", *keys, "error", "given_up"), rows)


def _spread_words(tuning: Tuning) -> str:
    return f"Each line is one of {tuning.plan.repeats} searches." if tuning.plan.repeats > 1 else ""


def _tries(tuning: Tuning) -> str:
    keys = [axis.key for axis in tuning.plan.space.axes]
    best = sorted(tuning.candidates, key=lambda one: (one.stopped, one.score))[:_SHOWN]
    rows = [
        (
            escape(one.search), str(one.repeat), str(one.number),
            *(escape(str(one.values[key])) for key in keys),
            f"{one.error:.2%}", "given up" if one.stopped else "",
        )
        for one in best
    ]  # fmt: skip
    return table(("Search", "Repeat", "Try", *keys, "Wrong on the hold-out", ""), rows, wide=True)


def _method(tuning: Tuning, command: str) -> str:
    plan, start = tuning.plan, tuning.plan.space.start
    given_up = sum(one.stopped for one in tuning.candidates)
    early = (
        f"After a third and after two thirds of its rounds a try is given up if it has more wrong than half of those "
        f"before it had by then; {given_up:,} of {len(tuning.candidates):,} were. "
        if plan.early
        else ""
    )
    runs = f"{plan.seeds} runs, seeds from {start.seed}" if plan.seeds > 1 else f"one run, seed {start.seed}"
    return (
        f"<p>Made by <code>{escape(command)}</code>. A try is {runs}, of {start.rounds} rounds with {start.workers} "
        f"workers, judged on the server's hold-out of {start.data.holdout:,} samples, which no worker holds. {early}"
        "The test set was not looked at until the search was over, and then on other seeds. Every search begins with "
        "the same points, the spec's own among them where the ranges have it.</p>"
        "<p>Beside this page: <code>results.csv</code> and <code>results.jsonl</code> (a row a try), "
        "<code>best.toml</code> (the spec with what was found), <code>tuning.json</code>, <code>figures/</code>, "
        "<code>trials/</code> (every try) and <code>runs/</code> (the confirmation). The same command goes on with a "
        "search that was stopped.</p>"
    )
