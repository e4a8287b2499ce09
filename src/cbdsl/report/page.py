"""The page of a reproduction: its claims, its figures, its theory and how they were made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from cbdsl.report.html import Section, bullets, document, table
from cbdsl.report.words import attackers_words, regime_words, rounds_words, seeds_words
from cbdsl.study.paper import FIGURES, READING_ERROR, REGIMES, Plan, Regime
from cbdsl.study.paper_claims import DIVERGED, SIGNIFICANCE, JudgedClaim

_MARKS = {"holds": "✓", "holds in this regime": "✓", "undecided": "~", "does not hold": "✗"}
_CLASSES = {"holds": "yes", "holds in this regime": "partly", "undecided": "open", "does not hold": "no"}


def build(
    plan: Plan,
    claims: Sequence[JudgedClaim],
    overview: str,
    figures: Mapping[tuple[int, Regime], str],
    theory: str,
    command: str,
) -> str:
    """The whole page. figures: (number, regime) -> HTML, as overview and theory are."""
    sections = [
        Section("ends", "Overview", "Where every approach ended", overview),
        Section("claims", "Claims", "What the paper claims, and what we measure", _claims(claims, plan)),
        *(_figure(figure.number, figure.title, figures, plan) for figure in FIGURES),
        Section("theory", "Theory", "The theorems, measured", theory),
        Section("method", "Method", "How this was made", _method(plan, command)),
    ]
    return document("CB-DSL, reproduced", _lead(claims, plan), sections)


def _lead(claims: Sequence[JudgedClaim], plan: Plan) -> str:
    length = f"{rounds_words(plan)}, {seeds_words(plan.seeds)}"
    other = ", ".join(f"{key} = {value}" for key, value in plan.settings)
    words = [f"Not the paper's experiment ({escape(other)})."] if other else []
    quick = len(plan.seeds) == 1 or plan.rounds_share < 1
    if quick:
        unjudged = " No claim is judged on one seed: the page only compares." if len(plan.seeds) == 1 else ""
        words.insert(0, f"A quick look: {length}.{unjudged}")
    counts = []
    for regime in plan.regimes if len(plan.seeds) > 1 else ():
        rows = [claim for claim in claims if claim.regime == regime]
        good = sum(claim.verdict.startswith("holds") for claim in rows)
        counts.append(f"<b>{good} of {len(rows)}</b> claims hold {escape(REGIMES[regime])}")
    words += [f"{'; '.join(counts)}."] if counts else []
    words.append(
        f"Figures {FIGURES[0].number} to {FIGURES[-1].number} of “CB-DSL: Communication-efficient and Byzantine-robust "
        "Distributed Swarm Learning on Non-i.i.d. Data” (arXiv 2208.05578) from fresh runs"
        f"{'' if quick else f', {length}'}."
    )
    return " ".join(words)


def overview_caption(plan: Plan) -> str:
    """What the marks of the first figure are."""
    marks = {"paper": "dots", "script": "diamonds"}
    words = "; ".join(f"{marks[regime]}: {REGIMES[regime]}" for regime in plan.regimes)
    span = ", lines reach from the lowest seed to the highest" if len(plan.seeds) > 1 else ""
    stars = "; hollow stars: read off the published plots, at the same round" if plan.as_published else ""
    return f"{escape(words[0].upper() + words[1:])}{span}{stars}."


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
        else "There is one seed, so nothing can be tested, and no claim is judged: these are plain comparisons."
    )
    test += f" <i>Diverged</i>: farther from the genie's model than {DIVERGED:g} times that model's length."
    shown = table(
        ("Fig.", "Claim", *regimes), rows, ("Figure", "Claim", *regimes), (f"claim-{first.id}" for first in firsts)
    )
    return f"{words}<p>{test}</p>{shown}"


def _verdict(claim: JudgedClaim) -> str:
    measured = escape(claim.measured).replace(" ± ", "\u00a0±\u00a0").replace(" %", "\u00a0%")
    if claim.verdict == "not judged":
        return measured
    badge = f'<span class="badge {_CLASSES[claim.verdict]}">{_MARKS[claim.verdict]} {escape(claim.verdict)}</span>'
    return f'{badge}<span class="measured">{measured}</span>'


def _figure(number: int, title: str, figures: Mapping[tuple[int, Regime], str], plan: Plan) -> Section:
    parts = "".join(figures[number, regime] for regime in plan.regimes)
    return Section(f"figure{number}", f"Figure {number}", f"Figure {number}: {title}", parts)


def _method(plan: Plan, command: str) -> str:
    band = (
        "Lines are means over seeds, bands reach from the lowest seed to the highest. " if len(plan.seeds) > 1 else ""
    )
    attackers = "".join(f"<p>{escape(words)}</p>" for words in [attackers_words(plan)] if words)
    stars = f"Hollow stars are values read off the published plots (± {READING_ERROR:g}). " if plan.as_published else ""
    return (
        f"<p>Made by <code>{escape(command)}</code>. {band}{stars}The uplink counts payload bytes of "
        "every score and every model, refuted ones too. Nothing was tuned so that a claim comes true.</p>"
        f"{attackers}<p>Beside this page: <code>claims.json</code>, <code>figures/</code> (PNG, SVG, PDF, and CSV) and "
        "<code>runs/</code>, a folder for every run with its spec, its rounds and its model.</p>"
    )
