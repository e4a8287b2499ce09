"""A worker's own samples, and the shared ones on their way: arrays as files and as bytes."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cbdsl.arrays import Samples
from cbdsl.data.dataset import MOST_CLASSES, read_folder, stored_arrays
from cbdsl.errors import UserError
from cbdsl.network.wire import MAX_WHOLE, WireError
from cbdsl.util.files import replace_atomically


def write_samples(path: Path, samples: Samples) -> None:
    """Write samples where `read_samples` finds them."""
    replace_atomically(path, lambda file: np.savez(file, **vars(samples)), private=True)


def read_samples(path: Path) -> Samples:
    """Read an .npz file with `features` (N, ...) and `labels` (N,), or the training part of a folder of IDX files."""
    if path.is_dir():
        return read_folder(path, str(path)).train
    wanted = "an .npz file with the arrays features (N, ...) and labels (N,), or a folder of IDX files"
    stored = stored_arrays(path, ("features", "labels"), "samples", wanted)
    features, labels = stored["features"], stored["labels"]
    numbers = features.dtype.kind in "fiu" and labels.dtype.kind in "iu"
    if not numbers or features.ndim < 2 or labels.shape != features.shape[:1] or not len(labels):
        raise UserError(
            f"{path} holds features {features.dtype} {features.shape} and labels {labels.dtype} {labels.shape}; give "
            "numbers (N, ...) and whole numbers (N,), N at least 1."
        )
    if not 0 <= labels.min() <= labels.max() < MOST_CLASSES:
        raise UserError(f"{path} holds labels from {labels.min()} to {labels.max()}; give classes 0, 1, ...")
    with np.errstate(over="ignore"):  # what is too large for a float32 is infinite, and refused
        values = np.ascontiguousarray(features, np.float32)
    if not np.isfinite(values).all():
        raise UserError(f"{path} holds features that are not finite; clean them first.")
    return Samples(values, labels.astype(np.int32))


@dataclass(frozen=True)
class SharedLayout:
    """How the shared samples lie in their bytes: all features, then all labels; D_tr before D_sc."""

    training: int
    scoring: int
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Samples in all."""
        return self.training + self.scoring

    @property
    def feature_bytes(self) -> int:
        """Bytes of the features, unpacked."""
        return 4 * self.count * int(np.prod(self.shape, dtype=np.int64))


def pack_shared(samples: Samples) -> bytes:
    """Shared samples as bytes, compressed: pictures shrink to a tenth."""
    raw = samples.features.astype("<f4").tobytes() + samples.labels.astype("<i4").tobytes()
    return zlib.compress(raw, 6) if len(samples) else b""


def unpack_shared(content: bytes, layout: SharedLayout, classes: int) -> Samples:
    """The inverse of `pack_shared`; WireError unless it is exactly what the layout says."""
    expected = layout.feature_bytes + 4 * layout.count
    if expected > MAX_WHOLE:
        raise WireError("too many shared samples")
    if not expected:
        return Samples(np.empty((0, *layout.shape), np.float32), np.empty(0, np.int32))
    reader = zlib.decompressobj()
    try:
        raw = reader.decompress(content, expected + 1)  # never unpacks more than was announced
    except zlib.error as error:
        raise WireError("shared samples that cannot be unpacked") from error
    if len(raw) != expected or not reader.eof:
        raise WireError("shared samples whose size differs from the announcement")
    features = np.frombuffer(raw, "<f4", layout.count * int(np.prod(layout.shape))).reshape(layout.count, *layout.shape)
    labels = np.frombuffer(raw, "<i4", layout.count, layout.feature_bytes)
    if not np.isfinite(features).all() or labels.min() < 0 or labels.max() >= classes:
        raise WireError("invalid shared samples")
    return Samples(features.astype(np.float32), labels.astype(np.int32))
