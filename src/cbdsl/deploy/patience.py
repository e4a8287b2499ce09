"""Who is waited for, and how long: waiting is earned by answering in time.

Whoever lets a deadline pass is not waited for in the next 2, 4, 8 ... rounds. It may answer all the same: what comes
before a round closes counts. So a member that dawdles costs a deadline now and then, and not one every round.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from cbdsl.deploy.deadlines import Deadlines
from cbdsl.protocol.state import NO_BACK_OFF, BackOff

_MAKES_UP = 20  # answers in time that make up for one lapse; fewer, and members could take turns in being late
_ENOUGH = 3  # uploads seen before their times say anything


class Standing:
    """How one worker has kept its deadlines."""

    def __init__(self) -> None:
        self._back_off = NO_BACK_OFF
        self._overdue = False  # it let a deadline pass, and no answer has come since
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
        """An answer came in time."""
        self._overdue = False
        self._in_time += 1
        if self._in_time >= _MAKES_UP and self._back_off.times:
            self._back_off, self._in_time = BackOff(self._back_off.times - 1, 0), 0


def round_limit(times: Sequence[float], expected: int, deadlines: Deadlines) -> float:
    """How many seconds a round may take, by the seconds after which answers have come, in their order.

    As soon as more than half of those expected have answered, the others have so many times as long as that took.
    """
    majority = expected // 2 + 1
    if len(times) < majority:
        return deadlines.round_seconds
    return _bounded(times[majority - 1], deadlines.round_seconds, deadlines)


def upload_limit(times: Sequence[float], deadlines: Deadlines) -> float:
    """How many seconds an invited worker has, by the seconds that uploads took before."""
    if len(times) < _ENOUGH:
        return deadlines.upload_seconds
    return _bounded(statistics.median(times), deadlines.upload_seconds, deadlines)


def _bounded(usual: float, most: float, deadlines: Deadlines) -> float:
    return min(most, max(deadlines.least_seconds, deadlines.slack * usual))
