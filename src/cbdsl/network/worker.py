"""One worker over MQTT: receives orders, trains, sends claims and uploads, and keeps the trained model.

`Worker` has two threads: the link's thread puts messages into the `WorkerInbox`, the worker's own thread takes the
newest ones out and acts on them. No network call is made while the inbox is locked.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Generic, Literal, TypeVar

import numpy as np

from cbdsl import __version__
from cbdsl.arrays import Floats, Samples
from cbdsl.codecs.codec import CodecError
from cbdsl.codecs.envelope import KEPT_VERSIONS, apply_update, longest_update
from cbdsl.network import topics, wire
from cbdsl.network.budget import ResourceLimits
from cbdsl.network.device_worker import Assignment, DeviceWorker, parse_announcement
from cbdsl.network.journal import Events
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
from cbdsl.network.worker_state import WorkerState, WorkerStateFolder
from cbdsl.util.files import write_atomically
from cbdsl.util.formatting import format_bytes, format_duration, single_line

_log = logging.getLogger("cbdsl.network")

_WAIT_SECONDS = 1.0  # how often an idle worker checks whether it was stopped
_HELLO_SECONDS = (5.0, 60.0)  # first and longest pause between the hellos of a worker that is not welcomed
_PASSED_OVER = 3  # orders in a row without this worker, before it logs a warning
_SENT_IN_VAIN = 3  # times that a model is sent in one round, before a worker logs a warning
_LAST_MODEL_SECONDS = 60.0  # how long a worker waits for the trained model at the end of a run
_ASK_SECONDS = 5.0  # interval between requests for it

_Content = TypeVar("_Content", Welcome, OrderMessage, Invitation)
_OfRun = TypeVar("_OfRun", Welcome, OrderMessage, Invitation, Piece)
_Result = TypeVar("_Result")
_Step = Callable[[], None]

FollowUp = Literal["", "join run", "send hello", "fetch missing"]
"""The action of the link's thread after a message."""


# --- messages


class LargeMessage:
    """The newest version of something that arrives in pieces; pieces of older versions are ignored."""

    def __init__(self, size: int, least: int | None = None) -> None:
        """size: the exact number of bytes, or with `least` the maximum."""
        self._size, self._least, self._newest = size, size if least is None else least, -1
        self._assembly: Assembly | None = None
        self.digest, self.content = NO_DIGEST, b""
        self.version = -1  # `round` of the pieces that are complete

    def add(self, piece: Piece) -> None:
        """Add a piece of the newest version."""
        if not self._least <= piece.size <= self._size:
            raise WireError("a size that differs from the announcement")
        under_way = self._assembly is not None and self._assembly.digest == piece.digest
        if piece.digest == self.digest or (piece.round < self._newest and not under_way):
            return
        if self._assembly is None or not under_way:
            self._assembly = Assembly(piece.digest, piece.size)
        self._newest = max(self._newest, piece.round)
        try:
            whole = self._assembly.add(piece)
        except WireError:
            self._assembly = None
            raise
        if whole is not None:
            self.version = piece.round
            self.fill(piece.digest, whole)

    @property
    def missing(self) -> int:
        """The number of missing pieces of the arriving version; 0 if none is arriving."""
        return self._assembly.missing if self._assembly is not None else 0

    def fill(self, digest: bytes, content: bytes) -> None:
        """Set the whole content."""
        self.content, self._assembly = content, None
        self.digest = digest  # last: a thread that sees the digest may use the content


@dataclass
class PendingMessage(Generic[_Content]):
    """The newest message of a kind, and whether the worker still has to act on it."""

    message: _Content
    fresh: bool = True
    since: float = field(default_factory=time.monotonic)  # when it arrived


class _OtherRunError(WireError):
    """A message of another run than the announced one."""


class WorkerInbox:
    """The newest message of each kind. `changed` is its lock, and is notified of every message."""

    def __init__(
        self, swarm: str, name: str, events: Events, read: Callable[[Announcement], Assignment] = parse_announcement
    ) -> None:
        """read: turns an announcement into an assignment, or raises WireError."""
        self._swarm_name, self._name, self._events, self._read = swarm, name, events, read
        self._to_all, self._to_this = f"{topics.root(swarm)}/down/", topics.to_worker(swarm, name, "")
        self.changed = threading.Condition()
        self._reset()

    def reset(self) -> None:
        """Forget everything. Retained messages must be fetched again."""
        with self.changed:
            self._reset()

    def _reset(self) -> None:
        self.assignment: Assignment | None = None
        self.welcome: PendingMessage[Welcome] | None = None
        self.order: PendingMessage[OrderMessage] | None = None
        self.invitation: PendingMessage[Invitation] | None = None
        self.order_is_ahead = False  # the stored order is of a later round than the server's: the server was restored
        self.model, self.shared, self.start = LargeMessage(0), LargeMessage(0), LargeMessage(0)
        self.updates: dict[int, LargeMessage] = {}  # by version

    @property
    def run_is_over(self) -> bool:
        """Whether the newest order ends the run."""
        return self.order is not None and self.order.message.task == "finish"

    def handle(self, topic: str, payload: bytes) -> FollowUp:
        """Store a message from the server; an invalid one is refused and counted."""
        with self.changed:
            try:
                return self._take(topic, payload)
            except WireError as error:
                # After the last order messages of the next run may overtake its announcement; they are sent again.
                if not (isinstance(error, _OtherRunError) and self.run_is_over):
                    self._events.refuse(str(error), "the server")
                return ""
            except MemoryError:
                self._events.refuse("not enough memory for it", "the server")
                return ""
            finally:
                self.changed.notify_all()

    def _take(self, topic: str, payload: bytes) -> FollowUp:
        if not topic.startswith((self._to_all, self._to_this)):
            raise WireError("an unknown topic")
        prefix = self._to_this if topic.startswith(self._to_this) else self._to_all
        kind = topic[len(prefix) :].partition("/")[0]
        if not payload:  # the server cleared a retained message: the run is over
            return ""
        if kind == "spec":
            return self._take_announcement(wire.decode(payload, Announcement))
        take: dict[str, Callable[[Assignment, bytes], FollowUp]] = {
            "welcome": self._take_welcome,
            "order": self._take_order,
            "invitation": self._take_invitation,
            "update": self._take_update,
            "model": partial(self._take_piece, self.model),
            "shared": partial(self._take_piece, self.shared),
            "start": partial(self._take_piece, self.start),
        }
        if kind not in take:
            raise WireError("an unknown topic")
        # Without an announcement nothing can be checked; the message is sent again once there is one.
        return "" if self.assignment is None else take[kind](self.assignment, payload)

    def _take_announcement(self, announcement: Announcement) -> FollowUp:
        if self.assignment is not None and self.assignment.run == announcement.run:
            return "send hello"
        assignment = self._read(announcement)
        self._reset()
        self.assignment = assignment
        self.model = LargeMessage(4 * assignment.size * assignment.vectors)
        self.start = LargeMessage(4 * assignment.size)
        self.shared = LargeMessage(assignment.shared_size)
        return "join run"

    def _take_welcome(self, assignment: Assignment, payload: bytes) -> FollowUp:
        welcome = _decode(payload, Welcome, assignment)
        self.welcome = PendingMessage(welcome)
        self.order_is_ahead = self.order is not None and self.order.message.round > welcome.newest
        return ""

    def _take_order(self, assignment: Assignment, payload: bytes) -> FollowUp:
        order, before = _decode(payload, OrderMessage, assignment), self.order
        if before is not None and order.round < before.message.round:
            return "send hello"  # it was delayed, or the server was restored; the server's welcome shows which
        self.order = PendingMessage(order)
        return "fetch missing" if before is not None and order == before.message else ""

    def _take_invitation(self, assignment: Assignment, payload: bytes) -> FollowUp:
        self.invitation = PendingMessage(_decode(payload, Invitation, assignment))
        return ""

    def _take_piece(self, large: LargeMessage, assignment: Assignment, payload: bytes) -> FollowUp:
        large.add(_decode(payload, Piece, assignment))
        return ""

    def _take_update(self, assignment: Assignment, payload: bytes) -> FollowUp:
        """Store a piece of the update to a version of w^g; only the newest versions are kept."""
        piece = _decode(payload, Piece, assignment)
        if not assignment.codecs.down.relative:
            raise WireError("an update where whole models are sent")
        if piece.round <= max(self.updates, default=0) - KEPT_VERSIONS:
            return ""
        most = longest_update(assignment.codecs, assignment.size)
        self.updates.setdefault(piece.round, LargeMessage(most, 1)).add(piece)
        newest = max(self.updates)
        self.updates = {version: one for version, one in self.updates.items() if version > newest - KEPT_VERSIONS}
        return ""

    def wait_reason(self, run: bytes, given_up: bytes) -> WaitReason:
        """Return what an idle worker waits for. run: the one it is ready for; given_up: one it cannot take part in."""
        assignment, order = self.assignment, self.order
        if assignment is None and not self._events.refusals:
            return WaitReason(
                f"a run: none is announced in the swarm '{self._swarm_name}'",
                f"if there is one, check that `cbdsl serve` has --swarm {self._swarm_name} and the broker's rules name "
                f"'{self._name}'",
            )
        if self.run_is_over and order is not None:
            return _TRAINED_MODEL if order.fresh else _NEXT_RUN
        if assignment is None or assignment.run == given_up:
            return _OTHER_RUN
        if run == assignment.run:
            return _FIRST_ORDER if order is None else _NEXT_ORDER
        return self._missing_for(assignment)

    def _missing_for(self, assignment: Assignment) -> WaitReason:
        """Return which message is missing to prepare for an announced run."""
        welcome = self.welcome
        if welcome is None:
            return WaitReason(
                f"the server's welcome: a run is announced, but '{self._name}' has no place in it yet",
                f"the server is gathering workers or not running, or its roster does not name '{self._name}' or is "
                "full: then its events.jsonl has 'from an unknown worker'",
            )
        if self.shared.digest != assignment.shared_digest:
            return _SHARED_SAMPLES
        return _FIRST_ORDER if welcome.message.start_digest in {NO_DIGEST, self.start.digest} else _START


def _decode(payload: bytes, kind: type[_OfRun], assignment: Assignment) -> _OfRun:
    message = wire.decode(payload, kind)
    if message.run != assignment.run:
        raise _OtherRunError("from another run")
    return message


# --- models


class GlobalModelHolder:
    """w^g as this worker has it. Where differences are sent it starts as version 0, all zeros."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment, self.relative = assignment, assignment.codecs.down.relative
        self.model = np.zeros(assignment.size if self.relative else 0, np.float32)
        self.digest, self.version = b"", 0

    def update_to(self, order: OrderMessage, inbox: WorkerInbox) -> bool:
        """Set `model` to the one of an order if the stored messages suffice; return whether they do."""
        if self.digest == order.model_digest:
            return True
        if not self.relative:
            if inbox.model.digest != order.model_digest:
                return False
            self._set(wire.weights_from_bytes(inbox.model.content), order)
            return True
        starts = [(self.version, self.model)]
        if inbox.model.content:
            starts.append((inbox.model.version, wire.weights_from_bytes(inbox.model.content)))
        return any(self._apply_updates(inbox, version, model, order) for version, model in starts)

    def _apply_updates(self, inbox: WorkerInbox, version: int, model: Floats, order: OrderMessage) -> bool:
        while version < order.version:
            version += 1
            update = inbox.updates.get(version)
            if update is None or not update.content:
                return False
            try:
                model = apply_update(update.content, model, self.assignment.codecs)
            except CodecError:
                return False
        if wire.digest_of(wire.weights_to_bytes(model)) != order.model_digest:
            return False
        self._set(model, order)
        return True

    def _set(self, model: Floats, order: OrderMessage) -> None:
        self.model, self.version, self.digest = model, order.version, order.model_digest


class TrainedModelFile:
    """`model.safetensors` in a worker's folder: the model of the last run."""

    def __init__(self, folder: Path, worker: str) -> None:
        self.path, self._worker = folder / "model.safetensors", worker
        self._notes: Mapping[str, str] | None = None  # of the file; None: not read yet

    def is_final(self, order: OrderMessage) -> bool:
        """Return whether the file contains the trained model that the last order of a run names."""
        return self._contains(_metadata_of(order, order.model_digest, order.version))

    def save_final(self, holder: GlobalModelHolder, order: OrderMessage, shared: bytes = b"") -> None:
        """Save the trained model, or the last w^g that arrived, and log which it is."""
        if not holder.digest:
            _log.warning("worker %s: no model arrived; %s is unchanged", self._worker, self.path)
        elif not self.save(holder, order, shared):
            return
        elif holder.digest == order.model_digest:
            _log.info("worker %s: the trained model is in %s", self._worker, self.path)
        else:
            _log.warning(
                "worker %s: the trained model was not received; %s holds the last one received: version %d of %d",
                self._worker, self.path, holder.version, order.version,
            )  # fmt: skip

    def save(self, holder: GlobalModelHolder, order: OrderMessage, shared: bytes = b"") -> bool:
        """Save w^g; return whether that was possible. A full disk is logged and does not end a run.

        shared: the shared content, which contains the frozen weights.
        """
        notes = _metadata_of(order, holder.digest, holder.version)
        try:
            if not self._contains(notes):
                self._write(holder, shared, notes)
            return True
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            why = single_line(str(error)) or type(error).__name__
            _log.warning("worker %s: %s cannot be written: %s", self._worker, self.path, why)
            return False

    def _contains(self, notes: Mapping[str, str]) -> bool:
        if self._notes is None:
            from cbdsl.models.saved_model import notes_of  # noqa: PLC0415 - not needed before there is a run

            self._notes = notes_of(self.path)
        return notes.items() <= self._notes.items()

    def _write(self, holder: GlobalModelHolder, shared: bytes, notes: Mapping[str, str]) -> None:
        from cbdsl.models.saved_model import ModelMetadata, file_of  # noqa: PLC0415 - as above

        assignment = holder.assignment
        network = assignment.network(shared)
        card = ModelMetadata.of(network, assignment.scaling, assignment.class_names)
        data = assignment.data
        card = replace(card, target_names=data.target_names)
        if data.task != "classification":  # the threshold of a detector is the server's
            loss = assignment.loss
            card = replace(
                card, class_names=(), task=data.task, loss=loss.name, loss_setting=loss.setting,
                target_scaling=data.target_scaling,
            )  # fmt: skip
        tensors = network.tensors(holder.model[: assignment.size])
        if assignment.tensors:  # as in the server's own file
            names = dict(zip(tensors, assignment.tensors, strict=True))
            card = replace(card, tensors=assignment.tensors, frozen=tuple(names[name] for name in card.frozen))
            tensors = dict(zip(assignment.tensors, tensors.values(), strict=True))
        write_atomically(self.path, file_of(card, tensors, notes), private=True)
        self._notes = notes


def _metadata_of(order: OrderMessage, digest: bytes, version: int) -> dict[str, str]:
    """Return the metadata that identify a w^g: its run, version and digest, and whether the run ended with it."""
    final = order.task == "finish" and digest == order.model_digest
    return {"run": order.run.hex(), "version": str(version), "digest": digest.hex(), "final": "yes" if final else "no"}


# --- waiting


@dataclass(frozen=True)
class WaitReason:
    """The reason why an idle worker waits."""

    what: str
    advice: str = ""
    patience: float = 1.5  # seconds before it is logged


BROKER = WaitReason("the broker", "check the connection with `cbdsl doctor --broker ...`", 3.0)
_OTHER_RUN = WaitReason("another run: this worker cannot take part in the announced one, see above", patience=60.0)
_SHARED_SAMPLES = WaitReason("the shared samples of the run")
_START = WaitReason("its start model from the server")
_FIRST_ORDER = WaitReason("the first order: the server waits for its workers or the join timeout")
_NEXT_ORDER = WaitReason("the next order: other workers are slow, or the server is not running", patience=60.0)
_TRAINED_MODEL = WaitReason("the trained model of the finished run")
_NEXT_RUN = WaitReason("the next run; this one is over")


class WaitLog:
    """Logs what a worker waits for, repeatedly at growing intervals."""

    _first_pause, _longest_pause = 30.0, 3600.0  # seconds between two lines

    def __init__(self, name: str, now: Callable[[], float] = time.monotonic) -> None:
        self._name, self._now = name, now
        self._what, self._since, self._due, self._pause = "", 0.0, 0.0, 0.0

    def update(self, reason: WaitReason | None) -> None:
        """Log the reason if it is due. None: the worker was busy. Call this about once per second."""
        if reason is None:
            self._what = ""
            return
        now = self._now()
        if reason.what != self._what:
            self._what, self._since, self._due, self._pause = reason.what, now, now + reason.patience, self._first_pause
        if now < self._due:
            return
        still = f"still, after {format_duration(now - self._since)}, " if self._pause > self._first_pause else ""
        advice = f" ({reason.advice})" if reason.advice else ""
        _log.info("worker %s waits %sfor %s%s", self._name, still, reason.what, advice)
        self._due, self._pause = now + self._pause, min(2 * self._pause, self._longest_pause)


# --- the worker

MakeLink = Callable[[Callable[[str, bytes], None], Callable[[], None], LastWill, Meter], Link]
"""Makes a link from the callbacks for a message and for a new connection, the last will and the meter."""


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
        """folder: where its state is saved. budget: its resource limits; None: one thread and any memory.

        attack: the attack to carry out, for tests.
        """
        self._budget = budget or ResourceLimits(own)
        self._swarm_name, self._name, self._own, self._attack = swarm, name, own, attack
        self._folder = WorkerStateFolder(folder)
        self._trained = TrainedModelFile(folder, name)
        self._meter = Meter(self._folder.ledger)
        self._wait_log = WaitLog(name)
        self._inbox = WorkerInbox(swarm, name, Events(), self._budget.parse_announcement)
        self._session = os.urandom(wire.SESSION_BYTES)
        self._device: DeviceWorker | None = None  # ready for the run with id `_run`
        self._state: WorkerState | None = None  # after the last round it carried out
        self._global: GlobalModelHolder | None = None
        self._run = self._given_up = b""
        self._passed_over = 0  # orders in a row that were not for this worker
        self._hello_lock = threading.Lock()
        self._hello_pause, self._hello_at = _HELLO_SECONDS[0], 0.0  # seconds until the next hello, and when it is due
        self._sent = self._sent_in = 0  # how often a model was sent in a round, and which
        self._asked = 0.0  # when the trained model was last asked for
        self._stopped = self._stays = self._saves_every_model = False
        self._fetches_models = False  # subscribed to whole models, though differences are sent
        self._fetches_shared = False  # subscribed to the shared samples
        self._shared_missing = 0  # how many of their pieces were missing when the server last repeated an order
        status = topics.from_worker(swarm, name, "status")
        will = LastWill(status, wire.encode(Status(False, self._session)))
        self._link = make_link(self.handle, self.announce_worker, will, self._meter)
        self._link.subscribe(topics.spec(swarm))
        self._link.subscribe(topics.to_worker(swarm, name, "#"))

    # --- in the link's thread

    def announce_worker(self) -> None:
        """Publish status and hello; called after every connection."""
        self._publish("status", wire.encode(Status(True, self._session)), retain=True)
        self._send_hello()

    def handle(self, topic: str, payload: bytes) -> None:
        """Take a message from the link."""
        follow_up, assignment = self._inbox.handle(topic, payload), self._inbox.assignment
        if assignment is not None and self._inbox.shared.digest == assignment.shared_digest:
            self._leave_shared()
        if follow_up == "join run" and assignment is not None:
            self._subscribe_to_run(assignment)
        if follow_up in {"join run", "send hello"}:
            self._send_hello()
        elif follow_up == "fetch missing" and assignment is not None:
            self._fetch_missing(assignment)

    def _subscribe_to_run(self, assignment: Assignment) -> None:
        if assignment.shared_size:
            content = self._folder.load_shared(assignment.shared_digest, assignment.shared_size)
            if content is None:
                self._subscribe_to_shared()
            else:
                self._inbox.shared.fill(assignment.shared_digest, content)
        self._subscribe(topics.update if assignment.codecs.down.relative else topics.model)
        self._link.subscribe(topics.order(self._swarm_name))

    def _fetch_missing(self, assignment: Assignment) -> None:
        """Ask the broker again for what did not arrive: a server that repeats its order waits for this worker."""
        inbox = self._inbox
        if self._fetches_models:
            self._subscribe(topics.update)
        late = inbox.order is not None and inbox.order.message.model_digest != inbox.model.digest
        if self._fetches_models or (late and not assignment.codecs.down.relative):
            self._subscribe(topics.model)
        if inbox.shared.digest != assignment.shared_digest:
            missing, self._shared_missing = self._shared_missing, inbox.shared.missing
            if missing == inbox.shared.missing:  # no piece since the last time: none is on its way
                self._subscribe_to_shared()
        if inbox.welcome is None:
            self._send_hello()

    def _subscribe_to_shared(self) -> None:
        self._fetches_shared = True
        self._subscribe(topics.shared)

    def _leave_shared(self) -> None:
        """Unsubscribe from the shared samples: the next run's would arrive when they are published, and once more."""
        if self._fetches_shared:
            self._fetches_shared = False
            self._link.unsubscribe(topics.shared(self._swarm_name, "+"))

    def _send_hello(self) -> None:
        with self._hello_lock:  # both threads send hellos; the last one must state the current state
            last = self._folder.last()
            hello = Hello(
                self._session, len(self._own), last.round, last.run, last.version, last.model_digest, __version__
            )
            self._publish("hello", wire.encode(hello))
        self._hello_at = time.monotonic() + self._hello_pause

    # --- in the worker's thread

    def run(self, stay: bool = False, keep_model: bool = False) -> None:
        """Work until the run is over, or with `stay` until `stop` is called.

        keep_model: save every w^g, not only the last one.
        """
        self._stays, self._saves_every_model = stay, keep_model
        self._link.open()
        try:
            while not self._stopped:
                with self._inbox.changed:
                    step = self._attempt(self._next_step)
                    if step is None:
                        self._inbox.changed.wait(_WAIT_SECONDS)
                if step is not None:
                    self._attempt(step)
                else:
                    self._repeat_hello()
                self._wait_log.update(self._wait_reason() if step is None else None)
        finally:
            self.leave()

    def stop(self) -> None:
        """End `run` soon; may be called from a signal handler."""
        self._stopped = True

    def leave(self) -> None:
        """Clear the retained status and close the connection."""
        self._publish("status", b"", retain=True)
        self._link.close()
        self._meter.save()

    def _attempt(self, step: Callable[[], _Result]) -> _Result | None:
        """Do a step; if that fails, give the run up and wait for another one."""
        assignment = self._inbox.assignment
        try:
            return step()
        except (ValueError, RuntimeError, ArithmeticError, MemoryError) as error:
            self._device = self._state = self._global = None
            self._given_up = assignment.run if assignment is not None else b""
            why = "not enough memory" if isinstance(error, MemoryError) else single_line(str(error)).rstrip(".")
            _log.warning("worker %s cannot take part in this run: %s. Waiting for another one", self._name, why)
            return None

    def _wait_reason(self) -> WaitReason:
        if not self._link.is_up():
            return BROKER
        with self._inbox.changed:
            return self._inbox.wait_reason(self._run, self._given_up)

    def _repeat_hello(self) -> None:
        """Send the hello again, at growing intervals, while this worker is not ready for the announced run."""
        assignment = self._inbox.assignment
        if assignment is None or self._run == assignment.run or self._inbox.run_is_over:
            return
        if time.monotonic() >= self._hello_at:
            self._hello_pause = min(2 * self._hello_pause, _HELLO_SECONDS[1])
            self._send_hello()

    def _next_step(self) -> _Step | None:
        """Return the next step for the stored messages, or None to wait; the caller holds the inbox lock."""
        inbox, assignment = self._inbox, self._inbox.assignment
        if assignment is None:
            return None
        if self._global is None or self._global.assignment is not assignment:
            self._global, self._fetches_models = GlobalModelHolder(assignment), False
        if inbox.welcome is not None and inbox.welcome.fresh:
            inbox.welcome.fresh = False
            forget = inbox.welcome.message.forget
            if forget:  # unless it has played on since its hello: then send a new hello
                return self._start_anew if forget == self._folder.last().round else self._send_hello
        if inbox.order_is_ahead:
            return self._fetch_everything
        if inbox.run_is_over:
            return self._next_at_the_end(self._global)
        if self._device is None or self._run != assignment.run:
            return self._next_preparation(assignment)
        return self._next_in_a_round(self._global)

    def _next_at_the_end(self, holder: GlobalModelHolder) -> _Step | None:
        """Finish when the trained model is here, or after a while without it; ask for it now and then."""
        order, now = self._inbox.order, time.monotonic()
        if order is None or not order.fresh:
            return None
        whole = not holder.assignment.frozen_bytes or self._shared_of(
            holder.assignment
        )  # a file needs the frozen weights
        here = self._trained.is_final(order.message) or (holder.update_to(order.message, self._inbox) and whole)
        if here or now >= order.since + _LAST_MODEL_SECONDS:
            order.fresh = False
            return partial(self._finish, order.message, holder)
        if now >= max(self._asked, order.since) + _ASK_SECONDS:
            self._asked = now
            return partial(self._fetch_model, holder)
        return self._next_fetch(holder)

    def _next_preparation(self, assignment: Assignment) -> _Step | None:
        """Prepare for a run when the welcome, the shared samples and the start model are here."""
        inbox, welcome = self._inbox, self._inbox.welcome
        if welcome is None or inbox.shared.digest != assignment.shared_digest or assignment.run == self._given_up:
            return None
        start, start_digest = b"", welcome.message.start_digest
        if start_digest == inbox.start.digest != NO_DIGEST:
            start = inbox.start.content
        elif start_digest != NO_DIGEST and self._folder.last().run != assignment.run:
            return None
        if not self._budget.may_begin():
            return None
        return partial(self._prepare, assignment, welcome.message.worker, inbox.shared.content, start)

    def _next_in_a_round(self, holder: GlobalModelHolder) -> _Step | None:
        """Carry out an order when its model is here, or answer an invitation."""
        order, invitation = self._inbox.order, self._inbox.invitation
        done = 0 if self._state is None else self._state.round
        if order is not None and order.fresh:
            if order.message.round <= done or holder.update_to(order.message, self._inbox):
                order.fresh = False
                return partial(self._answer_order, order.message, holder)
            fetch = self._next_fetch(holder)
            if fetch is not None:
                return fetch
        if invitation is not None and invitation.fresh and invitation.message.round <= done:
            invitation.fresh = False
            return partial(self._answer_invitation, invitation.message)
        return None

    def _next_fetch(self, holder: GlobalModelHolder) -> _Step | None:
        """Fetch the last whole model once if differences are missing: this worker was away for too long."""
        return partial(self._fetch_model, holder) if holder.relative and not self._fetches_models else None

    def _fetch_model(self, holder: GlobalModelHolder) -> None:
        self._fetches_models = holder.relative
        self._subscribe(topics.model)

    def _stop_fetching(self) -> None:
        if self._fetches_models:
            self._link.unsubscribe(topics.model(self._swarm_name, "+"))
            self._fetches_models = False

    def _prepare(self, assignment: Assignment, number: int, shared: bytes, start: bytes) -> None:
        """Build the model and the engine, and restore the saved state."""
        if shared and self._folder.load_shared(assignment.shared_digest, assignment.shared_size) is None:
            self._folder.save_shared(shared)
        self._device = self._state = None  # first: two at once would take twice the memory
        device = DeviceWorker(assignment, number, self._own, shared, self._budget.threads, self._attack)
        codec = assignment.codecs.up
        pack = codec.longest_pack(assignment.size) if codec.relative else 0
        self._state = self._folder.load(assignment.run, number, assignment.size, pack)
        if self._state is not None:
            device.restore(self._state)
        elif self._folder.last().run == assignment.run:  # damaged: the server may still count on it
            self._folder.forget()
            self._send_hello()
        if self._state is None and start:
            device.start(wire.weights_from_bytes(start))
        self._device, self._run = device, assignment.run
        self._hello_pause = _HELLO_SECONDS[0]
        resumed = f"; it continues after round {self._state.round}" if self._state is not None else ""
        _log.info("worker %s is number %d, %s samples%s", self._name, number, f"{len(self._own):,}", resumed)

    def _answer_order(self, order: OrderMessage, holder: GlobalModelHolder) -> None:
        """Carry an order out and send the claim or model; if it was carried out before, only send."""
        assert self._device is not None
        self._stop_fetching()
        state = self._state
        if state is not None and state.round == order.round and state.model_digest != order.model_digest:
            self._start_anew()  # it carried this round out with another global model
            return
        if self._saves_every_model and holder.digest == order.model_digest:
            self._trained.save(holder, order, self._shared_of(holder.assignment))
        if not wire.has_bit(order.participants, self._device.number):
            self._note_passed_over(self._device)
            return
        if self._passed_over >= _PASSED_OVER:
            _log.info("worker %s takes part in the run again", self._name)
        self._passed_over = 0
        if state is None or order.round > state.round:
            state = self._state = self._device.carry_out(order, holder.model)
            self._folder.save(state)
            self._meter.save(NOW_AND_THEN)
        if order.round != state.round:
            _log.warning("the server orders round %d, which is before this worker's state", order.round)
        elif order.task == "average":
            self._send_model(self._device, state)
        elif state.claim is not None:
            claim = ClaimMessage(self._run, state.round, state.claim.score, state.claim.commitment)
            self._publish("claim", wire.encode(claim))

    def _note_passed_over(self, device: DeviceWorker) -> None:
        """Warn once if this worker is left out of rounds in which all workers should take part."""
        self._passed_over += 1
        if self._passed_over == _PASSED_OVER and device.assignment.spec.participation == 1.0:
            _log.warning(
                "worker %s takes no part in the run any more: the server has banned it, or its roster does not name "
                "it. See events.jsonl and rounds.jsonl in the server's folder",
                self._name,
            )

    def _answer_invitation(self, invitation: Invitation) -> None:
        """Upload the model behind a claim, if this worker has made that claim."""
        state = self._state
        if self._device is None or state is None or invitation.round != state.round:
            return
        if invitation.claim == wire.pack_claim(state.claim):
            self._send_model(self._device, state)
        else:  # its state was lost since, or another process uses its name
            _log.warning("worker %s is invited for a claim that it has not made; not answering", self._name)

    def _send_model(self, device: DeviceWorker, state: WorkerState) -> None:
        while not self._link.settled(_WAIT_SECONDS):  # or repeated invitations would fill this machine's memory
            if self._stopped:
                return
        upload = device.upload()
        if upload is not None:
            self._note_sent(state.round, len(upload))
            for piece in wire.split_content(self._run, state.round, upload):
                self._publish(f"upload/{piece.index}", wire.encode(piece))

    def _note_sent(self, round_number: int, size: int) -> None:
        """Warn once per round if the server asks for a model again and again: it does not arrive there."""
        self._sent = self._sent + 1 if self._sent_in == round_number else 1
        self._sent_in = round_number
        if self._sent == _SENT_IN_VAIN:
            _log.warning(
                "worker %s has sent its model of %s in %d pieces %d times in round %d, and the server still asks for "
                "it: the broker does not pass it on whole. Is it larger than --largest-model of `cbdsl provision`?",
                self._name, format_bytes(size), wire.piece_count(size), self._sent, round_number,
            )  # fmt: skip

    def _start_anew(self) -> None:
        """Delete the saved state, which belongs to rounds that the server does not have, and start as a new worker."""
        _log.warning(
            "worker %s: the server was restored to an earlier round; starting again from the global model", self._name
        )
        with self._hello_lock:
            self._folder.forget()
        self._device, self._state, self._run = None, None, b""
        self._fetch_everything()

    def _fetch_everything(self) -> None:
        """Fetch all retained messages again: those of a restored server look older than those that are here."""
        self._inbox.reset()
        self._link.subscribe(topics.spec(self._swarm_name))

    def _finish(self, order: OrderMessage, holder: GlobalModelHolder) -> None:
        """Save the trained model. End, unless this worker stays or had finished this run before."""
        self._stop_fetching()
        self._leave_shared()
        had_it = self._trained.is_final(order)
        was_ready = self._device is not None and self._run == order.run
        took_part = self._inbox.welcome is not None or self._folder.last().run == order.run
        self._device = None  # frees its memory
        if not had_it:
            self._trained.save_final(holder, order, self._shared_of(holder.assignment))
        if not self._stays and (was_ready or (took_part and not had_it)):
            self._stopped = True
        _log.info("worker %s: the run is over", self._name)

    def _shared_of(self, assignment: Assignment) -> bytes:
        """Return what is shared in this run; empty if it is not here."""
        shared = self._inbox.shared
        return shared.content if shared.digest == assignment.shared_digest else b""

    def _subscribe(self, topic: Callable[[str, str], str]) -> None:
        """Subscribe to all pieces of a kind; those that are retained are sent again."""
        self._link.subscribe(topic(self._swarm_name, "+"))

    def _publish(self, kind: str, payload: bytes, retain: bool = False) -> None:
        self._link.publish(topics.from_worker(self._swarm_name, self._name, kind), payload, retain)
