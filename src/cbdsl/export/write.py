"""Writes a saved model for other programs, and measures the accuracy that eight-bit weights lose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cbdsl import spec as specs
from cbdsl.data.dataset import load_data
from cbdsl.data.partition import iid, split
from cbdsl.data.shared import add_shared
from cbdsl.errors import UserError, missing, unknown
from cbdsl.export.predict import Unseen, predict, predict_values
from cbdsl.export.steps import program_of, rounded_flat
from cbdsl.models.saved_model import SavedModel
from cbdsl.spec import init_file
from cbdsl.util.files import write_atomically
from cbdsl.util.formatting import format_bytes

ENDINGS = {"onnx": ".onnx", "c": ".c", "safetensors": ".safetensors"}
"""File name endings by format."""


def check_words(to: str, out: Path, raw: bool, int8: bool) -> None:
    """Refuse options that do not go together, before anything is read."""
    if to == "torch":
        raise UserError(
            "--to torch is gone: in Python cbdsl.load(path).model is the torch module. Other programs: --to onnx "
            "or --to c.",
            code="not-supported",
        )
    if to not in ENDINGS:
        raise unknown("format", to, ENDINGS)
    if out.suffix != ENDINGS[to]:
        raise UserError(
            f"--to {to} writes a {ENDINGS[to]} file; given --out {out}. Give a name that ends so.", code="conflict"
        )
    if int8 and to != "c":
        raise UserError(f"--int8 is for --to c; --to {to} keeps weights as they are. Leave it out.", code="no-effect")
    if raw and to == "safetensors":
        raise UserError(
            "--raw changes nothing with --to safetensors, which copies the model whole. Leave it out.", code="no-effect"
        )
    for path in written_files(to, out):
        if path.exists():
            raise UserError(
                f"{path} exists; nothing was overwritten. Give another --out, or remove it.", code="exists-already"
            )


def written_files(to: str, out: Path) -> tuple[Path, ...]:
    """Return the paths that an export writes: for C also the header."""
    return (out, out.with_suffix(".h")) if to == "c" else (out,)


def write(model: SavedModel, to: str, out: Path, raw: bool = False, int8: bool = False) -> str:
    """Write a model in one of the formats; return a note about the memory it takes, or "".

    raw: without the scaling of features. int8: weights of eight bits.
    """
    check_words(to, out, raw, int8)
    contents, note = _contents(model, to, raw, int8)
    out.parent.mkdir(parents=True, exist_ok=True)
    for path, content in zip(written_files(to, out), contents, strict=True):
        write_atomically(path, content)
    return note


def _contents(model: SavedModel, to: str, raw: bool, int8: bool) -> tuple[tuple[bytes, ...], str]:
    """Return the contents of the files, and a note."""
    if to == "safetensors":
        return (init_file(model.source).read_bytes(),), ""
    program = program_of(model, raw)
    if to == "onnx":
        try:
            from cbdsl.export.onnx_file import onnx_model  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise missing("onnx", "export", "it writes the file") from error
        return (onnx_model(program),), ""
    from cbdsl.export.c_source import c_file  # noqa: PLC0415

    made = c_file(program, int8)
    note = f"constants {format_bytes(made.constants)}, working memory {format_bytes(made.memory)}"
    return (made.text.encode(), made.header.encode()), note


def measure_rounding(model: SavedModel, unseen: Unseen, threads: int | None = None) -> tuple[str, float, float]:
    """Return the main metric's name, and its value for the model and for the model with eight-bit weights."""
    both = (model, replace(model, weights=rounded_flat(program_of(model, raw=True).steps)))
    if model.card.task == "classification":
        name, values = "accuracy", [predict(one, unseen, threads).accuracy for one in both]
    else:
        found = [predict_values(one, unseen, threads).metrics for one in both]
        name = next(iter(found[0]), "loss")
        values = [one.get(name) for one in found]
    before, after = values
    if before is None or after is None:
        raise UserError(
            f"The data have no labels, so {name} cannot be measured. Give an .npz file with labels.",
            code="wrong-shape",
        )
    return name, before, after


def scoring_set(folder: Path, model: SavedModel) -> Unseen:
    """Return D_sc of a run; a UserError says why there is none."""
    spec = specs.read(folder / "spec.toml")
    data = load_data(spec.data, spec.options)
    parts = split(data.train.labels, spec.data, 0, spec.seed, data.clients, iid, task=data.task)
    data, parts = add_shared(data, parts, spec.data)
    rows = parts.shared_scoring
    if not len(rows) or data.shape != model.card.shape:
        raise UserError("The run has no D_sc, or its data have changed.", code="not-supported")
    samples = data.train.taken(rows)
    labels = data.in_unit(samples.labels) if data.task == "regression" else samples.labels
    return Unseen(samples.features.reshape(len(rows), *model.graph.shape), labels)
