"""A server that speaks the protocol perfectly and orders whatever it likes; and a worker as its victim."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from cbdsl.algorithm.messages import Claim
from cbdsl.arrays import Samples
from cbdsl.codecs.envelope import longest_update
from cbdsl.models.architecture import Architecture
from cbdsl.models.layers import Layer, Linear
from cbdsl.network import topics, wire
from cbdsl.network.broker import find_mosquitto, running_broker
from cbdsl.network.device_worker import parse_announcement
from cbdsl.network.mqtt import Address, Meter, MqttLink
from cbdsl.network.samples import pack_shared, write_samples
from cbdsl.network.wire import Announcement, ClaimMessage, Hello, Invitation, OrderMessage, Piece, Welcome
from cbdsl.spec import Spec

SWARM, NAME = "s", "victim"
SIDE, CLASSES = 8, 3
NOTHING = bytes(wire.DIGEST_BYTES)
PATIENCE = 60.0  # seconds; a loaded machine takes its time


def own_samples(count: int = 40) -> Samples:
    rng = np.random.default_rng(3)
    return Samples(rng.normal(size=(count, SIDE)).astype(np.float32), (np.arange(count) % CLASSES).astype(np.int32))


def network(*layers: Layer, shape: tuple[int, ...] = (SIDE,)) -> Architecture:
    return Architecture(shape, layers or (Linear(SIDE, CLASSES),))


def wide(hidden: int) -> Architecture:
    """A network of about 11 parameters a hidden unit."""
    return network(Linear(SIDE, hidden), Linear(hidden, CLASSES))


def spec_text(**settings: object) -> str:
    """A small run's spec; keywords use __ for a dot."""
    tree = Spec().to_tree() | {"workers": 4, "rounds": 1000, "shared": "none", "model": "softmax"}
    for key, value in settings.items():  # unchecked: a hostile server sends what it likes
        group, _, name = key.partition("__")
        tree[group] = {**tree[group], name: value} if name else value
    return tomli_w.dumps(tree)


def announcement(described: Architecture | None = None, **changes: Any) -> Announcement:  # noqa: ANN401
    described = described or network()
    fair = Announcement(
        run=os.urandom(wire.RUN_BYTES), spec=spec_text(), architecture=json.dumps(described.to_dict()),
        size=described.size, vectors=1, shape=json.dumps(list(described.shape)), classes=described.classes,
        shared_training=0, shared_scoring=0, shared_digest=NOTHING, shared_size=0,
    )  # fmt: skip
    return replace(fair, **changes)


def with_shared(fair: Announcement, count: int, shape: tuple[int, ...] = (SIDE,)) -> tuple[Announcement, bytes]:
    """Zeros to train on: they shrink to a thousandth, and are as large as ever when they are unpacked."""
    packed = pack_shared(Samples(np.zeros((count, *shape), np.float32), np.zeros(count, np.int32)))
    digest = wire.digest_of(packed)
    return replace(fair, shared_training=count, shared_digest=digest, shared_size=len(packed)), packed


class HostileServer:
    """Publishes as the server; listens to what the worker says."""

    def __init__(self, address: Address) -> None:
        self.heard: list[tuple[str, bytes]] = []
        self._link = MqttLink(
            address, lambda topic, payload: self.heard.append((topic, payload)), lambda: None, Meter()
        )
        self._link.subscribe(topics.from_all(SWARM))
        self._link.open()
        assert self._link.connected.wait(PATIENCE)

    def close(self) -> None:
        self._link.close()

    def forget(self) -> None:
        """Take back what is retained, for whoever comes next."""
        self._link.publish(topics.spec(SWARM), b"", retain=True)

    def announce(self, what: Announcement) -> None:
        self._link.publish(topics.spec(SWARM), wire.encode(what), retain=True)

    def welcome(self, run: bytes, number: int = 0, start: bytes = NOTHING) -> None:
        self._tell("welcome", wire.encode(Welcome(run, number, start, 0, 2**31 - 1)))

    def invite(self, run: bytes, round_number: int) -> None:
        """At QoS 0: then the broker waits for no acknowledgement, however many there are."""
        claim = next((one for one in self.claims(run) if one.round == round_number), None)
        said = wire.pack_claim(None if claim is None else Claim(claim.score, claim.commitment))
        payload = wire.encode(Invitation(run, round_number, said))
        self._link._client.publish(topics.to_worker(SWARM, NAME, "invitation"), payload, qos=0)

    def send(self, run: bytes, kind: str, content: bytes, version: int = 0, leave_out: int = -1) -> None:
        """Something large in its pieces, as a private message; perhaps all but one of them."""
        for piece in wire.split_content(run, version, content):
            if piece.index != leave_out:
                self._tell(f"{kind}/{piece.index}", wire.encode(piece))

    def send_piece(self, kind: str, piece: Piece) -> None:
        self._tell(f"{kind}/{piece.index}", wire.encode(piece))

    def order(self, run: bytes, round_number: int, model: bytes, **changes: Any) -> None:  # noqa: ANN401
        fair = OrderMessage(run, round_number, "swarm", b"\xff", 0.5, 0.01, 1, wire.digest_of(model))
        self._tell("order", wire.encode(replace(fair, **changes)))

    def _tell(self, what: str, payload: bytes) -> None:
        self._link.publish(topics.to_worker(SWARM, NAME, what), payload)

    def said(self, kind: str) -> list[bytes]:
        start = topics.from_worker(SWARM, NAME, kind)
        return [payload for topic, payload in list(self.heard) if topic.startswith(start)]

    def claims(self, run: bytes) -> list[ClaimMessage]:
        return [one for one in (wire.decode(each, ClaimMessage) for each in self.said("claim")) if one.run == run]

    def hellos(self) -> list[Hello]:
        return [wire.decode(each, Hello) for each in self.said("hello")]


@dataclass
class Victim:
    """A worker's process, its folder, its log."""

    home: Path
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> str:
        return (self.home / "worker.log").read_text()

    def alive(self) -> bool:
        return self.process.poll() is None

    def peak(self) -> int:
        """Bytes it had at most so far."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(next(line for line in text.splitlines() if line.startswith("VmHWM")).split()[1])

    def stop(self) -> float:
        """Ask it to stop; seconds until it did."""
        before = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE)
        return time.monotonic() - before


@contextmanager
def victim(
    home: Path,
    address: Address,
    *options: str,
    own: Samples | None = None,
    program: tuple[str, ...] = ("-m", "cbdsl"),
) -> Iterator[Victim]:
    home.mkdir(parents=True, exist_ok=True)
    write_samples(home / "samples.npz", own or own_samples())
    command = [
        sys.executable, *program, "work", "--id", NAME, "--swarm", SWARM, "--broker", str(address), "--data",
        str(home / "samples.npz"), "--state", str(home / "state"), "--threads", "1", "--stay", *options,
    ]  # fmt: skip
    with (home / "worker.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=home)
    try:
        yield Victim(home, process)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@contextmanager
def broker(folder: Path) -> Iterator[Address]:
    with running_broker(folder, "mosquitto" if find_mosquitto() else "embedded") as made:
        yield Address(made.host, made.port)


@contextmanager
def slow_line(address: Address, bytes_a_second: int) -> Iterator[Address]:
    """Another address of a broker, to which one client can send so much and no more; it is sent everything at once."""
    listener = socket.create_server(("127.0.0.1", 0))
    sockets = [listener]

    def pump(source: socket.socket, target: socket.socket, pause: float) -> None:
        with suppress(OSError):
            while content := source.recv(100_000):
                target.sendall(content)
                time.sleep(pause * len(content))

    def connect() -> None:
        with suppress(OSError):
            client, _ = listener.accept()
            target = socket.create_connection((address.host, address.port))
            sockets.extend([client, target])
            threading.Thread(target=pump, args=(target, client, 0.0), daemon=True).start()
            pump(client, target, 1 / bytes_a_second)

    threading.Thread(target=connect, daemon=True).start()
    try:
        yield Address("127.0.0.1", listener.getsockname()[1])
    finally:
        for each in sockets:
            each.close()


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


def deep(layers: int) -> Architecture:
    """A network of a million parameters a layer on samples of a thousand numbers."""
    return network(*[Linear(1000, 1000)] * layers, Linear(1000, CLASSES), shape=(1000,))


def zeros_of(what: Announcement) -> bytes:
    return np.zeros(what.size * what.vectors, "<f4").tobytes()


def fill(server: HostileServer, what: Announcement, shared: bytes = b"") -> None:
    """Make a worker hold as much as it can be made to hold: everything whole, and half of everything again."""
    codecs, size = parse_announcement(what).codecs, what.size * what.vectors

    def begin(kind: str, length: int, version: int) -> None:
        data = bytes(min(length, wire.CHUNK))
        server.send_piece(kind, Piece(what.run, version, bytes([version]) * wire.DIGEST_BYTES, length, 0, data))

    start, model = np.ones(what.size, "<f4").tobytes(), np.full(size, 0.01, "<f4").tobytes()
    server.send(what.run, "start", start)
    begin("start", len(start), 3)
    if codecs.down.relative:
        longest = longest_update(codecs, what.size)
        for version in range(1, 5):
            server.send(what.run, "update", bytes([9]) + bytes(longest - 1 - version), version)  # no update of anything
            begin("update", longest, version)
    if shared:
        server.send(what.run, "shared", shared)
        begin("shared", len(shared), 7)
    server.send(what.run, "model", zeros_of(what), 1)
    server.send(what.run, "model", model, 2)
    begin("model", len(model), 3)
    server.welcome(what.run, 0, wire.digest_of(start))
    server.order(what.run, 1, model, version=2)


def play(server: HostileServer, what: Announcement, shared: bytes = b"", **order: Any) -> None:  # noqa: ANN401
    """Announce a run and order its first round."""
    server.announce(what)
    wait_until(lambda: len(server.hellos()) >= 2)  # the second one answers the announcement
    server.welcome(what.run)
    if shared:
        server.send(what.run, "shared", shared)
    model = zeros_of(what)
    server.send(what.run, "model", model, 1)
    server.order(what.run, 1, model, **order)
