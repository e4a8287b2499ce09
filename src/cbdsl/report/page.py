"""One self-contained HTML page: figures, claims and theory of a reproduction. It fetches nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from cbdsl.report.style import SHADES
from cbdsl.study.paper import FIGURES, REGIMES, Plan
from cbdsl.study.paper_claims import JudgedClaim

_NOTHING_FROM_OUTSIDE = "default-src 'none'; style-src 'unsafe-inline'"
_MARKS = {"holds": "✓", "holds in this regime": "✓", "undecided": "~", "does not hold": "✗"}
_CLASSES = {"holds": "yes", "holds in this regime": "partly", "undecided": "open", "does not hold": "no"}


@dataclass(frozen=True)
class Section:
    """A part of the page: a heading and HTML that is already escaped."""

    anchor: str
    link: str  # what the navigation calls it
    title: str
    body: str


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


def document(title: str, lead: str, sections: Sequence[Section]) -> str:
    """A page of sections with links to them; the lead is HTML."""
    links = "".join(f'<a href="#{section.anchor}">{escape(section.link)}</a>' for section in sections)
    body = "".join(
        f'<section id="{section.anchor}"><h2>{escape(section.title)}</h2>{section.body}</section>'
        for section in sections
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_NOTHING_FROM_OUTSIDE}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_style()}</style></head><body>"
        f"<header><h1>{escape(title)}</h1><p>{lead}</p><nav>{links}</nav></header>"
        f"<main>{body}</main></body></html>\n"
    )


def _lead(claims: Sequence[JudgedClaim], plan: Plan) -> str:
    counts = []
    for regime in plan.regimes:
        rows = [claim for claim in claims if claim.regime == regime]
        good = sum(claim.verdict.startswith("holds") for claim in rows)
        counts.append(f"<b>{good} of {len(rows)}</b> claims hold {escape(REGIMES[regime].split(':')[0])}")
    return (
        "Figures 1 to 5 of “CB-DSL: Communication-efficient and Byzantine-robust Distributed Swarm Learning on "
        f"Non-i.i.d. Data” (arXiv 2208.05578) from fresh runs, {_seeds(plan)}. {'; '.join(counts)}."
    )


def _seeds(plan: Plan) -> str:
    names = ", ".join(map(str, plan.seeds))
    return f"seeds {names}" if len(plan.seeds) > 1 else f"one seed ({names})"


def _claims(claims: Sequence[JudgedClaim], plan: Plan) -> str:
    ids = list(dict.fromkeys(claim.id for claim in claims))
    by_key = {(claim.id, claim.regime): claim for claim in claims}
    head = "".join(f"<th>{escape(regime)} regime</th>" for regime in plan.regimes)
    rows = []
    for name in ids:
        first = by_key[name, plan.regimes[0]]
        cells = "".join(_verdict(by_key[name, regime]) for regime in plan.regimes)
        rows.append(f'<tr id="claim-{name}"><td data-label="Figure">{first.figure}</td>'
                    f'<td data-label="Claim">{escape(first.claim)}</td>{cells}</tr>')  # fmt: skip
    words = "".join(f"<li><b>{escape(regime)}</b>: {escape(REGIMES[regime])}.</li>" for regime in plan.regimes)
    test = (
        "Differences are paired by seed; a claim <i>holds</i> if the mean difference has the claimed sign and a "
        "one-sided paired t-test gives p &lt; 0.05, and is <i>undecided</i> if only the sign is right."
        if len(plan.seeds) > 1
        else "With one seed there is nothing to test: the sign of a difference decides."
    )
    return (
        f"<ul>{words}</ul><p>{test}</p><table class='claims'><thead><tr><th>Fig.</th><th>Claim</th>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _verdict(claim: JudgedClaim) -> str:
    badge = f'<span class="badge {_CLASSES[claim.verdict]}">{_MARKS[claim.verdict]} {escape(claim.verdict)}</span>'
    measured = f'<span class="measured">{escape(claim.measured)}</span>'
    return f'<td data-label="{escape(claim.regime)} regime">{badge}{measured}</td>'


def _figure(number: int, title: str, figures: Mapping[tuple[int, str], str], plan: Plan) -> Section:
    parts = "".join(
        f'<figure id="figure{number}-{regime}"><figcaption><b>{escape(regime)} regime</b>, {escape(REGIMES[regime])}'
        f'</figcaption><div class="scroll">{figures[number, regime]}</div></figure>'
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
        if plan.rounds_share < 1
        else ""
    )
    return (
        f"{changed}{fewer}<p>Made by <code>{escape(command)}</code>. {band}Hollow stars are values read off the "
        "published plots (± 0.01). The uplink counts payload bytes of every score and every model, refuted ones too. "
        "The attacker claims a score of 10⁻⁶ and uploads weights drawn from N(0, 10²). Nothing was tuned so that a "
        "claim comes true.</p><p>Beside this page: <code>claims.json</code>, <code>figures/</code> (PNG, SVG, PDF) and "
        "<code>runs/</code>, a folder for every run with its spec, its rounds and its model.</p>"
    )


_LIGHT = (
    "--ink:#222;--soft:#555;--pale:#d8d8d8;--page:#fff;--card:#f4f5f7;"
    "--yes:#00704f;--no:#b3261e;--open:#8a6100;--link:#0b5cad;"
)
_DARK = (
    "--ink:#e8e8e8;--soft:#b5b5b5;--pale:#3d4148;--page:#16181c;--card:#1f2228;"
    "--yes:#4fd1a5;--no:#ff8a80;--open:#f0c14b;--link:#7db8f0;"
)


def _style() -> str:
    """The page's style sheet: the variables of both themes, then the rules."""
    light = _LIGHT + "".join(f"--{key}:{shades[0]};" for key, shades in SHADES.items())
    dark = _DARK + "".join(f"--{key}:{shades[1]};" for key, shades in SHADES.items())
    rules = (resources.files("cbdsl.report") / "page.css").read_text(encoding="utf-8")
    themes = f":root{{color-scheme:light dark;{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return f"{themes}\n{rules}"
