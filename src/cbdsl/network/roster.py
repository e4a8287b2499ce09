"""The names of workers and their numbers, kept in a file so that a number is never given twice.

`RosterFile` is a file that the owner of a swarm may write, one name per line. It may change during a run: new names get
new numbers, and a worker whose name is gone has left. It gets its old number if its name comes back.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cbdsl.errors import UserError
from cbdsl.network.topics import check_name
from cbdsl.network.wire import MAX_WORKERS
from cbdsl.util.files import read_json, read_text, write_json
from cbdsl.util.serialize import Bounds, from_plain, to_plain

_log = logging.getLogger("cbdsl.network")

_MOST_SAMPLES = 2**31 - 1  # that a hello can state
_SETTLED_SECONDS = 0.5  # a file that has not changed for this long is not being written any more


def worker_names(count: int, start: int = 0, taken: Iterable[str] = (), digits: int = 1) -> tuple[str, ...]:
    """Return default names that are not taken: worker-0, worker-1 and so on, with at least `digits` digits each."""
    used = set(taken)
    names = (f"worker-{number:0{digits}}" for number in itertools.count(start))
    return tuple(itertools.islice((name for name in names if name not in used), count))


class RosterFile:
    """The names that the owner of a swarm keeps in a file."""

    def __init__(self, path: Path) -> None:
        """Read the file; raise UserError if it cannot be used."""
        self.path, self._seen = path, _stamp(path)
        self.names = _read_names(path)

    def has_changed(self) -> bool:
        """Read the file again and return whether `names` changed. An unusable file is ignored with a warning."""
        stamp = _stamp(self.path)
        if stamp == self._seen:
            return False
        time.sleep(_SETTLED_SECONDS)
        if stamp != _stamp(self.path):  # it is being written; the next call will read it
            return False
        self._seen = stamp
        try:
            before, self.names = self.names, _read_names(self.path, whole=True)
        except UserError as error:
            _log.warning("%s The swarm stays as it is: %d names", error, len(self.names))
            return False
        return self.names != before


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read_names(path: Path, whole: bool = False) -> tuple[str, ...]:
    """Read names from a file, one per line; lines that start with # are comments.

    whole: refuse a file whose last line has no end, for it may still be written.
    """
    try:
        text = read_text(path)
        if whole and text and not text.endswith("\n"):
            raise ValueError("its last line has no end; is it still being copied? If not, end it with a new line")
        lines = [line.strip() for line in text.splitlines() if not line.startswith("#")]
        names = [check_name(line, "worker") for line in lines if line]
    except (OSError, ValueError) as error:
        message = f"The roster {path} cannot be read: {str(error).rstrip('.')}."
        raise UserError(message, code="unreadable-file") from error
    if not names:
        raise UserError(f"The roster {path} contains no names. Give one name per line.", code="unreadable-file")
    (name, times), *_ = Counter(names).most_common(1)
    if times > 1:
        raise UserError(
            f"The roster {path} contains '{name}' {times} times; every worker needs its own name.", code="conflict"
        )
    return tuple(names)


@dataclass(frozen=True)
class _StoredRoster:
    """The file of a roster."""

    names: list[str]
    closed: bool
    samples: dict[str, Annotated[int, Bounds(0, _MOST_SAMPLES)]]
    left: list[str] = field(default_factory=list)


class Roster:
    """Names in the order of their numbers, 0 to U - 1. A number, once given, stays."""

    def __init__(self, path: Path, places: int, names: Sequence[str] = ()) -> None:
        """Read the file, or start with the names given; with names given nobody else can join, but see `follow`."""
        if places > MAX_WORKERS:
            raise UserError(
                f"A network has room for {MAX_WORKERS:,} workers; given {places:,}. Set workers lower.",
                code="too-large",
            )
        self._path, self._places = path, places
        self._closed = bool(names)
        self._names: list[str] = []
        self._left: frozenset[str] = frozenset()  # workers that have a number and are no longer in the swarm
        self._samples: dict[str, int] = {}
        self._noted, self._writing = False, threading.Lock()  # the link's thread enrols, the main thread saves
        if path.exists():
            self._read()
        elif names:
            if len(set(names)) != len(names):
                raise UserError("A name is twice in the roster; every worker needs its own name.", code="conflict")
            if len(names) != places:
                raise UserError(
                    f"The roster has {len(names)} names for {places} workers; give as many as the spec.",
                    code="wrong-shape",
                )
            self._names = [check_name(name, "worker") for name in names]
            self._write()
        self._index = {name: number for number, name in enumerate(self._names)}

    @property
    def names(self) -> tuple[str, ...]:
        """All names that ever had a number, in the order of their numbers."""
        return tuple(self._names)

    @property
    def places(self) -> int:
        """How many workers there are, or may be where anybody can join."""
        return len(self._names) - len(self._left) if self._closed else self._places

    def members(self) -> Sequence[int]:
        """Return the numbers of the workers that are in the swarm, or may be, in their order."""
        if not self._closed:
            return range(self._places)
        return [number for number, name in enumerate(self._names) if name not in self._left]

    def listed(self) -> list[str]:
        """Return the names of the workers in the swarm."""
        return [name for name in self._names if name not in self._left]

    def has_left(self, name: str) -> bool:
        """Return whether a worker was in the swarm and is no longer."""
        return name in self._left

    def follow(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Make these names the swarm's, and return those that joined and those that left."""
        new = [name for name in names if name not in self._index]
        if len(self._names) + len(new) > MAX_WORKERS:
            raise UserError(
                f"A run has room for {MAX_WORKERS:,} workers, including those that left it; {len(self._names):,} had "
                f"a number, and {len(new):,} are new.",
                code="too-large",
            )
        left = frozenset(self._names) - set(names)
        joined = [*(name for name in self._names if name in self._left - left), *new]
        gone = [name for name in self._names if name in left - self._left]
        if joined or gone or not self._closed:
            for name in new:
                self._names.append(name)
                self._index[name] = len(self._names) - 1  # last: another thread that sees the number may use the name
            self._left, self._closed = left, True
            self._write()
        return joined, gone

    def number(self, name: str) -> int | None:
        """Return the number of a worker, or None."""
        return self._index.get(name)

    def name(self, number: int) -> str:
        """Return the name of a worker."""
        return self._names[number] if number < len(self._names) else f"#{number}"

    def has_room_for(self, name: str) -> bool:
        """Return whether a newcomer may join."""
        return not self._closed and len(self._names) < self.places and self.number(name) is None

    def enrol(self, names: Sequence[str]) -> None:
        """Give numbers to newcomers, in this order."""
        for name in names:
            if self.has_room_for(name):
                self._index[name] = len(self._names)
                self._names.append(name)
        self._write()

    def samples(self, number: int) -> int:
        """Return how many samples a worker stated; 1 if it did not."""
        return self._samples.get(self.name(number), 1)

    def note_samples(self, name: str, count: int) -> None:
        """Note how many samples a worker has: its first statement counts for the whole run. `save` writes it."""
        if name not in self._samples:
            self._samples[name] = count
            self._noted = True

    def save(self) -> None:
        """Write what was noted; once for many, since thousands of hellos may arrive at once."""
        if self._noted:
            self._noted = False
            self._write()

    def _read(self) -> None:
        try:
            stored = from_plain(_StoredRoster, read_json(self._path.read_text(encoding="utf-8")), defaults=True)
            self._names = [check_name(name, "worker") for name in stored.names]
        except (OSError, ValueError) as error:
            message = f"{self._path} is damaged ({error}). Restore it: it contains the workers' numbers."
            raise UserError(message, code="damaged-file") from error
        self._samples, self._closed = stored.samples, stored.closed
        self._left = frozenset(stored.left) & set(self._names)

    def _write(self) -> None:
        with self._writing:
            left = [name for name in self._names if name in self._left]
            stored = to_plain(_StoredRoster(list(self._names), self._closed, dict(self._samples), left))
            if not left:
                del stored["left"]
            write_json(self._path, stored, private=True)
