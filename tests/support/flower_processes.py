"""A Flower federation in processes of its own, on the loopback, with a home folder that is gone afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LIMIT = 900.0  # seconds, for whatever a loaded machine may take


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@dataclass
class Federation:
    """A SuperLink and what was started beside it."""

    home: Path
    port: int
    ray: str  # a folder with a short name: there are sockets in it
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {
            **os.environ,
            "PATH": path,
            "HOME": str(self.home),
            "FLWR_HOME": str(self.home / ".flwr"),
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ADDRESS": "local",  # never somebody else's cluster on this machine
            "RAY_TMPDIR": self.ray,
            "RAY_worker_niceness": "0",  # 15 otherwise, which is for ever on a machine with other things to do
        }

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with (self.home / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment, cwd=self.home
            )
        self.processes.append(process)
        return process

    def node(self, worker: int, workers: int, more: str = "") -> subprocess.Popen[bytes]:
        """A SuperNode."""
        return self.start(
            f"node-{worker}", "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.port}",
            "--host", "127.0.0.1", "--port", str(free_port()),
            "--node-config", f"partition-id={worker} num-partitions={workers} {more}".strip(),
        )  # fmt: skip

    def run(self, app: Path, config: str, federation: str = "") -> str:
        """`flwr run`, until the run is over; what it says."""
        command = ["flwr", "run", str(app), "here", "--stream", "-c", config]
        command += ["--federation-config", federation] if federation else []
        for _ in range(3):
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, env=self.environment, cwd=self.home,
                timeout=LIMIT, check=False,
            )  # fmt: skip
            said = done.stdout.decode() + done.stderr.decode()
            if (
                "Simulation Runtime crashed" not in said
            ):  # Ray waits 30 s for its own process, however busy a machine is
                break
        return said


@contextlib.contextmanager
def federation(home: Path, options: Sequence[str] = ()) -> Iterator[Federation]:
    """A SuperLink; it and all that was started beside it are ended afterwards."""
    made = Federation(home, free_port(), tempfile.mkdtemp(prefix="ray"))
    (home / ".flwr").mkdir(parents=True, exist_ok=True)
    (home / ".flwr/config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{made.port}"\ninsecure = true\n'
    )
    try:
        made.start(
            "superlink", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(made.port), *options
        )
        deadline = time.monotonic() + LIMIT
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", made.port)) == 0:
                    break
            assert time.monotonic() < deadline, (home / "superlink.log").read_text()
            time.sleep(0.2)
        yield made
    finally:
        for process in reversed(made.processes):
            process.terminate()
        for process in made.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        _end_the_rest(made)
        shutil.rmtree(made.ray, ignore_errors=True)


def _end_the_rest(made: Federation) -> None:
    """Flower's and Ray's own children, known by the folder that they were given."""
    mark = f"RAY_TMPDIR={made.ray}".encode()
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + 20
        while left := [pid for pid in _processes() if mark in _environment(pid) and pid != os.getpid()]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            for process in made.processes:
                process.poll()
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _environment(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""
