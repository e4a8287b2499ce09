"""Commands that use a trained model: predict and export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cbdsl.cli import interrupts, options
from cbdsl.cli.options import Threads
from cbdsl.errors import UserError
from cbdsl.export.predict import Values, predict as predict_samples, predict_values, read_unseen
from cbdsl.export.write import check_words, measure_rounding, scoring_set, write, written_files
from cbdsl.models import saved_model
from cbdsl.models.saved_model import SavedModel
from cbdsl.runs.metrics import find_metric
from cbdsl.util.formatting import format_bytes

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A finished run's folder, or a .safetensors file.")]


def predict(
    model: Model,
    data: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="An .npz file with features and, if known, labels, or a table; see docs/export.md."
        ),
    ],
    raw: Annotated[bool, typer.Option("--raw", help="Do not scale the features: they are scaled already.")] = False,
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, alone on standard output.")] = False,
) -> None:
    """Predict classes, numbers or anomalies of the samples in a file with a trained model."""
    interrupts.advise_start_again()

    saved = saved_model.load(model)
    if saved.card.task != "classification":
        _print_values(saved, predict_values(saved, read_unseen(data, saved, raw), threads), as_json)
        return
    found = predict_samples(saved, read_unseen(data, saved, raw), threads)
    rows = [
        (int(label), saved.class_name(int(label)), round(float(chance), 6))
        for label, chance in zip(found.labels, found.probabilities, strict=True)
    ]
    if as_json:
        lines = [{"class": label, "name": name, "probability": chance} for label, name, chance in rows]
        typer.echo(json.dumps({"samples": len(rows), "accuracy": found.accuracy, "predictions": lines}, indent=2))
        return
    width = max(len(name) for _, name, _ in rows)
    typer.echo("\n".join(f"{number:<7} {name:<{width}}  {chance:.4f}" for number, (_, name, chance) in enumerate(rows)))
    if found.accuracy is not None:
        typer.echo(f"accuracy {found.accuracy:.2%} of {len(rows):,} samples")


def _print_values(saved: SavedModel, found: Values, as_json: bool) -> None:
    """Print predictions of a regression, or anomaly scores and verdicts, and metrics if the truth is known."""
    count = found.outputs.shape[1]
    names = saved.card.target_names or tuple(f"target {number}" for number in range(1, count + 1))
    names = names if saved.card.task == "regression" else ("score",)
    rows: list[dict[str, float | bool]] = []
    for number, row in enumerate(found.outputs.tolist()):
        verdict = {} if found.anomalies is None else {"anomaly": bool(found.anomalies[number])}
        rows.append({**dict(zip(names, row, strict=True)), **verdict})
    if as_json:
        told = {"samples": len(rows), "metrics": found.metrics, "threshold": saved.card.threshold, "predictions": rows}
        typer.echo(json.dumps({key: value for key, value in told.items() if value is not None}, indent=2))
        return
    threshold = "" if saved.card.threshold is None else f"  threshold {saved.card.threshold:.6g}"
    typer.echo("sample  " + "  ".join(f"{name:>12}" for name in names) + threshold)
    for number, row in enumerate(found.outputs.tolist()):
        verdict_text = "" if found.anomalies is None else "  not normal" if found.anomalies[number] else "  normal"
        typer.echo(f"{number:<7} " + "  ".join(f"{value:12.6g}" for value in row) + verdict_text)
    known = [(find_metric(name), value) for name, value in found.metrics.items()]
    if known:
        typer.echo(", ".join(f"{each.title} {each.text(value)}" for each, value in known) + f", {len(rows):,} samples")


def export(
    model: Model,
    to: Annotated[str, typer.Option(metavar="FORMAT", help="onnx, c or safetensors.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write: .onnx, .c or .safetensors.")],
    int8: Annotated[bool, typer.Option("--int8", help="With --to c: weights of eight bits instead of 32.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Leave out the scaling of features: they are scaled already.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --int8: an .npz or a table with labels to measure on; the run's D_sc if not given.",
        ),
    ] = None,
) -> None:
    """Write a trained model for other programs: ONNX, one C file and its header, or safetensors."""
    interrupts.advise_start_again()
    if data is not None and not int8:
        raise UserError(
            "--data is for --int8, whose loss of accuracy is measured on it. Leave it out.", code="no-effect"
        )

    check_words(to, out, raw, int8)
    if to == "onnx":
        options.demand("onnx", "it writes the file")
    saved = saved_model.load(model)
    lost = _lost(saved, model, data, raw) if int8 else ""
    note = write(saved, to, out, raw, int8)
    typer.echo("written: " + ", ".join(f"{path} ({_size(path)})" for path in written_files(to, out)))
    for line in filter(None, (note, lost)):
        typer.echo(line)


def _size(path: Path) -> str:

    return format_bytes(path.stat().st_size)


def _lost(saved: SavedModel, model: Path, data: Path | None, raw: bool) -> str:
    """Return a line about the accuracy lost with eight bits, or why it was not measured."""

    if data is not None:
        unseen, where = read_unseen(data, saved, raw), str(data)
    else:
        try:
            if not (model / "spec.toml").is_file():
                raise UserError("The model is a file without a run.", code="not-supported")
            unseen, where = scoring_set(model, saved), "D_sc"
        except UserError as error:
            return f"accuracy not measured: {error} Give labelled samples: --data FILE.npz"
    name, before, after = measure_rounding(saved, unseen)
    metric = find_metric(name)
    words = f"{metric.title} {metric.text(before)} with floats, {metric.text(after)} with 8 bits"
    return f"{words}, on {len(unseen.features):,} samples of {where}"
