"""A worker's own samples as a file, and the shared samples as bytes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cbdsl.arrays import Labels, Samples
from cbdsl.data.dataset import Dataset, make_samples, read_arrays, read_idx_folder
from cbdsl.data.table import TABLES, Table, read_table
from cbdsl.data.targets import make_targets, number_classes
from cbdsl.errors import UserError
from cbdsl.models.architecture import describe_outputs
from cbdsl.network.wire import MAX_WHOLE, WireError
from cbdsl.spec import Task
from cbdsl.util.files import replace_atomically


@dataclass(frozen=True, eq=False)
class ScaledSamples(Samples):
    """Samples of a regression or a reconstruction that are scaled already; all others are as they were measured."""


@dataclass(frozen=True, eq=False)
class TableSamples(Samples):
    """The lines of a table, all columns in `features`; the announcement names those that are targets."""

    table: Table | None = None


def write_samples(path: Path, samples: Samples, task: Task = "classification") -> None:
    """Write samples to an .npz file for `read_samples`; those of another task are marked as scaled."""
    arrays = dict(vars(samples))
    if task != "classification":
        arrays["scaled"] = np.array(1)
    replace_atomically(path, lambda file: np.savez(file, **arrays), private=True)


def fit_samples(own: Samples, data: Dataset) -> Samples:
    """Return a device's samples scaled for a run, or raise UserError if they are of another kind.

    data: an empty data set with the run's task, names and scalings.
    """
    if isinstance(own, TableSamples):
        own = _divide(own, data)
    elif data.task != "classification" and not isinstance(own, ScaledSamples):
        own = data.scale(own.features, own.labels)
    elif own.labels.dtype.kind == "U":
        own = make_samples(own.features, number_classes(own.labels, data.class_names), "worker's")
    labels = own.labels
    if data.task == "classification":
        fits = labels.dtype.kind in "iu" and int(labels.max()) < data.classes
    else:
        fits = labels.shape[1:] == data.train.labels.shape[1:]
    if not fits or own.features.shape[1:] != data.shape:
        given = f"targets {labels.shape}" if labels.dtype.kind == "f" else f"labels up to {labels.max()}"
        raise UserError(
            f"This run works on samples of shape {data.shape}, and {describe_outputs(data.outputs, data.task)}; the "
            f"samples here have shape {own.features.shape[1:]} and {given}.",
            code="wrong-shape",
        )
    return own


def _divide(own: TableSamples, data: Dataset) -> Samples:
    """Return the features and targets, or classes, of a table."""
    assert own.table is not None
    if data.task != "reconstruction" and not data.target_names:
        what = "the column of classes" if data.task == "classification" else "its targets"
        raise UserError(
            "The samples are a table, which has no labels of its own. In this run "
            f"{describe_outputs(data.outputs, data.task)}, and it does not name {what}. Give the server a table, or "
            "data with target_names; or give an .npz file here.",
            code="wrong-shape" if data.task == "classification" else "missing-value",
        )
    features, targets = own.table.divide(data.target_names)
    if data.task != "classification":
        own.table.require_numbers(data.target_names)
        return data.scale(features, targets)
    values = features if data.scaling is None else data.scaling.apply(features)
    return make_samples(values, number_classes(own.table.labels(data.target_names[0]), data.class_names), "worker's")


def read_samples(path: Path) -> Samples:
    """Read a worker's samples: an .npz file, a table, or the training part of a folder of IDX files.

    The .npz has `features` (N, ...) and, for a classifier, `labels` (N,); for a regression `labels` are targets (N,) or
    (N, T), and a reconstruction has none. Targets and tables are in the unit in which they were measured.
    """
    if path.is_dir():
        return read_idx_folder(path, str(path)).train
    if path.suffix in TABLES:
        table = read_table(path)
        return TableSamples(table.values.astype(np.float32), np.zeros(len(table.values), np.int32), table)
    wanted = "an .npz file with the arrays features (N, ...) and labels (N,), or a folder of IDX files"
    stored = read_arrays(path, ("features",), "samples", wanted, ("labels", "scaled"))
    features, labels = stored["features"], stored.get("labels")
    if "scaled" in stored:
        return ScaledSamples(features.astype(np.float32), np.asarray(labels))
    if labels is not None and labels.dtype.kind == "U":  # classes by name, which the announcement has
        return Samples(np.asarray(features, np.float32), labels)
    negative = labels is not None and labels.dtype.kind == "i" and labels.size and labels.min() < 0
    if labels is None or labels.dtype.kind == "f" or negative:  # no classes
        count = len(features) if features.ndim else 0
        targets = np.zeros(count, np.int32) if labels is None else make_targets(labels, count, "worker's")
        return Samples(np.asarray(features, np.float32), targets)
    if features.dtype.kind not in "fiu" or labels.dtype.kind not in "iu":
        raise UserError(
            f"{path} has features of type {features.dtype} and labels of type {labels.dtype}; give numbers and whole "
            "numbers.",
            code="wrong-type",
        )
    try:
        return make_samples(features, labels, "worker's")
    except UserError as error:
        raise UserError(f"{path}: {error}", code=error.code) from error


@dataclass(frozen=True)
class SharedLayout:
    """The layout of the shared samples in bytes: all features, then all labels or targets; D_tr before D_sc.

    The labels of a reconstruction are not sent: its targets are the features.
    """

    training: int
    scoring: int
    shape: tuple[int, ...]
    task: Task = "classification"
    outputs: int = 1  # targets of a sample

    @property
    def count(self) -> int:
        """The number of samples."""
        return self.training + self.scoring

    @property
    def feature_bytes(self) -> int:
        """The number of bytes of the features, unpacked."""
        return 4 * self.count * int(np.prod(self.shape, dtype=np.int64))

    @property
    def label_bytes(self) -> int:
        """The number of bytes of the labels or targets, unpacked."""
        return 4 * self.count * _LABELS[self.task](self.outputs)


_LABELS: dict[Task, Callable[[int], int]] = {  # numbers of a sample that are sent beside its features
    "classification": lambda _: 1,
    "regression": lambda outputs: outputs,
    "reconstruction": lambda _: 0,
}


def pack_shared(samples: Samples, task: Task = "classification") -> bytes:
    """Compress shared samples to bytes; images shrink to a tenth."""
    kind = {"classification": "<i4", "regression": "<f4"}.get(task)
    raw = samples.features.astype("<f4").tobytes() + (samples.labels.astype(kind).tobytes() if kind else b"")
    return zlib.compress(raw, 6) if len(samples) else b""


def unpack_shared(content: bytes, layout: SharedLayout, classes: int) -> Samples:
    """Invert `pack_shared`; WireError if the content does not match the layout."""
    expected = layout.feature_bytes + layout.label_bytes
    if expected > MAX_WHOLE:
        raise WireError("too many shared samples")
    if not expected:
        return Samples(np.empty((0, *layout.shape), np.float32), empty_labels(layout.task, layout.outputs))
    reader = zlib.decompressobj()
    try:
        raw = reader.decompress(content, expected + 1)  # never more than was announced
    except zlib.error as error:
        raise WireError("shared samples that cannot be unpacked") from error
    if len(raw) != expected or not reader.eof:
        raise WireError("shared samples whose size differs from the announcement")
    features = np.frombuffer(raw, "<f4", layout.count * int(np.prod(layout.shape))).reshape(layout.count, *layout.shape)
    if layout.task != "classification":
        targets = np.frombuffer(raw, "<f4", offset=layout.feature_bytes).reshape(layout.count, -1)
        if not np.isfinite(features).all() or not np.isfinite(targets).all():
            raise WireError("invalid shared samples")
        own = targets.astype(np.float32) if layout.task == "regression" else np.zeros(layout.count, np.int32)
        return Samples(features.astype(np.float32), own)
    labels = np.frombuffer(raw, "<i4", layout.count, layout.feature_bytes)
    if not np.isfinite(features).all() or labels.min() < 0 or labels.max() >= classes:
        raise WireError("invalid shared samples")
    return Samples(features.astype(np.float32), labels.astype(np.int32))


def empty_labels(task: Task, outputs: int) -> Labels:
    """Return the labels of no sample."""
    return np.empty((0, outputs), np.float32) if task == "regression" else np.empty(0, np.int32)
