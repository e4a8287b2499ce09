"""A worker's own samples as a file, and the shared samples as bytes."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cbdsl.arrays import Samples
from cbdsl.data.dataset import make_samples, read_arrays, read_idx_folder
from cbdsl.errors import UserError
from cbdsl.network.wire import MAX_WHOLE, WireError
from cbdsl.util.files import replace_atomically


def write_samples(path: Path, samples: Samples) -> None:
    """Write samples to an .npz file for `read_samples`."""
    replace_atomically(path, lambda file: np.savez(file, **vars(samples)), private=True)


def read_samples(path: Path) -> Samples:
    """Read an .npz file with `features` (N, ...) and `labels` (N,), or the training part of a folder of IDX files."""
    if path.is_dir():
        return read_idx_folder(path, str(path)).train
    wanted = "an .npz file with the arrays features (N, ...) and labels (N,), or a folder of IDX files"
    stored = read_arrays(path, ("features", "labels"), "samples", wanted)
    features, labels = stored["features"], stored["labels"]
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
    """The layout of the shared samples in bytes: all features, then all labels; D_tr before D_sc."""

    training: int
    scoring: int
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of samples."""
        return self.training + self.scoring

    @property
    def feature_bytes(self) -> int:
        """The number of bytes of the features, unpacked."""
        return 4 * self.count * int(np.prod(self.shape, dtype=np.int64))


def pack_shared(samples: Samples) -> bytes:
    """Compress shared samples to bytes; images shrink to a tenth."""
    raw = samples.features.astype("<f4").tobytes() + samples.labels.astype("<i4").tobytes()
    return zlib.compress(raw, 6) if len(samples) else b""


def unpack_shared(content: bytes, layout: SharedLayout, classes: int) -> Samples:
    """Invert `pack_shared`; WireError if the content does not match the layout."""
    expected = layout.feature_bytes + 4 * layout.count
    if expected > MAX_WHOLE:
        raise WireError("too many shared samples")
    if not expected:
        return Samples(np.empty((0, *layout.shape), np.float32), np.empty(0, np.int32))
    reader = zlib.decompressobj()
    try:
        raw = reader.decompress(content, expected + 1)  # never more than was announced
    except zlib.error as error:
        raise WireError("shared samples that cannot be unpacked") from error
    if len(raw) != expected or not reader.eof:
        raise WireError("shared samples whose size differs from the announcement")
    features = np.frombuffer(raw, "<f4", layout.count * int(np.prod(layout.shape))).reshape(layout.count, *layout.shape)
    labels = np.frombuffer(raw, "<i4", layout.count, layout.feature_bytes)
    if not np.isfinite(features).all() or labels.min() < 0 or labels.max() >= classes:
        raise WireError("invalid shared samples")
    return Samples(features.astype(np.float32), labels.astype(np.int32))
