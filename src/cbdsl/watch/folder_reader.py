"""Reads files that another process writes: small ones when they change, growing ones line by line."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from cbdsl.util.files import read_json

_MARK = 64  # bytes before the position by which a file is known to be the one it was

Stamp = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp | None:
    """Return a value that changes when the file is written, or None if there is no such file."""
    if not path.is_file():
        return None
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_file(path: Path, most: int | None = None) -> bytes:
    """Return the content of a file, or its last `most` bytes; nothing if there is no such file."""
    try:
        with _open(path) as file:
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
        self._path = path
        self._inode, self._position, self._mark = 0, 0, b""

    def starts_anew(self) -> bool:
        """Return whether the lines read so far are no longer in the file; then all of it is read again."""
        if not self._position or self._continues():
            return False
        self._position, self._mark = 0, b""
        return True

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that were written since the last call, each with its position in the file."""
        try:
            file = _open(self._path)
        except OSError:
            return
        with file:
            found = os.fstat(file.fileno())
            self._inode = found.st_ino
            file.seek(self._position)
            while self._position < found.st_size:  # what is written meanwhile is for the next time
                line = file.readline()
                if not line.endswith(b"\n"):
                    return
                start = self._position
                self._position, self._mark = start + len(line), line[-_MARK:]
                yield start, line

    def read_again(self, start: int, count: int) -> list[bytes]:
        """Return lines that were read before, from a position on; nothing if the file has been replaced."""
        try:
            with _open(self._path) as file:
                if os.fstat(file.fileno()).st_ino != self._inode:
                    return []
                file.seek(start)
                return list(itertools.islice(file, count))
        except OSError:
            return []

    def _continues(self) -> bool:
        try:
            with _open(self._path) as file:
                file.seek(self._position - len(self._mark))
                return os.fstat(file.fileno()).st_ino == self._inode and file.read(len(self._mark)) == self._mark
        except OSError:
            return False


def _open(path: Path) -> IO[bytes]:
    if not path.is_file():  # to open a pipe could block
        raise FileNotFoundError(f"{path} is not a file")
    return path.open("rb")
