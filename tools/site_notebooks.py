"""Notebooks of the documentation site: Python files in cells, NAME.nb.py, run from top to bottom when it is built.

A cell `# %% [markdown]` is prose; any other is code, shown with what it prints, what its last line
comes to and the figures it draws. A cell that raises ends the build. The same file runs as a plain script, opens in
editors that know such cells, and is offered on its page as an .ipynb.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler

mpl.use("Agg")

from matplotlib import pyplot as plt

from cbdsl.report.figures import INK, PALE, PAPER, SHADES, make_themed_svg

SUFFIX = ".nb.py"

_LOOK: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), PAPER),
    "axes.prop_cycle": cycler(color=[light for light, _ in SHADES.values()]),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "grid.linewidth": 0.6,
    "axes.titlelocation": "left",
    "figure.constrained_layout.use": True,
    "figure.figsize": (8, 4),
    "font.size": 11,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Cell:
    """A piece of a notebook."""

    prose: bool
    text: str


def cells(source: str) -> list[Cell]:
    """The cells of a file; what stands before the first one belongs to none."""
    found = []
    for head, body in re.findall(r"^# %%([^\n]*)\n(.*?)(?=^# %%|\Z)", source, re.DOTALL | re.MULTILINE):
        prose = "[markdown]" in head
        text = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if prose else body
        found.append(Cell(prose, text.strip("\n")))
    return found


@dataclass(frozen=True)
class Outcome:
    """What a cell came to."""

    text: str  # what it printed, and the value of its last line
    figures: tuple[str, ...]  # as SVG elements


def play(notebook: list[Cell], name: str) -> Iterator[Outcome]:
    """Run the cells one after the other, in a folder that is gone afterwards."""
    names: dict[str, Any] = {"__name__": "__main__"}
    here, drawn = Path.cwd(), 0
    with tempfile.TemporaryDirectory() as folder, mpl.rc_context(_LOOK):
        os.chdir(folder)
        try:
            for number, cell in enumerate(notebook):
                if cell.prose:
                    yield Outcome("", ())
                    continue
                said = _run(cell.text, f"{name}, cell {number}", names)
                figures = [plt.figure(each) for each in plt.get_fignums()]
                svgs = tuple(
                    make_themed_svg(each, f"{name}-{drawn + at}", _title(each)) for at, each in enumerate(figures)
                )
                drawn += len(figures)
                plt.close("all")
                yield Outcome(said, svgs)
        finally:
            os.chdir(here)


def _run(code: str, where: str, names: dict[str, Any]) -> str:
    """Run a cell; what it says. The value of its last line is said, too, as a notebook does."""
    tree = ast.parse(code, where)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(tree, where, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), where, "eval"), names)
            if value is not None and not plt.get_fignums():  # of a cell that draws, the figure is what it comes to
                print(value)
    return said.getvalue().rstrip()


def _title(figure: Any) -> str:  # noqa: ANN401 - a figure
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    return "; ".join(title for title in titles if title) or "a figure"


def as_markdown(notebook: list[Cell], name: str) -> str:
    """A notebook that was run, as a page."""
    parts = []
    for cell, outcome in zip(notebook, play(notebook, name), strict=True):
        parts.append(cell.text if cell.prose else f"```python\n{cell.text}\n```")
        if outcome.text:
            parts.append(f":::{{code-block}} none\n:class: outcome\n\n{outcome.text}\n:::")
        parts += [f"```{{raw}} html\n<figure class='drawn'>{svg}</figure>\n```" for svg in outcome.figures]
    return "\n\n".join(parts) + "\n"


def as_ipynb(notebook: list[Cell]) -> str:
    """A notebook that was not run, as Jupyter's file."""
    made: list[dict[str, Any]] = [
        {"cell_type": "markdown", "id": f"cell-{number}", "metadata": {}, "source": cell.text}
        if cell.prose
        else {
            "cell_type": "code",
            "id": f"cell-{number}",
            "metadata": {},
            "execution_count": None,
            "outputs": [],
            "source": cell.text,
        }
        for number, cell in enumerate(notebook)
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"
