"""The page of a reproduction: its claims, its figures, its theory and how they were made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from cbdsl.report.html import Section, bullets, document, picture, table
from cbdsl.report.words import attackers_words, regime_words
from cbdsl.study.paper import FIGURES, READING_ERROR, REGIMES, Plan
from cbdsl.study.paper_claims import SIGNIFICANCE, JudgedClaim

_MARKS = {"holds": "✓", "holds in this regime": "✓", "undecided": "~", "does not hold": "✗"}
_CLASSES = {"holds": "yes", "holds in this regime": "partly", "undecided": "open", "does not hold": "no"}


def build(
    plan: Plan, claims: Sequence[JudgedClaim], figures: Mapping[tuple[int, str], str], theory: str, command: str
) -> str:
    """The whole page. figures: (number, regime) -> SVG; theory: HTML."""
    sections = [
        Section("claims", "Claims", "What the paper claims, and what we measure", _claims(claims, plan)),
        *(_figure(figure.number, figure.title, figures, plan) for figure in FIGURES),
        Section("theory", "Theory", "The theorems, measured", theory),
        Section("method", "Method", "How this was made", _method(plan, command)),
    ]
    return document("CB-DSL, reproduced", _lead(claims, plan), sections)


def _lead(claims: Sequence[JudgedClaim], plan: Plan) -> str:
    counts = []
    for regime in plan.regimes:
        rows = [claim for claim in claims if claim.regime == regime]
        good = sum(claim.verdict.startswith("holds") for claim in rows)
        counts.append(f"<b>{good} of {len(rows)}</b> claims hold {escape(REGIMES[regime])}")
    return (
        f"Figures {FIGURES[0].number} to {FIGURES[-1].number} of “CB-DSL: Communication-efficient and Byzantine-robust "
        f"Distributed Swarm Learning on Non-i.i.d. Data” (arXiv 2208.05578) from fresh runs, {_seeds(plan)}. "
        f"{'; '.join(counts)}."
    )


def _seeds(plan: Plan) -> str:
    names = ", ".join(map(str, plan.seeds))
    return f"seeds {names}" if len(plan.seeds) > 1 else f"one seed ({names})"


def _claims(claims: Sequence[JudgedClaim], plan: Plan) -> str:
    ids = list(dict.fromkeys(claim.id for claim in claims))
    by_key = {(claim.id, claim.regime): claim for claim in claims}
    regimes = [f"{regime} regime" for regime in plan.regimes]
    firsts = [by_key[name, plan.regimes[0]] for name in ids]
    rows = [
        (str(first.figure), escape(first.claim), *(_verdict(by_key[first.id, regime]) for regime in plan.regimes))
        for first in firsts
    ]
    words = bullets(f"<b>{escape(regime)}</b>: {escape(regime_words(regime, plan))}." for regime in plan.regimes)
    test = (
        "Differences are paired by seed; a claim <i>holds</i> if the mean difference has the claimed sign and a "
        f"one-sided paired t-test gives p &lt; {SIGNIFICANCE:g}, and is <i>undecided</i> if only the sign is right."
        if len(plan.seeds) > 1
        else "With one seed there is nothing to test: the sign of a difference decides."
    )
    shown = table(
        ("Fig.", "Claim", *regimes), rows, ("Figure", "Claim", *regimes), (f"claim-{first.id}" for first in firsts)
    )
    return f"{words}<p>{test}</p>{shown}"


def _verdict(claim: JudgedClaim) -> str:
    badge = f'<span class="badge {_CLASSES[claim.verdict]}">{_MARKS[claim.verdict]} {escape(claim.verdict)}</span>'
    return f'{badge}<span class="measured">{escape(claim.measured)}</span>'


def _figure(number: int, title: str, figures: Mapping[tuple[int, str], str], plan: Plan) -> Section:
    parts = "".join(
        picture(
            figures[number, regime],
            f"<b>{escape(regime)} regime</b>, {escape(regime_words(regime, plan))}",
            f"figure{number}-{regime}",
        )
        for regime in plan.regimes
    )
    return Section(f"figure{number}", f"Figure {number}", f"Figure {number}: {title}", parts)


def _method(plan: Plan, command: str) -> str:
    band = (
        "Lines are means over seeds, bands reach from the lowest seed to the highest. " if len(plan.seeds) > 1 else ""
    )
    other = ", ".join(f"{key} = {value}" for key, value in plan.settings)
    changed = f"<p>Not the paper's experiment: {escape(other)}.</p>" if other else ""
    fewer = (
        f"<p>This is a quick look: {plan.rounds_share:.0%} of the rounds, {_seeds(plan)}. "
        "Run without <code>--quick</code> for the whole.</p>"
        if plan.rounds_share < 1 and "rounds" not in dict(plan.settings)
        else ""
    )
    attackers = "".join(f"<p>{escape(words)}</p>" for words in [attackers_words(plan)] if words)
    stars = f"Hollow stars are values read off the published plots (± {READING_ERROR:g}). " if not plan.settings else ""
    return (
        f"{changed}{fewer}<p>Made by <code>{escape(command)}</code>. {band}{stars}The uplink counts payload bytes of "
        "every score and every model, refuted ones too. Nothing was tuned so that a claim comes true.</p>"
        f"{attackers}<p>Beside this page: <code>claims.json</code>, <code>figures/</code> (PNG, SVG, PDF) and "
        "<code>runs/</code>, a folder for every run with its spec, its rounds and its model.</p>"
    )
