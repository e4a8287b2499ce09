"""A member that sends as fast as it can on topics that it may use: the others play on, and it is not listened to."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from cbdsl.network import topics, wire
from cbdsl.network.broker import find_mosquitto
from cbdsl.network.wire import ClaimMessage
from support.broker_members import member
from support.deployment import memory_of, wait_until
from support.flooded_swarm import NAMES, SWARM, Played, begin
from support.light_worker_processes import light_workers

from support.light_workers import publish  # isort: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_mosquitto() is None, reason="no mosquitto: apt-get install mosquitto"),
]
FLOODER = NAMES[3]
# Seconds until nothing is hoped for. Rounds go on when the flooder is shut out for longer than the server needs for
# what the broker has queued already: with little processor time the fourth or fifth time, after a minute or two.
PATIENCE = 600


class Flood:
    """One member's messages, in bundles, as fast as the broker takes them or at a rate, until told to stop."""

    def __init__(self, connection: ssl.SSLSocket, what: str, qos: int, rate: float = 0.0) -> None:
        self.sent, self._stop, self._connection = 0, threading.Event(), connection
        claim = wire.encode(ClaimMessage(bytes(wire.RUN_BYTES), 1, 1.0, b""))
        one = publish(topics.from_worker(SWARM, FLOODER, what), claim, 1, qos=qos)
        self._bundle, self._pause = one * 200, 200 / rate if rate else 0.0
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._send, self._drain)]
        for thread in self._threads:
            thread.start()

    def _send(self) -> None:
        with suppress(OSError):
            next_at = time.monotonic()
            while not self._stop.is_set():
                self._connection.sendall(self._bundle)
                self.sent += 200
                next_at += self._pause
                time.sleep(max(0.0, next_at - time.monotonic()))

    def _drain(self) -> None:
        with suppress(OSError):
            while self._connection.recv(65536):
                pass

    def stop(self) -> None:
        self._stop.set()
        self._threads[0].join(30)
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes the other one, which must not read who comes next
        self._threads[1].join(30)
        self._connection.close()


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[[int], Played]]:
    """A run that the flooder is not part of yet."""
    with ExitStack() as stack:
        yield lambda rounds: begin(stack, tmp_path, rounds, [name for name in NAMES if name != FLOODER])


@pytest.mark.parametrize(
    ("what", "qos"),
    [
        ("claim", 0),
        pytest.param("claim", 1, marks=pytest.mark.hostile),
        pytest.param("hello", 1, marks=pytest.mark.hostile),
        pytest.param("upload/0", 1, marks=pytest.mark.hostile),
    ],
)
def test_who_floods_is_not_listened_to_and_rounds_go_on(
    tmp_path: Path, play: Callable[[int], Played], what: str, qos: int
) -> None:
    run = play(1_000_000)
    wait_until(lambda: run.rounds() >= 5)
    clean = memory_of(run.server.pid)
    flood = Flood(member(tmp_path / "keys", FLOODER, run.broker.port), what, qos)
    wait_until(lambda: bool(run.events("flood")) and flood.sent >= 100_000, PATIENCE)
    before = run.rounds()
    wait_until(lambda: run.rounds() >= before + 20, PATIENCE)
    flood.stop()
    assert {event["worker"] for event in run.events("flood")} == {FLOODER}
    run.server.terminate()
    run.server.wait(60)
    counted = json.loads((run.out / "wire.json").read_text())["received"]
    heard = counted.get(what.partition("/")[0], [0])[0] - (run.rounds() * 7 if what == "claim" else 0)
    assert heard < flood.sent / 2, "the server hears most of a flood"
    assert memory_of(run.broker.pid) < 64 * 1024
    assert clean < 400 * 1024


def test_a_flooder_is_heard_again_when_it_stops(tmp_path: Path, play: Callable[[int], Played]) -> None:
    run = play(1_000_000)
    wait_until(lambda: run.rounds() >= 5)
    flood = Flood(member(tmp_path / "keys", FLOODER, run.broker.port), "claim", 0)
    wait_until(lambda: bool(run.events("flood")))
    flood.stop()
    with light_workers(run.broker.port, [FLOODER], tmp_path / "keys", tmp_path / "back.log", SWARM):
        wait_until(lambda: run.events("closed")[-1]["answered"] == len(NAMES))


@pytest.mark.hostile
def test_what_a_flood_costs(tmp_path: Path, play: Callable[[int], Played]) -> None:
    run = play(1_000_000)
    wait_until(lambda: run.rounds() >= 50)
    clean = run.rate(10)
    found = {"clean": clean}
    for what, qos, rate in (("claim", 0, 20_000), ("claim", 1, 20_000), ("claim", 0, 0)):
        flood = Flood(member(tmp_path / "keys", FLOODER, run.broker.port), what, qos, rate)
        time.sleep(2)
        began = flood.sent
        rounds = run.rate(15)
        found[f"{what} at quality {qos}, {(flood.sent - began) // 15} a second"] = rounds
        flood.stop()
    print(json.dumps({key: round(value, 1) for key, value in found.items()}))
    print("broker MB", memory_of(run.broker.pid) // 1024, "server MB", memory_of(run.server.pid) // 1024)
    assert all(found.values()), "a flood stops the rounds"
