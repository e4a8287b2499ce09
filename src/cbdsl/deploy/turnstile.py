"""Who sends more than its share is not listened to for a while, twice as long each time it happens again.

A broker passes on whatever a member may publish, as fast as it comes, and a server that takes every message to refuse
it has no time for the others. So it leaves a flooder's messages with the broker: instead of to all it listens to each
of the others. Knows no link and judges no content; the link's thread asks it about every message.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cbdsl.deploy import topics
from cbdsl.deploy.events import Events
from cbdsl.deploy.wire import piece_count

_log = logging.getLogger("cbdsl.deploy")

_FIRST_PAUSE = 2.0  # seconds
_LONGEST_PAUSE = 600.0
_MOST_NAMES = 100_000  # with an account of their own; where anybody may come, names can be invented
_FORGIVEN_AFTER = 10.0  # times the last pause without a flood: then the next one counts as the first


@dataclass
class _Account:
    tokens: float
    filled: float
    pause: float = 0.0  # the last one
    until: float = 0.0  # when it ends


class Turnstile:
    """A bucket of tokens for every name: a message costs one, a second gives as many as the bucket holds."""

    def __init__(self, swarm: str, names: Callable[[], Sequence[str]], upload: int, events: Events) -> None:
        """names: everybody who may come now; empty if anybody may. upload: bytes of the largest one."""
        self._swarm, self._names, self._events = swarm, names, events
        self._burst = 300.0 + 6 * piece_count(upload)  # messages that a worker may send at once, and in a second
        self._accounts: dict[str, _Account] = {}

    def takes(self, topic: str) -> tuple[bool, float]:
        """Whether a message is to be taken, and if its sender is shut out with it: for how many seconds, else 0."""
        sender = topics.origin(self._swarm, topic)
        if sender is None:
            return True, 0.0
        now = time.monotonic()
        name = sender.worker if len(self._accounts) < _MOST_NAMES or sender.worker in self._accounts else ""
        account = self._accounts.setdefault(name, _Account(self._burst, now))
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
        _log.warning("%s sends too much; it is not listened to for %.0f s", sender.worker, account.pause)
        self._events.note("flood", worker=sender.worker, seconds=account.pause)
        return False, account.pause

    def patterns(self, wanted: Iterable[str]) -> dict[str, None]:
        """What to subscribe to now: while somebody is shut out, each of the others instead of all."""
        now, everybody = time.monotonic(), topics.from_all(self._swarm)
        shut = {name for name, account in list(self._accounts.items()) if now < account.until}
        names = self._names() if shut and everybody in wanted else ()
        if not names:
            return dict.fromkeys(wanted)
        others = (topics.from_worker(self._swarm, name, "#") for name in names if name not in shut)
        return dict.fromkeys([*(pattern for pattern in wanted if pattern != everybody), *others])
