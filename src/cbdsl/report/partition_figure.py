"""The picture of a partition: how many samples of each class every worker holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator

from cbdsl.arrays import Indices
from cbdsl.data.partition import Split
from cbdsl.machine import demand_memory
from cbdsl.report.style import INK, PALE, SHADES, new_figure

_BLUE = SHADES["cb-dsl-g"][0]


def class_counts(parts: Split, labels: Indices, classes: int) -> Indices:
    """Samples of each class with each worker, (classes, workers)."""
    demand_memory(8 * classes * len(parts.workers), "Counting classes and workers takes", "Ask for fewer workers.")
    columns = [np.bincount(labels[rows], minlength=classes) for rows in parts.workers]
    return np.stack(columns, axis=1).astype(np.int32)


def save_partition(path: Path, counts: Indices, title: str) -> None:
    """Draw workers against classes, and above it how many samples each worker holds. counts: (classes, workers)."""
    classes, workers = counts.shape
    figure = new_figure(8, 2.4 + min(3.2, 0.28 * classes))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2.4))
    above.stairs(counts.sum(axis=0), np.arange(workers + 1) - 0.5, fill=True, color=_BLUE)
    above.set_ylabel("samples")
    above.set_title(title, loc="left", fontsize=10, color=INK)
    above.spines[["top", "right"]].set_visible(False)
    shown = below.imshow(counts, aspect="auto", cmap="Blues", interpolation="nearest", vmin=0)
    below.set_xlabel("worker")
    below.set_ylabel("class")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.yaxis.set_major_locator(MaxNLocator(integer=True))
    bar = figure.colorbar(shown, ax=below, label="samples of the class")
    bar.outline.set_edgecolor(PALE)
    figure.savefig(path, dpi=160)
