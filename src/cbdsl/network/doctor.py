"""Checks a connection step by step: `cbdsl doctor --broker`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import secrets
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from cbdsl.arrays import Samples
from cbdsl.engines import native_engine
from cbdsl.errors import UserError
from cbdsl.models import saved_model
from cbdsl.network import topics, wire
from cbdsl.network.budget import LONGEST_ROUND, ResourceLimits, half_of_the_machine, needs_of
from cbdsl.network.mqtt import Address, exposed
from cbdsl.network.samples import read_samples
from cbdsl.network.tls import (
    RIGHTS,
    SOON,
    Identity,
    context_of,
    explain,
    identity_of,
    misfit,
    moment,
    not_let_in,
    read_identity,
    refusal,
    shown_certificate,
)
from cbdsl.network.wire import Announcement, WireError
from cbdsl.network.worker_state import Assignment, understand
from cbdsl.spec import Spec
from cbdsl.util.formatting import format_bytes, single_line

SECONDS = 5.0  # that a broker has for every answer
_A_MOMENT = 1.0  # for what is retained, once a later answer is here
_NOT_THAT_VERSION = {1, 132}  # codes of brokers that do not know MQTT 5
_NOT_AUTHORIZED, _NOBODY_LISTENS = 135, 16


@dataclass
class BrokerVisit:
    """What was seen."""

    login: str = ""  # why there was none; empty if there was
    lost: bool = False  # hung up, or silent: what follows is not known
    may_read: bool = True  # false: the broker said no
    may_write: bool | None = None  # none: it did not say
    server_listens: bool | None = None
    announcement: bytes = b""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _codes: dict[str, Any] = field(default_factory=dict)

    def heard(self, kind: str, value: Any) -> None:  # noqa: ANN401 - a code, or codes
        """The client's thread hands something in."""
        with self._changed:
            self._codes[kind] = value
            self._changed.notify_all()

    def answer(self, kind: str, seconds: float = SECONDS) -> Any:  # noqa: ANN401
        """What came of this kind; none if the broker hung up or said nothing in time."""
        with self._changed:
            self._changed.wait_for(lambda: kind in self._codes or "end" in self._codes, seconds)
            return self._codes.get(kind)


def visit_broker(address: Address, context: ssl.SSLContext | None, swarm: str, name: str) -> BrokerVisit:
    """Log in, listen, leave."""
    for version in (MQTTProtocolVersion.MQTTv5, MQTTProtocolVersion.MQTTv311):
        seen, code = _visit(address, context, swarm, name, version)
        if code not in _NOT_THAT_VERSION and not (code is None and version == MQTTProtocolVersion.MQTTv5):
            break
    return seen


def _visit(
    address: Address, context: ssl.SSLContext | None, swarm: str, name: str, version: MQTTProtocolVersion
) -> tuple[BrokerVisit, int | None]:
    """A visit, and how the login was answered; none: not at all."""
    seen = BrokerVisit()
    client = mqtt.Client(
        CallbackAPIVersion.VERSION2, f"cbdsl-{secrets.token_hex(8)}", protocol=version, reconnect_on_failure=False
    )
    client.connect_timeout = SECONDS
    client.on_connect = lambda _client, _data, _flags, code, _properties: seen.heard("login", code)
    client.on_subscribe = lambda _client, _data, _mid, codes, _properties: seen.heard("granted", codes)
    client.on_publish = lambda _client, _data, _mid, code, _properties: seen.heard("published", code)
    client.on_message = lambda _client, _data, message: seen.heard("announcement", bytes(message.payload))
    client.on_disconnect = lambda *_: seen.heard("end", True)
    if address.username:
        client.username_pw_set(address.username, address.password)
    if context is not None:
        client.tls_set_context(context)
    try:
        client.connect(address.host, address.port, keepalive=int(6 * SECONDS))
    except OSError:
        seen.lost = True
        return seen, None
    client.loop_start()
    try:
        code = seen.answer("login")
        if code is None:
            seen.lost = True
        elif code.is_failure:
            seen.login = str(code)
        else:
            _look_around(client, seen, swarm, name)
        return seen, None if code is None else int(code.value)
    finally:
        with contextlib.suppress(OSError):
            client.disconnect()
        client.loop_stop()


def _look_around(client: mqtt.Client, seen: BrokerVisit, swarm: str, name: str) -> None:
    """Ask for the announcement, then greet: what is retained comes before the answer to the greeting."""
    client.subscribe(topics.spec(swarm), 1)
    granted = seen.answer("granted")
    if granted is not None and name:
        client.publish(topics.from_worker(swarm, name, "hello"), b"", qos=1)
        code = seen.answer("published")
        granted = None if code is None else granted
        if code is not None and client.protocol == MQTTProtocolVersion.MQTTv5:
            seen.may_write = code.value != _NOT_AUTHORIZED
            seen.server_listens = code.value != _NOBODY_LISTENS if seen.may_write else None
    if granted is None:
        seen.lost = True
        return
    seen.may_read = not any(code.is_failure for code in granted)
    seen.announcement = seen.answer("announcement", _A_MOMENT) or b""


@dataclass(frozen=True)
class DeviceResources:
    """What a device has for a run."""

    data: Path | None = None  # its samples
    threads: int = 1
    memory: int = 0  # bytes that its worker may take; 0: half of the machine's

    def fits(self, announcement: Announcement) -> Iterator[DoctorFinding]:
        """Every step in turn."""
        try:
            assignment = understand(announcement)
        except WireError as error:
            yield wrong("model", f"{single_line(str(error))}. Server and workers should be of one release.")
            return
        obstacle = (
            native_engine.available()
            if assignment.architecture is not None
            else "the server sends no description of it"
        )
        if obstacle is not None and importlib.util.find_spec("torch") is None:
            yield wrong("engine", f"this model needs torch here ({obstacle}). Do: pip install 'cbdsl[torch]'")
            return
        own = self._samples(assignment)
        if isinstance(own, DoctorFinding):
            yield own
            return
        if self.data is not None:
            yield DoctorFinding("samples", f"{len(own):,} in {self.data}, as the run wants them.")
        yield self._memory(announcement, assignment, own)

    def _samples(self, assignment: Assignment) -> Samples | DoctorFinding:
        """Its own, or one in their place; or what is wrong with them."""
        shape, classes = assignment.layout.shape, assignment.classes
        if self.data is None:
            return Samples(np.broadcast_to(np.float32(0), (1, *shape)), np.zeros(1, np.int32))
        try:
            own = read_samples(self.data)
        except UserError as error:
            return wrong("samples", str(error))
        if own.features.shape[1:] != shape or int(own.labels.max()) >= classes:
            return wrong(
                "samples", f"{self.data} has samples of shape {own.features.shape[1:]} and labels up to "
                f"{own.labels.max()}; the run works on {shape} in {classes} classes. Give others with --data.",
            )  # fmt: skip
        return own

    def _memory(self, announcement: Announcement, assignment: Assignment, own: Samples) -> DoctorFinding:
        allowed = self.memory or half_of_the_machine()
        needed = format_bytes(needs_of(assignment, own, self.threads, 1e9).memory)
        try:
            ResourceLimits(own, self.threads, allowed, LONGEST_ROUND).understand(announcement)
        except (WireError, UserError) as error:
            return wrong("memory", f"{single_line(str(error)).rstrip('.')}.")
        least = "" if self.data is not None else " and more for its own samples (--data)"
        return DoctorFinding(
            "memory",
            f"{assignment.size:,} parameters take about {needed} at work{least}; {format_bytes(allowed)} are allowed.",
        )


def announced(payload: bytes) -> Announcement | DoctorFinding:
    """The announcement that a broker retains; or why it is none."""
    try:
        return wire.decode(payload, Announcement)
    except WireError as error:
        return wrong("model", f"the announcement is {error}. Server and workers should be of one release.")


def as_announced(model: Path) -> Announcement:
    """What a server would announce that has this trained model's network, and shares no samples."""
    saved = saved_model.load(model)
    graph, nothing = saved.graph, wire.NO_DIGEST
    return Announcement(
        bytes(wire.RUN_BYTES), Spec().to_toml(), json.dumps(graph.to_dict()), graph.size, 1, json.dumps(graph.shape),
        graph.classes, 0, 0, nothing, 0,
    )  # fmt: skip


_SECONDS = 5.0  # that an address has to answer
_NO_BROKER = "It is no broker, or one that hangs. Check the port"


@dataclass(frozen=True)
class DoctorFinding:
    """One step."""

    step: str
    text: str
    well: bool | None = True  # none: it was not looked at
    last: bool = False  # what follows would mean nothing


def wrong(step: str, text: str, last: bool = False) -> DoctorFinding:
    """A step that found something to mend."""
    return DoctorFinding(step, text if text.endswith((".", "?")) else f"{text}.", well=False, last=last)


@dataclass
class ConnectionCheck:
    """What is looked at, and what was found on the way that later steps need."""

    address: Address
    swarm: str = ""  # from the certificate, if not given
    name: str = ""  # likewise
    connect: bool = False  # log in, even with a certificate
    announcement: bytes = b""

    def look(self) -> Iterator[DoctorFinding]:
        """Every step in turn, until one makes the rest meaningless."""
        for step in (self._host, self._files, self._tls, self._login):
            for finding in step():
                yield finding
                if finding.last:
                    return

    def _host(self) -> Iterator[DoctorFinding]:
        host, port = self.address.host, self.address.port
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            yield wrong("host", explain(error, self.address), last=True)
            return
        yield DoctorFinding("host", f"{host} is {', '.join(dict.fromkeys(str(info[4][0]) for info in found))}.")
        try:
            with socket.create_connection((host, port), timeout=_SECONDS) as connection:
                yield DoctorFinding("port", f"{connection.getpeername()[0]} answers at port {port}.")
        except OSError as error:
            yield wrong("port", f"port {port}: {explain(error, self.address) or error}", last=True)

    def _files(self) -> Iterator[DoctorFinding]:
        address, now = self.address, datetime.now(UTC)
        if address.certificate is None or address.key is None:
            if address.tls:
                yield DoctorFinding("certificate", "none was given (--cert, --key).", None)
            return
        try:
            identity = read_identity(address.certificate)
        except UserError as error:
            yield wrong("certificate", str(error), last=True)
            return
        self.swarm, self.name = self.swarm or identity.swarm, self.name or identity.name
        yield _dated("certificate", identity, f"{address.certificate} is of '{identity.name}'", now)
        fault = misfit(identity, address.certificate, self.swarm, self.name)
        if fault:
            yield wrong("name", fault)
        mode = address.key.stat().st_mode
        if not mode & stat.S_IRWXO:
            yield DoctorFinding("key", f"{address.key} is not for everybody's eyes.")
        else:
            yield wrong(
                "key",
                f"{address.key} is open to everybody on this machine ({mode & 0o777:o}). Do: chmod 600 {address.key}",
            )

    def _tls(self) -> Iterator[DoctorFinding]:
        address = self.address
        if not address.tls:
            warning = exposed(address).removeprefix("WARNING: ")
            yield (
                wrong("tls", warning) if warning else DoctorFinding("tls", "none, and none is needed on this machine.")
            )
            return
        try:
            context = context_of(address)
        except UserError as error:
            yield wrong("key", str(error), last=True)
            return
        try:
            with (
                socket.create_connection((address.host, address.port), timeout=_SECONDS) as raw,
                context.wrap_socket(raw, server_hostname=address.host) as secure,
            ):
                yield DoctorFinding(
                    "tls", f"{secure.version()}, and the broker's certificate is by the authority in {_ca(address)}."
                )
                shown = identity_of(secure.getpeercert(binary_form=True) or b"")
        except TimeoutError:
            yield wrong("broker", f"it takes the connection and says nothing. {_NO_BROKER}", last=True)
            return
        except (OSError, ValueError) as error:
            yield wrong("broker", f"{explain(error, address) or error}{self._dates(error)}", last=True)
            return
        now = datetime.now(UTC)
        yield _dated("broker", shown, f"its certificate is for '{address.host}'", now)
        yield DoctorFinding(
            "clock", f"{moment(now)}, within the dates of the broker's certificate; brokers do not tell their time."
        )
        objection = "" if self.connect else refusal(address, context)  # a login hears it, too
        if objection:
            yield wrong("accepted", objection, last=True)

    def _dates(self, error: Exception) -> str:
        """The dates of a certificate that does not fit the clock."""
        if not isinstance(error, ssl.SSLCertVerificationError) or error.verify_code not in {9, 10}:
            return ""
        try:
            obstacle = identity_of(shown_certificate(self.address) or b"").obstacle(datetime.now(UTC))
        except ValueError:
            return ""
        return f". It {obstacle}" if obstacle else ""

    def _login(self) -> Iterator[DoctorFinding]:
        if self.address.certificate is not None and not self.connect:
            yield DoctorFinding(
                "login", "not tried: a certificate has one connection, and a worker that runs with it would lose its "
                "own. Where none runs, add --connect.", None,
            )  # fmt: skip
            return
        context = context_of(self.address) if self.address.tls else None
        swarm = self.swarm or "swarm"
        seen = visit_broker(self.address, context, swarm, self.name)
        if seen.login:
            yield wrong("login", f"the broker refuses it: {not_let_in(seen.login, self.address)}", last=True)
        elif seen.lost:
            yield wrong("login", self._cut_off(context), last=True)
        else:
            self.announcement = seen.announcement
            yield DoctorFinding("login", "the broker lets us in.")
            yield from _rights(seen, swarm, self.name)

    def _cut_off(self, context: ssl.SSLContext | None) -> str:
        why = refusal(self.address, context)
        if why:
            return why
        other = "; or a worker runs with this certificate, and took its connection back" if context is not None else ""
        return f"the broker hung up, or said nothing for too long: it may be ending, or full{other}. Try again."


def _ca(address: Address) -> str:
    return str(address.ca) if address.ca else "this system's list"


def _dated(step: str, identity: Identity, what: str, now: datetime) -> DoctorFinding:
    obstacle = identity.obstacle(now)
    if obstacle:
        return wrong(
            step,
            f"{what} and {obstacle}. Check the clock; if it is right: cbdsl provision DIR --renew, and copy again.",
        )
    days = (identity.ends - now).days
    soon = ". That is soon: cbdsl provision DIR --renew" if identity.ends - now < SOON else ""
    return DoctorFinding(step, f"{what}, good until {moment(identity.ends)}, {days:,} days from now{soon}.")


def _rights(seen: BrokerVisit, swarm: str, name: str) -> Iterator[DoctorFinding]:
    """What the broker lets a member do, and who else is there."""
    if seen.may_write is False:
        yield wrong("rights", f"the broker does not let '{name}' write in the swarm '{swarm}'. {RIGHTS}")
        return
    if not seen.may_read or (seen.server_listens and not seen.announcement):
        yield wrong("rights", f"a server is there, and the broker does not let '{name}' hear it. {RIGHTS}")
        return
    if seen.may_write is None:
        why = "the broker does not say what it lets through" if name else "not looked at without a name; give --id"
        yield DoctorFinding("rights", f"{why}.", None)
    else:
        yield DoctorFinding("rights", f"'{name}' may write in the swarm '{swarm}'.")
    if seen.announcement and seen.server_listens is not False:
        yield DoctorFinding(
            "server", "a run is announced. Whether its roster names this worker the server tells workers alone."
        )
    elif seen.announcement:
        yield DoctorFinding("server", "a run is announced, but its server is not connected now. Start it again.", None)
    else:
        yield DoctorFinding("server", f"no run is announced in the swarm '{swarm}': `cbdsl serve` has not begun.", None)
