"""The command work."""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from cbdsl import register
from cbdsl.cli.interrupts import EXIT_CODE, INTERRUPTS
from cbdsl.cli.network_options import (
    Broker,
    Ca,
    Cert,
    Config,
    Key,
    LogFormat,
    LogLevel,
    SwarmName,
    Threads,
    log_to_stderr,
    warn_if_exposed,
)
from cbdsl.cli.options import Plugins
from cbdsl.engines.native_engine import default_threads
from cbdsl.network.budget import ResourceLimits, get_half_of_memory
from cbdsl.network.mqtt import LastWill, Link, Meter, MqttLink, parse_address
from cbdsl.network.samples import read_samples
from cbdsl.network.tls import check_member
from cbdsl.network.topics import check_name
from cbdsl.network.worker import Worker
from cbdsl.util.formatting import parse_bytes

_LEAVE_SECONDS = 3.0  # for a worker to end in good order


def work(  # noqa: PLR0913, PLR0917 - one parameter per option
    name: Annotated[str, typer.Option("--id", help="This worker's name: letters, digits, '-' and '_'.")],
    broker: Broker,
    data: Annotated[
        Path,
        typer.Option(help="Its samples: an .npz with features and labels, a table (.csv, .parquet), or IDX files."),
    ],
    swarm: SwarmName = "swarm",
    state: Annotated[Path | None, typer.Option(help="Folder for its state; default: ./<id>.")] = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    threads: Threads = None,
    stay: Annotated[bool, typer.Option("--stay", help="After a run, wait for the next one.")] = False,
    keep_model: Annotated[
        bool, typer.Option("--keep-model", help="Save the global model after every round, not only at the end.")
    ] = False,
    memory: Annotated[
        str, typer.Option(help="Memory limit of this process, such as 256M or 2G; default: half of the machine's.")
    ] = "",
    longest_round: Annotated[
        float,
        typer.Option(min=1, help="Longest estimated seconds per round; a run above it is refused."),
    ] = 3600.0,
    plugin: Plugins = None,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
    config: Config = None,  # noqa: ARG001 - its callback has read it
    attack: Annotated[str, typer.Option(hidden=True)] = "",
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run one worker. Its samples never leave this machine."""
    log_to_stderr(log_level, log_format)
    if parent is not None:
        _end_with(parent)
    register.load(plugin or ())
    check_name(swarm, "swarm")
    check_name(name, "worker")
    address = parse_address(broker, ca, cert, key)
    check_member(address, swarm, name)
    warn_if_exposed(address)

    def connect(handle: Any, on_connect: Any, will: LastWill, meter: Meter) -> Link:  # noqa: ANN401
        return MqttLink(address, handle, on_connect, meter, will)

    own = read_samples(data)
    allowed = parse_bytes(memory, "--memory") if memory else get_half_of_memory()
    budget = ResourceLimits(own, threads or default_threads(), allowed, longest_round)
    budget.enforce()
    worker = Worker(swarm, name, own, state or Path(name), connect, budget, attack)
    _run_until_signal(worker, stay, keep_model)


def _run_until_signal(worker: Worker, stay: bool, keep_model: bool) -> None:
    """Run a worker in a thread, so that signals are handled while its engine computes for hours.

    After a signal it has a few seconds to leave. Then the process ends; its files are complete.
    """
    stop, failures = threading.Event(), queue.SimpleQueue[BaseException | None]()

    def work() -> None:
        try:
            worker.run(stay, keep_model)
            failures.put(None)
        except BaseException as error:
            failures.put(error)
        stop.set()

    def end(*_: object) -> None:
        logging.getLogger("cbdsl.network").info("received SIGTERM: saving the state and ending")
        worker.stop()
        stop.set()

    signal.signal(signal.SIGTERM, end)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        stop.wait()
    finally:
        worker.stop()
        thread.join(_LEAVE_SECONDS)
        if thread.is_alive():
            worker.leave()
            sys.stderr.flush()
            os._exit(EXIT_CODE if INTERRUPTS.happened else 0)
    failure = failures.get()
    if failure is not None:
        raise failure


def _end_with(parent: int) -> None:
    """Let Linux end this process with the one that started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit(1)
