"""The arena's figures: what each defence keeps in its worst bout, and every bout in a map."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes

from cbdsl.report.drawing import Drawing
from cbdsl.report.style import PALE, SMALL, TEXT, dress, new_figure, spread_labels
from cbdsl.study.arena import ABSENT, Bout, Contest, defence_named

_MAP = mpl.colormaps["cividis"]  # the same to every eye
_OURS, _THEIRS = "#0072b2", "#d55e00"


def worst_of(bouts: Iterable[Bout], preset: str, defence: str) -> Bout:
    """The bout in which a defence ends lowest."""
    own = (bout for bout in bouts if (bout.preset, bout.defence) == (preset, defence))
    return min(own, key=lambda bout: bout.accuracy)


def heatmap(contest: Contest, bouts: Sequence[Bout], preset: str, count: int) -> Drawing:
    """Attacks down, defences across; in every cell the final accuracy, and as its colour what was lost.

    Colours fall with the root of the loss, so that five points show beside ninety.
    """
    there = [bout for bout in bouts if bout.preset == preset and bout.byzantine in (0, count)]
    found = {(bout.defence, bout.attack): bout for bout in there}
    attacks = {"": "nobody Byzantine", ABSENT: "attackers absent"} | {name: name for name in contest.attacks}
    figure = new_figure(2.3 + 0.58 * len(contest.defences), 2.4 + 0.3 * len(attacks))
    axes = figure.subplots()
    for row, attack in enumerate(attacks):
        for column, defence in enumerate(contest.defences):
            _draw_bout(axes, column, row, found[defence, attack])
    axes.set_xlim(0, len(contest.defences))
    axes.set_ylim(len(attacks), 0)
    dress(axes, "")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    labels = [defence_named(name).label for name in contest.defences]
    axes.xaxis.tick_top()
    axes.set_xticks([column + 0.4 for column in range(len(labels))], labels, rotation=45, ha="left")
    axes.set_yticks([row + 0.46 for row in range(len(attacks))], list(attacks.values()))
    axes.tick_params(length=0)
    rows = [
        (preset, defence_named(bout.defence).label, attacks[bout.attack], bout.byzantine, bout.seeds, bout.accuracy,
         bout.lowest, bout.highest, bout.remainder, bout.lost)
        for bout in there
    ]  # fmt: skip
    head = ("preset", "defence", "attack", "attackers", "seeds", "accuracy", "lowest", "highest", "attackers_absent",
            "lost")  # fmt: skip
    return Drawing(figure, head, rows)


def _draw_bout(axes: Axes, column: int, row: int, bout: Bout) -> None:
    colour = _MAP(1 - math.sqrt(min(max(bout.lost, 0.0), 1.0)))
    axes.add_patch(mpl.patches.Rectangle((column, row), 0.96, 0.92, facecolor=colour, edgecolor="none"))
    ink = "#fdfdfd" if sum(colour[:3]) < 1.5 else "#000000"  # not the page's colours: cells keep theirs
    fell = bout.seeds > 1 and not bout.stands  # one seed shows a number, and is no verdict
    axes.text(
        column + 0.48, row + 0.48, f"{100 * bout.accuracy:.0f}{' ✗' * fell}",
        ha="center", va="center", color=ink, fontsize=SMALL, fontweight="bold" if fell else "normal",
    )  # fmt: skip


def cost(contest: Contest, bouts: Sequence[Bout]) -> Drawing:
    """Uplink across, worst accuracy up: one point a defence, one panel a preset."""
    figure = new_figure(9.6, 4.4 * len(contest.presets))
    panels = figure.subplots(len(contest.presets), 1, squeeze=False)[:, 0]
    rows: list[tuple[object, ...]] = []
    for axes, preset in zip(panels, contest.presets, strict=True):
        words = f" ({preset})" if len(contest.presets) > 1 else ""
        dress(axes, f"Accuracy under the worst attack, and the uplink it takes{words}")
        worst = {name: worst_of(bouts, preset, name) for name in contest.defences}
        _draw_costs(axes, worst)
        rows += [
            (preset, defence_named(name).label, bout.accuracy, bout.attack, bout.byzantine, bout.uplink_bytes)
            for name, bout in worst.items()
        ]
    return Drawing(figure, ("preset", "defence", "worst_accuracy", "attack", "attackers", "uplink_bytes"), rows)


def _draw_costs(axes: Axes, points: dict[str, Bout]) -> None:
    for ours, colour, marker in ((True, _OURS, "o"), (False, _THEIRS, "s")):
        names = [name for name in points if defence_named(name).ours is ours]
        heights = spread_labels([100 * points[name].accuracy for name in names], 4.5)
        down = max(0.0, max(heights, default=0.0) - 99)
        for name, label in zip(names, heights, strict=True):
            across, height = points[name].uplink_bytes / 1e6, 100 * points[name].accuracy
            axes.plot(across, height, marker, color=colour, markersize=8 if ours else 6)
            axes.annotate(
                defence_named(name).label, (across, height), (across * 1.25, label - down), color=colour,
                fontsize=SMALL, va="center",
                arrowprops={"arrowstyle": "-", "color": PALE, "linewidth": 0.6, "relpos": (0, 0.5)},
            )  # fmt: skip
    spans = [bout.uplink_bytes / 1e6 for bout in points.values()]
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlim(min(spans) / 1.5, max(spans) * 6)
    axes.set_ylim(-4, 104)
    axes.set_xlabel("uplink of the whole run, MB (payload)", fontsize=TEXT)
    axes.set_ylabel("accuracy, %", fontsize=TEXT)
