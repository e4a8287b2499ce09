"""A short visit to a broker, to see what a member may do there: it listens for the announcement and says nothing.

It goes by MQTT 5, whose brokers say what they refuse; 3.1.1, by which workers go, has no word for that. The one thing
it publishes is an empty greeting, which servers drop unread. It leaves no last will.
"""

from __future__ import annotations

import contextlib
import secrets
import ssl
import threading
from dataclasses import dataclass, field
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from cbdsl.deploy import topics
from cbdsl.deploy.link import Address

SECONDS = 5.0  # that a broker has for every answer
_A_MOMENT = 1.0  # for what is retained, once a later answer is here
_NOT_THAT_VERSION = {1, 132}  # codes of brokers that do not know MQTT 5
_NOT_AUTHORIZED, _NOBODY_LISTENS = 135, 16


@dataclass
class Visit:
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


def visit(address: Address, context: ssl.SSLContext | None, swarm: str, name: str) -> Visit:
    """Log in, listen, leave."""
    for version in (MQTTProtocolVersion.MQTTv5, MQTTProtocolVersion.MQTTv311):
        seen, code = _visit(address, context, swarm, name, version)
        if code not in _NOT_THAT_VERSION and not (code is None and version == MQTTProtocolVersion.MQTTv5):
            break
    return seen


def _visit(
    address: Address, context: ssl.SSLContext | None, swarm: str, name: str, version: MQTTProtocolVersion
) -> tuple[Visit, int | None]:
    """A visit, and how the login was answered; none: not at all."""
    seen = Visit()
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


def _look_around(client: mqtt.Client, seen: Visit, swarm: str, name: str) -> None:
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
