"""`cbdsl doctor`: what this installation can do."""

from __future__ import annotations

import os
import platform

import typer

from cbdsl import __version__
from cbdsl.cli import extras, interrupts
from cbdsl.errors import UserError

_LIBRARIES = ("numpy", "safetensors", *extras.EXTRAS)


def doctor() -> None:
    """Say what this installation can do: engines, threads, data, libraries."""
    for name, finding in examine():
        typer.echo(f"{name:12} {finding}")


def examine() -> list[tuple[str, str]]:
    """Findings as pairs of a name and a sentence."""
    from cbdsl.engines.native import default_threads  # noqa: PLC0415

    return [
        ("cbdsl", __version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        *_engine(),
        ("threads", f"{default_threads()} for this process, {os.cpu_count()} cores in the machine"),
        ("devices", _devices()),
        ("data", _data()),
        *((name, extras.version_of(name)) for name in _LIBRARIES),
    ]


def _engine() -> list[tuple[str, str]]:
    from cbdsl.engines import native_engine  # noqa: PLC0415

    obstacle, torch = native_engine.available(), extras.is_installed("torch")
    if obstacle is not None:
        other = "torch" if torch else f"none: torch is not installed either, try {extras.how_to_install('torch')}"
        return [("engine", f"{other} ({obstacle})")]
    info = native_engine.info()
    rest = "torch for the rest" if torch else "the rest needs torch, which is not installed"
    return [
        ("engine", f"native, for sequential models; {rest}"),
        ("vectors", f"{info.instructions}, {info.lanes} samples at once; {info.library}, built by {info.compiler}"),
    ]


def _devices() -> str:
    """What torch can compute on; that takes loading it."""
    if not extras.is_installed("torch"):
        return f"cpu; GPUs need torch, which is not installed ({extras.how_to_install('torch')})"
    interrupts.INTERRUPTS.hold()
    try:
        from cbdsl.engines.torch_device import accelerators  # noqa: PLC0415
    except (ImportError, OSError) as error:
        return f"cpu; torch cannot be loaded ({str(error).splitlines()[0]})"
    finally:
        interrupts.INTERRUPTS.release()
    gpus = accelerators()
    return ", ".join(["cpu", *gpus]) + ("" if gpus else "; torch sees no GPU")


def _data() -> str:
    from cbdsl.data.sources import EMBEDDED, load  # noqa: PLC0415

    try:
        data = load(EMBEDDED)
    except UserError as error:
        return f"embedded MNIST is damaged: {error}"
    return f"embedded MNIST is whole: {len(data.train):,} training and {len(data.test):,} test images"
