"""How long the server waits for each worker."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields

from cbdsl.algorithm.messages import NO_BACK_OFF, BackOff
from cbdsl.errors import UserError


@dataclass(frozen=True)
class Deadlines:
    """Seconds, and the share of workers that ends a wait early."""

    quorum: float = 1.0  # a round closes when this share of the workers that are there has answered
    round_seconds: float = 600.0  # or after so long
    upload_seconds: float = 60.0  # an invited worker is passed over after so long
    join_seconds: float = 60.0  # how long the first round waits for workers that are not there yet
    grace_seconds: float = 3.0  # a worker that vanished is waited for so long: it may be restarting
    patience: int = 10  # deadlines without a single answer before the server gives up
    slack: float = 10.0  # everybody has so many times as long as most workers need
    least_seconds: float = 2.0  # and so much longer once in a while; an upload has so long at least

    def __post_init__(self) -> None:
        if not 0 < self.quorum <= 1:
            raise UserError(f"The quorum must be above 0 and at most 1; given {self.quorum}.")
        if not self.slack >= 1:
            raise UserError(f"The slack must be at least 1; given {self.slack}.")
        if self.patience < 1:
            raise UserError(f"The patience must be at least 1; given {self.patience}.")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_seconds") and not (math.isfinite(value) and value >= 0):
                raise UserError(f"{field.name} must be a number of seconds; given {value}.")

    def needed(self, expected: int) -> int:
        """How many answers close a wait for so many workers."""
        return max(1, math.ceil(self.quorum * expected - 1e-9))


_MAKES_UP = 20  # answers in time that make up for one lapse; fewer, and members could take turns in being late
_COMES_BACK = 0.05  # of a round's seconds: so much of the patience with a worker comes back
_ENOUGH = 3  # uploads seen before their times say anything


class Punctuality:
    """How one worker has kept its deadlines."""

    def __init__(self, patience: float) -> None:
        """patience: for how many seconds, beyond what all have, the others wait for it."""
        self.patience = self._most = patience
        self._back_off = NO_BACK_OFF
        self._overdue = False  # it let a round close, and no answer has come since
        self._in_time = 0

    def is_waited_for(self, round_number: int) -> bool:
        """Whether a round waits for its answer."""
        return not self._overdue and round_number > self._back_off.until

    def lapsed(self, round_number: int) -> None:
        """It was waited for in vain."""
        self._back_off, self._overdue, self._in_time = self._back_off.again(round_number), True, 0

    def heard(self) -> None:
        """An answer came, however late."""
        self._overdue = False

    def answered(self) -> None:
        """A round has closed with its answer."""
        self._overdue = False
        self._in_time += 1
        if self._in_time >= _MAKES_UP and self._back_off.times:
            self._back_off, self._in_time = BackOff(self._back_off.times - 1, 0), 0

    def account(self, spent: float, seconds: float) -> None:
        """A round of so many seconds is over, in which others waited for it beyond what all have."""
        self.patience = min(self._most, max(0.0, self.patience - spent) + _COMES_BACK * seconds)


def everybodys_limit(times: Sequence[float], expected: int, deadlines: Deadlines) -> float:
    """How many seconds everybody has in a round, by the seconds after which answers have come, in their order."""
    majority = expected // 2 + 1
    if len(times) < majority:
        return deadlines.round_seconds
    return min(deadlines.round_seconds, deadlines.slack * times[majority - 1])


def upload_limit(times: Sequence[float], deadlines: Deadlines) -> float:
    """How many seconds an invited worker has, by the seconds that uploads took before."""
    if len(times) < _ENOUGH:
        return deadlines.upload_seconds
    usual = deadlines.slack * statistics.median(times)
    return min(deadlines.upload_seconds, max(deadlines.least_seconds, usual))
