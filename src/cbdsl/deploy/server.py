"""The swarm that lives on a network: the `Swarm` protocol of `cbdsl.protocol.server` over a broker.

Carries orders to the workers and their answers back. Rounds close at a quorum or a deadline. It judges no claim, and
what it hears in a round is in the journal before anybody decides on it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from cbdsl.arrays import Floats
from cbdsl.codecs.travel import Codecs, longest_update
from cbdsl.deploy import topics, wire
from cbdsl.deploy.deadlines import Deadlines
from cbdsl.deploy.events import Events
from cbdsl.deploy.inbox import Inbox
from cbdsl.deploy.journal import Journal
from cbdsl.deploy.link import Address, Link
from cbdsl.deploy.patience import upload_limit
from cbdsl.deploy.phases import Phases
from cbdsl.deploy.roster import Roster
from cbdsl.deploy.wire import Announcement, Hello, Invitation, OrderMessage, Welcome
from cbdsl.errors import UserError
from cbdsl.protocol.messages import Claim, Order, Upload, WorkerId
from cbdsl.protocol.releases import keyframe_before
from cbdsl.workers.local import KEPT_VERSIONS, VERSION_BYTES

_log = logging.getLogger("cbdsl.deploy")

_NOTHING = bytes(wire.DIGEST_BYTES)
_FAREWELL_SECONDS = 5.0  # how long the end of a run waits for workers to hear of it
_LONGEST_FAREWELL = 30.0  # and for the broker, if that is away
_START_SECONDS = 10.0  # a start model is sent to a worker once in so long, however often it says hello
_UPLOADS_SEEN = 64  # the last ones, whose times say how long the next may take

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
        played: int = 0,
    ) -> None:
        """codecs: how models travel. starts: the model each worker starts from, where workers start apart.

        played: the last round that is over.
        """
        self._swarm, self._deadlines = config.swarm, config.deadlines
        self._run, self._roster, self._journal, self._events = announcement.run, roster, journal, events
        self._starts = [wire.weights_to_bytes(start) for start in starts]
        numbers = announcement.size * announcement.vectors
        self._codecs = codecs
        sizes = (VERSION_BYTES + 1, VERSION_BYTES + 1 + codecs.up.longest(numbers))
        if not codecs.up.relative:
            sizes = (4 * numbers, 4 * numbers)
        self.inbox = Inbox(config.swarm, self._run, sizes, roster, events, config.deadlines, self._is_astray)
        self._lock, self._link = threading.Lock(), None  # type: tuple[threading.Lock, Link | None]
        self._retained: dict[str, bytes] = {}
        pieces = range(wire.piece_count(longest_update(codecs, numbers)) if codecs.down.relative else 0)
        slots = [topics.update(config.swarm, slot, piece) for slot in range(KEPT_VERSIONS) for piece in pieces]
        self._changing = (topics.order(config.swarm), *slots)  # topics whose content changes from round to round
        self._claims: Mapping[WorkerId, Claim] = {}  # of the round that is played
        self._asked: set[WorkerId] = set()  # who holds an invitation
        self._gathering = True
        self._played, self._model, self._version = played, _NOTHING, 0
        self._digests: dict[int, bytes] = {}  # of the last versions of w^g
        self._started: dict[str, float] = {}  # when a start model was last sent to a worker
        self._upload_times: deque[float] = deque(maxlen=_UPLOADS_SEEN)
        self.phases = Phases()
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
        """After every connection: say again all that is retained, for the broker may have forgotten it.

        And clear what an earlier process left there that is not so any more, such as the order of a later round. The
        announcement comes last: whoever hears it may fetch the rest.
        """
        with self._lock:
            retained = dict.fromkeys(self._changing, b"") | self._retained
        announcement = topics.spec(self._swarm)
        for topic in sorted(retained, key=lambda one: one == announcement):
            self._send(topic, retained[topic], retain=True)

    def handle(self, topic: str, payload: bytes) -> None:
        """Take a message from the link."""
        hello, sender = self.inbox.handle(topic, payload), topics.origin(self._swarm, topic)
        if hello is None or sender is None:
            return
        enrolled = [] if self._gathering else self.inbox.enrol()
        for name in enrolled:
            self._events.note("enrolled", worker=name)
            self._welcome(name, None)
        if sender.worker not in enrolled:
            self._welcome(sender.worker, hello)

    def gather(self) -> None:
        """Wait until everybody is there, or until those who are not have had their time."""
        for _ in range(self._deadlines.patience):
            self._until(lambda: self.inbox.present() >= self._roster.places, self._deadlines.join_seconds)
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
        self._events.note("over", round=round_number)  # whoever leaves from here on has done its part
        self._retain(topics.order(self._swarm), wire.encode(order_message))
        gone = time.monotonic() + _LONGEST_FAREWELL  # without a broker, too

        def over() -> bool:
            return (self.inbox.somebody_came() and not self.inbox.present()) or time.monotonic() > gone

        self._until(over, _FAREWELL_SECONDS)
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
        self.phases.begin()
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
            self._claims = self.inbox.close_claims(self._journal.claims)
            return self._claims
        open_round = self.inbox.open_round
        self._collect(lambda: open_round.claims, self._order_again)
        claims = self._claims = self.inbox.close_claims()
        self.phases.answered(time.monotonic() - started, open_round.times.values())
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

    def recall(self, version: int, references: Sequence[Floats]) -> None:
        """The last versions of w^g, (D,) each and the present one last: by them a worker's state is recognised."""
        for age, reference in enumerate(reversed(references)):
            self._digests[version - age] = wire.digest_of(wire.weights_to_bytes(reference))

    def set_model(self, model: Floats, version: int, updates: Sequence[bytes], keyframe: Floats | None = None) -> None:
        """Put w^g (V D,) where every worker can fetch it: what leads to it, and now and then the whole.

        keyframe: the last version that was put out whole, after a restart.
        """
        content = wire.weights_to_bytes(model)
        self._model = wire.digest_of(content)
        self._digests = {one: digest for one, digest in self._digests.items() if one > version - KEPT_VERSIONS}
        self._digests[version] = self._model
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
        started, limit = time.monotonic(), upload_limit(self._upload_times, self._deadlines)
        self._until(settled, limit, self._nudge_uploads(workers))
        self._asked = set()
        models = self.inbox.close_uploads(workers)
        self.phases.uploaded(time.monotonic() - started)
        if models:
            self._upload_times.append(time.monotonic() - started)
        return models

    def _upload_unasked(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, Upload]:
        """The models of a round in which everybody sends one."""
        started, open_round = time.monotonic(), self.inbox.open_round
        answers = lambda: open_round.models.keys() | open_round.spoilt  # noqa: E731
        self._collect(answers, self._nudge_uploads(workers))
        models = self.inbox.close_uploads(workers)
        self.phases.answered(time.monotonic() - started, open_round.times.values())
        missing = [self._roster.name(worker) for worker in workers if worker not in models]
        self._events.note(
            "closed", round=open_round.round, answered=len(models), missing=missing,
            seconds=round(time.monotonic() - started, 3),
        )  # fmt: skip
        return models

    def _collect(self, answers: Callable[[], Collection[WorkerId]], nudge: Callable[[], None]) -> None:
        """Wait for the quorum or the deadline, and past the deadline for the first answer."""
        open_round, deadlines = self.inbox.open_round, self._deadlines
        if not open_round.participants:
            return
        awaited = (0, 0.0)

        def settled() -> bool:
            nonlocal awaited
            awaited = self.inbox.awaited(answers())
            return len(answers()) >= deadlines.needed(awaited[0])

        for _ in range(deadlines.patience):
            in_time = self._until(settled, lambda: self.inbox.limit(*awaited), nudge)
            self.inbox.account(answers(), in_time)
            if in_time or answers():
                return
            _log.warning("round %d: nobody answered in time; still waiting", open_round.round)
        raise UserError(
            f"Round {open_round.round}: nobody answered {deadlines.patience} times in {deadlines.round_seconds:g} "
            "seconds. Are the workers running? The same command goes on with the run."
        )

    # --- talking

    def _welcome(self, name: str, hello: Hello | None) -> None:
        """Tell a worker its number, its start if it has none, and again what it may have missed."""
        number = self._roster.number(name)
        if number is None:
            return
        start = self._starts[number] if number < len(self._starts) else b""
        forget = hello.round if hello is not None and self._is_astray(hello) else 0
        digest = wire.digest_of(start) if start else _NOTHING
        welcome = Welcome(self._run, number, digest, forget, self._newest())
        self._send(topics.to_worker(self._swarm, name, "welcome"), wire.encode(welcome))
        now = time.monotonic()
        if start and (hello is None or hello.run != self._run) and now >= self._started.get(name, 0) + _START_SECONDS:
            self._started[name] = now
            for piece in wire.pieces(self._run, 0, start):
                self._send(topics.to_worker(self._swarm, name, f"start/{piece.index}"), wire.encode(piece))
        if number in self._asked:
            self._invite(number)

    def _is_astray(self, hello: Hello) -> bool:
        """Whether a worker's state is of a history that this server does not know: its folder went back in time.

        Then it is ahead of the server, or the w^g that it had is not the one of that version. A version that the server
        no longer keeps does not matter: nothing is decoded with it.
        """
        if hello.run != self._run:
            return False
        ahead = hello.round > self._newest()
        other = self._digests.get(hello.model_version, hello.model_digest) != hello.model_digest
        return ahead or other or hello.model_version > self._version

    def _newest(self) -> int:
        """The last round of which a worker can have an order, or a state."""
        return max(self._played + 1, self.inbox.open_round.round)

    def _invite(self, worker: WorkerId) -> None:
        invitation = Invitation(self._run, self.inbox.open_round.round, wire.said(self._claims.get(worker)))
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

    def _until(
        self, done: Callable[[], bool], limit: float | Callable[[], float], nudge: Callable[[], None] | None = None
    ) -> bool:
        """Wait until a condition holds, for at most `limit` seconds; returns whether it does."""
        return self.inbox.until(
            done,
            limit if callable(limit) else lambda: limit,
            lambda: self._link is not None and self._link.is_up(),
            nudge,
        )

    def _retain(self, topic: str, payload: bytes) -> None:
        with self._lock:
            self._retained[topic] = payload
        if self._link is not None and self._link.is_up():  # otherwise `greet` says it
            self._send(topic, payload, retain=True)

    def _send(self, topic: str, payload: bytes, retain: bool = False) -> None:
        link = self._link
        if link is not None:
            link.publish(topic, payload, retain)
