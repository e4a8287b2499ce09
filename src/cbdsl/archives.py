"""Arrays from .npz files that cannot spoil their reader: whatever the bytes, arrays or a ValueError with a reason."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from cbdsl.machine import free_memory
from cbdsl.text import size


def load_arrays(
    path: Path, names: Sequence[str] | None = None, optional: Sequence[str] = ()
) -> dict[str, NDArray[Any]]:
    """Arrays of an .npz file, all of them if no names are given; ValueError with the reason if they cannot be had.

    optional: arrays that may be missing.
    An array is made only when its file holds as many bytes as it announces, and the machine has memory for them.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            there = [name.removesuffix(".npy") for name in archive.namelist()]
            wanted = there if names is None else [*names, *(name for name in optional if name in there)]
            return _members(archive, wanted)
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    except Exception as error:  # whatever damaged bytes lead zipfile, its unpackers and numpy to
        raise ValueError(str(error) or type(error).__name__) from error


def _members(archive: zipfile.ZipFile, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    arrays, left = {}, free_memory()
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
            raise ValueError(f"it unpacks to more than the {size(free_memory())} of memory that are left")
        with archive.open(info) as file:
            arrays[name] = npy.read_array(file, allow_pickle=False)
    return arrays


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of the array in an .npy file, which is read up to its first number."""
    read = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(file)
    return shape, dtype
