"""The page of the arena: the accuracy of every defence under every attack, its weaknesses and its cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes

from cbdsl import presets, register
from cbdsl.report.figures import PALE, SMALL, TEXT, new_figure, spread_labels, style_axes
from cbdsl.report.html import (
    FIGURE_FILES,
    Drawing,
    Section,
    bullet_list,
    method_section,
    save_drawing,
    table,
    write_page,
)
from cbdsl.report.words import describe_attack, describe_rounds, describe_seeds, join_words
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


def heatmap(plan: ArenaPlan, matches: Sequence[Match], preset: str, count: int) -> Drawing:
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


def cost(plan: ArenaPlan, matches: Sequence[Match]) -> Drawing:
    """Draw worst accuracy against uplink: one point per defence, one panel per preset."""
    figure = new_figure(9.6, 4.4 * len(plan.presets))
    panels = figure.subplots(len(plan.presets), 1, squeeze=False)[:, 0]
    rows: list[tuple[object, ...]] = []
    for axes, preset in zip(panels, plan.presets, strict=True):
        words = f" ({preset})" if len(plan.presets) > 1 else ""
        style_axes(axes, f"Accuracy under the worst attack, and the uplink it takes{words}")
        worst = {name: find_worst(matches, preset, name) for name in plan.defences}
        _draw_costs(axes, worst)
        rows += [
            (preset, get_defence(name).label, match.accuracy, match.attack, match.byzantine, match.uplink_bytes)
            for name, match in worst.items()
        ]
    return Drawing(figure, ("preset", "defence", "worst_accuracy", "attack", "attackers", "uplink_bytes"), rows)


def _draw_costs(axes: Axes, points: dict[str, Match]) -> None:
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
    axes.set_xlabel("uplink of the whole run, MB (payload)", fontsize=TEXT)
    axes.set_ylabel("accuracy, %", fontsize=TEXT)


_SHADED = (
    "Final test accuracy in percent; the darker, the more is lost against the same defence with the attackers absent."
)
_CROSSED = f" ✗: more than {TOLERATED * 100:.0f} points, where there is more than one seed."


def write_arena_page(arena: Arena, out: Path, command: str) -> Path:
    """Write figures and page into a folder; return the page."""
    plan, matches = arena.plan, arena.matches
    maps = [
        Section(
            f"map-{preset}-{count}",
            _add_preset(plan, preset, _count_attackers(count)),
            _add_preset(plan, preset, f"Accuracy with {_count_attackers(count)}"),
            save_drawing(
                heatmap(plan, matches, preset, count),
                out / "figures" / f"accuracy-{preset}-{count}",
                f"Accuracy with {_count_attackers(count)}, by defence and attack, {preset}",
                _SHADED + _CROSSED * (len(plan.seeds) > 1),
            ),
        )
        for preset in plan.presets
        for count in sorted(plan.byzantine, reverse=True)
    ]
    price = save_drawing(cost(plan, matches), out / "figures" / "cost", "Worst accuracy against uplink")
    worst = "".join(_tabulate_worst(plan, matches, preset) for preset in plan.presets)
    sections = [
        Section("worst", "Worst case", "The worst case of each defence, and its uplink", price + worst),
        Section("breaks", "Where ours breaks", "Where our own defences break", _list_weaknesses(plan, matches)),
        *maps,
        *_detection_section(plan, matches),
        *_backdoor_section(plan, matches),
        *_targets_section(plan, matches),
        Section("attacks", "Attacks", "The attacks", _list_attacks(plan)),
        _arena_method(plan, command),
    ]
    return write_page(out / "arena.html", "The Byzantine arena", _lead(plan, matches), sections)


def _label(defence: str) -> str:
    return escape(get_defence(defence).label)


def _count_attackers(count: int) -> str:
    return f"{count} attacker{'s' * (count != 1)}"


def _add_preset(plan: ArenaPlan, preset: str, words: str) -> str:
    """Append the preset to some text if there are several."""
    return f"{words}, {preset}" if len(plan.presets) > 1 else words


def _describe_attacked(plan: ArenaPlan, match: Match) -> str:
    """Describe the attack of a match."""
    return escape(_add_preset(plan, match.preset, f"{match.attack} with {_count_attackers(match.byzantine)}"))


def _lead(plan: ArenaPlan, matches: Sequence[Match]) -> str:
    workers = plan.spec(ArenaCell(plan.presets[0], plan.defences[0]), 0).workers
    words = (
        [f"A quick look, not a result: {describe_rounds(_lengths(plan))}, {_describe_seeds(plan)}."]
        if _is_quick(plan)
        else []
    )
    words += [
        f"{len(plan.defences)} defences against {len(plan.attacks)} attacks with "
        f"{join_words(plan.byzantine)} Byzantine workers of {workers}"
        f"{'' if words else f', {describe_rounds(_lengths(plan))}, {_describe_seeds(plan)}'}."
    ]
    for preset in plan.presets:
        best = max(plan.defences, key=lambda name: find_worst(matches, preset, name).accuracy)
        worst = find_worst(matches, preset, best)
        place = f" on {escape(preset)}" if len(plan.presets) > 1 else ""
        under = (
            f"under {worst.attack} with {_count_attackers(worst.byzantine)}"
            if worst.attacked
            else "and no attack costs it more than the absence of its workers"
        )
        words.append(f"Highest in the worst case{place}: <b>{_label(best)}</b>, {worst.accuracy:.1%} {under}.")
    return " ".join(words)


def _is_quick(plan: ArenaPlan) -> bool:
    return len(plan.seeds) == 1 or any(here < whole for here, whole in _lengths(plan))


def _lengths(plan: ArenaPlan) -> list[tuple[int, int]]:
    """Return the rounds of every preset: here, and of the preset itself."""
    return [
        (plan.spec(ArenaCell(name, plan.defences[0]), plan.seeds[0]).rounds, presets.preset(name).rounds)
        for name in plan.presets
    ]


def _describe_seeds(plan: ArenaPlan) -> str:
    """Describe the seeds, and which defences have fewer."""
    numbers = {name: plan.seeds_of(name) for name in plan.defences}
    kinds = set(numbers.values())
    if len(kinds) == 1:
        return describe_seeds(kinds.pop())
    words = {seeds: f"{len(seeds)} seed{'s' * (len(seeds) > 1)} ({join_words(seeds)})" for seeds in kinds}
    return f"{words[plan.seeds]} for our own defences and FedAvg, {words[plan.other_seeds]} for the others"


def _tabulate_worst(plan: ArenaPlan, matches: Sequence[Match], preset: str) -> str:
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
            f"<b>{_label(defence)}</b>", f"{clean.accuracy:.1%}", _format_span(worst).replace(" to ", "\u00a0to\u00a0"),
            _describe_case(worst),
            _format_points(costliest.lost) + (f" ({_describe_case(costliest)})" if costliest.lost > 0 else ""),
            _colour(f"{lost} of {len(attacked)}", not lost, clean.seeds),
            f"{sum(match.false_bans for match in own):g}", _format_share(max(fooled_shares, default=None)),
            _format_share(min(aimed, default=None)), _format_size(clean.uplink_bytes),
        ))  # fmt: skip
    note = (
        f"<p>Losses are against the remainder: the same defence and seeds with the attackers absent. Lost "
        f"over {TOLERATED * 100:.0f} points: in how many matches; coloured where there is more than one seed. "
        "Honest banned: the sum over all matches, one run each. Backdoor: the highest share of triggered images that "
        "were classified as the target. Targeted class: the lowest accuracy of a class that an attack targets. "
        "Uplink: of a run without attackers.</p>"
    )
    several = len(plan.presets) > 1
    heading = f"<h3>{escape(preset)}</h3>" if several else ""
    return heading + table(head, rows, wide=True) + (note if preset == plan.presets[-1] else "")


def _describe_case(match: Match) -> str:
    if match.attack == ABSENT:
        return f"no attack, {match.byzantine} absent"
    return f"{escape(match.attack)}, {match.byzantine}" if match.attack else "no attack"


def _list_weaknesses(plan: ArenaPlan, matches: Sequence[Match]) -> str:
    ours = [match for match in matches if get_defence(match.defence).ours]
    if not ours:
        return "<p>None of our own defences is in this arena.</p>"
    items = [
        f"<b>{_label(match.defence)}</b> loses {_format_points(match.lost)} to {_describe_attacked(plan, match)} "
        f"({_format_span(match)}; {match.remainder:.1%} with the attackers absent)."
        for match in sorted(ours, key=lambda match: -match.lost)
        if not match.withstands
    ]
    items += [
        f"<b>{_label(match.defence)}</b> classifies {match.attack_success:.0%} of triggered images as the target under "
        f"{_describe_attacked(plan, match)}, at an accuracy of {match.accuracy:.1%}."
        for match in ours
        if match.attack_success is not None and match.attack_success > 0.5
    ]
    items += [
        f"<b>{_label(match.defence)}</b> recognises {_format_share(match.aimed_accuracy)} of the class targeted by "
        f"{_describe_attacked(plan, match)}; {_format_share(match.aimed_remainder)} with the attackers absent."
        for match in ours
        if not match.protects_targets
    ]
    items += [
        f"<b>{_label(match.defence)}</b> bans {match.false_bans:g} honest workers per run under "
        f"{_describe_attacked(plan, match) if match.attack else escape(_add_preset(plan, match.preset, 'no attack'))}."
        for match in ours
        if match.false_bans
    ]
    seen = "<p>Seen on one seed: it may be chance.</p>" if len(plan.seeds) == 1 else ""
    return seen + (bullet_list(items) if items else "<p>Nowhere in this arena.</p>")


def _detection_section(plan: ArenaPlan, matches: Sequence[Match]) -> list[Section]:
    ours = [name for name in plan.defences if get_defence(name).ours]
    if not ours:
        return []
    totals = []
    for defence in ours:
        own = [match for match in matches if match.defence == defence and match.attacked]
        banned, wrong = sum(match.banned for match in own), sum(match.false_bans for match in own)
        there = sum(match.byzantine for match in own)
        totals.append((
            f"<b>{_label(defence)}</b>", _format_share(banned / (banned + wrong) if banned + wrong else None),
            _format_share(banned / there if there else None), f"{wrong:g}",
            f"{max(match.uploads for match in own):g}", _format_size(max(match.wasted_bytes for match in own)),
        ))  # fmt: skip
    head = ("Defence", "Attack", "Attackers", "Loss", "Banned", "Precision", "Recall", "Honest banned", "Uploads",
            "Wasted")  # fmt: skip
    rows = [
        (
            escape(_add_preset(plan, match.preset, get_defence(match.defence).label)), escape(match.attack or "none"),
            str(match.byzantine), _format_points(match.lost), f"{match.banned:g}", _format_share(match.precision),
            _format_share(match.recall),
            f"{match.false_bans:g}", f"{match.uploads:g}", _format_size(match.wasted_bytes),
        )
        for match in matches
        if match.defence in ours
    ]  # fmt: skip
    note = (
        "<p>Only CB-DSL bans. An attacker that is never invited does no harm: a low recall beside a high accuracy "
        "means that it was ignored. Wasted: uploads that were refuted or declined.</p>"
    )
    top = (
        "Defence",
        "Precision",
        "Recall",
        "Honest banned, all matches",
        "Most uploads in a run",
        "Most wasted in a run",
    )
    every = f"<details><summary>All {len(rows)} matches</summary>{table(head, rows, wide=True)}</details>"
    alarms = _describe_false_alarms(plan, [match for match in matches if match.defence in ours])
    return [
        Section(
            "detection", "Detection", "Banned attackers, banned honest workers, wasted uploads",
            note + table(top, totals, wide=True) + alarms + every,
        )
    ]  # fmt: skip


def _describe_false_alarms(plan: ArenaPlan, matches: Sequence[Match]) -> str:
    """Count refuted uploads in clean runs: each was honest, and each refutation is a ban."""
    words = "; ".join(
        f"{escape(_add_preset(plan, match.preset, get_defence(match.defence).label))}: "
        f"{match.false_bans * match.seeds:g} of {match.uploads * match.seeds:g}"
        for match in matches
        if not match.attack
    )
    return f"<p>False alarms, honest uploads that were refuted in clean runs: {words}.</p>"


def _backdoor_section(plan: ArenaPlan, matches: Sequence[Match]) -> list[Section]:
    rows = [
        (*_first_cells(plan, match), _format_share(match.attack_success))
        for match in matches
        if match.attack_success is not None
    ]
    note = (
        "<p>Share of triggered test images of other classes that are classified as the target: a high share "
        "means that the accuracy above hides a backdoor.</p>"
    )
    head = (*_FIRST_HEADS, "Attack success")
    return [Section("backdoor", "Backdoor", "Backdoors", note + table(head, rows, wide=True))] if rows else []


def _targets_section(plan: ArenaPlan, matches: Sequence[Match]) -> list[Section]:
    rows = [
        (
            *_first_cells(plan, match),
            _colour(_format_share(match.aimed_accuracy), match.protects_targets, match.seeds),
            _format_share(match.aimed_remainder),
        )
        for match in matches
        if match.aimed_accuracy is not None
    ]
    note = (
        "<p>Attacks on some classes hardly show in the accuracy over all of them. The accuracy of the worst of the "
        f"targeted classes; marked where it loses more than {TOLERATED_TARGETED * 100:.0f} points.</p>"
    )
    head = (*_FIRST_HEADS, "Targeted class", "The same, attackers absent")
    return (
        [Section("aimed", "Targeted", "Classes that attacks target", note + table(head, rows, wide=True))]
        if rows
        else []
    )


_FIRST_HEADS = ("Defence", "Attack", "Attackers", "Accuracy", "Loss")


def _first_cells(plan: ArenaPlan, match: Match) -> tuple[str, ...]:
    """Return a match's first cells in a table, under `_FIRST_HEADS`."""
    return (
        escape(_add_preset(plan, match.preset, get_defence(match.defence).label)), escape(match.attack),
        str(match.byzantine), f"{match.accuracy:.1%}", _format_points(match.lost),
    )  # fmt: skip


def _list_attacks(plan: ArenaPlan) -> str:
    parts = []
    for name in plan.attacks:
        knows = " <i>It knows the honest workers' models.</i>" if register.attack.get(name).omniscient else ""
        parts.append(f"<dt><b>{escape(name)}</b></dt><dd>{escape(describe_attack(name))}{knows}</dd>")
    note = (
        "<p>w is the model that an honest worker in the attacker's place would send, w^g the global model. In CB-DSL, "
        "an attacker with false weights also claims a better score, otherwise it would never be invited.</p>"
    )
    return f"{note}<dl>{''.join(parts)}</dl>"


def _arena_method(plan: ArenaPlan, command: str) -> Section:
    settings = "".join(f", {key} = {value}" for key, value in plan.settings.items())
    specs = {preset: plan.spec(ArenaCell(preset, plan.defences[0]), plan.seeds[0]) for preset in plan.presets}
    rounds = join_words(f"{preset} ({spec.rounds} rounds)" for preset, spec in specs.items())
    text = (
        f": {escape(rounds)}{escape(settings)}, {_describe_seeds(plan)}. "
        f"{_describe_knowledge(plan, specs[plan.presets[0]].workers)} Accuracy is that of the last round.</p>"
        "<p>The remainder: for every defence, number of attackers and seed there is a run in which the same workers "
        "are Byzantine but absent. They claim nothing and upload nothing, and all others are as before. So a loss is "
        "the effect of the attack, without that of the data that attackers withhold."
    )
    files = (
        f"<code>results.csv</code>, <code>results.jsonl</code>, {FIGURE_FILES} and <code>runs/</code>, a folder for "
        "every run."
    )
    return method_section(command, text, files)


def _describe_knowledge(plan: ArenaPlan, workers: int) -> str:
    """Describe what the defences train on, score on and know."""
    there = set(plan.defences)
    scoring = ["Zeno"] * ("zeno" in there) + ["CB-DSL"] * any(get_defence(name).ours for name in there)
    words = ["Every method trains on D_tr beside its own data."]
    words += ["FLTrust also trains on it at the server."] * ("fltrust" in there)
    words += [f"{join_words(scoring)} {'score' if len(scoring) > 1 else 'scores'} on D_sc."] if scoring else []
    words.append(
        "Defences with a declared number of attackers get the true one, also where these are absent: then fewer models "
        "arrive, and an aggregator that cannot discard that many discards as many as it can."
    )
    most = (workers - 3) // 4  # k >= 4f + 3
    if "bulyan" in there and max(plan.byzantine) > most:
        limit = f"more than {most} attackers" if most > 0 else "any attackers"
        words.append(f"Bulyan does not tolerate {limit} among {workers} workers and discards as many as it can.")
    return " ".join(words)


def _colour(words: str, good: bool, seeds: int) -> str:
    """Colour text by a verdict, unless there is only one seed."""
    return f'<span class="{"yes" if good else "no"}">{words}</span>' if seeds > 1 else words


def _format_span(match: Match) -> str:
    spread = f" ({match.lowest:.1%} to {match.highest:.1%})" if match.seeds > 1 else ""
    return f"{match.accuracy:.1%}{spread}"


def _format_size(count: float) -> str:
    """Format a number of bytes on one line."""
    return format_bytes(count).replace(" ", "\u00a0")


def _format_points(loss: float) -> str:
    return f"{100 * loss + 0.0:.1f} points".replace("-0.0 ", "0.0 ")


def _format_share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
