"""How many workers fit: a provisioned broker, `cbdsl serve` as it is, and light workers by the thousand."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from cbdsl.network.broker import find_mosquitto, running_broker
from cbdsl.network.provision import provision
from cbdsl.network.roster import worker_names
from support.deployment import memory_of, pictures, tiny_spec, wait_until
from support.light_worker_processes import SWARM, last_said, light_workers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_mosquitto() is None, reason="no mosquitto: apt-get install mosquitto"),
]


@dataclass(frozen=True)
class Measured:
    workers: int
    connected_seconds: float  # until all had their connection
    gathered_seconds: float  # from the server's start until it began to play
    present: int
    first_round: float  # seconds
    median_round: float
    answered: list[int]  # in each round
    server_megabytes: int
    broker_megabytes: int
    lost: int  # connections


def measure(folder: Path, workers: int, rounds: int = 6) -> Measured:
    keys, names = folder / "keys", list(worker_names(workers, 1))
    provision(keys, names, SWARM, ["localhost"])
    spec = tiny_spec(pictures(folder / "data"), workers=workers, rounds=rounds)
    (folder / "spec.toml").write_text(spec.to_toml())
    out, home = folder / "run", keys / "server"
    with running_broker(folder / "broker", config=keys / "broker" / "mosquitto.conf") as broker:
        started = time.monotonic()
        with light_workers(broker.port, names, keys, folder / "crowd.log") as log:
            wait_until(lambda: last_said(log)["up"] == workers, 300)
            connected = time.monotonic() - started
            command = [
                sys.executable, "-m", "cbdsl", "serve", str(folder / "spec.toml"), "--swarm", SWARM,
                "--broker", f"mqtts://localhost:{broker.server_port}", "--roster", str(home / "roster.txt"),
                "--ca", str(home / "ca.crt"), "--cert", str(home / "server.crt"), "--key", str(home / "server.key"),
                "--out", str(out), "--threads", "1", "--round-seconds", "60",
            ]  # fmt: skip
            began, peak = time.time(), 0
            with (folder / "server.log").open("wb") as said:
                server = subprocess.Popen(command, stdout=said, stderr=said)
            try:
                deadline = time.monotonic() + 300
                while server.poll() is None:
                    assert time.monotonic() < deadline, (folder / "server.log").read_text()[-2000:]
                    with suppress(StopIteration, OSError):  # it has just ended
                        peak = max(peak, memory_of(server.pid, "VmHWM"))
                    time.sleep(0.05)
                broker_memory = memory_of(broker.pid, "VmHWM")
                lost = last_said(log)["lost"]
            finally:
                server.kill()
                server.wait()
    assert server.returncode == 0, (folder / "server.log").read_text()[-2000:]
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    gathered = next(event for event in events if event["event"] == "gathered")
    closed = [event for event in events if event["event"] == "closed"]
    seconds = sorted(event["seconds"] for event in closed)
    return Measured(
        workers, round(connected, 1), round(gathered["time"] - began, 1), len(gathered["present"]),
        closed[0]["seconds"], seconds[len(seconds) // 2], [event["answered"] for event in closed],
        peak // 1024, broker_memory // 1024, lost,
    )  # fmt: skip


def test_a_hundred_light_workers_play(tmp_path: Path) -> None:
    found = measure(tmp_path, 100, rounds=3)
    assert found.present == 100
    assert found.answered == [100] * 3
    assert found.lost == 0


@pytest.mark.hostile
@pytest.mark.parametrize("workers", [1000, 3000, 5000])
def test_thousands_play_out_of_the_box(tmp_path: Path, workers: int) -> None:
    found = measure(tmp_path, workers)
    print(json.dumps(asdict(found)))
    assert found.present == workers
    assert found.answered == [workers] * 6
    assert found.lost == 0
