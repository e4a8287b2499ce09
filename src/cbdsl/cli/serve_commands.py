"""The commands serve and swarm."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cbdsl.cli import interrupts, options
from cbdsl.cli.network_display import ServeDisplay, SwarmDisplay, print_outcome, print_refused, print_wire
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
from cbdsl.cli.options import Json, NoBaseline
from cbdsl.cli.run_commands import conclude, draw
from cbdsl.cli.spec_options import SpecWords, takes_spec
from cbdsl.cli.watch_command import page_beside
from cbdsl.errors import UserError, unknown
from cbdsl.network import session
from cbdsl.network.broker import KINDS, find_mosquitto
from cbdsl.network.local_swarm import run_swarm
from cbdsl.network.mqtt import parse_address
from cbdsl.network.roster import RosterFile
from cbdsl.network.server import ServerConfig
from cbdsl.network.timeouts import Deadlines
from cbdsl.network.tls import SERVER_NAME, check_member
from cbdsl.network.topics import check_name
from cbdsl.runs.build import Experiment
from cbdsl.runs.callbacks import RunStart
from cbdsl.runs.folder import run_folder
from cbdsl.spec import Spec, read

DEFAULT_WORKERS = 8  # of a swarm on one machine
_PARTITION_SETTINGS = (
    "data.partition",
    "data.samples_per_worker",
    "data.shard_size",
    "data.shards_per_worker",
    "data.dirichlet_alpha",
    "data.similarity",
)
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
    no_baseline: NoBaseline = False,
    as_json: Json = False,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
    config: Config = None,  # noqa: ARG001 - its callback has read it
) -> None:
    """Run the parameter server, with workers behind an MQTT broker."""
    interrupts.advise_same_command()
    log_to_stderr(log_level, log_format)
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
        _serve(spec, out, ServerConfig(swarm, address, deadlines, names, listed), threads, as_json, not no_baseline)


def _serve(spec: Spec, out: Path, config: ServerConfig, threads: int | None, as_json: bool, baseline: bool) -> None:
    warn_if_exposed(config.address)
    secret = session.read_secret(out)
    stage = Experiment.prepare(session.use_kept_init(spec, out), threads=threads, deal=False, secret=secret)
    session.check_upload_size(stage, config.address)
    opened = session.open_run(stage, out, baseline)
    session.save_secret(out, secret)
    with contextlib.closing(ServeDisplay(stage.spec.workers)) as display:
        display.start(RunStart(stage.spec, out, stage.note, len(opened.records), tuple(opened.records)))
        served = session.serve(stage, opened, config, on_round=display.round, on_event=display.take_event)
    conclude(served.result, as_json)
    if not as_json:
        print_wire(served.wire, "server")
        print_refused(served.refused)


@takes_spec(workers=f"Number of worker processes; default: {DEFAULT_WORKERS}, or as in the TOML file.")
def swarm(  # noqa: PLR0913, PLR0917 - one parameter per option
    words: SpecWords,
    broker: Annotated[str, typer.Option(help="Kind of broker: auto, mosquitto or embedded.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="The run's folder; default: runs/<name>.")] = None,
    quorum: Quorum = 1.0,
    round_seconds: RoundSeconds = 600.0,
    upload_seconds: UploadSeconds = 60.0,
    threads: Threads = None,
    watch: Watch = False,
    no_baseline: NoBaseline = False,
    as_json: Json = False,
) -> None:
    """Run a deployment on this machine: a broker, the server, one process per worker."""
    if broker not in KINDS:
        raise unknown("broker", broker, KINDS)
    if broker == "embedded" or (broker == "auto" and find_mosquitto() is None):
        options.demand("amqtt", "it is the embedded broker, and mosquitto is not installed or not chosen")
    if not words.is_file and "workers" not in words.given:
        words = replace(words, options={**words.options, "workers": DEFAULT_WORKERS})
    spec = words.resolved()
    deadlines = Deadlines(quorum, round_seconds, upload_seconds, least_seconds=round_seconds)  # trusted workers
    log_to_stderr()
    folder = out or run_folder(spec, "swarm-")
    interrupts.advise_same_command(*([] if out else ["--out", str(folder)]))
    stage = Experiment.prepare(session.use_kept_init(spec, folder), threads=threads)
    with page_beside(folder, watch), SwarmDisplay(stage.spec, folder) as display:
        outcome = run_swarm(stage, folder, broker, deadlines, display.ready, display.show, not no_baseline)  # type: ignore[arg-type]
    if as_json:
        typer.echo(json.dumps(outcome.served.result.summary.to_json(), indent=2))
    else:
        print_outcome(outcome)
        draw(outcome.served.result)


def _with_roster(words: SpecWords, roster: RosterFile, out: Path) -> SpecWords:
    """Set the number of workers to that of the roster, or of the run if it has begun."""
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
