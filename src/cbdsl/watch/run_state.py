"""What the small files of a run's folder say: its spec, roster, summary and counts. Each is read when it changes."""

from __future__ import annotations

import copy
import io
import os
import re
import struct
import threading
import time
import zipfile
from array import array
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cbdsl.algorithm.ledger import NUMBER_BYTES
from cbdsl.runs.records import RoundRecord, finite
from cbdsl.spec import Spec, from_toml
from cbdsl.util.formatting import single_line
from cbdsl.watch.folder_reader import MOST_AT_ONCE, FileTail, WatchedFolder, as_object

_LIVELY = 10.0  # seconds: a folder that was written to so lately belongs to a run that is played
_LOCKS = Path("/proc/locks")
_OWN = Path("/proc/self")


class FolderFacts:
    """A run's folder, but for its long files."""

    def __init__(self, place: WatchedFolder) -> None:
        self._place = place
        self._stamps: dict[str, tuple[int, int, int] | None] = {}
        self.spec: Spec | None = None
        self.names: list[str] = []
        self.refused_by: dict[str, int] = {}
        self.refused = self._parameters = 0
        self.wire: dict[str, int] = {}
        self.summary: dict[str, Any] = {}

    @property
    def workers(self) -> int:
        """How many there are."""
        return max(self.spec.workers, len(self.names)) if self.spec else 0

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return bool(self.summary)

    def refresh(self) -> bool:
        """Read what has changed; whether the spec has, so that it is another run."""
        another = False
        if self._has_changed("spec.toml"):
            before, self.spec = self.spec, _spec_of(self._place.read("spec.toml"))
            another = before != self.spec
            self._parameters = 0 if another else self._parameters
        if self._has_changed("roster.json"):
            names = self._place.read_object("roster.json").get("names")
            self.names = [text_of(name) for name in names] if isinstance(names, list) else []
        if self._has_changed("summary.json"):
            self.summary = self._place.read_object("summary.json")
        if self._has_changed("refused.json"):
            self._read_refused()
        if self._has_changed("wire.json"):
            self._read_wire()
        if self._has_changed("checkpoint.npz") and not self._parameters:
            self._parameters = _parameters_of(self._place)
        return another

    def _has_changed(self, name: str) -> bool:
        stamp, before = self._place.stamp(name), self._stamps.get(name)
        self._stamps[name] = stamp
        return stamp != before

    def _read_refused(self) -> None:
        stored = self._place.read_object("refused.json")
        reasons, offences = stored.get("reasons"), stored.get("offences")
        self.refused = sum(_count(one) for one in reasons.values()) if isinstance(reasons, dict) else 0
        self.refused_by = {}
        for one in offences if isinstance(offences, list) else []:
            if isinstance(one, list) and len(one) == 3:
                name = text_of(one[0])
                self.refused_by[name] = self.refused_by.get(name, 0) + _count(one[2])

    def _read_wire(self) -> None:
        stored, self.wire = self._place.read_object("wire.json"), {}
        for direction in ("sent", "received"):
            kinds = stored.get(direction)
            pairs = kinds.values() if isinstance(kinds, dict) else []
            self.wire[direction] = sum(_count(one[1]) for one in pairs if isinstance(one, list) and len(one) == 2)

    def status(self, played: int) -> str:
        """Waiting, running, stopped or finished."""
        if self.spec is None:
            return "waiting"
        if self.finished and played >= self.spec.rounds:
            return "finished"
        changes = (self._place.changed_at(name) for name in ("rounds.jsonl", "events.jsonl", "spec.toml"))
        lively = time.time() - max(changes) < _LIVELY
        return "running" if lively or _is_locked(self._place.path / ".lock") else "stopped"

    def fedavg_bytes(self) -> int:
        """What FedAvg would upload in a round: a model from everybody who takes part; 0 if its size is not known."""
        parameters = _count(self.summary.get("parameters")) or self._parameters
        return parameters * NUMBER_BYTES * self.spec.participants if self.spec else 0

    def shown(self, view: RunView) -> dict[str, Any]:
        """Everything about the run that fits on a line."""
        spec, tally = self.spec, view.tally
        codec = {spec.codec.up, spec.codec.down} - {"none"} if spec else set()
        return {
            "kind": "run", "folder": self._place.path.name, "status": self.status(tally.round), "round": tally.round,
            "rounds": spec.rounds if spec else 0, "method": text_of(spec.method) if spec else "",
            "preset": text_of(spec.preset) if spec else "", "model": text_of(spec.model) if spec else "",
            "seed": spec.seed if spec else 0, "codec": text_of(", ".join(sorted(codec))),
            "attack": text_of(spec.attack.name) if spec and spec.attack.byzantine else "",
            "byzantine": spec.attack.byzantine if spec else 0, "workers": self.workers, "states": view.states(),
            "served": view.presence.seen, "best": tally.best, "banned": len(tally.banned), "uploads": tally.uploads,
            "seconds": tally.seconds, "fedavg": self.fedavg_bytes(), "wire": self.wire, "refused": self.refused,
            "damaged": view.damaged,
        }  # fmt: skip


def _spec_of(content: bytes) -> Spec | None:
    """The spec in a file; none if there is no whole one yet."""
    try:
        return from_toml(content.decode("utf-8")) if content else None
    except ValueError:
        return None


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value < 2**63 else 0


def _parameters_of(place: WatchedFolder) -> int:
    """How many numbers the model in a checkpoint has, from the head of one of its arrays; 0 if that cannot be said."""
    try:
        with (
            io.FileIO(place.open("checkpoint.npz")) as file,
            zipfile.ZipFile(file) as archive,
            archive.open("global_best.npy") as stored,
        ):
            head = stored.read(1024)
        length = struct.unpack("<H", head[8:10])[0]
        words = head[10 : 10 + length].decode("latin-1")
        return _count(int(words.partition("'shape': (")[2].partition(",")[0]))
    except (OSError, ValueError, KeyError, struct.error, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        return 0


def _is_locked(path: Path) -> bool:
    """Return whether a process holds a lock on a file. The kernel is asked: to try the lock could disturb a run."""
    try:
        with path.open("rb") as file:
            identity = f"{_device_of(file.fileno())}:{os.fstat(file.fileno()).st_ino}"
        locks = [line.split() for line in _LOCKS.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return False
    return any("FLOCK" in words and identity in words for words in locks)


def _device_of(descriptor: int) -> str:
    """Return the device of an open file as /proc/locks names it. On some file systems it is not `st_dev`."""
    [mount] = re.findall(r"^mnt_id:\s*(\d+)$", _OWN.joinpath(f"fdinfo/{descriptor}").read_text(), re.MULTILINE)
    mounts = (line.split() for line in _OWN.joinpath("mountinfo").read_text().splitlines())
    [(major, minor)] = [words[2].split(":") for words in mounts if words[0] == mount]
    return f"{int(major):02x}:{int(minor):02x}"


PHASES = ("train", "wait", "upload", "verify")
_LONGEST = 160  # signs of a reason


@dataclass
class WorkerCounts:
    """One worker's invitations, by what became of them, and the last claim that an invitation repeated."""

    accepted: int = 0
    declined: int = 0
    refuted: int = 0
    silent: int = 0
    claim: float | None = None
    ban: str = ""  # when and why

    @property
    def invited(self) -> int:
        """How often it was asked for its model."""
        return self.accepted + self.declined + self.refuted + self.silent


@dataclass
class RunTotals:
    """A run after some of its rounds."""

    workers: int = 0  # how many there are: numbers beyond are not believed
    round: int = 0
    accuracy: float | None = None
    best: float | None = None
    score: float | None = None
    up: int = 0
    down: int = 0
    uploads: int = 0
    seconds: float = 0.0
    last: RoundRecord | None = None
    banned: set[int] = field(default_factory=set)
    counts: dict[int, WorkerCounts] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def add(self, line: RoundRecord) -> None:
        """Take a round in; ValueError if it is not the one that comes next."""
        if line.round != self.round + 1:
            raise ValueError(f"round {line.round} follows on round {self.round}")
        self.round, self.last = line.round, line
        self.accuracy, self.score = finite(line.test_accuracy), finite(line.global_score)
        if self.accuracy is not None:
            self.best = max(self.accuracy, self.best or 0.0)
        self.up += _bounded(line.uplink_bytes)
        self.down += _bounded(line.downlink_bytes)
        self.uploads += _bounded(line.uploads)
        self.seconds += _number(line.seconds) or 0.0
        for outcome in ("accepted", "declined", "refuted", "silent"):
            for worker in getattr(line, outcome):
                if counts := self._of(worker):
                    setattr(counts, outcome, getattr(counts, outcome) + 1)
        for verdict in line.verdicts:
            if counts := self._of(verdict.get("worker")):
                counts.claim = _number(verdict.get("claimed"))
        for worker in set(line.banned) - self.banned:
            if counts := self._of(worker):
                counts.ban = _ban(worker, line)
        self.banned.update(worker for worker in line.banned if 0 <= worker < self.workers)
        self.names.update({int(key): name for key, name in line.names.items() if key.isdecimal() and len(key) < 9})

    def copy(self) -> RunTotals:
        """Another one that goes its own way."""
        counts = {worker: copy.copy(one) for worker, one in self.counts.items()}
        return replace(self, banned=set(self.banned), counts=counts, names=dict(self.names))

    def outcomes(self) -> dict[int, str]:
        """What became of each invitation in the last round."""
        found: dict[int, str] = {}
        if self.last is not None:
            for outcome in ("accepted", "declined", "refuted", "silent"):
                found.update(dict.fromkeys(getattr(self.last, outcome), outcome))
        return found

    def point(self) -> list[float | None]:
        """The last round as the page's charts take it: round, accuracy, F^g, bytes up and down so far, seconds."""
        phases = self.last.phases if self.last else {}
        split = [_number(phases.get(name)) for name in PHASES]
        seconds = _number(self.last.seconds) if self.last else None
        return [self.round, self.accuracy, self.score, self.up, self.down, seconds, *split]

    def _of(self, worker: Any) -> WorkerCounts | None:  # noqa: ANN401 - whatever a verdict has
        if type(worker) is not int or not 0 <= worker < self.workers:
            return None
        return self.counts.setdefault(worker, WorkerCounts())


def verdicts(line: RoundRecord | None) -> list[list[Any]]:
    """Every invitation of a round: worker, outcome, claimed, measured, reason; and claims that were set aside."""
    if line is None:
        return []
    rows: list[list[Any]] = [
        [one.get("worker"), text_of(one.get("outcome")), _number(one.get("claimed")), _number(one.get("measured")),
         text_of(one.get("reason"))]
        for one in line.verdicts
    ]  # fmt: skip
    aside = {int(key): why for key, why in line.set_aside.items() if key.isdecimal() and len(key) < 9}
    return rows + [[worker, "set aside", None, None, text_of(why)] for worker, why in aside.items()]


def text_of(value: object) -> str:
    """Text from a file on one line, and not too much of it."""
    return single_line(value, _LONGEST) if isinstance(value, str) else ""


def _ban(worker: int, line: RoundRecord) -> str:
    for one in line.verdicts:
        if one.get("worker") == worker and one.get("outcome") == "refuted":
            claimed, measured, reason = (
                _number(one.get("claimed")), _number(one.get("measured")), text_of(one.get("reason")),
            )  # fmt: skip
            numbers = f"claimed {claimed:.4g}" if claimed is not None else ""
            numbers += f", measured {measured:.4g}" if measured is not None else ""
            return f"round {line.round}: " + "; ".join(word for word in (reason, numbers) if word)
    return f"round {line.round}"


def _number(value: object) -> float | None:
    return finite(float(value)) if isinstance(value, (int, float)) and abs(value) < 1e100 else None


def _bounded(count: int) -> int:
    """A count as it can be; a file may say anything."""
    return min(max(count, 0), 2**60)


_RECENT = 40  # events that the page shows
_MOST_NAMES = 20_000  # that are believed to be there

STATES = ("here", "late", "away", "unseen", "done", "banned")
"""In the run; did not answer the last round; vanished; never seen; left at the end of the run; banned."""


class ConnectionStates:
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


MOST_ROWS = 10_000  # workers that are shown one by one
_MOST_POINTS = 4000  # of a chart; of more rounds every second one is shown, then every fourth ...
_MOST_COPIES = 16
_READ_SECONDS = 0.25  # the folder is looked at so often, however many watch
_PATIENCE = 20  # readings in a row, at most: a file that grows faster than it is read must not hold us

Row = list[Any]


@dataclass(frozen=True)
class ViewerPosition:
    """How far one who watches has been told: of which history, how many points, which version of the rows."""

    history: int = -1
    points: int = 0
    version: int = -1


class RunView:
    """A run's folder, followed. Any thread may ask."""

    def __init__(self, place: WatchedFolder) -> None:
        self.place, self._lock = place, threading.Lock()
        self._rounds, self._events, self._said = (
            FileTail(place, name) for name in ("rounds.jsonl", "events.jsonl", "claims.jsonl")
        )
        self.facts = FolderFacts(place)
        self._history = self._version = 0
        self._looked = float("-inf")
        self._rows: list[Row] = []
        self._row_versions: list[int] = []
        self.presence, self._claims = ConnectionStates(), {}  # type: tuple[ConnectionStates, dict[str, float]]
        self._claim_places: dict[int, int] = {}  # round -> where its line of claims.jsonl begins
        self._forget()

    def _forget(self) -> None:
        """Start from the first round."""
        self.tally = RunTotals(self.facts.workers)
        self._history += 1
        self._points: list[list[float | None]] = []
        self._stride = self._copy_stride = 1
        self._places = array("Q")  # where each round's line begins
        self._copies: list[tuple[int, RunTotals]] = []
        self.damaged = 0

    # --- reading the folder

    def refresh(self) -> None:
        """Read what came since the last time, unless that was a moment ago."""
        with self._lock:
            if time.monotonic() - self._looked < _READ_SECONDS:
                return
            if self.facts.refresh():
                self._forget()  # another run than before
                self._rounds = FileTail(self.place, "rounds.jsonl")
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
            self.presence = ConnectionStates()
            older = FileTail(self.place, "events.old.jsonl")
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

    def _rows_of(self, tally: RunTotals, claims: dict[str, float], state: Any) -> list[Row]:  # noqa: ANN401
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

    def news(self, seen: ViewerPosition) -> tuple[dict[str, Any], ViewerPosition]:
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
            now = ViewerPosition(self._history, len(self._points), self._version)
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
                RunTotals(self.facts.workers),
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
