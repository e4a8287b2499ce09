"""`cbdsl arena`: every attack against every defence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cbdsl.cli import extras, interrupts
from cbdsl.cli.options import Jobs, On, Plugins, Settings
from cbdsl.settings import numbers, parse_setting, words


def arena(  # noqa: PLR0913, PLR0917 - one parameter an option
    attacks: Annotated[str | None, typer.Option(help="Attacks, separated by commas; all if not given.")] = None,
    defences: Annotated[
        str | None, typer.Option(help="Defences, aggregators, selections or methods; all defences if not given.")
    ] = None,
    byzantine: Annotated[str | None, typer.Option(help="Numbers of attackers; 1,5,20 if not given.")] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="How many seeds, from 0; if not given 3 for our defences and FedAvg, 1 for the rest."),
    ] = None,
    presets: Annotated[
        str | None, typer.Option("--preset", help="Starting points; strong-iid,strong-noniid if not given.")
    ] = None,
    plugins: Plugins = None,
    settings: Settings = None,
    quick: Annotated[bool, typer.Option("--quick", help="A taste, in minutes: four attacks, six defences.")] = False,
    out: Annotated[Path | None, typer.Option(help="The folder; the same one continues what was stopped.")] = None,
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Set every attack on every defence: heatmaps, worst cases, detection, cost: one page."""
    interrupts.go_on_with(interrupts.command_line())
    extras.demand("matplotlib", "it draws the heatmaps")
    from cbdsl.cli.progress import SweepDisplay  # noqa: PLC0415
    from cbdsl.cli.tables import print_arena  # noqa: PLC0415
    from cbdsl.runs.resolve import refuse_idle  # noqa: PLC0415
    from cbdsl.study import arena as job  # noqa: PLC0415
    from cbdsl.study.forecast import forecast  # noqa: PLC0415

    start = replace(job.QUICK, plugins=tuple(plugins or ())) if quick else job.Contest(plugins=tuple(plugins or ()))
    own = dict(map(parse_setting, settings or []))
    chosen: dict[str, Any] = {
        "attacks": attacks and words(attacks),
        "defences": defences and words(defences),
        "byzantine": byzantine and numbers(byzantine, "--byzantine"),
        "seeds": seeds and tuple(range(seeds)),
        "other_seeds": seeds and tuple(range(seeds)),
        "presets": presets and words(presets),
        "settings": {**start.settings, **own} if own else None,
    }
    contest = replace(start, **{key: value for key, value in chosen.items() if value is not None})
    folder = out or Path("arena-quick" if quick else "arena")
    tasks = job.tasks_of(contest)
    refuse_idle([task.spec for task in tasks], own)
    if on is None:
        typer.echo(forecast(tasks, folder, jobs).words(), err=True)
    with SweepDisplay(len(tasks), folder) as display:
        held = job.hold(contest, folder, jobs, display.show, on)
    from cbdsl.report import arena_page  # noqa: PLC0415 - matplotlib loads slowly

    print_arena(held, arena_page.write(contest, held.bouts, folder, interrupts.command_line()))
