"""Checks of `cbdsl doctor --broker`: the connection to a broker step by step, and whether a run fits this device."""

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
from paho.mqtt.enums import MQTTProtocolVersion

from cbdsl.arrays import Samples
from cbdsl.engines import native_engine
from cbdsl.errors import UserError
from cbdsl.models import saved_model
from cbdsl.network import topics, wire
from cbdsl.network.budget import LONGEST_ROUND, ResourceLimits, get_half_of_memory, needs_of
from cbdsl.network.device_worker import Assignment, parse_announcement
from cbdsl.network.mqtt import Address, exposure_warning
from cbdsl.network.samples import fit_samples, read_samples
from cbdsl.network.tls import (
    RIGHTS,
    SOON,
    Identity,
    explain,
    format_time,
    identity_of_peer,
    make_context,
    read_identity,
)
from cbdsl.network.wire import Announcement, WireError
from cbdsl.spec import Spec
from cbdsl.util.formatting import format_bytes, single_line

SECONDS = 5.0  # for each answer of a broker
_RETAINED_SECONDS = 1.0  # for a retained message, once a later answer is here
_OTHER_VERSION = {1, 132}  # codes of brokers that do not support MQTT 5
_NOT_AUTHORIZED, _NO_SUBSCRIBERS = 135, 16
_ONE_RELEASE = "Server and workers should use the same release"


@dataclass(frozen=True)
class DoctorFinding:
    """The result of one step."""

    step: str
    text: str
    well: bool | None = True  # None: not checked
    last: bool = False  # the steps after it would be meaningless


def problem(step: str, text: str, last: bool = False) -> DoctorFinding:
    """Build the finding of a step that found a problem."""
    return DoctorFinding(step, text if text.endswith((".", "?")) else f"{text}.", well=False, last=last)


# --- the connection


@dataclass
class ConnectionCheck:
    """The connection to check, and what was found on the way."""

    address: Address
    swarm: str = ""  # default: from the certificate
    name: str = ""  # likewise
    connect: bool = False  # log in even with a certificate
    announcement: bytes = b""  # found by the login

    def findings(self) -> Iterator[DoctorFinding]:
        """Yield the findings, until one makes the rest meaningless."""
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
            yield problem("host", explain(error, self.address), last=True)
            return
        yield DoctorFinding("host", f"{host} is {', '.join(dict.fromkeys(str(info[4][0]) for info in found))}.")
        try:
            with socket.create_connection((host, port), timeout=SECONDS) as connection:
                yield DoctorFinding("port", f"{connection.getpeername()[0]} answers on port {port}.")
        except OSError as error:
            yield problem("port", f"port {port}: {explain(error, self.address)}", last=True)

    def _files(self) -> Iterator[DoctorFinding]:
        certificate, key = self.address.certificate, self.address.key
        if certificate is None or key is None:
            if self.address.tls:
                yield DoctorFinding("certificate", "none was given (--cert, --key).", None)
            return
        try:
            identity = read_identity(certificate)
        except UserError as error:
            yield problem("certificate", str(error), last=True)
            return
        if identity is None:
            unknown = "has no identity.json of its own beside it, so its name and its dates are unknown here"
            fix = "`cbdsl provision DIR --renew` writes it."
            yield DoctorFinding("certificate", f"{certificate} {unknown}. {fix}", None)
        else:
            self.swarm, self.name = self.swarm or identity.swarm, self.name or identity.name
            yield _check_dates("certificate", identity, f"{certificate} is of '{identity.name}'")
            other = identity.name_problem(certificate, self.swarm, self.name)
            if other:
                yield problem("name", other)
        mode = key.stat().st_mode
        if mode & stat.S_IRWXO:
            text = f"{key} can be read by every user of this machine ({mode & 0o777:o}). Do: chmod 600 {key}"
            yield problem("key", text)
        else:
            yield DoctorFinding("key", f"{key} is private.")

    def _tls(self) -> Iterator[DoctorFinding]:
        address = self.address
        if not address.tls:
            warning = exposure_warning(address).removeprefix("WARNING: ")
            yield problem("tls", warning) if warning else DoctorFinding("tls", "not used, and not needed on loopback.")
            return
        try:
            context = make_context(address)
        except UserError as error:
            yield problem("key", str(error), last=True)
            return
        try:
            with (
                socket.create_connection((address.host, address.port), timeout=SECONDS) as raw,
                context.wrap_socket(raw, server_hostname=address.host) as secure,
            ):
                version, presented = secure.version(), identity_of_peer(secure)
        except TimeoutError:
            text = "it accepts the connection and does not answer. It is not a broker, or it hangs. Check the port"
            yield problem("broker", text, last=True)
            return
        except (OSError, ValueError) as error:
            yield problem("broker", explain(error, address), last=True)
            return
        authority = address.ca or "this system's list"
        yield DoctorFinding("tls", f"{version}, and the broker's certificate is by the authority in {authority}.")
        yield _check_dates("broker", presented, f"its certificate is for '{address.host}'")
        now = format_time(datetime.now(UTC))
        yield DoctorFinding("clock", f"{now}, within the dates of the broker's certificate.")
        objection = "" if self.connect else explain(None, address, context)  # a login would find it, too
        if objection:
            yield problem("accepted", objection, last=True)

    def _login(self) -> Iterator[DoctorFinding]:
        if self.address.certificate is not None and not self.connect:
            yield DoctorFinding(
                "login", "not tried: a certificate has one connection, and a running worker would lose its own. If "
                "none runs, add --connect.", None,
            )  # fmt: skip
            return
        context = make_context(self.address) if self.address.tls else None
        swarm = self.swarm or "swarm"
        visit = visit_broker(self.address, context, swarm, self.name)
        if visit.refused:
            yield problem("login", f"the broker refuses it: {explain(visit.refused, self.address)}", last=True)
        elif visit.lost:
            limit = "The broker closed the connection or timed out; it may be shutting down or at its connection limit"
            used = ", or a worker that uses this certificate took the connection back" if context is not None else ""
            why = explain(None, self.address, context) or f"{limit}{used}. Try again"
            yield problem("login", why, last=True)
        else:
            self.announcement = visit.announcement
            yield DoctorFinding("login", "the broker lets us in.")
            yield from _check_rights(visit, swarm, self.name)


def _check_dates(step: str, identity: Identity, what: str) -> DoctorFinding:
    now = datetime.now(UTC)
    dates = identity.date_problem(now)
    if dates:
        fix = "Check the clock; if it is right: cbdsl provision DIR --renew, and copy again."
        return problem(step, f"{what} and {dates}. {fix}")
    left = identity.ends - now
    soon = ". That is soon: cbdsl provision DIR --renew" if left < SOON else ""
    return DoctorFinding(step, f"{what}, valid until {format_time(identity.ends)}, {left.days:,} days from now{soon}.")


def _check_rights(visit: BrokerVisit, swarm: str, name: str) -> Iterator[DoctorFinding]:
    """Yield what the broker allows this member, and whether a server is there."""
    if visit.may_write is False:
        yield problem("rights", f"the broker does not let '{name}' write in the swarm '{swarm}'. {RIGHTS}")
        return
    if not visit.may_read or (visit.server_listens and not visit.announcement):
        yield problem("rights", f"a server is there, but the broker does not let '{name}' read from it. {RIGHTS}")
        return
    if visit.may_write is None:
        why = "the broker does not tell what it allows" if name else "not checked without a name; give --id"
        yield DoctorFinding("rights", f"{why}.", None)
    else:
        yield DoctorFinding("rights", f"'{name}' may write in the swarm '{swarm}'.")
    if not visit.announcement:
        yield DoctorFinding("server", f"no run is announced in the swarm '{swarm}': `cbdsl serve` has not begun.", None)
    elif visit.server_listens is False:
        yield DoctorFinding("server", "a run is announced, but its server is not connected now. Start it again.", None)
    else:
        yield DoctorFinding("server", "a run is announced. Only a worker can find out whether its roster names it.")


@dataclass
class BrokerVisit:
    """The answers of a broker to a login."""

    refused: str = ""  # why there was no login
    lost: bool = False  # it closed the connection or did not answer
    may_read: bool = True
    may_write: bool | None = None  # None: it did not tell
    server_listens: bool | None = None
    announcement: bytes = b""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _answers: dict[str, Any] = field(default_factory=dict)

    def put(self, kind: str, value: Any) -> None:  # noqa: ANN401 - codes or bytes
        """Store an answer; called in the client's thread."""
        with self._changed:
            self._answers[kind] = value
            self._changed.notify_all()

    def answer(self, kind: str, seconds: float = SECONDS) -> Any:  # noqa: ANN401
        """Return the answer of a kind; None if the broker closed the connection or did not answer in time."""
        with self._changed:
            self._changed.wait_for(lambda: kind in self._answers or "end" in self._answers, seconds)
            return self._answers.get(kind)


def visit_broker(address: Address, context: ssl.SSLContext | None, swarm: str, name: str) -> BrokerVisit:
    """Log in, subscribe, publish an empty hello, and leave. MQTT 5 first: its brokers tell what they do not allow."""
    visit, code = _visit(address, context, swarm, name, MQTTProtocolVersion.MQTTv5)
    if code is None or code in _OTHER_VERSION:
        visit, _ = _visit(address, context, swarm, name, MQTTProtocolVersion.MQTTv311)
    return visit


def _visit(
    address: Address, context: ssl.SSLContext | None, swarm: str, name: str, version: MQTTProtocolVersion
) -> tuple[BrokerVisit, int | None]:
    """Visit a broker; also return the code that answered the login, or None."""
    visit = BrokerVisit()
    client = address.make_client(f"cbdsl-{secrets.token_hex(8)}", version, reconnect_on_failure=False)
    client.connect_timeout = SECONDS
    client.on_connect = lambda _client, _data, _flags, code, _properties: visit.put("login", code)
    client.on_subscribe = lambda _client, _data, _mid, codes, _properties: visit.put("granted", codes)
    client.on_publish = lambda _client, _data, _mid, code, _properties: visit.put("published", code)
    client.on_message = lambda _client, _data, message: visit.put("announcement", bytes(message.payload))
    client.on_disconnect = lambda *_: visit.put("end", True)
    if context is not None:
        client.tls_set_context(context)
    try:
        client.connect(address.host, address.port, keepalive=int(6 * SECONDS))
    except OSError:
        visit.lost = True
        return visit, None
    client.loop_start()
    try:
        code = visit.answer("login")
        if code is None:
            visit.lost = True
        elif code.is_failure:
            visit.refused = str(code)
        else:
            _try_rights(client, visit, swarm, name)
        return visit, None if code is None else int(code.value)
    finally:
        with contextlib.suppress(OSError):
            client.disconnect()
        client.loop_stop()


def _try_rights(client: mqtt.Client, visit: BrokerVisit, swarm: str, name: str) -> None:
    """Subscribe to the announcement, then publish: a retained message arrives before the answer to the latter."""
    client.subscribe(topics.spec(swarm), 1)
    granted = visit.answer("granted")
    if granted is not None and name:
        client.publish(topics.from_worker(swarm, name, "hello"), b"", qos=1)
        code = visit.answer("published")
        granted = None if code is None else granted
        if code is not None and client.protocol == MQTTProtocolVersion.MQTTv5:
            visit.may_write = code.value != _NOT_AUTHORIZED
            visit.server_listens = code.value != _NO_SUBSCRIBERS if visit.may_write else None
    if granted is None:
        visit.lost = True
        return
    visit.may_read = not any(code.is_failure for code in granted)
    visit.announcement = visit.answer("announcement", _RETAINED_SECONDS) or b""


# --- the device


@dataclass(frozen=True)
class DeviceResources:
    """What this device has for a run."""

    data: Path | None = None  # its samples
    threads: int = 1
    memory: int = 0  # bytes that its worker may use; 0: half of the machine's

    def findings(self, announcement: Announcement) -> Iterator[DoctorFinding]:
        """Yield whether the announced run fits this device."""
        try:
            assignment = parse_announcement(announcement)
        except WireError as error:
            yield problem("model", f"{single_line(str(error))}. {_ONE_RELEASE}")
            return
        obstacle: str | None = "the server sends no description of it"
        if assignment.architecture is not None:
            obstacle = native_engine.available()
        if obstacle is not None and importlib.util.find_spec("torch") is None:
            yield problem("engine", f"this model needs torch here ({obstacle}). Do: pip install 'cbdsl[torch]'")
            return
        shape = assignment.layout.shape
        own = Samples(np.broadcast_to(np.float32(0), (1, *shape)), np.zeros(1, np.int32))
        if self.data is not None:
            try:
                own = fit_samples(read_samples(self.data), assignment.data)
            except UserError as error:
                yield problem("samples", str(error))
                return
            yield DoctorFinding("samples", f"{len(own):,} in {self.data}, of the run's shape and task.")
        yield self._check_memory(announcement, assignment, own)

    def _check_memory(self, announcement: Announcement, assignment: Assignment, own: Samples) -> DoctorFinding:
        allowed = self.memory or get_half_of_memory()
        try:
            ResourceLimits(own, self.threads, allowed, LONGEST_ROUND).parse_announcement(announcement)
        except (WireError, UserError) as error:
            return problem("memory", single_line(str(error)))
        needed = format_bytes(needs_of(assignment, own, self.threads, 1e9).memory)
        more = "" if self.data is not None else " and more for its own samples (--data)"
        return DoctorFinding(
            "memory",
            f"{assignment.size:,} parameters take about {needed} at work{more}; {format_bytes(allowed)} are allowed.",
        )


def read_announcement(payload: bytes) -> Announcement | DoctorFinding:
    """Decode a retained announcement, or return what is wrong with it."""
    try:
        return wire.decode(payload, Announcement)
    except WireError as error:
        return problem("model", f"the announcement is {error}. {_ONE_RELEASE}")


def announcement_of(model: Path) -> Announcement:
    """Build the announcement of a server that has the network of a trained model and shares no samples."""
    graph = saved_model.load(model).graph
    return Announcement(
        bytes(wire.RUN_BYTES), Spec().to_toml(), json.dumps(graph.to_dict()), graph.size, 1, json.dumps(graph.shape),
        graph.classes, 0, 0, wire.NO_DIGEST, 0,
    )  # fmt: skip
