"""Reads files that another process writes: small ones when they change, growing ones line by line."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cbdsl.util.files import read_json

Stamp = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp | None:
    """Return inode, size and time of a file, which change when it is written; None if there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_file(path: Path, most: int | None = None) -> bytes:
    """Return the content of a file, or its last `most` bytes; nothing if there is no such file."""
    try:
        with path.open("rb") as file:
            if most is not None:
                file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read()
    except OSError:
        return b""


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if there is none."""
    return parse_object(read_file(path))


def parse_object(content: bytes) -> dict[str, Any]:
    """Return the object in a JSON text; an empty one if there is none."""
    try:
        value = read_json(content.decode("utf-8"))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class FileTail:
    """The lines of a growing file. Each is read once; a line without its end is left for the next time."""

    def __init__(self, path: Path) -> None:
        self._path, self._inode, self._position = path, 0, 0

    def starts_anew(self) -> bool:
        """Return whether the file was replaced since its lines were read; then all of it is read again."""
        inode, size, _ = stamp_of(self._path) or (0, 0, 0)
        if not self._position or (inode == self._inode and size >= self._position):
            return False
        self._position = 0
        return True

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that were written since the last call, each with its position in the file."""
        try:
            file = self._path.open("rb")
        except OSError:
            return
        with file:
            self._inode = os.fstat(file.fileno()).st_ino
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                start = self._position
                self._position += len(line)
                yield start, line

    def read_again(self, start: int, count: int) -> list[bytes]:
        """Return lines that were read before, from a position on; nothing if the file has been replaced."""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_ino != self._inode:
                    return []
                file.seek(start)
                return list(itertools.islice(file, count))
        except OSError:
            return []
