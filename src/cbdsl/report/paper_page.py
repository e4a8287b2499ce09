"""The page of a reproduction: figures, claims and theorems."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from cbdsl.attacks.attack import make_attack
from cbdsl.presets import preset
from cbdsl.report.figures import (
    ACCURACY_HEAD,
    INK,
    MARKERS,
    SHADES,
    TEXT,
    Curve,
    accuracy_curves,
    accuracy_rows,
    draw_server_alone,
    mean_server_alone,
    new_figure,
    plot_curves,
    set_integer_ticks,
    style_accuracy_axes,
    style_axes,
)
from cbdsl.report.pages import (
    Cell,
    Drawing,
    PageFigure,
    Table,
    describe_attack,
    describe_rounds,
    describe_seeds,
    describe_training,
    join_words,
    save_drawing,
    write_page,
)
from cbdsl.spec import Spec
from cbdsl.studies.paper import (
    APPROACHES,
    DIVERGED,
    DIVERGENCE_FIGURE,
    EQUAL_WORK,
    FIGURES,
    LABELS,
    READING_ERROR,
    REGIMES,
    SIGNIFICANCE,
    Evidence,
    JudgedClaim,
    PaperFigure,
    Regime,
    ReproductionPlan,
    has_diverged,
    spec_of,
)
from cbdsl.studies.reproduce import Reproduction
from cbdsl.theory.measure import TheoryResult, describe_distance, describe_rate, describe_result, format_number

_TALL = 10.0  # divergence beyond this is drawn on a log scale


def draw_figure(figure: PaperFigure, evidence: Evidence, published: bool) -> Drawing:
    """Draw one figure of the paper in one regime, with or without the published values."""
    painter = _draw_divergence if figure.number == DIVERGENCE_FIGURE else _draw_accuracy
    return painter(figure, evidence, published)


def _draw_accuracy(figure: PaperFigure, evidence: Evidence, published: bool) -> Drawing:
    canvas = new_figure(10.5, 4.3)
    by_round, by_byte = canvas.subplots(1, 2, sharey=True)
    pairs = [
        accuracy_curves(*_look(approach), evidence.rounds(figure.number, approach)) for approach in figure.approaches
    ]
    plot_curves(by_round, [pair[0] for pair in pairs], gap=0.055, labels=True)
    plot_curves(by_byte, [pair[1] for pair in pairs], gap=0.055, labels=False)
    if published:
        _mark_published(by_round, figure, last=len(pairs[0][0].x))
    style_accuracy_axes(by_round, by_byte)
    alone = mean_server_alone([run for approach in figure.approaches for run in evidence.runs[figure.number, approach]])
    if alone is not None:
        draw_server_alone(by_round, alone)
        by_byte.axhline(alone, color=INK, linewidth=1.2, linestyle="--")
    by_round.set_ylim(0, 1.02)
    rows = [
        row
        for approach in figure.approaches
        for row in accuracy_rows(LABELS[approach], evidence.runs[figure.number, approach])
    ]
    return Drawing(canvas, ACCURACY_HEAD, rows)


def _draw_divergence(figure: PaperFigure, evidence: Evidence, published: bool) -> Drawing:
    canvas = new_figure(8.4, 4.3)
    axes = canvas.subplots()
    measured = {approach: evidence.divergence[approach] for approach in (*figure.approaches, EQUAL_WORK)}
    curves = [
        Curve(
            LABELS[name] + ": diverged" * any(map(has_diverged, evidence.final_divergence(name))),
            *_look(name)[1:],
            range(1, len(rows[0]) + 1),
            rows,
        )
        for name, rows in measured.items()
    ]
    seen = [value for curve in curves for row in curve.rows for value in row if math.isfinite(value) and value > 0]
    finite = [min(value, DIVERGED) for value in seen]
    if max(finite) > _TALL:
        axes.set_yscale("log")
        span = (math.log10(min(finite)), math.log10(max(finite)))
        plot_curves(axes, curves, gap=0.055 * (span[1] - span[0]), labels=True, within=span)
        axes.set_ylim(min(finite) / 1.2, max(finite) * 1.2)
    else:
        plot_curves(axes, curves, gap=0.055 * max(finite), labels=True)
        axes.set_ylim(0, 1.08 * max(finite))
    if published:
        _mark_published(axes, figure, last=len(curves[0].x))
    style_axes(axes, "median over workers of ‖wᵢ − w genie‖ / ‖w genie‖")
    axes.set_xlabel("communication round")
    axes.set_ylabel("weight divergence")
    set_integer_ticks(axes)
    seeds = [run.spec.seed for run in evidence.runs[figure.number, figure.approaches[0]]]
    rows = [
        (LABELS[name], seed, number, value)
        for name, found in measured.items()
        for seed, curve in zip(seeds, found, strict=True)
        for number, value in enumerate(curve, 1)
    ]
    return Drawing(canvas, ("name", "seed", "round", "weight_divergence"), rows)


_REGIME_MARKERS = {"paper": "o", "script": "D"}
_ENDS = FIGURES[: DIVERGENCE_FIGURE - 1]  # those that show accuracy


def draw_overview(evidence: Sequence[Evidence], published: bool) -> Drawing:
    """Draw the accuracy of every approach beside the published value, at the round where that was read."""
    canvas = new_figure(10.5, 5.2)
    panels = canvas.subplots(2, 2, sharex=True, height_ratios=(5, 3))
    rows = []
    for axes, figure in zip(panels.flat, _ENDS, strict=True):
        for height, approach in enumerate(figure.approaches):
            colour = SHADES[approach][0]
            for place, item in enumerate(evidence):
                level = height + (0.3 * place - 0.15 if len(evidence) > 1 else 0.0)  # regimes do not hide each other
                runs = item.rounds(figure.number, approach)
                at = min(figure.published_round or len(runs[0]), len(runs[0]))
                values = [run[at - 1].test_accuracy for run in runs]
                axes.plot([min(values), max(values)], [level, level], color=colour, linewidth=1.2)
                axes.plot(fmean(values), level, _REGIME_MARKERS[item.regime], color=colour, markersize=6)
                rows += [(figure.number, LABELS[approach], item.regime, at, value) for value in values]
            if published:
                low, high = figure.published[approach]
                axes.plot([low, high], [height, height], color=colour, linewidth=1.2)
                axes.plot((low + high) / 2, height, "*", markersize=13, markerfacecolor="none", markeredgecolor=colour)
                rows.append((figure.number, LABELS[approach], "published", figure.published_round, (low + high) / 2))
        axes.set_yticks(range(len(figure.approaches)), [LABELS[name] for name in figure.approaches])
        axes.set_ylim(len(figure.approaches) - 0.5, -0.5)
        style_axes(axes, f"Figure {figure.number}: {figure.title}")
    for axes in panels[1]:
        axes.set_xlabel("test accuracy", fontsize=TEXT, color=INK)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return Drawing(canvas, ("figure", "name", "regime", "round", "test_accuracy"), rows)


def _look(approach: str) -> tuple[str, str, str]:
    return LABELS[approach], SHADES[approach][0], MARKERS[approach]


def _mark_published(axes: Axes, figure: PaperFigure, last: int) -> None:
    """Draw hollow stars at values read off the published plot; a bar for a range."""
    at = figure.published_round or last
    if at > last:
        return
    for approach, (low, high) in figure.published.items():
        colour = SHADES[approach][0]
        axes.plot([at, at], [low, high], color=colour, linewidth=1.2)
        axes.plot([at], [(low + high) / 2], marker="*", markersize=13, markerfacecolor="none", markeredgecolor=colour)
    axes.plot([], [], "*", markersize=11, markerfacecolor="none", markeredgecolor=INK, label="published")
    axes.legend(frameon=False, loc="best", labelcolor=INK, fontsize=TEXT)


def draw_theory(results: Mapping[str, TheoryResult]) -> Drawing:
    """Draw Theorem 2 in one regime: measured distance to the genie, and both forms of the bound, by round."""
    canvas = new_figure(10.5, 4.3)
    panels = canvas.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for axes, (approach, result) in zip(panels, results.items(), strict=True):
        colour, grey = SHADES[approach][0], SHADES["fedavg"][0]
        curves = (
            ("measured", result.theorem2.corrected.rounds, "measured", colour, "-"),
            ("bound, corrected", result.theorem2.corrected.rounds, "bound", colour, "--"),
            ("bound, as printed", result.theorem2.printed.rounds, "bound", grey, ":"),
        )
        for label, rows, field, shade, line in curves:
            values = [getattr(row, field) for row in rows]
            axes.plot(range(1, len(values) + 1), values, color=shade, linestyle=line, linewidth=2, label=label)
        style_axes(axes, APPROACHES[approach].label)
        axes.set_yscale("log")
        axes.set_xlabel("communication round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, loc="best", labelcolor="linecolor", fontsize=TEXT)
    panels[0].set_ylabel("‖wᵢ − w genie‖, mean over workers", fontsize=TEXT)
    found = [
        (APPROACHES[approach].label, number, corrected.measured, corrected.bound, printed.bound)
        for approach, result in results.items()
        for number, (corrected, printed) in enumerate(
            zip(result.theorem2.corrected.rounds, result.theorem2.printed.rounds, strict=True), 1
        )
    ]
    return Drawing(canvas, ("name", "round", "measured", "bound_corrected", "bound_as_printed"), found)


_MARKS = {"holds": "✓", "holds in this regime": "✓", "undecided": "~", "does not hold": "✗"}
_TONES = {"holds": "yes", "holds in this regime": "yes", "undecided": "open", "does not hold": "no"}
_OVERVIEW_MARKS = {"paper": "dots", "script": "diamonds"}


@dataclass(frozen=True)
class RegimeResults:
    """What the page shows of one regime."""

    origin: str
    description: str
    mark: str  # in the first figure
    figures: Mapping[int, PageFigure]
    bounds: PageFigure | None
    theorems: Table
    findings: Mapping[str, Sequence[str]]  # approach -> sentences about its bounds


def write_reproduction(made: Reproduction, command: str) -> Path:
    """Write figures/ and report.html; return the page."""
    plan, results = made.plan, made.theory()
    regimes = {}
    for regime, evidence in zip(plan.regimes, made.evidence, strict=True):
        own = {approach: result for (name, approach), result in results.items() if name == regime}
        regimes[regime] = _prepare_regime(made, regime, evidence, own)
    ends = [figure for figure in plan.shown if figure.number != DIVERGENCE_FIGURE]
    overview = None
    if len(ends) == len(_ENDS):
        overview = save_drawing(
            draw_overview(made.evidence, plan.as_published),
            made.out / "figures" / "overview",
            "Test accuracy of every approach in Figures 1 to 4",
            "overview",
        )
    return write_page(
        made.out / "report.html",
        "reproduction.html.j2",
        plan=plan,
        command=command,
        length=f"{_describe_rounds(plan)}, {describe_seeds(plan.seeds)}",
        counts={regime: count_held(made.claims, regime) for regime in plan.regimes},
        figures=plan.shown,
        figure_names=join_words([figure.number for figure in plan.shown]),
        judged=any(claim.verdict != "not judged" for claim in made.claims),
        regimes=regimes,
        overview=overview,
        claims=tabulate_claims(made.claims, plan),
        attackers=describe_attackers(plan),
        significance=f"{SIGNIFICANCE:g}",
        diverged=f"{DIVERGED:g}",
        reading_error=f"{READING_ERROR:g}",
    )


def _prepare_regime(
    made: Reproduction, regime: Regime, evidence: Evidence, results: Mapping[str, TheoryResult]
) -> RegimeResults:
    published, folder = made.plan.as_published, made.out / "figures"

    def save(drawing: Drawing, name: str, description: str) -> PageFigure:
        return save_drawing(drawing, folder / f"{name}-{regime}", f"{description}, {regime} regime", f"{name}-{regime}")

    return RegimeResults(
        origin=REGIMES[regime],
        description=describe_regime(regime, made.plan),
        mark=_OVERVIEW_MARKS[regime],
        figures={
            figure.number: save(
                draw_figure(figure, evidence, published),
                f"figure{figure.number}",
                f"Figure {figure.number}: {figure.title}",
            )
            for figure in made.plan.shown
        },
        bounds=save(draw_theory(results), "theorem2", "Theorem 2") if results else None,
        theorems=tabulate_bounds(results),
        findings={APPROACHES[approach].label: describe_result(result) for approach, result in results.items()},
    )


def count_held(claims: Sequence[JudgedClaim], regime: Regime) -> tuple[int, int]:
    """Return how many claims hold in a regime, and how many there are."""
    own = [claim for claim in claims if claim.regime == regime]
    return sum(claim.verdict.startswith("holds") for claim in own), len(own)


def tabulate_bounds(results: Mapping[str, TheoryResult]) -> Table:
    """Return every form of the bounds beside the measurement."""
    rows = []
    for approach, result in results.items():
        label, first, second = APPROACHES[approach].label, result.theorem1, result.theorem2
        for name, rate in (
            ("as printed", first.printed),
            ("corrected", first.corrected),
            ("on the moves", first.played),
        ):
            numbers = (format_number(rate.bound), format_number(rate.measured), describe_rate(rate))
            rows.append((label, f"Theorem 1, {name}", *numbers))
        for name, bound in (("as printed", second.printed), ("corrected", second.corrected)):
            last = bound.rounds[-1]
            numbers = (format_number(last.bound), format_number(last.measured), describe_distance(bound))
            rows.append((label, f"Theorem 2, {name}", *numbers))
    return Table(("Approach", "Form", "Bound", "Measured", "Verdict"), rows, wide=False)


def tabulate_claims(claims: Sequence[JudgedClaim], plan: ReproductionPlan) -> Table:
    """Return a row for every claim, with its verdict in every regime."""
    by_key = {(claim.id, claim.regime): claim for claim in claims}
    firsts = [claim for claim in claims if claim.regime == plan.regimes[0]]
    rows = [
        (str(first.figure), first.claim, *(_show_verdict(by_key[first.id, regime]) for regime in plan.regimes))
        for first in firsts
    ]
    regimes = [f"{regime} regime" for regime in plan.regimes]
    return Table(
        ("Fig.", "Claim", *regimes),
        rows,
        wide=False,
        labels=("Figure", "Claim", *regimes),
        anchors=[f"claim-{first.id}" for first in firsts],
    )


def _show_verdict(claim: JudgedClaim) -> str | Cell:
    measured = claim.measured.replace(" ± ", "\u00a0±\u00a0").replace(" %", "\u00a0%")
    if claim.verdict == "not judged":
        return Cell("not judged", f"{measured}; {claim.unjudged}") if claim.unjudged else measured
    return Cell(f"{_MARKS[claim.verdict]} {claim.verdict}", measured, _TONES[claim.verdict], strong=True)


def _describe_rounds(plan: ReproductionPlan) -> str:
    """Return `9 of 30 rounds`, or `30 rounds` if they are all rounds of the presets."""
    pairs = [
        (spec_of(figure, figure.approaches[0], regime, plan.seeds[0], plan).rounds, whole.rounds)
        for figure in plan.shown
        for regime in plan.regimes
        for whole in [preset(f"{regime}-{figure.setting}")]
    ]
    return describe_rounds(pairs)


def describe_regime(regime: Regime, plan: ReproductionPlan) -> str:
    """Describe the origin of a regime and the local training in a round."""
    changed = ", with other settings" if plan.settings else ""
    return f"{REGIMES[regime]}{changed}: {describe_training(_example_spec(1, regime, plan).local)}"


def describe_attackers(plan: ReproductionPlan) -> str:
    """Describe the attack in the figures that have attackers, or return ""."""
    specs = {figure.number: _example_spec(figure.number, plan.regimes[0], plan) for figure in plan.shown}
    attacked = [number for number, spec in specs.items() if spec.attack.byzantine]
    if not attacked:
        return ""
    spec = specs[attacked[0]]
    attack, count = spec.attack, spec.attack.byzantine
    numbers, verb = join_words(attacked), "attacks" if count == 1 else "attack"
    return (
        f"In Figures {numbers}, {count} of {spec.workers} workers {verb}: {attack.name}{_format_scale(spec)}. "
        f"{describe_attack(attack.name)}"
    )


def _format_scale(spec: Spec) -> str:
    """Return the scale of an attack, such as ` (scale 10)`, or ""."""
    scale = getattr(make_attack(spec), "scale", 0.0)
    return f" (scale {scale:g})" if scale else ""


def _example_spec(figure: int, regime: Regime, plan: ReproductionPlan) -> Spec:
    chosen = FIGURES[figure - 1]
    return spec_of(chosen, chosen.approaches[0], regime, plan.seeds[0], plan)
