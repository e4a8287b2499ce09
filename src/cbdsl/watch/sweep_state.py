"""A folder of many runs, such as a sweep leaves: how far each of them is, and what tells them apart."""

from __future__ import annotations

import itertools
import threading
import time
import tomllib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from cbdsl.watch.folder_reader import WatchedFolder, as_object
from cbdsl.watch.run_state import RunView, text_of

ROOM = "runs"
_MOST_RUNS = 2000  # that are shown
_MOST_OPEN = 8  # runs that are followed round by round at a time
_MOST_COLUMNS = 6  # settings that tell runs apart
_READ_SECONDS = 1.0
_LAST_BYTES = 256 * 1024  # of rounds.jsonl, in which the last whole line is


class SweepView:
    """The runs of a folder. Any thread may ask."""

    def __init__(self, place: WatchedFolder) -> None:
        self.place, self._lock = place, threading.Lock()
        self._looked = float("-inf")
        self._cache: dict[str, tuple[object, dict[str, Any]]] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self._open: OrderedDict[str, RunView] = OrderedDict()

    def has_runs(self) -> bool:
        """Whether there is any run."""
        return next(self._names(), None) is not None

    def names(self) -> list[str]:
        """The folders of runs, by name; a link is none of them."""
        return list(itertools.islice(self._names(), _MOST_RUNS))

    def _names(self) -> Iterator[str]:
        runs = self.place.inside(ROOM)
        return (name for name in runs.names() if not name.startswith(".") and runs.inside(name).stamp("spec.toml"))

    def run(self, name: str) -> RunView | None:
        """A run of this folder, followed from now on; none if there is no such run."""
        if name not in self.place.inside(ROOM).names() or not self._run(name).stamp("spec.toml"):
            return None
        with self._lock:
            view = self._open.pop(name, None) or RunView(self._run(name))
            self._open[name] = view
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
            return view

    def rows(self) -> dict[str, dict[str, Any]]:
        """What is known of each run."""
        with self._lock:
            if time.monotonic() - self._looked >= _READ_SECONDS:
                self._rows = {name: self._row(name) for name in self.names()}
                self._cache = {name: one for name, one in self._cache.items() if name in self._rows}
                self._looked = time.monotonic()
            return self._rows

    def shown(self) -> dict[str, Any]:
        """The table of the page: a column for every setting that is not the same in all runs."""
        rows = self.rows()
        settings = [row["settings"] for row in rows.values()]
        keys = sorted({key for one in settings for key in one})
        varied = [key for key in keys if len({repr(one.get(key)) for one in settings}) > 1][:_MOST_COLUMNS]
        return {
            "facts": {"kind": "sweep", "folder": self.place.path.name},
            "columns": varied,
            "runs": [
                {**{key: value for key, value in row.items() if key != "settings"}, "name": name,
                 "values": [text_of(str(row["settings"].get(key, ""))) for key in varied]}
                for name, row in rows.items()
            ],
        }  # fmt: skip

    def _run(self, name: str) -> WatchedFolder:
        return self.place.inside(ROOM, name)

    def _row(self, name: str) -> dict[str, Any]:
        """One run; read again only if something of it has changed."""
        place = self._run(name)
        stamps = tuple(place.stamp(file) for file in ("spec.toml", "summary.json", "rounds.jsonl"))
        if name not in self._cache or self._cache[name][0] != stamps:
            self._cache[name] = stamps, _read(place)
        return self._cache[name][1]


def _read(place: WatchedFolder) -> dict[str, Any]:
    settings, last = _settings(place.read("spec.toml")), _last_line(place)
    summary = place.read_object("summary.json")
    banned = last.get("banned")
    return {
        "settings": settings,
        "round": _whole(last.get("round")),
        "rounds": _whole(settings.get("rounds")),
        "accuracy": _share(last.get("test_accuracy")),
        "banned": len(banned) if isinstance(banned, list) else 0,
        "done": bool(summary),
    }


def _last_line(place: WatchedFolder) -> dict[str, Any]:
    """The last whole round of a run."""
    whole, newline, _ = place.read("rounds.jsonl", _LAST_BYTES, last=True).rpartition(b"\n")
    return as_object(whole.rpartition(b"\n")[2]) if newline else {}


def _settings(content: bytes) -> dict[str, Any]:
    """The settings of a spec, flat: `local.epochs`."""
    try:
        tree = tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        return {}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= {f"{key}.{inner}": one for inner, one in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def _whole(value: object) -> int:
    return value if type(value) is int and 0 <= value < 2**31 else 0


def _share(value: object) -> float | None:
    return float(value) if type(value) in {int, float} and 0 <= value <= 1 else None  # type: ignore[operator,arg-type]
