"""The commands of `cbdsl flower`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cbdsl.cli import options
from cbdsl.cli.spec_options import DEFAULT_PRESET
from cbdsl.flower.new import write_app
from cbdsl.presets import PRESETS, preset_or_file

flower = typer.Typer(no_args_is_help=True, add_completion=False, help="Run CB-DSL as a Flower app.")


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
