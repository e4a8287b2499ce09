"""A worker: hears orders, plays its part, claims a score, uploads when it is invited. Survives restarts.

Its state is on disk before its claim is on the way, so an order that was carried out once is answered from there and
never carried out twice. Nothing here imports torch unless the model needs it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from cbdsl import __version__
from cbdsl.arrays import Floats, Samples
from cbdsl.deploy import topics, wire
from cbdsl.deploy.budget import Budget
from cbdsl.deploy.events import Events
from cbdsl.deploy.held import Held
from cbdsl.deploy.kept import Kept
from cbdsl.deploy.link import Link, Will
from cbdsl.deploy.mail import Letter, Mail
from cbdsl.deploy.memory import Keeper, Memory
from cbdsl.deploy.meter import NOW_AND_THEN, Meter
from cbdsl.deploy.particle import Assignment, Particle
from cbdsl.deploy.waiting import BROKER, Wait, Waiting, awaited
from cbdsl.deploy.wire import ClaimMessage, Hello, Invitation, OrderMessage, Status, Welcome
from cbdsl.text import one_line

_log = logging.getLogger("cbdsl.deploy")

_Result = TypeVar("_Result")
_WAIT_SECONDS = 1.0  # how often a worker without mail looks whether it is to stop
_HELLO_SECONDS = (5.0, 60.0)  # a worker that is not welcomed says hello again, at first and at last after so long
_PASSED_OVER = 3  # orders in a row for others, before a worker says that it takes no part any more

_LAST_MODEL_SECONDS = 60.0  # how long a worker waits for the trained model once it hears that a run is over
_ASK_SECONDS = 5.0  # and how often it asks for it

MakeLink = Callable[[Callable[[str, bytes], None], Callable[[], None], Will, Meter], Link]
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
        budget: Budget | None = None,
        attack: str = "",
    ) -> None:
        """folder: where it keeps its state. budget: what it gives to a run; if none, one thread and any memory.

        attack: for tests, what to do instead of the truth.
        """
        self._budget = budget or Budget(own)
        self._swarm, self._name, self._own, self._attack = swarm, name, own, attack
        self._keeper = Keeper(folder)
        self._kept, self._keeps_all = Kept(folder, name), False
        self._asked = 0.0  # when the trained model was last asked for
        self._meter = Meter(self._keeper.ledger)
        self._events, self._waiting = Events(), Waiting(name)
        self._mail = Mail(swarm, name, self._events, self._budget.understand)
        self._session = os.urandom(wire.SESSION_BYTES)
        self._particle: Particle | None = None
        self._memory: Memory | None = None
        self._held = Held()
        self._run = self._given_up = b""
        self._passed_over = 0  # orders in a row that were not for this worker
        self._speaking = threading.Lock()
        self._judged: Welcome | None = None
        self._hello_pause = _HELLO_SECONDS[0]
        self._hello_at = 0.0  # when the next one is due
        self._stopped = self._stays = self._fetching = False
        status = topics.from_worker(swarm, name, "status")
        will = Will(status, wire.encode(Status(False, self._session)))
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
        self._held, self._fetching = Held(assignment), False
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

    def _awaits(self) -> Wait:
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
            self._particle, self._memory, self._held = None, None, Held()
            self._given_up = assignment.run if assignment is not None else b""
            why = "there is no memory for it" if isinstance(error, MemoryError) else one_line(str(error)).rstrip(".")
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

    def _next_news(self, assignment: Assignment, order: Letter[OrderMessage] | None) -> Callable[[], None] | None:
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

    def _is_settled(self, last: Letter[OrderMessage]) -> bool:
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
        particle = Particle(assignment, number, self._own, shared, self._budget.threads, self._attack)
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

    def _finish(self, order_message: OrderMessage, assignment: Assignment, held: Held) -> None:
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


def _is_last(order: Letter[OrderMessage] | None) -> bool:
    """Whether an order says that the run is over."""
    return order is not None and order.message.task == "finish"
