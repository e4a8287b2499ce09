"""Who is there: what events.jsonl says of the workers of a served run, one event after the other. Pure."""

from __future__ import annotations

from collections import deque
from typing import Any

from cbdsl.runs.records import finite
from cbdsl.watch.tally import text_of

_RECENT = 40  # events that the page shows
_MOST_NAMES = 20_000  # that are believed to be there

STATES = ("here", "late", "away", "unseen", "done", "banned")
"""In the run; did not answer the last round; vanished; never seen; left at the end of the run; banned."""


class Presence:
    """The workers as the events so far leave them."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}
        self._missing: set[str] = set()
        self._over = False
        self.seen = False  # whether there are any events at all: a simulated run has none
        self.recent: deque[tuple[float, str]] = deque(maxlen=_RECENT)

    def take(self, event: dict[str, Any]) -> None:
        """Take an event in; what is none changes nothing."""
        self.seen = True
        kind, worker = event.get("event"), text_of(event.get("worker"))
        if kind == "started":
            self._states = dict.fromkeys(self._states, "away")  # a new process has seen nobody yet
            self._missing, self._over = set(), False
        elif kind == "connected" and len(self._states) < _MOST_NAMES:
            self._states[worker] = "here"
        elif kind in ("disconnected", "left") and worker in self._states:
            self._states[worker] = "done" if self._over else "away"
        elif kind == "closed":
            missing = event.get("missing")
            self._missing = {text_of(name) for name in missing} if isinstance(missing, list) else set()
        elif kind == "over":
            self._over = True
        words = _words(kind, worker, event)
        if words and not (self._over and kind == "disconnected"):  # everybody leaves in the end
            when = event.get("time")
            self.recent.append((finite(float(when)) or 0.0 if isinstance(when, (int, float)) else 0.0, words))

    def state(self, name: str) -> str:
        """Where a worker is."""
        state = self._states.get(name, "unseen")
        if self._over and state == "here":
            return "done"
        return "late" if state == "here" and name in self._missing else state


_WORDS = {
    "connected": "{worker} is here",
    "disconnected": "{worker} left",
    "silent": "{worker} was invited and sent no model in time",
    "refused": "refused a message from {worker}: {reason}",
    "flood": "{worker} sends too much and is not listened to for a while",
    "enrolled": "{worker} has joined",
    "left": "{worker} is no longer in the swarm",
    "started": "the server was started",
    "over": "the last round is played",
}


def _words(kind: object, worker: str, event: dict[str, Any]) -> str:
    """An event in words; nothing for those that every round has."""
    pattern = _WORDS.get(kind, "") if isinstance(kind, str) else ""
    return pattern.format(worker=worker or "a stranger", reason=text_of(event.get("reason")))
