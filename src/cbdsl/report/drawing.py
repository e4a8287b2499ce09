"""A figure and the numbers behind it: as files beside a page, and as HTML on it."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from cbdsl.files import write_atomically
from cbdsl.report.html import picture
from cbdsl.report.style import save, themed_svg


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure, and what it shows as a table."""

    figure: Figure
    head: tuple[str, ...]
    rows: Sequence[Sequence[object]]

    @property
    def csv(self) -> str:
        """The numbers as text."""
        text = io.StringIO(newline="")
        csv.writer(text).writerows([self.head, *self.rows])
        return text.getvalue()


def keep(drawn: Drawing, stem: Path, description: str, caption: str = "", anchor: str = "") -> str:
    """Write a figure as PNG, SVG and PDF and its numbers as CSV; gives all of it for a page. The caption is HTML."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    save(drawn.figure, stem)
    write_atomically(stem.with_suffix(".csv"), drawn.csv.encode())
    svg = themed_svg(drawn.figure, stem.name, description)
    return picture(svg, caption, anchor, (f"{stem.name}.csv", drawn.csv))
