"""The arena's figures and page: where each defence stands, where it breaks, what it costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from cbdsl import register
from cbdsl.files import write_atomically
from cbdsl.report.html import Section, bullets, document, picture, table
from cbdsl.report.style import INK, PALE, dress, new_figure, save, spread_labels, themed_svg
from cbdsl.report.words import attack_words, listed
from cbdsl.study.arena import TOLERATED, Bout, Contest, defence_named
from cbdsl.text import size

_MAP = mpl.colormaps["cividis"]  # the same to every eye
_CROSSED = (
    "<p>Final test accuracy in percent; the darker, the more is lost against the clean run. "
    f"✗: more than {TOLERATED * 100:.0f} points.</p>"
)
_OURS, _THEIRS = "#0072b2", "#d55e00"


def write(contest: Contest, bouts: Sequence[Bout], out: Path, command: str) -> Path:
    """Write figures and page into a folder."""
    (out / "figures").mkdir(exist_ok=True)

    def keep(drawn: Figure, name: str, description: str) -> str:
        save(drawn, out / "figures" / name)
        return themed_svg(drawn, name, description)

    maps = {
        count: keep(
            heatmap(contest, bouts, count),
            f"accuracy-{count}",
            f"Accuracy with {count} attackers, by defence and attack",
        )
        for count in sorted(contest.byzantine, reverse=True)
    }
    price = keep(cost(contest, bouts), "cost", "Worst accuracy against uplink")
    sections = [
        Section("worst", "Worst case", "The worst that can happen to each defence", _worst(contest, bouts)),
        Section("breaks", "Where ours breaks", "Where our own defences break", _breaks(contest, bouts)),
        *(
            Section(f"map{count}", f"{count} attackers", f"Accuracy with {count} attackers", _CROSSED + picture(drawn))
            for count, drawn in maps.items()
        ),
        Section("cost", "Cost", "What it costs", picture(price)),
        *_detection(contest, bouts),
        *_backdoor(bouts),
        Section("attacks", "Attacks", "The attacks", _glossary(contest)),
        Section("method", "Method", "How this was made", _method(contest, command)),
    ]
    page = out / "arena.html"
    write_atomically(page, document("The Byzantine arena", _lead(contest, bouts), sections).encode())
    return page


def heatmap(contest: Contest, bouts: Sequence[Bout], count: int) -> Figure:
    """Defences down, attacks across; in every cell the final accuracy, and as its colour what was lost.

    Colours fall with the root of the loss, so that five points show beside ninety.
    """
    found = {(bout.defence, bout.attack): bout for bout in bouts if bout.byzantine in (0, count)}
    columns = ["", *contest.attacks]
    figure = new_figure(2.6 + 0.62 * len(columns), 1.3 + 0.36 * len(contest.defences))
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
    dress(axes, f"Test accuracy in %, {count} attackers")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_xticks(
        [column + 0.48 for column in range(len(columns))], ["clean", *contest.attacks], rotation=45, ha="right"
    )
    axes.set_yticks(
        [row + 0.46 for row in range(len(contest.defences))], [defence_named(name).label for name in contest.defences]
    )
    axes.tick_params(length=0)
    return figure


def cost(contest: Contest, bouts: Sequence[Bout]) -> Figure:
    """Uplink across, worst accuracy up: one point a defence."""
    figure = new_figure(8.5, 4.6)
    axes = figure.subplots()
    dress(axes, "Accuracy under the worst attack, and the uplink it takes")
    points = {name: _worst_of(bouts, name) for name in contest.defences}
    for ours, colour, marker in ((True, _OURS, "o"), (False, _THEIRS, "s")):
        names = [name for name in contest.defences if defence_named(name).ours is ours]
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
    return figure


def _label(defence: str) -> str:
    return escape(defence_named(defence).label)


def _worst_of(bouts: Iterable[Bout], defence: str) -> Bout:
    return min((bout for bout in bouts if bout.defence == defence), key=lambda bout: bout.accuracy)


def _lead(contest: Contest, bouts: Sequence[Bout]) -> str:
    best = max(contest.defences, key=lambda name: _worst_of(bouts, name).accuracy)
    worst = _worst_of(bouts, best)
    seeds = f"{len(contest.seeds)} seeds" if len(contest.seeds) > 1 else f"one seed ({contest.seeds[0]})"
    return (
        f"{len(contest.defences)} ways of learning together against {len(contest.attacks)} attacks with "
        f"{listed(contest.byzantine)} Byzantine workers of {contest.spec(best, '', 0, 0).workers}, {seeds}. "
        f"Best in the worst case: <b>{_label(best)}</b>, {worst.accuracy:.1%} under "
        f"{escape(worst.attack or 'no attack')}."
    )


def _worst(contest: Contest, bouts: Sequence[Bout]) -> str:
    head = ("Defence", "Clean", "Worst case", "Worst attack", "Bouts lost", "Uplink, clean")
    rows = []
    for defence in contest.defences:
        own = [bout for bout in bouts if bout.defence == defence]
        clean, worst = own[0], _worst_of(own, defence)
        lost = sum(not bout.stands for bout in own)
        kind = "no" if lost else "yes"
        rows.append((
            f"<b>{_label(defence)}</b>", f"{clean.accuracy:.1%}", _span(worst),
            f"{escape(worst.attack)}, {worst.byzantine}" if worst.attack else "none: its clean run",
            f'<span class="{kind}">{lost} of {len(own) - 1}</span>', size(clean.uplink_bytes),
        ))  # fmt: skip
    note = f"<p>A bout is lost if the attack costs more than {TOLERATED * 100:.0f} points against the clean run.</p>"
    return note + table(head, rows)


def _breaks(contest: Contest, bouts: Sequence[Bout]) -> str:
    ours = [name for name in contest.defences if defence_named(name).ours]
    lost = [bout for bout in bouts if bout.defence in ours and not bout.stands]
    fooled = [bout for bout in bouts if bout.defence in ours and (bout.attack_success or 0) > 0.5]
    wronged = [bout for bout in bouts if bout.defence in ours and bout.false_bans]
    items = [
        f"<b>{_label(bout.defence)}</b> loses {100 * bout.lost:.1f} points to "
        f"{escape(bout.attack)} with {bout.byzantine} attackers ({_span(bout)})."
        for bout in sorted(lost, key=lambda bout: -bout.lost)
    ]
    items += [
        f"<b>{_label(bout.defence)}</b> keeps its accuracy under {escape(bout.attack)} with "
        f"{bout.byzantine} attackers, but takes {bout.attack_success:.0%} of triggered images for the target."
        for bout in fooled
    ]
    items += [
        f"<b>{_label(bout.defence)}</b> bans {bout.false_bans:g} honest workers a run under "
        f"{escape(bout.attack or 'no attack')}, {bout.byzantine} attackers."
        for bout in wronged
    ]
    if not ours:
        return "<p>None of our own defences is in this arena.</p>"
    return bullets(items) if items else "<p>Nowhere in this arena.</p>"


def _detection(contest: Contest, bouts: Sequence[Bout]) -> list[Section]:
    ours = [name for name in contest.defences if defence_named(name).ours]
    if not ours:
        return []
    totals = []
    for defence in ours:
        own = [bout for bout in bouts if bout.defence == defence and bout.attack]
        banned, wrong = sum(bout.banned for bout in own), sum(bout.false_bans for bout in own)
        there = sum(bout.byzantine for bout in own)
        totals.append((
            f"<b>{_label(defence)}</b>", _share(banned / (banned + wrong) if banned + wrong else None),
            _share(banned / there if there else None), f"{wrong:g}",
            f"{max(bout.uploads for bout in own):g}", size(max(bout.wasted_bytes for bout in own)),
        ))  # fmt: skip
    head = ("Defence", "Attack", "Attackers", "Banned", "Precision", "Recall", "Honest banned", "Uploads", "Wasted")
    rows = [
        (
            _label(bout.defence), escape(bout.attack or "none"), str(bout.byzantine),
            f"{bout.banned:g}", _share(bout.precision), _share(bout.recall), f"{bout.false_bans:g}",
            f"{bout.uploads:g}", size(bout.wasted_bytes),
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
    every = f"<details><summary>All {len(rows)} bouts</summary>{table(head, rows)}</details>"
    body = note + table(top, totals) + _false_alarms([bout for bout in bouts if bout.defence in ours]) + every
    return [Section("detection", "Detection", "Who is caught, who is wronged, what is wasted", body)]


def _false_alarms(bouts: Sequence[Bout]) -> str:
    """How often clean runs refuted an upload: each was honest, and each refutation is a ban."""
    clean = [bout for bout in bouts if not bout.attack]
    words = "; ".join(
        f"{_label(bout.defence)}: {bout.false_bans * bout.seeds:g} of {bout.uploads * bout.seeds:g}" for bout in clean
    )
    return f"<p>False alarms, honest uploads that were refuted in clean runs: {words}.</p>"


def _backdoor(bouts: Sequence[Bout]) -> list[Section]:
    rows = [
        (
            _label(bout.defence),
            str(bout.byzantine),
            f"{bout.accuracy:.1%}",
            _share(bout.attack_success),
        )
        for bout in bouts
        if bout.attack_success is not None
    ]
    note = (
        "<p>Share of triggered test images of other classes that are taken for the target: a high share "
        "means that the accuracy above hides a backdoor.</p>"
    )
    head = ("Defence", "Attackers", "Accuracy", "Attack success")
    return [Section("backdoor", "Backdoor", "Backdoors", note + table(head, rows))] if rows else []


def _glossary(contest: Contest) -> str:
    parts = []
    for name in contest.attacks:
        knows = " <i>It knows the honest workers' models.</i>" if register.attack.get(name).omniscient else ""
        parts.append(f"<dt><b>{escape(name)}</b></dt><dd>{escape(attack_words(name))}{knows}</dd>")
    note = (
        "<p>w is the model that an honest worker in the attacker's place would send, w^g the global model. In CB-DSL, "
        "whoever attacks with weights also claims a better score than its own, or nobody would ever invite it.</p>"
    )
    return f"{note}<dl>{''.join(parts)}</dl>"


def _method(contest: Contest, command: str) -> str:
    settings = "".join(f", {key} = {value}" for key, value in contest.settings.items())
    spec = contest.spec(contest.defences[0], "", 0, contest.seeds[0])
    return (
        f"<p>Made by <code>{escape(command)}</code>: preset {escape(contest.preset)}{escape(settings)}, "
        f"{spec.rounds} rounds, seeds {listed(contest.seeds)}. {_knowledge(contest, spec.workers)} "
        "Accuracy is that of the last round.</p>"
        "<p>Beside this page: <code>results.csv</code>, <code>results.jsonl</code>, <code>figures/</code> (PNG, SVG, "
        "PDF) and <code>runs/</code>, a folder for every run.</p>"
    )


def _knowledge(contest: Contest, workers: int) -> str:
    """What the defences of this contest train on, score on and are told."""
    there = set(contest.defences)
    scoring = ["Zeno"] * ("zeno" in there) + ["CB-DSL"] * any(defence_named(name).ours for name in there)
    words = ["Every method trains on D_tr beside its own data."]
    words += ["FLTrust also trains on it at the server."] * ("fltrust" in there)
    words += [f"{listed(scoring)} {'score' if len(scoring) > 1 else 'scores'} on D_sc."] if scoring else []
    words.append("Defences that must reckon with a number of attackers are told the true one.")
    most = (workers - 3) // 4  # k >= 4f + 3
    if "bulyan" in there and max(contest.byzantine) > most:
        limit = f"more than {most} attackers" if most > 0 else "any attackers"
        words.append(f"Bulyan cannot reckon with {limit} among {workers} workers and takes what it can.")
    return " ".join(words)


def _span(bout: Bout) -> str:
    spread = f" ({bout.lowest:.1%} to {bout.highest:.1%})" if bout.seeds > 1 else ""
    return f"{bout.accuracy:.1%}{spread}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
