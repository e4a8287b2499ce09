"""The page of a study on the field's data: its table, a figure of the clean runs, and the way to every run's folder."""

from __future__ import annotations

from dataclasses import replace
from html import escape
from pathlib import Path

from cbdsl.report.comparison_page import caption, figure
from cbdsl.report.html import Section, document, table
from cbdsl.report.words import attack_words, work_words
from cbdsl.studies import benchmark_datasets
from cbdsl.studies.benchmark_datasets import BENCHMARKS, Study, StudyEntry
from cbdsl.studies.compare import Comparison, group_results, percent_words
from cbdsl.studies.sweep import FinishedRun
from cbdsl.util.files import write_atomically


def write(study: Study, out: Path, command: str) -> Path:
    """Write figures/ and study.html into the study's folder; gives the page."""
    clean = labelled(study)
    shown = figure(clean, out / "figures" / "study", f"Clean runs. {caption(clean)}".strip())
    write_atomically(out / "study.html", build(study, shown, command).encode())
    return out / "study.html"


def labelled(study: Study) -> Comparison:
    """The clean runs as a comparison whose groups have the names of the table."""
    found = group_results([run for entry in study.entries for run in entry.clean])
    groups = tuple(replace(group, label=entry.label) for group, entry in zip(found.groups, study.entries, strict=True))
    return replace(found, groups=groups)


def build(study: Study, shown: str, command: str) -> str:
    """The page; shown: the figure of the clean runs."""
    heads, rows = benchmark_datasets.table(study)
    cells = [tuple(escape(cell.replace(" ", "\u00a0")) for cell in row) for row in rows]
    names = ("Way of learning", *(head[:1].upper() + head[1:] for head in heads[1:]))
    sections = [
        Section("figure", "Figure", "How it went", shown),
        Section("table", "Table", "What came out", table(names, cells, wide=True)),
        Section("method", "Method", "How this was made", _method(study, command)),
        Section("runs", "Runs", "Every run and its folder", _runs(study)),
    ]
    words = escape(benchmark_datasets.lead(study.plan))
    quick, stop, rest = words.partition(". ") if benchmark_datasets.is_quick(study.plan) else ("", "", words)
    lead = f"{quick}{stop}{_headline(study)} {rest}"  # how little was run comes first
    return document(BENCHMARKS[study.plan.name].title, lead, sections)


def _headline(study: Study) -> str:
    """Who ends highest, and who gets how far with the fewest bytes."""

    def words(entry: StudyEntry) -> str:
        return f"<b>{escape(entry.label)}</b>, {escape(percent_words(entry.accuracy()))}"

    best = max(study.entries, key=lambda entry: entry.accuracy().mean)
    leanest = min(study.entries, key=lambda entry: entry.share)
    uplink = f"with {100 * leanest.share:.1f} % of FedAvg's uplink"
    if leanest is best:
        return f"Highest without attackers, and least sent: {words(best)}, {uplink}."
    return f"Highest without attackers: {words(best)}. Least sent: {words(leanest)}, {uplink}."


def _method(study: Study, command: str) -> str:
    plan, start = study.plan, study.plan.start
    data, minutes = start.data, sum(run.summary.seconds for run in study.runs) / 60
    took = (
        f"{minutes / 60:.1f} hours"
        if minutes >= 60
        else f"{60 * minutes:.0f} seconds"
        if minutes < 2
        else f"{minutes:.0f} minutes"
    )
    rotation = [run.spec for run in study.runs if run.spec.selection.name == "rotation"]
    turns = (
        f"In verified rotation {rotation[0].selection.k} workers upload in turn, 4 bits a number. " if rotation else ""
    )
    attack = attack_words(benchmark_datasets.ATTACK["attack.name"]) if plan.attacked else ""
    return (
        f"<p>Made by <code>{escape(command)}</code>: {len(study.runs)} runs, {took} one after the other. "
        f"Model {escape(start.model)}, data {escape(data.source)}, {escape(data.partition)}; "
        f"{escape(work_words(start.local))}, batches of {start.local.batch_size}, rate {start.local.learning_rate:g}. "
        f"D_tr ({data.shared_training:,} samples), D_sc ({data.shared_scoring:,}) and the server's hold-out "
        f"({data.holdout:,}) are drawn from the training set first, at random; workers hold none of them. "
        "FedAvg without D_tr leaves them unused.</p>"
        f"<p>{turns}{escape(attack)} FedProx has its default settings, SCAFFOLD twice the rate and no momentum, "
        "with which it diverges. Uplink and traffic are "
        "payload of clean runs, all workers together, mean over seeds; D_G itself, which workers get once, is not "
        "counted. Banned: workers over all attacked runs.</p>"
        "<p>Beside this page: <code>table.md</code>, <code>results.csv</code> and <code>results.jsonl</code> (a row a "
        "run), <code>study.json</code> (what was asked for), <code>figures/</code> (with their "
        "numbers) and <code>runs/</code>. The same command continues a study that was stopped, and plays nothing "
        "twice.</p>"
    )


def _runs(study: Study) -> str:
    rows = [
        _run(entry.label + (", attacked" if run.spec.attack.byzantine else ""), run)
        for entry in study.entries
        for run in (*entry.clean, *entry.attacked)
    ]
    return table(("Run", "Seed", "Folder", "Final accuracy", "Best", "Seconds"), rows, wide=True)


def _run(label: str, run: FinishedRun) -> tuple[str, ...]:
    name, summary = escape(run.folder.name), run.summary
    return (
        escape(label), str(run.spec.seed), f'<a href="runs/{name}/">{name}</a>',
        f"{100 * summary.final_accuracy:.2f} %", f"{100 * summary.best_accuracy:.2f} %", f"{summary.seconds:,.0f}",
    )  # fmt: skip
