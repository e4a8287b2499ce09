"""Files that no crash can spoil: written beside their place, then moved there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO


def write_atomically(path: Path, content: bytes) -> None:
    """Write a small file whole, or leave the old one."""
    replace_atomically(path, lambda file: file.write(content))


def replace_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file beside its place and move it there, so that a crash leaves the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_json(path: Path, content: object) -> None:
    """Write plain values as indented JSON; NaN and infinity have no place in it."""
    write_atomically(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())
