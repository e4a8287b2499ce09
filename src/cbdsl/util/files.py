"""Atomic and private file writes, and size-limited reads."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from cbdsl.util.formatting import format_bytes

FULL = {errno.ENOSPC, errno.EDQUOT}
"""Errors of a full disk, or of one on which a user may take no more."""

_MOST_TEXT = 2**22  # bytes of a file that people write
_PRIVATE = 0o600


def write_atomically(path: Path, content: bytes | memoryview, private: bool = False) -> None:
    """Write a small file, or leave the old one. private: readable by its owner alone, whatever the umask."""
    replace_atomically(path, lambda file: file.write(content), private, len(content))


def replace_atomically(
    path: Path, write: Callable[[IO[bytes]], object], private: bool = False, size: int | None = None
) -> None:
    """Write a file under another name and rename it, so that a crash leaves the old file or the new one.

    size: in bytes, if it is known. If writing fails, the partial file is removed.
    """
    partial = path.with_name(f".{path.name}.partial")
    if private:
        partial.unlink(missing_ok=True)  # an old one would keep its permissions
    try:
        with explain_full_disk(path, size):
            with private_file(partial, "wb") if private else partial.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def append_bytes(path: Path, content: bytes, private: bool = True) -> None:
    """Append to a file, and return once the disk has it."""
    with (
        explain_full_disk(path, len(content)),
        private_file(path, "ab") if private else path.open("ab") as file,
    ):
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def explain_full_disk(path: Path, size: int | None = None) -> Iterator[None]:
    """Let an OSError of a full disk name the path, the bytes that are needed, if they are known, and the free ones."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        free = format_bytes(shutil.disk_usage(path.parent).free)
        needed = f"{format_bytes(size)} are needed, " if size is not None else ""
        raise OSError(error.errno, f"{os.strerror(error.errno)}: {needed}{free} are free", str(path)) from error


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
