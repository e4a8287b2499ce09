"""`cbdsl compare`: finished runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cbdsl.cli import extras


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN RUN ...", help="Folders of finished runs.")],
    out: Annotated[
        Path | None, typer.Option(help="Also write a page with a figure, and the table as CSV, into this folder.")
    ] = None,
) -> None:
    """Put finished runs side by side: what they differ in, and what came out; mean ± deviation over seeds."""
    if out is not None:
        extras.demand("matplotlib", "it draws the figure of the page")
    from cbdsl.cli.tables import print_comparison  # noqa: PLC0415
    from cbdsl.study import compare as job  # noqa: PLC0415

    print_comparison(job.compare(folders))
    if out is not None:
        from cbdsl.report.comparison import write_comparison  # noqa: PLC0415 - matplotlib loads slowly

        typer.echo(f"page: {write_comparison(folders, out)}")
