"""The state of a folder of many runs, such as a sweep writes: how far each run is, and which settings differ."""

from __future__ import annotations

import itertools
import threading
import time
import tomllib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cbdsl.runs.records import finite
from cbdsl.watch.folder_reader import parse_object, read_file, read_object, stamp_of
from cbdsl.watch.run_state import RunView, describe_metric

RUNS = "runs"
_MOST_RUNS = 2000  # that are shown
_MOST_OPEN = 8  # runs that are followed round by round at a time
_MOST_COLUMNS = 6  # settings that tell runs apart
_READ_SECONDS = 1.0
_LAST_BYTES = 256 * 1024  # of rounds.jsonl, which contain the last whole line


class SweepView:
    """The runs of a folder. Its methods may be called from any thread."""

    def __init__(self, folder: Path, least_seconds: float = _READ_SECONDS) -> None:
        self.folder, self._least_seconds, self._lock = folder, least_seconds, threading.Lock()
        self._looked = float("-inf")
        self._cache: dict[str, tuple[object, dict[str, Any]]] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self._open: OrderedDict[str, RunView] = OrderedDict()

    def has_runs(self) -> bool:
        """Return whether there is any run."""
        return next(self.list_names(), None) is not None

    def list_names(self) -> Iterator[str]:
        """Yield the names of the runs' folders, sorted."""
        runs = self.folder / RUNS
        paths = sorted(runs.iterdir()) if runs.is_dir() else []
        return (path.name for path in paths if (path / "spec.toml").is_file())

    def open_run(self, name: str) -> RunView | None:
        """Return a run of this folder, followed from now on, or None if there is no such run."""
        if name not in self.list_names():
            return None
        with self._lock:
            view = self._open.pop(name, None) or RunView(self.folder / RUNS / name)
            self._open[name] = view
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
            return view

    def read_rows(self) -> dict[str, dict[str, Any]]:
        """Return what is known of each run."""
        with self._lock:
            if time.monotonic() - self._looked >= self._least_seconds:
                self._rows = {
                    name: self._row(self.folder / RUNS / name)
                    for name in itertools.islice(self.list_names(), _MOST_RUNS)
                }
                self._cache = {name: one for name, one in self._cache.items() if name in self._rows}
                self._looked = time.monotonic()
            return self._rows

    def make_table(self) -> dict[str, Any]:
        """Return the table of the page, with a column for each setting that is not the same in all runs."""
        rows = self.read_rows()
        settings = [row["settings"] for row in rows.values()]
        keys = sorted({key for one in settings for key in one})
        varied = [key for key in keys if len({repr(one.get(key)) for one in settings}) > 1][:_MOST_COLUMNS]
        titles = {row["metric"]["title"] for row in rows.values()}
        title = titles.pop() if len(titles) == 1 else "result" if titles else "accuracy"
        runs = []
        for name, row in rows.items():
            values = [str(row["settings"].get(key, "")) for key in varied]
            shown = {key: value for key, value in row.items() if key != "settings"}
            runs.append({**shown, "name": name, "values": values})
        return {"facts": {"kind": "sweep", "folder": self.folder.name}, "columns": varied, "runs": runs, "title": title}

    def _row(self, folder: Path) -> dict[str, Any]:
        """Return one run; read again only if something of it has changed."""
        stamps = tuple(stamp_of(folder / file) for file in ("spec.toml", "summary.json", "rounds.jsonl"))
        if folder.name not in self._cache or self._cache[folder.name][0] != stamps:
            self._cache[folder.name] = stamps, _read_run(folder)
        return self._cache[folder.name][1]


def _read_run(folder: Path) -> dict[str, Any]:
    settings, last = _read_settings(folder / "spec.toml"), _read_last_round(folder / "rounds.jsonl")
    measured = last.get("metrics")
    metric = next(iter(measured), "accuracy") if isinstance(measured, dict) else "accuracy"
    return {
        "settings": settings,
        "round": last.get("round", 0),
        "rounds": settings.get("rounds", 0),
        "accuracy": finite(last.get("test_accuracy") if metric == "accuracy" else last["metrics"][metric]),
        "metric": describe_metric(metric),
        "banned": len(last.get("banned", [])),
        "done": bool(read_object(folder / "summary.json")),
    }


def _read_last_round(path: Path) -> dict[str, Any]:
    """Return the last line that is written whole."""
    whole, newline, _ = read_file(path, _LAST_BYTES).rpartition(b"\n")
    return parse_object(whole.rpartition(b"\n")[2]) if newline else {}


def _read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a spec, flat: `local.epochs`."""
    try:
        tree = tomllib.loads(read_file(path).decode("utf-8"))
    except ValueError:
        return {}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= {f"{key}.{inner}": one for inner, one in value.items()} if isinstance(value, dict) else {key: value}
    return flat
