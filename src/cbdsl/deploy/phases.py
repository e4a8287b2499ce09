"""What a served round's seconds went to, as far as a server can tell.

train: until more than half of those who answered had done so; most workers train and score that long. wait: from then
until the round closed, for the slower ones and the missing. upload: from invitations to models. verify: the rest, which
is the server's own: checking, combining, testing. Together they are the round's seconds. Where everybody uploads
unasked, `train` has the way of the models in it.
"""

from __future__ import annotations

from collections.abc import Iterable

_DIGITS = 4


class Phases:
    """The seconds of the round that is played."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    def begin(self) -> None:
        """A round starts."""
        self._spent = {"train": 0.0, "wait": 0.0, "upload": 0.0}

    def answered(self, seconds: float, times: Iterable[float]) -> None:
        """The wait for everybody's answer took so long; times: after how long each of them came."""
        ordered = sorted(times)
        most = min(ordered[len(ordered) // 2], seconds) if ordered else 0.0
        self._spent["train"] += most
        self._spent["wait"] += seconds - most

    def uploaded(self, seconds: float) -> None:
        """The wait for models that were asked for took so long."""
        self._spent["upload"] += seconds

    def of(self, seconds: float) -> dict[str, float]:
        """The split of a round that took so many seconds in all."""
        own = max(0.0, seconds - sum(self._spent.values()))
        return {name: round(spent, _DIGITS) for name, spent in {**self._spent, "verify": own}.items()}
