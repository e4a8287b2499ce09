"""`cbdsl bench`: the engines against each other."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from cbdsl.cli import extras, interrupts
from cbdsl.cli.options import Threads
from cbdsl.errors import UserError
from cbdsl.settings import numbers, words


def bench(  # noqa: PLR0913, PLR0917 - one parameter an option
    models: Annotated[
        str, typer.Option(help="Models to measure, separated by commas; all of the zoo if left out.")
    ] = "",
    workers: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "50",
    batch: Annotated[int, typer.Option(min=1, help="Samples in a training batch.")] = 10,
    scoring: Annotated[int, typer.Option(min=1, help="Samples that every worker scores.")] = 2000,
    threads: Threads = None,
    repeats: Annotated[int, typer.Option(min=1, help="Turns each contender takes; its fastest counts.")] = 5,
    codecs: Annotated[
        str | None, typer.Option(help="Measure these codecs instead, in rounds of CB-DSL: none,q4,q3, ...")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two turns, 500 samples to score.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON, alone on standard output.")] = False,
) -> None:
    """Measure the native engine against torch, or what codecs cost, in one run: trust the ratios."""
    interrupts.start_again()
    counts = numbers(workers, "--workers")
    if codecs is not None:
        _bench_codecs(words(codecs), counts, threads, as_json)
        return
    extras.demand("torch", "the native engine is measured against it")
    from rich.console import Console  # noqa: PLC0415

    interrupts.INTERRUPTS.hold()
    from cbdsl.study.bench import ZOO, measure, table  # noqa: PLC0415 - it loads torch

    interrupts.INTERRUPTS.release()
    try:
        with Console(stderr=True).status("starting") as status:
            rows = measure(
                words(models) if models else ZOO, counts, batch, threads, repeats, scoring=scoring, quick=quick,
                progress=lambda done, total, what: status.update(f"{done}/{total}  {what}"),
            )  # fmt: skip
    except ValueError as error:
        raise UserError(f"{error}.") from error
    if as_json:
        typer.echo(json.dumps([row.to_dict() for row in rows], indent=2))
    else:
        Console().print(table(rows))


def _bench_codecs(names: tuple[str, ...], workers: tuple[int, ...], threads: int | None, as_json: bool) -> None:
    from rich.console import Console  # noqa: PLC0415

    from cbdsl.study.bench_codecs import codec_table, measure_codecs  # noqa: PLC0415

    try:
        with Console(stderr=True).status("starting") as status:
            rows = measure_codecs(names, workers, threads, status.update)
    except ValueError as error:
        raise UserError(str(error) if isinstance(error, UserError) else f"{error}.") from error
    if as_json:
        typer.echo(json.dumps([row.to_dict() for row in rows], indent=2))
    else:
        Console().print(codec_table(rows))
