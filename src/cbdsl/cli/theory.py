"""`cbdsl theory`: play a run again and measure both theorems on it; in the run's own folder the findings are kept."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cbdsl.cli import interrupts
from cbdsl.cli.options import Threads
from cbdsl.cli.spec_options import DEFAULT_PRESET, SpecWords, takes_spec
from cbdsl.errors import UserError
from cbdsl.spec import Spec

if TYPE_CHECKING:
    from cbdsl.theory.genie import Divergence
    from cbdsl.theory.report import TheoryResult

_LOG_SECONDS = 10.0  # without a terminal, a line at most this often
_SUBJECT = f"A preset, a TOML file, or the folder of a run; {DEFAULT_PRESET} if not given."


@takes_spec(start=_SUBJECT)
def theory(
    words: SpecWords,
    threads: Threads = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as JSON, alone on standard output.")
    ] = False,
) -> None:
    """Play a run again and put the paper's two theorems beside it.

    In a run's folder the findings are kept as theory.json, unless options make it another run.
    """
    interrupts.start_again()
    path = Path(words.start)
    if not words.start or not path.is_dir():
        _show(_watched(words.resolved(), threads), as_json, None)
        return
    from cbdsl.runs.folder import RunFolder  # noqa: PLC0415

    folder, spec = RunFolder.open(path)  # and nobody else goes on with the run meanwhile
    try:
        result = _watched(words.resolved(spec), threads)
        kept = None if words.given or words.plugins else path / "theory.json"
        if kept is not None:
            _keep(kept, result)
    finally:
        folder.close()
    _show(result, as_json, kept)


def _watched(spec: Spec, threads: int | None) -> TheoryResult:
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from cbdsl.cli.console import plain_console  # noqa: PLC0415
    from cbdsl.cli.progress import headline  # noqa: PLC0415
    from cbdsl.theory.measure import measure  # noqa: PLC0415

    console = plain_console(stderr=True)
    console.print(headline(spec), highlight=False, soft_wrap=True)
    columns = (TextColumn("round"), MofNCompleteColumn(), BarColumn(bar_width=16), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("played again beside the genie", total=spec.rounds)

        last = time.monotonic()

        def show(found: Divergence) -> None:
            nonlocal last
            if not console.is_terminal and (time.monotonic() - last > _LOG_SECONDS or found.round == spec.rounds):
                last = time.monotonic()
                console.print(f"round {found.round}/{spec.rounds}  model divergence {found.mean:.3f}", highlight=False)
            bar.update(task, completed=found.round, description=f"model divergence {found.mean:.3f}")

        return measure(spec, threads, show)


def _keep(path: Path, result: TheoryResult) -> None:
    """Whole or not at all: a crash leaves the old file."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(result.to_text(), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error


def _show(result: TheoryResult, as_json: bool, kept: Path | None) -> None:
    if as_json:
        typer.echo(result.to_text(), nl=False)
        return
    from cbdsl.cli.console import plain_console  # noqa: PLC0415
    from cbdsl.theory.report import constants_table, table_of, verdict  # noqa: PLC0415

    console = plain_console(soft_wrap=True)
    console.print(constants_table(result.constants), highlight=False)
    console.print()
    console.print(table_of(result), highlight=False)
    console.print()
    for sentence in verdict(result):
        console.print(sentence, highlight=False)
    if kept is not None:
        console.print(f"kept: {kept}", highlight=False)
