"""The arena's figures: what each defence keeps in its worst bout, and every bout in a map."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cbdsl.report.style import INK, PALE, dress, new_figure, spread_labels
from cbdsl.study.arena import ABSENT, Bout, Contest, defence_named

_MAP = mpl.colormaps["cividis"]  # the same to every eye
_OURS, _THEIRS = "#0072b2", "#d55e00"


def worst_of(bouts: Iterable[Bout], preset: str, defence: str) -> Bout:
    """The bout in which a defence ends lowest."""
    own = (bout for bout in bouts if (bout.preset, bout.defence) == (preset, defence))
    return min(own, key=lambda bout: bout.accuracy)


def heatmap(contest: Contest, bouts: Sequence[Bout], preset: str, count: int) -> Figure:
    """Defences down, attacks across; in every cell the final accuracy, and as its colour what was lost.

    Colours fall with the root of the loss, so that five points show beside ninety.
    """
    there = [bout for bout in bouts if bout.preset == preset and bout.byzantine in (0, count)]
    found = {(bout.defence, bout.attack): bout for bout in there}
    columns = ["", ABSENT, *contest.attacks]
    figure = new_figure(2.9 + 0.62 * len(columns), 1.3 + 0.36 * len(contest.defences))
    axes = figure.subplots()
    for row, defence in enumerate(contest.defences):
        for column, attack in enumerate(columns):
            bout = found[defence, attack]
            colour = _MAP(1 - math.sqrt(min(max(bout.lost, 0.0), 1.0)))
            axes.add_patch(mpl.patches.Rectangle((column, row), 0.96, 0.92, facecolor=colour, edgecolor="none"))
            ink = "#fdfdfd" if sum(colour[:3]) < 1.5 else "#000000"  # not the page's colours: cells keep theirs
            weight = "normal" if bout.stands else "bold"
            axes.text(
                column + 0.48, row + 0.48, f"{bout.accuracy:.0%}".rstrip("%") + ("" if bout.stands else " ✗"),
                ha="center", va="center", color=ink, fontsize=9, fontweight=weight,
            )  # fmt: skip
    axes.set_xlim(0, len(columns))
    axes.set_ylim(len(contest.defences), 0)
    dress(axes, f"Test accuracy in %, {preset}, {count} {'attackers' if count > 1 else 'attacker'}")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_xticks(
        [column + 0.48 for column in range(len(columns))],
        ["nobody Byzantine", "attackers absent", *contest.attacks],
        rotation=45,
        ha="right",
    )
    axes.set_yticks(
        [row + 0.46 for row in range(len(contest.defences))], [defence_named(name).label for name in contest.defences]
    )
    axes.tick_params(length=0)
    return figure


def cost(contest: Contest, bouts: Sequence[Bout]) -> Figure:
    """Uplink across, worst accuracy up: one point a defence, one panel a preset."""
    figure = new_figure(8.5, 4.6 * len(contest.presets))
    panels = figure.subplots(len(contest.presets), 1, squeeze=False)[:, 0]
    for axes, preset in zip(panels, contest.presets, strict=True):
        words = f" ({preset})" if len(contest.presets) > 1 else ""
        dress(axes, f"Accuracy under the worst attack, and the uplink it takes{words}")
        _draw_costs(axes, {name: worst_of(bouts, preset, name) for name in contest.defences})
    return figure


def _draw_costs(axes: Axes, points: dict[str, Bout]) -> None:
    for ours, colour, marker in ((True, _OURS, "o"), (False, _THEIRS, "s")):
        names = [name for name in points if defence_named(name).ours is ours]
        heights = spread_labels([100 * points[name].accuracy for name in names], 4.5)
        down = max(0.0, max(heights, default=0.0) - 99)
        for name, label in zip(names, heights, strict=True):
            across, height = points[name].uplink_bytes / 1e6, 100 * points[name].accuracy
            axes.plot(across, height, marker, color=colour, markersize=8 if ours else 6)
            axes.annotate(
                defence_named(name).label, (across, height), (across * 1.25, label - down), color=colour, fontsize=9,
                va="center", arrowprops={"arrowstyle": "-", "color": PALE, "linewidth": 0.6, "relpos": (0, 0.5)},
            )  # fmt: skip
    spans = [bout.uplink_bytes / 1e6 for bout in points.values()]
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlim(min(spans) / 1.5, max(spans) * 6)
    axes.set_ylim(-4, 104)
    axes.set_xlabel("uplink of the whole run, MB (payload)", color=INK)
    axes.set_ylabel("accuracy, %", color=INK)
