"""What the rounds of a run add up to: totals, and for every worker what became of its invitations.

Pure: records in, numbers out. A tally can be copied, so that the state after an earlier round is a copy and the few
rounds since, read again.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

from cbdsl.runs.records import RoundRecord, finite
from cbdsl.text import one_line

PHASES = ("train", "wait", "upload", "verify")
_LONGEST = 160  # signs of a reason


@dataclass
class Counts:
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
class Tally:
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
    counts: dict[int, Counts] = field(default_factory=dict)
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

    def copy(self) -> Tally:
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

    def _of(self, worker: Any) -> Counts | None:  # noqa: ANN401 - whatever a verdict has
        if type(worker) is not int or not 0 <= worker < self.workers:
            return None
        return self.counts.setdefault(worker, Counts())


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
    return one_line(value, _LONGEST) if isinstance(value, str) else ""


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
