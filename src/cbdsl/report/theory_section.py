"""The theorems on the page: what was measured beside what was bound, in a table, a figure and sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from matplotlib.ticker import MaxNLocator

from cbdsl.report.drawing import Drawing
from cbdsl.report.html import bullets, table
from cbdsl.report.style import SHADES, TEXT, dress, new_figure
from cbdsl.report.words import regime_words
from cbdsl.study.paper import APPROACHES, Plan, Regime
from cbdsl.theory.report import TheoryResult, distance_verdict, number, rate_verdict, verdict

Results = Mapping[tuple[Regime, str], TheoryResult]


def draw(results: Mapping[str, TheoryResult]) -> Drawing:
    """Theorem 2 in one regime: measured distance to the genie, and both forms of the bound, by round."""
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
        dress(axes, APPROACHES[approach].label)
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


def build(results: Results, figures: Mapping[Regime, str], plan: Plan) -> str:
    """The section's HTML; figures: regime -> its figure, as HTML."""
    parts = [
        "<p>Each bound is computed twice: as printed, and corrected where the proof has a slip. The corrected forms "
        "follow from the triangle inequality with constants measured at the points that the proof names, so they must "
        "hold; how far above the measurement they lie says what they are worth. The first seed of each regime.</p>"
    ]
    for regime in figures:
        chosen = {approach: result for (name, approach), result in results.items() if name == regime}
        parts.append(f"<h3>{escape(regime)} regime, {escape(regime_words(regime, plan))}</h3>")
        parts += [figures[regime], _table(chosen)]
        parts += [_sentences(APPROACHES[approach].label, verdict(result)) for approach, result in chosen.items()]
    return "".join(parts)


def _table(results: Mapping[str, TheoryResult]) -> str:
    rows = []
    for approach, result in results.items():
        label, first, second = APPROACHES[approach].label, result.theorem1, result.theorem2
        for name, rate in (("as printed", first.printed), ("corrected", first.corrected), ("as played", first.played)):
            rows.append((label, f"Theorem 1, {name}", number(rate.bound), number(rate.measured), rate_verdict(rate)))
        for name, bound in (("as printed", second.printed), ("corrected", second.corrected)):
            last = bound.rounds[-1]
            row = (number(last.bound), number(last.measured), distance_verdict(bound))
            rows.append((label, f"Theorem 2, {name}", *row))
    heads = ("Approach", "Form", "Bound", "Measured", "Verdict")
    return table(heads, ([escape(cell) for cell in row] for row in rows))


def _sentences(label: str, sentences: Sequence[str]) -> str:
    return f"<p><b>{escape(label)}</b></p>{bullets(map(escape, sentences))}"
