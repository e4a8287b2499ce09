"""Runs side by side on a page: groups in a table and a figure, what differs, and the way to every run's folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from matplotlib.ticker import LogLocator

from cbdsl.errors import UserError
from cbdsl.report.figures import ACCURACY_HEAD, accuracy_curves, accuracy_rows, dress_accuracy, plot
from cbdsl.report.html import Drawing, Section, bullets, document, keep, table
from cbdsl.report.style import INK, MARKERS, SHADES, new_figure
from cbdsl.report.words import listed, listed_span, seeds_words
from cbdsl.runs.records import RoundRecord
from cbdsl.studies.compare import (
    Comparison,
    RunGroup,
    compare,
    comparison_rows,
    csv_text,
    group_results,
    run_words,
    value_words,
)
from cbdsl.studies.paper import LABELS
from cbdsl.studies.sweep import FinishedRun
from cbdsl.util.files import write_atomically
from cbdsl.util.formatting import format_bytes

MOST_CURVES = 12  # more than this no eye tells apart

_SHORT = 100.0  # a log axis that spans no more needs numbers between the powers of ten
_LOOKS = ("cb-dsl-g", "fedavg", "cb-dsl-sc", "cb-dsl", "fedavg-tr", "cb-dsl-equal")  # neighbours differ most
_LINES = {"-": "", "--": "- - "}  # and how a label shows them


def draw(comparison: Comparison) -> Drawing:
    """Accuracy by round and by uploaded byte, a line a group; of many groups those that end best."""
    groups = drawn(comparison)
    longest = max(len(group.label) for group in groups)
    canvas = new_figure(9.6 + 0.075 * longest, 4.3)
    by_round, by_byte = canvas.subplots(1, 2, sharey=True)
    pairs = []
    for group, (look, line) in zip(groups, _looks([group.label for group in groups]), strict=True):
        sign = _LINES[line]
        label = sign + group.label.replace("$", r"\$")
        pairs.append(accuracy_curves(label, SHADES[look][0], MARKERS[look], _of_one_length(group), line))
    values = [value for curve, _ in pairs for row in curve.rows for value in row]
    margin = max(0.02, 0.06 * (max(values) - min(values)))
    low, high = max(0.0, min(values) - margin), min(1.02, max(values) + margin)
    plot(by_round, [curve for curve, _ in pairs], 0.055 * (high - low), labels=True, within=(low, high))
    plot(by_byte, [curve for _, curve in pairs], 0.055 * (high - low), labels=False)
    dress_accuracy(by_round, by_byte)
    by_round.set_ylim(low, high)
    sent = [amount for _, curve in pairs for amount in curve.x if amount > 0]
    if sent and max(sent) < _SHORT * min(sent):
        by_byte.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    by_byte.tick_params(which="minor", color=INK)
    rows = [row for group in groups for row in accuracy_rows(group.label, group.runs)]
    return Drawing(canvas, ACCURACY_HEAD, rows)


def _looks(labels: Sequence[str]) -> list[tuple[str, str]]:
    """A colour and a line for every label: the paper's approaches look the same on every page."""
    own = {label: key for key, label in LABELS.items() if label in labels}
    free = [(look, line) for line in _LINES for look in _LOOKS if line != "-" or look not in own.values()]
    rest = iter(free)
    return [(own[label], "-") if label in own else next(rest) for label in labels]


def drawn(comparison: Comparison) -> Sequence[RunGroup]:
    """The groups that the figure shows, in their order."""
    best = sorted(comparison.groups, key=lambda group: -group.row.final_accuracy.mean)[:MOST_CURVES]
    return [group for group in comparison.groups if group in best]


def figure(comparison: Comparison, stem: Path, caption: str) -> str:
    """Write the figure and its numbers; gives it for a page."""
    description = "Test accuracy by round and by uploaded bytes, a line for every group"
    return keep(draw(comparison), stem, description, caption)


def build(comparison: Comparison, shown: str, out: Path, title: str, table_file: str) -> str:
    """The page, to be written into a folder; shown: the figure. Links lead from that folder to those of the runs."""
    sections = [
        Section("figure", "Figure", "How it went", shown),
        Section("groups", "Groups", "What came out", _notes(comparison) + _groups(comparison)),
        Section("runs", "Runs", "Every run and its folder", _runs(comparison, out)),
        Section("same", "Settings", "What all runs share", _common(comparison)),
        Section("method", "Method", "How to read this", _method(comparison, table_file)),
    ]
    return document(title, _lead(comparison), sections)


def write_comparison(folders: Sequence[Path], out: Path) -> Path:
    """Compare finished runs: comparison.html, comparison.csv and figures/ in a folder; gives the page."""
    return _write(compare(folders), out, "comparison", "Runs compared")


def write_sweep_index(results: Sequence[FinishedRun], axes: Sequence[str], out: Path) -> Path:
    """Lead from words to the folders of a sweep's runs: index.html, groups.csv and figures/ in the sweep's folder.

    axes: the settings that were swept, dotted.
    """
    title = f"Sweep over {', '.join(axes)}"
    return _write(group_results(results, axes), out, "index", title, table="groups", drawing="sweep")


def _write(
    comparison: Comparison, out: Path, page: str, title: str, table: str = "comparison", drawing: str = "comparison"
) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / f"{table}.csv", csv_text(comparison).encode())
        shown = figure(comparison, out / "figures" / drawing, caption(comparison))
        text = build(comparison, shown, out, title, f"{table}.csv")
        write_atomically(out / f"{page}.html", text.encode())
    except OSError as error:
        raise UserError(f"The folder {out} cannot be written: {error.strerror}. Give another --out.") from error
    return out / f"{page}.html"


def _of_one_length(group: RunGroup) -> list[Sequence[RoundRecord]]:
    rounds = min(len(run.rounds) for run in group.runs)
    return [run.rounds[:rounds] for run in group.runs]


def _lead(comparison: Comparison) -> str:
    runs, groups = len(comparison.runs), len(comparison.groups)
    seeds = sorted({run.spec.seed for run in comparison.runs})
    rounds = listed_span(run.summary.rounds for run in comparison.runs)
    length = f"{rounds} round{'s' * (rounds != '1')}"
    if groups == 1:
        method = escape(comparison.runs[0].spec.method)
        how = f", {length}" if runs == 1 else f" that differ by their seed alone: {length}, {seeds_words(seeds)}"
        return f"{'One run' if runs == 1 else f'{runs} runs'} of {method}{how}."
    keys = listed(f"<code>{escape(key)}</code>" for key in comparison.keys)
    best = max(comparison.groups, key=lambda group: group.row.final_accuracy.mean)
    few = max(len(group.runs) for group in comparison.groups) == 1
    return (
        f"{runs} runs in {groups} groups, {length}, {seeds_words(seeds)}; they differ in {keys}. "
        f"Highest at the end: <b>{escape(best.label)}</b>, {100 * best.row.final_accuracy.mean:.1f} %"
        f"{', on one seed: a difference may be chance' * few}."
    )


def _notes(comparison: Comparison) -> str:
    return bullets(map(escape, comparison.notes)) if comparison.notes else ""


def _groups(comparison: Comparison) -> str:
    heads, rows = comparison_rows(comparison)
    settings = len(comparison.keys)
    names = ["Group", *(head[:1].upper() + head[1:] for head in heads[settings:])]
    cells = [
        (_group(group, comparison), escape(row[settings]), *(_unbroken(cell) for cell in row[settings + 1 :]))
        for group, row in zip(comparison.groups, rows, strict=True)
    ]
    return table(names, cells, wide=True)


def _group(group: RunGroup, comparison: Comparison) -> str:
    """The group's label, and below it all that differs, if the label does not say all of it."""
    label = f"<b>{escape(group.label)}</b>"
    if len(comparison.keys) == len(comparison.telling):
        return label
    words = ", ".join(f"{key} {value_words(value)}" for key, value in group.settings.items())
    return f'{label}<br><span class="measured">{escape(words)}</span>'


def _unbroken(cell: str) -> str:
    return escape(cell.replace(" ", "\u00a0"))


def caption(comparison: Comparison) -> str:
    """What lines and bands are, and which groups are shown."""
    shown, there = len(drawn(comparison)), len(comparison.groups)
    several = any(len(group.runs) > 1 for group in comparison.groups)
    words = ["Lines are means over seeds, bands reach from the lowest seed to the highest."] if several else []
    if shown < there:
        words.append(f"The {shown} groups of {there} that end best.")
    return " ".join(words)


def _runs(comparison: Comparison, out: Path) -> str:
    rows = [_run(run, comparison.telling, out) for run in comparison.runs]
    return table(("Run", "Folder", "Final accuracy", "Uplink", "Uploads", "Bans"), rows, wide=True)


def _run(run: FinishedRun, keys: Sequence[str], out: Path) -> tuple[str, ...]:
    way = os.path.relpath(run.folder.resolve(), out.resolve())
    link = f'<a href="{escape(quote(Path(way).as_posix()))}/">{escape(run.folder.name)}</a>'
    summary = run.summary
    return (
        escape(run_words(run, keys)), link, f"{100 * summary.final_accuracy:.2f} %", format_bytes(summary.uplink_bytes),
        f"{summary.uploads:,}", str(len(summary.banned)),
    )  # fmt: skip


def _common(comparison: Comparison) -> str:
    rows = [(f"<code>{escape(key)}</code>", escape(value_words(value))) for key, value in comparison.common.items()]
    return f"<details><summary>{len(rows)} settings</summary>{table(('Setting', 'Value'), rows)}</details>"


def _paired(comparison: Comparison) -> str:
    if not any(comparison.gaps):
        return ""
    return (
        "Points from the best: the difference in final accuracy from the group that ends best, seed by seed, mean and "
        "standard deviation of these differences; groups without the same seeds have none."
    )


def _method(comparison: Comparison, table_file: str) -> str:
    spread = (
        "± is the standard deviation of a sample over the runs of a group. "
        if any(len(group.runs) > 1 for group in comparison.groups)
        else ""
    )
    return (
        "<p>Runs whose specs differ by the seed alone are one group. Accuracies are on the test set, at the end and in "
        f"the best round. {spread}Bytes are payload, scores and models of all workers together; uploads count every "
        f"model that was sent, used or not. Bans count workers at the end. {_paired(comparison)}</p>"
        f"<p>Beside this page: <code>{escape(table_file)}</code>, the table in numbers, and <code>figures/</code> "
        "(PNG, SVG, PDF, and CSV with what they show).</p>"
    )
