"""`cbdsl flower`: the same rounds as a Flower app."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cbdsl.cli import extras
from cbdsl.cli.spec_options import DEFAULT_PRESET

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
    if not extras.is_installed("flwr"):
        typer.echo(
            "flwr is not installed here. It pins another Ray than cbdsl's own; give it an environment of its own: "
            "pip install 'flwr[simulation]' cbdsl"
        )
    typer.echo(
        f"Start it:  flwr run {folder} --stream --federation-config "
        f'"num-supernodes={workers} client-resources-num-cpus=1"'
    )
