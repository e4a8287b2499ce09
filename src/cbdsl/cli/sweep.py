"""`cbdsl sweep`: a grid of experiments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cbdsl.cli import extras, interrupts
from cbdsl.cli.options import Jobs, On
from cbdsl.cli.spec_options import SpecWords, takes_spec

if TYPE_CHECKING:
    from cbdsl.spec import Spec

Axes = list[tuple[str, list[Any]]]


@takes_spec()
def sweep(
    words: SpecWords,
    over: Annotated[
        list[str], typer.Option(metavar="KEY=VALUES", help="seed=0..4, or swarm.inertia=0.5,0.9; may repeat.")
    ],
    out: Annotated[Path, typer.Option(help="The folder of the sweep; the same one continues it.")] = Path("sweep"),
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Run a grid of experiments in parallel; finished ones are not run again."""
    interrupts.go_on_with(interrupts.command_line())
    from cbdsl.cli.progress import SweepDisplay  # noqa: PLC0415
    from cbdsl.cli.tables import print_comparison, print_sweep  # noqa: PLC0415
    from cbdsl.study.compare import group_results  # noqa: PLC0415
    from cbdsl.study.sweep import parse_axis, refuse_others, run_all, write_table  # noqa: PLC0415

    axes = [parse_axis(text) for text in over]
    keys = [key for key, _ in axes]
    points = checked_points(words, axes)
    refuse_others(out, "groups.csv", ("tuning.json", "contest.json", "plan.json", "study.json", "spec.toml"))
    with SweepDisplay(len(points), out) as display:
        results = run_all(points, out, jobs, display.show, on)
    write_table(results, keys, out)
    print_sweep(results, keys, out)
    if len({result.spec.seed for result in results}) > 1:
        typer.echo()
        print_comparison(group_results(results, keys))
    if extras.is_installed("matplotlib"):
        from cbdsl.report.comparison import write_sweep_index  # noqa: PLC0415 - matplotlib loads slowly

        typer.echo(f"page: {write_sweep_index(results, keys, out)}")
    else:
        how = extras.how_to_install("matplotlib")
        typer.echo(f"index.html is left out: matplotlib is not installed ({how}).", err=True)


def checked_points(words: SpecWords, axes: Axes) -> list[Spec]:
    """Every point of a grid, resolved: what is wrong with any of them is found before the first one is run."""
    from cbdsl.runs.resolve import resolve_all, to_vary  # noqa: PLC0415
    from cbdsl.study.sweep import grid  # noqa: PLC0415

    keys = [key for key, _ in axes]
    words.refuse_varied(keys)
    start = to_vary(words.spec(), keys, words.given)
    return resolve_all(grid(start, axes), [*keys, *words.given])
