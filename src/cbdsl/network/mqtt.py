"""The connection to an MQTT broker: its address, the link that server and workers use, and a count of all bytes.

The count includes whole PUBLISH packets (header, topic, packet number, payload) and their acknowledgements. What TLS
and TCP add depends on the network and is not included. A message to all workers counts once; the broker copies it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import random
import secrets
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from cbdsl.errors import UserError
from cbdsl.network import topics
from cbdsl.network.broker import PASSWORD_VARIABLE
from cbdsl.network.tls import RIGHTS, explain, make_context
from cbdsl.util.files import write_atomically

_log = logging.getLogger("cbdsl.network")


_PORTS = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}


@dataclass(frozen=True)
class Address:
    """A broker's address, and the credentials to use there."""

    host: str
    port: int
    tls: bool = False
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    username: str = ""
    password: str = ""
    path: str = ""  # of MQTT over WebSockets, such as /mqtt; empty: over TCP

    def __str__(self) -> str:
        scheme = f"{'ws' if self.path else 'mqtt'}{'s' if self.tls else ''}"
        return f"{scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}{self.path}"

    def make_client(self, name: str = "", version: MQTTProtocolVersion = mqtt.MQTTv311, **options: Any) -> mqtt.Client:  # noqa: ANN401
        """Return a client of MQTT 3.1.1, which all brokers support, for this address; it is not connected."""
        kind: Literal["tcp", "websockets"] = "websockets" if self.path else "tcp"
        client = mqtt.Client(CallbackAPIVersion.VERSION2, name, protocol=version, transport=kind, **options)
        if self.path:
            client.ws_set_options(self.path)
        if self.username:
            client.username_pw_set(self.username, self.password)
        return client

    @property
    def url(self) -> str:
        """With the user name, as `parse_address` reads it; the password is passed in the environment."""
        return str(self).replace("://", f"://{self.username}@") if self.username else str(self)


def parse_address(
    url: str, ca: Path | None = None, certificate: Path | None = None, key: Path | None = None
) -> Address:
    """Read mqtt://host:port or mqtts://host:port, with user@ before the host where a broker requires a user name.

    ws:// and wss:// are MQTT over WebSockets, with a path (default: /mqtt), for brokers behind HTTP proxies. Unless the
    address contains the password, it is read from the environment, which other users cannot see.
    """
    try:
        parts = urlsplit(url if "://" in url else f"mqtt://{url}")
        port = parts.port
    except ValueError as error:
        raise _invalid_address(url, f": {error}") from error
    if not _can_be_a_host(parts.hostname or ""):
        raise _invalid_address(url, ": no host can have that name")
    web, tls = parts.scheme in {"ws", "wss"}, parts.scheme in {"mqtts", "wss"}
    if parts.scheme not in _PORTS or not parts.hostname or (parts.path not in {"", "/"} and not web):
        raise _invalid_address(url)
    if not tls and (ca or certificate or key):
        raise UserError(
            f"--ca, --cert and --key need TLS, but '{url}' is without. Write mqtts://{parts.hostname}:8883.",
            code="conflict",
        )
    if bool(certificate) != bool(key):
        raise UserError("A certificate needs its key: give --cert and --key together.", code="conflict")
    for path in (ca, certificate, key):
        if path is not None and not path.is_file():
            raise UserError(
                f"{path} is not a file. Give the PEM files that `cbdsl provision` wrote.", code="missing-file"
            )
    username, password = parts.username or "", parts.password or ""
    if username and not password:
        password = os.environ.get(PASSWORD_VARIABLE, "")
    web_path = (parts.path.rstrip("/") or "/mqtt") if web else ""
    return Address(
        parts.hostname, port or _PORTS[parts.scheme], tls, ca, certificate, key, username, password, web_path
    )


def _invalid_address(url: str, why: str = "") -> UserError:
    return UserError(
        f"'{url}' is not the address of a broker{why}. Write mqtt://host:1883, mqtts://host:8883 or wss://host/path.",
        code="invalid-address",
    )


def _can_be_a_host(name: str) -> bool:
    """Return whether a name can be looked up at all: any other would end the thread that tries."""
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return "\0" not in name


def exposure_warning(address: Address) -> str:
    """Return a warning if strangers could read and write what is sent; "" if TLS or the loopback prevents it."""
    if address.tls:
        return ""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)}
    except OSError:
        found = set()
    if found and all(ipaddress.ip_address(str(one).partition("%")[0]).is_loopback for one in found):
        return ""
    return (
        f"WARNING: {address} is reached without TLS. Anybody on the way can read the models, claim scores and upload "
        "as any worker. Use mqtts:// with --ca, --cert and --key (`cbdsl provision` writes them)."
    )


class Link(Protocol):
    """What server and workers need of a connection."""

    def open(self) -> None:
        """Start connecting."""
        ...

    def publish(self, topic: str, payload: bytes, retain: bool = False) -> None:
        """Send, now or when the broker can be reached; an empty retained payload clears what was retained."""
        ...

    def subscribe(self, *patterns: str) -> None:
        """Receive the messages of topics, also after a reconnection; retained ones are sent again at each call."""
        ...

    def unsubscribe(self, *patterns: str) -> None:
        """Receive the messages of topics no longer."""
        ...

    def is_up(self) -> bool:
        """Return whether the broker is connected now."""
        ...

    def settled(self, seconds: float) -> bool:
        """Return whether the broker has acknowledged what was sent, now or within some seconds."""
        ...

    def close(self) -> None:
        """Send what is left, then disconnect without a last will."""
        ...


@dataclass(frozen=True)
class LastWill:
    """What the broker publishes for a client, retained, when its connection breaks."""

    topic: str
    payload: bytes


KEEPALIVE = 30  # seconds; a broker drops a client after one and a half times that
_AT_ONCE = 200  # subscriptions in one packet: packets have a largest size
_REFUSED_PAUSE = 10.0  # seconds until a refused subscription is tried again: the broker may get new rules
_LONGEST_PAUSE = 30.0  # seconds between attempts to reach a broker that is down
_CLOSED = "closed"  # the failure of an attempt that the broker ended before it was a connection
_OFTEN, _SPAN = 3, 60.0  # connections lost within this many seconds: another process may be using our certificate


class MqttLink:
    """A `Link` to a real broker."""

    def __init__(
        self,
        address: Address,
        on_message: Callable[[str, bytes], None],
        on_up: Callable[[], None],
        meter: Meter,
        will: LastWill | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        """on_message, on_up, on_lost: called in the client's thread; the last two after every connection and its
        subscriptions, and after every one that broke.
        """
        self._address, self._meter, self._on_up, self._on_message = address, meter, on_up, on_message
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._patterns: dict[str, None] = {}  # that are subscribed to, in their order
        self._requested: dict[int | None, Sequence[str]] = {}  # subscriptions without an answer, by message
        self._refused: list[str] = []  # subscriptions that are tried again
        self._retry: threading.Timer | None = None  # when
        self._cleared: set[str] = set()  # topics where a message was retained that must not be
        self._last_warning = ""
        self._since, self._again = time.monotonic(), ""  # of the present state; "again " if it was connected before
        self._losses: list[float] = []  # when the last ones were
        self._failure: object = None  # of the last attempt
        self._last: mqtt.MQTTMessageInfo | None = None
        self.connected = threading.Event()
        client = address.make_client(f"cbdsl-{secrets.token_hex(8)}")
        client.on_connect, client.on_disconnect, client.on_message = self._up, self._down, self._arrived
        client.on_connect_fail, client.on_socket_open, client.on_subscribe = self._failed, _send_at_once, self._granted
        client.reconnect_delay_set(random.uniform(0.2, 0.6), _LONGEST_PAUSE)  # type: ignore[arg-type]
        client.max_inflight_messages_set(100)
        if will is not None:
            client.will_set(will.topic, will.payload, qos=1, retain=True)
        self._context = make_context(address) if address.tls else None
        if self._context is not None:
            client.tls_set_context(self._context)
        self._client = client

    def open(self) -> None:
        """See `Link.open`."""
        self._client.connect_async(self._address.host, self._address.port, KEEPALIVE)
        self._client.loop_start()

    def publish(self, topic: str, payload: bytes, retain: bool = False) -> None:
        """See `Link.publish`."""
        self._meter.count("sent", topic, len(payload))
        self._last = self._client.publish(topic, payload, qos=1, retain=retain)

    def subscribe(self, *patterns: str) -> None:
        """See `Link.subscribe`."""
        with self._lock:  # until the broker is told: of two threads, one would undo what the other does
            self._patterns.update(dict.fromkeys(patterns))
            if self._client.is_connected():
                self._request(patterns)

    def unsubscribe(self, *patterns: str) -> None:
        """See `Link.unsubscribe`."""
        with self._lock:
            for pattern in patterns:
                self._patterns.pop(pattern, None)
            if self._client.is_connected():
                for start in range(0, len(patterns), _AT_ONCE):
                    self._client.unsubscribe(list(patterns[start : start + _AT_ONCE]))

    def is_up(self) -> bool:
        """See `Link.is_up`."""
        return self.connected.is_set()

    def settled(self, seconds: float) -> bool:
        """See `Link.settled`; messages are acknowledged in their order, so the last one stands for all."""
        last = self._last
        try:
            if last is not None:
                last.wait_for_publish(seconds)
            return last is None or last.is_published()
        except (RuntimeError, ValueError):  # it was published without a broker, and will not be acknowledged
            return True

    def close(self, seconds: float = 5.0) -> None:
        """See `Link.close`; waits at most `seconds` for the broker to acknowledge what is left."""
        if self.connected.is_set():
            self.settled(seconds)
        if self._retry is not None:
            self._retry.cancel()
        self._client.disconnect()
        self._client.loop_stop()

    def _request(self, patterns: Sequence[str]) -> None:
        for start in range(0, len(patterns), _AT_ONCE):
            some = patterns[start : start + _AT_ONCE]
            _, message = self._client.subscribe([(pattern, 1) for pattern in some])
            self._requested[message] = some

    def _request_again(self) -> None:
        """Repeat refused subscriptions, and then the messages that follow a connection, which were refused, too."""
        with self._lock:
            wanted = [pattern for pattern in self._refused if pattern in self._patterns]
            self._retry, self._refused = None, []
            if not wanted or not self._client.is_connected():
                return
            self._request(wanted)
        self._call(self._on_up)

    # --- called by paho, in its thread

    def _up(self, _client: mqtt.Client, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:  # noqa: ANN401
        if reason.is_failure:
            self._failure = _CLOSED
            self._warn(f"the broker at {self._address} refuses the connection: {explain(reason, self._address)}")
            return
        if self._last_warning and len(self._losses) < _OFTEN:
            seconds = time.monotonic() - self._since
            _log.info("connected %sto the broker at %s after %.0f s", self._again, self._address, seconds)
        self._last_warning, self._again, self._failure = "", "again ", None
        with self._lock:
            self._requested.clear()
            self._request(list(self._patterns))
        self.connected.set()
        self._call(self._on_up)

    def _down(self, _client: mqtt.Client, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:  # noqa: ANN401
        was_up = self.connected.is_set()
        self.connected.clear()
        if was_up and reason.is_failure:
            self._lost()
            if self._on_lost is not None:
                self._call(self._on_lost)
        elif reason.is_failure and self._failure != _CLOSED:  # to find out why takes another connection
            self._failure = _CLOSED
            why = _clause(explain(None, self._address, self._context))
            self._warn(f"the broker at {self._address} closes the connection before it is made{why}. Trying again")

    def _lost(self) -> None:
        """Log a lost connection; of a series of losses, the probable reason once."""
        now = self._since = time.monotonic()
        self._losses = [*(one for one in self._losses if now - one < _SPAN), now][-_OFTEN - 1 :]
        text = f"lost the broker at {self._address}"
        if len(self._losses) < _OFTEN:
            self._warn(f"{text}; trying again")
        elif len(self._losses) == _OFTEN:
            self._warn(
                f"{text} {_OFTEN} times within {_SPAN:.0f} s. If another process uses this certificate, each ends the "
                "other's connection: stop one, or give it its own name. Trying again without messages until it lasts"
            )
        else:
            self._last_warning = text

    def _failed(self, *_: Any) -> None:  # noqa: ANN401
        error = sys.exc_info()[1]  # paho calls this where it has caught the error
        kind = (type(error), *(getattr(error, word, None) for word in ("errno", "verify_code", "reason")))
        if kind == self._failure:  # it was logged
            return
        self._failure = kind
        what = "will not talk to" if isinstance(error, ssl.SSLCertVerificationError) else "cannot reach"
        self._warn(f"{what} the broker at {self._address}{_clause(explain(error, self._address))}. Trying again")

    def _granted(self, _client: mqtt.Client, _data: Any, message: int, codes: list[Any], _properties: Any) -> None:  # noqa: ANN401
        with self._lock:
            patterns = self._requested.pop(message, ())
            refused = [pattern for pattern, code in zip(patterns, codes, strict=False) if code.is_failure]
            self._refused += refused
            if refused and self._retry is None:
                self._retry = threading.Timer(_REFUSED_PAUSE, self._request_again)
                self._retry.daemon = True
                self._retry.start()
        if refused:
            self._warn(f"the broker at {self._address} refuses a subscription. {RIGHTS}. Trying again")

    def _arrived(self, _client: mqtt.Client, _data: Any, message: mqtt.MQTTMessage) -> None:  # noqa: ANN401
        try:
            topic = message.topic
        except UnicodeDecodeError:
            return
        self._meter.count("received", topic, len(message.payload))
        if message.retain and not topics.may_be_retained(topic):  # it would fill the broker's memory, and come again
            self._cleared.add(topic)
            self.publish(topic, b"", retain=True)
        elif topic in self._cleared and not message.payload:  # our own message
            self._cleared.discard(topic)
        else:
            self._call(self._on_message, topic, bytes(message.payload))

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call back and log an error, which would otherwise end the client's thread."""
        try:
            callback(*arguments)
        except Exception:
            _log.exception("an error while a message was handled")

    def _warn(self, text: str) -> None:
        """Log a warning, unless it is the same as the last one."""
        if text != self._last_warning:
            _log.warning(text)
        self._last_warning = text


def _clause(why: str) -> str:
    return f": {why}" if why else ""


def _send_at_once(_client: mqtt.Client, _data: Any, connection: Any) -> None:  # noqa: ANN401
    """Disable Nagle's algorithm: messages would wait for acknowledgements, about 40 ms at every step of a round."""
    with contextlib.suppress(OSError):
        own = getattr(connection, "_socket", connection)  # WebSockets are wrapped
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


Direction = Literal["sent", "received"]
Counts = dict[str, dict[str, list[int]]]  # direction -> kind -> [messages, bytes]

_ACKNOWLEDGEMENT = 4  # bytes of a PUBACK
NOW_AND_THEN = 5.0  # seconds between two writings of the counts during a run


class Meter:
    """Counts the messages of one client; thread-safe."""

    def __init__(self, path: Path | None = None) -> None:
        """Continue the counts in a file, if it exists."""
        self._path, self._lock, self._saved = path, threading.Lock(), time.monotonic()
        self._counts: Counts = add_counts([])
        if path is not None and path.exists():
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
                self._counts = add_counts([json.loads(path.read_text(encoding="utf-8"))])

    def count(self, direction: Direction, topic: str, payload: int) -> None:
        """Count a message and its acknowledgement, which goes the other way."""
        back: Direction = "received" if direction == "sent" else "sent"
        with self._lock:
            _add(self._counts[direction], topics.kind_of(topic), packet_bytes(topic, payload))
            _add(self._counts[back], "acknowledgement", _ACKNOWLEDGEMENT)

    def counts(self) -> Counts:
        """Return a copy of the counts."""
        with self._lock:
            return add_counts([self._counts])

    def save(self, every: float = 0.0) -> None:
        """Write the counts to the file, unless that was done less than `every` seconds ago."""
        now = time.monotonic()
        if self._path is not None and now - self._saved >= every:
            write_atomically(self._path, (json.dumps(self.counts(), indent=2) + "\n").encode())
            self._saved = now


def packet_bytes(topic: str, payload: int, qos: int = 1) -> int:
    """Return the size of one MQTT 3.1.1 PUBLISH packet; payload: its bytes."""
    rest = 2 + len(topic.encode()) + (2 if qos else 0) + payload
    header, left = 2, rest >> 7
    while left:
        header, left = header + 1, left >> 7
    return header + rest


def add_counts(all_counts: Iterable[Counts]) -> Counts:
    """Return the sum of the counts of several clients."""
    total: Counts = {"sent": {}, "received": {}}
    for counts in all_counts:
        for direction in total:
            for kind, (messages, size) in counts.get(direction, {}).items():
                _add(total[direction], kind, int(size), int(messages))
    return total


def total_bytes(counts: Counts, direction: Direction) -> int:
    """Return all bytes of one direction."""
    return sum(size for _, size in counts[direction].values())


def _add(kinds: dict[str, list[int]], kind: str, size: int, messages: int = 1) -> None:
    pair = kinds.setdefault(kind, [0, 0])
    pair[0] += messages
    pair[1] += size
