"""Strangers that begin TLS handshakes as fast as they can: none gets in, the swarm plays on, a member can come."""

from __future__ import annotations

import json
import os
import socket
import ssl
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from cbdsl.network.broker import find_mosquitto
from cbdsl.network.provision import provision
from support.deployment import memory_of, wait_until
from support.flooded_swarm import NAMES, SWARM, Played, begin
from support.light_worker_processes import last_said, light_workers
from support.light_workers import connect

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_mosquitto() is None, reason="no mosquitto: apt-get install mosquitto"),
]
HANDS = 4  # handshakes at a time
MOST = 40_000  # in all
SECONDS = 10.0  # each rate is measured over so long
LATECOMER = NAMES[-1]


class Handshakes:
    """One handshake after the other, each to its end, until told to stop."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        self.begun = self.let_in = 0
        self._port, self._context, self._stop = port, context, threading.Event()
        self._lock, self._threads = threading.Lock(), [threading.Thread(target=self._knock) for _ in range(HANDS)]
        for thread in self._threads:
            thread.start()

    def _knock(self) -> None:
        while not self._stop.is_set() and self.begun < MOST:
            answer = b""
            with (
                suppress(OSError),
                socket.create_connection(("127.0.0.1", self._port), timeout=10) as raw,
                self._context.wrap_socket(raw, server_hostname="localhost") as secure,
            ):
                secure.sendall(connect(LATECOMER))
                answer = secure.recv(4)
            with self._lock:
                self.begun += 1
                self.let_in += bool(answer)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


def stranger(folder: Path, certificate: str) -> ssl.SSLContext:
    """Trusts the swarm's broker, and has no certificate or a member's name from another authority."""
    made = ssl.create_default_context(cafile=str(folder / "keys" / "server" / "ca.crt"))
    if certificate == "foreign":
        provision(folder / "other", NAMES, SWARM, ["localhost"])
        home = folder / "other" / "workers" / LATECOMER
        made.load_cert_chain(home / "worker.crt", home / "worker.key")
    return made


@dataclass(frozen=True)
class Pace:
    """How a run gets on: by the clock, which other work on the machine slows, and by what a round costs, which not."""

    rounds_a_second: float
    server_ms: float  # of processor time, a round
    broker_ms: float


def pace_of(run: Played) -> Pace:
    rounds, server, broker = run.rounds(), processor_seconds(run.server.pid), processor_seconds(run.broker.pid)
    rate = run.rate(SECONDS)
    played = max(1, run.rounds() - rounds)
    spent = processor_seconds(run.server.pid) - server, processor_seconds(run.broker.pid) - broker
    return Pace(round(rate, 1), *(round(1000 * seconds / played, 2) for seconds in spent))


def processor_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.hostile
@pytest.mark.parametrize("certificate", ["none", "foreign"])
def test_a_flood_of_handshakes_lets_nobody_in_and_keeps_nobody_out(certificate: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        run = begin(stack, tmp_path, 1_000_000, [name for name in NAMES if name != LATECOMER])
        wait_until(lambda: run.rounds() >= 50)
        log = tmp_path / "broker" / "broker.log"
        before, memory, written = pace_of(run), memory_of(run.broker.pid), log.stat().st_size
        flood = Handshakes(run.broker.port, stranger(tmp_path, certificate))
        stack.callback(flood.stop)
        started = time.monotonic()
        during = pace_of(run)
        handshakes = flood.begun / (time.monotonic() - started)
        came = time.monotonic()
        stack.enter_context(
            light_workers(run.broker.port, [LATECOMER], tmp_path / "keys", tmp_path / "late.log", SWARM)
        )
        wait_until(lambda: run.events("closed")[-1]["answered"] == len(NAMES))
        came = time.monotonic() - came
        assert flood.begun < MOST, "the flood was over before it was measured"
        flood.stop()
        after = pace_of(run)
        print(json.dumps({
            "certificate": certificate, "handshakes a second": round(handshakes), "before": asdict(before),
            "during": asdict(during), "after": asdict(after), "a latecomer plays after seconds": round(came, 1),
            "broker kB before and after": [memory, memory_of(run.broker.pid)],
            "bytes of log a handshake": round((log.stat().st_size - written) / flood.begun),
        }))  # fmt: skip
        assert flood.begun > 100
        assert flood.let_in == 0
        assert during.rounds_a_second > 0, "a flood of handshakes stops the rounds"
        assert during.broker_ms > 2 * before.broker_ms, "the flood costs nothing: is it one?"
        assert after.rounds_a_second > 0
        assert after.broker_ms < 2 * before.broker_ms, "the broker does not recover"
        assert after.server_ms < 2 * before.server_ms, "the server does not recover"
        wait_until(lambda: run.events("closed")[-1]["answered"] == len(NAMES))
        assert last_said(tmp_path / "crowd.log")["lost"] == 0, "who was inside lost its connection"
        assert memory_of(run.broker.pid) < memory + 32 * 1024
