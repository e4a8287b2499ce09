"""Readers for the packages of the downloadable data sets: archives, PNG images, pickles, sensor recordings."""

from __future__ import annotations

import csv
import datetime
import gzip
import hashlib
import io
import json
import lzma
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from cbdsl.data.catalogue import ENTRIES, PackageFile
from cbdsl.data.dataset import Scale, parse_idx
from cbdsl.errors import UserError, missing

_DEBIAN = b"!<arch>\n"
_HEADER = 60  # bytes before each member of a .deb
_MOST_MEMBERS = 10_000
_MOST_BYTES = 2**31  # unpacked, up to the last file that is needed
_PIECE = 2**20


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def read_package_files(path: Path, parts: Sequence[PackageFile]) -> dict[str, bytes]:
    """Read files of a package, by the last word of their paths, and check their SHA-256."""
    wanted = {part.path: part for part in parts}
    found: dict[str, bytes] = {}
    try:
        with path.open("rb") as file, tarfile.open(fileobj=_open_tar(file), mode="r|*") as archive:
            for count, member in enumerate(archive):
                if len(found) == len(wanted):
                    break
                if count == _MOST_MEMBERS or member.offset_data + member.size > _MOST_BYTES:
                    raise UserError(
                        f"{path.name} has far more files than expected: it is another package, or damaged.",
                        code="too-large",
                    )
                part = wanted.get(member.name) or wanted.get(f"./{member.name}")
                if part is not None and member.isfile():
                    found[part.path.rpartition("/")[2]] = _content(archive, member, part)
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{path.name} cannot be read ({error}): truncated or damaged. Download it again.", code="damaged-file"
        ) from error
    missing = [each for each in wanted if each.rpartition("/")[2] not in found]
    if missing:
        raise UserError(
            f"{path.name} has no file {missing[0]}. It is another package, or truncated.", code="damaged-file"
        )
    return found


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, part: PackageFile) -> bytes:
    stream = archive.extractfile(member)
    content = stream.read(part.size + 1) if stream is not None and member.size == part.size else b""
    if hashlib.sha256(content).hexdigest() != part.sha256:
        raise UserError(
            f"{part.path} is not the expected file: {len(content) or member.size:,} bytes, another SHA-256 than "
            f"{part.sha256[:16]}... It was changed or damaged. Download the package again.",
            code="damaged-file",
        )
    return content


def _open_tar(file: IO[bytes]) -> IO[bytes]:
    """Return the tar archive in a package: the package itself, or the member data.tar of a .deb."""
    if file.read(len(_DEBIAN)) != _DEBIAN:
        file.seek(0)
        return file
    for _ in range(_MOST_MEMBERS):
        header = file.read(_HEADER)
        if len(header) < _HEADER or header[58:] != b"`\n":
            break
        name, length = header[:16].decode("ascii", "replace").strip(" /"), int(header[48:58])
        if name in {"data.tar", "data.tar.xz", "data.tar.gz"}:
            return io.BytesIO(file.read(length))
        if name.startswith("data.tar"):
            raise UserError(
                f"This .deb is packed as {name}, which is not supported. Unpack it (dpkg-deb -x), and give the folder "
                "with the IDX files: --data FOLDER.",
                code="not-supported",
            )
        file.seek(length + length % 2, io.SEEK_CUR)
    raise tarfile.ReadError("no data.tar in the .deb")


def read_png(content: bytes, height: int, width: int, mode: str) -> NDArray[np.uint8]:
    """Read the pixels of an image of exactly this size and mode of Pillow, (height, width, channels)."""
    try:
        from PIL import Image  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise missing("Pillow", "data", "the data set is stored as PNG images") from error
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            if (image.size, image.mode) != ((width, height), mode):
                raise ValueError(f"{image.size} pixels of mode {image.mode} instead of {width, height} of mode {mode}")
            return np.array(image).reshape(height, width, -1)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"The PNG image cannot be read ({error}).", code="damaged-file") from error


@dataclass(frozen=True)
class PickledName:
    """A name that the pickle imports: "module name". It is never imported, and calling it records the call."""

    path: str

    def __call__(self, *arguments: object) -> PickledCall:
        """Return the record of a call with these arguments."""
        return PickledCall(self.path, arguments)


@dataclass(eq=False)
class PickledCall:
    """A call in the pickle, which is not made, and the state of its result."""

    path: str
    arguments: tuple[Any, ...]
    state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _NameRecorder(pickle.Unpickler):
    """Reads a pickle, with records instead of the names that it imports."""

    def __init__(self, content: bytes, names: Collection[str]) -> None:
        super().__init__(io.BytesIO(content))
        self._names = names

    def find_class(self, module_name: str, global_name: str) -> PickledName:
        path = f"{module_name} {global_name}"
        if path not in self._names:
            raise UserError(f"it names {path!r}, which is not allowed here", code="not-allowed")
        return PickledName(path)


def read_pickle(content: bytes, names: Collection[str]) -> Any:  # noqa: ANN401 - anything in a pickle
    """Read a pickle without importing or calling anything. names: all that it may import, "module name" each."""
    try:
        return _NameRecorder(content, names).load()
    except (pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"it is damaged ({error or type(error).__name__})", code="damaged-file") from error


_TRAINING = tuple(f"data_batch_{number}.png" for number in range(1, 6))
_MEAN, _DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # the usual ones
FASHION_SCALE: Scale = (0.28604059698879547, 0.3530242445149226)
"""As `measure_scale` returns it; fixed, so that it is the same on every machine."""


def read_cifar10(parts: Mapping[str, bytes], batch: int = 10_000) -> dict[str, NDArray[Any]]:
    """Read images (N, 3, 32, 32) and labels; a row of a PNG is one image, its pixels line by line."""
    train = np.concatenate([_images(parts[name], batch) for name in _TRAINING])
    return {
        "train_features": train,
        "train_labels": _labels(parts["train_lables.json"], 5 * batch),
        "test_features": _images(parts["test_batch.png"], batch),
        "test_labels": _labels(parts["test_lables.json"], batch),
        "feature_mean": np.array(_MEAN),
        "feature_deviation": np.array(_DEVIATION),
    }


def _images(content: bytes, count: int) -> NDArray[np.uint8]:
    pixels = read_png(content, height=count, width=32 * 32, mode="RGB")
    return np.ascontiguousarray(pixels.reshape(count, 32, 32, 3).transpose(0, 3, 1, 2))


def _labels(content: bytes, count: int) -> NDArray[np.int32]:
    try:
        labels = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"The labels of CIFAR-10 cannot be read ({error}).", code="damaged-file") from error
    whole = isinstance(labels, list) and all(type(label) is int and 0 <= label < 10 for label in labels)
    if not whole or len(labels) != count:
        raise UserError(f"The labels of CIFAR-10 are not {count:,} whole numbers from 0 to 9.", code="damaged-file")
    return np.array(labels, np.int32)


def read_fashion_mnist(parts: Mapping[str, bytes]) -> dict[str, NDArray[Any]]:
    """Read images (N, 1, 28, 28) and labels from IDX files; the scale is that of the same files in a folder."""
    arrays: dict[str, NDArray[Any]] = {}
    for word, stem in (("train", "train"), ("test", "t10k")):
        images, labels = f"{stem}-images-idx3-ubyte.gz", f"{stem}-labels-idx1-ubyte.gz"
        arrays[f"{word}_features"] = parse_idx(images, parts[images], dimensions=3)[:, None]
        arrays[f"{word}_labels"] = parse_idx(labels, parts[labels], dimensions=1).astype(np.int32)
    mean, deviation = FASHION_SCALE
    return {**arrays, "feature_mean": np.array([mean]), "feature_deviation": np.array([deviation])}


CHANNELS = ("acc-x", "acc-y", "acc-z", "gyro-x", "gyro-y", "gyro-z")
ACTIVITIES = ENTRIES["hapt"].class_names
LENGTH, STEP = 128, 64
TEST_PEOPLE = (2, 4, 9, 10, 12, 13, 18, 20, 24)
"""The nine people of UCI's own test set; the others are for training."""

# Of the training windows, per channel; fixed, so that they are the same on every machine.
_HAPT_MEAN = (0.80381, 0.03029, 0.08783, 0.00504, -0.00214, -0.00792)
_HAPT_DEVIATION = (0.41672, 0.39346, 0.35990, 0.41340, 0.40250, 0.25843)
_MOST_RECORDING_BYTES = 2**27  # unpacked; the real one has 100,526,008
_ARRAY, _TEXT, _BYTES = "numpy.core.multiarray _reconstruct", "numpy dtype", "_codecs encode"
_FRAME, _MANAGER = "pandas.core.frame DataFrame", "pandas.core.internals.managers BlockManager"
_NAMES = {
    _ARRAY, _TEXT, _BYTES, _FRAME, _MANAGER, "copy_reg _reconstructor", "__builtin__ object", "__builtin__ slice",
    "numpy ndarray", "pandas.core.indexes.base _new_Index", "pandas.core.indexes.base Index",
    "pandas.core.indexes.range RangeIndex",
}  # fmt: skip

HaptRecording = Mapping[str, NDArray[Any]]


def read_hapt(parts: Mapping[str, bytes]) -> dict[str, NDArray[Any]]:
    """Read windows of the recordings and their labels."""
    scale = {"feature_mean": np.array(_HAPT_MEAN), "feature_deviation": np.array(_HAPT_DEVIATION)}
    return cut_windows(read_recordings(parts["HAPT.pkl.gz"])) | scale


def read_recordings(packed: bytes) -> dict[int, list[HaptRecording]]:
    """Read the recordings of each person: per channel its readings (n,), and their labels."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
            content = file.read(_MOST_RECORDING_BYTES + 1)
        if len(content) > _MOST_RECORDING_BYTES:
            raise UserError("it is larger than expected", code="too-large")
        people = read_pickle(content, _NAMES)
        return {int(person): [_read_frame(frame) for frame in frames] for person, frames in people.items()}
    except UserError as error:
        raise UserError(f"The recordings cannot be read: {error}.", code=error.code) from error
    except (OSError, EOFError, zlib.error, ValueError, TypeError, LookupError, AttributeError) as error:
        raise UserError(f"The recordings cannot be read ({error}).", code="damaged-file") from error


def cut_windows(people: Mapping[int, list[HaptRecording]]) -> dict[str, NDArray[Any]]:
    """Cut samples (N, 6, 128) with labels from 0; `train_clients` has the person of each training sample."""
    found: dict[bool, list[tuple[NDArray[np.float32], NDArray[np.int32], int]]] = {True: [], False: []}
    for person in sorted(people):
        for recording in people[person]:
            features, labels = _cut_recording(recording)
            found[person in TEST_PEOPLE].append((features, labels, person))
    parts = {}
    for word, rows in (("train", found[False]), ("test", found[True])):
        if not sum(len(labels) for _, labels, _ in rows):
            raise UserError(f"The recordings have no window of one activity for the {word} set.", code="damaged-file")
        parts[f"{word}_features"] = np.concatenate([features for features, _, _ in rows])
        parts[f"{word}_labels"] = np.concatenate([labels for _, labels, _ in rows])
    owners = [np.full(len(labels), person, np.int32) for _, labels, person in found[False]]
    return {**parts, "train_clients": np.concatenate(owners)}


def _cut_recording(recording: HaptRecording) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Cut the windows (n, 6, 128) of a recording that have one activity each; also return their labels from 0."""
    labels = recording["label"]
    starts = np.arange(0, len(labels) - LENGTH + 1, STEP)
    every = starts[:, None] + np.arange(LENGTH)  # (n, 128)
    seen = labels[every]
    pure = (seen == seen[:, :1]).all(axis=1) & (seen[:, 0] >= 1) & (seen[:, 0] <= len(ACTIVITIES))
    signals = np.stack([recording[channel] for channel in CHANNELS]).astype(np.float32)  # (6, n)
    features = signals[:, every[pure]].transpose(1, 0, 2)
    return np.ascontiguousarray(features), (seen[pure, 0] - 1).astype(np.int32)


def _read_frame(frame: PickledCall) -> HaptRecording:
    """Read the columns of a pandas frame from its blocks of numbers and their names."""
    _, blocks, names, *_ = frame.state["_data"].state
    columns: dict[str, NDArray[Any]] = {}
    for block, index in zip(blocks, names, strict=True):
        columns |= dict(zip(_array(index.arguments[1]["data"]), _array(block), strict=True))
    lengths = {len(columns[name]) for name in (*CHANNELS, "label")}
    if len(lengths) != 1 or columns["label"].dtype.kind != "i":
        raise UserError("columns differ in length, or labels are not whole numbers", code="damaged-file")
    if not all(np.isfinite(columns[name]).all() for name in CHANNELS):
        raise UserError("readings are not finite", code="damaged-file")
    return columns


def _array(call: PickledCall) -> Any:  # noqa: ANN401 - an array of numbers, or a list of names
    """Read a pickled array."""
    _, shape, kind, by_columns, values = call.state
    if isinstance(values, list):
        return values
    if call.path != _ARRAY or kind.arguments[0] not in {"f8", "i8"} or kind.state[1] != "<":
        raise UserError("an array does not contain numbers", code="damaged-file")
    text, coding = values.arguments
    if values.path != _BYTES or coding != "latin1":
        raise UserError("an array's numbers are not bytes", code="damaged-file")
    numbers = np.frombuffer(text.encode("latin1"), f"<{kind.arguments[0]}")
    return numbers.reshape(shape, order="F" if by_columns else "C")


_MOST_FLIGHT_BYTES = 2**26  # unpacked; the real file has 31,053,850
_ORIGINS = ("EWR", "JFK", "LGA")
_FLIGHTS_KEPT = {"train": 1000, "test": 250}  # at most, of each airline; evenly over the year


def read_flights(parts: Mapping[str, bytes]) -> dict[str, NDArray[Any]]:
    """Read the time in the air of flights, with distance, destination, airport, hour and season as features.

    Every fifth day is in the test set. Airlines are the clients, numbered in alphabetical order. Flights to airports
    whose location is not in the package (Puerto Rico, Virgin Islands) and flights that did not arrive are left out.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(parts["flights.csv.zip"])) as archive, archive.open("flights.csv") as file:
            content = file.read(_MOST_FLIGHT_BYTES + 1)
        if len(content) > _MOST_FLIGHT_BYTES:
            raise UserError("The flights are larger than expected.", code="too-large")
        places = {row["faa"]: (float(row["lat"]), float(row["lon"])) for row in _lines(parts["airports.csv"])}
        rows = [row for row in _lines(content) if row["air_time"].isdigit() and row["dest"] in places]
        days = np.array([datetime.date(2013, int(row["month"]), int(row["day"])).timetuple().tm_yday for row in rows])
        features = np.array([[*_flight(row), *places[row["dest"]]] for row in rows], np.float32).reshape(len(rows), -1)
        minutes = np.array([float(row["air_time"]) for row in rows])
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, LookupError, ValueError, TypeError, csv.Error) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"The flights cannot be read ({error}).", code="damaged-file") from error
    airlines, owners = np.unique([row["carrier"] for row in rows], return_inverse=True)
    features = np.column_stack([features, _seasons(days)])
    arrays: dict[str, NDArray[Any]] = {}
    for word, chosen in (("train", days % 5 != 0), ("test", days % 5 == 0)):
        kept = [_thinned(np.flatnonzero(chosen & (owners == one)), _FLIGHTS_KEPT[word]) for one in range(len(airlines))]
        taken = np.concatenate([np.empty(0, np.int64), *kept])
        arrays |= {f"{word}_features": features[taken], f"{word}_labels": minutes[taken]}
        if word == "train":
            arrays["train_clients"] = owners[taken].astype(np.int32)
    return arrays


def _lines(content: bytes) -> csv.DictReader[str]:
    return csv.DictReader(io.StringIO(content.decode("utf-8")))


def _flight(row: Mapping[str, str]) -> list[float]:
    """Return the miles, the scheduled hour, and 1 for the airport of departure."""
    hour = float(row["hour"]) + float(row["minute"]) / 60
    return [float(row["distance"]), hour, *(float(row["origin"] == origin) for origin in _ORIGINS)]


def _seasons(days: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return days of the year as points on a circle, (n, 2), rounded to be equal on every machine."""
    turns = 2 * np.pi * days / 365
    return np.round(np.stack([np.cos(turns), np.sin(turns)], 1), 4).astype(np.float32)


def _thinned(rows: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Return at most `most` of the rows, evenly spaced."""
    count = min(most, len(rows))
    return rows[np.arange(count) * len(rows) // max(1, count)]
