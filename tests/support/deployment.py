"""A deployment for tests: small pictures, a broker that can be killed, workers and a server as real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import cbdsl
from cbdsl.network.broker import Broker, Kind, find_mosquitto, running_broker
from cbdsl.network.local_swarm import write_worker_samples
from cbdsl.network.mqtt import Address
from cbdsl.network.roster import worker_names
from cbdsl.network.server import ServerConfig
from cbdsl.network.timeouts import Deadlines
from cbdsl.runs.build import Experiment
from cbdsl.runs.folder import read_result
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec

SWARM = "test"
PATIENT = Deadlines(round_seconds=60, upload_seconds=60, join_seconds=60, grace_seconds=60, least_seconds=60)
"""Waits for whoever was killed, so that a run with crashes must end with the numbers of a run without."""


def brokers() -> list[Kind]:
    """The brokers there are; mosquitto only where it is installed."""
    return ["mosquitto", "embedded"] if find_mosquitto() else ["embedded"]


def pictures(folder: Path, side: int = 8, train: int = 700, test: int = 100, contrast: int = 70) -> Path:
    """IDX files of noisy pictures in four classes, each class bright in another quarter."""
    rng = np.random.default_rng(5)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("t10k", test)):
        labels = rng.integers(0, 4, count).astype(np.uint8)
        images = rng.integers(0, 160, (count, side, side)).astype(np.uint8)
        half = side // 2
        for image, label in zip(images, labels, strict=True):
            row, column = divmod(int(label), 2)
            image[row * half : (row + 1) * half, column * half : (column + 1) * half] += contrast
        (folder / f"{name}-images-idx3-ubyte").write_bytes(
            b"\0\0\x08\x03" + struct.pack(">3I", *images.shape) + images.tobytes()
        )
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(
            b"\0\0\x08\x01" + struct.pack(">I", count) + labels.tobytes()
        )
    return folder


def tiny_spec(data: Path, **settings: object) -> Spec:
    """Softmax regression on small pictures; keywords use __ for a dot."""
    base: dict[str, Any] = {
        "workers": 4, "rounds": 6, "model": "softmax", "data.source": str(data), "data.samples_per_worker": 60,
        "data.shared_training": 20, "data.shared_scoring": 100, "data.holdout": 30, "local.learning_rate": 0.02,
    }  # fmt: skip
    return resolve(Spec().with_settings(base | {key.replace("__", "."): value for key, value in settings.items()}))


def comparable(records: list[cbdsl.RoundRecord] | tuple[cbdsl.RoundRecord, ...]) -> list[cbdsl.RoundRecord]:
    """Records without what a clock says."""
    return [replace(line, seconds=0.0) for line in records]


def assert_as_simulated(folder: Path, spec: Spec) -> None:
    """The run in a folder has the verdicts, bytes, accuracies and weights of the simulator."""
    simulated = cbdsl.run(spec)
    _, _, records = read_result(folder)
    assert comparable(records) == comparable(simulated.rounds)
    with np.load(folder / "checkpoint.npz") as stored:
        assert np.array_equal(stored["global_best"], simulated.weights)


class Deployment:
    """Processes of a test; whatever is still alive at its end is killed."""

    def __init__(self, folder: Path, spec: Spec, kind: Kind) -> None:
        self.folder, self.spec, self.kind = folder, spec, kind
        self.stage = Experiment.prepare(spec, threads=1)
        self.names = worker_names(spec.workers)
        self.out = folder / "run"
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.server: subprocess.Popen[bytes] | None = None
        self._mishaps: list[Future[None]] = []
        self._stack = contextlib.ExitStack()
        self._hand = ThreadPoolExecutor(1)  # one thread that stays: a broker ends with the thread that started it
        self.broker = self._start_broker(0)
        write_worker_samples(self.stage, folder / "workers", self.names)
        (folder / "roster.txt").write_text("\n".join(self.names))
        (folder / "spec.toml").write_text(spec.to_toml())

    def _start_broker(self, port: int) -> Broker:
        return self._stack.enter_context(running_broker(self.folder / "broker", self.kind, port=port))

    @property
    def address(self) -> Address:
        return Address(self.broker.host, self.broker.port)

    def config(self, deadlines: Deadlines = PATIENT) -> ServerConfig:
        return ServerConfig(SWARM, self.address, deadlines, self.names)

    def start_worker(self, name: str, *options: str) -> None:
        self.workers[name] = self.twin(name, self.folder / "workers" / name, *options)

    def twin(self, name: str, home: Path, *options: str) -> subprocess.Popen[bytes]:
        """A worker's process, from whatever folder; whoever asks for a second one ends it."""
        number = self.names.index(name)
        attack = ["--attack", self.spec.attack.name] if number in self.stage.byzantine else []
        with (home / "worker.log").open("ab") as log:
            return subprocess.Popen(
                [
                    sys.executable, "-m", "cbdsl", "work", "--id", name, "--swarm", SWARM, "--broker",
                    str(self.address), "--data", str(home / "samples.npz"), "--state", str(home), "--threads", "1",
                    *attack, *options,
                ],
                stdout=log, stderr=log,
            )  # fmt: skip

    def start_workers(self) -> None:
        for name in self.names:
            self.start_worker(name)

    def start_server(self, *options: str) -> None:
        with (self.folder / "server.log").open("ab") as log:
            self.server = subprocess.Popen(
                [
                    sys.executable, "-m", "cbdsl", "serve", str(self.folder / "spec.toml"), "--broker",
                    str(self.address), "--out", str(self.out), "--swarm", SWARM, "--roster",
                    str(self.folder / "roster.txt"), "--threads", "1", "--grace-seconds", "60",
                    "--least-seconds", "60", *options,
                ],
                stdout=log, stderr=log,
            )  # fmt: skip

    def kill_worker(self, name: str) -> None:
        self.workers[name].send_signal(signal.SIGKILL)
        self.workers[name].wait()

    def kill_server(self) -> None:
        assert self.server is not None
        self.server.send_signal(signal.SIGKILL)
        self.server.wait()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something while the run goes on."""

        def act() -> None:
            time.sleep(seconds)
            action()

        self._mishaps.append(self._hand.submit(act))

    def kill_broker(self) -> None:
        os.kill(self.broker.pid, signal.SIGKILL)
        port = self.broker.port
        with contextlib.suppress(ProcessLookupError):
            os.waitpid(self.broker.pid, 0)
        self.broker = self._start_broker(port)

    def server_ended(self) -> bool:
        return self.server is not None and self.server.poll() is not None

    def rounds_played(self) -> int:
        path = self.out / "rounds.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_for_end(self, seconds: float = 120) -> None:
        assert self.server is not None
        code = self.server.wait(seconds)
        assert code == 0, (self.folder / "server.log").read_text()[-3000:]

    def close(self) -> None:
        self._hand.shutdown()
        for process in [*self.workers.values(), *([self.server] if self.server else [])]:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._stack.close()
        for mishap in self._mishaps:
            mishap.result()


@contextlib.contextmanager
def deployment(folder: Path, spec: Spec, kind: Kind) -> Iterator[Deployment]:
    made = Deployment(folder, spec, kind)
    try:
        yield made
    finally:
        made.close()


def wait_until(condition: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


def memory_of(pid: int, key: str = "VmRSS") -> int:
    """Kilobytes."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(key)).split()[1])
