"""What arrives at the server: checked before it is kept, counted if it is refused, and kept within fixed bounds.

Holds at most one claim and one model for each worker that was asked, whatever is sent. Knows no link: the link's
thread hands messages in, the main thread waits for them here. It judges shapes and sizes, never scores or weights.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from cbdsl.deploy import wire
from cbdsl.deploy.deadlines import Deadlines
from cbdsl.deploy.events import Events
from cbdsl.deploy.patience import Standing, everybodys_limit
from cbdsl.deploy.roster import Roster
from cbdsl.deploy.topics import Origin, origin
from cbdsl.deploy.wire import Assembly, ClaimMessage, Hello, Piece, Status, WireError
from cbdsl.protocol.messages import Claim, Upload, WorkerId

_TICK = 0.25  # seconds between looks at the clock while waiting
_QUICK = 0.001  # seconds: a look that takes longer is not taken at every message
_STRANGERS = 1000  # names without a number that are remembered: without a guarded broker anybody can invent them
NUDGE_SECONDS = 10.0  # an answer that is missing for so long is asked for again: a broker may have dropped a message
_LONG_AGO = float("-inf")


@dataclass
class Presence:
    """What is known of one worker's connection."""

    session: bytes = b""
    online: bool = False
    since: float = _LONG_AGO  # when it was last seen to come or go
    standing: Standing = field(default_factory=lambda: Standing(0.0))  # how it has kept its deadlines
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
        self._present: dict[str, Presence] = {}
        self._strangers: OrderedDict[str, Presence] = OrderedDict()  # who has no number, the newest last
        self._newcomers: dict[str, int] = {}  # and how many samples they say they hold
        self.open_round = OpenRound()

    # --- the link's side

    def handle(self, topic: str, payload: bytes) -> Hello | None:
        """Take a message. Returns a greeting that is to be answered; everything else is kept or refused here."""
        sender = origin(self._swarm, topic)
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

    def _take(self, sender: Origin, payload: bytes) -> Hello | None:
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

    def _presence(self, name: str) -> Presence:
        if name not in self._present:
            self._present[name] = Presence(standing=Standing(self._deadlines.least_seconds))
        return self._present[name]

    def _payer(self, name: str) -> Presence:
        """Whose tokens a message costs: the broker proves names, so nobody can spend another's."""
        if name in self._present:
            return self._present[name]
        if self._roster.number(name) is not None:
            return self._presence(name)
        payer = self._strangers.pop(name, None) or Presence()
        self._strangers[name] = payer
        if len(self._strangers) > _STRANGERS:
            self._strangers.popitem(last=False)
        return payer

    def _seen(self, name: str) -> None:
        presence = self._presence(name)
        if not presence.online:
            presence.online, presence.since = True, time.monotonic()
            self._events.note("connected", worker=name)

    def _spend(self, presence: Presence) -> bool:
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
