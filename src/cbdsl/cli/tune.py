"""`cbdsl tune`: search for settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cbdsl.cli import extras, interrupts
from cbdsl.cli.options import Jobs, On
from cbdsl.cli.spec_options import SpecWords, takes_spec
from cbdsl.settings import words as split_words


@takes_spec()
def tune(  # noqa: PLR0913, PLR0917 - one parameter an option
    words: SpecWords,
    over: Annotated[
        list[str],
        typer.Option(metavar="KEY=RANGE", help="swarm.inertia=0.1..1, or local.learning_rate=1e-3..1e-1:log."),
    ],
    budget: Annotated[int, typer.Option(help="How many settings each search tries.")] = 60,
    by: Annotated[str, typer.Option(help="swarm, random, tpe (with optuna); several are compared.")] = "swarm",
    seeds: Annotated[int, typer.Option(help="Runs of each try, a seed each; their mean counts.")] = 1,
    repeat: Annotated[int, typer.Option(help="Searches of each kind, a seed each.")] = 1,
    confirm: Annotated[int, typer.Option(help="Other seeds, on which the best meets the spec as it is.")] = 3,
    whole: Annotated[bool, typer.Option("--whole", help="Play hopeless tries to their end, too.")] = False,
    out: Annotated[Path, typer.Option(help="The folder; the same one goes on with a search.")] = Path("tuning"),
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Search for good settings with a particle swarm, judged on the server's hold-out and never on the test set."""
    interrupts.go_on_with(interrupts.command_line())
    from cbdsl.cli.progress import SweepDisplay  # noqa: PLC0415
    from cbdsl.cli.tables import print_tuning  # noqa: PLC0415
    from cbdsl.study import tune as job  # noqa: PLC0415
    from cbdsl.study.space import Space, parse_range  # noqa: PLC0415

    start = words.spec()
    axes = tuple(parse_range(text, start) for text in over)
    words.refuse_varied(axis.key for axis in axes)
    plan = job.Plan(Space(start, axes, words.given), budget, split_words(by), repeat, seeds, confirm, early=not whole)
    if on is None:  # a cluster's machines may have other files
        job.rehearse(plan)
    runs = budget * seeds * repeat * len(plan.by) + 2 * confirm
    with SweepDisplay(runs, out) as display:
        held = job.hold(plan, out, jobs, display.show, on)
    print_tuning(held, out)
    if extras.is_installed("matplotlib"):
        from cbdsl.report import tune_page  # noqa: PLC0415 - matplotlib loads slowly

        typer.echo(f"page: {tune_page.write(held, out, interrupts.command_line())}")
    else:
        how = extras.how_to_install("matplotlib")
        typer.echo(f"tuning.html is left out: matplotlib is not installed ({how}).", err=True)
