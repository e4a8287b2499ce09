"""`cbdsl predict`: what a trained model says of samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cbdsl.cli import interrupts
from cbdsl.cli.options import Threads

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A finished run's folder, or a .safetensors file.")]


def predict(
    model: Model,
    data: Annotated[
        Path, typer.Option(metavar="FILE", help="An .npz file with features and, if known, labels; see docs/export.md.")
    ],
    raw: Annotated[
        bool, typer.Option("--raw", help="The features are scaled already: give them to the network as they are.")
    ] = False,
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, alone on standard output.")] = False,
) -> None:
    """Say the class of every sample in a file, by a trained model: a line each, its class and how likely that is."""
    interrupts.start_again()
    from cbdsl.export.predict import predict as predictions_of  # noqa: PLC0415
    from cbdsl.export.predict import read_unseen  # noqa: PLC0415
    from cbdsl.models.saved import read_model  # noqa: PLC0415

    saved = read_model(model)
    found = predictions_of(saved, read_unseen(data, saved, raw), threads)
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
