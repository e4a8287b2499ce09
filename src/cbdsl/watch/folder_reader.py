"""Files of a folder that another process writes, and that others may have tampered with: never a link's target.

Whatever is read lies in the folder itself. Sizes are bounded, and a file that grows is read as it grows.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbdsl.util.files import read_json

MOST_AT_ONCE = 8 * 2**20  # bytes of a growing file that are read in one go, and of a line that is taken
_MOST_SMALL = 4 * 2**20  # bytes of a file that is read whole
_MOST_PART = 256 * 2**20  # bytes that are read again to go back to an earlier round
_MARK = 64  # bytes before the place where we are, by which a file is known to be the one it was
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC

Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class WatchedFolder:
    """A folder: the one that the user named, or one inside it."""

    root: Path
    inner: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """Where it is; to show, not to open."""
        return self.root.joinpath(*self.inner)

    def inside(self, *names: str) -> WatchedFolder:
        """A folder in this one."""
        return WatchedFolder(self.root, (*self.inner, *names))

    def open(self, name: str) -> int:
        """A descriptor of a file of this folder; OSError if it is none, or if there is a link on the way to it."""
        folder = self._open_folder()
        try:
            file = os.open(name, _FLAGS | os.O_NONBLOCK, dir_fd=folder)
        finally:
            os.close(folder)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise FileNotFoundError(f"{name} is not a file")
        return file

    def names(self) -> list[str]:
        """What is in the folder, sorted; nothing if there is no such folder."""
        try:
            folder = self._open_folder()
        except OSError:
            return []
        try:
            return sorted(os.listdir(folder))  # noqa: PTH208 - by descriptor: a path could lead elsewhere by now
        finally:
            os.close(folder)

    def stamp(self, name: str) -> Stamp | None:
        """What changes when a file is written; none if there is no such file."""
        try:
            file = self.open(name)
        except OSError:
            return None
        try:
            found = os.fstat(file)
            return found.st_ino, found.st_size, found.st_mtime_ns
        finally:
            os.close(file)

    def changed_at(self, name: str) -> float:
        """When a file was last written, by the clock; 0 if there is none."""
        stamp = self.stamp(name)
        return stamp[2] / 1e9 if stamp else 0.0

    def read(self, name: str, most: int = _MOST_SMALL, last: bool = False) -> bytes:
        """A small file whole, or the last bytes of a long one; nothing if it is not there or too long."""
        try:
            file = self.open(name)
        except OSError:
            return b""
        with os.fdopen(file, "rb") as stream:
            if last:
                stream.seek(max(0, os.fstat(file).st_size - most))
            content = stream.read(most + 1)
        return content if last or len(content) <= most else b""

    def read_part(self, name: str, inode: int, start: int, length: int) -> bytes:
        """A part of a file; nothing if it is not the file that it was."""
        try:
            file = self.open(name)
        except OSError:
            return b""
        try:
            return os.pread(file, min(length, _MOST_PART), start) if os.fstat(file).st_ino == inode else b""
        finally:
            os.close(file)

    def read_object(self, name: str) -> dict[str, Any]:
        """The object that a JSON file holds; an empty one if it holds none."""
        return as_object(self.read(name))

    def _open_folder(self) -> int:
        folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # the user's own word: links are fine
        for name in self.inner:
            try:
                further = os.open(name, _FLAGS | os.O_DIRECTORY, dir_fd=folder)
            finally:
                os.close(folder)
            folder = further
        return folder


def as_object(content: bytes) -> dict[str, Any]:
    """The object in a JSON text; an empty one if there is none."""
    try:
        value = read_json(content.decode("utf-8"))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class FileTail:
    """The lines of a file that grows, each read once; a line without its end is left for the next time."""

    def __init__(self, place: WatchedFolder, name: str) -> None:
        self._place, self._name = place, name
        self._file, self._position, self._mark = 0, 0, b""

    @property
    def inode(self) -> int:
        """Which file was read last."""
        return self._file

    def read(self) -> tuple[bool, list[tuple[int, bytes]], bool]:
        """Whether it is another file than before, the lines that came with their places, and whether there is more."""
        try:
            file = self._place.open(self._name)
        except OSError:
            return self._start_again(0), [], False
        try:
            found = os.fstat(file)
            fresh = self._is_another(file, found) and self._start_again(found.st_ino)
            self._file = found.st_ino
            content = os.pread(file, MOST_AT_ONCE, self._position)
            start, end = self._position, content.rfind(b"\n") + 1
            if not end and len(content) == MOST_AT_ONCE:
                end = len(content)  # no line of ours is so long: what is left of it will not be one either
            self._position += end
            self._mark = os.pread(file, _MARK, max(0, self._position - _MARK)) if end else self._mark
            self._mark = self._mark[: min(_MARK, self._position)]
            return fresh, _lines(content[:end], start), found.st_size - self._position >= MOST_AT_ONCE
        finally:
            os.close(file)

    def _is_another(self, file: int, found: os.stat_result) -> bool:
        """Whether what was read so far is not what the file begins with: it was replaced, or cut and written anew."""
        if found.st_ino != self._file or found.st_size < self._position:
            return True
        return os.pread(file, len(self._mark), self._position - len(self._mark)) != self._mark

    def _start_again(self, file: int) -> bool:
        begun = self._position > 0
        self._file, self._position, self._mark = file, 0, b""
        return begun


def _lines(content: bytes, start: int) -> list[tuple[int, bytes]]:
    found = []
    for line in content.splitlines(keepends=True):
        found.append((start, line))
        start += len(line)
    return found
