"""The server's side of a run over MQTT: `NetworkSwarm` sends orders and collects claims and models.

Two threads take part. The link's thread calls `handle` with each message: its sender is charged, the message is decoded
and noted in the open round. The main thread waits in `report` and `upload` until the round is settled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cbdsl.algorithm.broadcast import keyframe_before
from cbdsl.algorithm.messages import Claim, Order, Upload, WorkerId
from cbdsl.arrays import Floats
from cbdsl.codecs.envelope import KEPT_VERSIONS, VERSION_BYTES, Codecs, longest_update
from cbdsl.errors import UserError
from cbdsl.network import topics, wire
from cbdsl.network.journal import Events, Journal
from cbdsl.network.mqtt import Address, Link
from cbdsl.network.roster import Roster, RosterFile
from cbdsl.network.timeouts import Deadlines, RateLimiter, WorkerAvailability, upload_limit
from cbdsl.network.topics import MessageOrigin
from cbdsl.network.wire import (
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

_log = logging.getLogger("cbdsl.network")

REPEAT_SECONDS = 10.0  # a missing answer is requested again after this time: a broker may have dropped a message
_TICK = 0.25  # seconds: longest wait before a condition is checked again
_QUICK_CHECK = 0.001  # seconds: a check that takes longer is not repeated at every message
_MOST_NEWCOMERS = 1000  # workers waiting for a number; more if the roster has more places
_FINISH_SECONDS = 5.0  # how long the end of a run waits for workers to receive it
_LONGEST_FINISH_SECONDS = 30.0  # and for the broker, if it is away
_SLOW_CONNECTION = 20_000  # bytes per second at which the broker should take the last messages
_START_SECONDS = 10.0  # a start model is sent to a worker at most once in this time, however many hellos it sends
_UPLOADS_SEEN = 64  # the last uploads, whose times limit the next one
_LEFT_BEHIND = 40  # pieces that an earlier run's model may have: 1,000,000 numbers, as many as brokers allow for

MakeLink = Callable[[Callable[[str, bytes], None], Callable[[], None]], Link]
"""Builds a link from the function to call with a message, and the one to call after every connection."""


@dataclass(frozen=True)
class ServerConfig:
    """Settings of a server: the swarm's name, broker, timeouts, and workers' names (empty: any worker may join)."""

    swarm: str
    address: Address
    deadlines: Deadlines = field(default_factory=Deadlines)
    names: tuple[str, ...] = ()
    roster: RosterFile | None = None  # the file that the names are from: it may change during the run


@dataclass
class OpenRound:
    """The messages received in the current round; each round has a new object."""

    round: int = 0
    task: Literal["swarm", "average"] = "swarm"
    participants: frozenset[WorkerId] = frozenset()
    accepts_claims: bool = False
    claims: dict[WorkerId, Claim] = field(default_factory=dict)
    invited: set[WorkerId] = field(default_factory=set)  # whose pieces are accepted
    assemblies: dict[WorkerId, Assembly] = field(default_factory=dict)
    missing: dict[WorkerId, int] = field(default_factory=dict)  # pieces missing at the last repeated request
    models: dict[WorkerId, Upload] = field(default_factory=dict)
    failed: set[WorkerId] = field(default_factory=set)  # invited workers whose upload is invalid or whose model is lost
    started: float = field(default_factory=time.monotonic)
    answered: dict[WorkerId, float] = field(default_factory=dict)  # seconds after which workers answered the order

    def note_answer(self, worker: WorkerId) -> None:
        """Record when a worker answered; `_check_state` removes it again if the claim is withdrawn."""
        self.answered[worker] = time.monotonic() - self.started

    def is_uploading(self, worker: WorkerId) -> bool:
        """Return whether more pieces of a worker's model may come."""
        return worker in self.invited and worker not in self.models and worker not in self.failed


def upload_bytes(codecs: Codecs, numbers: int) -> tuple[int, int]:
    """Return how many bytes the upload of a model has, the fewest and the most; equal: float32."""
    if codecs.up.relative:
        return VERSION_BYTES + 1, VERSION_BYTES + 1 + codecs.up.longest_pack(numbers)
    return 4 * numbers, 4 * numbers


class NetworkSwarm:
    """The workers behind a broker; implements `Swarm`."""

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
        """codecs: of models on the wire. starts: the model each worker starts from, where these differ.

        played: the last completed round.
        """
        self._swarm_name, self._deadlines = config.swarm, config.deadlines
        self._run, self._roster, self._journal, self._events = announcement.run, roster, journal, events
        self._roster_file, self._has_names = config.roster, bool(config.names)
        self._starts = [wire.weights_to_bytes(start) for start in starts]
        self._played = played
        self._link: Link | None = None
        self._patterns: list[str] = []  # that the link is subscribed to
        numbers = announcement.size * announcement.vectors
        self._upload_bytes = upload_bytes(codecs, numbers)
        self._lock = threading.Condition()  # guards what both threads use; notified after each message
        self._limiter = RateLimiter(300.0 + 6 * wire.piece_count(4 * numbers))
        self._availability: WorkerAvailability[str] = WorkerAvailability(config.deadlines)
        self._newcomers: dict[str, int] = {}  # workers without a number, and how many samples they have
        self._foreign_states: set[str] = set()  # workers whose claims are refused: see `_has_foreign_state`
        self._gathering = True
        self._start_sent: dict[str, float] = {}  # when a start model was last sent to a worker
        self._upload_times: deque[float] = deque(maxlen=_UPLOADS_SEEN)
        self.open_round = OpenRound()
        self.phases = Phases()
        if config.names:
            self._update_members(config.names)
        self.retained = RetainedMessages(config.swarm, announcement, shared, codecs, self._retain)

    # --- connection and members

    def start(self, make_link: MakeLink) -> None:
        """Connect and subscribe. After every connection, retained messages are published again."""
        self._link = make_link(self.handle, self.retained.publish_all)
        self._update_subscriptions()
        self._link.open()

    def online(self) -> list[str]:
        """Return the names of the connected workers, sorted."""
        with self._lock:
            return sorted(self._availability.online)

    def gather(self) -> None:
        """Wait until all workers are connected, or at the join timeout at least one; otherwise raise UserError."""
        join_seconds = self._deadlines.join_seconds
        for _ in range(self._deadlines.patience):
            self._reload_roster()
            self._wait(lambda: join_seconds if len(self._availability.online) < self._roster.places else None)
            if self.online():
                break
            _log.warning("no worker has connected yet; waiting")
        else:
            raise UserError(
                "No worker connected. Start some: cbdsl work --id NAME --broker ADDRESS --data FILE.npz",
                code="no-workers",
            )
        self._gathering = False
        for name in self._enrol():
            self._welcome(name)
        present = self.online()
        self._events.note("gathered", present=present, missing=sorted(set(self._roster.listed()) - set(present)))

    def members(self) -> Sequence[WorkerId]:
        """Return the numbers of the workers in the swarm; the roster's file is read again if it changed."""
        self._reload_roster()
        return self._roster.members()

    def finish(self, round_number: int, model: Floats, version: int, updates: Sequence[bytes]) -> None:
        """Send the workers the end of the run and the final w^g (V D,); arguments as in `RetainedMessages.set_model`.

        Announcement, last order and w^g stay on the broker until the next run, for workers that are away now.
        """
        self.retained.set_last_model(model, version, updates)
        self._events.note("over", round=round_number)  # a worker that leaves from here on has done its part
        self.retained.set_order(round_number, "finish")
        last = time.monotonic() + _LONGEST_FINISH_SECONDS  # `_wait` counts no time without a broker

        def check() -> float | None:
            all_left = len(self._availability) > 0 and not self._availability.online
            return None if all_left or time.monotonic() > last else _FINISH_SECONDS

        self._wait(check)
        self.retained.clear()
        if not self._is_delivered(_FINISH_SECONDS + self.retained.total_bytes() / _SLOW_CONNECTION):
            _log.warning(
                "the broker has not acknowledged all retained messages of this run: devices that were away would not "
                "get the trained model. Give the same command again when the broker can be reached"
            )

    def close(self) -> None:
        """Disconnect from the broker."""
        if self._link is not None:
            self._link.close()
            self._link = None

    # --- the Swarm protocol

    def report(self, order: Order) -> Mapping[WorkerId, Claim]:
        """See `Swarm.report`; returns at the quorum or the deadline."""
        self.phases.begin()
        self._roster.save()
        if order.global_best is not None:
            self.retained.set_model(order.global_best, order.version, order.updates)
        self._journal.begin(order.round)
        participants, is_average = frozenset(order.participants), order.task == "average"
        with self._lock:
            self.open_round = OpenRound(order.round, order.task, participants, accepts_claims=not is_average)
            self.open_round.invited = set(participants) if is_average else set()
        self.retained.set_order(
            order.round, order.task, wire.pack_bits(order.participants), order.inertia, order.learning_rate
        )
        if is_average:
            return {}
        if self._journal.claims is None:  # otherwise an earlier process has received them all
            self._collect()
            with self._lock:
                self.open_round.accepts_claims = False
                claims = dict(self.open_round.claims)
            self._journal.note_claims(claims)
            self._note_closed(claims)
            return claims
        with self._lock:
            self.open_round.accepts_claims, self.open_round.claims = False, dict(self._journal.claims)
        return self._journal.claims

    def upload(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, Upload]:
        """See `Swarm.upload`; a worker that has sent nothing at the deadline is missing."""
        if self.open_round.task == "average":
            self._collect()
            uploads = self._close_uploads(workers)
            self._note_closed(uploads)
            return uploads
        received = {worker: self._journal.uploads[worker] for worker in workers if worker in self._journal.uploads}
        asked = [worker for worker in workers if worker not in received]
        models = self._fetch_models(asked) if asked else {}
        for worker in asked:
            received[worker] = models.get(worker)
            self._journal.note_upload(worker, received[worker])
            if received[worker] is None:
                self._events.note("silent", round=self.open_round.round, worker=self._roster.name(worker))
        return {worker: model for worker, model in received.items() if model is not None}

    def absentees(self) -> Collection[WorkerId]:
        """See `SwarmWithAbsentees`. A worker that lost its connection a moment ago may be restarting: it is there."""
        with self._lock:
            open_round = self.open_round
            silent = open_round.participants.difference(open_round.answered, open_round.claims)
            return [worker for worker in silent if not self._availability.is_here(self._roster.name(worker))]

    def _collect(self) -> None:
        """Wait for answers until the quorum or the deadline, and after the deadline for the first answer."""
        open_round, deadlines = self.open_round, self._deadlines
        for _ in range(deadlines.patience):
            in_time = self._wait(self._timeout_for_answers)
            with self._lock:
                answered = {self._roster.name(worker): taken for worker, taken in open_round.answered.items()}
                seconds = time.monotonic() - open_round.started
                self._availability.close_round(open_round.round, answered, self._missing(), seconds, in_time)
            if in_time or answered:
                return
            _log.warning("round %d: no worker answered in time; still waiting", open_round.round)
        raise UserError(
            f"Round {open_round.round}: no worker answered in {deadlines.patience} periods of "
            f"{deadlines.round_seconds:g} seconds. Are the workers running? The same command continues the run.",
            code="no-workers",
        )

    def _fetch_models(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, Upload]:
        """Invite workers and return the models that came in time."""
        open_round, started = self.open_round, time.monotonic()
        limit = upload_limit(self._upload_times, self._deadlines)
        with self._lock:
            open_round.invited |= set(workers)
        for worker in workers:
            self._invite(worker)

        def check() -> float | None:
            awaited = (self._roster.name(worker) for worker in workers if open_round.is_uploading(worker))
            return limit if any(map(self._availability.is_here, awaited)) else None

        # A worker that does not upload has still claimed in time, so later rounds wait for its claim; see `BackOff`.
        self._wait(check)
        models = self._close_uploads(workers)
        self.phases.note_uploads(time.monotonic() - started)
        if models:
            self._upload_times.append(time.monotonic() - started)
        return models

    def _close_uploads(self, workers: Iterable[WorkerId]) -> dict[WorkerId, Upload]:
        """Accept no more pieces from these workers, and return the models that are complete."""
        with self._lock:
            open_round = self.open_round
            for worker in workers:
                open_round.invited.discard(worker)
                assembly = open_round.assemblies.pop(worker, None)
                if assembly is not None:
                    pieces = wire.piece_count(assembly.size)
                    _log.warning(
                        "worker %s: %d of %d pieces of its model arrived in time. Its connection is slow, or the "
                        "broker drops the rest: cbdsl provision DIR --largest-model",
                        self._roster.name(worker), pieces - assembly.missing, pieces,
                    )  # fmt: skip
            return {worker: open_round.models.pop(worker) for worker in workers if worker in open_round.models}

    def _note_closed(self, answers: Collection[WorkerId]) -> None:
        """Note how long the round waited for answers, and which workers are missing."""
        open_round = self.open_round
        seconds = time.monotonic() - open_round.started
        self.phases.note_answers(seconds, open_round.answered.values())
        missing = [self._roster.name(worker) for worker in sorted(open_round.participants) if worker not in answers]
        self._events.note(
            "closed", round=open_round.round, answered=len(answers), missing=missing, seconds=round(seconds, 3)
        )

    # --- waiting

    def _wait(self, check: Callable[[], float | None]) -> bool:
        """Wait until `check` returns None, or for as many seconds as it returns; return whether it returned None.

        Time without a broker does not count. Missing answers are requested again now and then.
        """
        spent, repeated, last = 0.0, 0.0, time.monotonic()
        while True:
            with self._lock:
                limit = check()
                if limit is None:
                    return True
                if spent >= limit:
                    return False
                is_repeat_due = spent - repeated >= REPEAT_SECONDS
                check_seconds = time.monotonic() - last
                if not is_repeat_due:
                    self._lock.wait(min(_TICK, limit - spent))
            if is_repeat_due:
                repeated = spent
                self._repeat_requests()
            elif check_seconds > _QUICK_CHECK:  # slow with thousands of workers: let the receiving thread run
                time.sleep(min(_TICK, 9 * check_seconds))
            now = time.monotonic()
            spent, last = spent + (now - last if self._is_up() else 0.0), now

    def _timeout_for_answers(self) -> float | None:
        """Return for how many seconds a round waits for the missing answers; None: there are enough."""
        open_round, missing = self.open_round, self._missing()
        expected, limit = self._availability.expect(open_round.round, list(open_round.answered.values()), missing)
        is_quorum = len(open_round.answered) >= self._deadlines.needed(expected)
        return None if is_quorum or all(map(self._roster.has_left, missing)) else limit

    def _missing(self) -> list[str]:
        """Return the names of the participants that have not answered the order."""
        open_round = self.open_round
        return [self._roster.name(one) for one in open_round.participants if one not in open_round.answered]

    def _repeat_requests(self) -> None:
        """Request what is missing again. A worker that has answered answers again, at the cost of a message."""
        self._reload_roster()
        open_round = self.open_round
        if open_round.accepts_claims:
            self.retained.repeat_order()
        stalled = []
        with self._lock:
            for worker in filter(open_round.is_uploading, open_round.invited):
                assembly = open_round.assemblies.get(worker)
                missing = assembly.missing if assembly is not None else 0
                if missing == open_round.missing.get(worker, 0):  # no piece since the last request
                    stalled.append(worker)
                open_round.missing[worker] = missing
        for worker in stalled:
            self._invite(worker)

    def _is_delivered(self, seconds: float) -> bool:
        """Wait up to `seconds` and return whether the broker has acknowledged what was sent."""
        last = time.monotonic() + seconds
        while (link := self._link) is not None and link.is_up() and time.monotonic() <= last:
            if link.settled(1.0):
                return True
        return False

    # --- receiving: in the link's thread

    def handle(self, topic: str, payload: bytes) -> None:
        """Take a message from the link: charge its sender, note what it contains, answer a hello."""
        origin = topics.parse_origin(self._swarm_name, topic)
        if origin is None:
            self._events.refuse("an unknown topic")
            return
        enrolled: list[str] = []
        with self._lock:
            if not self._charge(origin.worker):
                return
            hello = self._take(origin, payload)
            if hello is not None and not self._gathering:
                enrolled = self._enrol()
            self._lock.notify_all()
        for name in enrolled:
            self._events.note("enrolled", worker=name, members=self._roster.places)
            self._welcome(name)
        if hello is not None and origin.worker not in enrolled:
            self._welcome(origin.worker, hello)

    def _charge(self, name: str) -> bool:
        """Charge a sender for a message and return whether to accept it; one that floods is shut out for a while."""
        is_member = self._roster.number(name) is not None or name in self._availability
        accepted, pause = self._limiter.charge(name, is_member)
        if pause:
            _log.warning("%s sends too many messages; they are refused for %.0f s", name, pause)
            self._events.note("flood", worker=name, seconds=pause)
            self._update_subscriptions()
            again = threading.Timer(pause + 0.1, self._update_subscriptions)
            again.daemon = True
            again.start()
        if not accepted:
            self._events.refuse("too many messages", name)
        return accepted

    def _take(self, origin: MessageOrigin, payload: bytes) -> Hello | None:
        """Decode a message and note it; return a hello, which is to be answered."""
        if origin.kind == "hello" and not payload:  # from `cbdsl doctor`, which tries whether it may write
            return None
        try:
            if self._roster.has_left(origin.worker):
                if origin.kind == "status":  # the broker publishes it: no offence
                    return None
                raise WireError("from a worker that is no longer in the roster")
            if origin.kind == "hello":
                return self._take_hello(origin.worker, wire.decode(payload, Hello))
            worker = self._roster.number(origin.worker)
            if origin.kind == "status":
                self._take_status(origin.worker, payload)
            elif worker is None:
                raise WireError("from an unknown worker")
            else:
                self._connect(origin.worker)  # even if its message is refused
                if origin.kind == "claim":
                    self._take_claim(worker, origin.worker, wire.decode(payload, ClaimMessage))
                else:
                    self._take_piece(worker, origin, payload)
        except WireError as error:
            self._events.refuse(f"{origin.kind}: {error}", origin.worker)
        return None

    def _take_hello(self, name: str, hello: Hello) -> Hello:
        worker = self._roster.number(name)
        if worker is not None:
            self._roster.note_samples(name, hello.samples)
            self._check_state(worker, name, hello)
        elif self._roster.has_room_for(name) and len(self._newcomers) < max(_MOST_NEWCOMERS, self._roster.places):
            self._newcomers[name] = hello.samples
        else:
            raise WireError("from an unknown worker")
        self._connect(name, hello.session)
        return hello

    def _check_state(self, worker: WorkerId, name: str, hello: Hello) -> None:
        """Check whether a worker still has what it claimed in this round, and a state of this run's history."""
        open_round = self.open_round
        if self._has_foreign_state(hello):
            self._foreign_states.add(name)
        else:
            self._foreign_states.discard(name)
        if worker not in open_round.claims or (hello.run, hello.round) == (self._run, open_round.round):
            return
        if open_round.accepts_claims:
            del open_round.claims[worker], open_round.answered[worker]  # it will claim again, from what it has now
        else:
            open_round.failed.add(worker)

    def _take_status(self, name: str, payload: bytes) -> None:
        if self._roster.number(name) is None and name not in self._newcomers:
            return  # it sends a hello when it receives the announcement
        # Without a payload: a worker that leaves clears its retained status.
        status = wire.decode(payload, Status) if payload else Status(False, b"")
        if status.online:
            self._connect(name, status.session)
        elif self._availability.disconnect(name, status.session):
            self._events.note("disconnected", worker=name)

    def _take_claim(self, worker: WorkerId, name: str, message: ClaimMessage) -> None:
        open_round = self.open_round
        if open_round.round == 0:  # the answer to an earlier process: it will be requested again
            return
        if name in self._foreign_states:
            raise WireError("a state that is not of this run's history")
        if message.run == self._run:
            self._availability.note_answer(name)
        self._check_round(message)
        if worker not in open_round.participants or open_round.task != "swarm":
            raise WireError("not requested")
        claim, before = Claim(message.score, message.commitment), open_round.claims.get(worker)
        if before is None:
            if not open_round.accepts_claims:
                raise WireError("too late for its round")
            open_round.claims[worker] = claim
            open_round.note_answer(worker)
        elif repr(before) != repr(claim):  # as text: NaN is not equal to itself
            raise WireError("a different claim from the one already received this round")

    def _take_piece(self, worker: WorkerId, origin: MessageOrigin, payload: bytes) -> None:
        open_round = self.open_round
        self._availability.note_answer(origin.worker)
        if worker not in open_round.invited:
            raise WireError("not requested")
        if not open_round.is_uploading(worker):
            return
        piece = wire.decode(payload, Piece)
        self._check_round(piece)
        try:
            self._assemble(worker, piece, origin.number)
        except WireError:  # it will not become a model any more: do not wait for the rest
            open_round.failed.add(worker)
            open_round.assemblies.pop(worker, None)
            raise
        finally:
            if open_round.task == "average" and not open_round.is_uploading(worker):
                open_round.note_answer(worker)

    def _assemble(self, worker: WorkerId, piece: Piece, number: int) -> None:
        """Add a piece to a worker's model, and note the model when it is complete."""
        open_round, (fewest, most) = self.open_round, self._upload_bytes
        if piece.index != number:
            raise WireError("a piece number that does not match its topic")
        if not fewest <= piece.size <= most:
            raise WireError("a model of the wrong size")
        if worker not in open_round.assemblies:
            open_round.assemblies[worker] = Assembly(piece.digest, piece.size)
        content = open_round.assemblies[worker].add(piece)
        if content is not None:
            open_round.models[worker] = wire.weights_from_bytes(content) if fewest == most else content
            del open_round.assemblies[worker]

    def _check_round(self, message: ClaimMessage | Piece) -> None:
        if message.run != self._run:
            raise WireError("from another run")
        if message.round < self.open_round.round:
            raise WireError("from an earlier round")
        if message.round > self.open_round.round:
            raise WireError("from a future round")

    def _connect(self, name: str, session: bytes = b"") -> None:
        if self._availability.connect(name, session):
            self._events.note("connected", worker=name)

    # --- members

    def _enrol(self) -> list[str]:
        """Give numbers to the newcomers, sorted by name, and return those that got one."""
        with self._lock:
            newcomers, self._newcomers = self._newcomers, {}
            if newcomers:
                self._roster.enrol(sorted(newcomers))
            enrolled = sorted(name for name in newcomers if self._roster.number(name) is not None)
            for name in enrolled:
                self._roster.note_samples(name, newcomers[name])
            for name in newcomers.keys() - set(enrolled):  # there was no place left
                self._availability.forget(name)
            return enrolled

    def _reload_roster(self) -> None:
        if self._roster_file is not None and self._roster_file.has_changed():
            self._update_members(self._roster_file.names)

    def _update_members(self, names: Sequence[str]) -> None:
        """Admit the workers that are named now, and dismiss those that are not named any more."""
        try:
            joined, left = self._roster.follow(names)
        except UserError as error:
            _log.warning("%s The members are unchanged", error)
            return
        with self._lock:
            for name in left:
                self._availability.dismiss(name)
            self._lock.notify_all()
        self._update_subscriptions()
        for event, changed in (("enrolled", joined), ("left", left)):
            for name in changed:
                self._events.note(event, worker=name, members=self._roster.places)

    def _has_foreign_state(self, hello: Hello) -> bool:
        """Return whether a worker's state is from rounds that this server does not have: its folder was restored.

        Such a state is ahead of the server, or its w^g is not the one of that version. A version that the server no
        longer keeps does not matter: nothing is decoded with it.
        """
        if hello.run != self._run:
            return False
        retained = self.retained
        is_other = retained.digests.get(hello.model_version, hello.model_digest) != hello.model_digest
        return hello.round > self._newest_round() or is_other or hello.model_version > retained.version

    def _newest_round(self) -> int:
        """Return the highest round number that a worker of this run can know."""
        return max(self._played + 1, self.open_round.round)

    # --- sending

    def _welcome(self, name: str, hello: Hello | None = None) -> None:
        """Send a worker its number, its start model if it has none, and its invitation if it may have missed it."""
        worker = self._roster.number(name)
        if worker is None:
            return
        start = self._starts[worker] if worker < len(self._starts) else b""
        forget = hello.round if hello is not None and self._has_foreign_state(hello) else 0
        digest = wire.digest_of(start) if start else wire.NO_DIGEST
        welcome = Welcome(self._run, worker, digest, forget, self._newest_round())
        self._send(topics.to_worker(self._swarm_name, name, "welcome"), wire.encode(welcome))
        now, lacks_start = time.monotonic(), hello is None or hello.run != self._run
        if start and lacks_start and now >= self._start_sent.get(name, 0) + _START_SECONDS:
            self._start_sent[name] = now
            for piece in wire.split_content(self._run, 0, start):
                self._send(topics.to_worker(self._swarm_name, name, f"start/{piece.index}"), wire.encode(piece))
        if self.open_round.task == "swarm" and self.open_round.is_uploading(worker):
            self._invite(worker)

    def _invite(self, worker: WorkerId) -> None:
        open_round = self.open_round
        invitation = Invitation(self._run, open_round.round, wire.pack_claim(open_round.claims.get(worker)))
        self._send(topics.to_worker(self._swarm_name, self._roster.name(worker), "invitation"), wire.encode(invitation))

    def _update_subscriptions(self) -> None:
        """Subscribe to all workers; while members are shut out, to each of the others by name instead."""
        with self._lock:  # held until the broker has both lists: two threads must not interleave
            link = self._link
            if link is None:
                return
            shut_out = self._limiter.shut_out()
            patterns = [topics.from_all(self._swarm_name)]
            if shut_out and self._has_names:
                others = (name for name in self._roster.listed() if name not in shut_out)
                patterns = [topics.from_worker(self._swarm_name, name, "#") for name in others]
            new, old = set(patterns) - set(self._patterns), set(self._patterns) - set(patterns)
            self._patterns = patterns
            link.subscribe(*sorted(new))
            link.unsubscribe(*sorted(old))  # last, so that nothing is missed

    def _is_up(self) -> bool:
        return self._link is not None and self._link.is_up()

    def _retain(self, topic: str, payload: bytes) -> None:
        if self._is_up():  # otherwise `publish_all` does it after the next connection
            self._send(topic, payload, retain=True)

    def _send(self, topic: str, payload: bytes, retain: bool = False) -> None:
        link = self._link
        if link is not None:
            link.publish(topic, payload, retain)


class RetainedMessages:
    """All retained messages of the server, below `down/`: announcement, order, shared samples and w^g."""

    def __init__(
        self,
        swarm: str,
        announcement: Announcement,
        shared: bytes,
        codecs: Codecs,
        publish: Callable[[str, bytes], None],
    ) -> None:
        """codecs: of models on the wire. publish: called with a topic and what is to be retained there."""
        self._swarm_name, self._run, self._codecs, self._publish = swarm, announcement.run, codecs, publish
        self._retained: dict[str, bytes] = {}
        self._lock = threading.RLock()  # held until a message is published: a later one must not come before it
        numbers = announcement.size * announcement.vectors
        pieces = range(wire.piece_count(longest_update(codecs, numbers)) if codecs.down.relative else 0)
        slots = [topics.update(swarm, slot, piece) for slot in range(KEPT_VERSIONS) for piece in pieces]
        wholes = [topics.model(swarm, piece) for piece in range(_LEFT_BEHIND)]
        self._changing = (topics.order(swarm), *slots, *wholes)  # where an earlier process may have left something
        self.version, self.model_digest = 0, wire.NO_DIGEST  # of w^g
        self.digests: dict[int, bytes] = {}  # of the last versions of w^g
        self._whole = 0  # the last version that was published whole
        self._put(topics.spec(swarm), wire.encode(announcement))
        for piece in wire.split_content(self._run, 0, shared) if shared else ():
            self._put(topics.shared(swarm, piece.index), wire.encode(piece))

    def publish_all(self) -> None:
        """Publish all retained messages again, and clear what an earlier process left, such as a later round's order.

        The announcement comes last: a worker that receives it may fetch the rest.
        """
        announcement = topics.spec(self._swarm_name)
        with self._lock:
            known = {*self._changing, *self._retained}
        for topic in sorted(known, key=lambda one: (one == announcement, one)):
            with self._lock:
                self._publish(topic, self._retained.get(topic, b""))

    def set_order(
        self,
        round_number: int,
        task: Literal["swarm", "average", "finish"],
        participants: bytes = b"",
        inertia: float = 0.0,
        learning_rate: float = 0.0,
    ) -> None:
        """Publish an order for the present w^g."""
        message = OrderMessage(
            self._run, round_number, task, participants, float(inertia), float(learning_rate), self.version,
            self.model_digest,
        )  # fmt: skip
        self._put(topics.order(self._swarm_name), wire.encode(message))

    def repeat_order(self) -> None:
        """Publish the last order again."""
        topic = topics.order(self._swarm_name)
        with self._lock:
            self._publish(topic, self._retained[topic])

    def note_versions(self, version: int, references: Sequence[Floats]) -> None:
        """Note the last versions of w^g, (D,) each and version `version` last: a worker's state is checked by them."""
        for age, reference in enumerate(reversed(references)):
            self.digests[version - age] = wire.digest_of(wire.weights_to_bytes(reference))

    def set_model(self, model: Floats, version: int, updates: Sequence[bytes], keyframe: Floats | None = None) -> None:
        """Publish w^g (V D,): the updates that lead to it, and for some versions (`keyframe_before`) the whole model.

        keyframe: the last version that was published whole, after a restart.
        """
        self.model_digest = wire.digest_of(wire.weights_to_bytes(model))
        self.digests = {one: digest for one, digest in self.digests.items() if one > version - KEPT_VERSIONS}
        self.digests[version] = self.model_digest
        for number, update in enumerate(updates, version + 1 - len(updates)):
            if number > self.version:
                for piece in wire.split_content(self._run, number, update):
                    slot = topics.update(self._swarm_name, number % KEPT_VERSIONS, piece.index)
                    self._put(slot, wire.encode(piece))
        whole = keyframe_before(version) if self._codecs.down.relative else version
        if whole > self.version or (whole and keyframe is not None):
            # After a restart the keyframe may be older than `model`.
            self._put_whole(whole, model if whole == version or keyframe is None else keyframe)
        self.version = version

    def set_last_model(self, model: Floats, version: int, updates: Sequence[bytes]) -> None:
        """Publish the final w^g (V D,) as `set_model` does, and whole, for workers that are away now."""
        self.set_model(model, version, updates)
        if self._whole < version:
            self._put_whole(version, model)

    def clear(self) -> None:
        """Clear all but the announcement, the order and w^g, which stay until the next run."""
        stays = (topics.spec(self._swarm_name), topics.order(self._swarm_name), topics.model(self._swarm_name, ""))
        with self._lock:
            done = [topic for topic in self._retained if not topic.startswith(stays)]
            for topic in done:
                del self._retained[topic]
                self._publish(topic, b"")

    def total_bytes(self) -> int:
        """Return how many bytes are retained."""
        with self._lock:
            return sum(map(len, self._retained.values()))

    def _put_whole(self, version: int, model: Floats) -> None:
        for piece in wire.split_content(self._run, version, wire.weights_to_bytes(model)):
            self._put(topics.model(self._swarm_name, piece.index), wire.encode(piece))
        self._whole = version

    def _put(self, topic: str, payload: bytes) -> None:
        with self._lock:
            self._retained[topic] = payload
            self._publish(topic, payload)


class Phases:
    """The seconds of the current round: training, waiting, uploading, verifying."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    def begin(self) -> None:
        """Start a round."""
        self._spent = {"train": 0.0, "wait": 0.0, "upload": 0.0}

    def note_answers(self, seconds: float, times: Iterable[float]) -> None:
        """Note how long the wait for answers took; times: seconds after which each answer came."""
        ordered = sorted(times)
        median = min(ordered[len(ordered) // 2], seconds) if ordered else 0.0
        self._spent["train"] += median
        self._spent["wait"] += seconds - median

    def note_uploads(self, seconds: float) -> None:
        """Note how long the wait for requested models took."""
        self._spent["upload"] += seconds

    def split(self, seconds: float) -> dict[str, float]:
        """Return the seconds per phase of a round that took `seconds` in all."""
        own = max(0.0, seconds - sum(self._spent.values()))
        return {name: round(spent, 4) for name, spent in {**self._spent, "verify": own}.items()}
