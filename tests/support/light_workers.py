"""Many workers in one process, for the sake of their number: each has its connection and its name, and none trains.

They speak MQTT 3.1.1 by hand, over TLS with the certificates of a provisioned folder or without, say hello, answer
every order with a claim that is never the best, and upload nothing. Run as a program it prints a line of JSON whenever
the numbers change; see `test_broker_scale.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import ssl
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from cbdsl import __version__
from cbdsl.network import topics, wire
from cbdsl.network.wire import Announcement, ClaimMessage, Hello, Invitation, OrderMessage, Status, Welcome

KEEPALIVE = 600  # seconds; a machine that is busy connecting thousands of them pings late
PATIENCE = 2.0  # seconds until a worker that was not welcomed greets again, when it hears of a round
HOPELESS = 1e6  # a score that nobody invites
_RUNS: dict[bytes, bytes] = {}  # announcement -> run: everybody gets the same bytes


def packet(kind: int, body: bytes) -> bytes:
    """An MQTT packet: its kind, its length, its body."""
    length, left = b"", len(body)
    while True:
        left, low = left >> 7, left & 127
        length += bytes([low | (128 if left else 0)])
        if not left:
            return bytes([kind]) + length + body


def text(value: str | bytes) -> bytes:
    """A string of MQTT, its length before it."""
    raw = value.encode() if isinstance(value, str) else value
    return len(raw).to_bytes(2, "big") + raw


def publish(topic: str, payload: bytes, number: int, retain: bool = False, qos: int = 1) -> bytes:
    """A PUBLISH packet."""
    mark = number.to_bytes(2, "big") if qos else b""
    return packet(0x30 | qos << 1 | retain, text(topic) + mark + payload)


def connect(name: str, will: tuple[str, bytes] | None = None) -> bytes:
    """A CONNECT packet with a clean session and a last will, retained."""
    flags = 0x02 | (0x2C if will else 0)
    last = text(will[0]) + text(will[1]) if will else b""
    return packet(0x10, text("MQTT") + bytes([4, flags]) + KEEPALIVE.to_bytes(2, "big") + text(name) + last)


def subscribe(*patterns: str) -> bytes:
    """A SUBSCRIBE packet."""
    return packet(0x82, b"\x00\x01" + b"".join(text(pattern) + b"\x01" for pattern in patterns))


@lru_cache(maxsize=8)
def _order(payload: bytes) -> OrderMessage:
    return wire.decode(payload, OrderMessage)


@dataclass
class Crowd:
    """What all of them have in common, and what came of them."""

    swarm: str
    size: int = 0  # of the model, in numbers
    up: int = 0
    lost: int = 0
    welcomed: int = 0
    claims: int = 0
    finished: bool = False
    workers: list[LightWorker] = field(default_factory=list)


class LightWorker(asyncio.Protocol):
    """One connection."""

    def __init__(self, crowd: Crowd, name: str) -> None:
        self._crowd, self._name, self._buffer = crowd, name, bytearray()
        self._transport: asyncio.WriteTransport | None = None
        self._session, self._run, self._number, self._mark = b"lightly.", b"", -1, 0
        self._pending: OrderMessage | None = None
        self._greeted = 0.0
        self.gone = asyncio.Event()
        crowd.workers.append(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        status = topics.from_worker(self._crowd.swarm, self._name, "status")
        transport.write(connect(self._name, (status, wire.encode(Status(False, self._session)))))

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None
        self._crowd.lost += 1
        self.gone.set()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= 2:
            length = shift = 0
            for index in range(1, 5):
                if index >= len(buffer):
                    return
                length |= (buffer[index] & 127) << shift
                shift += 7
                if buffer[index] < 128:
                    break
            if len(buffer) < index + 1 + length:
                return
            first, body = buffer[0], bytes(buffer[index + 1 : index + 1 + length])
            del buffer[: index + 1 + length]
            self._take(first, body)

    def _take(self, first: int, body: bytes) -> None:
        assert self._transport is not None
        if first >> 4 == 2 and body[1] == 0:  # CONNACK
            self._crowd.up += 1
            swarm, name = self._crowd.swarm, self._name
            wanted = (topics.spec(swarm), topics.order(swarm), topics.to_worker(swarm, name, "#"))
            self._transport.write(subscribe(*wanted))
            self._say("status", wire.encode(Status(True, self._session)), retain=True)
            self._introduce()
        elif first >> 4 == 3:  # PUBLISH
            end = 2 + int.from_bytes(body[:2], "big")
            start = end
            if first & 6:
                start += 2
                self._transport.write(b"\x40\x02" + body[end:start])
            self._heard(body[2:end].decode(), body[start:])

    def _heard(self, topic: str, payload: bytes) -> None:
        kind = topic.rpartition("/")[2]
        if not payload:
            return
        if kind == "spec":
            if payload not in _RUNS:
                _RUNS[payload] = wire.decode(payload, Announcement).run
            if self._run != _RUNS[payload]:
                self._run, self._number = _RUNS[payload], -1
            self._introduce()
        elif kind == "welcome":
            if self._number < 0:
                self._crowd.welcomed += 1
            self._number = wire.decode(payload, Welcome).worker
            self._claim()
        elif kind == "invitation":
            self.invited(wire.decode(payload, Invitation).round)
        elif kind == "order":
            self._pending = _order(payload)
            self._crowd.finished = self._pending.task == "finish"
            if self._crowd.finished:
                self._say("status", b"", retain=True)
            self._claim()

    def _claim(self) -> None:
        order = self._pending
        if order is None or order.task != "swarm":
            return
        if self._number < 0:  # its greeting was not heard, or the answer is under way
            if time.monotonic() - self._greeted > PATIENCE:
                self._introduce()
            return
        if not wire.has_bit(order.participants, self._number):
            return
        self._crowd.claims += 1
        self.answer(order, HOPELESS)

    def answer(self, order: OrderMessage, score: float) -> None:
        """Claim a score."""
        self._say("claim", wire.encode(ClaimMessage(order.run, order.round, score, b"")))

    def invited(self, round_number: int) -> None:
        """Upload nothing."""

    def _introduce(self) -> None:
        self._greeted = time.monotonic()
        nothing = (0, bytes(wire.RUN_BYTES), 0, bytes(wire.DIGEST_BYTES))
        self._say("hello", wire.encode(Hello(self._session, 60, *nothing, __version__)))

    def _say(self, what: str, payload: bytes, retain: bool = False) -> None:
        if self._transport is not None:
            self._mark = self._mark % 65535 + 1
            topic = topics.from_worker(self._crowd.swarm, self._name, what)
            self._transport.write(publish(topic, payload, self._mark, retain))

    def ping(self) -> None:
        if self._transport is not None:
            self._transport.write(b"\xc0\x00")


def context_of(keys: Path, name: str) -> ssl.SSLContext:
    """TLS as the worker's own program uses it."""
    home = keys / "workers" / name
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.load_verify_locations(home / "ca.crt")
    made.load_cert_chain(home / "worker.crt", home / "worker.key")
    return made


async def play(everybody: Crowd, port: int, kinds: Mapping[str, type[LightWorker]]) -> None:
    """Workers of several kinds by their names, without TLS, until the run is over; who loses its connection is back."""
    loop = asyncio.get_running_loop()

    async def stay(name: str, kind: type[LightWorker]) -> None:
        while not everybody.finished:
            with contextlib.suppress(OSError):
                _, worker = await loop.create_connection(lambda: kind(everybody, name), "127.0.0.1", port)
                await worker.gone.wait()
            await asyncio.sleep(0.05)

    staying = [asyncio.create_task(stay(name, kind)) for name, kind in kinds.items()]
    while not everybody.finished:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    for task in staying:
        task.cancel()


async def crowd(swarm: str, port: int, names: Sequence[str], keys: Path | None, at_once: int = 50) -> None:
    """Connect everybody, tell how many are there, and answer until the run is over."""
    everybody, loop, door = Crowd(swarm), asyncio.get_running_loop(), asyncio.Semaphore(at_once)

    async def come(name: str) -> None:
        async with door:
            tls = context_of(keys, name) if keys else None
            for _ in range(5):
                try:
                    await loop.create_connection(
                        lambda: LightWorker(everybody, name), "127.0.0.1", port, ssl=tls,
                        server_hostname="localhost" if tls else None,
                    )  # fmt: skip
                    return
                except OSError:
                    await asyncio.sleep(1)

    coming = [asyncio.create_task(come(name)) for name in names]
    told, pinged = "", time.monotonic()
    while True:
        now = json.dumps(
            {"up": everybody.up, "lost": everybody.lost, "welcomed": everybody.welcomed, "claims": everybody.claims}
        )
        if now != told:
            print(now, flush=True)
            told = now
        await asyncio.sleep(0.1)
        if time.monotonic() - pinged > KEEPALIVE / 5:
            pinged = time.monotonic()
            for worker in everybody.workers:
                worker.ping()
        if everybody.finished and all(task.done() for task in coming):
            await asyncio.sleep(1)
            return


def main() -> None:
    """Names are read from standard input, one a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--swarm", required=True)
    parser.add_argument("--keys", type=Path)
    given = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(crowd(given.swarm, given.port, sys.stdin.read().split(), given.keys))


if __name__ == "__main__":
    main()
