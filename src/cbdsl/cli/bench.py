"""`cbdsl bench`: the engines against each other."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from cbdsl.cli import extras, interrupts
from cbdsl.cli.options import On, Shards, Threads
from cbdsl.errors import UserError
from cbdsl.settings import numbers, words

_BATCH, _SCORING, _REPEATS = 10, 2000, 5


def bench(  # noqa: PLR0913, PLR0917 - one parameter an option
    models: Annotated[
        str, typer.Option(help="Models to measure, separated by commas; all of the zoo if left out.")
    ] = "",
    workers: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "50",
    batch: Annotated[int | None, typer.Option(min=1, help=f"Samples in a training batch; {_BATCH}.")] = None,
    scoring: Annotated[int | None, typer.Option(min=1, help=f"Samples that every worker scores; {_SCORING:,}.")] = None,
    threads: Threads = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help=f"Turns each contender takes, of which its fastest counts; {_REPEATS}.")
    ] = None,
    codecs: Annotated[
        str | None, typer.Option(help="Measure these codecs instead, in rounds of CB-DSL: none,q4,q3, ...")
    ] = None,
    on: On = None,
    shards: Shards = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two turns, 500 samples to score.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON, alone on standard output.")] = False,
) -> None:
    """Measure the native engine against torch, or what codecs or a cluster cost, in one run: trust the ratios."""
    interrupts.start_again()
    counts = numbers(workers, "--workers")
    engines_alone = {"--batch": batch, "--scoring": scoring, "--quick": quick}
    if on is not None:
        _refuse({"--codecs": codecs, **engines_alone}, "a cluster is measured")
        _bench_ray(on, words(models) or ("cnn",), counts, threads, shards, repeats or _REPEATS, as_json)
        return
    _refuse({"--shards": shards}, "--on is not given")
    if codecs is not None:
        _refuse({"--models": models, "--repeats": repeats, **engines_alone}, "codecs are measured")
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
                words(models) or ZOO, counts, batch or _BATCH, threads, repeats or _REPEATS,
                scoring=scoring or _SCORING, quick=quick,
                progress=lambda done, total, what: status.update(f"{done}/{total}  {what}"),
            )  # fmt: skip
    except ValueError as error:
        raise UserError(f"{error}.") from error
    if as_json:
        typer.echo(json.dumps([row.to_dict() for row in rows], indent=2))
    else:
        Console().print(table(rows))


def _refuse(given: dict[str, object], where: str) -> None:
    idle = [name for name, value in given.items() if value]
    if idle:
        raise UserError(f"{' and '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect where {where}; omit it.")


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


def _bench_ray(
    on: str, models: tuple[str, ...], workers: tuple[int, ...], threads: int | None, shards: int | None, repeats: int,
    as_json: bool,
) -> None:  # fmt: skip
    from rich.console import Console  # noqa: PLC0415

    from cbdsl.study.bench_ray import measure_ray, ray_table  # noqa: PLC0415

    with Console(stderr=True).status("starting") as status:
        rows = measure_ray(on, models, workers, threads, shards, repeats, status.update)
    if as_json:
        typer.echo(json.dumps([row.to_dict() for row in rows], indent=2))
    else:
        Console().print(ray_table(rows))
