"""The command that audits a run's model for backdoors, and repairs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cbdsl.cli import interrupts, options
from cbdsl.cli.display import new_table
from cbdsl.cli.options import Threads
from cbdsl.errors import UserError
from cbdsl.models import saved_model
from cbdsl.models.saved_model import SavedModel, file_of, notes_of
from cbdsl.network.session import read_secret, use_kept_init
from cbdsl.runs.build import Experiment
from cbdsl.runs.folder import RunFolder
from cbdsl.spec import init_file
from cbdsl.util.console import ProgressLine, plain_console
from cbdsl.util.files import write_atomically
from cbdsl.util.serialize import to_plain

if TYPE_CHECKING:
    from cbdsl.arrays import Floats
    from cbdsl.studies.audit import AuditReport


def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run's folder.")],
    repair: Annotated[
        bool, typer.Option("--repair", help="Unlearn the patches of suspicious classes; write a new model.")
    ] = False,
    prune: Annotated[
        bool,
        typer.Option("--prune", help="With --repair: also remove idle units, even if no class is suspicious."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --repair: the new model; RUN/repaired.safetensors if not given."),
    ] = None,
    threads: Threads = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON, alone on standard output.")
    ] = False,
) -> None:
    """Search a trained model for backdoors before it is released; remove them on request.

    Exit code 1: a class is suspicious, and was not repaired.
    """
    interrupts.advise_start_again()
    if (out is not None or prune) and not repair:
        raise UserError(
            "--out and --prune are for --repair, which makes a new model. Leave them out.", code="no-effect"
        )
    target = out or run / "repaired.safetensors"
    if repair and target.suffix != ".safetensors":
        raise UserError(f"--repair writes a .safetensors file; given --out {target}.", code="conflict")
    if repair and target.exists():
        raise UserError(
            f"{target} exists; nothing was overwritten. Give another --out, or remove it.", code="exists-already"
        )
    options.demand("torch", "patches are searched along gradients of a model's input")
    experiment, saved = _load(run, threads)
    interrupts.INTERRUPTS.hold()
    from cbdsl.studies.audit import audit_model  # noqa: PLC0415 - it needs torch

    interrupts.INTERRUPTS.release()
    with ProgressLine("search") as line:
        report, repaired = audit_model(experiment, experiment.network.trained(saved.weights), repair, prune, line.show)
    written = None if repaired is None else _write(target, saved, experiment, repaired)
    if as_json:
        typer.echo(json.dumps(to_plain(report) | {"repaired": written}, indent=2))
    else:
        _print(report, saved, written)
    if report.left:
        raise typer.Exit(1)


def _load(path: Path, threads: int | None) -> tuple[Experiment, SavedModel]:
    """Build what a run was made of, but for the workers' samples, and read its model."""
    folder, spec = RunFolder.open(path)  # the lock keeps others from resuming the run meanwhile
    try:
        saved = saved_model.load(path)
        secret = read_secret(path) if (path / ".secret").exists() else 0
        experiment = Experiment.prepare(use_kept_init(spec, path), threads=threads, deal=False, secret=secret)
    finally:
        folder.close()
    if len(saved.weights) != experiment.network.whole_size:
        raise UserError(
            f"{path} has a model of {len(saved.weights):,} weights, and its spec.toml one of "
            f"{experiment.network.whole_size:,}: the data or a plugin changed. Audit it where it was trained.",
            code="wrong-run",
        )
    return experiment, saved


def _write(target: Path, saved: SavedModel, experiment: Experiment, weights: Floats) -> str:
    """Write the repaired model with the metadata of the run's own; return its path."""
    notes = {"spec_key": notes_of(init_file(saved.source)).get("spec_key", ""), "repaired": "cbdsl audit"}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, file_of(saved.card, experiment.network.tensors(weights), notes))
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror}.", code="unwritable-file") from error
    return str(target)


def _print(report: AuditReport, saved: SavedModel, written: str | None) -> None:
    console = plain_console(soft_wrap=True)
    if report.suspicious:
        console.print(_class_table(report, saved), highlight=False)
        console.print()
    else:
        lowest = min(one.ratio for one in report.classes)
        console.print(f"nothing suspicious: every class needs at least {lowest:.2f} of the references' patch")
    if report.suspicious or written is not None:
        console.print(_measurements_table(report, saved), highlight=False)
    if written is not None:
        if report.suspicious:
            left = ", ".join(saved.class_name(label) for label in report.left)
            console.print(f"still suspicious: class {left}" if left else "nothing suspicious is left")
        console.print(f"written: {written}")


def _class_table(report: AuditReport, saved: SavedModel) -> Table:
    table = new_table("class")
    for heading in ("patch", "references", "ratio", "deviations", "turns", ""):
        table.add_column(heading, justify="right" if heading else "left")
    for one in report.classes:
        numbers = (f"{one.size:.1f}", f"{one.reference:.1f}", f"{one.ratio:.2f}", f"{one.deviations:.1f}")
        word = "suspicious" if one.suspicious else ""
        table.add_row(saved.class_name(one.label), *numbers, f"{one.success:.1%}", word)
    return table


def _measurements_table(report: AuditReport, saved: SavedModel) -> Table:
    measured = [one for one in (report.before, report.after) if one is not None]
    rows = [("accuracy, hold-out", [one.holdout_accuracy for one in measured])]
    rows += [("accuracy, test set", [one.test_accuracy for one in measured])]
    for label in report.suspicious:
        rows += [(f"patch of class {saved.class_name(label)} turns", [one.patch_success[label] for one in measured])]
    known = [one.attack_success for one in measured if one.attack_success is not None]
    rows += [("the attack's trigger turns", known)] if known else []
    table = new_table("")
    for heading in ("before", "after")[: len(measured)]:
        table.add_column(heading, justify="right")
    for name, values in rows:
        table.add_row(name, *(f"{value:.2%}" for value in values))
    return table
