"""Pages that compare runs: of `cbdsl compare`, of a sweep, and of a study on a benchmark data set."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from matplotlib.ticker import LogLocator

from cbdsl.errors import UserError
from cbdsl.report.figures import (
    INK,
    MARKERS,
    SHADES,
    accuracy_curves,
    accuracy_rows,
    draw_server_alone,
    mean_server_alone,
    metric_head,
    new_figure,
    plot_curves,
    style_accuracy_axes,
)
from cbdsl.report.pages import (
    Cell,
    Drawing,
    PageFigure,
    Row,
    Table,
    capitalise,
    describe_seeds,
    describe_training,
    join_span,
    keep_together,
    save_drawing,
    write_page,
)
from cbdsl.runs.records import RoundRecord
from cbdsl.studies import benchmark_datasets
from cbdsl.studies.benchmark_datasets import BENCHMARKS, Study
from cbdsl.studies.compare import (
    Comparison,
    RunGroup,
    compare,
    comparison_rows,
    describe_run,
    describe_tests,
    format_csv,
    format_percent,
    format_value,
    group_results,
)
from cbdsl.studies.paper import LABELS
from cbdsl.studies.sweep import FinishedRun
from cbdsl.util.files import write_atomically
from cbdsl.util.formatting import format_bytes

MOST_CURVES = 12  # readers cannot distinguish more

_SHORT = 100.0  # a log axis with a smaller span needs ticks between the powers of ten
_LOOKS = ("cb-dsl-g", "fedavg", "cb-dsl-sc", "cb-dsl", "fedavg-tr", "cb-dsl-equal")  # neighbours differ most
_LINES = {"-": "", "--": "- - "}  # line styles, and their mark in a label


def write_comparison(found: Comparison | Sequence[Path], out: Path) -> Path:
    """Compare finished runs in comparison.html, comparison.csv and figures/ of a folder; return the page."""
    comparison = found if isinstance(found, Comparison) else compare(found)
    return write_comparison_page(comparison, out / "comparison.html", "Runs compared")


def write_sweep_index(results: Sequence[FinishedRun], axes: Sequence[str], out: Path) -> Path:
    """Write index.html, groups.csv and figures/ into the folder of a sweep; return the page.

    axes: the swept settings, dotted.
    """
    title = f"Sweep over {', '.join(axes)}"
    return write_comparison_page(group_results(results, axes), out / "index.html", title, "groups", "sweep")


def write_comparison_page(
    comparison: Comparison, page: Path, title: str, table_name: str = "comparison", drawing_name: str = "comparison"
) -> Path:
    """Write a page, and beside it the table as CSV and figures/; return the page."""
    out, rounds = page.parent, join_span(run.summary.rounds for run in comparison.runs)
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / f"{table_name}.csv", format_csv(comparison).encode())
        return write_page(
            page,
            "comparison.html.j2",
            title=title,
            comparison=comparison,
            best=comparison.ranked[0],
            best_value=comparison.metric.text(comparison.ranked[0].row.final.mean, digits=1).replace("%", " %"),
            several=any(len(group.runs) > 1 for group in comparison.groups),
            tested=describe_tests(comparison),
            length=f"{rounds} round{'s' * (rounds != '1')}",
            seeds=describe_seeds(sorted({run.spec.seed for run in comparison.runs})),
            figure=draw_figure(comparison, out / "figures" / drawing_name),
            caption=describe_figure(comparison),
            groups=tabulate_groups(comparison),
            runs=_tabulate_runs(comparison, out),
            settings=Table(
                ("Setting", "Value"),
                [(key, format_value(value)) for key, value in comparison.common.items()],
                wide=False,
            ),
            table_file=f"{table_name}.csv",
        )
    except OSError as error:
        raise UserError(
            f"The folder {out} cannot be written: {error.strerror}. Give another --out.", code="unwritable-file"
        ) from error


def draw(comparison: Comparison) -> Drawing:
    """Draw the main metric by round and by uploaded byte, one line per group; of many groups the best ones."""
    groups = select_groups(comparison)
    longest = max(len(group.label) for group in groups)
    canvas = new_figure(9.6 + 0.075 * longest, 4.3)
    by_round, by_byte = canvas.subplots(1, 2, sharey=True)
    pairs = []
    for group, (look, line) in zip(groups, _choose_looks([group.label for group in groups]), strict=True):
        sign = _LINES[line]
        label = sign + group.label.replace("$", r"\$")
        pairs.append(accuracy_curves(label, SHADES[look][0], MARKERS[look], _cut_to_one_length(group), line))
    flat = [pair for pair, group in zip(pairs, groups, strict=True) if not group.row.uplink_bytes.mean]
    alone = mean_server_alone(comparison.runs) if _has_one_data_set(comparison) else None
    values = [value for curve, _ in pairs for row in curve.rows for value in row if math.isfinite(value)] or [0.0]
    values += [] if alone is None else [alone]
    metric = comparison.metric
    margin = max(0.02 if metric.is_share else 1e-6, 0.06 * (max(values) - min(values)))
    low, high = min(values) - margin, max(values) + margin
    if metric.is_share:
        low, high = max(0.0, low), min(1.02, high)
    plot_curves(by_round, [curve for curve, _ in pairs], 0.055 * (high - low), labels=True, within=(low, high))
    plot_curves(by_byte, [pair[1] for pair in pairs if pair not in flat], 0.055 * (high - low), labels=False)
    for _, curve in flat:  # without an upload there is no curve by bytes
        by_byte.axhline(curve.mean[-1], color=curve.colour, linewidth=2, linestyle=curve.line)
    if alone is not None:
        draw_server_alone(by_round, alone, metric)
        by_byte.axhline(alone, color=INK, linewidth=1.2, linestyle="--")
    style_accuracy_axes(by_round, by_byte, metric)
    by_round.set_ylim(low, high)
    sent = [amount for _, curve in pairs for amount in curve.x if amount > 0]
    if sent and max(sent) < _SHORT * min(sent):
        by_byte.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    by_byte.tick_params(which="minor", color=INK)
    rows = [row for group in groups for row in accuracy_rows(group.label, group.runs)]
    return Drawing(canvas, metric_head(comparison.metric_name), rows)


def _has_one_data_set(comparison: Comparison) -> bool:
    """Return whether the server has the same samples and model in all runs of a seed."""
    return not [key for key in comparison.keys if key.startswith(("data.", "local.", "options.")) or key == "model"]


def _choose_looks(labels: Sequence[str]) -> list[tuple[str, str]]:
    """Return a colour and a line for every label; the paper's approaches look the same on every page."""
    own = {label: key for key, label in LABELS.items() if label in labels}
    free = [(look, line) for line in _LINES for look in _LOOKS if line != "-" or look not in own.values()]
    rest = iter(free)
    return [(own[label], "-") if label in own else next(rest) for label in labels]


def select_groups(comparison: Comparison) -> Sequence[RunGroup]:
    """Return the groups that the figure shows, in their order."""
    best = comparison.ranked[:MOST_CURVES]
    return [group for group in comparison.groups if group in best]


def draw_figure(comparison: Comparison, stem: Path) -> PageFigure:
    """Write the figure and its numbers; return it for a page."""
    title = capitalise(
        comparison.metric.title if comparison.metric.is_share is False else f"test {comparison.metric.title}"
    )
    return save_drawing(draw(comparison), stem, f"{title} by round and by uploaded bytes, a line for every group")


def describe_figure(comparison: Comparison) -> str:
    """Explain lines and bands, and which groups are shown."""
    shown, total = len(select_groups(comparison)), len(comparison.groups)
    several = any(len(group.runs) > 1 for group in comparison.groups)
    sentences = ["Lines are means over seeds, bands reach from the lowest seed to the highest."] if several else []
    if shown < total:
        sentences.append(f"The best {shown} of {total} groups.")
    return " ".join(sentences)


def _cut_to_one_length(group: RunGroup) -> list[Sequence[RoundRecord]]:
    rounds = min(len(run.rounds) for run in group.runs)
    return [run.rounds[:rounds] for run in group.runs]


def tabulate_groups(comparison: Comparison) -> Table:
    """Return the results of every group. Below its label are all settings that differ, unless the label has them."""
    heads, rows = comparison_rows(comparison)
    settings, is_whole = len(comparison.keys), len(comparison.keys) == len(comparison.distinguishing)
    cells: list[Row] = []
    one_set = len({row.seeds for row in comparison.rows}) == 1  # then the page's first line has the seeds
    for group, row in zip(comparison.groups, rows, strict=True):
        note = ", ".join(f"{key} {format_value(each)}" for key, each in group.settings.items() if each is not None)
        label = Cell(group.label, "" if is_whole else note, strong=True)
        runs = str(len(group.runs)) if one_set else row[settings]
        cells.append((label, runs, *map(keep_together, row[settings + 1 :])))
    return Table(["Group", *map(capitalise, heads[settings:])], cells)


def _tabulate_runs(comparison: Comparison, out: Path) -> Table:
    rows = [
        (
            describe_run(run, comparison.distinguishing),
            _link_folder(run, out),
            comparison.metric.text(run.summary.final_value).replace("%", " %"),
            format_bytes(run.summary.uplink_bytes),
            f"{run.summary.uploads:,}",
            str(len(run.summary.banned)),
        )
        for run in comparison.runs
    ]
    return Table(("Run", "Folder", f"Final {comparison.metric.title}", "Uplink", "Uploads", "Bans"), rows)


def _link_folder(run: FinishedRun, out: Path) -> Cell:
    way = Path(os.path.relpath(run.folder.resolve(), out.resolve()))
    return Cell(run.folder.name, href=f"{quote(way.as_posix())}/")


# The page of a study on a benchmark data set.


def write_study_page(study: Study, out: Path, command: str) -> Path:
    """Write figures/ and study.html into the study's folder; return the page."""
    plan, clean = study.plan, group_clean_runs(study)
    heads, rows = benchmark_datasets.study_table(study)
    description = benchmark_datasets.describe_study(plan)
    quick, stop, rest = description.partition(". ")  # how little was run comes first
    if not benchmark_datasets.is_quick(plan):
        quick, stop, rest = "", "", description
    return write_page(
        out / "study.html",
        "study.html.j2",
        title=BENCHMARKS[plan.name].title,
        command=command,
        study=study,
        quick=quick + stop,
        description=rest,
        best=max(study.entries, key=lambda entry: entry.accuracy().mean),
        leanest=min(study.entries, key=lambda entry: entry.share),
        percent=format_percent,
        figure=draw_figure(clean, out / "figures" / "study"),
        caption=describe_figure(clean),
        results=Table(("Method", *map(capitalise, heads[1:])), [tuple(map(keep_together, row)) for row in rows]),
        spec=plan.start,
        training=describe_training(plan.start.local),
        took=_describe_time(sum(run.summary.seconds for run in study.runs)),
        turns=next((run.spec.selection.k for run in study.runs if run.spec.selection.name == "rotation"), 0),
        attack=benchmark_datasets.ATTACK["attack.name"] if plan.attacked else "",
        runs=_tabulate_study_runs(study, out),
    )


def group_clean_runs(study: Study) -> Comparison:
    """Return the clean runs as a comparison whose groups are called as in the table."""
    found = group_results([run for entry in study.entries for run in entry.clean])
    groups = tuple(replace(group, label=entry.label) for group, entry in zip(found.groups, study.entries, strict=True))
    return replace(found, groups=groups)


def _describe_time(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"


def _tabulate_study_runs(study: Study, out: Path) -> Table:
    rows = [
        (
            entry.label + (", attacked" if run.spec.attack.byzantine else ""),
            str(run.spec.seed),
            _link_folder(run, out),
            f"{100 * run.summary.final_accuracy:.2f} %",
            f"{100 * run.summary.best_accuracy:.2f} %",
            f"{run.summary.seconds:,.0f}",
        )
        for entry in study.entries
        for run in (*entry.clean, *entry.attacked)
    ]
    return Table(("Run", "Seed", "Folder", "Final accuracy", "Best", "Seconds"), rows)
