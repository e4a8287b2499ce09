"""A served run under a flood of messages."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cbdsl.network.broker import Broker, running_broker
from cbdsl.network.provision import provision
from support.deployment import pictures, tiny_spec
from support.light_worker_processes import light_workers

SWARM = "lab"

NAMES = [f"worker-{number}" for number in range(8)]


class Played:
    """A run under way: its events, its counts, and what its processes take."""

    def __init__(self, folder: Path, broker: Broker, server: subprocess.Popen[bytes]) -> None:
        self.out, self.broker, self.server = folder / "run", broker, server

    def rounds(self) -> int:
        path = self.out / "rounds.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def events(self, kind: str) -> list[dict[str, object]]:
        lines = (json.loads(line) for line in (self.out / "events.jsonl").read_text().splitlines())
        return [line for line in lines if line["event"] == kind]

    def rate(self, seconds: float) -> float:
        """Rounds a second over so many seconds."""
        before, started = self.rounds(), time.monotonic()
        time.sleep(seconds)
        return (self.rounds() - before) / (time.monotonic() - started)


def begin(stack: ExitStack, folder: Path, rounds: int, present: list[str]) -> Played:
    """Light workers and a real server over a provisioned broker; who is not `present` has a certificate too."""
    keys = folder / "keys"
    provision(keys, NAMES, SWARM, ["localhost"])
    spec = tiny_spec(pictures(folder / "data"), workers=len(NAMES), rounds=rounds)
    (folder / "spec.toml").write_text(spec.to_toml())
    broker = stack.enter_context(running_broker(folder / "broker", config=keys / "broker" / "mosquitto.conf"))
    stack.enter_context(light_workers(broker.port, present, keys, folder / "crowd.log", SWARM))
    return Played(folder, broker, stack.enter_context(_serving(folder, broker)))


@contextmanager
def _serving(folder: Path, broker: Broker) -> Iterator[subprocess.Popen[bytes]]:
    home = folder / "keys" / "server"
    command = [
        sys.executable, "-m", "cbdsl", "serve", str(folder / "spec.toml"), "--swarm", SWARM,
        "--broker", f"mqtts://localhost:{broker.server_port}", "--roster", str(home / "roster.txt"),
        "--ca", str(home / "ca.crt"), "--cert", str(home / "server.crt"), "--key", str(home / "server.key"),
        "--out", str(folder / "run"), "--threads", "1", "--join-seconds", "5",
    ]  # fmt: skip
    with (folder / "server.log").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
