"""Self-contained HTML pages: sections, tables and pictures under one style sheet. A page fetches nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from cbdsl.report.style import SHADES

_NOTHING_FROM_OUTSIDE = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Section:
    """A part of a page: a heading and HTML that is already escaped."""

    anchor: str
    link: str  # what the navigation calls it
    title: str
    body: str


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


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    labels: Sequence[str] | None = None,
    anchors: Iterable[str] | None = None,
) -> str:
    """A table that becomes a list of cards on a narrow screen.

    head: plain words. rows: HTML, a cell for every word of the head. labels: what a card calls its cells, if not by the
    words of the head. anchors: an id for every row.
    """
    names = [escape(word) for word in (labels or head)]
    top = "".join(f"<th>{escape(word)}</th>" for word in head)
    written = [
        "".join(f'<td data-label="{name}">{cell}</td>' for name, cell in zip(names, row, strict=True)) for row in rows
    ]
    openings = ["<tr>"] * len(written) if anchors is None else [f'<tr id="{escape(anchor)}">' for anchor in anchors]
    body = "".join(f"{opening}{cells}</tr>" for opening, cells in zip(openings, written, strict=True))
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def picture(svg: str, caption: str = "", anchor: str = "") -> str:
    """A figure, which scrolls sideways where the screen is too narrow for it; the caption is HTML."""
    name = f' id="{escape(anchor)}"' if anchor else ""
    words = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f'<figure{name}>{words}<div class="scroll">{svg}</div></figure>'


def bullets(items: Iterable[str]) -> str:
    """A list; the items are HTML."""
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


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
