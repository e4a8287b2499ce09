"""The command unban."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cbdsl.network.unban import request_unban


def unban(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder, --out of cbdsl serve.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The worker's name.")],
) -> None:
    """Lift the ban of a worker in a served run."""
    request_unban(run, name)
    typer.echo(f"{name} takes part again from the next round on, or from when the server of {run} is started again.")
