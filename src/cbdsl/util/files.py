"""Atomic and private file writes, and size-limited reads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from cbdsl.util.formatting import format_bytes

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
