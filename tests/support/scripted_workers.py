"""Scripted workers on an in-memory bus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from cbdsl.algorithm.messages import Order
from cbdsl.arrays import Floats
from cbdsl.codecs.envelope import Codecs
from cbdsl.network import topics, wire
from cbdsl.network.journal import Events, Journal
from cbdsl.network.mqtt import Address, LastWill
from cbdsl.network.roster import Roster
from cbdsl.network.server import NetworkSwarm, ServerConfig
from cbdsl.network.timeouts import Deadlines
from cbdsl.network.wire import Announcement, ClaimMessage, Hello, Invitation, OrderMessage, Status
from support.bus import Bus, BusLink

RUN, SIZE = b"run-0001", 30_000  # two pieces

NAMES = ("ann", "bob", "cyd")

QUICK = Deadlines(round_seconds=0.6, upload_seconds=0.4, join_seconds=0.5, grace_seconds=0.05, patience=2)


def model(value: float) -> Floats:
    return np.full(SIZE, value, np.float32)


class Scripted:
    """A worker that claims a score for every order and uploads when it is invited, or does something else."""

    def __init__(self, bus: Bus, name: str, score: float = 0.5, **script: object) -> None:
        self.bus, self.name, self.score = bus, name, score
        self.script: dict[str, Any] = dict(script)
        self.session = name.encode().ljust(8, b".")
        will = LastWill(topics.from_worker("s", name, "status"), wire.encode(Status(False, self.session)))
        self.link: BusLink = bus.link(self.hear, self.greet, will)
        for pattern in (topics.spec("s"), topics.order("s"), topics.to_worker("s", name, "#")):
            self.link.subscribe(pattern)
        self.link.open()

    def greet(self) -> None:
        self.say("status", wire.encode(Status(True, self.session)), retain=True)
        self.say("hello", wire.encode(Hello(self.session, 7, 0, bytes(8), 0, bytes(16), "test")))

    def say(self, what: str, payload: bytes, retain: bool = False) -> None:
        self.link.publish(topics.from_worker("s", self.name, what), payload, retain)

    def hear(self, topic: str, payload: bytes) -> None:
        act: Callable[[Scripted, str, bytes], None] | None = self.script.get("hear")
        if act is not None:
            act(self, topic, payload)
        elif topic.endswith("/spec") and payload:
            self.greet()
        elif topic.endswith("/order") and payload:
            order = wire.decode(payload, OrderMessage)
            if order.task == "swarm":
                self.claim(order.round)
            elif order.task == "average":
                self.send(order.round)
        elif topic.endswith("/invitation"):
            self.send(wire.decode(payload, Invitation).round)

    def claim(self, round_number: int, score: float | None = None) -> None:
        if not self.script.get("mute"):
            value = float(np.float32(self.score if score is None else score))
            self.say("claim", wire.encode(ClaimMessage(RUN, round_number, value, b"")))

    def send(self, round_number: int) -> None:
        if not self.script.get("stalls"):
            for piece in wire.split_content(RUN, round_number, wire.weights_to_bytes(model(self.score))):
                self.say(f"upload/{piece.index}", wire.encode(piece))


@pytest.fixture
def bus() -> Bus:
    return Bus()


@pytest.fixture
def make(bus: Bus, tmp_path: Path) -> Iterator[Callable[..., NetworkSwarm]]:
    made: list[NetworkSwarm] = []

    def build(deadlines: Deadlines = QUICK, names: tuple[str, ...] = NAMES, places: int = 3) -> NetworkSwarm:
        announcement = Announcement(RUN, "", "", SIZE, 1, "[1]", 2, 0, 0, bytes(16), 0)
        network = NetworkSwarm(
            ServerConfig("s", Address("x", 1), deadlines, names), announcement, b"",
            Roster(tmp_path / "roster.json", places, names),
            Journal(tmp_path / "journal.bin"), Events(tmp_path / "events.jsonl"), codecs=Codecs(),
        )  # fmt: skip
        network.retained.set_model(model(0.0), 1, ())
        network.start(bus.link)
        made.append(network)
        return network

    yield build
    for network in made:
        network.close()


def order(
    number: int = 1, task: Literal["swarm", "average"] = "swarm", participants: tuple[int, ...] = (0, 1, 2)
) -> Order:
    return Order(number, task, participants, 1.0, 0.1, None)


def refused(network: NetworkSwarm) -> dict[str, int]:
    return dict(network._events.refusals)
