"""`cbdsl study`: several ways of learning together on one of the field's data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cbdsl.cli import extras, interrupts
from cbdsl.cli.options import Jobs, On, Settings
from cbdsl.settings import parse_setting, words


def study(  # noqa: PLR0913, PLR0917 - one parameter an option
    name: Annotated[str, typer.Argument(metavar="NAME", help="hapt, fashion or cifar10: a preset of that name.")],
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds, from 0; 3 if not given.")] = None,
    ways: Annotated[
        str | None,
        typer.Option(help="Of fedavg, fedavg-tr, fedprox-tr, scaffold-tr, cb-dsl, rotation; all if not given."),
    ] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Leave the runs with attackers out.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A fifth of the rounds, one seed: a look, no result.")] = False,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The folder; the same one continues what was stopped.")] = None,
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Compare ways of learning on hapt, fashion or cifar10, clean and attacked: a table and a page."""
    interrupts.go_on_with(interrupts.command_line())
    extras.demand("matplotlib", "it draws the figure")
    from cbdsl.cli.progress import SweepDisplay  # noqa: PLC0415
    from cbdsl.cli.tables import print_study  # noqa: PLC0415
    from cbdsl.runs.resolve import refuse_idle  # noqa: PLC0415
    from cbdsl.study import field as job  # noqa: PLC0415

    own = dict(map(parse_setting, settings or []))
    plan = job.Plan(
        name,
        tuple(range(seeds or (1 if quick else 3))),
        words(ways) if ways is not None else tuple(job.WAYS),
        attacked=not clean,
        quick=quick,
        settings=own,
    )
    specs = plan.specs()
    refuse_idle(specs, own)
    folder = out or Path(f"study-{name}-quick" if quick else f"study-{name}")
    with SweepDisplay(len(specs), folder) as display:
        held = job.hold(plan, folder, jobs, display.show, on)
    from cbdsl.report import field_page  # noqa: PLC0415 - matplotlib loads slowly

    print_study(held, field_page.write(held, folder, interrupts.command_line()))
