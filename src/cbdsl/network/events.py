"""What happened around the rounds: who came and went, what was refused and why; events.jsonl in the run's folder."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cbdsl.util.files import private_file, read_json, read_text, write_json

_log = logging.getLogger("cbdsl.deploy")

_MOST_BYTES = 32 * 2**20  # of events.jsonl, and of the older one: workers that come and go must not fill a disk
_MOST_OFFENCES = 1000  # of those written down by name: the most frequent ones
_MOST_STRANGERS = 100  # names noted for one reason beside the members': strangers can make up as many as they like


class Events:
    """A log of events and a count of refusals; any thread may write."""

    def __init__(
        self, path: Path | None = None, is_member: Callable[[str], bool] | None = None, counts: Path | None = None
    ) -> None:
        """is_member: whether a name is one of the roster's, of which there are only so many; nobody is if not given.

        counts: a file in which the numbers of refusals outlive this process; see `save`.
        """
        self._path, self._counts, self._lock = path, counts, threading.Lock()
        self.listener: Callable[[str, dict[str, Any]], None] | None = None  # hears of every event
        self._is_member = is_member or (lambda _: False)
        self.refusals: Counter[str] = Counter()
        self._offences: Counter[tuple[str, str]] = Counter()  # (reason, worker), members and the first strangers
        self._strangers: Counter[str] = Counter()  # names that are noted, by reason
        self._saved = (0, time.monotonic())  # how many refusals were on disk, and since when
        if counts is not None and counts.exists():
            self._go_on(counts)

    def note(self, event: str, **details: Any) -> None:  # noqa: ANN401 - whatever JSON takes
        """Write an event down; the older half of a long log goes to events.old.jsonl, and what was there is gone."""
        if self.listener is not None:
            self.listener(event, details)
        if self._path is None:
            return
        line = json.dumps({"time": round(time.time(), 3), "event": event, **details})
        with self._lock:
            if self._path.exists() and self._path.stat().st_size >= _MOST_BYTES:
                self._path.replace(self._path.with_name(f"{self._path.stem}.old{self._path.suffix}"))
            with private_file(self._path, "ab") as file:
                file.write(line.encode() + b"\n")

    def refuse(self, reason: str, worker: str = "") -> None:
        """Count something refused; the first of a kind from each worker is logged, the rest only counted."""
        with self._lock:
            self.refusals[reason] += 1
            first = self._first(reason, worker)
        if first:
            _log.warning(
                "refused a message from %s: %s (more like it are only counted)", worker or "a stranger", reason
            )
            self.note("refused", reason=reason, worker=worker)

    def offences(self) -> list[tuple[str, str, int]]:
        """Who was refused what and how often, the most frequent first; of strangers only the first hundred a reason."""
        with self._lock:
            return [(worker, reason, count) for (reason, worker), count in self._offences.most_common()]

    def save(self, every: float = 0.0) -> None:
        """Write the numbers of refusals to their file, unless that was done less than so many seconds ago."""
        total, (before, since) = sum(self.refusals.values()), self._saved
        if self._counts is None or total == before or time.monotonic() - since < every:
            return
        offences = self.offences()[:_MOST_OFFENCES]
        with self._lock:
            reasons = dict(self.refusals)
        write_json(self._counts, {"reasons": reasons, "offences": offences}, private=True)
        self._saved = (total, time.monotonic())

    def _go_on(self, counts: Path) -> None:
        """Count on from what an earlier process left; a damaged count is not worth refusing to start."""
        try:
            stored = read_json(read_text(counts))
            reasons = {str(reason): int(count) for reason, count in stored["reasons"].items()}
            offences = {(str(reason), str(worker)): int(count) for worker, reason, count in stored["offences"]}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning("%s is damaged (%s); refusals are counted from zero", counts, error)
            return
        self.refusals.update(reasons)
        self._offences.update(offences)
        self._strangers.update(reason for reason, worker in offences if not self._is_member(worker))
        self._saved = (sum(reasons.values()), time.monotonic())

    def _first(self, reason: str, worker: str) -> bool:
        """Count a worker's refusal, if it is one of those that are counted by name; whether it is its first."""
        if (reason, worker) not in self._offences and not self._is_member(worker):
            if self._strangers[reason] >= _MOST_STRANGERS:
                return False
            self._strangers[reason] += 1
        self._offences[reason, worker] += 1
        return self._offences[reason, worker] == 1
