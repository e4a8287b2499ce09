"""Reads and writes .npz files; malformed input raises ValueError."""

from __future__ import annotations

import math
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


def array_names(path: Path) -> list[str]:
    """Return the names of the arrays of an .npz file."""
    with zipfile.ZipFile(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


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
