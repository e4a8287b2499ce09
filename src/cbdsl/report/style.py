"""How figures look: colours that colour-blind readers can tell apart, one set for light pages and one for dark."""

from __future__ import annotations

import io
import itertools
import math
import re
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, PALE, PAPER = "#222222", "#d0d0d0", "#ffffff"
TEXT, SMALL = 10.5, 9.5  # points: on a page 14 and 12.7 pixels, as its tables and notes have
_PIXELS, _SHRINKS = 96, 0.75  # of an inch on a page; how far a figure may shrink before it scrolls

# Okabe and Ito's palette, lightened for dark pages. approach -> (light, dark)
SHADES = {
    "fedavg": ("#d55e00", "#ff8a3d"),
    "fedavg-tr": ("#b87900", "#f0b429"),
    "cb-dsl": ("#8a4f7d", "#e09fd0"),
    "cb-dsl-sc": ("#00805f", "#3fd0a8"),
    "cb-dsl-g": ("#0072b2", "#5bb8f5"),
    "cb-dsl-equal": ("#5b6770", "#a7b4be"),
}
MARKERS = {"fedavg": "s", "fedavg-tr": "D", "cb-dsl": "v", "cb-dsl-sc": "^", "cb-dsl-g": "o", "cb-dsl-equal": "x"}

_THEMED = {INK: "--ink", PALE: "--pale", PAPER: "--page"} | {light: f"--{key}" for key, (light, _) in SHADES.items()}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure that needs no screen."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Axes, title: str) -> None:
    """Quiet axes: a title at the left, a pale grid, no box."""
    axes.set_title(title, loc="left", fontsize=TEXT, color=INK)
    axes.grid(color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_facecolor(PAPER)
    axes.spines[["top", "right"]].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(INK)
    axes.tick_params(colors=INK, labelsize=TEXT)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set(color=INK, fontsize=TEXT)


def save(figure: Figure, stem: Path) -> None:
    """Write a figure as PNG, SVG and PDF; the same figure gives the same bytes."""
    with mpl.rc_context({"svg.hashsalt": "cbdsl", "svg.fonttype": "none", "pdf.fonttype": 42}):
        figure.savefig(stem.with_suffix(".png"), dpi=160, metadata={"Software": None})
        figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
        figure.savefig(stem.with_suffix(".pdf"), metadata={"CreationDate": None, "Producer": None, "Creator": None})


def themed_svg(figure: Figure, name: str, description: str) -> str:
    """A figure as an SVG element for a page: the page's colours and font, and drawn no larger than its text is."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for colour, variable in _THEMED.items():
        svg = svg.replace(colour, f"var({variable})")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{name}-", svg)
    width, height = (_PIXELS * inches for inches in figure.get_size_inches())
    size = f'width="{width:.0f}" height="{height:.0f}" style="min-width:{_SHRINKS * width:.0f}px" '
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt" ', size, svg, count=1)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{description}" ', 1)


EVERYWHERE = (-math.inf, math.inf)


def spread_labels(heights: list[float], gap: float, within: tuple[float, float] = EVERYWHERE) -> list[float]:
    """Move labels apart until neighbours are at least `gap` away, as little as possible, and keep them within a span.

    Where there are more labels than the span has room for, they go beyond its lower end.
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = list(heights)
    for _ in range(50):
        for lower, upper in itertools.pairwise(order):
            overlap = gap - (placed[upper] - placed[lower])
            if overlap > 1e-9:
                placed[lower] -= overlap / 2
                placed[upper] += overlap / 2
    low, high = within
    for label in order if min(placed, default=low) < low else ():
        placed[label] = max(placed[label], low)
        low = placed[label] + gap
    for label in reversed(order) if max(placed, default=high) > high else ():
        placed[label] = min(placed[label], high)
        high = placed[label] - gap
    return placed
