"""Who is waited for, and how long: waiting is earned by answering in time.

As soon as most workers have answered, the others have so many times as long as that took, and beyond it what is left of
the patience with each: a few seconds, which come back slowly. So now and then anybody may be late; whoever always is
costs those seconds once. Whoever lets a round close without it is not waited for in the next 2, 4, 8 ... rounds. It may
answer all the same: what comes before a round closes counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from cbdsl.deploy.deadlines import Deadlines
from cbdsl.protocol.state import NO_BACK_OFF, BackOff

_MAKES_UP = 20  # answers in time that make up for one lapse; fewer, and members could take turns in being late
_COMES_BACK = 0.05  # of a round's seconds: so much of the patience with a worker comes back
_ENOUGH = 3  # uploads seen before their times say anything


class Standing:
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
