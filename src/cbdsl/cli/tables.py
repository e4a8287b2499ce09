"""Results as tables in a terminal, on standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cbdsl.runs.records import summary_rows
from cbdsl.spec import setting_values
from cbdsl.util.formatting import format_bytes

if TYPE_CHECKING:
    from cbdsl.runs.result import Result
    from cbdsl.studies.arena import Arena
    from cbdsl.studies.benchmark_datasets import Study
    from cbdsl.studies.compare import Comparison
    from cbdsl.studies.paper import JudgedClaim
    from cbdsl.studies.sweep import FinishedRun
    from cbdsl.studies.tune import Tuning

_WIDE = 160  # columns of a table that goes into a file or a pipe


def plain_console(stderr: bool = False, soft_wrap: bool = False) -> Console:
    """A console that takes text for text; style goes in `rich.text.Text`."""
    narrow = (sys.stderr if stderr else sys.stdout).isatty() or "COLUMNS" in os.environ
    width = None if narrow else _WIDE
    return Console(stderr=stderr, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False, width=width)


def _short(keys: Sequence[str]) -> list[str]:
    """Settings as the heads of columns: without their group, where that leaves no two alike."""
    names = [key.rpartition(".")[2] for key in keys]
    taken = {"runs", "uplink", "downlink", "uploads", "bans"}
    return names if len(set(names)) == len(names) and not taken & set(names) else list(keys)


def print_sweep(results: Sequence[FinishedRun], axes: Sequence[str], out: Path) -> None:
    """The results of a grid as a table, on standard output."""
    from cbdsl.studies.compare import value_words  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in _short(axes):
        table.add_column(heading)
    for heading in ("accuracy", "best", "uploads", "uplink", "banned"):
        table.add_column(heading, justify="right")
    for result in results:
        summary = result.summary
        table.add_row(
            *(value_words(value) for value in setting_values(result.spec, axes).values()),
            f"{summary.final_accuracy:.2%}",
            f"{summary.best_accuracy:.2%}",
            f"{summary.uploads:,}",
            format_bytes(summary.uplink_bytes),
            str(len(summary.banned)),
        )
    console = plain_console()
    console.print(table, highlight=False)
    console.print(f"table: {out / 'results.csv'}", highlight=False, soft_wrap=True)


def print_comparison(comparison: Comparison) -> None:
    """Groups of runs, mean ± deviation over the seeds of each, on standard output."""
    from cbdsl.studies.compare import PAIRED, comparison_rows  # noqa: PLC0415

    console, settings = plain_console(), len(comparison.keys)
    heads, rows = comparison_rows(comparison)
    columns = dict(zip((*_short(comparison.keys), *heads[settings:]), zip(*rows, strict=True), strict=True))
    seeds = {row.seeds for row in comparison.rows}
    if len(seeds) == 1:  # said once, below
        columns["runs"] = tuple(str(row.runs) for row in comparison.rows)
    dropped = []
    for heading in ("best accuracy", "downlink", "uploads", "bans"):
        if sum(max(map(len, (head, *cells))) + 2 for head, cells in columns.items()) > console.width:
            dropped.append(heading)
            del columns[heading]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, heading in enumerate(columns):
        table.add_column(heading, justify="left" if place < settings else "right")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, row))
    console.print(table, highlight=False)
    if len(seeds) == 1:
        console.print(f"seeds: {', '.join(map(str, comparison.rows[0].seeds))}", soft_wrap=True)
    if PAIRED in columns:
        console.print(f"{PAIRED}: in final accuracy, seed by seed", soft_wrap=True)
    if dropped:
        console.print(f"not shown for want of room: {', '.join(dropped)}", soft_wrap=True)
    for note in comparison.notes:
        console.print(Text(note, style="yellow"), soft_wrap=True)


def print_study(study: Study, page: Path) -> None:
    """A study's table below the sentence that says what was run, on standard output."""
    from cbdsl.studies.benchmark_datasets import lead, table  # noqa: PLC0415

    headings, rows = table(study)
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        shown.add_column(heading, justify="right" if heading else "left", no_wrap=not heading)
    for row in rows:
        shown.add_row(*map(Text, row))
    console = plain_console()
    console.print(lead(study.plan), highlight=False, soft_wrap=True)
    console.print(shown, highlight=False)
    console.print(f"page: {page}", highlight=False, soft_wrap=True)


def print_tuning(tuning: Tuning, out: Path) -> None:
    """What a search found, and what it is worth on other seeds, on standard output."""
    from cbdsl.studies.compare import percent_words  # noqa: PLC0415
    from cbdsl.studies.tune import verdict  # noqa: PLC0415

    best = tuning.outcome.best
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for key, value in best.values.items():
        table.add_row(key, str(value))
    table.add_row("hold-out", f"{best.error:.2%} wrong; try {best.number} of {tuning.plan.budget} by {best.search}")
    if tuning.plan.repeats > 1 or len(tuning.plan.by) > 1:
        for name in tuning.plan.by:
            table.add_row(f"by {name}", f"{percent_words(tuning.ends(name))} wrong on the hold-out at best")
    table.add_row("test set", verdict(tuning))
    table.add_row("spec", str(out / "best.toml"))
    plain_console().print(table, highlight=False, soft_wrap=True)


def print_claims(claims: Sequence[JudgedClaim], page: Path) -> None:
    """The verdicts on the paper's claims, on standard output."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("fig.", "claim", "regime", "verdict", "measured"):
        table.add_column(heading)
    colours = {"holds": "green", "holds in this regime": "green", "undecided": "yellow", "does not hold": "red"}
    for claim in claims:
        verdict = Text(claim.verdict, style=colours.get(claim.verdict, ""))
        table.add_row(str(claim.figure), claim.claim, claim.regime, verdict, claim.measured)
    console = plain_console()
    console.print(table, highlight=False)
    console.print(f"page: {page}", highlight=False, soft_wrap=True)


def print_arena(held: Arena, page: Path) -> None:
    """Where every defence stands in its worst bout, on standard output."""
    from cbdsl.studies.arena import defence_named  # noqa: PLC0415

    console = plain_console()
    for preset in held.contest.presets:
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column(f"defence, {preset}")
        for heading in ("clean", "worst", "under", "loss", "lost\nbouts", "uplink", "honest\nbanned"):
            table.add_column(heading, justify="left" if heading == "under" else "right")
        for name in held.contest.defences:
            own = [bout for bout in held.bouts if (bout.preset, bout.defence) == (preset, name)]
            fought = [bout for bout in own if bout.attacked]
            worst, lost = min(own, key=lambda bout: bout.accuracy), sum(not bout.stands for bout in fought)
            table.add_row(
                defence_named(name).label,
                f"{own[0].accuracy:.1%}",
                f"{worst.accuracy:.1%}",
                f"{worst.attack or 'no attack'}, {worst.byzantine}",
                f"{100 * max(bout.lost for bout in fought):.1f}",
                Text(f"{lost} of {len(fought)}", style="red" if lost else "green"),
                format_bytes(own[0].uplink_bytes),
                f"{sum(bout.false_bans for bout in own):g}",
            )
        console.print(table, highlight=False)
    console.print("loss: the largest, in points, against the same defence with the attackers absent", highlight=False)
    console.print(f"page: {page}", highlight=False, soft_wrap=True)


def print_summary(result: Result) -> None:
    """A summary that a newcomer understands, on standard output."""
    summary, console = result.summary, plain_console()
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, text in summary_rows(summary):
        table.add_row(name, text)
    if result.folder is not None:
        table.add_row("folder", str(result.folder))
    console.print()
    console.print(table, highlight=False, soft_wrap=True)
