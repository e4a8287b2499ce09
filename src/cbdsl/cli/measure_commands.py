"""Commands that measure: theory and bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cbdsl.cli import interrupts, options
from cbdsl.cli.display import headline
from cbdsl.cli.options import Threads
from cbdsl.cli.spec_options import DEFAULT_PRESET, SpecWords, takes_spec
from cbdsl.errors import UserError
from cbdsl.runs.folder import RunFolder
from cbdsl.spec import Spec, numbers, words
from cbdsl.theory.measure import TheoryResult, constants_table, describe_result, make_table, measure
from cbdsl.util.console import ProgressLine, plain_console
from cbdsl.util.files import write_atomically

_SUBJECT = f"A preset, a TOML file, or the folder of a run; {DEFAULT_PRESET} if not given."


@takes_spec(start=_SUBJECT)
def theory(
    spec_words: SpecWords,
    threads: Threads = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as JSON, alone on standard output.")
    ] = False,
) -> None:
    """Repeat a run and compare it with the paper's two theorems.

    In the folder of a run the findings are written to theory.json, unless options change the run.
    """
    interrupts.advise_start_again()
    path = Path(spec_words.start)
    if not spec_words.start or not path.is_dir():
        _print_theory(_measure_theory(spec_words.resolved(), threads), as_json, None)
        return
    folder, spec = RunFolder.open(path)  # the lock keeps others from resuming the run meanwhile
    try:
        result = _measure_theory(spec_words.resolved(spec), threads)
        saved = None if spec_words.given or spec_words.plugins else path / "theory.json"
        if saved is not None:
            write_atomically(saved, result.to_text().encode())
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.", code="unwritable-file") from error
    finally:
        folder.close()
    _print_theory(result, as_json, saved)


def _measure_theory(spec: Spec, threads: int | None) -> TheoryResult:
    with ProgressLine("round") as line:
        line.print(headline(spec))
        line.show(0, spec.rounds, "repeating the run beside the genie")
        return measure(
            spec, threads, lambda found: line.show(found.round, spec.rounds, f"model divergence {found.mean:.3f}")
        )


def _print_theory(result: TheoryResult, as_json: bool, saved: Path | None) -> None:
    if as_json:
        typer.echo(result.to_text(), nl=False)
        return
    console = plain_console(soft_wrap=True)
    console.print(constants_table(result.constants), highlight=False)
    console.print()
    console.print(make_table(result), highlight=False)
    console.print()
    for sentence in describe_result(result):
        console.print(sentence, highlight=False)
    if saved is not None:
        console.print(f"saved: {saved}", highlight=False)


_BATCH, _SCORING, _REPEATS = 10, 2000, 5


def bench(  # noqa: PLR0913, PLR0917 - one parameter per option
    models: Annotated[
        str, typer.Option(help="Models to measure, separated by commas; all built-in models if not given.")
    ] = "",
    workers: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "50",
    batch: Annotated[int | None, typer.Option(min=1, help=f"Samples per training batch; {_BATCH}.")] = None,
    scoring: Annotated[int | None, typer.Option(min=1, help=f"Samples that every worker scores; {_SCORING:,}.")] = None,
    threads: Threads = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help=f"Turns per contender, of which the fastest counts; {_REPEATS}.")
    ] = None,
    codecs: Annotated[str | None, typer.Option(help="Removed: see benchmarks/codecs.py.", hidden=True)] = None,
    on: Annotated[str | None, typer.Option(help="Removed: see benchmarks/ray_rounds.py.", hidden=True)] = None,
    shards: Annotated[int | None, typer.Option(help="Removed, with --on.", hidden=True)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two turns, 500 samples to score.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON, alone on standard output.")] = False,
) -> None:
    """Measure the native engine against torch. Trust the ratios, not the times."""
    interrupts.advise_start_again()
    _refuse_moved("--codecs", codecs, "benchmarks/codecs.py")
    _refuse_moved("--on", on, "benchmarks/ray_rounds.py")
    _refuse_moved("--shards", shards, "benchmarks/ray_rounds.py")
    counts = numbers(workers, "--workers")
    options.demand("torch", "the native engine is measured against it")
    interrupts.INTERRUPTS.hold()
    from cbdsl.studies import bench as job  # noqa: PLC0415 - it needs torch

    interrupts.INTERRUPTS.release()
    try:
        with ProgressLine("part", log_seconds=30.0) as line:
            rows = job.measure(
                words(models) or job.ZOO,
                counts,
                batch or _BATCH,
                threads,
                repeats or _REPEATS,
                scoring=scoring or _SCORING,
                quick=quick,
                progress=line.show,
            )
    except ValueError as error:
        raise UserError(f"{error}.", code="out-of-range") from error
    if as_json:
        typer.echo(json.dumps([row.to_dict() for row in rows], indent=2))
    else:
        Console().print(job.make_table(rows))


def _refuse_moved(option: str, value: object, script: str) -> None:
    if value is not None:
        raise UserError(
            f"{option} is no longer an option of cbdsl bench. Use python {script} in a copy of the source.",
            code="not-supported",
        )
