"""A plain MQTT client for tests of brokers: it sends, it remembers what came, it waits."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.reasoncodes import ReasonCode


def wait_for(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class Client:
    """One connection to a broker on loopback."""

    def __init__(
        self,
        port: int,
        name: str = "",
        tls: ssl.SSLContext | None = None,
        clean: bool = True,
        will: str = "",
        username: str = "",
        password: str = "guess",
    ) -> None:
        self.received: list[tuple[str, bytes, bool]] = []
        self.refusal = ""
        self.losses = 0
        self._port = port
        self._up, self._granted = threading.Event(), threading.Event()
        self._client = paho.Client(
            CallbackAPIVersion.VERSION2, name, clean, protocol=paho.MQTTv311, reconnect_on_failure=False
        )
        self._client.on_connect = self._connected
        self._client.on_disconnect = self._disconnected
        self._client.on_subscribe = lambda *_: self._granted.set()
        self._client.on_message = lambda _client, _data, message: self.received.append(
            (message.topic, bytes(message.payload), message.retain)
        )
        if will:
            self._client.will_set(will, b"gone", qos=1, retain=True)
        if username:
            self._client.username_pw_set(username, password)
        if tls is not None:
            self._client.tls_set_context(tls)

    def _connected(
        self, _client: object, _data: object, _flags: object, reason: ReasonCode, _properties: object
    ) -> None:
        if reason.is_failure:
            self.refusal = str(reason)
        else:
            self._up.set()

    def _disconnected(self, *_: object) -> None:
        self.losses += 1

    def connect(self, seconds: float = 5.0) -> Client:
        """Connect; OSError (ssl.SSLError among them) or PermissionError if the broker will not have us."""
        self._client.connect("localhost", self._port, keepalive=30)
        self._client.loop_start()
        if not wait_for(lambda: self._up.is_set() or self.losses or self.refusal, seconds) or not self._up.is_set():
            self._client.loop_stop()
            raise PermissionError(self.refusal or "the broker closed the connection")
        return self

    def subscribe(self, *patterns: str) -> None:
        """Subscribe and wait until the broker has answered."""
        for pattern in patterns:
            self._granted.clear()
            self._client.subscribe(pattern, qos=1)
            assert self._granted.wait(5)

    def publish(self, topic: str, payload: bytes, retain: bool = False) -> None:
        """Publish and wait until the broker has acknowledged."""
        self._client.publish(topic, payload, qos=1, retain=retain).wait_for_publish(10)

    def publish_later(self, topic: str, payload: bytes, retain: bool = False) -> None:
        """Publish without waiting."""
        self._client.publish(topic, payload, qos=1, retain=retain)

    def topics(self) -> list[str]:
        """The topics of what came, in order."""
        return [topic for topic, _, _ in self.received]

    def vanish(self) -> None:
        """Leave without a word, as a device does that loses power."""
        connection = self._client.socket()
        assert isinstance(connection, socket.socket)
        connection.shutdown(socket.SHUT_RDWR)
        self._client.loop_stop()

    def close(self) -> None:
        """Leave as one should."""
        self._client.disconnect()
        self._client.loop_stop()
