"""The commands run and resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cbdsl.cli import interrupts, options
from cbdsl.cli.display import Display, print_summary
from cbdsl.cli.options import Json, Log, Metrics, NoBaseline, On, Shards, Threads
from cbdsl.cli.spec_options import SpecWords, takes_spec
from cbdsl.runs import loop
from cbdsl.runs.callbacks import open_loggers
from cbdsl.runs.folder import run_folder
from cbdsl.runs.result import Result


@takes_spec()
def run(  # noqa: PLR0913, PLR0917 - one parameter per option
    words: SpecWords,
    out: Annotated[Path | None, typer.Option(help="A new folder for the run; runs/<name> if not given.")] = None,
    log: Log = None,
    metrics: Metrics = False,
    threads: Threads = None,
    on: On = None,
    shards: Shards = None,
    no_baseline: NoBaseline = False,
    as_json: Json = False,
) -> None:
    """Run one experiment; write its records, model and summary into a folder."""
    spec = words.resolved()
    folder = out or run_folder(spec)
    interrupts.advise_resume(folder, on)
    callbacks = [Display(), *open_loggers(log, folder)]
    result = loop.run_resolved(
        spec,
        out=folder,
        threads=threads,
        on=on,
        shards=shards,
        baseline=not no_baseline,
        metrics=metrics,
        callbacks=callbacks,
    )
    conclude(result, as_json)


def resume(  # noqa: PLR0913, PLR0917 - one parameter per option
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a stopped or finished run.")],
    rounds: Annotated[int | None, typer.Option(min=1, help="Total number of rounds: prolong a finished run.")] = None,
    log: Log = None,
    metrics: Metrics = False,
    threads: Threads = None,
    on: On = None,
    shards: Shards = None,
    no_baseline: NoBaseline = False,
    as_json: Json = False,
) -> None:
    """Resume an interrupted run. The result is identical to an uninterrupted one."""
    interrupts.advise_resume(folder, on)
    callbacks = [Display(), *open_loggers(log, folder)]
    result = loop.resume(
        folder,
        rounds=rounds,
        threads=threads,
        on=on,
        shards=shards,
        baseline=not no_baseline,
        metrics=metrics,
        callbacks=callbacks,
    )
    conclude(result, as_json)


def conclude(result: Result, as_json: bool) -> None:
    """Print the summary of a run, and draw its accuracy in its folder."""
    if as_json:
        typer.echo(json.dumps(result.summary.to_json(), indent=2))
        return
    print_summary(result)
    draw(result)


def draw(result: Result) -> None:
    """Draw accuracy.png in a run's folder, and local_test.png if workers were measured, if matplotlib is installed."""
    if result.folder is None:
        return
    if not options.is_installed("matplotlib"):
        how = options.how_to_install("matplotlib")
        typer.echo(f"accuracy.png is left out: matplotlib is not installed ({how}).", err=True)
        return
    from cbdsl.report.figures import save_accuracy_plot, save_local_test  # noqa: PLC0415 - they need matplotlib

    save_accuracy_plot(result.folder / "accuracy.png", result.summary, result.rounds)
    if result.per_worker:
        save_local_test(result.folder / "local_test.png", result.summary, result.per_worker, result.rounds)
