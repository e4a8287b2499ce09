"""Prints the results of studies as tables on standard output."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from cbdsl.cli.display import new_list, new_table
from cbdsl.runs.metrics import find_metric
from cbdsl.spec import setting_values
from cbdsl.studies.arena import Arena, get_defence
from cbdsl.studies.benchmark_datasets import Study, describe_study, study_table
from cbdsl.studies.compare import Comparison, comparison_rows, describe_tests, format_percent, format_value
from cbdsl.studies.paper import JudgedClaim
from cbdsl.studies.sweep import FinishedRun
from cbdsl.util.console import plain_console
from cbdsl.util.formatting import format_bytes

if TYPE_CHECKING:
    from cbdsl.studies.tune import Tuning


def _print_page(console: Console, page: Path) -> None:
    console.print(f"page: {page}", highlight=False, soft_wrap=True)


def _shorten(keys: Sequence[str]) -> list[str]:
    """Return settings as headings, without their group if they stay distinct."""
    names = [key.removesuffix(".name").rpartition(".")[2] for key in keys]
    taken = {"runs", "uplink", "downlink", "uploads", "bans"}
    return names if len(set(names)) == len(names) and not taken & set(names) else list(keys)


def print_sweep(results: Sequence[FinishedRun], axes: Sequence[str], out: Path) -> None:
    """Print the results of a grid as a table."""
    table = new_table(*_shorten(axes))
    metrics = [find_metric(result.summary.metric) for result in results]
    title = metrics[0].title if len({metric.title for metric in metrics}) == 1 else "result"
    for heading in (title, "best", "uploads", "uplink", "banned"):
        table.add_column(heading, justify="right")
    for result, metric in zip(results, metrics, strict=True):
        summary = result.summary
        table.add_row(
            *(format_value(value) for value in setting_values(result.spec, axes).values()),
            metric.text(summary.final_value),
            metric.text(summary.best_value),
            f"{summary.uploads:,}",
            format_bytes(summary.uplink_bytes),
            str(len(summary.banned)),
        )
    console = plain_console()
    console.print(table, highlight=False)
    console.print(f"table: {out / 'results.csv'}", highlight=False, soft_wrap=True)


def print_comparison(comparison: Comparison) -> None:
    """Print groups of runs, mean ± deviation over the seeds of each."""
    console, settings = plain_console(), len(comparison.keys)
    heads, rows = comparison_rows(comparison)
    columns = dict(zip((*_shorten(comparison.keys), *heads[settings:]), zip(*rows, strict=True), strict=True))
    if comparison.labelled:
        labels = {"group": tuple(group.label for group in comparison.groups)}
        columns, settings = labels | dict(list(columns.items())[settings:]), 1
    seeds = {row.seeds for row in comparison.rows}
    if len(seeds) == 1:  # printed once, below
        columns["runs"] = tuple(str(row.runs) for row in comparison.rows)
    dropped = []
    for heading in (f"best {comparison.metric.title}", "downlink", "bans", "uploads", "p (exact)"):
        if heading not in columns:
            continue
        if sum(max(map(len, (head, *cells))) + 2 for head, cells in columns.items()) > console.width:
            dropped.append(heading)
            del columns[heading]
    table = new_table()
    for place, heading in enumerate(columns):
        table.add_column(heading, justify="left" if place < settings else "right")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, row))
    console.print(table, highlight=False)
    if len(seeds) == 1:
        console.print(f"seeds: {', '.join(map(str, comparison.rows[0].seeds))}", soft_wrap=True)
    if tested := describe_tests(comparison):
        console.print(tested, soft_wrap=True)
    if not comparison.metric.is_share:
        console.print(f"{comparison.metric.title}: {comparison.metric.better} is better", soft_wrap=True)
    if dropped:
        console.print(f"not shown (the terminal is too narrow): {', '.join(dropped)}", soft_wrap=True)
    for note in comparison.notes:
        console.print(Text(note, style="yellow"), soft_wrap=True)


def print_study(study: Study, page: Path) -> None:
    """Print what was run in a study and its table."""
    print_results(describe_study(study.plan), *study_table(study), page)


def print_results(description: str, headings: Sequence[str], rows: Sequence[Sequence[str]], page: Path) -> None:
    """Print a description and a table; every column but the first is at the right."""
    table = new_table()
    for heading in headings:
        first = heading == headings[0]
        table.add_column(heading, justify="left" if first else "right", no_wrap=first)
    for row in rows:
        table.add_row(*map(Text, row))
    console = plain_console()
    console.print(description, highlight=False, soft_wrap=True)
    console.print(table, highlight=False)
    _print_page(console, page)


def print_tuning(tuning: Tuning, gain: str, out: Path) -> None:
    """Print the best settings of a search and their result on other seeds, the gain."""
    best = tuning.outcome.best
    table = new_list()
    for key, value in best.values.items():
        table.add_row(key, str(value))
    table.add_row("hold-out", f"{best.error_text}; trial {best.number} of {tuning.plan.budget} by {best.search}")
    if tuning.plan.repeats > 1 or len(tuning.plan.by) > 1:
        for name in tuning.plan.by:
            lowest = tuning.lowest_errors(name)
            text = f"{format_percent(lowest)} wrong" if best.classifies else f"a loss of {lowest.mean:.4g}"
            table.add_row(f"by {name}", f"{text} on the hold-out at best")
    table.add_row("test set", gain)
    table.add_row("spec", str(out / "best.toml"))
    plain_console().print(table, highlight=False, soft_wrap=True)


def print_claims(claims: Sequence[JudgedClaim], page: Path) -> None:
    """Print the verdicts on the paper's claims."""
    table = new_table("fig.", "claim", "regime", "verdict", "measured")
    colours = {"holds": "green", "holds in this regime": "green", "undecided": "yellow", "does not hold": "red"}
    for claim in claims:
        verdict = Text(claim.verdict, style=colours.get(claim.verdict, ""))
        measured = f"{claim.measured}; {claim.unjudged}" if claim.unjudged else claim.measured
        table.add_row(str(claim.figure), claim.claim, claim.regime, verdict, measured)
    console = plain_console()
    console.print(table, highlight=False)
    _print_page(console, page)


def print_arena(arena: Arena, page: Path) -> None:
    """Print the worst match of every defence."""
    console = plain_console()
    for preset in arena.plan.presets:
        table = new_table()
        table.add_column(f"defence, {preset}")
        for heading in ("clean", "worst", "under", "loss", "lost\nmatches", "uplink", "honest\nbanned"):
            table.add_column(heading, justify="left" if heading == "under" else "right")
        for name in arena.plan.defences:
            own = [match for match in arena.matches if (match.preset, match.defence) == (preset, name)]
            attacked = [match for match in own if match.attacked]
            worst, lost = min(own, key=lambda match: match.accuracy), sum(not match.withstands for match in attacked)
            table.add_row(
                get_defence(name).label,
                f"{own[0].accuracy:.1%}",
                f"{worst.accuracy:.1%}",
                f"{worst.attack or 'no attack'}, {worst.byzantine}",
                f"{100 * max(match.lost for match in attacked):.1f}",
                Text(f"{lost} of {len(attacked)}", style="red" if lost else "green"),
                format_bytes(own[0].uplink_bytes),
                f"{sum(match.false_bans for match in own):g}",
            )
        console.print(table, highlight=False)
    console.print("loss: the largest, in points, against the same defence with the attackers absent", highlight=False)
    _print_page(console, page)
