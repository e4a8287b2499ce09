"""A worker: hears orders, plays its part, claims a score, uploads when it is invited. Survives restarts.

Its state is on disk before its claim is on the way, so an order that was carried out once is answered from there and
never carried out twice. Nothing here imports torch unless the model needs it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from cbdsl import __version__
from cbdsl.deploy import topics, wire
from cbdsl.deploy.events import Events
from cbdsl.deploy.link import Link, Will
from cbdsl.deploy.mail import Letter, Mail
from cbdsl.deploy.memory import Keeper, Memory
from cbdsl.deploy.meter import NOW_AND_THEN, Meter
from cbdsl.deploy.particle import Particle
from cbdsl.deploy.wire import Directive, Hello, Statement, Status
from cbdsl.engines.base import Samples

_log = logging.getLogger("cbdsl.deploy")

_NOTHING = bytes(wire.DIGEST_BYTES)
_WAIT_SECONDS = 1.0  # how often a worker without mail looks whether it is to stop

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
        threads: int = 1,
        attack: str = "",
    ) -> None:
        """folder: where it keeps its state. attack: for tests, what to do instead of the truth."""
        self._swarm, self._name, self._own, self._threads, self._attack = swarm, name, own, threads, attack
        self._keeper = Keeper(folder)
        self._meter = Meter(self._keeper.ledger)
        self._mail = Mail(swarm, name, Events())
        self._session = os.urandom(wire.SESSION_BYTES)
        self._particle: Particle | None = None
        self._memory: Memory | None = None
        self._run = b""
        self._stopped = False
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
        if news:
            self._introduce()

    def _follow(self) -> None:
        """Listen to a run that was announced; what is retained comes, again if it came before."""
        assignment = self._mail.assignment
        assert assignment is not None
        if assignment.shared_size:
            content = self._keeper.load_shared(assignment.shared_digest)
            if content is None:
                self._link.subscribe(topics.shared(self._swarm, "+"))
            else:
                self._mail.shared.digest, self._mail.shared.content = assignment.shared_digest, content
        self._link.subscribe(topics.model(self._swarm, "+"))
        self._link.subscribe(topics.order(self._swarm))

    def _introduce(self) -> None:
        run, round_number = self._keeper.last() or (bytes(wire.RUN_BYTES), 0)
        hello = Hello(self._session, len(self._own), round_number, run, __version__)
        self._say("hello", wire.encode(hello))

    # --- the worker's side

    def run(self, stay: bool = False) -> None:
        """Work until the run is over, or for ever with `stay`."""
        self._link.open()
        try:
            while not self._stopped:
                with self._mail.changed:
                    step = self._next()
                    if step is None:
                        self._mail.changed.wait(_WAIT_SECONDS)
                        continue
                if step == self._finish and stay:
                    self._mail.order = None
                    continue
                step()
        finally:
            self.leave()

    def stop(self) -> None:
        """End `run` at the next occasion; may be called from a signal."""
        self._stopped = True

    def leave(self) -> None:
        """Say goodbye, so that nobody waits for this worker."""
        self._say("status", b"", retain=True)
        self._link.close()
        self._meter.save()

    def _next(self) -> Callable[[], None] | None:
        """What to do now; none: wait for mail."""
        mail = self._mail
        if mail.assignment is None:
            return None
        if mail.order is not None and mail.order.fresh and _directive(mail.order).task == "finish":
            return self._finish
        if self._particle is None or self._run != mail.assignment.run:
            return self._prepare if self._can_prepare() else None
        if mail.order is not None and mail.order.fresh and self._can_play(_directive(mail.order)):
            return self._play
        if mail.invitation is not None and mail.invitation.fresh and self._memory is not None:
            return self._upload if mail.invitation.message.round <= self._memory.round else None
        return None

    def _can_prepare(self) -> bool:
        mail = self._mail
        assert mail.assignment is not None
        if mail.welcome is None or mail.shared.digest != mail.assignment.shared_digest:
            return False
        apart = mail.welcome.start_digest != _NOTHING
        has_state = (last := self._keeper.last()) is not None and last[0] == mail.assignment.run
        return not apart or has_state or mail.start.digest == mail.welcome.start_digest

    def _can_play(self, directive: Directive) -> bool:
        assert self._particle is not None
        done = self._memory is not None and directive.round <= self._memory.round
        return done or self._mail.model.digest == directive.model_digest

    def _prepare(self) -> None:
        """Build what the run needs, and take up the state that is here."""
        assignment, welcome = self._mail.assignment, self._mail.welcome
        assert assignment is not None
        assert welcome is not None
        content = self._mail.shared.content
        if content and self._keeper.load_shared(assignment.shared_digest) is None:
            self._keeper.save_shared(content)
        if content:
            self._link.unsubscribe(topics.shared(self._swarm, "+"))
        particle = Particle(assignment, welcome.worker, self._own, content, self._threads, self._attack)
        self._mail.shared.content = b""
        self._memory = self._keeper.load(assignment.run, welcome.worker, assignment.size)
        if self._memory is not None:
            particle.restore(self._memory)
        elif self._mail.start.digest == welcome.start_digest != _NOTHING:
            particle.start(wire.weights_from_bytes(self._mail.start.content))
        self._particle, self._run = particle, assignment.run
        _log.info("worker %s is number %d, %s samples", self._name, welcome.worker, f"{len(self._own):,}")

    def _play(self) -> None:
        """Carry an order out, or answer again if that was done before."""
        letter = self._mail.order
        assert letter is not None
        assert self._particle is not None
        directive, letter.fresh = _directive(letter), False
        if not wire.has_bit(directive.participants, self._particle.number):
            return
        if self._memory is None or directive.round > self._memory.round:
            self._memory = self._particle.carry_out(directive, wire.weights_from_bytes(self._mail.model.content))
            self._keeper.save(self._memory)
            self._meter.save(NOW_AND_THEN)
        if directive.round != self._memory.round:
            _log.warning("the server is back in round %d; this worker is past it", directive.round)
        elif directive.task == "average":
            self._send_model()
        elif self._memory.claim is not None:
            claim = self._memory.claim
            statement = Statement(self._run, self._memory.round, claim.score, claim.commitment)
            self._say("claim", wire.encode(statement))

    def _upload(self) -> None:
        letter = self._mail.invitation
        assert letter is not None
        letter.fresh = False
        if self._memory is not None and letter.message.round == self._memory.round:
            self._send_model()

    def _send_model(self) -> None:
        assert self._particle is not None
        assert self._memory is not None
        model = self._particle.model()
        if model is not None:
            for piece in wire.pieces(self._run, self._memory.round, wire.weights_to_bytes(model)):
                self._say(f"upload/{piece.index}", wire.encode(piece))

    def _finish(self) -> None:
        assert self._mail.order is not None
        self._mail.order.fresh = False
        self._stopped = True

    def _say(self, what: str, payload: bytes, retain: bool = False) -> None:
        self._link.publish(topics.from_worker(self._swarm, self._name, what), payload, retain)


def _directive(letter: Letter) -> Directive:
    assert isinstance(letter.message, Directive)
    return letter.message
