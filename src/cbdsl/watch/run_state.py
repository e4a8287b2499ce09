"""The state of a run as its folder shows it: settings, progress, workers and their connections, any earlier round."""

from __future__ import annotations

import copy
import os
import re
import threading
import time
import zipfile
from array import array
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cbdsl.algorithm.ledger import NUMBER_BYTES
from cbdsl.runs.metrics import find_metric
from cbdsl.runs.records import RoundRecord, RunTotals, finite
from cbdsl.spec import Spec, from_toml
from cbdsl.util.formatting import single_line
from cbdsl.util.npz import map_arrays
from cbdsl.watch.folder_reader import FileTail, Stamp, parse_object, read_file, read_object, stamp_of

PHASES = ("train", "wait", "upload", "verify")
STATES = ("here", "late", "away", "unseen", "done", "banned")
"""Connected; missed the last round; disconnected; never connected; left at the end of the run; banned."""
MOST_ROWS = 10_000  # workers that are shown one by one
_OUTCOMES = ("accepted", "declined", "refuted", "silent")
_MOST_POINTS = 4000  # of a chart; of more rounds every second one is shown, then every fourth ...
_MOST_COPIES = 16
_READ_SECONDS = 0.25  # between two looks at the folder, however many pages are open
_RECENT_EVENTS = 40  # that the page shows
_LONGEST_TEXT = 160  # characters of a name or a reason
_RUNNING_SECONDS = 10.0  # a folder that was written to this recently belongs to a run that is under way
_LOCKS = Path("/proc/locks")
_OWN_PROCESS = Path("/proc/self")

Row = list[Any]


@dataclass(frozen=True)
class ViewerPosition:
    """How far one viewer is: in which history, how many points, which version of the rows."""

    history: int = -1
    points: int = 0
    version: int = -1


class RunView:
    """A run's folder, followed while it is written. Its methods may be called from any thread."""

    def __init__(self, folder: Path, least_seconds: float = _READ_SECONDS) -> None:
        self.folder, self._least_seconds, self._lock = folder, least_seconds, threading.Lock()
        self.facts = FolderFacts(folder)
        self._events, self._claim_lines = FileTail(folder / "events.jsonl"), FileTail(folder / "claims.jsonl")
        self._history = self._version = 0
        self._looked = float("-inf")
        self._rows: list[Row] = []
        self._row_versions: list[int] = []
        self.connections = ConnectionStates()
        self._claims: dict[str, float] = {}  # of the last round, by worker
        self._claim_positions: dict[int, int] = {}  # round -> where its line of claims.jsonl begins
        self._start_again()

    def _start_again(self) -> None:
        """Start from the first round."""
        self._round_lines = FileTail(self.folder / "rounds.jsonl")
        self.progress = RunProgress()
        self._history += 1
        self._points: list[list[float | None]] = []
        self._stride = self._copy_stride = 1
        self._positions = array("Q")  # where each round's line begins
        self._copies: list[RunProgress] = []

    # --- reading the folder

    def refresh(self) -> None:
        """Read what was written since the last time, unless that was a moment ago."""
        with self._lock:
            if time.monotonic() - self._looked < self._least_seconds:
                return
            another_run = self.facts.refresh()
            if self._round_lines.starts_anew() or another_run:
                self._start_again()
            for start, line in self._round_lines.new_lines():
                self._add_round(start, line)
            self._read_events()
            self._read_claims()
            self._update_rows()
            self._looked = time.monotonic()

    def _add_round(self, start: int, line: bytes) -> None:
        """Add a round to the charts and, now and then, a copy to replay from; skip a line that is not a round."""
        progress = self.progress
        try:
            progress.add(RoundRecord.from_json(parse_object(line)))
        except (ValueError, KeyError, TypeError):
            return
        self._positions.append(start)
        if progress.round % self._stride == 0:
            self._points.append(progress.make_point())
        if len(self._points) > _MOST_POINTS:
            self._points, self._stride = self._points[1::2], 2 * self._stride
            self._history += 1
        if progress.round % self._copy_stride == 0:
            self._copies.append(progress.copy())
        if len(self._copies) > _MOST_COPIES:
            self._copies, self._copy_stride = self._copies[1::2], 2 * self._copy_stride

    def _read_events(self) -> None:
        if self._events.starts_anew() or not self.connections.seen:
            self.connections = ConnectionStates()
            older = FileTail(self.folder / "events.old.jsonl")  # the first half of a long log
            for _, line in older.new_lines():
                self.connections.add(parse_object(line))
        for _, line in self._events.new_lines():
            self.connections.add(parse_object(line))

    def _read_claims(self) -> None:
        if self._claim_lines.starts_anew():
            self._claim_positions = {}
        for start, line in self._claim_lines.new_lines():
            found = parse_object(line)
            if "round" in found:
                self._claim_positions[found["round"]] = start
                self._claims = _scores_in(found)

    # --- what is shown

    def collect_news(self, seen: ViewerPosition) -> tuple[dict[str, Any], ViewerPosition]:
        """Return what a viewer at this position has not seen yet, and its position afterwards."""
        self.refresh()
        with self._lock:
            whole = seen.history != self._history
            versions = zip(self._rows, self._row_versions, strict=True)
            message = {
                "whole": whole,
                "facts": self._shown_facts(),
                "points": self._points[0 if whole else seen.points :],
                "latest": self.progress.make_point() if self.progress.round else None,
                "workers": [row for row, version in versions if whole or version > seen.version],
                "verdicts": self._verdicts(self.progress.last),
                "events": list(self.connections.recent),
            }
            return message, ViewerPosition(self._history, len(self._points), self._version)

    def replay(self, round_number: int) -> dict[str, Any] | None:
        """Return the run after an earlier round, or None if there was no such round."""
        self.refresh()
        with self._lock:
            if not 1 <= round_number <= len(self._positions):
                return None
            copies = (one.copy() for one in reversed(self._copies) if one.round <= round_number)
            progress = next(copies, RunProgress())
            if progress.round < round_number:
                lines = self._round_lines.read_again(self._positions[progress.round], round_number - progress.round)
                for line in lines:
                    progress.add(RoundRecord.from_json(parse_object(line)))
            if progress.round < round_number:
                return None  # the file was just replaced; the next message starts the page again
            rows = self._rows_of(
                progress,
                self._claims_of(round_number),
                lambda number, _: "banned" if number in progress.banned else "",
            )
            return {
                "round": round_number,
                "latest": progress.make_point(),
                "best": progress.best,
                "banned": len(progress.banned),
                "uploads": progress.totals.uploads,
                "workers": rows,
                "verdicts": self._verdicts(progress.last),
            }

    def count_states(self) -> dict[str, int]:
        """Return how many workers are in each state."""
        found = dict.fromkeys(STATES, 0)
        for row in self._rows:
            found[row[2]] += 1
        return found

    def status(self) -> str:
        """Return "waiting", "running", "stopped" or "finished"."""
        return self.facts.status(self.progress.round)

    def _shown_facts(self) -> dict[str, Any]:
        """Return everything about the run that fits on a line."""
        facts, progress = self.facts, self.progress
        return {
            "kind": "run",
            "folder": self.folder.name,
            "status": self.status(),
            "round": progress.round,
            **_describe_spec(facts.spec),
            "workers": facts.workers,
            "states": self.count_states(),
            "served": self.connections.seen,
            "metric": describe_metric(progress.last.metric if progress.last else "accuracy"),
            "best": progress.best,
            "banned": len(progress.banned),
            "uploads": progress.totals.uploads,
            "seconds": progress.totals.seconds,
            "fedavg": facts.fedavg_bytes(progress.totals),
            "wire": facts.wire,
            "refused": facts.refused,
        }

    def _update_rows(self) -> None:
        """Make the rows of the workers; those that changed get the next version."""
        rows = self._rows_of(self.progress, self._claims, self._state_of)
        self._version += 1
        if len(rows) != len(self._rows):
            self._rows, self._row_versions = [[]] * len(rows), [self._version] * len(rows)
        for number, row in enumerate(rows):
            if row != self._rows[number]:
                self._rows[number], self._row_versions[number] = row, self._version

    def _rows_of(self, progress: RunProgress, claims: dict[str, float], state: Callable[[int, str], str]) -> list[Row]:
        outcomes, rows = progress.list_outcomes(), []
        for number in range(min(self.facts.workers, MOST_ROWS)):
            name, counts = self._name_of(number), progress.counts.get(number, WorkerCounts())
            rows.append(
                [
                    number,
                    name,
                    state(number, name),
                    outcomes.get(number, ""),
                    claims.get(name, counts.claim),
                    counts.invited,
                    counts.accepted,
                    counts.declined,
                    counts.refuted,
                    counts.silent,
                    counts.ban,
                    self.facts.refused_by.get(name, 0),
                ]
            )
        return rows

    def _state_of(self, number: int, name: str) -> str:
        if number in self.progress.banned:
            return "banned"
        if self.connections.seen:
            return self.connections.state_of(name)
        return "done" if self.facts.summary else "here"

    def _name_of(self, number: int) -> str:
        """Return a worker's name, or its number if it has none."""
        names = self.facts.names
        return names[number] if number < len(names) else self.progress.names.get(str(number), str(number))

    def _claims_of(self, round_number: int) -> dict[str, float]:
        start = self._claim_positions.get(round_number)
        lines = [] if start is None else self._claim_lines.read_again(start, 1)
        return _scores_in(parse_object(lines[0])) if lines else {}

    def _verdicts(self, record: RoundRecord | None) -> list[Row]:
        return [[self._name_of(worker), *rest] for worker, *rest in list_verdicts(record)]


def _describe_spec(spec: Spec | None) -> dict[str, Any]:
    return {
        "rounds": spec.rounds if spec else 0,
        "method": spec.method if spec else "",
        "preset": spec.preset if spec else "",
        "model": spec.model if spec else "",
        "seed": spec.seed if spec else 0,
        "codec": ", ".join(sorted({spec.codec.up, spec.codec.down} - {"none"})) if spec else "",
        "attack": spec.attack.name if spec and spec.attack.byzantine else "",
        "byzantine": spec.attack.byzantine if spec else 0,
    }


def _scores_in(line: dict[str, Any]) -> dict[str, float]:
    claims = {shorten(name): finite(score) for name, score in line.get("claims", {}).items()}
    return {name: score for name, score in claims.items() if score is not None}


def shorten(text: str) -> str:
    """Return text of a worker on one line, without control characters and not too long."""
    return single_line(text, _LONGEST_TEXT)


class FolderFacts:
    """The content of the small files of a run's folder: spec, roster, summary, counts. Each is read when it changes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamps: dict[str, Stamp | None] = {}
        self.spec: Spec | None = None
        self.names: list[str] = []
        self.refused_by: dict[str, int] = {}
        self.refused = self._parameters = 0
        self.wire: dict[str, int] = {}
        self.summary: dict[str, Any] = {}  # empty until the run is finished

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return max(self.spec.workers, len(self.names)) if self.spec else 0

    def refresh(self) -> bool:
        """Read what has changed and return whether the spec has, so that it is another run."""
        another_run = False
        if self._has_changed("spec.toml"):
            before, self.spec = self.spec, _read_spec(self._folder / "spec.toml")
            another_run = before != self.spec
            self._parameters = 0 if another_run else self._parameters
        if self._has_changed("roster.json"):
            self.names = self._read("roster.json").get("names", [])
        if self._has_changed("summary.json"):
            self.summary = self._read("summary.json")
        if self._has_changed("refused.json"):
            self._count_refused(self._read("refused.json"))
        if self._has_changed("wire.json"):
            counts = self._read("wire.json")
            self.wire = {way: sum(size for _, size in kinds.values()) for way, kinds in counts.items()}
        if self._has_changed("checkpoint.npz") and not self._parameters:
            self._parameters = _parameters_in(self._folder / "checkpoint.npz")
        return another_run

    def _has_changed(self, name: str) -> bool:
        stamp, before = stamp_of(self._folder / name), self._stamps.get(name)
        self._stamps[name] = stamp
        return stamp != before

    def _read(self, name: str) -> dict[str, Any]:
        return read_object(self._folder / name)

    def _count_refused(self, stored: dict[str, Any]) -> None:
        self.refused = sum(stored.get("reasons", {}).values())
        self.refused_by = defaultdict(int)
        for name, _, count in stored.get("offences", []):
            self.refused_by[name] += count

    def status(self, played: int) -> str:
        """Return "waiting", "running", "stopped" or "finished"; played: rounds so far."""
        if self.spec is None:
            return "waiting"
        if self.summary and played >= self.spec.rounds:
            return "finished"
        stamps = (stamp_of(self._folder / name) for name in ("rounds.jsonl", "events.jsonl", "spec.toml"))
        changed = max((stamp[2] / 1e9 for stamp in stamps if stamp), default=0.0)
        recent = time.time() - changed < _RUNNING_SECONDS
        return "running" if recent or _is_locked(self._folder / ".lock") else "stopped"

    def fedavg_bytes(self, totals: RunTotals) -> float:
        """Return what FedAvg would upload per round: a model from each participant; 0 if its size is not known."""
        parameters: int = self.summary.get("parameters", 0) or self._parameters
        models = self.spec.participants if self.spec else 0
        return parameters * NUMBER_BYTES * (totals.fedavg_uploads(models) / totals.rounds if totals.rounds else models)


def _read_spec(path: Path) -> Spec | None:
    """Return the spec in a file, or None if it is not written yet."""
    try:
        return from_toml(content.decode("utf-8")) if (content := read_file(path)) else None
    except ValueError:
        return None


def _parameters_in(checkpoint: Path) -> int:
    """Return how many weights the model in a checkpoint has; 0 if it cannot be read."""
    try:
        return len(map_arrays(checkpoint, ["global_best"])["global_best"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
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
    described = (_OWN_PROCESS / f"fdinfo/{descriptor}").read_text()
    [mount] = re.findall(r"^mnt_id:\s*(\d+)$", described, re.MULTILINE)
    mounts = (line.split() for line in (_OWN_PROCESS / "mountinfo").read_text().splitlines())
    [(major, minor)] = [words[2].split(":") for words in mounts if words[0] == mount]
    return f"{int(major):02x}:{int(minor):02x}"


@dataclass
class WorkerCounts:
    """What became of one worker's invitations, and the last claim that an invitation repeated."""

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
class RunProgress:
    """A run after some of its rounds: sums, bans and what became of each worker's invitations."""

    totals: RunTotals = field(default_factory=RunTotals)
    last: RoundRecord | None = None
    banned: set[int] = field(default_factory=set)
    bans: int = 0  # those that were lifted included
    counts: defaultdict[int, WorkerCounts] = field(default_factory=lambda: defaultdict(WorkerCounts))
    names: dict[str, str] = field(default_factory=dict)  # by number, in served runs

    @property
    def round(self) -> int:
        """The last round."""
        return self.totals.rounds

    @property
    def best(self) -> float | None:
        """The best value of the main metric so far."""
        return finite(self.totals.best) if self.last else None

    def add(self, record: RoundRecord) -> None:
        """Add a round; ValueError if it is not the next one."""
        if record.round != self.round + 1:
            raise ValueError(f"round {record.round} follows on round {self.round}")
        self.totals.add(record)
        self.last = record
        for outcome in _OUTCOMES:
            for worker in getattr(record, outcome):
                setattr(self.counts[worker], outcome, getattr(self.counts[worker], outcome) + 1)
        for verdict in record.verdicts:
            self.counts[verdict["worker"]].claim = finite(verdict["claimed"])
        for worker in set(record.banned) - self.banned:
            self.counts[worker].ban = _reason_of_ban(worker, record)
            self.bans += 1
        for worker in self.banned.difference(record.banned):
            self.counts[worker].ban = ""
        self.banned = set(record.banned)
        self.names.update(record.names)

    def copy(self) -> RunProgress:
        """Return an independent copy."""
        return copy.deepcopy(self, {id(self.last): self.last})

    def list_outcomes(self) -> dict[int, str]:
        """Return what became of each invitation in the last round."""
        if self.last is None:
            return {}
        return {worker: outcome for outcome in _OUTCOMES for worker in getattr(self.last, outcome)}

    def make_point(self) -> list[float | None]:
        """Return the last round for the page's charts: round, main metric, F^g, total bytes up and down, seconds."""
        if self.last is None:
            return [0, None, None, 0, 0, None, *(None for _ in PHASES)]
        return [
            self.round,
            finite(self.last.value),
            finite(self.last.global_score),
            self.totals.uplink_bytes,
            self.totals.downlink_bytes,
            finite(self.last.seconds),
            *(self.last.phases.get(name) for name in PHASES),
        ]


def describe_metric(name: str) -> dict[str, Any]:
    """Return what the page shows of a metric: its name, whether it is a share, and which direction is better."""
    metric = find_metric(name)
    return {"title": metric.title, "share": metric.is_share, "better": metric.better}


def list_verdicts(record: RoundRecord | None) -> list[Row]:
    """Return a row for each invitation of a round, worker, outcome, claimed, measured, reason; and set-aside claims."""
    if record is None:
        return []
    rows = [
        [one["worker"], one["outcome"], finite(one["claimed"]), finite(one["measured"]), shorten(one["reason"])]
        for one in record.verdicts
    ]
    return rows + [[int(worker), "set aside", None, None, shorten(why)] for worker, why in record.set_aside.items()]


def _reason_of_ban(worker: int, record: RoundRecord) -> str:
    for number, outcome, claimed, measured, reason in list_verdicts(record):
        if (number, outcome) == (worker, "refuted"):
            numbers = f"claimed {claimed:.4g}" if claimed is not None else ""
            numbers += f", measured {measured:.4g}" if measured is not None else ""
            return f"round {record.round}: " + "; ".join(word for word in (reason, numbers) if word)
    return f"round {record.round}"


class ConnectionStates:
    """The connection of each worker, from the events of a served run so far."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}
        self._missing: set[str] = set()
        self._over = False
        self.seen = False  # whether there are any events at all: a simulated run has none
        self.recent: deque[tuple[float, str]] = deque(maxlen=_RECENT_EVENTS)

    def add(self, event: dict[str, Any]) -> None:
        """Add one event."""
        self.seen = True
        kind, worker = event.get("event", ""), shorten(event.get("worker", ""))
        if kind == "started":
            self._states = dict.fromkeys(self._states, "away")  # a new server process has no connections yet
            self._missing, self._over = set(), False
        elif kind == "connected":
            self._states[worker] = "here"
        elif kind in {"disconnected", "left"} and worker in self._states:
            self._states[worker] = "done" if self._over else "away"
        elif kind == "closed":
            self._missing = set(event.get("missing", ()))
        elif kind == "over":
            self._over = True
        if kind in _SENTENCES and not (self._over and kind == "disconnected"):  # all leave at the end
            reason = shorten(event.get("reason", ""))
            sentence = _SENTENCES[kind].format(worker=worker or "an unknown sender", reason=reason)
            self.recent.append((event.get("time", 0.0), sentence))

    def state_of(self, name: str) -> str:
        """Return the state of a worker."""
        state = self._states.get(name, "unseen")
        if self._over and state == "here":
            return "done"
        return "late" if state == "here" and name in self._missing else state


_SENTENCES = {
    "connected": "{worker} connected",
    "disconnected": "{worker} disconnected",
    "silent": "{worker} was invited and sent no model in time",
    "refused": "refused a message from {worker}: {reason}",
    "flood": "{worker} sends too much and is ignored for a while",
    "banned": "{worker} is banned until the end of the run: {reason}",
    "unbanned": "the ban of {worker} is lifted",
    "broker_lost": "the connection to the broker broke",
    "broker_back": "the broker is connected again",
    "enrolled": "{worker} has joined",
    "left": "{worker} is no longer in the swarm",
    "started": "the server was started",
    "over": "the last round is finished",
}
"""The events that the page shows."""
