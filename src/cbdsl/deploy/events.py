"""What happened around the rounds: who came and went, what was refused and why; events.jsonl in the run's folder."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

_log = logging.getLogger("cbdsl.deploy")

_MOST_BYTES = 64 * 2**20  # of events.jsonl: workers that come and go for ever must not fill a disk


class Events:
    """A log of events and a count of refusals; any thread may write."""

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._lock = path, threading.Lock()
        self.refusals: Counter[str] = Counter()

    def note(self, event: str, **details: Any) -> None:  # noqa: ANN401 - whatever JSON takes
        """Write an event down."""
        if self._path is None:
            return
        line = json.dumps({"time": round(time.time(), 3), "event": event, **details})
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            if file.tell() < _MOST_BYTES:
                file.write(line + "\n")

    def refuse(self, reason: str, worker: str = "") -> None:
        """Count something refused; the first of a kind is logged, the rest only counted."""
        with self._lock:
            self.refusals[reason] += 1
            first = self.refusals[reason] == 1
        if first:
            _log.warning(
                "refused a message from %s: %s (more like it are only counted)", worker or "a stranger", reason
            )
            self.note("refused", reason=reason, worker=worker)
