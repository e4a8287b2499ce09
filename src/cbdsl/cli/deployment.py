"""The commands `serve`, `work` and `swarm`: read words, call the rest, show what happens."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import queue
import shlex
import signal
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from cbdsl.cli import extras, interrupts
from cbdsl.cli.options import Json, Plugins
from cbdsl.cli.spec_options import SpecWords, takes_spec
from cbdsl.cli.watch import page_beside
from cbdsl.errors import UserError, unknown
from cbdsl.plugins import load as load_plugins
from cbdsl.text import one_line, read_size

if TYPE_CHECKING:
    from cbdsl.deploy.link import Address
    from cbdsl.deploy.roster import RosterFile
    from cbdsl.deploy.server import ServerConfig
    from cbdsl.deploy.worker import Worker
    from cbdsl.spec import Spec

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
_Ca = Annotated[Path | None, typer.Option(help="The authority that signed the broker's certificate, PEM.")]
_Cert = Annotated[Path | None, typer.Option(help="This machine's certificate, PEM.")]
_Key = Annotated[Path | None, typer.Option(help="Its key, PEM.")]
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
    ca: _Ca = None,
    cert: _Cert = None,
    key: _Key = None,
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
    from cbdsl.deploy.deadlines import Deadlines  # noqa: PLC0415
    from cbdsl.deploy.identity import SERVER_NAME, check_member  # noqa: PLC0415
    from cbdsl.deploy.link import parse_address  # noqa: PLC0415
    from cbdsl.deploy.roster import RosterFile  # noqa: PLC0415
    from cbdsl.deploy.server import ServerConfig  # noqa: PLC0415
    from cbdsl.deploy.topics import check_name  # noqa: PLC0415

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
    ca: _Ca = None,
    cert: _Cert = None,
    key: _Key = None,
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
    from cbdsl.deploy.budget import Budget, half_of_the_machine  # noqa: PLC0415
    from cbdsl.deploy.identity import check_member  # noqa: PLC0415
    from cbdsl.deploy.link import Link, MqttLink, Will, parse_address  # noqa: PLC0415
    from cbdsl.deploy.meter import Meter  # noqa: PLC0415
    from cbdsl.deploy.samples import read_samples  # noqa: PLC0415
    from cbdsl.deploy.topics import check_name  # noqa: PLC0415
    from cbdsl.deploy.worker import Worker  # noqa: PLC0415
    from cbdsl.engines.native import default_threads  # noqa: PLC0415

    _talk()
    if parent is not None:
        _end_with(parent)
    load_plugins(plugin or ())
    check_name(swarm, "swarm")
    check_name(name, "worker")
    address = parse_address(broker, ca, cert, key)
    check_member(address, swarm, name)
    _warn_if_exposed(address)

    def connect(handle: Any, greet: Any, will: Will, meter: Meter) -> Link:  # noqa: ANN401
        return MqttLink(address, handle, greet, meter, will)

    own = read_samples(data)
    allowed = read_size(memory, "--memory") if memory else half_of_the_machine()
    budget = Budget(own, threads or default_threads(), allowed, longest_round)
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
    from cbdsl.deploy.broker import KINDS, find_mosquitto  # noqa: PLC0415
    from cbdsl.deploy.deadlines import Deadlines  # noqa: PLC0415

    if broker not in KINDS:
        raise unknown("broker", broker, KINDS)
    if broker == "embedded" or (broker == "auto" and find_mosquitto() is None):
        extras.demand("amqtt", "it is the embedded broker, and mosquitto is not installed or not wanted")
    if not words.is_file and "workers" not in words.given:
        words = replace(words, options={**words.options, "workers": DEFAULT_WORKERS})
    spec = words.resolved()
    deadlines = Deadlines(quorum, round_seconds, upload_seconds, least_seconds=round_seconds)  # all are our own
    _talk()

    from cbdsl.cli.folder_names import run_folder  # noqa: PLC0415
    from cbdsl.cli.run import draw  # noqa: PLC0415
    from cbdsl.cli.swarm_display import SwarmDisplay, print_outcome  # noqa: PLC0415
    from cbdsl.deploy.swarm import run_swarm  # noqa: PLC0415
    from cbdsl.runs.stage import Stage  # noqa: PLC0415

    folder = out or run_folder(spec, "swarm-")
    same = interrupts.command_line()
    interrupts.go_on_with(same if out else f"{same} --out {shlex.quote(str(folder))}")
    stage = Stage.prepare(spec, threads=threads)
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
    from cbdsl.cli.run import conclude  # noqa: PLC0415
    from cbdsl.cli.serve_display import ServeDisplay  # noqa: PLC0415
    from cbdsl.deploy.secret import keep_secret, secret_of  # noqa: PLC0415
    from cbdsl.deploy.serving import at_hand, open_run  # noqa: PLC0415
    from cbdsl.deploy.serving import serve as play  # noqa: PLC0415
    from cbdsl.runs.stage import Stage  # noqa: PLC0415

    _warn_if_exposed(config.address)
    secret = secret_of(out)
    stage = Stage.prepare(at_hand(spec, out), threads=threads, deal=False, secret=secret)
    with ServeDisplay(stage.spec.workers) as display:
        display.begin(stage.spec, out, stage.note)
        opened = open_run(stage, out)
        keep_secret(out, secret)
        display.count(opened.records)
        served = play(stage, opened, config, on_round=display.show, on_event=display.heard)
    conclude(served.result, as_json)
    if not as_json:
        from cbdsl.cli.swarm_display import print_refused, print_wire  # noqa: PLC0415

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
    from cbdsl.deploy.link import exposed  # noqa: PLC0415

    warning = exposed(address)
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
        record.message = one_line(record.message, _LONGEST_LINE)
        return super().formatMessage(record)


def _end_with(parent: int) -> None:
    """Ask Linux to end this process with the one that started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit(1)
