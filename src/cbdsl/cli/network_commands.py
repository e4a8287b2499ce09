"""Commands of a deployment: serve, work, swarm, provision, watch, flower."""

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
    from cbdsl.network.roster import RosterFile
    from cbdsl.network.server import ServerConfig
    from cbdsl.network.worker import Worker
    from cbdsl.spec import Spec
if TYPE_CHECKING:
    from cbdsl.network.provision import ProvisionedSwarm

_LOOK_SECONDS = 0.5  # between looks at whether the command that started us is still there
_START_SECONDS = 30.0  # that the page has to say where it is
_END_SECONDS = 5.0
_LAST_NEWS_SECONDS = 1.2  # in which open pages hear how the run ended


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run or of a sweep; it may come later.")],
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Where to listen; 8750 or a free one if not given.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen at; beyond this machine the page is behind a secret in its URL.")
    ] = "127.0.0.1",
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Show a run or a sweep in a browser, round by round: accuracy, bytes, workers, bans. It only reads the folder."""
    from cbdsl.watch.http import start  # noqa: PLC0415

    if run.exists() and not run.is_dir():
        raise UserError(f"{run} is a file. Give the folder of a run or of a sweep.")
    INTERRUPTS.advise(f"Whatever is played there goes on. Look again with: {command_line()}")
    server = start(run, host, port)
    waits = "" if run.is_dir() else f"; {run} is not there yet, and the page waits for it"
    typer.echo(f"watch {run} at {server.url}{waits}")
    sys.stdout.flush()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        while parent is None or os.getppid() == parent:
            server.stopping.wait(_LOOK_SECONDS)
    finally:
        server.stopping.set()
        server.shutdown()


@contextlib.contextmanager
def page_beside(folder: Path, wanted: bool) -> Iterator[None]:
    """The page of a folder, in a process of its own that ends with this one, however that ends."""
    if not wanted:
        yield
        return
    command = [sys.executable, "-m", "cbdsl", "watch", str(folder), "--parent", str(os.getpid())]
    process = subprocess.Popen(  # a session of its own: Ctrl-C is for us, and we end it
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


DEFAULT_WORKERS = 8  # of a swarm on one machine
_LAST_SECONDS = 3.0  # that a worker has to end in good order
_LONGEST_LINE = 1000  # signs of a message in a log
_DEALING = (
    "data.partition",
    "data.samples_per_worker",
    "data.shard_size",
    "data.shards_per_worker",
    "data.dirichlet_alpha",
    "data.similarity",
)
_Broker = Annotated[str, typer.Option(help="mqtt://host:port, or mqtts://host:port with TLS.")]
_Swarm = Annotated[str, typer.Option(help="The swarm's name: part of every topic.")]
Ca = Annotated[Path | None, typer.Option(help="The authority that signed the broker's certificate, PEM.")]
Cert = Annotated[Path | None, typer.Option(help="This machine's certificate, PEM.")]
Key = Annotated[Path | None, typer.Option(help="Its key, PEM.")]
_Threads = Annotated[int | None, typer.Option(min=1, help="Threads to use; all cores if not given. Changes no number.")]
_Quorum = Annotated[float, typer.Option(help="Share of the workers present that closes a round.")]
_RoundSeconds = Annotated[float, typer.Option(help="A round closes after so long, whoever is missing.")]
_UploadSeconds = Annotated[float, typer.Option(help="An invited worker is passed over after so long.")]
_JoinSeconds = Annotated[float, typer.Option(help="How long the first round waits for workers that are missing.")]
_GraceSeconds = Annotated[float, typer.Option(help="How long a worker that vanished is waited for.")]
_Slack = Annotated[float, typer.Option(help="Everybody has so many times as long as most workers need.")]
_Watch = Annotated[bool, typer.Option("--watch", help="Also show the run in a browser: cbdsl watch, beside it.")]
_LeastSeconds = Annotated[float, typer.Option(help="And so much longer once in a while.")]


@takes_spec(workers="Number of workers; as many as --roster names if not given.")
def serve(  # noqa: PLR0913, PLR0917 - one parameter an option
    words: SpecWords,
    broker: _Broker,
    out: Annotated[Path, typer.Option(help="The run's folder; one that holds this run goes on with it.")],
    swarm: _Swarm = "swarm",
    roster: Annotated[
        Path | None, typer.Option(help="Names of the workers, one a line; without it whoever comes first is in.")
    ] = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    quorum: _Quorum = 1.0,
    round_seconds: _RoundSeconds = 600.0,
    upload_seconds: _UploadSeconds = 60.0,
    join_seconds: _JoinSeconds = 60.0,
    grace_seconds: _GraceSeconds = 3.0,
    slack: _Slack = 10.0,
    least_seconds: _LeastSeconds = 2.0,
    threads: _Threads = None,
    watch: _Watch = False,
    as_json: Json = False,
) -> None:
    """Be the parameter server of a swarm: play a spec's rounds with workers behind an MQTT broker."""
    interrupts.go_on_with(interrupts.command_line())
    from cbdsl.network.mqtt import parse_address  # noqa: PLC0415
    from cbdsl.network.roster import RosterFile  # noqa: PLC0415
    from cbdsl.network.server import ServerConfig  # noqa: PLC0415
    from cbdsl.network.timeouts import Deadlines  # noqa: PLC0415
    from cbdsl.network.tls import SERVER_NAME, check_member  # noqa: PLC0415
    from cbdsl.network.topics import check_name  # noqa: PLC0415

    _talk()
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


def work(  # noqa: PLR0913, PLR0917 - one parameter an option
    name: Annotated[str, typer.Option("--id", help="This worker's name: letters, digits, '-' and '_'.")],
    broker: _Broker,
    data: Annotated[
        Path, typer.Option(help="Its samples: an .npz with features and labels, or a folder of IDX files.")
    ],
    swarm: _Swarm = "swarm",
    state: Annotated[Path | None, typer.Option(help="Where it keeps its state; ./<id> if not given.")] = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    threads: _Threads = None,
    stay: Annotated[bool, typer.Option("--stay", help="After a run wait for the next one.")] = False,
    keep_model: Annotated[
        bool, typer.Option("--keep-model", help="Write the global model to the state's folder every round, too.")
    ] = False,
    memory: Annotated[
        str, typer.Option(help="What this process may take, such as 256M or 2G; half of the machine's if not given.")
    ] = "",
    longest_round: Annotated[
        float,
        typer.Option(min=1, help="Seconds that a round may take here; a run with longer ones is refused."),
    ] = 3600.0,
    plugin: Plugins = None,
    attack: Annotated[str, typer.Option(hidden=True)] = "",
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Be one worker of a swarm: train on samples that never leave this machine."""
    from cbdsl.engines.native_engine import default_threads  # noqa: PLC0415
    from cbdsl.network.budget import ResourceLimits, half_of_the_machine  # noqa: PLC0415
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

    _talk()
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
    allowed = parse_bytes(memory, "--memory") if memory else half_of_the_machine()
    budget = ResourceLimits(own, threads or default_threads(), allowed, longest_round)
    budget.enforce()
    worker = Worker(swarm, name, own, state or Path(name), connect, budget, attack)
    _work_until_told(worker, stay, keep_model)


@takes_spec(
    workers=f"Number of worker processes; {DEFAULT_WORKERS} if not given, or as many as a TOML file says.",
)
def swarm(  # noqa: PLR0913, PLR0917 - one parameter an option
    words: SpecWords,
    broker: Annotated[str, typer.Option(help="auto, mosquitto or embedded.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/<name> if not given.")] = None,
    quorum: _Quorum = 1.0,
    round_seconds: _RoundSeconds = 600.0,
    upload_seconds: _UploadSeconds = 60.0,
    threads: _Threads = None,
    watch: _Watch = False,
    as_json: Json = False,
) -> None:
    """Play a whole deployment on this machine: a broker, the server, and a process for every worker."""
    from cbdsl.network.broker import KINDS, find_mosquitto  # noqa: PLC0415
    from cbdsl.network.timeouts import Deadlines  # noqa: PLC0415

    if broker not in KINDS:
        raise unknown("broker", broker, KINDS)
    if broker == "embedded" or (broker == "auto" and find_mosquitto() is None):
        options.demand("amqtt", "it is the embedded broker, and mosquitto is not installed or not wanted")
    if not words.is_file and "workers" not in words.given:
        words = replace(words, options={**words.options, "workers": DEFAULT_WORKERS})
    spec = words.resolved()
    deadlines = Deadlines(quorum, round_seconds, upload_seconds, least_seconds=round_seconds)  # all are our own
    _talk()

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


def _work_until_told(worker: Worker, stay: bool, keep_model: bool) -> None:
    """Let a worker work in a thread of its own, so that a signal is heard while its engine computes for hours.

    Told to stop, it has a moment to end in good order. Then the process ends: what was written is whole.
    """
    stop, failures = threading.Event(), queue.SimpleQueue[BaseException | None]()

    def work() -> None:
        try:
            worker.run(stay, keep_model)
            failures.put(None)
        except BaseException as error:
            failures.put(error)
        stop.set()

    def told(*_: object) -> None:
        worker.stop()
        stop.set()

    signal.signal(signal.SIGTERM, told)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        stop.wait()
    finally:
        worker.stop()
        thread.join(_LAST_SECONDS)
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
    """As many workers as a roster names; a run that has begun keeps the number that it began with."""
    from cbdsl.spec import read  # noqa: PLC0415

    begun = out / "spec.toml"
    count = read(begun).workers if begun.is_file() else len(roster.names)
    wanted = words.options.get("workers", count)
    if wanted != count:
        what = f"the run in {out} began with" if begun.is_file() else f"{roster.path} names"
        raise UserError(f"--workers is {wanted}, but {what} {count}. Leave --workers out.")
    return replace(words, options={**words.options, "workers": count})


def _refuse_simulated(words: SpecWords) -> None:
    """Refuse what only workers in a simulation can be told: real ones have their own data and their own mind."""
    for key in words.given:
        if key.startswith("attack."):
            raise UserError(
                f"{key} has no effect here: the workers are real, and none of them is told to attack. To reckon with "
                "two attackers: --set defence.declared=2"
            )
        if key in _DEALING:
            raise UserError(f"{key} has no effect here: every worker brings its own samples (cbdsl work --data).")


def _warn_if_exposed(address: Address) -> None:
    from cbdsl.network.mqtt import exposure_warning  # noqa: PLC0415

    warning = exposure_warning(address)
    if warning:
        typer.secho(warning, fg="red", bold=True, err=True)


def _talk() -> None:
    """What the deployment has to say goes to standard error, with the time."""
    handler = _WhereverItIsNow(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)


class _WhereverItIsNow(logging.StreamHandler[TextIO]):
    """Standard error as it is when something is said: a progress bar puts itself in its place, and its line below."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self.stream = sys.stderr
        super().emit(record)


class _OneLine(logging.Formatter):
    """A message is one line without control characters: what others sent is among its words."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        """See `logging.Formatter`."""
        record.message = single_line(record.message, _LONGEST_LINE)
        return super().formatMessage(record)


def _end_with(parent: int) -> None:
    """Ask Linux to end this process with the one that started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit(1)


DEFAULT_SWARM = "swarm"
DEFAULT_HOST = "localhost"


def provision(  # noqa: PLR0913, PLR0917 - one parameter an option
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for keys and certificates.")],
    count: Annotated[
        int | None, typer.Option("--workers", help="For how many workers: worker-1, worker-2 and so on.")
    ] = None,
    names: Annotated[str | None, typer.Option(help="The workers' names instead, separated by commas.")] = None,
    swarm: Annotated[str | None, typer.Option(help="The swarm's name, which begins every topic.")] = None,
    hosts: Annotated[
        list[str] | None, typer.Option("--host", help="A name or address of the broker's machine; may repeat.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="The broker's port for workers; 8883 if not given.")] = None,
    server_host: Annotated[
        str | None,
        typer.Option(help="Where server and monitor reach the broker; localhost if not given: they run beside it."),
    ] = None,
    server_port: Annotated[
        int | None, typer.Option(help="The broker's port for server and monitor; the one after --port if not given.")
    ] = None,
    largest_model: Annotated[
        int | None,
        typer.Option(help="Numbers in the largest model that workers may upload; 1,000,000 if not given."),
    ] = None,
    days: Annotated[int | None, typer.Option(help="How long certificates last; 825 days if not given.")] = None,
    add: Annotated[bool, typer.Option("--add", help="Add workers to a folder that is there.")] = False,
    revoke: Annotated[
        list[str] | None, typer.Option("--revoke", metavar="NAME", help="Shut a worker out; may repeat.")
    ] = None,
    renew: Annotated[bool, typer.Option("--renew", help="New keys for everybody who is not shut out.")] = False,
) -> None:
    """Make certificates for a swarm on real machines, and the broker's rules that go with them."""
    options.demand("cryptography", "it makes keys and certificates")
    from cbdsl.network import provision as job  # noqa: PLC0415
    from cbdsl.network.provision import LARGEST_MODEL  # noqa: PLC0415

    wishes = [word for word, wanted in (("--add", add), ("--revoke", revoke), ("--renew", renew)) if wanted]
    if len(wishes) > 1:
        raise UserError(f"{' and '.join(wishes)} are given together. Do one after the other.")
    fixed = [
        word
        for word, value in (
            ("--swarm", swarm), ("--host", hosts), ("--port", port), ("--days", days),
            ("--server-host", server_host), ("--server-port", server_port),
        )
        if value not in (None, (), [])
    ]  # fmt: skip
    if wishes and largest_model is not None:
        raise UserError(f"--largest-model and {wishes[0]} are given together. Do one after the other.")
    if wishes and fixed:
        raise UserError(f"{fixed[0]} is settled when a folder is made. Leave it out with {wishes[0]}, or make another.")
    if wishes and not add and (count is not None or names is not None):
        raise UserError(f"--workers and --names say whom to make; {wishes[0]} makes nobody. Leave them out.")
    if revoke:
        _tell_revoked(job.revoke(folder, list(dict.fromkeys(revoke))), revoke)
    elif renew:
        _tell_renewed(job.renew(folder))
    elif add:
        before = job.read_settings(folder).workers
        chosen = _chosen(count, names, before)
        _tell_added(job.add_workers(folder, chosen), chosen)
    elif largest_model is not None and count is None and names is None and not fixed:
        _tell_allowed(job.allow_models(folder, largest_model))
    else:
        chosen = _chosen(count, names, ())
        made = job.provision(
            folder, chosen, swarm or DEFAULT_SWARM, hosts or [DEFAULT_HOST],
            job.DAYS if days is None else days, job.PORT if port is None else port,
            server_host=server_host or DEFAULT_HOST, server_port=server_port,
            largest_model=LARGEST_MODEL if largest_model is None else largest_model,
        )  # fmt: skip
        _tell_made(made, given_host=bool(hosts))


def _chosen(count: int | None, names: str | None, taken: Sequence[str]) -> list[str]:
    if (count is None) == (names is None):
        raise UserError("Say for whom: --workers 8 makes names for eight, --names east,west gives them. Give one.")
    if names is not None:
        return [name.strip() for name in names.split(",")]
    from cbdsl.network.roster import worker_names  # noqa: PLC0415

    if count is None or not 1 <= count <= 10_000:
        raise UserError(f"1 to 10,000 workers can be made at a time; given {count}.")
    return list(worker_names(count, 1, taken))


def _count(workers: Sequence[str]) -> str:
    return f"{len(workers)} worker{'s' if len(workers) > 1 else ''}"


def _tell_added(made: ProvisionedSwarm, added: Sequence[str]) -> None:
    typer.echo(f"{_count(added)} more in {made.folder / 'workers'}: {', '.join(added)}.")
    broker = made.folder / "broker"
    typer.echo(
        f"Copy {broker / 'acl'} and {broker / 'mosquitto.conf'} to the broker and restart it: until then they get in "
        f"and hear nothing. It needs {made.open_files:,} open files."
    )


def _tell_allowed(made: ProvisionedSwarm) -> None:
    broker = made.folder / "broker"
    typer.echo(f"Workers may upload models of up to {made.largest_model:,} numbers, in {made.pieces:,} pieces.")
    typer.echo(f"Copy {broker / 'mosquitto.conf'} and {broker / 'acl'} to the broker and restart it.")


def _tell_made(made: ProvisionedSwarm, given_host: bool) -> None:
    typer.echo(f"{made.folder}: an authority, a broker at {made.url}, a parameter server, {_count(made.workers)}.")
    typer.echo(f"Server and monitor reach the broker at {made.server_url}, a door of their own.")
    broker = made.folder / "broker"
    typer.echo(f"Start the broker:  cd {broker} && mosquitto -c mosquitto.conf")
    typer.echo(f"(As root it becomes the user mosquitto, who must be able to read that: chown -R mosquitto: {broker})")
    typer.echo(f"The other commands:  {made.folder}/server/README.txt and {made.folder}/workers/*/README.txt")
    typer.echo(
        f"The broker needs {made.open_files:,} open files and up to {made.resident // 2**20:,} MiB of memory; "
        f"workers may upload models of up to {made.largest_model:,} numbers (--largest-model)."
    )
    typer.echo(f"Keep {made.folder / 'ca'} off the network: whoever has ca.key can make members.")
    if not given_host:
        typer.echo("Only this machine can reach a broker called localhost. Give --host to reach it from others.")


def _tell_revoked(made: ProvisionedSwarm, names: Sequence[str]) -> None:
    broker = made.folder / "broker"
    typer.echo(f"Revoked: {', '.join(dict.fromkeys(names))}.")
    typer.echo(f"Copy {broker / 'crl.pem'} and {broker / 'acl'} to the broker and restart it. Until then they get in.")


def _tell_renewed(made: ProvisionedSwarm) -> None:
    typer.echo(f"New keys for broker, server and all workers but those revoked, good for {made.days} days.")
    typer.echo("Copy the folders out again and restart broker, server, workers. The old keys work until they expire.")


flower = typer.Typer(no_args_is_help=True, help="Run the same rounds as a Flower app.")


@flower.callback()
def common() -> None:
    """Run the same rounds as a Flower app."""


@flower.command("new")
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the app.")],
    spec: Annotated[
        str, typer.Option(metavar="SPEC", help="What the app runs: a preset, or a spec's TOML file.")
    ] = DEFAULT_PRESET,
    workers: Annotated[int, typer.Option(min=1, help="How many workers, each of them a node.")] = 8,
) -> None:
    """Write the directory of a Flower app, which flwr run starts in a simulation and on real machines."""
    from cbdsl.flower.new import write_app  # noqa: PLC0415
    from cbdsl.presets import PRESETS, preset_or_file  # noqa: PLC0415

    preset_or_file(spec)
    write_app(folder, spec if spec in PRESETS else str(Path(spec).resolve()), workers)
    typer.echo(f"{folder}: a Flower app; README.md in it has more.")
    if not options.is_installed("flwr"):
        typer.echo(
            "flwr is not installed here. It pins another Ray than cbdsl's own; give it an environment of its own: "
            "pip install 'flwr[simulation]' cbdsl"
        )
    typer.echo(
        f"Start it:  flwr run {folder} --stream --federation-config "
        f'"num-supernodes={workers} client-resources-num-cpus=1"'
    )
