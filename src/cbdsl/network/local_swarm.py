"""`cbdsl swarm`: a broker, the server and one process per worker on one machine.

Each worker gets the samples that the simulator would give it, as its own file. All processes are ended at the end, also
after Ctrl-C. Other users of the machine can connect to the broker, so it requires a password, new for each run.
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
from cbdsl.network.broker import PASSWORD_VARIABLE, STOP_SECONDS, USERNAME, Broker, Kind, end_process, running_broker
from cbdsl.network.mqtt import Address, Counts, add_counts
from cbdsl.network.roster import worker_names
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
    """The outcome of a run of a swarm on this machine."""

    served: ServedRun
    workers_wire: Counts  # of all workers' connections together
    broker: str


def run_swarm(
    experiment: Experiment,
    out: Path,
    kind: Kind,
    deadlines: Deadlines,
    on_ready: Callable[[WorkerProcesses], None] | None = None,
    on_round: Callable[[RoundRecord], None] | None = None,
    baseline: bool = False,
) -> LocalSwarmOutcome:
    """Start broker and workers, play the run, and stop them."""
    spec, folder = experiment.spec, out / "workers"
    names = worker_names(spec.workers, digits=len(str(spec.workers - 1)))  # names sort like numbers
    opened, password = open_run(experiment, out, baseline), secrets.token_urlsafe(24)
    with running_broker(out / "broker", kind, password=password) as broker, contextlib.ExitStack() as stack:
        address = Address(broker.host, broker.port, username=USERNAME, password=password)
        write_worker_samples(experiment, folder, names)
        processes = []
        for number, name in enumerate(names):
            attack = spec.attack.name if number in experiment.byzantine else ""
            process = worker_process(address, NAME, name, folder / name, attack, spec.plugins)
            processes.append(stack.enter_context(process))

        def ready(network: NetworkSwarm) -> None:
            if on_ready is not None:
                on_ready(WorkerProcesses(broker, names, tuple(processes), network))

        served = serve(experiment, opened, ServerConfig(NAME, address, deadlines, names), ready, on_round)
        _wait_for_exit(processes)
    counts = [_read_counts(folder / name / "wire.json") for name in names]
    return LocalSwarmOutcome(served, add_counts(counts), broker.kind)


def write_worker_samples(experiment: Experiment, folder: Path, names: Sequence[str]) -> None:
    """Write each worker's samples to its own file, as the simulator deals them."""
    train = experiment.dataset.train
    for name, own in zip(names, experiment.split.workers, strict=True):
        (folder / name).mkdir(parents=True, exist_ok=True)
        write_samples(folder / name / "samples.npz", train.taken(own), experiment.dataset.task)


@contextlib.contextmanager
def worker_process(
    address: Address, swarm: str, name: str, folder: Path, attack: str = "", plugins: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker in its own process, on one thread; it ends with this process, however that ends."""
    command = [
        sys.executable, "-m", "cbdsl", "work", "--id", name, "--swarm", swarm, "--broker", address.url,
        "--data", str(folder / "samples.npz"), "--state", str(folder), "--threads", "1", "--parent", str(os.getpid()),
    ]  # fmt: skip
    if attack:
        command += ["--attack", attack]
    command += [word for plugin in plugins for word in ("--plugin", plugin)]
    environment = {**os.environ, PASSWORD_VARIABLE: address.password}
    with (folder / "worker.log").open("ab") as log:
        process = subprocess.Popen(  # in its own session: Ctrl-C is for this process, which ends the workers
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment
        )
    try:
        yield process
    finally:
        end_process(process)


def _wait_for_exit(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Give workers that received the end of the run a moment to exit by themselves."""
    deadline = time.monotonic() + STOP_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _read_counts(path: Path) -> Counts:
    try:
        counts: Counts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"A worker wrote no count of its bytes: {error}. See worker.log in the same folder."
        raise UserError(message, code="missing-file") from error
    return counts
