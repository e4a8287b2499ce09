"""The figures and the page of a reproduction, written into its folder."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from cbdsl.files import write_atomically
from cbdsl.report import page, paper_figures, style, theory_section
from cbdsl.study.paper import FIGURES
from cbdsl.study.reproduce import Reproduction


def write(made: Reproduction, command: str) -> Path:
    """Write figures/ and report.html anew; the page."""
    plan, out = made.plan, made.out
    (out / "figures").mkdir(exist_ok=True)

    def keep(drawn: Figure, name: str, description: str) -> str:
        style.save(drawn, out / "figures" / name)
        return style.themed_svg(drawn, name, description)

    pictures = {
        (figure.number, item.regime): keep(
            paper_figures.draw(figure, item, published=not plan.settings),
            f"figure{figure.number}-{item.regime}",
            f"Figure {figure.number}: {figure.title}, {item.regime} regime",
        )
        for item in made.evidence
        for figure in FIGURES
    }
    results = made.theory()
    bounds = {
        regime: keep(
            theory_section.draw({approach: result for (name, approach), result in results.items() if name == regime}),
            f"theorem2-{regime}",
            f"Theorem 2, {regime} regime",
        )
        for regime in plan.regimes
    }
    text = page.build(plan, made.claims, pictures, theory_section.build(results, bounds, plan), command)
    write_atomically(out / "report.html", text.encode())
    return out / "report.html"
