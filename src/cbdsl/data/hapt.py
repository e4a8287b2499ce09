"""The recordings of HAPT as windows: six activities of 30 people, six channels at 50 Hz.

The package holds one pandas frame a recording, in a pickle of protocol 1; `cbdsl.data.pickles` reads what it says,
and numpy takes the numbers. Every recording is cut from its start into windows of 128 readings, each beginning 64
after the one before; those in which all readings have the same label, one of the six activities, are the samples.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbdsl.data import pickles
from cbdsl.data.catalogue import ENTRIES
from cbdsl.data.pickles import Call
from cbdsl.errors import UserError

CHANNELS = ("acc-x", "acc-y", "acc-z", "gyro-x", "gyro-y", "gyro-z")
ACTIVITIES = ENTRIES["hapt"].class_names
LENGTH, STEP = 128, 64
TEST_PEOPLE = (2, 4, 9, 10, 12, 13, 18, 20, 24)
"""Nobody trains on them: the nine people of UCI's own test set."""

# Of the training people's windows, by channel; known, so that they are the same everywhere.
_MEAN = (0.80381, 0.03029, 0.08783, 0.00504, -0.00214, -0.00792)
_DEVIATION = (0.41672, 0.39346, 0.35990, 0.41340, 0.40250, 0.25843)
_MOST_BYTES = 2**27  # unpacked; the real one has 100,526,008
_ARRAY, _TEXT, _BYTES = "numpy.core.multiarray _reconstruct", "numpy dtype", "_codecs encode"
_FRAME, _MANAGER = "pandas.core.frame DataFrame", "pandas.core.internals.managers BlockManager"
_NAMES = {
    _ARRAY, _TEXT, _BYTES, _FRAME, _MANAGER, "copy_reg _reconstructor", "__builtin__ object", "__builtin__ slice",
    "numpy ndarray", "pandas.core.indexes.base _new_Index", "pandas.core.indexes.base Index",
    "pandas.core.indexes.range RangeIndex",
}  # fmt: skip

Recording = Mapping[str, NDArray[Any]]


def arrays_of(parts: Mapping[str, bytes]) -> dict[str, NDArray[Any]]:
    """The data set's arrays, of the package's files."""
    scale = {"feature_mean": np.array(_MEAN), "feature_deviation": np.array(_DEVIATION)}
    return windows(recordings(parts["HAPT.pkl.gz"])) | scale


def recordings(packed: bytes) -> dict[int, list[Recording]]:
    """Recordings by person: of each channel its readings (n,), and a label for each of them."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise UserError("it unpacks to far more than it should")
        people = pickles.read(content, _NAMES)
        return {int(person): [_recording(frame) for frame in frames] for person, frames in people.items()}
    except UserError as error:
        raise UserError(f"The recordings cannot be read: {error}.") from error
    except (OSError, EOFError, zlib.error, ValueError, TypeError, LookupError, AttributeError) as error:
        raise UserError(f"The recordings cannot be read: they are no frames of readings ({error}).") from error


def windows(people: Mapping[int, list[Recording]]) -> dict[str, NDArray[Any]]:
    """Samples (N, 6, 128) and labels from 0, training people apart from test people, and whose each training one is."""
    found: dict[bool, list[tuple[NDArray[np.float32], NDArray[np.int32], int]]] = {True: [], False: []}
    for person in sorted(people):
        for recording in people[person]:
            features, labels = _cut(recording)
            found[person in TEST_PEOPLE].append((features, labels, person))
    parts = {}
    for word, rows in (("train", found[False]), ("test", found[True])):
        if not sum(len(labels) for _, labels, _ in rows):
            raise UserError(f"The recordings have no window of one activity for the {word} set.")
        parts[f"{word}_features"] = np.concatenate([features for features, _, _ in rows])
        parts[f"{word}_labels"] = np.concatenate([labels for _, labels, _ in rows])
    owners = [np.full(len(labels), person, np.int32) for _, labels, person in found[False]]
    return {**parts, "train_clients": np.concatenate(owners)}


def _cut(recording: Recording) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """The windows of one recording that have one activity each, (n, 6, 128), and their labels from 0."""
    labels = recording["label"]
    starts = np.arange(0, len(labels) - LENGTH + 1, STEP)
    every = starts[:, None] + np.arange(LENGTH)  # (n, 128)
    seen = labels[every]
    pure = (seen == seen[:, :1]).all(axis=1) & (seen[:, 0] >= 1) & (seen[:, 0] <= len(ACTIVITIES))
    signals = np.stack([recording[channel] for channel in CHANNELS]).astype(np.float32)  # (6, n)
    features = signals[:, every[pure]].transpose(1, 0, 2)
    return np.ascontiguousarray(features), (seen[pure, 0] - 1).astype(np.int32)


def _recording(frame: Call) -> Recording:
    """The columns of a frame: its blocks of numbers, and the names of the columns in each."""
    _, blocks, names, *_ = frame.state["_data"].state
    columns: dict[str, NDArray[Any]] = {}
    for block, index in zip(blocks, names, strict=True):
        columns |= dict(zip(_array(index.arguments[1]["data"]), _array(block), strict=True))
    lengths = {len(columns[name]) for name in (*CHANNELS, "label")}
    if len(lengths) != 1 or columns["label"].dtype.kind != "i":
        raise UserError("a recording has columns of several lengths, or no whole numbers for labels")
    if not all(np.isfinite(columns[name]).all() for name in CHANNELS):
        raise UserError("a recording has readings that are not finite")
    return columns


def _array(call: Call) -> Any:  # noqa: ANN401 - an array of numbers, or a list of names
    """What a pickled array holds."""
    _, shape, kind, by_columns, values = call.state
    if isinstance(values, list):
        return values
    if call.path != _ARRAY or kind.arguments[0] not in {"f8", "i8"} or kind.state[1] != "<":
        raise UserError("an array holds something else than numbers")
    text, coding = values.arguments
    if values.path != _BYTES or coding != "latin1":
        raise UserError("an array's numbers are not written as bytes")
    numbers = np.frombuffer(text.encode("latin1"), f"<{kind.arguments[0]}")
    return numbers.reshape(shape, order="F" if by_columns else "C")
