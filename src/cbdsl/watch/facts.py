"""What the small files of a run's folder say: its spec, roster, summary and counts. Each is read when it changes."""

from __future__ import annotations

import io
import struct
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbdsl.protocol.ledger import NUMBER_BYTES
from cbdsl.spec import Spec, from_toml
from cbdsl.watch.place import Place
from cbdsl.watch.tally import text_of

if TYPE_CHECKING:
    from cbdsl.watch.run import RunView

_LIVELY = 10.0  # seconds: a folder that was written to so lately belongs to a run that is played
_LOCKS = Path("/proc/locks")


class Facts:
    """A run's folder, but for its long files."""

    def __init__(self, place: Place) -> None:
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
        return "running" if lively or _is_held(self._stamp_of_lock()) else "stopped"

    def _stamp_of_lock(self) -> int:
        stamp = self._place.stamp(".lock")
        return stamp[0] if stamp else 0

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


def _parameters_of(place: Place) -> int:
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


def _is_held(inode: int) -> bool:
    """Whether some process holds a lock on a file: asked of the system, for to try the lock could disturb a run."""
    try:
        held = _LOCKS.read_text(encoding="ascii")
    except (OSError, ValueError):
        return False
    locks = [line.split() for line in held.splitlines() if "FLOCK" in line]
    return inode > 0 and any(len(words) > 5 and words[5].rpartition(":")[2] == str(inode) for words in locks)
