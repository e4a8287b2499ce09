"""What a person sees of a server: the rounds, who is there, who came and who left."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from cbdsl.cli.progress import Display
from cbdsl.text import one_line

_GATHER_SECONDS = 0.5  # many come and go at once: one line tells of all of them
_MOST_NAMES = 5


class Attendance:
    """Who is connected, by the events of a run; what is to be said of it. Pure."""

    def __init__(self, places: int) -> None:
        self._places, self._here, self._over = places, set(), False  # type: tuple[int, set[str], bool]
        self._came: list[str] = []
        self._left: list[str] = []
        self._joined: list[str] = []  # the swarm, whether or not they are there
        self._gone: list[str] = []

    def take(self, event: str, details: Mapping[str, Any]) -> bool:
        """Take an event in; whether there is something to say."""
        name = str(details.get("worker", ""))
        if event == "over":
            self._over = True  # who leaves now has done its part
        elif event == "connected" and name not in self._here:
            self._here.add(name)
            self._came.append(name)
        elif event == "disconnected" and name in self._here:
            self._here.discard(name)
            self._left.append(name)
        elif event == "started":
            self._places = int(details.get("members", self._places))
        elif event in {"enrolled", "left"}:
            self._places = int(details.get("members", self._places))
            self._here -= {name} if event == "left" else set()
            (self._joined if event == "enrolled" else self._gone).append(name)
        return not self._over and bool(self._came or self._left or self._joined or self._gone)

    def count(self) -> str:
        """How many are there."""
        return f"{len(self._here):,} of {self._places:,} here"

    def line(self) -> str:
        """Who came and who left since the last line."""
        news = {
            "came:": self._came, "left:": self._left, "new in the swarm:": self._joined,
            "no longer in the swarm:": self._gone,
        }  # fmt: skip
        self._came, self._left, self._joined, self._gone = [], [], [], []
        return "; ".join([self.count(), *(f"{verb} {_names(names)}" for verb, names in news.items() if names)])


class ServeDisplay(Display):
    """The rounds of a served run, and its workers."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self._attendance, self._lock = Attendance(places), threading.Lock()
        self._timer: threading.Timer | None = None

    def heard(self, event: str, details: Mapping[str, Any]) -> None:
        """Something happened around the rounds; any thread may say so."""
        with self._lock:
            if self._attendance.take(event, details) and self._timer is None:
                self._timer = threading.Timer(_GATHER_SECONDS, self._say)
                self._timer.daemon = True
                self._timer.start()

    def state(self) -> str:
        """See `Display.state`: how many are there."""
        with self._lock:
            return f"  {self._attendance.count()}"

    def _say(self) -> None:
        with self._lock:
            self._timer, line = None, self._attendance.line()
        self._tell(line)


def _names(names: list[str]) -> str:
    shown = ", ".join(one_line(name, 64) for name in names[:_MOST_NAMES])
    return shown + (f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else "")
