"""What a server writes during a run: the answers of the current round (`Journal`), and a log (`Events`).

With the journal a round that a crash interrupted ends as it would have ended: claims, and each upload or its absence,
are written before anything is decided on them, and a restarted server plays the round again with them.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import cbor2
import numpy as np

from cbdsl.algorithm.messages import Claim, Upload, WorkerId
from cbdsl.network.wire import DIGEST_BYTES, digest_of, weights_from_bytes, weights_to_bytes
from cbdsl.util.files import append_bytes, explain_full_disk, private_file, read_json, read_text, write_json
from cbdsl.util.formatting import format_bytes

_log = logging.getLogger("cbdsl.network")

_HEADER = DIGEST_BYTES + 4  # bytes before each entry of a journal: its hash and its length


class Journal:
    """An append-only file for one round; the next round starts it anew."""

    def __init__(self, path: Path) -> None:
        """Read what an earlier process wrote. A damaged entry and all that follow it are removed.

        The workers concerned are asked again, which costs time and changes no verdict.
        """
        self._path = path
        self._round = 0
        self.claims: Mapping[WorkerId, Claim] | None = None
        self.uploads: dict[WorkerId, Upload | None] = {}  # None: invited, and nothing came
        kept_bytes = kept = 0
        content = path.read_bytes() if path.exists() else b""
        for payload, end in _read_entries(content):
            try:
                self._take(cbor2.loads(payload))
            except Exception:  # whatever a foreign entry makes the decoder raise
                break
            kept_bytes, kept = end, kept + 1
        if kept_bytes != len(content):
            _log.warning(
                "%s: the last %s are damaged or incomplete and were removed; %d %s kept, and workers are asked again "
                "for what is missing",
                path, format_bytes(len(content) - kept_bytes), kept, "entry is" if kept == 1 else "entries are",
            )  # fmt: skip
            with path.open("r+b") as file:
                file.truncate(kept_bytes)

    def begin(self, round_number: int) -> None:
        """Start a round, unless this journal is already of that round."""
        if self._round != round_number:
            self._path.unlink(missing_ok=True)
            self._round, self.claims, self.uploads = round_number, None, {}

    def note_claims(self, claims: Mapping[WorkerId, Claim]) -> None:
        """Write the claims of a round."""
        rows = [[worker, claim.score, claim.commitment] for worker, claim in sorted(claims.items())]
        self._append([self._round, "claims", rows])
        self.claims = dict(claims)

    def note_upload(self, worker: WorkerId, upload: Upload | None) -> None:
        """Write an upload, or None for an invited worker that sent nothing."""
        is_array = isinstance(upload, np.ndarray)
        content = weights_to_bytes(upload) if isinstance(upload, np.ndarray) else upload
        self._append([self._round, "upload", [worker, content, is_array]])
        self.uploads[worker] = upload

    def _take(self, entry: list[Any]) -> None:
        round_number, kind, content = entry
        if round_number != self._round:
            self._round, self.claims, self.uploads = round_number, None, {}
        if kind == "claims":
            self.claims = {worker: Claim(score, commitment) for worker, score, commitment in content}
        else:
            worker, upload, is_array = content
            self.uploads[worker] = weights_from_bytes(upload) if is_array else upload

    def _append(self, entry: list[Any]) -> None:
        payload = cbor2.dumps(entry)
        append_bytes(self._path, digest_of(payload) + len(payload).to_bytes(4, "big") + payload)


def _read_entries(content: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the undamaged entries of a journal, each with the position of its end."""
    position = 0
    while position + _HEADER <= len(content):
        digest = content[position : position + DIGEST_BYTES]
        start = position + _HEADER
        position = start + int.from_bytes(content[start - 4 : start], "big")
        payload = content[start:position]
        if len(payload) != position - start or digest_of(payload) != digest:
            return
        yield payload, position


_MOST_BYTES = 32 * 2**20  # of events.jsonl, and of the older one: workers that come and go must not fill a disk
_MOST_OFFENCES = 1000  # of those saved by name: the most frequent ones
_MOST_STRANGERS = 100  # names noted per reason beside the members': strangers can invent any number of them


class Events:
    """A log of events (who came and went, what was refused and why) and a count of refusals; thread-safe."""

    def __init__(
        self, path: Path | None = None, is_member: Callable[[str], bool] | None = None, counts: Path | None = None
    ) -> None:
        """is_member: whether a name is in the roster, whose size is limited; no name is if not given.

        counts: a file in which the numbers of refusals outlive this process; see `save`.
        """
        self._path, self._counts, self._lock = path, counts, threading.Lock()
        self.listener: Callable[[str, dict[str, Any]], None] | None = None  # called with every event
        self._is_member = is_member or (lambda _: False)
        self.refusals: Counter[str] = Counter()
        self._offences: Counter[tuple[str, str]] = Counter()  # (reason, worker), members and the first strangers
        self._strangers: Counter[str] = Counter()  # names that are noted, by reason
        self._saved = (0, time.monotonic())  # how many refusals are on disk, and since when
        if counts is not None and counts.exists():
            self._read_counts(counts)

    def note(self, event: str, **details: Any) -> None:  # noqa: ANN401 - whatever JSON takes
        """Write an event; the older half of a long log is moved to events.old.jsonl and replaces what was there."""
        if self.listener is not None:
            self.listener(event, details)
        if self._path is None:
            return
        line = json.dumps({"time": round(time.time(), 3), "event": event, **details})
        with self._lock:
            if self._path.exists() and self._path.stat().st_size >= _MOST_BYTES:
                self._path.replace(self._path.with_name(f"{self._path.stem}.old{self._path.suffix}"))
            with explain_full_disk(self._path, len(line)), private_file(self._path, "ab") as file:
                file.write(line.encode() + b"\n")

    def refuse(self, reason: str, worker: str = "") -> None:
        """Count a refused message; the first for a reason from each worker is logged, too."""
        with self._lock:
            self.refusals[reason] += 1
            is_first = self._count_offence(reason, worker)
        if is_first:
            sender = worker or "an unknown sender"
            _log.warning("refused a message from %s: %s (more like it are only counted)", sender, reason)
            self.note("refused", reason=reason, worker=worker)

    def offences(self) -> list[tuple[str, str, int]]:
        """Return (worker, reason, count), the most frequent first; of strangers only the first hundred per reason."""
        with self._lock:
            return [(worker, reason, count) for (reason, worker), count in self._offences.most_common()]

    def save(self, every: float = 0.0) -> None:
        """Write the numbers of refusals to their file, unless that was done less than `every` seconds ago."""
        total, (before, since) = sum(self.refusals.values()), self._saved
        if self._counts is None or total == before or time.monotonic() - since < every:
            return
        offences = self.offences()[:_MOST_OFFENCES]
        with self._lock:
            reasons = dict(self.refusals)
        write_json(self._counts, {"reasons": reasons, "offences": offences}, private=True)
        self._saved = (total, time.monotonic())

    def _read_counts(self, counts: Path) -> None:
        """Continue the counts of an earlier process; a damaged file does not prevent a start."""
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

    def _count_offence(self, reason: str, worker: str) -> bool:
        """Count a refusal by name, if there is room for the name, and return whether it is the first."""
        if (reason, worker) not in self._offences and not self._is_member(worker):
            if self._strangers[reason] >= _MOST_STRANGERS:
                return False
            self._strangers[reason] += 1
        self._offences[reason, worker] += 1
        return self._offences[reason, worker] == 1
