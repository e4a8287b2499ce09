"""Limits per worker: how long a round waits for its answer, and how many messages per second it may send."""

from __future__ import annotations

import math
import statistics
import time
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

from cbdsl.algorithm.messages import NO_BACK_OFF, BackOff
from cbdsl.util.serialize import Bounds, check_fields

_Worker = TypeVar("_Worker", bound=Hashable)  # a worker's name or number
_Seconds = Annotated[float, Bounds(0.0)]
_LONG_AGO = float("-inf")


@dataclass(frozen=True)
class Deadlines:
    """Timeouts in seconds, and the share of workers that ends a wait early."""

    quorum: Annotated[float, Bounds(0.0, 1.0, above=True)] = 1.0  # of the connected workers; it closes a round
    round_seconds: _Seconds = 600.0  # or after this time
    upload_seconds: _Seconds = 60.0  # an invited worker is passed over after this time
    join_seconds: _Seconds = 60.0  # how long the first round waits for workers that are not connected yet
    grace_seconds: _Seconds = 3.0  # how long a round waits for a worker that disconnected: it may be restarting
    patience: Annotated[int, Bounds(1)] = 10  # deadlines without a single answer before the server gives up
    slack: Annotated[float, Bounds(1.0)] = 10.0  # every worker has this many times as long as most workers need
    least_seconds: _Seconds = 2.0  # extra seconds per worker, refilled slowly; also the minimum upload timeout

    def __post_init__(self) -> None:
        check_fields(self)

    def needed(self, expected: int) -> int:
        """Return how many answers close a wait for `expected` workers."""
        return max(1, math.ceil(self.quorum * expected - 1e-9))


def compute_common_limit(times: Sequence[float], expected: int, deadlines: Deadlines) -> float:
    """Return how many seconds every worker has in a round; times: seconds of the answers so far, in their order."""
    majority = expected // 2 + 1
    if len(times) < majority:
        return deadlines.round_seconds
    return min(deadlines.round_seconds, deadlines.slack * times[majority - 1])


_ENOUGH_UPLOADS = 3  # before their times are used


def upload_limit(times: Sequence[float], deadlines: Deadlines) -> float:
    """Return how many seconds an invited worker has; times: seconds that earlier uploads took."""
    if len(times) < _ENOUGH_UPLOADS:
        return deadlines.upload_seconds
    usual = deadlines.slack * statistics.median(times)
    return min(deadlines.upload_seconds, max(deadlines.least_seconds, usual))


_MAKES_UP = 20  # answers in time that make up for one lapse; with fewer, attackers could take turns in being late
_REFILL = 0.05  # seconds of patience that come back per second of a round


class DeadlineHistory:
    """How one worker has kept its deadlines.

    A worker that misses a round is not waited for during the next 2, 4, 8, ... rounds.
    """

    def __init__(self, patience: float) -> None:
        """patience: for how many seconds, beyond what every worker has, a round waits for this one."""
        self.patience = self._most = patience
        self._back_off = NO_BACK_OFF
        self._overdue = False  # it missed a round and has not answered since
        self._in_time = 0

    def is_waited_for(self, round_number: int) -> bool:
        """Return whether a round waits for its answer."""
        return not self._overdue and round_number > self._back_off.until

    def note_missed(self, round_number: int) -> None:
        """Note that a round closed without its answer."""
        self._back_off, self._overdue, self._in_time = self._back_off.again(round_number), True, 0

    def note_answer(self) -> None:
        """Note an answer, however late."""
        self._overdue = False

    def note_in_time(self) -> None:
        """Note that a round closed with its answer."""
        self._overdue = False
        self._in_time += 1
        if self._in_time >= _MAKES_UP and self._back_off.times:
            self._back_off, self._in_time = BackOff(self._back_off.times - 1, 0), 0

    def note_waiting(self, spent: float, seconds: float) -> None:
        """Note that the others waited for it `spent` seconds beyond what all have, in a round of `seconds`."""
        self.patience = min(self._most, max(0.0, self.patience - spent) + _REFILL * seconds)


@dataclass
class _Record:
    """What is known of one worker."""

    history: DeadlineHistory
    session: bytes = b""  # of its last connection
    since: float = _LONG_AGO  # when it last connected or disconnected


class WorkerAvailability(Generic[_Worker]):
    """Which workers are connected, and which of them a round waits for. Callers do the locking.

    Call `connect` and `disconnect` as workers come and go, `note_answer` at every answer, and `close_round` when the
    wait for a round's answers is over. During the wait `expect` returns how many answers to wait for, and how long.
    Workers are given by name or by number.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._records: dict[_Worker, _Record] = {}
        self.online: set[_Worker] = set()

    def __contains__(self, worker: _Worker) -> bool:
        """Return whether a worker has been connected since this process started."""
        return worker in self._records

    def __len__(self) -> int:
        return len(self._records)

    def connect(self, worker: _Worker, session: bytes = b"") -> bool:
        """Note that a worker is connected and return whether it was not before; session: of this connection."""
        record = self._records.setdefault(worker, _Record(DeadlineHistory(self._deadlines.least_seconds)))
        record.session = session or record.session
        if worker in self.online:
            return False
        self.online.add(worker)
        record.since = time.monotonic()
        return True

    def disconnect(self, worker: _Worker, session: bytes = b"") -> bool:
        """Note that a worker's connection ended and return whether it did.

        session: of the connection that ended, if known; the end of an older connection does not matter.
        """
        if worker not in self.online or (session and self._records[worker].session not in {b"", session}):
            return False
        self.online.discard(worker)
        self._records[worker].since = time.monotonic()
        return True

    def dismiss(self, worker: _Worker) -> None:
        """Note that a worker left the swarm: no round waits for it any more."""
        if worker in self._records:
            self.online.discard(worker)
            self._records[worker].since = _LONG_AGO

    def forget(self, worker: _Worker) -> None:
        """Remove all that is known of a worker."""
        self.online.discard(worker)
        self._records.pop(worker, None)

    def note_answer(self, worker: _Worker) -> None:
        """Note an answer of a connected worker, however late."""
        self._records[worker].history.note_answer()

    def is_here(self, worker: _Worker) -> bool:
        """Return whether a worker can answer: it is connected, or was until a moment ago and may be restarting."""
        record = self._records.get(worker)
        if record is None:
            return False
        return worker in self.online or time.monotonic() - record.since < self._deadlines.grace_seconds

    def is_waited_for(self, worker: _Worker, round_number: int) -> bool:
        """Return whether a round waits for the answer of a worker."""
        return self.is_here(worker) and self._records[worker].history.is_waited_for(round_number)

    def expect(self, round_number: int, answered: Sequence[float], missing: Iterable[_Worker]) -> tuple[int, float]:
        """Return how many answers a round expects in all, and for how many seconds it waits for them.

        answered: seconds after which answers came, in their order. missing: the participants that have not answered.
        """
        waited = [self._records[one].history for one in missing if self.is_waited_for(one, round_number)]
        expected = len(answered) + len(waited)
        patience = max((history.patience for history in waited), default=0.0)
        limit = compute_common_limit(answered, expected, self._deadlines) + patience
        return expected, min(self._deadlines.round_seconds, limit)

    def close_round(
        self,
        round_number: int,
        answered: Mapping[_Worker, float],
        missing: Collection[_Worker],
        seconds: float,
        in_time: bool,
    ) -> None:
        """Note which workers answered a round, and which let it close: the latter are waited for less from now on.

        answered: seconds after which workers answered, in their order. seconds: that the round took. in_time: whether
        it closed by its quorum; then no connected worker was late.
        """
        expected, _ = self.expect(round_number, list(answered.values()), missing)
        common = compute_common_limit(list(answered.values()), expected, self._deadlines)
        started = time.monotonic() - seconds
        for worker, taken in answered.items():
            history = self._records[worker].history
            history.note_in_time()
            history.note_waiting(max(0.0, taken - common), seconds)
        for worker in missing:
            record = self._records.get(worker)
            if record is None or not record.history.is_waited_for(round_number):
                continue
            was_here = worker in self.online or record.since + self._deadlines.grace_seconds > started
            if was_here and not (in_time and self.is_here(worker)):  # to disconnect is to let the round close, too
                record.history.note_missed(round_number)
                record.history.note_waiting(max(0.0, seconds - common), seconds)


_FIRST_PAUSE = 2.0  # seconds
_LONGEST_PAUSE = 600.0
_FORGIVEN_AFTER = 10.0  # times the last pause without a flood: then the next pause is the first again
_MOST_STRANGERS = 1000  # senders without a number that are remembered: without access rules anybody can invent names


@dataclass
class _Account:
    tokens: float
    filled: float
    pause: float = 0.0  # the last one
    until: float = 0.0  # when it ends


class RateLimiter:
    """A token bucket per sender, with exponential back-off: a message costs one token, a second refills the bucket.

    A sender without tokens is shut out for 2 seconds, and for twice as long each time that it happens again.
    """

    def __init__(self, burst: float) -> None:
        """burst: tokens in a full bucket."""
        self._burst = burst
        self._members: dict[str, _Account] = {}
        self._strangers: OrderedDict[str, _Account] = OrderedDict()  # the newest last

    def charge(self, sender: str, is_member: bool = True) -> tuple[bool, float]:
        """Return whether to accept a message and, if its sender is shut out with it, for how many seconds (else 0)."""
        now = time.monotonic()
        account = self._account(sender, is_member, now)
        if now < account.until:
            return False, 0.0
        account.tokens = min(self._burst, account.tokens + (now - account.filled) * self._burst)
        account.filled = now
        if account.tokens >= 1:
            account.tokens -= 1
            return True, 0.0
        forgiven = now - account.until > _FORGIVEN_AFTER * account.pause
        account.pause = _FIRST_PAUSE if forgiven else min(2 * account.pause, _LONGEST_PAUSE)
        account.until = now + account.pause
        return False, account.pause

    def shut_out(self) -> set[str]:
        """Return the members that are shut out now."""
        now = time.monotonic()
        return {name for name, account in self._members.items() if now < account.until}

    def _account(self, sender: str, is_member: bool, now: float) -> _Account:
        if is_member:
            return self._members.setdefault(sender, _Account(self._burst, now))
        account = self._strangers.pop(sender, None) or _Account(self._burst, now)
        self._strangers[sender] = account
        if len(self._strangers) > _MOST_STRANGERS:
            self._strangers.popitem(last=False)
        return account
