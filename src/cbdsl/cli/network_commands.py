"""Commands of a deployment: watch, serve, work, swarm, provision, flower."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import queue
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from cbdsl.cli import interrupts, options
from cbdsl.cli.interrupts import INTERRUPTS, command_line
from cbdsl.cli.options import DEFAULT_PRESET, Json, Plugins, SpecWords, takes_spec
from cbdsl.errors import UserError, unknown
from cbdsl.register import load as load_plugins
from cbdsl.util.formatting import parse_bytes, single_line

if TYPE_CHECKING:
    from cbdsl.network.mqtt import Address
    from cbdsl.network.provision import ProvisionedSwarm
    from cbdsl.network.roster import RosterFile
    from cbdsl.network.server import ServerConfig
    from cbdsl.network.worker import Worker
    from cbdsl.spec import Spec

DEFAULT_WORKERS = 8  # of a swarm on one machine
_PARENT_SECONDS = 0.5  # between checks that the command that started this one still runs
_START_SECONDS = 30.0  # for the page to print its address
_END_SECONDS = 5.0  # for the page to end
_LAST_NEWS_SECONDS = 1.2  # for open pages to show how the run ended
_LEAVE_SECONDS = 3.0  # for a worker to end in good order
_LONGEST_LINE = 1000  # characters of a message in a log
_PARTITION_SETTINGS = (
    "data.partition",
    "data.samples_per_worker",
    "data.shard_size",
    "data.shards_per_worker",
    "data.dirichlet_alpha",
    "data.similarity",
)

# Options that several commands share.
Broker = Annotated[str, typer.Option(help="The broker: mqtt://host:port, or mqtts://host:port with TLS.")]
SwarmName = Annotated[str, typer.Option(help="The swarm's name, part of every topic.")]
Ca = Annotated[Path | None, typer.Option(help="Certificate of the authority that signed the broker's, PEM.")]
Cert = Annotated[Path | None, typer.Option(help="This machine's certificate, PEM.")]
Key = Annotated[Path | None, typer.Option(help="Private key of --cert, PEM.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Number of threads; default: all cores. Changes no result.")]
Quorum = Annotated[float, typer.Option(help="Share of the connected workers whose answers close a round.")]
RoundSeconds = Annotated[float, typer.Option(help="Longest time of a round; it closes without the missing workers.")]
UploadSeconds = Annotated[float, typer.Option(help="Time for an invited worker to upload; then the next is invited.")]
JoinSeconds = Annotated[float, typer.Option(help="How long the first round waits for missing workers.")]
GraceSeconds = Annotated[float, typer.Option(help="How long a round waits for a worker that lost its connection.")]
Slack = Annotated[float, typer.Option(help="Time limit of a worker, as a multiple of what most workers need.")]
LeastSeconds = Annotated[
    float, typer.Option(help="Extra seconds a slow worker may use; the allowance refills over time.")
]
Watch = Annotated[bool, typer.Option("--watch", help="Also show the run in a browser, as cbdsl watch does.")]


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run or sweep; it need not exist yet.")],
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port; default: 8750, or a free one.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; from other machines the page needs the secret in its URL.")
    ] = "127.0.0.1",
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Show a run or sweep in a browser while it runs: accuracy, bytes, workers, bans. Only reads the folder."""
    from cbdsl.watch.page_server import start  # noqa: PLC0415

    if run.exists() and not run.is_dir():
        raise UserError(f"{run} is a file. Give the folder of a run or sweep.", code="wrong-type")
    INTERRUPTS.advise(f"The run itself continues. Watch it again with: {command_line()}")
    waits = "" if run.is_dir() else f"; the page waits for {run}, which does not exist yet"
    with start(run, host, port) as server:
        typer.echo(f"watch {run} at {server.url}{waits}")
        sys.stdout.flush()
        while parent is None or os.getppid() == parent:
            time.sleep(_PARENT_SECONDS)


@contextlib.contextmanager
def page_beside(folder: Path, wanted: bool) -> Iterator[None]:
    """Run `cbdsl watch` for a folder in another process, which ends with this one."""
    if not wanted:
        yield
        return
    command = [sys.executable, "-m", "cbdsl", "watch", str(folder), "--parent", str(os.getpid())]
    process = subprocess.Popen(  # its own session: Ctrl-C reaches this process alone, which ends the other
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], _START_SECONDS)
        address = process.stdout.readline().strip() if ready else ""
        typer.echo(address or "The page could not be started; the run goes on without it.", err=True)
        yield
        time.sleep(_LAST_NEWS_SECONDS)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        process.kill()
        process.wait()


@takes_spec(workers="Number of workers; default: those in --roster.")
def serve(  # noqa: PLR0913, PLR0917 - one parameter per option
    words: SpecWords,
    broker: Broker,
    out: Annotated[Path, typer.Option(help="The run's folder; if it has this run, the run is resumed.")],
    swarm: SwarmName = "swarm",
    roster: Annotated[
        Path | None,
        typer.Option(help="File of the workers' names, one per line; default: the first that connect."),
    ] = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    quorum: Quorum = 1.0,
    round_seconds: RoundSeconds = 600.0,
    upload_seconds: UploadSeconds = 60.0,
    join_seconds: JoinSeconds = 60.0,
    grace_seconds: GraceSeconds = 3.0,
    slack: Slack = 10.0,
    least_seconds: LeastSeconds = 2.0,
    threads: Threads = None,
    watch: Watch = False,
    as_json: Json = False,
) -> None:
    """Run the parameter server: the rounds of a spec, with workers behind an MQTT broker."""
    interrupts.go_on_with(interrupts.command_line())
    from cbdsl.network.mqtt import parse_address  # noqa: PLC0415
    from cbdsl.network.roster import RosterFile  # noqa: PLC0415
    from cbdsl.network.server import ServerConfig  # noqa: PLC0415
    from cbdsl.network.timeouts import Deadlines  # noqa: PLC0415
    from cbdsl.network.tls import SERVER_NAME, check_member  # noqa: PLC0415
    from cbdsl.network.topics import check_name  # noqa: PLC0415

    _log_to_stderr()
    check_name(swarm, "swarm")
    address = parse_address(broker, ca, cert, key)
    check_member(address, swarm, SERVER_NAME)
    deadlines = Deadlines(
        quorum, round_seconds, upload_seconds, join_seconds, grace_seconds, slack=slack, least_seconds=least_seconds
    )
    listed = RosterFile(roster) if roster is not None else None
    if listed is not None:
        words = _with_roster(words, listed, out)
    _refuse_simulated(words)
    spec = words.resolved()
    with page_beside(out, watch):
        names = listed.names if listed is not None else ()
        _serve(spec, out, ServerConfig(swarm, address, deadlines, names, listed), threads, as_json)


def work(  # noqa: PLR0913, PLR0917 - one parameter per option
    name: Annotated[str, typer.Option("--id", help="This worker's name: letters, digits, '-' and '_'.")],
    broker: Broker,
    data: Annotated[
        Path, typer.Option(help="Its samples: an .npz with features and labels, or a folder of IDX files.")
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
    attack: Annotated[str, typer.Option(hidden=True)] = "",
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run one worker. Its samples never leave this machine."""
    from cbdsl.engines.native_engine import default_threads  # noqa: PLC0415
    from cbdsl.network.budget import ResourceLimits, get_half_of_memory  # noqa: PLC0415
    from cbdsl.network.mqtt import (  # noqa: PLC0415
        LastWill,
        Link,
        Meter,
        MqttLink,
        parse_address,
    )
    from cbdsl.network.samples import read_samples  # noqa: PLC0415
    from cbdsl.network.tls import check_member  # noqa: PLC0415
    from cbdsl.network.topics import check_name  # noqa: PLC0415
    from cbdsl.network.worker import Worker  # noqa: PLC0415

    _log_to_stderr()
    if parent is not None:
        _end_with(parent)
    load_plugins(plugin or ())
    check_name(swarm, "swarm")
    check_name(name, "worker")
    address = parse_address(broker, ca, cert, key)
    check_member(address, swarm, name)
    _warn_if_exposed(address)

    def connect(handle: Any, greet: Any, will: LastWill, meter: Meter) -> Link:  # noqa: ANN401
        return MqttLink(address, handle, greet, meter, will)

    own = read_samples(data)
    allowed = parse_bytes(memory, "--memory") if memory else get_half_of_memory()
    budget = ResourceLimits(own, threads or default_threads(), allowed, longest_round)
    budget.enforce()
    worker = Worker(swarm, name, own, state or Path(name), connect, budget, attack)
    _run_until_signal(worker, stay, keep_model)


@takes_spec(
    workers=f"Number of worker processes; default: {DEFAULT_WORKERS}, or as in the TOML file.",
)
def swarm(  # noqa: PLR0913, PLR0917 - one parameter per option
    words: SpecWords,
    broker: Annotated[str, typer.Option(help="Kind of broker: auto, mosquitto or embedded.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="The run's folder; default: runs/<name>.")] = None,
    quorum: Quorum = 1.0,
    round_seconds: RoundSeconds = 600.0,
    upload_seconds: UploadSeconds = 60.0,
    threads: Threads = None,
    watch: Watch = False,
    as_json: Json = False,
) -> None:
    """Run a whole deployment on this machine: a broker, the server, and one process per worker."""
    from cbdsl.network.broker import KINDS, find_mosquitto  # noqa: PLC0415
    from cbdsl.network.timeouts import Deadlines  # noqa: PLC0415

    if broker not in KINDS:
        raise unknown("broker", broker, KINDS)
    if broker == "embedded" or (broker == "auto" and find_mosquitto() is None):
        options.demand("amqtt", "it is the embedded broker, and mosquitto is not installed or not chosen")
    if not words.is_file and "workers" not in words.given:
        words = replace(words, options={**words.options, "workers": DEFAULT_WORKERS})
    spec = words.resolved()
    deadlines = Deadlines(quorum, round_seconds, upload_seconds, least_seconds=round_seconds)  # trusted workers
    _log_to_stderr()

    from cbdsl.cli.display import SwarmDisplay, print_outcome  # noqa: PLC0415
    from cbdsl.cli.run_commands import draw  # noqa: PLC0415
    from cbdsl.network.local_swarm import run_swarm  # noqa: PLC0415
    from cbdsl.network.session import use_kept_init  # noqa: PLC0415
    from cbdsl.runs.build import Experiment  # noqa: PLC0415
    from cbdsl.runs.folder import run_folder  # noqa: PLC0415

    folder = out or run_folder(spec, "swarm-")
    same = interrupts.command_line()
    interrupts.go_on_with(same if out else f"{same} --out {shlex.quote(str(folder))}")
    stage = Experiment.prepare(use_kept_init(spec, folder), threads=threads)
    with page_beside(folder, watch), SwarmDisplay(stage.spec, folder) as display:
        outcome = run_swarm(stage, folder, broker, deadlines, display.ready, display.show)  # type: ignore[arg-type]
    if as_json:
        typer.echo(json.dumps(asdict(outcome.served.result.summary), indent=2))
    else:
        print_outcome(outcome)
        draw(outcome.served.result)


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
            os._exit(interrupts.EXIT_CODE if interrupts.INTERRUPTS.happened else 0)
    failure = failures.get()
    if failure is not None:
        raise failure


def _serve(spec: Spec, out: Path, config: ServerConfig, threads: int | None, as_json: bool) -> None:
    from cbdsl.cli.display import ServeDisplay  # noqa: PLC0415
    from cbdsl.cli.run_commands import conclude  # noqa: PLC0415
    from cbdsl.network.session import open_run, read_secret, save_secret, use_kept_init  # noqa: PLC0415
    from cbdsl.network.session import serve as play  # noqa: PLC0415
    from cbdsl.runs.build import Experiment  # noqa: PLC0415

    _warn_if_exposed(config.address)
    secret = read_secret(out)
    stage = Experiment.prepare(use_kept_init(spec, out), threads=threads, deal=False, secret=secret)
    with ServeDisplay(stage.spec.workers) as display:
        display.begin(stage.spec, out, stage.note)
        opened = open_run(stage, out)
        save_secret(out, secret)
        display.count(opened.records)
        served = play(stage, opened, config, on_round=display.show, on_event=display.heard)
    conclude(served.result, as_json)
    if not as_json:
        from cbdsl.cli.display import print_refused, print_wire  # noqa: PLC0415

        print_wire(served.wire, "server")
        print_refused(served.refused)


def _with_roster(words: SpecWords, roster: RosterFile, out: Path) -> SpecWords:
    """Set the number of workers to that of the roster, or of the run if it has begun."""
    from cbdsl.spec import read  # noqa: PLC0415

    begun = out / "spec.toml"
    count = read(begun).workers if begun.is_file() else len(roster.names)
    wanted = words.options.get("workers", count)
    if wanted != count:
        what = f"the run in {out} began with" if begun.is_file() else f"{roster.path} names"
        raise UserError(f"--workers is {wanted}, but {what} {count}. Leave --workers out.", code="conflict")
    return replace(words, options={**words.options, "workers": count})


def _refuse_simulated(words: SpecWords) -> None:
    """Refuse settings that only apply to simulated workers."""
    for key in words.given:
        if key.startswith("attack."):
            raise UserError(
                f"{key} has no effect here: real workers do not attack on request. To defend against two attackers: "
                "--set defence.declared=2",
                code="no-effect",
            )
        if key in _PARTITION_SETTINGS:
            raise UserError(
                f"{key} has no effect here: each worker has its own samples (cbdsl work --data).", code="no-effect"
            )


def _warn_if_exposed(address: Address) -> None:
    from cbdsl.network.mqtt import exposure_warning  # noqa: PLC0415

    warning = exposure_warning(address)
    if warning:
        typer.secho(warning, fg="red", bold=True, err=True)


def _log_to_stderr() -> None:
    handler = _CurrentStderrHandler(sys.stderr)
    handler.setFormatter(_OneLineFormatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)


class _CurrentStderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which a progress bar replaces to keep its own line last."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self.stream = sys.stderr
        super().emit(record)


class _OneLineFormatter(logging.Formatter):
    """Formats a message as one line without control characters, because it may contain text from other machines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        """See `logging.Formatter`."""
        record.message = single_line(record.message, _LONGEST_LINE)
        return super().formatMessage(record)


def _end_with(parent: int) -> None:
    """Let Linux end this process with the one that started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit(1)


def provision(  # noqa: PLR0913, PLR0917 - one parameter per option
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for keys and certificates.")],
    count: Annotated[
        int | None, typer.Option("--workers", help="Number of workers, named worker-1, worker-2 and so on.")
    ] = None,
    names: Annotated[str | None, typer.Option(help="Names instead of --workers, separated by commas.")] = None,
    swarm: Annotated[str | None, typer.Option(help="The swarm's name, part of every topic; default: swarm.")] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", help="Name or address of the broker; default: localhost; may repeat."),
    ] = None,
    port: Annotated[int | None, typer.Option(help="The broker's port for workers; default: 8883.")] = None,
    server_host: Annotated[
        str | None,
        typer.Option(help="Where server and monitor reach the broker; default: localhost."),
    ] = None,
    server_port: Annotated[
        int | None, typer.Option(help="The broker's port for server and monitor; default: the one after --port.")
    ] = None,
    largest_model: Annotated[
        int | None,
        typer.Option(help="Largest number of parameters of an upload; default: 1,000,000."),
    ] = None,
    days: Annotated[int | None, typer.Option(help="Validity of certificates in days; default: 825.")] = None,
    add: Annotated[bool, typer.Option("--add", help="Add workers to an existing folder.")] = False,
    revoke: Annotated[
        list[str] | None, typer.Option("--revoke", metavar="NAME", help="Exclude a worker; may repeat.")
    ] = None,
    renew: Annotated[bool, typer.Option("--renew", help="Issue new keys to all that are not revoked.")] = False,
) -> None:
    """Create certificates for a swarm on real machines, and the broker's configuration."""
    options.demand("cryptography", "it makes keys and certificates")
    from cbdsl.network import provision as job  # noqa: PLC0415

    actions = [word for word, wanted in (("--add", add), ("--revoke", revoke), ("--renew", renew)) if wanted]
    if len(actions) > 1:
        raise UserError(f"{' and '.join(actions)} are given together. Do one after the other.", code="conflict")
    fixed = [
        word
        for word, value in (
            ("--swarm", swarm), ("--host", hosts), ("--port", port), ("--days", days),
            ("--server-host", server_host), ("--server-port", server_port),
        )
        if value not in (None, (), [])
    ]  # fmt: skip
    if actions and largest_model is not None:
        raise UserError(
            f"--largest-model and {actions[0]} are given together. Do one after the other.", code="conflict"
        )
    if actions and fixed:
        raise UserError(
            f"{fixed[0]} is fixed when a folder is created. Leave it out with {actions[0]}, or create another one.",
            code="conflict",
        )
    if actions and not add and (count is not None or names is not None):
        raise UserError(f"--workers and --names have no effect with {actions[0]}. Leave them out.", code="no-effect")
    if revoke:
        _tell_revoked(job.revoke(folder, list(dict.fromkeys(revoke))), revoke)
    elif renew:
        _tell_renewed(job.renew(folder))
    elif add:
        before = job.read_settings(folder).workers
        chosen = _worker_names(count, names, before)
        _tell_added(job.add_workers(folder, chosen), chosen)
    elif largest_model is not None and count is None and names is None and not fixed:
        _tell_allowed(job.allow_models(folder, largest_model))
    else:
        chosen = _worker_names(count, names, ())
        made = job.provision(
            folder, chosen, swarm or "swarm", hosts or ["localhost"],
            job.DAYS if days is None else days, job.PORT if port is None else port,
            server_host=server_host or "localhost", server_port=server_port,
            largest_model=job.LARGEST_MODEL if largest_model is None else largest_model,
        )  # fmt: skip
        _tell_made(made, given_host=bool(hosts))


def _worker_names(count: int | None, names: str | None, taken: Sequence[str]) -> list[str]:
    if (count is None) == (names is None):
        raise UserError("Give either --workers 8 or --names east,west.", code="missing-value")
    if names is not None:
        return [name.strip() for name in names.split(",")]
    from cbdsl.network.roster import worker_names  # noqa: PLC0415

    if count is None or not 1 <= count <= 10_000:
        raise UserError(f"--workers takes 1 to 10,000; given {count}.", code="out-of-range")
    return list(worker_names(count, 1, taken))


def _count(workers: Sequence[str]) -> str:
    return f"{len(workers)} worker{'s' if len(workers) > 1 else ''}"


def _tell_added(made: ProvisionedSwarm, added: Sequence[str]) -> None:
    typer.echo(f"{_count(added)} more in {made.folder / 'workers'}: {', '.join(added)}.")
    broker = made.folder / "broker"
    typer.echo(
        f"Copy {broker / 'acl'} and {broker / 'mosquitto.conf'} to the broker and restart it: until then they can "
        f"connect and receive nothing. It needs {made.open_files:,} open files."
    )


def _tell_allowed(made: ProvisionedSwarm) -> None:
    broker = made.folder / "broker"
    typer.echo(f"Workers may upload models of up to {made.largest_model:,} numbers, in {made.pieces:,} pieces.")
    typer.echo(f"Copy {broker / 'mosquitto.conf'} and {broker / 'acl'} to the broker and restart it.")


def _tell_made(made: ProvisionedSwarm, given_host: bool) -> None:
    typer.echo(f"{made.folder}: an authority, a broker at {made.url}, a parameter server, {_count(made.workers)}.")
    typer.echo(f"Server and monitor reach the broker at {made.server_url}.")
    broker = made.folder / "broker"
    typer.echo(f"Start the broker:  cd {broker} && mosquitto -c mosquitto.conf")
    typer.echo(
        f"(Started by root it runs as the user mosquitto, who must own the folder: chown -R mosquitto: {broker})"
    )
    typer.echo(f"The other commands:  {made.folder}/server/README.txt and {made.folder}/workers/*/README.txt")
    typer.echo(
        f"The broker needs {made.open_files:,} open files and up to {made.resident // 2**20:,} MiB of memory; "
        f"workers may upload models of up to {made.largest_model:,} numbers (--largest-model)."
    )
    typer.echo(f"Keep {made.folder / 'ca'} offline: its ca.key can create members.")
    if not given_host:
        typer.echo("Only this machine can reach a broker at localhost. Give --host to reach it from others.")


def _tell_revoked(made: ProvisionedSwarm, names: Sequence[str]) -> None:
    broker = made.folder / "broker"
    typer.echo(f"Revoked: {', '.join(dict.fromkeys(names))}.")
    typer.echo(f"Copy {broker / 'crl.pem'} and {broker / 'acl'} to the broker and restart it; until then they connect.")


def _tell_renewed(made: ProvisionedSwarm) -> None:
    typer.echo(f"New keys for broker, server and all workers that are not revoked, valid for {made.days} days.")
    typer.echo("Copy the folders again and restart broker, server and workers. The old keys work until they expire.")


flower = typer.Typer(no_args_is_help=True, help="Run CB-DSL as a Flower app.")


@flower.callback()
def common() -> None:
    """Run CB-DSL as a Flower app."""


@flower.command("new")
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the app.")],
    spec: Annotated[str, typer.Option(metavar="SPEC", help="A preset or a TOML file.")] = DEFAULT_PRESET,
    workers: Annotated[int, typer.Option(min=1, help="Number of workers, one node each.")] = 8,
) -> None:
    """Write the folder of a Flower app for `flwr run`, in a simulation or on real machines."""
    from cbdsl.flower.new import write_app  # noqa: PLC0415
    from cbdsl.presets import PRESETS, preset_or_file  # noqa: PLC0415

    preset_or_file(spec)
    write_app(folder, spec if spec in PRESETS else str(Path(spec).resolve()), workers)
    typer.echo(f"{folder}: a Flower app, see README.md in it.")
    if not options.is_installed("flwr"):
        typer.echo(
            "flwr is not installed. It needs another version of Ray; use a separate environment: "
            "pip install 'flwr[simulation]' cbdsl"
        )
    typer.echo(
        f"Start it:  flwr run {folder} --stream --federation-config "
        f'"num-supernodes={workers} client-resources-num-cpus=1"'
    )
