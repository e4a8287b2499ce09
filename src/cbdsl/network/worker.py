"""One worker over MQTT: receives orders, trains, claims and uploads."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from cbdsl import __version__
from cbdsl.algorithm.worker import KEPT_VERSIONS
from cbdsl.arrays import Floats, Samples
from cbdsl.codecs.base import CodecError
from cbdsl.codecs.envelope import longest_update, updated
from cbdsl.network import topics, wire
from cbdsl.network.budget import ResourceLimits
from cbdsl.network.events import Events
from cbdsl.network.mqtt import NOW_AND_THEN, LastWill, Link, Meter
from cbdsl.network.wire import (
    NO_DIGEST,
    Announcement,
    Assembly,
    ClaimMessage,
    Hello,
    Invitation,
    OrderMessage,
    Piece,
    Status,
    Welcome,
    WireError,
)
from cbdsl.network.worker_state import Assignment, DeviceWorker, WorkerState, WorkerStateFolder, understand
from cbdsl.util.files import write_atomically
from cbdsl.util.formatting import format_duration, single_line

_Content = TypeVar("_Content", OrderMessage, Invitation)


class _OtherRunError(WireError):
    """A message of another run than the one that was announced."""


class LargeMessage:
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
class PendingMessage(Generic[_Content]):
    """The newest order or invitation, and whether it is still to be dealt with."""

    message: _Content
    fresh: bool = True
    since: float = field(default_factory=time.monotonic)  # when it came


class WorkerInbox:
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
        self.order: PendingMessage[OrderMessage] | None = None
        self.invitation: PendingMessage[Invitation] | None = None
        self.model, self.shared, self.start = LargeMessage(0), LargeMessage(0), LargeMessage(0)
        self.updates: dict[int, LargeMessage] = {}  # by version

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
            self.model, self.start = LargeMessage(message), LargeMessage(4 * assignment.size)
            self.shared = LargeMessage(assignment.shared_size)
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
        self.order = PendingMessage(order_message)
        return "again" if again else ""

    def _invited(self, payload: bytes) -> None:
        invitation = wire.decode(payload, Invitation)
        self._check_run(invitation.run)
        self.invitation = PendingMessage(invitation)

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
        self.updates.setdefault(piece.round, LargeMessage(most, 1)).add(piece)
        newest = max(self.updates)
        self.updates = {version: one for version, one in self.updates.items() if version > newest - KEPT_VERSIONS}

    def _piece(self, parcel: LargeMessage, payload: bytes) -> None:
        piece = wire.decode(payload, Piece)
        self._check_run(piece.run)
        parcel.add(piece)

    def _check_run(self, run: bytes) -> None:
        assert self.assignment is not None
        if run != self.assignment.run:
            raise _OtherRunError("from another run")


class GlobalModelHolder:
    """w^g as this worker has it. Before the first update that is version 0, all zeros, where differences are sent."""

    def __init__(self, assignment: Assignment | None = None) -> None:
        self.relative = assignment is not None and assignment.codecs.down.relative
        self._assignment = assignment
        self.model = np.zeros(assignment.size if assignment is not None and self.relative else 0, np.float32)
        self.digest, self.version = b"", 0

    def reach(self, mail: WorkerInbox, order: OrderMessage) -> bool:
        """Whether the model that an order is about is here, or can be made of what came; then it is `model`."""
        if self.digest == order.model_digest:
            return True
        if not self.relative:
            if mail.model.digest == order.model_digest:
                self._take(wire.weights_from_bytes(mail.model.content), order.version, order.model_digest)
            return self.digest == order.model_digest
        starts = [(self.version, self.model)]
        if mail.model.content:
            starts.append((mail.model.filled, wire.weights_from_bytes(mail.model.content)))
        return any(self._follow(mail, version, model, order) for version, model in starts)

    def _follow(self, mail: WorkerInbox, version: int, model: Floats, order: OrderMessage) -> bool:
        assert self._assignment is not None
        while version < order.version:
            version += 1
            update = mail.updates.get(version)
            if update is None or not update.content:
                return False
            try:
                model = updated(update.content, model, self._assignment.codecs)
            except CodecError:
                return False
        digest = wire.digest_of(wire.weights_to_bytes(model))
        if digest != order.model_digest:
            return False
        self._take(model, order.version, digest)
        return True

    def _take(self, model: Floats, version: int, digest: bytes) -> None:
        self.model, self.version, self.digest = model, version, digest


_log = logging.getLogger("cbdsl.deploy")

NAME = "model.safetensors"


class TrainedModelFile:
    """The one model that a device keeps."""

    def __init__(self, folder: Path, worker: str) -> None:
        self.path, self._worker = folder / NAME, worker
        self._known: Mapping[str, str] | None = None  # what the file says; none: not looked at yet

    def is_final(self, order: OrderMessage) -> bool:
        """Whether the file has what this order, the last one of a run, says is the trained model."""
        return self._has(_notes(order, order.model_digest, order.version))

    def _has(self, notes: Mapping[str, str]) -> bool:
        if self._known is None:
            from cbdsl.models.saved_model import notes_of  # noqa: PLC0415 - a device that hears of no run does without

            self._known = notes_of(self.path)
        return notes.items() <= self._known.items()

    def keep_last(self, assignment: Assignment, held: GlobalModelHolder, order: OrderMessage) -> None:
        """Keep what a run came to, or if that did not come the last w^g that did; say which it is."""
        if not held.digest:
            _log.warning(
                "worker %s: the trained model did not come, and none before it; %s is as it was",
                self._worker,
                self.path,
            )
        elif not self.keep(assignment, held, order):
            return
        elif held.digest == order.model_digest:
            _log.info("worker %s: the trained model is in %s", self._worker, self.path)
        else:
            _log.warning(
                "worker %s: the trained model did not come. In %s is the last one that did: version %d of %d",
                self._worker, self.path, held.version, order.version,
            )  # fmt: skip

    def keep(self, assignment: Assignment, held: GlobalModelHolder, order: OrderMessage) -> bool:
        """Keep w^g as this device has it after an order; whether it could. A full disk is no reason to leave a run."""
        notes = _notes(order, held.digest, held.version)
        try:
            if not self._has(notes):
                self._write(assignment, held, notes)
            return True
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            why = single_line(str(error)) or type(error).__name__
            _log.warning("worker %s: %s cannot be written: %s", self._worker, self.path, why)
            return False

    def _write(self, assignment: Assignment, held: GlobalModelHolder, notes: Mapping[str, str]) -> None:
        from cbdsl.models.network import Network, network_of  # noqa: PLC0415 - as above
        from cbdsl.models.saved_model import ModelMetadata, file_of  # noqa: PLC0415

        shape, classes = assignment.layout.shape, assignment.classes
        network = Network(shape, classes, assignment.architecture)
        if assignment.architecture is None:
            network = network_of(assignment.spec, shape, classes)
        card = ModelMetadata.of(network, assignment.scaling, assignment.class_names)
        tensors = network.tensors(held.model[: assignment.size])
        if assignment.tensors:  # as the server's own file calls them
            card = replace(card, tensors=assignment.tensors)
            tensors = dict(zip(assignment.tensors, tensors.values(), strict=True))
        content = file_of(card, tensors, notes)
        write_atomically(self.path, content, private=True)
        self._known = notes


def _notes(order: OrderMessage, digest: bytes, version: int) -> dict[str, str]:
    """What the file says beside the card: which run and which w^g it is of, and whether the run ended with it."""
    final = order.task == "finish" and digest == order.model_digest
    return {
        "run": order.run.hex(),
        "version": str(version),
        "digest": digest.hex(),
        "final": "yes" if final else "no",
    }


_AT_ONCE = 1.5  # seconds: what passes by sooner is not worth a line
_AGAIN = (30.0, 3600.0)  # seconds until it is said again, at first and at last


@dataclass(frozen=True)
class WaitReason:
    """What is waited for, and what to do if it does not come."""

    what: str
    advice: str = ""
    patience: float = _AT_ONCE  # seconds before it is said


BROKER = WaitReason("the broker", "`cbdsl doctor --broker ...` looks at every step of the way to it", 3.0)
_UNFIT = WaitReason("another run: what was announced cannot be played here", "the reason is above", 60.0)
_SHARED = WaitReason(
    "the shared samples of the run", "they are retained on the broker; it may be slow, or have lost them"
)
_START = WaitReason("the model to start from, which the server sends to this worker alone")
_FIRST = WaitReason("the first order: the server starts when its workers are there, or have had their time")
_NEXT = WaitReason("the next order: other workers may be slow, or the server is not running", patience=60.0)
_LAST = WaitReason("the trained model of the run that is over")
_OVER = WaitReason("the next run; this one is over")


def awaited(mail: WorkerInbox, events: Events, swarm: str, name: str, run: bytes, given_up: bytes) -> WaitReason:
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


def _no_run(swarm: str, name: str) -> WaitReason:
    return WaitReason(
        f"a run: none is announced in the swarm '{swarm}'",
        f"if one is played now, look whether `cbdsl serve` has --swarm {swarm}, and whether the broker's acl names "
        f"'{name}'",
    )


def _preparation(mail: WorkerInbox, assignment: Assignment, name: str) -> WaitReason:
    """What is missing between an announcement and being ready."""
    if mail.welcome is None:
        return WaitReason(
            f"the server's welcome: a run is announced, but '{name}' has no place in it yet",
            f"the server may be gathering workers or not be running; or its roster does not name '{name}' or is full: "
            "its events.jsonl says 'from an unknown worker' then",
        )
    if mail.shared.digest != assignment.shared_digest:
        return _SHARED
    return _START if mail.welcome.start_digest not in {NO_DIGEST, mail.start.digest} else _FIRST


class WaitLog:
    """Says what is waited for."""

    def __init__(self, name: str, now: Callable[[], float] = time.monotonic) -> None:
        self._name, self._now = name, now
        self._what, self._since, self._due, self._pause = "", 0.0, 0.0, 0.0

    def on(self, wait: WaitReason | None) -> None:
        """A worker has nothing to do, for this reason; none: it was busy. To be called about once a second."""
        if wait is None:
            self._what = ""
            return
        now = self._now()
        if wait.what != self._what:
            self._what, self._since, self._due, self._pause = wait.what, now, now + wait.patience, _AGAIN[0]
        if now < self._due:
            return
        still = f"still, after {format_duration(now - self._since)}, " if self._pause > _AGAIN[0] else ""
        advice = f" ({wait.advice})" if wait.advice else ""
        _log.info("worker %s waits %sfor %s%s", self._name, still, wait.what, advice)
        self._due, self._pause = now + self._pause, min(2 * self._pause, _AGAIN[1])


_Result = TypeVar("_Result")
_WAIT_SECONDS = 1.0  # how often a worker without mail looks whether it is to stop
_HELLO_SECONDS = (5.0, 60.0)  # a worker that is not welcomed says hello again, at first and at last after so long
_PASSED_OVER = 3  # orders in a row for others, before a worker says that it takes no part any more

_LAST_MODEL_SECONDS = 60.0  # how long a worker waits for the trained model once it hears that a run is over
_ASK_SECONDS = 5.0  # and how often it asks for it

MakeLink = Callable[[Callable[[str, bytes], None], Callable[[], None], LastWill, Meter], Link]
"""Connects: given what to call with a message, what to call after every connection, and the last will."""


class Worker:
    """One worker's process."""

    def __init__(
        self,
        swarm: str,
        name: str,
        own: Samples,
        folder: Path,
        make_link: MakeLink,
        budget: ResourceLimits | None = None,
        attack: str = "",
    ) -> None:
        """folder: where it keeps its state. budget: what it gives to a run; if none, one thread and any memory.

        attack: for tests, what to do instead of the truth.
        """
        self._budget = budget or ResourceLimits(own)
        self._swarm, self._name, self._own, self._attack = swarm, name, own, attack
        self._keeper = WorkerStateFolder(folder)
        self._kept, self._keeps_all = TrainedModelFile(folder, name), False
        self._asked = 0.0  # when the trained model was last asked for
        self._meter = Meter(self._keeper.ledger)
        self._events, self._waiting = Events(), WaitLog(name)
        self._mail = WorkerInbox(swarm, name, self._events, self._budget.understand)
        self._session = os.urandom(wire.SESSION_BYTES)
        self._particle: DeviceWorker | None = None
        self._memory: WorkerState | None = None
        self._held = GlobalModelHolder()
        self._run = self._given_up = b""
        self._passed_over = 0  # orders in a row that were not for this worker
        self._speaking = threading.Lock()
        self._judged: Welcome | None = None
        self._hello_pause = _HELLO_SECONDS[0]
        self._hello_at = 0.0  # when the next one is due
        self._stopped = self._stays = self._fetching = False
        status = topics.from_worker(swarm, name, "status")
        will = LastWill(status, wire.encode(Status(False, self._session)))
        self._link = make_link(self.handle, self.greet, will, self._meter)
        self._link.subscribe(topics.spec(swarm))
        self._link.subscribe(topics.to_worker(swarm, name, "#"))

    # --- the link's side

    def greet(self) -> None:
        """After every connection: be there, and say who this is."""
        self._say("status", wire.encode(Status(True, self._session)), retain=True)
        self._introduce()

    def handle(self, topic: str, payload: bytes) -> None:
        """Take a message from the link."""
        news = self._mail.handle(topic, payload)
        if news == "run":
            self._follow()
        if news in {"run", "hello"}:
            self._introduce()
        elif news == "again":
            self._fetch_missing()

    def _follow(self) -> None:
        """Listen to a run that was announced; what is retained comes, again if it came before."""
        assignment = self._mail.assignment
        assert assignment is not None
        if assignment.shared_size:
            content = self._keeper.load_shared(assignment.shared_digest, assignment.shared_size)
            if content is None:
                self._link.subscribe(topics.shared(self._swarm, "+"))
            else:
                self._mail.shared.fill(assignment.shared_digest, content)
        self._held, self._fetching = GlobalModelHolder(assignment), False
        self._link.subscribe(topics.update(self._swarm, "+") if self._held.relative else topics.model(self._swarm, "+"))
        self._link.subscribe(topics.order(self._swarm))

    def _fetch_missing(self) -> None:
        """The server asks again, so it waits: fetch what did not come the first time."""
        mail = self._mail
        if self._fetching:
            self._link.subscribe(topics.update(self._swarm, "+"))
        late = mail.order is not None and mail.order.message.model_digest != mail.model.digest
        if self._fetching or (late and not self._held.relative):
            self._link.subscribe(topics.model(self._swarm, "+"))
        if mail.assignment is not None and mail.shared.digest != mail.assignment.shared_digest:
            self._link.subscribe(topics.shared(self._swarm, "+"))
        if mail.welcome is None:
            self._introduce()

    def _introduce(self) -> None:
        with self._speaking:  # both threads say it; the last word must be true
            last = self._keeper.last()
            words = (last.round, last.run, last.version, last.model_digest, __version__)
            self._say("hello", wire.encode(Hello(self._session, len(self._own), *words)))
        self._hello_at = time.monotonic() + self._hello_pause

    def _introduce_again(self) -> None:
        """A worker that is not welcomed, or whose start has not come, says hello again."""
        waits = self._mail.assignment is not None and self._run != self._mail.assignment.run
        if _is_last(self._mail.order):
            return
        if waits and time.monotonic() >= self._hello_at:
            self._hello_pause = min(2 * self._hello_pause, _HELLO_SECONDS[1])
            self._introduce()

    # --- the worker's side

    def run(self, stay: bool = False, keep_model: bool = False) -> None:
        """Work until the run is over, or with `stay` until told to stop.

        keep_model: write w^g down whenever there is another one, not only at the end.
        """
        self._stays, self._keeps_all = stay, keep_model
        self._link.open()
        try:
            while not self._stopped:
                with self._mail.changed:
                    step = self._attempt(self._next)
                    if step is None:
                        self._mail.changed.wait(_WAIT_SECONDS)
                if step is not None:
                    self._attempt(step)
                else:
                    self._introduce_again()
                self._waiting.on(self._awaits() if step is None else None)
        finally:
            self.leave()

    def _awaits(self) -> WaitReason:
        if not self._link.is_up():
            return BROKER
        with self._mail.changed:
            return awaited(self._mail, self._events, self._swarm, self._name, self._run, self._given_up)

    def _attempt(self, step: Callable[[], _Result]) -> _Result | None:
        """Do something for the server; a run that cannot be played here is left, and the next one waited for."""
        assignment = self._mail.assignment
        try:
            return step()
        except (ValueError, RuntimeError, ArithmeticError, MemoryError) as error:
            self._particle, self._memory, self._held = None, None, GlobalModelHolder()
            self._given_up = assignment.run if assignment is not None else b""
            why = "there is no memory for it" if isinstance(error, MemoryError) else single_line(str(error)).rstrip(".")
            _log.warning("worker %s cannot play this run: %s. Waiting for another one", self._name, why)
            return None

    def stop(self) -> None:
        """End `run` at the next occasion; may be called from a signal."""
        self._stopped = True

    def leave(self) -> None:
        """Say goodbye, so that nobody waits for this worker."""
        self._say("status", b"", retain=True)
        self._link.close()
        self._meter.save()

    def _next(self) -> Callable[[], None] | None:
        """What to do now, with what is there now: mail may change while it is done. None: wait for mail."""
        mail, order, invitation = self._mail, self._mail.order, self._mail.invitation
        if mail.assignment is None:
            return None
        urgent = self._next_news(mail.assignment, order)
        if urgent is not None or _is_last(order):
            return urgent
        if self._particle is None or self._run != mail.assignment.run:
            return self._next_preparation(mail.assignment)
        if order is not None and order.fresh and self._can_play(order.message):
            order.fresh = False
            return partial(self._play, order.message, self._held.model)
        played = 0 if self._memory is None else self._memory.round
        if invitation is not None and invitation.fresh and invitation.message.round <= played:
            invitation.fresh = False
            return partial(self._upload, invitation.message)
        return None

    def _next_news(
        self, assignment: Assignment, order: PendingMessage[OrderMessage] | None
    ) -> Callable[[], None] | None:
        """What changes everything: the run is over, or the server does not know the history of the state here."""
        welcome, before = self._mail.welcome, self._judged
        self._judged = welcome
        if welcome is not None and welcome is not before and welcome.forget:
            # It may have played on since it said hello: the server must hear of that, or it refuses what rests on it.
            return self._start_anew if welcome.forget == self._keeper.last().round else self._introduce
        if self._mail.ahead:
            return self._fetch_again
        if order is not None and order.fresh and _is_last(order) and self._is_settled(order):
            order.fresh = False
            return partial(self._finish, order.message, assignment, self._held)
        return None

    def _is_settled(self, last: PendingMessage[OrderMessage]) -> bool:
        """Whether the model that a run came to is here, or was waited for in vain; it is asked for now and then."""
        if self._kept.is_final(last.message) or self._reach(last.message):
            return True
        now = time.monotonic()
        if now >= max(self._asked, last.since) + _ASK_SECONDS:
            self._asked = now
            self._link.subscribe(topics.model(self._swarm, "+"))
        return now >= last.since + _LAST_MODEL_SECONDS

    def _next_preparation(self, assignment: Assignment) -> Callable[[], None] | None:
        """Build what the run needs, once its number, the shared samples and the start are here."""
        mail, welcome = self._mail, self._mail.welcome
        if welcome is None or mail.shared.digest != assignment.shared_digest or assignment.run == self._given_up:
            return None
        start = b""
        if welcome.start_digest == mail.start.digest != wire.NO_DIGEST:
            start = mail.start.content
        elif welcome.start_digest != wire.NO_DIGEST and self._keeper.last().run != assignment.run:
            return None
        if not self._budget.may_begin():
            return None
        return partial(self._prepare, assignment, welcome.worker, mail.shared.content, start)

    def _is_of_another_history(self, order_message: OrderMessage) -> bool:
        """Whether the round of an order was carried out before, with another global model."""
        memory = self._memory
        if memory is None or memory.round != order_message.round:
            return False
        return memory.model_digest != order_message.model_digest

    def _can_play(self, order_message: OrderMessage) -> bool:
        done = self._memory is not None and order_message.round <= self._memory.round
        return self._reach(order_message, done)

    def _reach(self, order_message: OrderMessage, done: bool = False) -> bool:
        """Whether the model of an order is here; if not, fetch what leads to it. done: it is not needed any more."""
        if done or self._held.reach(self._mail, order_message):
            if self._held.relative and self._fetching:
                self._link.unsubscribe(topics.model(self._swarm, "+"))
                self._fetching = False
            return True
        if self._held.relative and not self._fetching:  # it was away for too long: fetch the last whole model
            self._link.subscribe(topics.model(self._swarm, "+"))
            self._fetching = True
        return False

    def _prepare(self, assignment: Assignment, number: int, shared: bytes, start: bytes) -> None:
        """Build what the run needs, and take up the state that is here."""
        if shared and self._keeper.load_shared(assignment.shared_digest, assignment.shared_size) is None:
            self._keeper.save_shared(shared)
            self._link.unsubscribe(topics.shared(self._swarm, "+"))
        self._particle = self._memory = None  # before there is another one: two would take twice the memory
        particle = DeviceWorker(assignment, number, self._own, shared, self._budget.threads, self._attack)
        codec = assignment.codecs.up
        pack = codec.longest(assignment.size) if codec.relative else 0
        self._memory = self._keeper.load(assignment.run, number, assignment.size, pack)
        if self._memory is not None:
            particle.restore(self._memory)
        elif self._keeper.last().run == assignment.run:  # damaged: the server may still count on it
            self._keeper.forget()
            self._introduce()
        if self._memory is None and start:
            particle.start(wire.weights_from_bytes(start))
        self._particle, self._run = particle, assignment.run
        self._hello_pause = _HELLO_SECONDS[0]
        _log.info("worker %s is number %d, %s samples", self._name, number, f"{len(self._own):,}")

    def _play(self, order_message: OrderMessage, received: Floats) -> None:
        """Carry an order out, or answer again if that was done before."""
        if self._is_of_another_history(order_message):
            self._start_anew()
            return
        assert self._particle is not None
        if self._keeps_all and self._held.digest == order_message.model_digest:
            self._kept.keep(self._particle.assignment, self._held, order_message)
        if not wire.has_bit(order_message.participants, self._particle.number):
            self._note_passed_over()
            return
        self._passed_over = 0
        if self._memory is None or order_message.round > self._memory.round:
            self._memory = self._particle.carry_out(order_message, received)
            self._keeper.save(self._memory)
            self._meter.save(NOW_AND_THEN)
        if order_message.round != self._memory.round:
            _log.warning("the server is back in round %d; this worker is past it", order_message.round)
        elif order_message.task == "average":
            self._send_model()
        elif self._memory.claim is not None:
            claim = self._memory.claim
            claim_message = ClaimMessage(self._run, self._memory.round, claim.score, claim.commitment)
            self._say("claim", wire.encode(claim_message))

    def _note_passed_over(self) -> None:
        """Say once that this worker is not asked any more; where some are drawn every round, that means nothing."""
        assert self._particle is not None
        self._passed_over += 1
        if self._passed_over == _PASSED_OVER and self._particle.assignment.spec.participation == 1.0:
            _log.warning(
                "worker %s takes no part in the run any more: the server has banned it, or its roster does not name "
                "it. The server's folder says which: events.jsonl, rounds.jsonl",
                self._name,
            )

    def _start_anew(self) -> None:
        """The server does not know the history that the state here is of: do without it, as a new worker would."""
        _log.warning("worker %s: the server is back in time; starting again from the global model", self._name)
        with self._speaking:
            self._keeper.forget()
        self._particle, self._memory, self._run = None, None, b""
        self._fetch_again()

    def _fetch_again(self) -> None:
        """The server is back in time: its orders and models look older than those that are here."""
        self._mail.forget()
        self._link.subscribe(topics.spec(self._swarm))  # what is retained comes again

    def _upload(self, invitation: Invitation) -> None:
        """Send the model behind a claim, if this worker knows the claim: state may be lost, and a worker copied."""
        if self._memory is None or invitation.round != self._memory.round:
            return
        if invitation.claim == wire.said(self._memory.claim):
            self._send_model()
        else:
            _log.warning("worker %s is invited for a claim that it has not made; staying silent", self._name)

    def _send_model(self) -> None:
        assert self._particle is not None
        assert self._memory is not None
        while not self._link.settled(_WAIT_SECONDS):  # or whoever asks again and again would fill this machine's memory
            if self._stopped:
                return
        upload = self._particle.upload()
        if upload is not None:
            for piece in wire.pieces(self._run, self._memory.round, upload):
                self._say(f"upload/{piece.index}", wire.encode(piece))

    def _finish(self, order_message: OrderMessage, assignment: Assignment, held: GlobalModelHolder) -> None:
        """The run is over: keep what it came to. Whoever was done with it before, or had no part, waits for another."""
        had_it = self._kept.is_final(order_message)
        plays = self._particle is not None and self._run == order_message.run
        took_part = self._mail.welcome is not None or self._keeper.last().run == order_message.run
        self._particle = None  # its memory is for what comes next
        if not had_it:
            self._kept.keep_last(assignment, held, order_message)
        if not self._stays and (plays or (took_part and not had_it)):
            self._stopped = True
        _log.info("worker %s: the run is over", self._name)

    def _say(self, what: str, payload: bytes, retain: bool = False) -> None:
        self._link.publish(topics.from_worker(self._swarm, self._name, what), payload, retain)


def _is_last(order: PendingMessage[OrderMessage] | None) -> bool:
    """Whether an order says that the run is over."""
    return order is not None and order.message.task == "finish"
