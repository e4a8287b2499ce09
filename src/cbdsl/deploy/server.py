"""The swarm that lives on a network: the `Swarm` protocol of `cbdsl.protocol.server` over a broker.

Carries orders to the workers and their answers back. Rounds close at a quorum or a deadline. It judges no claim, and
what it hears in a round is in the journal before anybody decides on it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from cbdsl.arrays import Floats
from cbdsl.codecs.travel import Codecs
from cbdsl.deploy import topics, wire
from cbdsl.deploy.deadlines import Deadlines
from cbdsl.deploy.events import Events
from cbdsl.deploy.inbox import Inbox
from cbdsl.deploy.journal import Journal
from cbdsl.deploy.link import Address, Link
from cbdsl.deploy.roster import Roster
from cbdsl.deploy.wire import Announcement, Hello, Invitation, OrderMessage, Welcome
from cbdsl.errors import UserError
from cbdsl.protocol.messages import Claim, Order, Upload, WorkerId
from cbdsl.protocol.releases import keyframe_before
from cbdsl.workers.local import KEPT_VERSIONS, VERSION_BYTES

_log = logging.getLogger("cbdsl.deploy")

_NOTHING = bytes(wire.DIGEST_BYTES)
_NUDGE_SECONDS = 10.0  # an answer that is missing for so long is asked for again: a broker may have dropped a message
_FAREWELL_SECONDS = 5.0  # how long the end of a run waits for workers to hear of it

MakeLink = Callable[[Callable[[str, bytes], None], Callable[[], None]], Link]
"""Connects: given what to call with a message, and what to call after every connection."""


@dataclass(frozen=True)
class ServerConfig:
    """Where a server sits: the swarm's name, the broker, how long to wait, and who may come (anybody, if empty)."""

    swarm: str
    address: Address
    deadlines: Deadlines = field(default_factory=Deadlines)
    names: tuple[str, ...] = ()


class NetworkSwarm:
    """Workers behind a broker. The main thread plays rounds; the link's thread hands messages in."""

    def __init__(  # noqa: PLR0913 - the last ones by name
        self,
        config: ServerConfig,
        announcement: Announcement,
        shared: bytes,
        roster: Roster,
        journal: Journal,
        events: Events,
        *,
        codecs: Codecs,
        starts: Sequence[Floats] = (),
    ) -> None:
        """codecs: how models travel. starts: the model each worker starts from, where workers start apart."""
        self._swarm, self._deadlines = config.swarm, config.deadlines
        self._run, self._roster, self._journal, self._events = announcement.run, roster, journal, events
        self._starts = [wire.weights_to_bytes(start) for start in starts]
        numbers = announcement.size * announcement.vectors
        self._codecs = codecs
        sizes = (VERSION_BYTES + 1, VERSION_BYTES + 1 + codecs.up.longest(numbers))
        if not codecs.up.relative:
            sizes = (4 * numbers, 4 * numbers)
        self.inbox = Inbox(config.swarm, self._run, sizes, roster, events, config.deadlines.grace_seconds)
        self._lock, self._link = threading.Lock(), None  # type: tuple[threading.Lock, Link | None]
        self._retained: dict[str, bytes] = {}
        self._asked: set[WorkerId] = set()  # who holds an invitation
        self._gathering = True
        self._model, self._version = _NOTHING, 0
        self._retain(topics.spec(config.swarm), wire.encode(announcement))
        if shared:
            for piece in wire.pieces(self._run, 0, shared):
                self._retain(topics.shared(config.swarm, piece.index), wire.encode(piece))

    # --- the connection

    def start(self, make_link: MakeLink) -> None:
        """Connect and listen."""
        self._link = make_link(self.handle, self.greet)
        self._link.subscribe(topics.from_all(self._swarm))
        self._link.open()

    def greet(self) -> None:
        """After every connection: say again all that is retained, for the broker may have forgotten it."""
        with self._lock:
            retained = list(self._retained.items())
        for topic, payload in retained:
            self._send(topic, payload, retain=True)

    def handle(self, topic: str, payload: bytes) -> None:
        """Take a message from the link."""
        hello = self.inbox.handle(topic, payload)
        if hello is None:
            return
        if not self._gathering:
            for name in self.inbox.enrol():
                self._events.note("enrolled", worker=name)
        sender = topics.origin(self._swarm, topic)
        if sender is not None:
            self._welcome(sender.worker, hello)

    def gather(self) -> None:
        """Wait until everybody is there, or until those who are not have had their time."""
        for _ in range(self._deadlines.patience):
            self._until(lambda: len(self.inbox.online()) >= self._roster.places, self._deadlines.join_seconds)
            if self.inbox.online():
                break
            _log.warning("no worker has connected yet; waiting")
        else:
            raise UserError("No worker came. Start some: cbdsl work --id NAME --broker ADDRESS --data FILE.npz")
        self._gathering = False
        for name in self.inbox.enrol():
            self._welcome(name, None)
        present = self.inbox.online()
        self._events.note("gathered", present=present, missing=sorted(set(self._roster.names) - set(present)))

    def finish(self, round_number: int) -> None:
        """Tell the workers that the run is over, then leave nothing behind on the broker."""
        order_message = OrderMessage(self._run, round_number, "finish", b"", 0.0, 0.0, self._version, self._model)
        self._retain(topics.order(self._swarm), wire.encode(order_message))
        self._until(lambda: not self.inbox.online(), _FAREWELL_SECONDS)
        with self._lock:
            retained, self._retained = list(self._retained), {}
        for topic in retained:
            self._send(topic, b"", retain=True)

    def close(self) -> None:
        """Leave the broker."""
        if self._link is not None:
            self._link.close()
            self._link = None

    # --- the Swarm protocol

    def report(self, order: Order) -> Mapping[WorkerId, Claim]:
        """See `Swarm.report`; closes at the quorum or the deadline."""
        started = time.monotonic()
        self._roster.save()
        if order.global_best is not None:
            self.set_model(order.global_best, order.version, order.updates)
        self._journal.begin(order.round)
        self.inbox.begin(order.round, order.task, order.participants)
        order_message = OrderMessage(
            self._run, order.round, order.task, wire.bits_of(order.participants), float(order.inertia),
            float(order.learning_rate), self._version, self._model,
        )  # fmt: skip
        self._retain(topics.order(self._swarm), wire.encode(order_message))
        if order.task == "average":
            return {}
        if self._journal.claims is not None:  # an earlier process had heard them all
            self.inbox.close_claims()
            return self._journal.claims
        open_round = self.inbox.open_round
        self._collect(lambda: open_round.claims, self._deadlines.round_seconds, self._order_again)
        claims = self.inbox.close_claims()
        self._journal.note_claims(claims)
        self._note_closed(order, claims, started)
        return claims

    def upload(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, Upload]:
        """See `Swarm.upload`; whoever is silent at the deadline is missing."""
        if self.inbox.open_round.task == "average":
            return self._upload_unasked(workers)
        heard = {worker: self._journal.uploads[worker] for worker in workers if worker in self._journal.uploads}
        asked = [worker for worker in workers if worker not in heard]
        models = self._upload_invited(asked) if asked else {}
        for worker in asked:
            heard[worker] = models.get(worker)
            self._journal.note_upload(worker, heard[worker])
            if heard[worker] is None:
                self._events.note("silent", round=self.inbox.open_round.round, worker=self._roster.name(worker))
        return {worker: model for worker, model in heard.items() if model is not None}

    def set_model(self, model: Floats, version: int, updates: Sequence[bytes], keyframe: Floats | None = None) -> None:
        """Put w^g (V D,) where every worker can fetch it: what leads to it, and now and then the whole.

        keyframe: the last version that was put out whole, after a restart.
        """
        content = wire.weights_to_bytes(model)
        self._model = wire.digest_of(content)
        first = version + 1 - len(updates)
        for number, update in enumerate(updates, first):
            if number > self._version:
                for piece in wire.pieces(self._run, number, update):
                    slot = topics.update(self._swarm, number % KEPT_VERSIONS, piece.index)
                    self._retain(slot, wire.encode(piece))
        whole = keyframe_before(version) if self._codecs.down.relative else version
        if whole > self._version or (whole and keyframe is not None):
            content = wire.weights_to_bytes(model if whole == version or keyframe is None else keyframe)
            for piece in wire.pieces(self._run, whole, content):
                self._retain(topics.model(self._swarm, piece.index), wire.encode(piece))
        self._version = version

    def _upload_invited(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, Upload]:
        """The models of workers that are asked for them."""
        open_round = self.inbox.open_round
        self.inbox.invite(workers)
        self._asked = set(workers)
        for worker in workers:
            self._invite(worker)

        def settled() -> bool:
            done = open_round.models.keys() | open_round.spoilt
            return all(worker in done or not self.inbox.is_there(worker) for worker in workers)

        # Who stalls here has claimed in time, and its next claim is waited for; the server's back-off deals with it.
        self._until(settled, self._deadlines.upload_seconds, self._nudge_uploads(workers))
        self._asked = set()
        return self.inbox.close_uploads(workers)

    def _upload_unasked(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, Upload]:
        """The models of a round in which everybody sends one."""
        started, open_round = time.monotonic(), self.inbox.open_round
        answers = lambda: open_round.models.keys() | open_round.spoilt  # noqa: E731
        self._collect(answers, self._deadlines.round_seconds, self._nudge_uploads(workers))
        models = self.inbox.close_uploads(workers)
        missing = [self._roster.name(worker) for worker in workers if worker not in models]
        self._events.note(
            "closed", round=open_round.round, answered=len(models), missing=missing,
            seconds=round(time.monotonic() - started, 3),
        )  # fmt: skip
        return models

    def _collect(
        self, answers: Callable[[], Collection[WorkerId]], seconds: float, nudge: Callable[[], None] | None = None
    ) -> None:
        """Wait for the quorum or the deadline, and past the deadline for the first answer."""
        open_round = self.inbox.open_round
        if not open_round.participants:
            return
        for _ in range(self._deadlines.patience):
            if self._until(lambda: self.inbox.settled(answers(), self._deadlines.needed), seconds, nudge):
                return
            self.inbox.overlook(open_round.participants - set(answers()))
            if answers():
                return
            _log.warning("round %d: nobody answered in time; still waiting", open_round.round)
        raise UserError(
            f"Round {open_round.round}: nobody answered {self._deadlines.patience} times in {seconds:g} seconds. "
            "Are the workers running? The same command goes on with the run."
        )

    # --- talking

    def _welcome(self, name: str, hello: Hello | None) -> None:
        """Tell a worker its number, its start if it has none, and again what it may have missed."""
        number = self._roster.number(name)
        if number is None:
            return
        start = self._starts[number] if number < len(self._starts) else b""
        welcome = Welcome(self._run, number, wire.digest_of(start) if start else _NOTHING)
        self._send(topics.to_worker(self._swarm, name, "welcome"), wire.encode(welcome))
        if start and (hello is None or hello.run != self._run):
            for piece in wire.pieces(self._run, 0, start):
                self._send(topics.to_worker(self._swarm, name, f"start/{piece.index}"), wire.encode(piece))
        if number in self._asked:
            self._invite(number)

    def _invite(self, worker: WorkerId) -> None:
        invitation = Invitation(self._run, self.inbox.open_round.round)
        topic = topics.to_worker(self._swarm, self._roster.name(worker), "invitation")
        self._send(topic, wire.encode(invitation))

    def _nudge_uploads(self, workers: Sequence[WorkerId]) -> Callable[[], None]:
        """Asks again for every model of which nothing new has come since it was last asked for."""
        open_round, before = self.inbox.open_round, dict.fromkeys(workers, 0)

        def nudge() -> None:
            for worker in before.keys() - open_round.models.keys() - open_round.spoilt:
                assembly = open_round.assemblies.get(worker)
                missing = assembly.missing if assembly is not None else 0
                if missing == before[worker]:
                    self._invite(worker)
                before[worker] = missing

        return nudge

    def _note_closed(self, order: Order, claims: Mapping[WorkerId, Claim], started: float) -> None:
        missing = [self._roster.name(worker) for worker in order.participants if worker not in claims]
        self._events.note(
            "closed", round=order.round, answered=len(claims), missing=missing,
            seconds=round(time.monotonic() - started, 3),
        )  # fmt: skip

    def _order_again(self) -> None:
        """Who has answered answers again, which costs a message; who was not reached is."""
        topic = topics.order(self._swarm)
        self._send(topic, self._retained[topic], retain=True)

    def _until(self, done: Callable[[], bool], seconds: float, nudge: Callable[[], None] | None = None) -> bool:
        """Wait until a condition holds, nudging whoever it depends on now and then; returns whether it does."""
        left = seconds
        while True:
            turn = min(left, _NUDGE_SECONDS) if nudge else left
            if self.inbox.until(done, turn, lambda: self._link is not None and self._link.is_up()):
                return True
            left -= turn
            if left <= 0 or nudge is None:
                return False
            nudge()

    def _retain(self, topic: str, payload: bytes) -> None:
        with self._lock:
            self._retained[topic] = payload
        if self._link is not None and self._link.is_up():  # otherwise `greet` says it
            self._send(topic, payload, retain=True)

    def _send(self, topic: str, payload: bytes, retain: bool = False) -> None:
        link = self._link
        if link is not None:
            link.publish(topic, payload, retain)
