"""Atomic and private file writes, size-limited reads, and .npz files."""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from cbdsl.util.formatting import format_bytes
from cbdsl.util.memory import free_memory

_MOST_TEXT = 2**22  # bytes of a file that people write
_PRIVATE = 0o600


def write_atomically(path: Path, content: bytes | memoryview, private: bool = False) -> None:
    """Write a small file, or leave the old one. private: readable by its owner alone, whatever the umask."""
    replace_atomically(path, lambda file: file.write(content), private)


def replace_atomically(path: Path, write: Callable[[IO[bytes]], object], private: bool = False) -> None:
    """Write a file under another name and rename it, so that a crash leaves the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    if private:
        partial.unlink(missing_ok=True)  # an old one would keep its permissions
    with private_file(partial, "wb") if private else partial.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_json(path: Path, content: object, private: bool = False) -> None:
    """Write plain values as indented JSON; ValueError for NaN and infinity."""
    write_atomically(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode(), private)


def is_free(path: Path) -> bool:
    """Return whether a path can become a folder: it does not exist, or contains only hidden files, such as a lock."""
    return not path.exists() or (path.is_dir() and all(file.name.startswith(".") for file in path.iterdir()))


def private_folder(path: Path) -> None:
    """Create a folder that its owner alone can enter; an existing one stays as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def private_file(path: Path, mode: str) -> IO[bytes]:
    """Open a file for writing; if it is new, its owner alone can read it."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, _PRIVATE))


def read_text(path: Path) -> str:
    """Read a file that people write, such as a spec; ValueError if it is far too long, or not UTF-8."""
    with path.open("rb") as file:
        content = file.read(_MOST_TEXT + 1)
    if len(content) > _MOST_TEXT:
        raise ValueError(f"it is longer than {format_bytes(_MOST_TEXT)}")
    return content.decode("utf-8")


def read_json(text: str) -> Any:  # noqa: ANN401 - what JSON holds
    """Parse JSON text; ValueError if it is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def load_arrays(
    path: Path,
    names: Sequence[str] | None = None,
    optional: Sequence[str] = (),
    without: Sequence[str] = (),
    most: int | None = None,
) -> dict[str, NDArray[Any]]:
    """Read arrays of an .npz file, all if no names are given; ValueError with the reason if they cannot be read.

    optional: arrays that may be missing. without: arrays that are not to be read, though their bytes are checked.
    most: bytes that the arrays may take together; the free memory if not given.
    An array is made only when its file holds as many bytes as it announces, and there is room for them.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            there = [name.removesuffix(".npy") for name in archive.namelist()]
            wanted = there if names is None else [*names, *(name for name in optional if name in there)]
            damaged = archive.testzip() if without else None
            if damaged is not None:
                raise ValueError(f"{damaged} is not what was written")
            return _members(archive, [name for name in wanted if name not in without], most)
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    except Exception as error:  # whatever zipfile and numpy raise for damaged bytes
        raise ValueError(str(error) or type(error).__name__) from error


@dataclass(frozen=True, eq=False)
class InBlocks:
    """An array that is computed while it is written, block by block."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    blocks: Callable[[], Iterable[NDArray[Any]]]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return math.prod(self.shape) * self.dtype.itemsize


def save_arrays(file: IO[bytes], arrays: Mapping[str, NDArray[Any] | InBlocks]) -> None:
    """Write an uncompressed .npz file, as numpy does."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                if not isinstance(array, InBlocks):
                    npy.write_array(member, np.asanyarray(array), allow_pickle=False)
                    continue
                head = {"descr": npy.dtype_to_descr(array.dtype), "fortran_order": False, "shape": array.shape}
                npy.write_array_header_1_0(member, head)
                for block in array.blocks():
                    member.write(np.ascontiguousarray(block).data.cast("B") if block.size else b"")


def map_arrays(path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Map those of some arrays that an .npz file contains, read-only; only what is used is read from the file.

    They stay valid if the file is replaced by another.
    """
    arrays: dict[str, NDArray[Any]] = {}
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        for name in set(archive.namelist()) & {f"{name}.npy" for name in names}:
            info = archive.getinfo(name)
            file.seek(info.header_offset + 26)
            lengths = np.frombuffer(file.read(4), "<u2")  # of the member's name and of what follows it
            file.seek(info.header_offset + 30 + int(lengths.sum()))
            shape, dtype = _header(file)
            if info.compress_type != zipfile.ZIP_STORED or dtype.hasobject:
                raise ValueError(f"{name} is packed, and cannot be mapped")
            empty = not math.prod(shape)
            found = np.zeros(shape, dtype) if empty else np.memmap(file, dtype, "r", file.tell(), shape)
            arrays[name.removesuffix(".npy")] = found
    return arrays


def _members(archive: zipfile.ZipFile, names: Sequence[str], most: int | None) -> dict[str, NDArray[Any]]:
    room = free_memory() if most is None else most
    arrays, left = {}, room
    for name in names:
        if f"{name}.npy" not in archive.namelist():
            raise ValueError(f"it has no array '{name}'")
        info = archive.getinfo(f"{name}.npy")
        with archive.open(info) as file:
            shape, dtype = _header(file)
            announced = math.prod(shape) * dtype.itemsize
            if min(shape, default=0) < 0 or dtype.hasobject or announced != info.file_size - file.tell():
                raise ValueError(f"the array '{name}' is not what it announces")
        left -= announced
        if left < 0:
            raise ValueError(f"it unpacks to more than the {format_bytes(room)} of memory that are left")
        with archive.open(info) as file:
            arrays[name] = npy.read_array(file, allow_pickle=False)
    return arrays


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read shape and type of the array in an .npy file, up to its first number."""
    read = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(file)
    return shape, dtype
