"""The figures and the page of a reproduction, written into its folder."""

from __future__ import annotations

from html import escape
from pathlib import Path

from cbdsl.files import write_atomically
from cbdsl.report import page, paper_figures, theory_section
from cbdsl.report.drawing import Drawing, keep
from cbdsl.report.words import regime_words
from cbdsl.study.paper import FIGURES
from cbdsl.study.reproduce import Reproduction


def write(made: Reproduction, command: str) -> Path:
    """Write figures/ and report.html anew; the page."""
    plan, out = made.plan, made.out

    def kept(drawn: Drawing, name: str, description: str, caption: str) -> str:
        return keep(drawn, out / "figures" / name, description, caption, name)

    overview = kept(
        paper_figures.overview(made.evidence, plan.as_published),
        "overview",
        "Test accuracy of every approach in Figures 1 to 4",
        page.overview_caption(plan),
    )
    pictures = {
        (figure.number, regime): kept(
            paper_figures.draw(figure, item, plan.as_published),
            f"figure{figure.number}-{regime}",
            f"Figure {figure.number}: {figure.title}, {regime} regime",
            f"<b>{regime} regime</b>, {escape(regime_words(regime, plan))}",
        )
        for regime, item in zip(plan.regimes, made.evidence, strict=True)
        for figure in FIGURES
    }
    results = made.theory()
    bounds = {
        regime: kept(
            theory_section.draw({approach: result for (name, approach), result in results.items() if name == regime}),
            f"theorem2-{regime}",
            f"Theorem 2, {regime} regime",
            "Theorem 2 by round (log scale)",
        )
        for regime in plan.regimes
    }
    text = page.build(plan, made.claims, overview, pictures, theory_section.build(results, bounds, plan), command)
    write_atomically(out / "report.html", text.encode())
    return out / "report.html"
