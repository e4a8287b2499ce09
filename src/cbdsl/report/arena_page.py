"""The arena's page: where each defence stands, where it breaks, what it costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes

from cbdsl import presets, register
from cbdsl.report.html import Drawing, Section, bullets, document, keep, table
from cbdsl.report.style import PALE, SMALL, TEXT, dress, new_figure, spread_labels
from cbdsl.report.words import attack_words, listed, listed_span, seeds_words
from cbdsl.studies.arena import ABSENT, TOLERATED, TOLERATED_AIMED, ArenaCell, ArenaPlan, Match, defence_named
from cbdsl.util.files import write_atomically
from cbdsl.util.formatting import format_bytes

_MAP = mpl.colormaps["cividis"]  # the same to every eye
_OURS, _THEIRS = "#0072b2", "#d55e00"


def worst_of(bouts: Iterable[Match], preset: str, defence: str) -> Match:
    """The bout in which a defence ends lowest."""
    own = (bout for bout in bouts if (bout.preset, bout.defence) == (preset, defence))
    return min(own, key=lambda bout: bout.accuracy)


def heatmap(contest: ArenaPlan, bouts: Sequence[Match], preset: str, count: int) -> Drawing:
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


def _draw_bout(axes: Axes, column: int, row: int, bout: Match) -> None:
    colour = _MAP(1 - math.sqrt(min(max(bout.lost, 0.0), 1.0)))
    axes.add_patch(mpl.patches.Rectangle((column, row), 0.96, 0.92, facecolor=colour, edgecolor="none"))
    ink = "#fdfdfd" if sum(colour[:3]) < 1.5 else "#000000"  # not the page's colours: cells keep theirs
    fell = bout.seeds > 1 and not bout.stands  # one seed shows a number, and is no verdict
    axes.text(
        column + 0.48, row + 0.48, f"{100 * bout.accuracy:.0f}{' ✗' * fell}",
        ha="center", va="center", color=ink, fontsize=SMALL, fontweight="bold" if fell else "normal",
    )  # fmt: skip


def cost(contest: ArenaPlan, bouts: Sequence[Match]) -> Drawing:
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


def _draw_costs(axes: Axes, points: dict[str, Match]) -> None:
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


_SHADED = (
    "Final test accuracy in percent; the darker, the more is lost against the same defence with the attackers absent."
)
_CROSSED = f" ✗: more than {TOLERATED * 100:.0f} points, where there is more than one seed."


def write(contest: ArenaPlan, bouts: Sequence[Match], out: Path, command: str) -> Path:
    """Write figures and page into a folder."""

    def kept(drawn: Drawing, name: str, description: str, caption: str = "") -> str:
        return keep(drawn, out / "figures" / name, description, caption)

    maps = [
        Section(
            f"map-{preset}-{count}",
            _where(contest, preset, _attackers(count)),
            _where(contest, preset, f"Accuracy with {_attackers(count)}"),
            kept(
                heatmap(contest, bouts, preset, count),
                f"accuracy-{preset}-{count}",
                f"Accuracy with {_attackers(count)}, by defence and attack, {preset}",
                _SHADED + _CROSSED * (len(contest.seeds) > 1),
            ),
        )
        for preset in contest.presets
        for count in sorted(contest.byzantine, reverse=True)
    ]
    price = kept(cost(contest, bouts), "cost", "Worst accuracy against uplink")
    sections = [
        Section(
            "worst", "Worst case", "The worst that can happen to each defence, and its price",
            price + "".join(_worst(contest, bouts, preset) for preset in contest.presets),
        ),
        Section("breaks", "Where ours breaks", "Where our own defences break", _breaks(contest, bouts)),
        *maps,
        *_detection(contest, bouts),
        *_backdoor(contest, bouts),
        *_aimed(contest, bouts),
        Section("attacks", "Attacks", "The attacks", _glossary(contest)),
        Section("method", "Method", "How this was made", _method(contest, command)),
    ]  # fmt: skip
    page = out / "arena.html"
    write_atomically(page, document("The Byzantine arena", _lead(contest, bouts), sections).encode())
    return page


def _label(defence: str) -> str:
    return escape(defence_named(defence).label)


def _attackers(count: int) -> str:
    return f"{count} attacker{'s' * (count != 1)}"


def _where(contest: ArenaPlan, preset: str, words: str) -> str:
    """Words, with the preset behind them where there are several."""
    return f"{words}, {preset}" if len(contest.presets) > 1 else words


def _against(contest: ArenaPlan, bout: Match) -> str:
    """Whom a bout was fought against, and where."""
    return escape(_where(contest, bout.preset, f"{bout.attack} with {_attackers(bout.byzantine)}"))


def _lead(contest: ArenaPlan, bouts: Sequence[Match]) -> str:
    workers = contest.spec(ArenaCell(contest.presets[0], contest.defences[0]), 0).workers
    words = [f"A quick look, and no result: {_rounds(contest)}, {_seeds(contest)}."] if _is_quick(contest) else []
    words += [
        f"{len(contest.defences)} ways of learning together against {len(contest.attacks)} attacks with "
        f"{listed(contest.byzantine)} Byzantine workers of {workers}"
        f"{'' if words else f', {_rounds(contest)}, {_seeds(contest)}'}."
    ]
    for preset in contest.presets:
        best = max(contest.defences, key=lambda name: worst_of(bouts, preset, name).accuracy)
        worst = worst_of(bouts, preset, best)
        place = f" on {escape(preset)}" if len(contest.presets) > 1 else ""
        under = (
            f"under {worst.attack} with {_attackers(worst.byzantine)}"
            if worst.attacked
            else "and no attack costs it more than its workers' absence"
        )
        words.append(f"Highest in the worst case{place}: <b>{_label(best)}</b>, {worst.accuracy:.1%} {under}.")
    return " ".join(words)


def _is_quick(contest: ArenaPlan) -> bool:
    return len(contest.seeds) == 1 or any(here < whole for here, whole in _lengths(contest))


def _rounds(contest: ArenaPlan) -> str:
    here, whole = (listed_span(column) for column in zip(*_lengths(contest), strict=True))
    return f"{here} rounds" if here == whole else f"{here} of {whole} rounds"


def _lengths(contest: ArenaPlan) -> list[tuple[int, int]]:
    """The rounds of every preset: as they are here, and as it has them."""
    return [
        (contest.spec(ArenaCell(name, contest.defences[0]), contest.seeds[0]).rounds, presets.preset(name).rounds)
        for name in contest.presets
    ]


def _seeds(contest: ArenaPlan) -> str:
    """How many seeds, and which defences have fewer."""
    numbers = {name: contest.seeds_of(name) for name in contest.defences}
    kinds = set(numbers.values())
    if len(kinds) == 1:
        return seeds_words(kinds.pop())
    words = {seeds: f"{len(seeds)} seed{'s' * (len(seeds) > 1)} ({listed(seeds)})" for seeds in kinds}
    return f"{words[contest.seeds]} for our own defences and FedAvg, {words[contest.other_seeds]} for the others"


def _worst(contest: ArenaPlan, bouts: Sequence[Match], preset: str) -> str:
    head = (
        "Defence", "Nobody Byzantine", "Worst case", "Under (attack, attackers)", "Largest loss",
        f"Lost over {TOLERATED * 100:.0f} points", "Honest banned", "Backdoor", "Aimed-at class", "Uplink",
    )  # fmt: skip
    rows = []
    for defence in contest.defences:
        own = [bout for bout in bouts if (bout.preset, bout.defence) == (preset, defence)]
        fought = [bout for bout in own if bout.attacked]
        clean, worst = own[0], worst_of(own, preset, defence)
        dearest, lost = max(fought, key=lambda bout: bout.lost), sum(not bout.stands for bout in fought)
        fooled = [bout.attack_success for bout in fought if bout.attack_success is not None]
        aimed = [bout.aimed_accuracy for bout in fought if bout.aimed_accuracy is not None]
        rows.append((
            f"<b>{_label(defence)}</b>", f"{clean.accuracy:.1%}", _span(worst).replace(" to ", "\u00a0to\u00a0"),
            _under(worst), _points(dearest.lost) + (f" ({_under(dearest)})" if dearest.lost > 0 else ""),
            _judged(f"{lost} of {len(fought)}", not lost, clean.seeds),
            f"{sum(bout.false_bans for bout in own):g}", _share(max(fooled, default=None)),
            _share(min(aimed, default=None)), _size(clean.uplink_bytes),
        ))  # fmt: skip
    note = (
        f"<p>Losses are against the remainder: the same defence and seeds with the attackers absent. Lost "
        f"over {TOLERATED * 100:.0f} points: in how many bouts; coloured where there is more than one seed. "
        "Honest banned: the sum over all bouts, a run each. Backdoor: the highest share of triggered "
        "images that were taken for the target. Aimed-at class: the "
        "lowest accuracy of a class that an attack was after. Uplink: of a run in which nobody is Byzantine.</p>"
    )
    several = len(contest.presets) > 1
    heading = f"<h3>{escape(preset)}</h3>" if several else ""
    return heading + table(head, rows, wide=True) + (note if preset == contest.presets[-1] else "")


def _under(bout: Match) -> str:
    if bout.attack == ABSENT:
        return f"no attack, {bout.byzantine} absent"
    return f"{escape(bout.attack)}, {bout.byzantine}" if bout.attack else "no attack"


def _breaks(contest: ArenaPlan, bouts: Sequence[Match]) -> str:
    ours = [bout for bout in bouts if defence_named(bout.defence).ours]
    if not ours:
        return "<p>None of our own defences is in this arena.</p>"
    items = [
        f"<b>{_label(bout.defence)}</b> loses {_points(bout.lost)} to {_against(contest, bout)} ({_span(bout)}; "
        f"{bout.remainder:.1%} with the attackers absent)."
        for bout in sorted(ours, key=lambda bout: -bout.lost)
        if not bout.stands
    ]
    items += [
        f"<b>{_label(bout.defence)}</b> takes {bout.attack_success:.0%} of triggered images for the target under "
        f"{_against(contest, bout)}, at an accuracy of {bout.accuracy:.1%}."
        for bout in ours
        if bout.attack_success is not None and bout.attack_success > 0.5
    ]
    items += [
        f"<b>{_label(bout.defence)}</b> knows {_share(bout.aimed_accuracy)} of the class aimed at by "
        f"{_against(contest, bout)}; {_share(bout.aimed_remainder)} with the attackers absent."
        for bout in ours
        if not bout.keeps_aimed
    ]
    items += [
        f"<b>{_label(bout.defence)}</b> bans {bout.false_bans:g} honest workers a run under "
        f"{_against(contest, bout) if bout.attack else escape(_where(contest, bout.preset, 'no attack'))}."
        for bout in ours
        if bout.false_bans
    ]
    seen = "<p>Seen on one seed: it may be chance.</p>" if len(contest.seeds) == 1 else ""
    return seen + (bullets(items) if items else "<p>Nowhere in this arena.</p>")


def _detection(contest: ArenaPlan, bouts: Sequence[Match]) -> list[Section]:
    ours = [name for name in contest.defences if defence_named(name).ours]
    if not ours:
        return []
    totals = []
    for defence in ours:
        own = [bout for bout in bouts if bout.defence == defence and bout.attacked]
        banned, wrong = sum(bout.banned for bout in own), sum(bout.false_bans for bout in own)
        there = sum(bout.byzantine for bout in own)
        totals.append((
            f"<b>{_label(defence)}</b>", _share(banned / (banned + wrong) if banned + wrong else None),
            _share(banned / there if there else None), f"{wrong:g}",
            f"{max(bout.uploads for bout in own):g}", _size(max(bout.wasted_bytes for bout in own)),
        ))  # fmt: skip
    head = ("Defence", "Attack", "Attackers", "Loss", "Banned", "Precision", "Recall", "Honest banned", "Uploads",
            "Wasted")  # fmt: skip
    rows = [
        (
            escape(_where(contest, bout.preset, defence_named(bout.defence).label)), escape(bout.attack or "none"),
            str(bout.byzantine), _points(bout.lost), f"{bout.banned:g}", _share(bout.precision), _share(bout.recall),
            f"{bout.false_bans:g}", f"{bout.uploads:g}", _size(bout.wasted_bytes),
        )
        for bout in bouts
        if bout.defence in ours
    ]  # fmt: skip
    note = (
        "<p>Only CB-DSL bans. An attacker that is never invited need not be caught to do no harm: a low recall beside "
        "a high accuracy means that it was ignored. Wasted: uploads that were refuted or declined.</p>"
    )
    top = (
        "Defence",
        "Precision",
        "Recall",
        "Honest banned, all bouts",
        "Most uploads in a run",
        "Most wasted in a run",
    )
    every = f"<details><summary>All {len(rows)} bouts</summary>{table(head, rows, wide=True)}</details>"
    alarms = _false_alarms(contest, [bout for bout in bouts if bout.defence in ours])
    return [
        Section(
            "detection", "Detection", "Who is caught, who is wronged, what is wasted",
            note + table(top, totals, wide=True) + alarms + every,
        )
    ]  # fmt: skip


def _false_alarms(contest: ArenaPlan, bouts: Sequence[Match]) -> str:
    """How often clean runs refuted an upload: each was honest, and each refutation is a ban."""
    words = "; ".join(
        f"{escape(_where(contest, bout.preset, defence_named(bout.defence).label))}: "
        f"{bout.false_bans * bout.seeds:g} of {bout.uploads * bout.seeds:g}"
        for bout in bouts
        if not bout.attack
    )
    return f"<p>False alarms, honest uploads that were refuted in clean runs: {words}.</p>"


def _backdoor(contest: ArenaPlan, bouts: Sequence[Match]) -> list[Section]:
    rows = [(*_fought(contest, bout), _share(bout.attack_success)) for bout in bouts if bout.attack_success is not None]
    note = (
        "<p>Share of triggered test images of other classes that are taken for the target: a high share "
        "means that the accuracy above hides a backdoor.</p>"
    )
    head = (*_FOUGHT, "Attack success")
    return [Section("backdoor", "Backdoor", "Backdoors", note + table(head, rows, wide=True))] if rows else []


def _aimed(contest: ArenaPlan, bouts: Sequence[Match]) -> list[Section]:
    rows = [
        (
            *_fought(contest, bout),
            _judged(_share(bout.aimed_accuracy), bout.keeps_aimed, bout.seeds),
            _share(bout.aimed_remainder),
        )
        for bout in bouts
        if bout.aimed_accuracy is not None
    ]
    note = (
        "<p>Attacks that are after some classes alone hardly show in the accuracy over all of them. Of the classes "
        f"aimed at, the one known worst; marked where it loses more than {TOLERATED_AIMED * 100:.0f} points.</p>"
    )
    head = (*_FOUGHT, "Aimed-at class", "The same, attackers absent")
    return (
        [Section("aimed", "Aimed-at", "Classes that attacks aim at", note + table(head, rows, wide=True))]
        if rows
        else []
    )


_FOUGHT = ("Defence", "Attack", "Attackers", "Accuracy", "Loss")


def _fought(contest: ArenaPlan, bout: Match) -> tuple[str, ...]:
    """A bout's first cells in a table, under `_FOUGHT`."""
    return (
        escape(_where(contest, bout.preset, defence_named(bout.defence).label)), escape(bout.attack),
        str(bout.byzantine), f"{bout.accuracy:.1%}", _points(bout.lost),
    )  # fmt: skip


def _glossary(contest: ArenaPlan) -> str:
    parts = []
    for name in contest.attacks:
        knows = " <i>It knows the honest workers' models.</i>" if register.attack.get(name).omniscient else ""
        parts.append(f"<dt><b>{escape(name)}</b></dt><dd>{escape(attack_words(name))}{knows}</dd>")
    note = (
        "<p>w is the model that an honest worker in the attacker's place would send, w^g the global model. In CB-DSL, "
        "whoever attacks with weights also claims a better score than its own, or nobody would ever invite it.</p>"
    )
    return f"{note}<dl>{''.join(parts)}</dl>"


def _method(contest: ArenaPlan, command: str) -> str:
    settings = "".join(f", {key} = {value}" for key, value in contest.settings.items())
    specs = {
        preset: contest.spec(ArenaCell(preset, contest.defences[0]), contest.seeds[0]) for preset in contest.presets
    }
    rounds = listed(f"{preset} ({spec.rounds} rounds)" for preset, spec in specs.items())
    workers = specs[contest.presets[0]].workers
    return (
        f"<p>Made by <code>{escape(command)}</code>: {escape(rounds)}{escape(settings)}, {_seeds(contest)}. "
        f"{_knowledge(contest, workers)} Accuracy is that of the last round.</p>"
        "<p>The remainder: for every defence, number of attackers and seed there is a run in which the same workers "
        "are Byzantine but absent. They claim no number and upload nothing, and everybody else is as before; so a loss "
        "is what the attack does, without the data that attackers keep to themselves.</p>"
        "<p>Beside this page: <code>results.csv</code>, <code>results.jsonl</code>, <code>figures/</code> (PNG, SVG, "
        "PDF, and CSV) and <code>runs/</code>, a folder for every run.</p>"
    )


def _knowledge(contest: ArenaPlan, workers: int) -> str:
    """What the defences of this contest train on, score on and are told."""
    there = set(contest.defences)
    scoring = ["Zeno"] * ("zeno" in there) + ["CB-DSL"] * any(defence_named(name).ours for name in there)
    words = ["Every method trains on D_tr beside its own data."]
    words += ["FLTrust also trains on it at the server."] * ("fltrust" in there)
    words += [f"{listed(scoring)} {'score' if len(scoring) > 1 else 'scores'} on D_sc."] if scoring else []
    words.append(
        "Defences that must reckon with a number of attackers are told the true one, also where these are absent: "
        "then fewer models come, and a rule that cannot set so many aside sets aside as many as it can."
    )
    most = (workers - 3) // 4  # k >= 4f + 3
    if "bulyan" in there and max(contest.byzantine) > most:
        limit = f"more than {most} attackers" if most > 0 else "any attackers"
        words.append(f"Bulyan cannot reckon with {limit} among {workers} workers and takes what it can.")
    return " ".join(words)


def _judged(words: str, good: bool, seeds: int) -> str:
    """Words in the colour of a verdict, which one seed does not give."""
    return f'<span class="{"yes" if good else "no"}">{words}</span>' if seeds > 1 else words


def _span(bout: Match) -> str:
    spread = f" ({bout.lowest:.1%} to {bout.highest:.1%})" if bout.seeds > 1 else ""
    return f"{bout.accuracy:.1%}{spread}"


def _size(count: float) -> str:
    """Bytes for people, on one line."""
    return format_bytes(count).replace(" ", "\u00a0")


def _points(loss: float) -> str:
    return f"{100 * loss + 0.0:.1f} points".replace("-0.0 ", "0.0 ")


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
