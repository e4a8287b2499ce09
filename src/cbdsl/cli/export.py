"""`cbdsl export`: a trained model as a file for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cbdsl.cli import extras, interrupts
from cbdsl.cli.predict import Model
from cbdsl.errors import UserError

if TYPE_CHECKING:
    from cbdsl.models.saved import SavedModel


def export(
    model: Model,
    to: Annotated[str, typer.Option(metavar="FORMAT", help="onnx, c, torch or safetensors.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write: .onnx, .c, .py or .safetensors.")],
    int8: Annotated[bool, typer.Option("--int8", help="With --to c: weights of eight bits instead of 32.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Leave the scaling of features out: they come scaled already.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --int8: an .npz with labels to measure on; the run's D_sc if not given."
        ),
    ] = None,
) -> None:
    """Write a trained model for other programs: ONNX, one C file, a torch module, or a copy that explains itself."""
    interrupts.start_again()
    if data is not None and not int8:
        raise UserError("--data is for --int8, whose loss of accuracy is measured on it. Leave it out.")
    from cbdsl.export.write import check_words, write  # noqa: PLC0415
    from cbdsl.models.saved import read_model  # noqa: PLC0415

    check_words(to, out, raw, int8)
    if to == "onnx":
        extras.demand("onnx", "it writes the file")
    saved = read_model(model)
    lost = _lost(saved, model, data, raw) if int8 else ""
    written = write(saved, to, out, raw, int8)
    for path in written.paths:
        typer.echo(f"written: {path} ({_size(path)})")
    for line in filter(None, (written.note, lost)):
        typer.echo(line)


def _size(path: Path) -> str:
    from cbdsl.text import size  # noqa: PLC0415

    return size(path.stat().st_size)


def _lost(saved: SavedModel, model: Path, data: Path | None, raw: bool) -> str:
    """What eight bits cost, as a line; or why it was not measured."""
    from cbdsl.export.predict import read_unseen  # noqa: PLC0415
    from cbdsl.export.write import accuracies, scoring_set  # noqa: PLC0415

    if data is not None:
        unseen, where = read_unseen(data, saved, raw), str(data)
    else:
        try:
            if not (model / "spec.toml").is_file():
                raise UserError("The model is a file without a run.")
            unseen, where = scoring_set(model, saved), "D_sc"
        except UserError as error:
            return f"accuracy not measured: {error} Give labelled samples: --data FILE.npz"
    before, after = accuracies(saved, unseen)
    return f"accuracy {before:.2%} with floats, {after:.2%} with 8 bits, on {len(unseen.features):,} samples of {where}"
