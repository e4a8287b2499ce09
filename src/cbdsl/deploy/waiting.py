"""What a worker waits for, said in the log: at once, when it is something else, and again at longer intervals.

Looks at what has come and at nothing else; it sends nothing and decides nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from cbdsl.deploy.events import Events
from cbdsl.deploy.mail import Mail
from cbdsl.deploy.particle import Assignment
from cbdsl.deploy.wire import NO_DIGEST
from cbdsl.text import clock

_log = logging.getLogger("cbdsl.deploy")

_AT_ONCE = 1.5  # seconds: what passes by sooner is not worth a line
_AGAIN = (30.0, 3600.0)  # seconds until it is said again, at first and at last


@dataclass(frozen=True)
class Wait:
    """What is waited for, and what to do if it does not come."""

    what: str
    advice: str = ""
    patience: float = _AT_ONCE  # seconds before it is said


BROKER = Wait("the broker", "`cbdsl doctor --broker ...` looks at every step of the way to it", 3.0)
_UNFIT = Wait("another run: what was announced cannot be played here", "the reason is above", 60.0)
_SHARED = Wait("the shared samples of the run", "they are retained on the broker; it may be slow, or have lost them")
_START = Wait("the model to start from, which the server sends to this worker alone")
_FIRST = Wait("the first order: the server starts when its workers are there, or have had their time")
_NEXT = Wait("the next order: other workers may be slow, or the server is not running", patience=60.0)
_LAST = Wait("the trained model of the run that is over")
_OVER = Wait("the next run; this one is over")


def awaited(mail: Mail, events: Events, swarm: str, name: str, run: bytes, given_up: bytes) -> Wait:
    """What a worker with nothing to do waits for. run: the one that it is ready for. given_up: one it cannot play."""
    assignment, order = mail.assignment, mail.order
    if assignment is None:
        return _UNFIT if events.refusals else _no_run(swarm, name)
    if order is not None and order.message.task == "finish":
        return _LAST if order.fresh else _OVER
    if assignment.run == given_up:
        return _UNFIT
    if run == assignment.run:
        return _FIRST if order is None else _NEXT
    return _preparation(mail, assignment, name)


def _no_run(swarm: str, name: str) -> Wait:
    return Wait(
        f"a run: none is announced in the swarm '{swarm}'",
        f"if one is played now, look whether `cbdsl serve` has --swarm {swarm}, and whether the broker's acl names "
        f"'{name}'",
    )


def _preparation(mail: Mail, assignment: Assignment, name: str) -> Wait:
    """What is missing between an announcement and being ready."""
    if mail.welcome is None:
        return Wait(
            f"the server's welcome: a run is announced, but '{name}' has no place in it yet",
            f"the server may be gathering workers or not be running; or its roster does not name '{name}' or is full: "
            "its events.jsonl says 'from an unknown worker' then",
        )
    if mail.shared.digest != assignment.shared_digest:
        return _SHARED
    return _START if mail.welcome.start_digest not in {NO_DIGEST, mail.start.digest} else _FIRST


class Waiting:
    """Says what is waited for."""

    def __init__(self, name: str, now: Callable[[], float] = time.monotonic) -> None:
        self._name, self._now = name, now
        self._what, self._since, self._due, self._pause = "", 0.0, 0.0, 0.0

    def on(self, wait: Wait | None) -> None:
        """A worker has nothing to do, for this reason; none: it was busy. To be called about once a second."""
        if wait is None:
            self._what = ""
            return
        now = self._now()
        if wait.what != self._what:
            self._what, self._since, self._due, self._pause = wait.what, now, now + wait.patience, _AGAIN[0]
        if now < self._due:
            return
        still = f"still, after {clock(now - self._since)}, " if self._pause > _AGAIN[0] else ""
        advice = f" ({wait.advice})" if wait.advice else ""
        _log.info("worker %s waits %sfor %s%s", self._name, still, wait.what, advice)
        self._due, self._pause = now + self._pause, min(2 * self._pause, _AGAIN[1])
