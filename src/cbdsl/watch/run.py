"""One run as the page shows it: follows its folder, and says what is new to each who watches.

Memory is bounded: charts are thinned, old rounds are read again when somebody looks at them, and of 16 states in
between copies are kept. A folder that is not there yet, or that a resumed run writes anew, is nothing special.
"""

from __future__ import annotations

import threading
import time
from array import array
from dataclasses import dataclass
from typing import Any

from cbdsl.runs.records import RoundRecord
from cbdsl.watch.facts import Facts
from cbdsl.watch.place import MOST_AT_ONCE, Place, Tail, as_object
from cbdsl.watch.presence import STATES, Presence
from cbdsl.watch.tally import Tally, text_of, verdicts

MOST_ROWS = 10_000  # workers that are shown one by one
_MOST_POINTS = 4000  # of a chart; of more rounds every second one is shown, then every fourth ...
_MOST_COPIES = 16
_READ_SECONDS = 0.25  # the folder is looked at so often, however many watch
_PATIENCE = 20  # readings in a row, at most: a file that grows faster than it is read must not hold us

Row = list[Any]


@dataclass(frozen=True)
class Seen:
    """How far one who watches has been told: of which history, how many points, which version of the rows."""

    history: int = -1
    points: int = 0
    version: int = -1


class RunView:
    """A run's folder, followed. Any thread may ask."""

    def __init__(self, place: Place) -> None:
        self.place, self._lock = place, threading.Lock()
        self._rounds, self._events, self._said = (
            Tail(place, name) for name in ("rounds.jsonl", "events.jsonl", "claims.jsonl")
        )
        self.facts = Facts(place)
        self._history = self._version = 0
        self._looked = float("-inf")
        self._rows: list[Row] = []
        self._row_versions: list[int] = []
        self.presence, self._claims = Presence(), {}  # type: tuple[Presence, dict[str, float]]
        self._claim_places: dict[int, int] = {}  # round -> where its line of claims.jsonl begins
        self._forget()

    def _forget(self) -> None:
        """Start from the first round."""
        self.tally = Tally(self.facts.workers)
        self._history += 1
        self._points: list[list[float | None]] = []
        self._stride = self._copy_stride = 1
        self._places = array("Q")  # where each round's line begins
        self._copies: list[tuple[int, Tally]] = []
        self.damaged = 0

    # --- reading the folder

    def refresh(self) -> None:
        """Read what came since the last time, unless that was a moment ago."""
        with self._lock:
            if time.monotonic() - self._looked < _READ_SECONDS:
                return
            if self.facts.refresh():
                self._forget()  # another run than before
                self._rounds = Tail(self.place, "rounds.jsonl")
            self.tally.workers = self.facts.workers  # some may have joined
            for _ in range(_PATIENCE):
                if not self._read_rounds():
                    break
            self._read_events()
            self._read_claims()
            self._make_rows()
            self._looked = time.monotonic()

    def _read_rounds(self) -> bool:
        fresh, lines, more = self._rounds.read()
        if fresh:
            self._forget()
        for start, line in lines:
            try:
                self.tally.add(RoundRecord.from_json(as_object(line)))
            except (ValueError, KeyError, TypeError, AttributeError):
                self.damaged += 1
                continue
            self._places.append(start)
            self._keep()
        return more

    def _keep(self) -> None:
        """Keep the round for the charts and, now and then, a copy to replay from."""
        tally = self.tally
        if tally.round % self._stride == 0:
            self._points.append(tally.point())
        if len(self._points) > _MOST_POINTS:
            self._points, self._stride = self._points[1::2], 2 * self._stride
            self._history += 1
        if tally.round % self._copy_stride == 0:
            self._copies.append((tally.round, tally.copy()))
        if len(self._copies) > _MOST_COPIES:
            self._copies, self._copy_stride = self._copies[1::2], 2 * self._copy_stride

    def _read_events(self) -> None:
        fresh, lines, more = self._events.read()
        if fresh or not self.presence.seen:  # a long log has its older half beside it
            self.presence = Presence()
            older = Tail(self.place, "events.old.jsonl")
            for _ in range(_PATIENCE):
                _, before, rest = older.read()
                for _, line in before:
                    self.presence.take(as_object(line))
                if not rest:
                    break
        for _ in range(_PATIENCE):
            for _, line in lines:
                self.presence.take(as_object(line))
            if not more:
                return
            _, lines, more = self._events.read()

    def _read_claims(self) -> None:
        for _ in range(_PATIENCE):
            fresh, lines, more = self._said.read()
            if fresh:
                self._claim_places = {}
            for start, line in lines:
                found = as_object(line)
                if type(found.get("round")) is int:
                    self._claim_places[found["round"]] = start
                    self._claims = _scores(found)
            if not more:
                return

    # --- what is shown

    def _make_rows(self) -> None:
        """The workers as they are now; those that are not as they were get the next version."""
        rows = self._rows_of(self.tally, self._claims, self._state)
        version = self._version + 1
        if len(rows) != len(self._rows):
            self._rows, self._row_versions = [[]] * len(rows), [version] * len(rows)
        for number, row in enumerate(rows):
            if row != self._rows[number]:
                self._rows[number], self._row_versions[number] = row, version
        self._version = version

    def _state(self, number: int, name: str) -> str:
        if number in self.tally.banned:
            return "banned"
        if self.presence.seen:
            return self.presence.state(name)
        return "done" if self.facts.finished else "here"

    def _rows_of(self, tally: Tally, claims: dict[str, float], state: Any) -> list[Row]:  # noqa: ANN401
        outcomes, refused, rows = tally.outcomes(), self.facts.refused_by, []
        for number in range(min(tally.workers, MOST_ROWS)):
            name, counts = self.name(number), tally.counts.get(number)
            claim = claims.get(name, counts.claim if counts else None)
            numbers = (
                (counts.invited, counts.accepted, counts.declined, counts.refuted, counts.silent, counts.ban)
                if counts
                else (0, 0, 0, 0, 0, "")
            )
            rows.append(
                [number, name, state(number, name), outcomes.get(number, ""), claim, *numbers, refused.get(name, 0)]
            )
        return rows

    def name(self, number: int) -> str:
        """A worker's name, or its number where it has none."""
        names = self.facts.names
        return names[number] if number < len(names) else text_of(self.tally.names.get(number)) or str(number)

    def states(self) -> dict[str, int]:
        """How many workers are in each state."""
        found = dict.fromkeys(STATES, 0)
        for row in self._rows:
            found[row[2]] += 1
        return found

    def news(self, seen: Seen) -> tuple[dict[str, Any], Seen]:
        """What one who has seen so much has not seen yet, and what it has seen then."""
        self.refresh()
        with self._lock:
            whole = seen.history != self._history
            first = 0 if whole else seen.points
            changed = [
                row
                for row, version in zip(self._rows, self._row_versions, strict=True)
                if whole or version > seen.version
            ]
            now = Seen(self._history, len(self._points), self._version)
            message = {
                "whole": whole, "facts": self.facts.shown(self), "points": self._points[first:],
                "latest": self.tally.point() if self.tally.round else None, "workers": changed,
                "verdicts": self._named(verdicts(self.tally.last)),
                "events": list(self.presence.recent),
            }  # fmt: skip
            return message, now

    def at(self, round_number: int) -> dict[str, Any] | None:
        """The run after an earlier round; none if there was no such round."""
        self.refresh()
        with self._lock:
            if not 1 <= round_number <= len(self._places):
                return None
            tally = next(
                (one.copy() for round_of, one in reversed(self._copies) if round_of <= round_number),
                Tally(self.facts.workers),
            )
            tally.workers = self.facts.workers
            for line in self._lines_between(tally.round, round_number):
                try:
                    tally.add(RoundRecord.from_json(as_object(line)))
                except (ValueError, KeyError, TypeError, AttributeError):
                    return None  # written anew just now: the page will be told
            claims = self._claims_of(round_number)
            rows = self._rows_of(tally, claims, lambda number, _: "banned" if number in tally.banned else "")
            return {
                "round": round_number, "latest": tally.point(), "best": tally.best, "banned": len(tally.banned),
                "uploads": tally.uploads, "workers": rows, "verdicts": self._named(verdicts(tally.last)),
            }  # fmt: skip

    def _lines_between(self, after: int, last: int) -> list[bytes]:
        """The lines of some rounds, from the file."""
        if after >= last:
            return []
        start = self._places[after]
        end = self._places[last] if last < len(self._places) else self._places[-1] + MOST_AT_ONCE
        content = self.place.read_part("rounds.jsonl", self._rounds.inode, start, end - start)
        return content.splitlines()[: last - after]

    def _claims_of(self, round_number: int) -> dict[str, float]:
        start = self._claim_places.get(round_number)
        if start is None:
            return {}
        content = self.place.read_part("claims.jsonl", self._said.inode, start, MOST_AT_ONCE)
        return _scores(as_object(content.partition(b"\n")[0]))

    def _named(self, rows: list[Row]) -> list[Row]:
        return [[self.name(row[0]) if type(row[0]) is int and row[0] >= 0 else "", *row[1:]] for row in rows]


def _scores(line: dict[str, Any]) -> dict[str, float]:
    claims = line.get("claims")
    if not isinstance(claims, dict):
        return {}
    return {text_of(name): float(one) for name, one in claims.items() if type(one) is float and abs(one) < 1e300}
