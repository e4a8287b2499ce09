"""`cbdsl swarm`: a whole deployment on one machine: a broker, the server, and a process for every worker.

Each worker gets the samples that the simulator would give it, as a file of its own, and nothing else. Whatever was
started is ended again, also after Ctrl-C. Other users of this machine can reach the broker, so it lets in whoever knows
a password that is made for each run.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cbdsl.errors import UserError
from cbdsl.network.broker import PASSWORD_VARIABLE, STOP_SECONDS, USERNAME, Broker, Kind, end, running_broker
from cbdsl.network.mqtt import Address, Counts, merge
from cbdsl.network.samples import write_samples
from cbdsl.network.server import NetworkSwarm, ServerConfig
from cbdsl.network.session import ServedRun, open_run, serve
from cbdsl.network.timeouts import Deadlines
from cbdsl.runs.build import Experiment
from cbdsl.runs.records import RoundRecord

NAME = "local"


@dataclass(frozen=True, eq=False)
class WorkerProcesses:
    """The processes of a swarm on this machine."""

    broker: Broker
    names: tuple[str, ...]
    processes: tuple[subprocess.Popen[bytes], ...]
    network: NetworkSwarm


@dataclass(frozen=True, eq=False)
class LocalSwarmOutcome:
    """What a swarm on this machine leaves."""

    served: ServedRun
    workers_wire: Counts  # all workers' connections together
    broker: str


def worker_names(count: int) -> tuple[str, ...]:
    """worker-0 ... with as many digits as it takes, so that names sort like numbers."""
    width = len(str(count - 1))
    return tuple(f"worker-{number:0{width}}" for number in range(count))


def run_swarm(
    stage: Experiment,
    out: Path,
    kind: Kind,
    deadlines: Deadlines,
    on_ready: Callable[[WorkerProcesses], None] | None = None,
    on_round: Callable[[RoundRecord], None] | None = None,
) -> LocalSwarmOutcome:
    """Start everything, play the run, stop everything."""
    names = worker_names(stage.spec.workers)
    crew_folder, plugins = out / "workers", stage.spec.plugins
    opened, password = open_run(stage, out), secrets.token_urlsafe(24)
    with running_broker(out / "broker", kind, password=password) as broker, contextlib.ExitStack() as stack:
        address = Address(broker.host, broker.port, username=USERNAME, password=password)
        hand_out(stage, crew_folder, names)
        processes = [
            stack.enter_context(
                worker_process(address, NAME, name, crew_folder / name, _attack(stage, number), plugins)
            )
            for number, name in enumerate(names)
        ]

        def ready(network: NetworkSwarm) -> None:
            if on_ready is not None:
                on_ready(WorkerProcesses(broker, names, tuple(processes), network))

        served = serve(stage, opened, ServerConfig(NAME, address, deadlines, names), ready, on_round)
        wait_for_exit(processes)
    counts = [_read_counts(crew_folder / name / "wire.json") for name in names]
    return LocalSwarmOutcome(served, merge(counts), broker.kind)


def hand_out(stage: Experiment, folder: Path, names: Sequence[str]) -> None:
    """Give every worker its samples in a file of its own, as the simulator deals them."""
    train = stage.dataset.train
    for name, own in zip(names, stage.split.workers, strict=True):
        (folder / name).mkdir(parents=True, exist_ok=True)
        write_samples(folder / name / "samples.npz", train.taken(own))


@contextlib.contextmanager
def worker_process(
    address: Address, swarm: str, name: str, folder: Path, attack: str = "", plugins: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker in a process of its own, on one thread; ended with this process, however that ends."""
    command = [
        sys.executable, "-m", "cbdsl", "work", "--id", name, "--swarm", swarm, "--broker", address.url,
        "--data", str(folder / "samples.npz"), "--state", str(folder), "--threads", "1", "--parent", str(os.getpid()),
    ]  # fmt: skip
    if attack:
        command += ["--attack", attack]
    command += [word for name in plugins for word in ("--plugin", name)]
    environment = {**os.environ, PASSWORD_VARIABLE: address.password}
    with (folder / "worker.log").open("ab") as log:
        process = subprocess.Popen(  # a session of its own: Ctrl-C is for us, and we end the workers
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment
        )
    try:
        yield process
    finally:
        end(process)


def wait_for_exit(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Give workers that heard the end of the run a moment to leave by themselves."""
    deadline = time.monotonic() + STOP_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _attack(stage: Experiment, number: int) -> str:
    return stage.spec.attack.name if number in stage.byzantine else ""


def _read_counts(path: Path) -> Counts:
    try:
        counts: Counts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"A worker left no count of its bytes: {error}. Its log is beside: worker.log") from error
    return counts
