"""`cbdsl compare`: finished runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN RUN ...", help="Folders of finished runs.")],
    out: Annotated[Path | None, typer.Option(help="Also write a page with a figure into this folder.")] = None,
) -> None:
    """Put finished runs side by side: what they differ in, and what came out."""
    raise NotImplementedError
