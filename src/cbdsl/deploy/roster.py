"""Who is who: the names of workers and their numbers, kept in a file so that a number is never given twice."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from cbdsl.deploy.topics import check_name
from cbdsl.deploy.wire import MAX_WORKERS
from cbdsl.errors import UserError
from cbdsl.files import read_json, write_json

_MOST_SAMPLES = 2**31 - 1  # that a greeting can state


class Roster:
    """Names in the order of their numbers, 0 to U - 1. A number, once given, stays."""

    def __init__(self, path: Path, places: int, names: Sequence[str] = ()) -> None:
        """Read the file, or start with the names given; with names given nobody else can join."""
        if places > MAX_WORKERS:
            raise UserError(f"A network has room for {MAX_WORKERS:,} workers; given {places:,}. Set workers lower.")
        self._path, self.places = path, places
        self._closed = bool(names)
        self._names: list[str] = []
        self._samples: dict[str, int] = {}
        self._noted, self._writing = False, threading.Lock()  # the link's thread enrols, the main thread saves
        if path.exists():
            self._read()
            if names and list(names) != self._names:
                raise UserError(
                    f"{path} lists other workers than those given now. A run keeps its roster: give the same names in "
                    "the same order, or start another run."
                )
        elif names:
            if len(set(names)) != len(names):
                raise UserError("A name stands twice in the roster; every worker needs a name of its own.")
            if len(names) != places:
                raise UserError(f"The roster has {len(names)} names for {places} workers; give as many as the spec.")
            self._names = [check_name(name, "worker") for name in names]
            self._write()
        self._index = {name: number for number, name in enumerate(self._names)}

    @property
    def names(self) -> tuple[str, ...]:
        """Everybody, in the order of their numbers."""
        return tuple(self._names)

    def number(self, name: str) -> int | None:
        """The number of a worker; none if it has none."""
        return self._index.get(name)

    def name(self, number: int) -> str:
        """The name of a worker."""
        return self._names[number] if number < len(self._names) else f"#{number}"

    def room(self, name: str) -> bool:
        """Whether a newcomer may join."""
        return not self._closed and len(self._names) < self.places and self.number(name) is None

    def enrol(self, names: Sequence[str]) -> None:
        """Give numbers to newcomers, in this order."""
        for name in names:
            if self.room(name):
                self._index[name] = len(self._names)
                self._names.append(name)
        self._write()

    def samples(self, number: int) -> int:
        """How many samples a worker said it holds; 1 if it never did."""
        return self._samples.get(self.name(number), 1)

    def note_samples(self, name: str, count: int) -> None:
        """Remember how many samples a worker holds: what it says first counts for the whole run. `save` keeps it."""
        if name not in self._samples:
            self._samples[name] = count
            self._noted = True

    def save(self) -> None:
        """Write down what was noted; once for many, since thousands may introduce themselves at once."""
        if self._noted:
            self._noted = False
            self._write()

    def _read(self) -> None:
        try:
            stored = read_json(self._path.read_text(encoding="utf-8"))
            self._names = [check_name(name, "worker") for name in stored["names"]]
            self._samples = {str(name): int(count) for name, count in stored["samples"].items()}
            if any(not 0 <= count <= _MOST_SAMPLES for count in self._samples.values()):
                raise ValueError("impossible numbers of samples")
            self._closed = bool(stored["closed"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{self._path} is damaged ({error}). Restore it: it says which worker is which.") from error

    def _write(self) -> None:
        with self._writing:
            stored = {"names": list(self._names), "closed": self._closed, "samples": dict(self._samples)}
            write_json(self._path, stored, private=True)
