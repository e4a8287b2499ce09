"""`cbdsl doctor`: what this installation supports; with --broker, checks of a device's connection to its broker."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from cbdsl import __version__
from cbdsl.cli import interrupts, options
from cbdsl.cli.network_options import Ca, Cert, Key
from cbdsl.cli.options import On
from cbdsl.data.dataset import EMBEDDED, load
from cbdsl.engines import native_engine
from cbdsl.engines.native_engine import default_threads
from cbdsl.errors import UserError
from cbdsl.models.zoo import usual
from cbdsl.network.doctor import ConnectionCheck, DeviceResources, DoctorFinding, announcement_of, read_announcement
from cbdsl.network.mqtt import parse_address
from cbdsl.network.topics import check_name
from cbdsl.util.formatting import parse_bytes, single_line

_LIBRARIES = ("numpy", "safetensors", *options.EXTRAS)
_SIGNS = {True: "ok", False: "WRONG", None: "-"}


def doctor(  # noqa: PLR0913, PLR0917 - one parameter per option
    broker: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="Check the connection to this broker step by step: mqtts://host:port."),
    ] = "",
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    name: Annotated[str, typer.Option("--id", help="This worker's name; default: the certificate's.")] = "",
    swarm: Annotated[str, typer.Option(help="The swarm's name; default: the certificate's.")] = "",
    model: Annotated[
        str,
        typer.Option(help="Check the memory for it: a trained model's file with --broker, a network's name with --on."),
    ] = "",
    data: Annotated[Path | None, typer.Option(help="Check that this worker's samples fit the run.")] = None,
    memory: Annotated[str, typer.Option(help="Memory limit of the worker, as for `cbdsl work`.")] = "",
    connect: Annotated[
        bool,
        typer.Option("--connect", help="Also log in. A running worker with this certificate loses its connection."),
    ] = False,
    on: On = None,
) -> None:
    """Show what this installation supports, or check the connection to a broker or cluster."""
    if not broker:
        if any((ca, cert, key, name, swarm, data, memory, connect)) or (model and on is None):
            raise UserError(
                "These options of `cbdsl doctor` are for the connection to a broker. Give --broker mqtts://HOST:PORT. "
                "--model also works with --on.",
                code="no-effect",
            )
        for topic, finding in examine() if on is None else _cluster(on, model or "cnn"):
            typer.echo(f"{topic:12} {finding}")
        return
    if on is not None:
        raise UserError("--broker and --on check different things. Give one of them.", code="conflict")

    for given, what in ((name, "worker"), (swarm, "swarm")):
        if given:
            check_name(given, what)
    check, well = ConnectionCheck(parse_address(broker, ca, cert, key), swarm, name, connect), True
    for found in _findings(check, Path(model) if model else None, data, memory):
        typer.echo(f"{found.step:12} {_SIGNS[found.well]:6} {single_line(found.text, 1000)}")
        well = well and found.well is not False
    if not well:
        raise typer.Exit(1)


def _findings(check: ConnectionCheck, model: Path | None, data: Path | None, memory: str) -> Iterator[DoctorFinding]:
    """Check the connection to the broker, then whether the run fits this device."""

    stopped = False
    for found in check.findings():
        yield found
        stopped = stopped or found.last
    if check.announcement:
        run = read_announcement(check.announcement)
    elif model is not None:
        run = announcement_of(model)
    else:
        run = DoctorFinding("memory", "not estimated: no run is announced, and no --model was given.", None)
    if not isinstance(run, DoctorFinding):
        limit = parse_bytes(memory, "--memory") if memory else 0
        yield from DeviceResources(data, default_threads(), limit).findings(run)
    elif not stopped:
        yield run


def _cluster(on: str, model: str) -> list[tuple[str, str]]:
    from cbdsl.swarms.ray_swarm import diagnose_cluster  # noqa: PLC0415

    return diagnose_cluster(on, usual(model).size, model)


def examine() -> list[tuple[str, str]]:
    """Return findings about this installation as pairs of a name and a sentence."""

    return [
        ("cbdsl", __version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        *_engine(),
        ("threads", f"{default_threads()} for this process, {os.cpu_count()} cores in the machine"),
        ("devices", _devices()),
        ("data", _data()),
        *((name, options.version_of(name)) for name in _LIBRARIES),
    ]


def _engine() -> list[tuple[str, str]]:

    obstacle, torch = native_engine.available(), options.is_installed("torch")
    if obstacle is not None:
        other = "torch" if torch else f"none: torch is not installed either, try {options.how_to_install('torch')}"
        return [("engine", f"{other} ({obstacle})")]
    info = native_engine.info()
    rest = "torch for the rest" if torch else "the rest needs torch, which is not installed"
    return [
        ("engine", f"native, for models made of known layers; {rest}"),
        ("vectors", f"{info.instructions}, {info.lanes} samples at once; {info.library}, built by {info.compiler}"),
    ]


def _devices() -> str:
    """What torch can compute on; that takes loading it."""
    if not options.is_installed("torch"):
        return f"cpu; GPUs need torch, which is not installed ({options.how_to_install('torch')})"
    interrupts.INTERRUPTS.hold()
    try:
        from cbdsl.engines.torch_engine import accelerators  # noqa: PLC0415
    except (ImportError, OSError) as error:
        return f"cpu; torch cannot be loaded ({str(error).splitlines()[0]})"
    finally:
        interrupts.INTERRUPTS.release()
    gpus = accelerators()
    return ", ".join(["cpu", *gpus]) + ("" if gpus else "; torch sees no GPU")


def _data() -> str:

    try:
        data = load(EMBEDDED)
    except UserError as error:
        return f"embedded MNIST is {'left out' if error.code == 'not-supported' else 'damaged'}: {error}"
    return f"embedded MNIST is whole: {len(data.train):,} training and {len(data.test):,} test images"
