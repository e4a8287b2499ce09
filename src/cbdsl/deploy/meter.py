"""Every byte on the wire, by direction and kind of message: what MQTT sends, not only what it carries.

Counts whole PUBLISH packets (header, topic, packet number, payload) and their acknowledgements. What TLS and TCP add
is not counted: that depends on the network. A message from the server to all is published once; the broker copies it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from cbdsl.deploy.topics import kind_of
from cbdsl.files import write_atomically

Direction = Literal["sent", "received"]
Counts = dict[str, dict[str, list[int]]]  # direction -> kind -> [messages, bytes]

_ACKNOWLEDGEMENT = 4  # bytes of a PUBACK
NOW_AND_THEN = 5.0  # seconds between two writings of the counts while a run is played


def packet_bytes(topic: str, payload: int, qos: int = 1) -> int:
    """The size of one MQTT 3.1.1 PUBLISH packet with so many bytes of payload."""
    rest = 2 + len(topic.encode()) + (2 if qos else 0) + payload
    header, left = 2, rest >> 7
    while left:
        header, left = header + 1, left >> 7
    return header + rest


class Meter:
    """Counts the messages of one client; any thread may count."""

    def __init__(self, path: Path | None = None) -> None:
        """Go on from the counts in a file, if it is there."""
        self._path, self._lock, self._saved = path, threading.Lock(), time.monotonic()
        self._counts: Counts = {"sent": {}, "received": {}}
        if path is not None and path.exists():
            try:
                self._counts = merge([self._counts, json.loads(path.read_text(encoding="utf-8"))])
            except (OSError, ValueError, TypeError, KeyError, AttributeError):
                self._counts = {"sent": {}, "received": {}}  # a record of bytes is not worth refusing to start

    def count(self, direction: Direction, topic: str, payload: int) -> None:
        """Count a message and its acknowledgement, which goes the other way."""
        back: Direction = "received" if direction == "sent" else "sent"
        with self._lock:
            _add(self._counts[direction], kind_of(topic), packet_bytes(topic, payload))
            _add(self._counts[back], "acknowledgement", _ACKNOWLEDGEMENT)

    def counts(self) -> Counts:
        """What was counted so far."""
        with self._lock:
            return {
                direction: {kind: list(pair) for kind, pair in kinds.items()}
                for direction, kinds in self._counts.items()
            }

    def save(self, every: float = 0.0) -> None:
        """Write the counts to the file, unless that was done less than so many seconds ago."""
        now = time.monotonic()
        if self._path is not None and now - self._saved >= every:
            write_atomically(self._path, (json.dumps(self.counts(), indent=2) + "\n").encode())
            self._saved = now


def merge(all_counts: Iterable[Counts]) -> Counts:
    """Add up what several clients counted."""
    total: Counts = {"sent": {}, "received": {}}
    for counts in all_counts:
        for direction in total:
            for kind, (messages, size) in counts.get(direction, {}).items():
                _add(total[direction], kind, int(size), int(messages))
    return total


def total_bytes(counts: Counts, direction: Direction) -> int:
    """All bytes that went one way."""
    return sum(size for _, size in counts[direction].values())


def _add(kinds: dict[str, list[int]], kind: str, size: int, messages: int = 1) -> None:
    pair = kinds.setdefault(kind, [0, 0])
    pair[0] += messages
    pair[1] += size
