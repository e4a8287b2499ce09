"""`cbdsl reproduce`: the paper's figures and claims."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cbdsl.cli import extras, interrupts
from cbdsl.cli.options import Jobs, On, Settings
from cbdsl.settings import parse_setting


def reproduce(
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed, one regime, fewer rounds: minutes instead of most of an hour.")
    ] = False,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The folder; the same one continues a job that was stopped.")] = None,
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Run what is behind the paper's figures, judge its claims, measure its theorems: one page."""
    interrupts.go_on_with(interrupts.command_line())
    extras.demand("matplotlib", "it draws the figures")
    from cbdsl.cli.progress import SweepDisplay  # noqa: PLC0415
    from cbdsl.cli.tables import print_claims  # noqa: PLC0415
    from cbdsl.runs.resolve import refuse_idle  # noqa: PLC0415
    from cbdsl.study import reproduce as job  # noqa: PLC0415
    from cbdsl.study.paper import FULL, QUICK  # noqa: PLC0415

    chosen = tuple(map(parse_setting, settings or []))
    plan = replace(QUICK if quick else FULL, settings=chosen)
    folder = out or Path("reproduction-quick" if quick else "reproduction")
    tasks = job.tasks_of(plan)
    refuse_idle([task.spec for task in tasks], [key for key, _ in chosen])
    with SweepDisplay(len(tasks), folder) as display:
        words = ["cbdsl reproduce", *(["--quick"] if quick else []), *(f"--set {text}" for text in settings or [])]
        made = job.reproduce(plan, folder, jobs, display.show, on)
    from cbdsl.report import reproduction  # noqa: PLC0415 - matplotlib loads slowly

    print_claims(made.claims, reproduction.write(made, " ".join(words)))
