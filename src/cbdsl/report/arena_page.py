"""The page of the arena: the accuracy of every defence under every attack, its weaknesses and its cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes

from cbdsl import presets, register
from cbdsl.report.figures import PALE, SMALL, TEXT, new_figure, spread_labels, style_axes
from cbdsl.report.pages import (
    Cell,
    Drawing,
    PageFigure,
    Row,
    Table,
    describe_rounds,
    describe_seeds,
    join_words,
    keep_together,
    save_drawing,
    write_page,
)
from cbdsl.studies.arena import (
    ABSENT,
    TOLERATED,
    TOLERATED_TARGETED,
    Arena,
    ArenaCell,
    ArenaPlan,
    Match,
    get_defence,
)
from cbdsl.util.formatting import format_bytes

_MAP = mpl.colormaps["cividis"]  # for colour-blind readers, too
_OURS, _THEIRS = "#0072b2", "#d55e00"


def find_worst(matches: Iterable[Match], preset: str, defence: str) -> Match:
    """Return the match in which a defence ends lowest."""
    own = (match for match in matches if (match.preset, match.defence) == (preset, defence))
    return min(own, key=lambda match: match.accuracy)


def draw_heatmap(plan: ArenaPlan, matches: Sequence[Match], preset: str, count: int) -> Drawing:
    """Draw attacks down and defences across: the final accuracy as number, the loss as colour.

    Colours follow the square root of the loss, so that five points are visible beside ninety.
    """
    there = [match for match in matches if match.preset == preset and match.byzantine in (0, count)]
    found = {(match.defence, match.attack): match for match in there}
    attacks = {"": "no attackers", ABSENT: "attackers absent"} | {name: name for name in plan.attacks}
    figure = new_figure(2.3 + 0.58 * len(plan.defences), 2.4 + 0.3 * len(attacks))
    axes = figure.subplots()
    for row, attack in enumerate(attacks):
        for column, defence in enumerate(plan.defences):
            if (defence, attack) in found:  # a run that failed leaves a gap
                _draw_match(axes, column, row, found[defence, attack])
    axes.set_xlim(0, len(plan.defences))
    axes.set_ylim(len(attacks), 0)
    style_axes(axes, "")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    labels = [get_defence(name).label for name in plan.defences]
    axes.xaxis.tick_top()
    axes.set_xticks([column + 0.4 for column in range(len(labels))], labels, rotation=45, ha="left")
    axes.set_yticks([row + 0.46 for row in range(len(attacks))], list(attacks.values()))
    axes.tick_params(length=0)
    rows = [
        (preset, get_defence(match.defence).label, attacks[match.attack], match.byzantine, match.seeds, match.accuracy,
         match.lowest, match.highest, match.remainder, match.lost)
        for match in there
    ]  # fmt: skip
    head = ("preset", "defence", "attack", "attackers", "seeds", "accuracy", "lowest", "highest", "attackers_absent",
            "lost")  # fmt: skip
    return Drawing(figure, head, rows)


def _draw_match(axes: Axes, column: int, row: int, match: Match) -> None:
    colour = _MAP(1 - math.sqrt(min(max(match.lost, 0.0), 1.0)))
    axes.add_patch(mpl.patches.Rectangle((column, row), 0.96, 0.92, facecolor=colour, edgecolor="none"))
    ink = "#fdfdfd" if sum(colour[:3]) < 1.5 else "#000000"  # not the theme's colours: cells keep theirs
    fell = match.seeds > 1 and not match.withstands  # one seed is not a verdict
    axes.text(
        column + 0.48, row + 0.48, f"{100 * match.accuracy:.0f}{' ✗' * fell}",
        ha="center", va="center", color=ink, fontsize=SMALL, fontweight="bold" if fell else "normal",
    )  # fmt: skip


def draw_costs(plan: ArenaPlan, matches: Sequence[Match]) -> Drawing:
    """Draw worst accuracy against uplink: one point per defence, one panel per preset."""
    figure = new_figure(9.6, 4.4 * len(plan.presets))
    panels = figure.subplots(len(plan.presets), 1, squeeze=False)[:, 0]
    rows: list[tuple[object, ...]] = []
    for axes, preset in zip(panels, plan.presets, strict=True):
        words = f" ({preset})" if len(plan.presets) > 1 else ""
        style_axes(axes, f"Accuracy under the worst attack, and the uplink it takes{words}")
        worst = {name: find_worst(matches, preset, name) for name in plan.defences}
        _draw_cost_panel(axes, worst)
        rows += [
            (preset, get_defence(name).label, match.accuracy, match.attack, match.byzantine, match.uplink_bytes)
            for name, match in worst.items()
        ]
    return Drawing(figure, ("preset", "defence", "worst_accuracy", "attack", "attackers", "uplink_bytes"), rows)


def _draw_cost_panel(axes: Axes, points: dict[str, Match]) -> None:
    for ours, colour, marker in ((True, _OURS, "o"), (False, _THEIRS, "s")):
        names = [name for name in points if get_defence(name).ours is ours]
        heights = spread_labels([100 * points[name].accuracy for name in names], 4.5)
        down = max(0.0, max(heights, default=0.0) - 99)
        for name, label in zip(names, heights, strict=True):
            across, height = points[name].uplink_bytes / 1e6, 100 * points[name].accuracy
            axes.plot(across, height, marker, color=colour, markersize=8 if ours else 6)
            axes.annotate(
                get_defence(name).label, (across, height), (across * 1.25, label - down), color=colour,
                fontsize=SMALL, va="center",
                arrowprops={"arrowstyle": "-", "color": PALE, "linewidth": 0.6, "relpos": (0, 0.5)},
            )  # fmt: skip
    spans = [match.uplink_bytes / 1e6 for match in points.values()]
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlim(min(spans) / 1.5, max(spans) * 6)
    axes.set_ylim(-4, 104)
    axes.set_xlabel("uplink of the run under that attack, MB (payload)", fontsize=TEXT)
    axes.set_ylabel("accuracy, %", fontsize=TEXT)


def write_arena_page(arena: Arena, out: Path, command: str) -> Path:
    """Write figures and page into a folder; return the page."""
    plan, matches = arena.plan, arena.matches
    specs = {preset: plan.spec(ArenaCell(preset, plan.defences[0]), plan.seeds[0]) for preset in plan.presets}
    lengths = [(spec.rounds, presets.preset(name).rounds) for name, spec in specs.items()]
    workers = specs[plan.presets[0]].workers
    ours = any(get_defence(name).ours for name in plan.defences)
    return write_page(
        out / "arena.html",
        "arena.html.j2",
        plan=plan,
        command=command,
        workers=workers,
        several_presets=len(plan.presets) > 1,
        quick=len(plan.seeds) == 1 or any(here < whole for here, whole in lengths),
        length=describe_rounds(lengths),
        rounds=join_words(f"{preset} ({spec.rounds} rounds)" for preset, spec in specs.items()),
        seeds=_describe_seeds(plan),
        best=[find_best(plan, matches, preset) for preset in plan.presets],
        price=save_drawing(draw_costs(plan, matches), out / "figures" / "cost", "Worst accuracy against uplink"),
        worst={preset: tabulate_worst(plan, matches, preset) for preset in plan.presets},
        weaknesses=find_weaknesses(matches),
        maps=[
            _save_map(plan, matches, preset, count, out)
            for preset in plan.presets
            for count in sorted(plan.byzantine, reverse=True)
        ],
        detection=_describe_detection(plan, matches) if ours else None,
        backdoors=tabulate_backdoors(plan, matches),
        targets=tabulate_targets(plan, matches),
        attacks={name: register.attack.get(name).omniscient for name in plan.attacks},
        scoring=["Zeno"] * ("zeno" in plan.defences) + ["CB-DSL"] * ours,
        bulyan_most=(workers - 3) // 4,  # k >= 4f + 3
        failed=len(arena.failed),
        tolerated=f"{TOLERATED * 100:.0f}",
        tolerated_targeted=f"{TOLERATED_TARGETED * 100:.0f}",
        label=lambda name: get_defence(name).label,
        attackers=_count_attackers,
        points=_format_points,
        share=_format_share,
        span=_format_span,
    )


def find_best(plan: ArenaPlan, matches: Sequence[Match], preset: str) -> Match:
    """Return the worst match of the defence whose worst match is best."""
    return max((find_worst(matches, preset, name) for name in plan.defences), key=lambda match: match.accuracy)


@dataclass(frozen=True)
class Weaknesses:
    """Matches in which our own defences fail: by accuracy, by a backdoor, on targeted classes, or by wrong bans."""

    lost: list[Match]
    backdoors: list[Match]
    targets: list[Match]
    false_bans: list[Match]

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.lost) + len(self.backdoors) + len(self.targets) + len(self.false_bans)


def find_weaknesses(matches: Sequence[Match]) -> Weaknesses | None:
    """Return the weaknesses of our own defences; None if there are no such defences."""
    ours = [match for match in matches if get_defence(match.defence).ours]
    if not ours:
        return None
    return Weaknesses(
        lost=[match for match in sorted(ours, key=lambda match: -match.lost) if not match.withstands],
        backdoors=[match for match in ours if match.attack_success is not None and match.attack_success > 0.5],
        targets=[match for match in ours if not match.protects_targets],
        false_bans=[match for match in ours if match.false_bans],
    )


def _count_attackers(count: int) -> str:
    return f"{count} attacker{'s' * (count != 1)}"


def _add_preset(plan: ArenaPlan, preset: str, words: str) -> str:
    """Append the preset to some text if there are several."""
    return f"{words}, {preset}" if len(plan.presets) > 1 else words


def _describe_seeds(plan: ArenaPlan) -> str:
    """Describe the seeds, and which defences have fewer."""
    kinds = {plan.seeds_of(name) for name in plan.defences}
    if len(kinds) == 1:
        return describe_seeds(kinds.pop())
    words = {seeds: f"{len(seeds)} seed{'s' * (len(seeds) > 1)} ({join_words(seeds)})" for seeds in kinds}
    return f"{words[plan.seeds]} for our own defences and FedAvg, {words[plan.other_seeds]} for the others"


@dataclass(frozen=True)
class AccuracyMap:
    """The section of one heatmap."""

    anchor: str
    link: str
    title: str
    figure: PageFigure


def _save_map(plan: ArenaPlan, matches: Sequence[Match], preset: str, count: int, out: Path) -> AccuracyMap:
    attackers, name = _count_attackers(count), f"{preset}-{count}"
    title = f"Accuracy with {attackers}"
    figure = save_drawing(
        draw_heatmap(plan, matches, preset, count),
        out / "figures" / f"accuracy-{name}",
        f"{title}, by defence and attack, {preset}",
    )
    return AccuracyMap(f"map-{name}", _add_preset(plan, preset, attackers), _add_preset(plan, preset, title), figure)


def tabulate_worst(plan: ArenaPlan, matches: Sequence[Match], preset: str) -> Table:
    """Return the worst case of every defence in one preset."""
    head = (
        "Defence", "No attackers", "Worst case", "Under (attack, attackers)", "Largest loss",
        f"Lost over {TOLERATED * 100:.0f} points", "Honest banned", "Backdoor", "Targeted class", "Uplink",
    )  # fmt: skip
    rows = []
    for defence in plan.defences:
        own = [match for match in matches if (match.preset, match.defence) == (preset, defence)]
        attacked = [match for match in own if match.attacked]
        clean, worst = own[0], find_worst(own, preset, defence)
        costliest, lost = max(attacked, key=lambda match: match.lost), sum(not match.withstands for match in attacked)
        fooled_shares = [match.attack_success for match in attacked if match.attack_success is not None]
        aimed = [match.aimed_accuracy for match in attacked if match.aimed_accuracy is not None]
        rows.append((
            Cell(get_defence(defence).label, strong=True), f"{clean.accuracy:.1%}",
            _format_span(worst).replace(" to ", "\u00a0to\u00a0"), _describe_case(worst),
            _format_points(costliest.lost) + (f" ({_describe_case(costliest)})" if costliest.lost > 0 else ""),
            _colour(f"{lost} of {len(attacked)}", not lost, clean.seeds),
            f"{sum(match.false_bans for match in own):g}", _format_share(max(fooled_shares, default=None)),
            _format_share(min(aimed, default=None)), _format_size(clean.uplink_bytes),
        ))  # fmt: skip
    return Table(head, rows)


def _describe_case(match: Match) -> str:
    if match.attack == ABSENT:
        return f"no attack, {match.byzantine} absent"
    return f"{match.attack}, {match.byzantine}" if match.attack else "no attack"


@dataclass(frozen=True)
class Detection:
    """Bans and wasted uploads of our own defences: in sum, in every match, and false alarms of clean runs."""

    totals: Table
    matches: Table
    alarms: str


def _describe_detection(plan: ArenaPlan, matches: Sequence[Match]) -> Detection:
    ours = [match for match in matches if get_defence(match.defence).ours]
    totals = []
    for defence in dict.fromkeys(match.defence for match in ours):
        own = [match for match in ours if match.defence == defence and match.attacked]
        banned, wrong = sum(match.banned for match in own), sum(match.false_bans for match in own)
        there = sum(match.byzantine for match in own)
        totals.append((
            Cell(get_defence(defence).label, strong=True),
            _format_share(banned / (banned + wrong) if banned + wrong else None),
            _format_share(banned / there if there else None), f"{wrong:g}",
            f"{max(match.uploads for match in own):g}", _format_size(max(match.wasted_bytes for match in own)),
        ))  # fmt: skip
    rows = [
        (
            _name_defence(plan, match), match.attack or "none", str(match.byzantine), _format_points(match.lost),
            f"{match.banned:g}", _format_share(match.precision), _format_share(match.recall),
            f"{match.false_bans:g}", f"{match.uploads:g}", _format_size(match.wasted_bytes),
        )
        for match in ours
    ]  # fmt: skip
    head = ("Defence", "Precision", "Recall", "Honest banned, all matches", "Most uploads in a run",
            "Most wasted in a run")  # fmt: skip
    every_head = ("Defence", "Attack", "Attackers", "Loss", "Banned", "Precision", "Recall", "Honest banned", "Uploads",
                  "Wasted")  # fmt: skip
    alarms = "; ".join(  # in clean runs every upload is honest, and each refutation is a ban
        f"{_name_defence(plan, match)}: {match.false_bans * match.seeds:g} of {match.uploads * match.seeds:g}"
        for match in ours
        if not match.attack
    )
    return Detection(Table(head, totals), Table(every_head, rows), alarms)


_FIRST_HEADS = ("Defence", "Attack", "Attackers", "Accuracy", "Loss")


def tabulate_backdoors(plan: ArenaPlan, matches: Sequence[Match]) -> Table:
    """Return the success of every backdoor."""
    rows = [
        (*_first_cells(plan, match), _format_share(match.attack_success))
        for match in matches
        if match.attack_success is not None
    ]
    return Table((*_FIRST_HEADS, "Attack success"), rows)


def tabulate_targets(plan: ArenaPlan, matches: Sequence[Match]) -> Table:
    """Return the accuracy of the classes that attacks target."""
    rows: list[Row] = [
        (
            *_first_cells(plan, match),
            _colour(_format_share(match.aimed_accuracy), match.protects_targets, match.seeds),
            _format_share(match.aimed_remainder),
        )
        for match in matches
        if match.aimed_accuracy is not None
    ]
    return Table((*_FIRST_HEADS, "Targeted class", "The same, attackers absent"), rows)


def _first_cells(plan: ArenaPlan, match: Match) -> tuple[str, ...]:
    """Return a match's first cells in a table, under `_FIRST_HEADS`."""
    count, accuracy = str(match.byzantine), f"{match.accuracy:.1%}"
    return _name_defence(plan, match), match.attack, count, accuracy, _format_points(match.lost)


def _name_defence(plan: ArenaPlan, match: Match) -> str:
    return _add_preset(plan, match.preset, get_defence(match.defence).label)


def _colour(words: str, good: bool, seeds: int) -> Cell:
    """Colour text by a verdict, unless there is only one seed."""
    return Cell(words, tone="yes" if good else "no") if seeds > 1 else Cell(words)


def _format_span(match: Match) -> str:
    spread = f" ({match.lowest:.1%} to {match.highest:.1%})" if match.seeds > 1 else ""
    return f"{match.accuracy:.1%}{spread}"


def _format_size(count: float) -> str:
    return keep_together(format_bytes(count))


def _format_points(loss: float) -> str:
    return f"{100 * loss + 0.0:.1f} points".replace("-0.0 ", "0.0 ")


def _format_share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
