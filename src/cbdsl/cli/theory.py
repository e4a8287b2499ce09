"""What `cbdsl theory RUN` does: find the spec, measure it, show the findings and keep them in the run's folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cbdsl import spec as specs
from cbdsl.cli.progress import headline
from cbdsl.errors import UserError
from cbdsl.presets import PRESETS
from cbdsl.runs.folder import RunFolder
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec

if TYPE_CHECKING:
    from cbdsl.theory.genie import Divergence
    from cbdsl.theory.report import TheoryResult

_LOG_SECONDS = 10.0  # without a terminal, a line at most this often


def examine(subject: str, threads: int | None, as_json: bool) -> None:
    """Measure what was named and print the findings; in a run's folder they are kept as theory.json."""
    path = Path(subject)
    if not path.is_dir():
        result = _watched(_spec_of(subject), threads)
        _show(result, as_json, None)
        return
    folder, spec = RunFolder.open(path)  # and nobody else goes on with the run meanwhile
    try:
        result = _watched(spec, threads)
        kept = path / "theory.json"
        _keep(kept, result)
    finally:
        folder.close()
    _show(result, as_json, kept)


def _spec_of(subject: str) -> Spec:
    if subject in PRESETS:
        return PRESETS[subject]
    path = Path(subject)
    if path.is_file():
        return specs.read(path)
    raise UserError(
        f"'{subject}' is neither the folder of a run, nor a spec's TOML file, nor a preset. "
        f"The presets are: {', '.join(PRESETS)}. Make a run with: cbdsl run --out {subject}"
    )


def _watched(spec: Spec, threads: int | None) -> TheoryResult:
    from cbdsl.theory.measure import measure  # noqa: PLC0415 - torch takes seconds to load; a wrong name need not wait

    console = Console(stderr=True)
    console.print(headline(resolve(spec)), highlight=False, soft_wrap=True)
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
    console = Console(soft_wrap=True)
    if as_json:
        print(result.to_text(), end="")
        return
    from cbdsl.theory.report import constants_table, table_of, verdict  # noqa: PLC0415

    console.print(constants_table(result.constants), highlight=False)
    console.print()
    console.print(table_of(result), highlight=False)
    console.print()
    for sentence in verdict(result):
        console.print(sentence, highlight=False)
    if kept is not None:
        console.print(f"kept: {kept}", highlight=False)
