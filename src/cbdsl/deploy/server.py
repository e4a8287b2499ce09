"""The swarm that lives on a network: the `Swarm` protocol of `cbdsl.protocol.server` over a broker.

Carries orders to the workers and their answers back. Rounds close at a quorum or a deadline. It judges no claim, and
what it hears in a round is in the journal before anybody decides on it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
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
from cbdsl.deploy.notices import Notices
from cbdsl.deploy.patience import upload_limit
from cbdsl.deploy.phases import Phases
from cbdsl.deploy.roster import Roster, RosterFile
from cbdsl.deploy.wire import Announcement, Hello, Invitation, OrderMessage, Welcome
from cbdsl.errors import UserError
from cbdsl.protocol.messages import Claim, Order, Upload, WorkerId
from cbdsl.workers.local import VERSION_BYTES

_log = logging.getLogger("cbdsl.deploy")

_FAREWELL_SECONDS = 5.0  # how long the end of a run waits for workers to hear of it
_LONGEST_FAREWELL = 30.0  # and for the broker, if that is away
_SLOW_LINE = 20_000  # bytes a second, with which what is left for the broker should be there
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
    roster: RosterFile | None = None  # the file that the names are from: it may change while the run is played


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
        sizes = (VERSION_BYTES + 1, VERSION_BYTES + 1 + codecs.up.longest(numbers))
        if not codecs.up.relative:
            sizes = (4 * numbers, 4 * numbers)
        self.inbox = Inbox(config.swarm, self._run, sizes, roster, events, config.deadlines, self._is_astray)
        self._roster_file = config.roster
        self._link: Link | None = None
        if config.names:
            self._follow(config.names)
        self.notices = Notices(config.swarm, announcement, shared, codecs, self._retain)
        self._claims: Mapping[WorkerId, Claim] = {}  # of the round that is played
        self._asked: set[WorkerId] = set()  # who holds an invitation
        self._gathering = True
        self._played = played
        self._started: dict[str, float] = {}  # when a start model was last sent to a worker
        self._upload_times: deque[float] = deque(maxlen=_UPLOADS_SEEN)
        self.phases = Phases()

    # --- the connection

    def start(self, make_link: MakeLink) -> None:
        """Connect and listen."""
        self._link = make_link(self.handle, self._greet)
        self._link.subscribe(topics.from_all(self._swarm))
        self._link.open()

    def _greet(self) -> None:
        """After every connection: whatever the broker has forgotten, or still has of an earlier process."""
        self.notices.say_again()

    def handle(self, topic: str, payload: bytes) -> None:
        """Take a message from the link."""
        hello, sender = self.inbox.handle(topic, payload), topics.origin(self._swarm, topic)
        if hello is None or sender is None:
            return
        enrolled = [] if self._gathering else self.inbox.enrol()
        for name in enrolled:
            self._events.note("enrolled", worker=name, members=self._roster.places)
            self._welcome(name, None)
        if sender.worker not in enrolled:
            self._welcome(sender.worker, hello)

    def gather(self) -> None:
        """Wait until everybody is there, or until those who are not have had their time."""
        for _ in range(self._deadlines.patience):
            self._look_at_roster()
            everybody = lambda: self.inbox.present() >= self._roster.places  # noqa: E731
            self._until(everybody, self._deadlines.join_seconds, self._look_at_roster)
            if self.inbox.online():
                break
            _log.warning("no worker has connected yet; waiting")
        else:
            raise UserError("No worker came. Start some: cbdsl work --id NAME --broker ADDRESS --data FILE.npz")
        self._gathering = False
        for name in self.inbox.enrol():
            self._welcome(name, None)
        present = self.inbox.online()
        self._events.note("gathered", present=present, missing=sorted(set(self._roster.listed()) - set(present)))

    def members(self) -> Sequence[WorkerId]:
        """Who is in the swarm now: the roster's file may have changed."""
        self._look_at_roster()
        return self._roster.members()

    def _look_at_roster(self) -> None:
        if self._roster_file is not None and self._roster_file.has_changed():
            self._follow(self._roster_file.names)

    def _follow(self, names: Sequence[str]) -> None:
        """Let newcomers in, and those go who are not named any more."""
        try:
            joined, left = self._roster.follow(names)
        except UserError as error:
            _log.warning("%s The swarm stays as it is", error)
            return
        self.inbox.dismiss(left)
        if joined and self._link is not None:  # it may be listening to each member by name
            self._link.subscribe(topics.from_all(self._swarm))
        for event, changed in (("enrolled", joined), ("left", left)):
            for name in changed:
                self._events.note(event, worker=name, members=self._roster.places)

    def finish(self, round_number: int, model: Floats, version: int, updates: Sequence[bytes]) -> None:
        """Tell the workers that the run is over, and what it came to: w^g (V D,), as in `Notices`.

        Announcement, last order and w^g stay on the broker until the next run, for those who are away now.
        """
        self.notices.set_last_model(model, version, updates)
        order_message = OrderMessage(
            self._run, round_number, "finish", b"", 0.0, 0.0, self.notices.version, self.notices.model
        )
        self._events.note("over", round=round_number)  # whoever leaves from here on has done its part
        self.notices.order(order_message)
        gone = time.monotonic() + _LONGEST_FAREWELL  # without a broker, too

        def over() -> bool:
            return (self.inbox.somebody_came() and not self.inbox.present()) or time.monotonic() > gone

        self._until(over, _FAREWELL_SECONDS)
        self.notices.clear()
        if not self._delivered(_FAREWELL_SECONDS + self.notices.bytes_left() / _SLOW_LINE):
            _log.warning(
                "the broker has not taken all that it should keep of this run: devices that were away would not get "
                "the trained model. Give the same command again when the broker can be reached"
            )

    def _delivered(self, seconds: float) -> bool:
        """Whether the broker has taken what was sent to it; waits for so long."""
        last = time.monotonic() + seconds
        while (link := self._link) is not None and link.is_up():
            if link.settled(1.0):
                return True
            if time.monotonic() > last:
                return False
        return False

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
            self.notices.set_model(order.global_best, order.version, order.updates)
        self._journal.begin(order.round)
        self.inbox.begin(order.round, order.task, order.participants)
        order_message = OrderMessage(
            self._run, order.round, order.task, wire.bits_of(order.participants), float(order.inertia),
            float(order.learning_rate), self.notices.version, self.notices.model,
        )  # fmt: skip
        self.notices.order(order_message)
        if order.task == "average":
            return {}
        if self._journal.claims is not None:  # an earlier process had heard them all
            self._claims = self.inbox.close_claims(self._journal.claims)
            return self._claims
        open_round = self.inbox.open_round
        self._collect(lambda: open_round.claims, self.notices.order_again)
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
        awaited = (0, 0.0)

        def settled() -> bool:
            nonlocal awaited
            awaited = self.inbox.awaited(answers())
            return len(answers()) >= deadlines.needed(awaited[0]) or deserted()

        def deserted() -> bool:
            """Whether everybody who was to answer has left the swarm since."""
            return all(self._roster.has_left(self._roster.name(worker)) for worker in open_round.participants)

        def look() -> None:
            self._look_at_roster()
            nudge()

        for _ in range(deadlines.patience):
            in_time = self._until(settled, lambda: self.inbox.limit(*awaited), look)
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
        digest = wire.digest_of(start) if start else wire.NO_DIGEST
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
        other = self.notices.digests.get(hello.model_version, hello.model_digest) != hello.model_digest
        return ahead or other or hello.model_version > self.notices.version

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
        if self._link is not None and self._link.is_up():  # otherwise `greet` says it
            self._send(topic, payload, retain=True)

    def _send(self, topic: str, payload: bytes, retain: bool = False) -> None:
        link = self._link
        if link is not None:
            link.publish(topic, payload, retain)
