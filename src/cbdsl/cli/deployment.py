"""The commands `serve`, `work` and `swarm`: read words, call the rest, show what happens."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cbdsl.errors import UserError
from cbdsl.presets import PRESETS, preset_or_file
from cbdsl.settings import parse_setting

if TYPE_CHECKING:
    from cbdsl.deploy.link import Address
    from cbdsl.deploy.server import ServerConfig
    from cbdsl.spec import Spec

_Broker = Annotated[str, typer.Option(help="mqtt://host:port, or mqtts://host:port with TLS.")]
_Swarm = Annotated[str, typer.Option(help="The swarm's name: part of every topic.")]
_Ca = Annotated[Path | None, typer.Option(help="The authority that signed the broker's certificate, PEM.")]
_Cert = Annotated[Path | None, typer.Option(help="This machine's certificate, PEM.")]
_Key = Annotated[Path | None, typer.Option(help="Its key, PEM.")]
_Threads = Annotated[int | None, typer.Option(min=1, help="Threads to use; all cores if not given. Changes no number.")]
_Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting of the spec.")]
_Quorum = Annotated[float, typer.Option(help="Share of the workers present that closes a round.")]
_RoundSeconds = Annotated[float, typer.Option(help="A round closes after so long, whoever is missing.")]
_UploadSeconds = Annotated[float, typer.Option(help="An invited worker is passed over after so long.")]
_JoinSeconds = Annotated[float, typer.Option(help="How long the first round waits for workers that are missing.")]
_GraceSeconds = Annotated[float, typer.Option(help="How long a worker that vanished is waited for.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON, alone on standard output.")]


def serve(  # noqa: PLR0913, PLR0917 - one parameter an option
    start: Annotated[str, typer.Argument(metavar="SPEC", help="A preset, or a TOML file.")],
    broker: _Broker,
    out: Annotated[Path, typer.Option(help="The run's folder; one that holds this run goes on with it.")],
    swarm: _Swarm = "swarm",
    roster: Annotated[
        Path | None, typer.Option(help="Names of the workers, one a line; without it whoever comes first is in.")
    ] = None,
    settings: _Settings = None,
    ca: _Ca = None,
    cert: _Cert = None,
    key: _Key = None,
    quorum: _Quorum = 1.0,
    round_seconds: _RoundSeconds = 600.0,
    upload_seconds: _UploadSeconds = 60.0,
    join_seconds: _JoinSeconds = 60.0,
    grace_seconds: _GraceSeconds = 3.0,
    threads: _Threads = None,
    as_json: _Json = False,
) -> None:
    """Be the parameter server of a swarm: play a spec's rounds with workers behind an MQTT broker."""
    from cbdsl.deploy.deadlines import Deadlines  # noqa: PLC0415
    from cbdsl.deploy.link import parse_address  # noqa: PLC0415
    from cbdsl.deploy.server import ServerConfig  # noqa: PLC0415
    from cbdsl.deploy.topics import check_name  # noqa: PLC0415

    _talk()
    check_name(swarm, "swarm")
    address = parse_address(broker, ca, cert, key)
    deadlines = Deadlines(quorum, round_seconds, upload_seconds, join_seconds, grace_seconds)
    names = _read_roster(roster)
    spec = _spec(start, settings)
    if names:
        spec = spec.with_settings({"workers": len(names)})
    _serve(spec, out, ServerConfig(swarm, address, deadlines, names), threads, as_json)


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
    attack: Annotated[str, typer.Option(hidden=True)] = "",
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Be one worker of a swarm: train on samples that never leave this machine."""
    from cbdsl.deploy.link import Link, MqttLink, Will, parse_address  # noqa: PLC0415
    from cbdsl.deploy.meter import Meter  # noqa: PLC0415
    from cbdsl.deploy.samples import read_samples  # noqa: PLC0415
    from cbdsl.deploy.topics import check_name  # noqa: PLC0415
    from cbdsl.deploy.worker import Worker  # noqa: PLC0415
    from cbdsl.engines.native import default_threads  # noqa: PLC0415

    _talk()
    if parent is not None:
        _end_with(parent)
    check_name(swarm, "swarm")
    check_name(name, "worker")
    address = parse_address(broker, ca, cert, key)
    _warn_if_exposed(address)

    def connect(handle: Any, greet: Any, will: Will, meter: Meter) -> Link:  # noqa: ANN401
        return MqttLink(address, handle, greet, meter, will)

    worker = Worker(swarm, name, read_samples(data), state or Path(name), connect, threads or default_threads(), attack)
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    worker.run(stay)


def swarm(  # noqa: PLR0913, PLR0917 - one parameter an option
    start: Annotated[str | None, typer.Argument(metavar="[SPEC]", help="A preset, or a TOML file.")] = None,
    preset_name: Annotated[str | None, typer.Option("--preset", help=f"Instead of SPEC: {', '.join(PRESETS)}.")] = None,
    workers: Annotated[int | None, typer.Option(help="Number of worker processes.")] = 8,
    rounds: Annotated[int | None, typer.Option(help="Communication rounds.")] = None,
    settings: _Settings = None,
    broker: Annotated[str, typer.Option(help="auto, mosquitto or embedded.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="A new folder; runs/<name> if not given.")] = None,
    quorum: _Quorum = 1.0,
    round_seconds: _RoundSeconds = 600.0,
    upload_seconds: _UploadSeconds = 60.0,
    threads: _Threads = None,
    as_json: _Json = False,
) -> None:
    """Play a whole deployment on this machine: a broker, the server, and a process for every worker."""
    if start and preset_name:
        raise UserError("Give SPEC or --preset, not both: each is a whole starting point.")
    options = {"workers": workers, "rounds": rounds}
    spec = _spec(start or preset_name or "paper-iid", settings)
    spec = spec.with_settings({key: value for key, value in options.items() if value is not None})

    from cbdsl.cli.swarm_display import SwarmDisplay, print_outcome  # noqa: PLC0415
    from cbdsl.deploy.broker import KINDS  # noqa: PLC0415
    from cbdsl.deploy.deadlines import Deadlines  # noqa: PLC0415
    from cbdsl.errors import unknown  # noqa: PLC0415

    if broker not in KINDS:
        raise unknown("broker", broker, KINDS)
    deadlines = Deadlines(quorum, round_seconds, upload_seconds)
    _talk()

    from cbdsl.cli.progress import folder_name  # noqa: PLC0415
    from cbdsl.deploy.swarm import run_swarm  # noqa: PLC0415 - torch takes seconds to load
    from cbdsl.runs.folder import free_folder  # noqa: PLC0415
    from cbdsl.runs.resolve import resolve  # noqa: PLC0415
    from cbdsl.runs.stage import Stage  # noqa: PLC0415

    stage = Stage.prepare(resolve(spec), threads=threads)
    folder = out or free_folder(f"swarm-{folder_name(stage.spec)}")
    with _interruptible(folder), SwarmDisplay(stage.spec, folder) as display:
        outcome = run_swarm(stage, folder, broker, deadlines, display.ready, display.show)  # type: ignore[arg-type]
    if as_json:
        typer.echo(json.dumps(asdict(outcome.served.result.summary), indent=2))
    else:
        print_outcome(outcome)


def _serve(spec: Spec, out: Path, config: ServerConfig, threads: int | None, as_json: bool) -> None:
    from cbdsl.cli.progress import Display, print_summary  # noqa: PLC0415
    from cbdsl.deploy.serving import open_run  # noqa: PLC0415
    from cbdsl.deploy.serving import serve as play  # noqa: PLC0415 - torch takes seconds to load
    from cbdsl.runs.resolve import resolve  # noqa: PLC0415
    from cbdsl.runs.stage import Stage  # noqa: PLC0415

    _warn_if_exposed(config.address)
    stage = Stage.prepare(resolve(spec), threads=threads, deal=False)
    with _interruptible(out), Display() as display:
        display.begin(stage.spec, out, stage.note)
        served = play(stage, open_run(stage, out), config, on_round=display.show)
    if as_json:
        typer.echo(json.dumps(asdict(served.result.summary), indent=2))
    else:
        from cbdsl.cli.swarm_display import print_wire  # noqa: PLC0415

        print_summary(served.result)
        print_wire(served.wire, "server")


@contextmanager
def _interruptible(folder: Path) -> Iterator[None]:
    """Ctrl-C ends a run that can go on: say how."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"\ncbdsl: interrupted. The same command with --out {folder} goes on with the run.", err=True)
        raise typer.Exit(130) from None


def _spec(start: str, settings: list[str] | None) -> Spec:
    return preset_or_file(start).with_settings(dict(map(parse_setting, settings or [])))


def _read_roster(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The roster {path} cannot be read: {error}.") from error
    return tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))


def _warn_if_exposed(address: Address) -> None:
    from cbdsl.deploy.link import exposed  # noqa: PLC0415

    warning = exposed(address)
    if warning:
        typer.secho(warning, fg="red", bold=True, err=True)


def _talk() -> None:
    """What the deployment has to say goes to standard error, with the time."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")


def _end_with(parent: int) -> None:
    """Ask Linux to end this process with the one that started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit(1)
