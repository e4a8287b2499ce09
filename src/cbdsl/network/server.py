"""The swarm over MQTT, as the server sees it: `NetworkSwarm` implements `report` and `upload`."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cbdsl.algorithm.broadcast import keyframe_before
from cbdsl.algorithm.messages import Claim, Order, Upload, WorkerId
from cbdsl.algorithm.worker import KEPT_VERSIONS, VERSION_BYTES
from cbdsl.arrays import Floats
from cbdsl.codecs.envelope import Codecs, longest_update
from cbdsl.errors import UserError
from cbdsl.network import topics, wire
from cbdsl.network.events import Events
from cbdsl.network.journal import Journal
from cbdsl.network.mqtt import Address, Link
from cbdsl.network.roster import Roster, RosterFile
from cbdsl.network.timeouts import Deadlines, Punctuality, everybodys_limit, upload_limit
from cbdsl.network.topics import MessageOrigin, parse_origin
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


_LEFT_BEHIND = 40  # pieces that an earlier run's model may have: 1,000,000 numbers, as many as brokers allow for


class RetainedMessages:
    """All that is retained below `down/`."""

    def __init__(
        self, swarm: str, announcement: Announcement, shared: bytes, codecs: Codecs, say: Callable[[str, bytes], None]
    ) -> None:
        """codecs: how models travel. say: hands a topic and what is to be retained there to the broker, if it is up."""
        self._swarm, self._run, self._codecs, self._say = swarm, announcement.run, codecs, say
        self._retained: dict[str, bytes] = {}
        self._lock = threading.RLock()  # until it is said: what another thread says meanwhile must not come before it
        numbers = announcement.size * announcement.vectors
        pieces = range(wire.piece_count(longest_update(codecs, numbers)) if codecs.down.relative else 0)
        slots = [topics.update(swarm, slot, piece) for slot in range(KEPT_VERSIONS) for piece in pieces]
        wholes = [topics.model(swarm, piece) for piece in range(_LEFT_BEHIND)]
        self._changing = (topics.order(swarm), *slots, *wholes)  # where an earlier process may have left something
        self.model, self.version, self._whole = (
            wire.NO_DIGEST,
            0,
            0,
        )  # w^g: its digest, its version; the last one put up whole
        self.digests: dict[int, bytes] = {}  # of the last versions of w^g
        self._put(topics.spec(swarm), wire.encode(announcement))
        for piece in wire.pieces(self._run, 0, shared) if shared else ():
            self._put(topics.shared(swarm, piece.index), wire.encode(piece))

    def say_again(self) -> None:
        """Say all that is retained, for the broker may have forgotten it.

        And clear what an earlier process left there that is not so any more, such as the order of a later round. The
        announcement comes last: whoever hears it may fetch the rest.
        """
        announcement = topics.spec(self._swarm)
        with self._lock:
            known = {*self._changing, *self._retained}
        for topic in sorted(known, key=lambda one: (one == announcement, one)):
            with self._lock:
                self._say(topic, self._retained.get(topic, b""))

    def order(self, order_message: OrderMessage) -> None:
        """Give an order."""
        self._put(topics.order(self._swarm), wire.encode(order_message))

    def order_again(self) -> None:
        """Who has answered answers again, which costs a message; who was not reached is."""
        topic = topics.order(self._swarm)
        with self._lock:
            self._say(topic, self._retained[topic])

    def recall(self, version: int, references: Sequence[Floats]) -> None:
        """The last versions of w^g, (D,) each and the present one last: by them a worker's state is recognised."""
        for age, reference in enumerate(reversed(references)):
            self.digests[version - age] = wire.digest_of(wire.weights_to_bytes(reference))

    def set_model(self, model: Floats, version: int, updates: Sequence[bytes], keyframe: Floats | None = None) -> None:
        """Put w^g (V D,) where every worker can fetch it: what leads to it, and now and then the whole.

        keyframe: the last version that was put up whole, after a restart.
        """
        content = wire.weights_to_bytes(model)
        self.model = wire.digest_of(content)
        self.digests = {one: digest for one, digest in self.digests.items() if one > version - KEPT_VERSIONS}
        self.digests[version] = self.model
        first = version + 1 - len(updates)
        for number, update in enumerate(updates, first):
            if number > self.version:
                for piece in wire.pieces(self._run, number, update):
                    slot = topics.update(self._swarm, number % KEPT_VERSIONS, piece.index)
                    self._put(slot, wire.encode(piece))
        whole = keyframe_before(version) if self._codecs.down.relative else version
        if whole > self.version or (whole and keyframe is not None):
            self._put_whole(whole, wire.weights_to_bytes(model if whole == version or keyframe is None else keyframe))
        self.version = version

    def set_last_model(self, model: Floats, version: int, updates: Sequence[bytes]) -> None:
        """Put up the w^g (V D,) that a run came to, as in `set_model` and whole: for those who are away now."""
        self.set_model(model, version, updates)
        if self._whole < version:
            self._put_whole(version, wire.weights_to_bytes(model))

    def clear(self) -> None:
        """Leave announcement, order and w^g until the next run, and nothing else."""
        stays = (topics.spec(self._swarm), topics.order(self._swarm), topics.model(self._swarm, ""))
        with self._lock:
            done = [topic for topic in self._retained if not topic.startswith(stays)]
            for topic in done:
                del self._retained[topic]
                self._say(topic, b"")

    def bytes_left(self) -> int:
        """How much is retained, as far as it is known here."""
        with self._lock:
            return sum(map(len, self._retained.values()))

    def _put_whole(self, version: int, content: bytes) -> None:
        for piece in wire.pieces(self._run, version, content):
            self._put(topics.model(self._swarm, piece.index), wire.encode(piece))
        self._whole = version

    def _put(self, topic: str, payload: bytes) -> None:
        with self._lock:
            self._retained[topic] = payload
            self._say(topic, payload)


_TICK = 0.25  # seconds between looks at the clock while waiting
_QUICK = 0.001  # seconds: a look that takes longer is not taken at every message
_STRANGERS = 1000  # names without a number that are remembered: without a guarded broker anybody can invent them
NUDGE_SECONDS = 10.0  # an answer that is missing for so long is asked for again: a broker may have dropped a message
_LONG_AGO = float("-inf")


@dataclass
class WorkerConnection:
    """What is known of one worker's connection."""

    session: bytes = b""
    online: bool = False
    since: float = _LONG_AGO  # when it was last seen to come or go
    standing: Punctuality = field(default_factory=lambda: Punctuality(0.0))  # how it has kept its deadlines
    astray: bool = False  # its state is not of this run's history: nothing that rests on it is taken
    tokens: float = 0.0  # messages it may still send
    filled: float = _LONG_AGO  # when tokens were last given


@dataclass
class OpenRound:
    """What the round that is being played waits for; the next round starts with a new one."""

    round: int = 0
    task: Literal["swarm", "average"] = "swarm"
    participants: frozenset[WorkerId] = frozenset()
    open: bool = False  # whether claims are still taken
    claims: dict[WorkerId, Claim] = field(default_factory=dict)
    invited: set[WorkerId] = field(default_factory=set)  # whose pieces are taken
    assemblies: dict[WorkerId, Assembly] = field(default_factory=dict)
    models: dict[WorkerId, Upload] = field(default_factory=dict)
    spoilt: set[WorkerId] = field(default_factory=set)  # invited, and what they sent is no model, or they have lost it
    started: float = field(default_factory=time.monotonic)
    times: dict[WorkerId, float] = field(default_factory=dict)  # seconds after which answers came


class Inbox:
    """Everything that workers send to the server, within fixed bounds."""

    def __init__(
        self,
        swarm: str,
        run: bytes,
        sizes: tuple[int, int],
        roster: Roster,
        events: Events,
        deadlines: Deadlines,
        is_astray: Callable[[Hello], bool],
    ) -> None:
        """sizes: the fewest and the most bytes of an upload; as many either way: its numbers as they are.

        is_astray: whether a worker's state is of a history that the server does not know.
        """
        self._swarm, self._run, self._sizes, self._is_astray = swarm, run, sizes, is_astray
        self._roster, self._events, self._deadlines = roster, events, deadlines
        self._burst = 100.0 + 3 * wire.piece_count(sizes[1])  # messages a worker may send at once, and in a second
        self._changed = threading.Condition()
        self._present: dict[str, WorkerConnection] = {}
        self._strangers: OrderedDict[str, WorkerConnection] = OrderedDict()  # who has no number, the newest last
        self._newcomers: dict[str, int] = {}  # and how many samples they say they hold
        self.open_round = OpenRound()

    # --- the link's side

    def handle(self, topic: str, payload: bytes) -> Hello | None:
        """Take a message. Returns a greeting that is to be answered; everything else is kept or refused here."""
        sender = parse_origin(self._swarm, topic)
        if sender is None:
            self._events.refuse("an unknown topic")
            return None
        with self._changed:
            if not self._spend(self._payer(sender.worker)):
                self._events.refuse("too many messages", sender.worker)
                return None
            try:
                return self._take(sender, payload)
            except WireError as error:
                self._events.refuse(f"{sender.kind}: {error}", sender.worker)
                return None
            finally:
                self._changed.notify_all()

    def _take(self, sender: MessageOrigin, payload: bytes) -> Hello | None:
        if self._roster.has_left(sender.worker):
            if sender.kind == "status":  # its last will is not its fault
                return None
            raise WireError("from a worker that is no longer in the roster")
        if sender.kind == "hello":
            hello = wire.decode(payload, Hello)
            self._greeted(sender.worker, hello)
            return hello
        worker = self._roster.number(sender.worker)
        if sender.kind == "status":
            self._status(sender.worker, worker, payload)
            return None
        if worker is None:
            raise WireError("from an unknown worker")
        self._seen(sender.worker)  # whatever becomes of what it says
        if sender.kind == "claim":
            self._claim(worker, wire.decode(payload, ClaimMessage))
        else:
            self._piece(worker, sender.number, payload)
        return None

    def _greeted(self, name: str, hello: Hello) -> None:
        known = self._roster.number(name) is not None
        if not known and (not self._roster.room(name) or len(self._newcomers) >= max(_STRANGERS, self._roster.places)):
            raise WireError("from an unknown worker")
        self._presence(name).session = hello.session
        if known:
            self._roster.note_samples(name, hello.samples)
            self._check_state(name, hello)
        else:
            self._newcomers[name] = hello.samples
        self._seen(name)

    def _check_state(self, name: str, hello: Hello) -> None:
        """Whether a worker still has what it claimed in this round, and whether its state is of this run's history."""
        self._presence(name).astray = self._is_astray(hello)
        worker, open_round = self._roster.number(name), self.open_round
        if worker not in open_round.claims or (hello.run, hello.round) == (self._run, open_round.round):
            return
        if open_round.open:
            del open_round.claims[worker], open_round.times[worker]  # it will claim again, from what it has now
        else:
            open_round.spoilt.add(worker)

    def _status(self, name: str, worker: WorkerId | None, payload: bytes) -> None:
        if worker is None and name not in self._newcomers:
            return  # it will introduce itself once it hears of the run
        presence = self._presence(name)
        # Without a payload: a worker that leaves clears what was retained.
        status = wire.decode(payload, Status) if payload else Status(False, presence.session)
        if status.online:
            presence.session = status.session
            self._seen(name)
        elif presence.session in {b"", status.session} and presence.online:
            presence.online, presence.since = False, time.monotonic()
            self._events.note("disconnected", worker=name)

    def _claim(self, worker: WorkerId, claim_message: ClaimMessage) -> None:
        open_round = self.open_round
        if open_round.round == 0:  # the answer to an earlier process: it is asked for again
            return
        presence = self._presence(self._roster.name(worker))
        if presence.astray:
            raise WireError("from a history that is not this run's")
        if claim_message.run == self._run:
            presence.standing.heard()
        self._check_time(claim_message.run, claim_message.round)
        claim = Claim(claim_message.score, claim_message.commitment)
        if worker not in open_round.participants or open_round.task != "swarm":
            raise WireError("not requested")
        before = open_round.claims.get(worker)
        if before is None:
            if not open_round.open:
                raise WireError("too late for its round")
            open_round.claims[worker] = claim
            self._in_time(worker)
        elif repr(before) != repr(claim):  # by text: NaN is not equal to itself
            raise WireError("a different claim from the one already received this round")

    def _piece(self, worker: WorkerId, number: int, payload: bytes) -> None:
        open_round = self.open_round
        self._presence(self._roster.name(worker)).standing.heard()
        if worker not in open_round.invited:
            raise WireError("not requested")
        if worker in open_round.models or worker in open_round.spoilt:
            return
        piece = wire.decode(payload, Piece)
        self._check_time(piece.run, piece.round)
        try:
            if piece.index != number:
                raise WireError("a piece number that does not match its topic")
            if not self._sizes[0] <= piece.size <= self._sizes[1]:
                raise WireError("a model of the wrong size")
            if worker not in open_round.assemblies:
                open_round.assemblies[worker] = Assembly(piece.digest, piece.size)
            whole = open_round.assemblies[worker].add(piece)
        except WireError:  # it will not become a model any more: go on to the next worker at once
            open_round.spoilt.add(worker)
            open_round.assemblies.pop(worker, None)
            raise
        if whole is not None:
            numbers = self._sizes[0] == self._sizes[1]
            open_round.models[worker] = wire.weights_from_bytes(whole) if numbers else whole
            del open_round.assemblies[worker]
            if open_round.task == "average":
                self._in_time(worker)

    def _in_time(self, worker: WorkerId) -> None:
        """Note that a worker has answered the round. It counts when the round closes: a claim may be withdrawn."""
        self.open_round.times[worker] = time.monotonic() - self.open_round.started

    def _check_time(self, run: bytes, round_number: int) -> None:
        if run != self._run:
            raise WireError("from another run")
        if round_number < self.open_round.round:
            raise WireError("from an earlier round")
        if round_number > self.open_round.round:
            raise WireError("from a future round")

    def _presence(self, name: str) -> WorkerConnection:
        if name not in self._present:
            self._present[name] = WorkerConnection(standing=Punctuality(self._deadlines.least_seconds))
        return self._present[name]

    def _payer(self, name: str) -> WorkerConnection:
        """Whose tokens a message costs: the broker proves names, so nobody can spend another's."""
        if name in self._present:
            return self._present[name]
        if self._roster.number(name) is not None:
            return self._presence(name)
        payer = self._strangers.pop(name, None) or WorkerConnection()
        self._strangers[name] = payer
        if len(self._strangers) > _STRANGERS:
            self._strangers.popitem(last=False)
        return payer

    def _seen(self, name: str) -> None:
        presence = self._presence(name)
        if not presence.online:
            presence.online, presence.since = True, time.monotonic()
            self._events.note("connected", worker=name)

    def _spend(self, presence: WorkerConnection) -> bool:
        """A bucket of tokens: a message costs one, a second gives as many as the bucket holds."""
        now = time.monotonic()
        presence.tokens = min(self._burst, presence.tokens + (now - presence.filled) * self._burst)
        presence.filled = now
        if presence.tokens < 1:
            return False
        presence.tokens -= 1
        return True

    # --- the main thread's side

    def until(
        self,
        done: Callable[[], bool],
        limit: Callable[[], float],
        is_up: Callable[[], bool],
        nudge: Callable[[], None] | None = None,
    ) -> bool:
        """Wait until a condition holds; returns whether it does.

        limit: the most seconds of broker uptime; what comes in may change it. nudge: called now and then.
        """
        spent, nudged, last = 0.0, 0.0, time.monotonic()
        while True:
            with self._changed:
                if done():
                    return True
                left = limit() - spent
                if left <= 0:
                    return False
                due = nudge is not None and spent - nudged >= NUDGE_SECONDS
                look = time.monotonic() - last  # how long it took to look
                if not due:
                    self._changed.wait(min(_TICK, left))
            if due and nudge is not None:
                nudged = spent
                nudge()
            elif look > _QUICK:  # thousands of workers: leave the time to those who hand messages in
                time.sleep(min(_TICK, 9 * look))
            now = time.monotonic()
            spent, last = spent + (now - last if is_up() else 0.0), now

    def begin(self, round_number: int, task: Literal["swarm", "average"], participants: Iterable[WorkerId]) -> None:
        """Listen for the answers to a new order: claims, or everybody's model."""
        everybody = frozenset(participants)
        with self._changed:
            average = task == "average"
            self.open_round = OpenRound(
                round_number, task, everybody, open=not average, invited=set(everybody) if average else set()
            )

    def close_claims(self, heard: Mapping[WorkerId, Claim] | None = None) -> dict[WorkerId, Claim]:
        """Take no more claims; those that came, or those that an earlier process had heard."""
        with self._changed:
            self.open_round.open = False
            if heard is not None:
                self.open_round.claims = dict(heard)
            return dict(self.open_round.claims)

    def invite(self, workers: Iterable[WorkerId]) -> None:
        """Listen for the models of these workers."""
        with self._changed:
            self.open_round.invited |= set(workers)

    def close_uploads(self, workers: Iterable[WorkerId]) -> dict[WorkerId, Upload]:
        """Take no more pieces from these workers; the models that came whole."""
        with self._changed:
            open_round = self.open_round
            for worker in workers:
                open_round.invited.discard(worker)
                open_round.assemblies.pop(worker, None)
            return {worker: open_round.models.pop(worker) for worker in workers if worker in open_round.models}

    def is_there(self, worker: WorkerId) -> bool:
        """Whether an answer of a worker can be expected: it is connected, or vanished a moment ago."""
        presence = self._present.get(self._roster.name(worker))
        if presence is None:
            return False
        return presence.online or time.monotonic() - presence.since < self._deadlines.grace_seconds

    def is_waited_for(self, worker: WorkerId) -> bool:
        """Whether the open round waits for an answer of a worker."""
        if not self.is_there(worker):
            return False
        return self._presence(self._roster.name(worker)).standing.is_waited_for(self.open_round.round)

    def limit(self, expected: int, patience: float) -> float:
        """How many seconds the open round may take: what everybody has, and what is left for those still missing."""
        times = list(self.open_round.times.values())
        return min(self._deadlines.round_seconds, everybodys_limit(times, expected, self._deadlines) + patience)

    def account(self, answers: Collection[WorkerId], in_time: bool) -> None:
        """The wait is over: whoever kept the others waiting is waited for less in the next rounds."""
        with self._changed:
            open_round, seconds = self.open_round, time.monotonic() - self.open_round.started
            free = everybodys_limit(list(open_round.times.values()), self.awaited(answers)[0], self._deadlines)
            for worker in open_round.participants:
                presence = self._presence(self._roster.name(worker))
                standing = presence.standing
                if worker in answers:
                    standing.answered()
                    standing.account(max(0.0, open_round.times.get(worker, 0.0) - free), seconds)
                elif (
                    standing.is_waited_for(open_round.round)
                    and (presence.online or presence.since + self._deadlines.grace_seconds > open_round.started)
                    and not (in_time and self.is_there(worker))  # at the quorum nobody was late
                ):  # to vanish while others wait is to let the round close, too
                    standing.lapsed(open_round.round)
                    standing.account(max(0.0, seconds - free), seconds)

    def somebody_came(self) -> bool:
        """Whether anybody has been heard of since this process started."""
        return bool(self._present)

    def present(self) -> int:
        """How many are connected."""
        return sum(presence.online for presence in self._present.values())

    def online(self) -> list[str]:
        """Who is connected, by name."""
        with self._changed:
            return sorted(name for name, presence in self._present.items() if presence.online)

    def enrol(self) -> list[str]:
        """Give numbers to the newcomers, sorted by name; who got one."""
        with self._changed:
            newcomers, self._newcomers = self._newcomers, {}
            if newcomers:
                self._roster.enrol(sorted(newcomers))
            for name, samples in newcomers.items():
                if self._roster.number(name) is None:  # there was no place left
                    self._present.pop(name, None)
                else:
                    self._roster.note_samples(name, samples)
            return sorted(name for name in newcomers if self._roster.number(name) is not None)

    def dismiss(self, names: Iterable[str]) -> None:
        """These have left the swarm: nobody waits for them any more."""
        with self._changed:
            for presence in filter(None, map(self._present.get, names)):
                presence.online, presence.since = False, _LONG_AGO
            self._changed.notify_all()

    def awaited(self, answers: Collection[WorkerId]) -> tuple[int, float]:
        """How many participants have answered or are waited for, and the most patience with one of the latter."""
        missing = [one for one in self.open_round.participants if one not in answers and self.is_waited_for(one)]
        patience = (self._presence(self._roster.name(one)).standing.patience for one in missing)
        return len(answers) + len(missing), max(patience, default=0.0)


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
        self.notices = RetainedMessages(config.swarm, announcement, shared, codecs, self._retain)
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
        hello, sender = self.inbox.handle(topic, payload), topics.parse_origin(self._swarm, topic)
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
        """Tell the workers that the run is over, and what it came to: w^g (V D,), as in `RetainedMessages`.

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
