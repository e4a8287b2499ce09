"""Pages that compare runs: of `cbdsl compare`, of a sweep, and of a study on a benchmark data set."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from urllib.parse import quote

from matplotlib.ticker import LogLocator

from cbdsl.errors import UserError
from cbdsl.report.figures import (
    ACCURACY_HEAD,
    INK,
    MARKERS,
    SHADES,
    accuracy_curves,
    accuracy_rows,
    new_figure,
    plot_curves,
    style_accuracy_axes,
)
from cbdsl.report.html import (
    FIGURE_FILES,
    Drawing,
    Section,
    bullet_list,
    capitalise,
    keep_together,
    method_section,
    save_drawing,
    table,
    write_page,
)
from cbdsl.report.words import describe_attack, describe_seeds, describe_training, join_span, join_words
from cbdsl.runs.records import RoundRecord
from cbdsl.studies import benchmark_datasets
from cbdsl.studies.benchmark_datasets import BENCHMARKS, Study, StudyEntry
from cbdsl.studies.compare import (
    Comparison,
    RunGroup,
    compare,
    comparison_rows,
    describe_run,
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


def write_comparison(folders: Sequence[Path], out: Path) -> Path:
    """Compare finished runs in comparison.html, comparison.csv and figures/ of a folder; return the page."""
    return write_comparison_page(compare(folders), out / "comparison.html", "Runs compared")


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
    out = page.parent
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / f"{table_name}.csv", format_csv(comparison).encode())
        figure = draw_figure(comparison, out / "figures" / drawing_name, caption(comparison))
        sections = [
            Section("figure", "Figure", "Accuracy", figure),
            Section("groups", "Groups", "Results", _list_notes(comparison) + _tabulate_groups(comparison)),
            Section("runs", "Runs", "Every run and its folder", _tabulate_runs(comparison, out)),
            Section("same", "Settings", "Settings that all runs share", _tabulate_common(comparison)),
            Section("method", "Method", "How to read this", _explain(comparison, f"{table_name}.csv")),
        ]
        return write_page(page, title, _lead(comparison), sections)
    except OSError as error:
        raise UserError(
            f"The folder {out} cannot be written: {error.strerror}. Give another --out.", code="unwritable-file"
        ) from error


def draw(comparison: Comparison) -> Drawing:
    """Draw accuracy by round and by uploaded byte, one line per group; of many groups the best ones."""
    groups = select_groups(comparison)
    longest = max(len(group.label) for group in groups)
    canvas = new_figure(9.6 + 0.075 * longest, 4.3)
    by_round, by_byte = canvas.subplots(1, 2, sharey=True)
    pairs = []
    for group, (look, line) in zip(groups, _choose_looks([group.label for group in groups]), strict=True):
        sign = _LINES[line]
        label = sign + group.label.replace("$", r"\$")
        pairs.append(accuracy_curves(label, SHADES[look][0], MARKERS[look], _cut_to_one_length(group), line))
    values = [value for curve, _ in pairs for row in curve.rows for value in row]
    margin = max(0.02, 0.06 * (max(values) - min(values)))
    low, high = max(0.0, min(values) - margin), min(1.02, max(values) + margin)
    plot_curves(by_round, [curve for curve, _ in pairs], 0.055 * (high - low), labels=True, within=(low, high))
    plot_curves(by_byte, [curve for _, curve in pairs], 0.055 * (high - low), labels=False)
    style_accuracy_axes(by_round, by_byte)
    by_round.set_ylim(low, high)
    sent = [amount for _, curve in pairs for amount in curve.x if amount > 0]
    if sent and max(sent) < _SHORT * min(sent):
        by_byte.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    by_byte.tick_params(which="minor", color=INK)
    rows = [row for group in groups for row in accuracy_rows(group.label, group.runs)]
    return Drawing(canvas, ACCURACY_HEAD, rows)


def _choose_looks(labels: Sequence[str]) -> list[tuple[str, str]]:
    """Return a colour and a line for every label; the paper's approaches look the same on every page."""
    own = {label: key for key, label in LABELS.items() if label in labels}
    free = [(look, line) for line in _LINES for look in _LOOKS if line != "-" or look not in own.values()]
    rest = iter(free)
    return [(own[label], "-") if label in own else next(rest) for label in labels]


def select_groups(comparison: Comparison) -> Sequence[RunGroup]:
    """Return the groups that the figure shows, in their order."""
    best = sorted(comparison.groups, key=lambda group: -group.row.final_accuracy.mean)[:MOST_CURVES]
    return [group for group in comparison.groups if group in best]


def draw_figure(comparison: Comparison, stem: Path, caption: str) -> str:
    """Write the figure and its numbers; return it as HTML."""
    description = "Test accuracy by round and by uploaded bytes, a line for every group"
    return save_drawing(draw(comparison), stem, description, caption)


def caption(comparison: Comparison) -> str:
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


def _lead(comparison: Comparison) -> str:
    runs, groups = len(comparison.runs), len(comparison.groups)
    seeds = describe_seeds(sorted({run.spec.seed for run in comparison.runs}))
    rounds = join_span(run.summary.rounds for run in comparison.runs)
    length = f"{rounds} round{'s' * (rounds != '1')}"
    if groups == 1:
        method = escape(comparison.runs[0].spec.method)
        if runs == 1:
            return f"One run of {method}, {length}."
        return f"{runs} runs of {method} that differ only in their seed: {length}, {seeds}."
    keys = join_words(f"<code>{escape(key)}</code>" for key in comparison.keys)
    best = max(comparison.groups, key=lambda group: group.row.final_accuracy.mean)
    few = max(len(group.runs) for group in comparison.groups) == 1
    return (
        f"{runs} runs in {groups} groups, {length}, {seeds}; they differ in {keys}. "
        f"Highest at the end: <b>{escape(best.label)}</b>, {100 * best.row.final_accuracy.mean:.1f} %"
        f"{', on one seed: a difference may be chance' * few}."
    )


def _list_notes(comparison: Comparison) -> str:
    return bullet_list(map(escape, comparison.notes)) if comparison.notes else ""


def _tabulate_groups(comparison: Comparison) -> str:
    heads, rows = comparison_rows(comparison)
    settings = len(comparison.keys)
    cells = [
        (_label_group(group, comparison), escape(row[settings]), *map(keep_together, row[settings + 1 :]))
        for group, row in zip(comparison.groups, rows, strict=True)
    ]
    return table(["Group", *map(capitalise, heads[settings:])], cells, wide=True)


def _label_group(group: RunGroup, comparison: Comparison) -> str:
    """Return the group's label, and below it all settings that differ unless the label has them all."""
    label = f"<b>{escape(group.label)}</b>"
    if len(comparison.keys) == len(comparison.distinguishing):
        return label
    settings = ", ".join(f"{key} {format_value(value)}" for key, value in group.settings.items())
    return f'{label}<br><span class="measured">{escape(settings)}</span>'


def _tabulate_runs(comparison: Comparison, out: Path) -> str:
    rows = [
        (
            escape(describe_run(run, comparison.distinguishing)),
            _link_folder(run, out),
            f"{100 * run.summary.final_accuracy:.2f} %",
            format_bytes(run.summary.uplink_bytes),
            f"{run.summary.uploads:,}",
            str(len(run.summary.banned)),
        )
        for run in comparison.runs
    ]
    return table(("Run", "Folder", "Final accuracy", "Uplink", "Uploads", "Bans"), rows, wide=True)


def _link_folder(run: FinishedRun, out: Path) -> str:
    way = Path(os.path.relpath(run.folder.resolve(), out.resolve()))
    return f'<a href="{escape(quote(way.as_posix()))}/">{escape(run.folder.name)}</a>'


def _tabulate_common(comparison: Comparison) -> str:
    rows = [(f"<code>{escape(key)}</code>", escape(format_value(value))) for key, value in comparison.common.items()]
    return f"<details><summary>{len(rows)} settings</summary>{table(('Setting', 'Value'), rows)}</details>"


def _explain(comparison: Comparison, table_file: str) -> str:
    several = any(len(group.runs) > 1 for group in comparison.groups)
    spread = "± is the sample standard deviation over the runs of a group. " if several else ""
    gaps = (
        "Points from the best: the difference in final accuracy from the best group, paired by seed, as mean and "
        "standard deviation; groups with other seeds have none."
    )
    return (
        "<p>Runs whose specs differ only in the seed are one group. Accuracies are on the test set, at the end and in "
        f"the best round. {spread}Bytes are payload, scores and models of all workers together; uploads count every "
        f"model that was sent, used or not. Bans count workers at the end. {gaps if any(comparison.gaps) else ''}</p>"
        f"<p>Beside this page: <code>{escape(table_file)}</code>, the table in numbers, and {FIGURE_FILES}.</p>"
    )


# The page of a study on a benchmark data set.


def write_study_page(study: Study, out: Path, command: str) -> Path:
    """Write figures/ and study.html into the study's folder; return the page."""
    clean = group_clean_runs(study)
    figure = draw_figure(clean, out / "figures" / "study", f"Clean runs. {caption(clean)}".strip())
    heads, rows = benchmark_datasets.study_table(study)
    cells = [tuple(map(keep_together, row)) for row in rows]
    sections = [
        Section("figure", "Figure", "Accuracy", figure),
        Section("table", "Table", "Results", table(("Method", *map(capitalise, heads[1:])), cells, wide=True)),
        _study_method(study, command),
        Section("runs", "Runs", "Every run and its folder", _tabulate_study_runs(study, out)),
    ]
    description = escape(benchmark_datasets.describe_study(study.plan))
    is_quick = benchmark_datasets.is_quick(study.plan)
    quick, stop, rest = description.partition(". ") if is_quick else ("", "", description)
    lead = f"{quick}{stop}{_headline(study)} {rest}"  # how little was run comes first
    return write_page(out / "study.html", BENCHMARKS[study.plan.name].title, lead, sections)


def group_clean_runs(study: Study) -> Comparison:
    """Return the clean runs as a comparison whose groups are called as in the table."""
    found = group_results([run for entry in study.entries for run in entry.clean])
    groups = tuple(replace(group, label=entry.label) for group, entry in zip(found.groups, study.entries, strict=True))
    return replace(found, groups=groups)


def _headline(study: Study) -> str:
    """Name the most accurate method, and the one with the smallest uplink."""

    def describe(entry: StudyEntry) -> str:
        return f"<b>{escape(entry.label)}</b>, {escape(format_percent(entry.accuracy()))}"

    best = max(study.entries, key=lambda entry: entry.accuracy().mean)
    leanest = min(study.entries, key=lambda entry: entry.share)
    uplink = f"with {100 * leanest.share:.1f} % of FedAvg's uplink"
    if leanest is best:
        return f"Highest without attackers, and least sent: {describe(best)}, {uplink}."
    return f"Highest without attackers: {describe(best)}. Least sent: {describe(leanest)}, {uplink}."


def _study_method(study: Study, command: str) -> Section:
    start, seconds = study.plan.start, sum(run.summary.seconds for run in study.runs)
    data, local = start.data, start.local
    took = f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.0f} minutes"
    took = f"{seconds:.0f} seconds" if seconds < 120 else took
    rotation = [run.spec for run in study.runs if run.spec.selection.name == "rotation"]
    turns = ""
    if rotation:
        turns = f"In verified rotation {rotation[0].selection.k} workers upload in turn, 4 bits per number. "
    attack = describe_attack(benchmark_datasets.ATTACK["attack.name"]) if study.plan.attacked else ""
    text = (
        f": {len(study.runs)} runs, {took} one after the other. "
        f"Model {escape(start.model)}, data {escape(data.source)}, {escape(data.partition)}; "
        f"{escape(describe_training(local))}, batches of {local.batch_size}, rate {local.learning_rate:g}. "
        f"D_tr ({data.shared_training:,} samples), D_sc ({data.shared_scoring:,}) and the server's hold-out "
        f"({data.holdout:,}) are drawn from the training set first, at random; workers hold none of them. "
        "FedAvg without D_tr leaves them unused.</p>"
        f"<p>{turns}{escape(attack)} FedProx has its default settings, SCAFFOLD twice the rate and no momentum, with "
        "which it diverges. Uplink and traffic are payload of clean runs, all workers together, mean over seeds; D_G "
        "itself, which workers get once, is not counted. Banned: workers over all attacked runs."
    )
    files = (
        "<code>table.md</code>, <code>results.csv</code> and <code>results.jsonl</code> (one row per run), "
        f"<code>study.json</code> (the plan), {FIGURE_FILES} and <code>runs/</code>. The same command continues a "
        "stopped study and repeats nothing."
    )
    return method_section(command, text, files)


def _tabulate_study_runs(study: Study, out: Path) -> str:
    rows = [
        (
            escape(entry.label + (", attacked" if run.spec.attack.byzantine else "")),
            str(run.spec.seed),
            _link_folder(run, out),
            f"{100 * run.summary.final_accuracy:.2f} %",
            f"{100 * run.summary.best_accuracy:.2f} %",
            f"{run.summary.seconds:,.0f}",
        )
        for entry in study.entries
        for run in (*entry.clean, *entry.attacked)
    ]
    return table(("Run", "Seed", "Folder", "Final accuracy", "Best", "Seconds"), rows, wide=True)
