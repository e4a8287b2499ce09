"""What arrives at a worker: the newest of every kind, checked before it is kept.

An order that was overtaken is forgotten, so nothing piles up while a worker trains. Pieces are put together here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cbdsl.codecs.travel import longest_update
from cbdsl.deploy import topics, wire
from cbdsl.deploy.events import Events
from cbdsl.deploy.particle import Assignment, understand
from cbdsl.deploy.wire import Announcement, Assembly, Invitation, OrderMessage, Piece, Welcome, WireError
from cbdsl.workers.local import KEPT_VERSIONS

_Content = TypeVar("_Content", OrderMessage, Invitation)


class _OtherRunError(WireError):
    """A message of another run than the one that was announced."""


class Parcel:
    """Something large on its way down; pieces of an older sending are ignored."""

    def __init__(self, size: int, least: int | None = None) -> None:
        """size: bytes; or with `least` the most there may be."""
        self._size, self._least, self._round = size, size if least is None else least, -1
        self._assembly: Assembly | None = None
        self.digest, self.content, self.filled = wire.NO_DIGEST, b"", -1  # filled: the sending that is whole

    def add(self, piece: Piece) -> None:
        """Take a piece of the newest sending."""
        if not self._least <= piece.size <= self._size:
            raise WireError("a size that differs from the announcement")
        under_way = self._assembly is not None and self._assembly.digest == piece.digest
        if piece.digest == self.digest or (piece.round < self._round and not under_way):
            return
        if self._assembly is None or self._assembly.digest != piece.digest:
            self._assembly = Assembly(piece.digest, piece.size)
        self._round = max(self._round, piece.round)
        try:
            whole = self._assembly.add(piece)
        except WireError:
            self._assembly = None
            raise
        if whole is not None:
            self.filled = piece.round
            self.fill(piece.digest, whole)

    def fill(self, digest: bytes, content: bytes) -> None:
        """Take it whole, from elsewhere."""
        self.content, self._assembly = content, None
        self.digest = digest  # last: whoever sees the hash may take the content


@dataclass
class Letter(Generic[_Content]):
    """The newest order or invitation, and whether it is still to be dealt with."""

    message: _Content
    fresh: bool = True
    since: float = field(default_factory=time.monotonic)  # when it came


class Mail:
    """A worker's inbox. The link's thread hands messages in; the worker's thread looks at what is there."""

    def __init__(
        self, swarm: str, name: str, events: Events, read: Callable[[Announcement], Assignment] = understand
    ) -> None:
        """read: makes an assignment of an announcement, or refuses it with a WireError."""
        self._prefix, self._events, self._read = topics.root(swarm), events, read
        self._private = topics.to_worker(swarm, name, "")
        self.changed = threading.Condition()
        self._forget()

    def forget(self) -> None:
        """Be as at the start: what is retained has to be fetched again."""
        with self.changed:
            self._forget()

    def _forget(self) -> None:
        self.assignment: Assignment | None = None
        self.welcome: Welcome | None = None
        self.ahead = False  # what is here is of rounds that the server, back in time, has not begun
        self.order: Letter[OrderMessage] | None = None
        self.invitation: Letter[Invitation] | None = None
        self.model, self.shared, self.start = Parcel(0), Parcel(0), Parcel(0)
        self.updates: dict[int, Parcel] = {}  # by version

    def handle(self, topic: str, payload: bytes) -> str:
        """Take a message; returns its kind if it is news that the worker has to act on at once."""
        with self.changed:
            try:
                return self._take(topic, payload)
            except _OtherRunError as error:
                if self.order is None or self.order.message.task != "finish":  # else it is of the next: it comes again
                    self._events.refuse(str(error), "the server")
                return ""
            except WireError as error:
                self._events.refuse(str(error), "the server")
                return ""
            except MemoryError:
                self._events.refuse("no memory for it", "the server")
                return ""
            finally:
                self.changed.notify_all()

    def _take(self, topic: str, payload: bytes) -> str:
        if topic.startswith(self._private):
            kind = topic[len(self._private) :].partition("/")[0]
        elif topic.startswith(f"{self._prefix}/down/"):
            kind = topic[len(self._prefix) + 6 :].partition("/")[0]
        else:
            raise WireError("an unknown topic")
        if not payload:  # the server cleared what was retained: the run is over
            return ""
        if kind == "spec":
            return self._announced(wire.decode(payload, Announcement))
        take: dict[str, Callable[[bytes], str | None]] = {
            "welcome": self._welcomed, "order": self._ordered, "invitation": self._invited,
            "model": lambda content: self._piece(self.model, content),
            "update": self._update,
            "shared": lambda content: self._piece(self.shared, content),
            "start": lambda content: self._piece(self.start, content),
        }  # fmt: skip
        if kind not in take:
            raise WireError("an unknown topic")
        if self.assignment is None:  # it comes again once the announcement is here
            return ""
        return take[kind](payload) or ""

    def _announced(self, announcement: Announcement) -> str:
        if self.assignment is None or self.assignment.run != announcement.run:
            assignment = self._read(announcement)
            self._forget()
            self.assignment = assignment
            message = 4 * assignment.size * assignment.vectors
            self.model, self.start = Parcel(message), Parcel(4 * assignment.size)
            self.shared = Parcel(assignment.shared_size)
            return "run"
        return "hello"

    def _welcomed(self, payload: bytes) -> None:
        welcome = wire.decode(payload, Welcome)
        self._check_run(welcome.run)
        self.welcome = welcome
        self.ahead = self.order is not None and self.order.message.round > welcome.newest

    def _ordered(self, payload: bytes) -> str:
        order_message = wire.decode(payload, OrderMessage)
        self._check_run(order_message.run)
        if self.order is not None and order_message.round < self.order.message.round:
            return "hello"  # sent late, after a connection was lost; or the server is back in time, and will say so
        again = self.order is not None and order_message == self.order.message
        self.order = Letter(order_message)
        return "again" if again else ""

    def _invited(self, payload: bytes) -> None:
        invitation = wire.decode(payload, Invitation)
        self._check_run(invitation.run)
        self.invitation = Letter(invitation)

    def _update(self, payload: bytes) -> None:
        """A piece of what leads to a version of w^g; only the newest versions are kept."""
        piece = wire.decode(payload, Piece)
        self._check_run(piece.run)
        assert self.assignment is not None
        if not self.assignment.codecs.down.relative:
            raise WireError("an update where whole models are sent")
        if piece.round <= max(self.updates, default=0) - KEPT_VERSIONS:
            return
        most = longest_update(self.assignment.codecs, self.assignment.size)
        self.updates.setdefault(piece.round, Parcel(most, 1)).add(piece)
        newest = max(self.updates)
        self.updates = {version: one for version, one in self.updates.items() if version > newest - KEPT_VERSIONS}

    def _piece(self, parcel: Parcel, payload: bytes) -> None:
        piece = wire.decode(payload, Piece)
        self._check_run(piece.run)
        parcel.add(piece)

    def _check_run(self, run: bytes) -> None:
        assert self.assignment is not None
        if run != self.assignment.run:
            raise _OtherRunError("from another run")
