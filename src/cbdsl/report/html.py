"""Self-contained HTML pages: sections, tables and pictures with one style sheet. A page loads nothing."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape, unescape
from importlib import resources
from pathlib import Path

from matplotlib.figure import Figure

from cbdsl.report.figures import make_themed_svg, save
from cbdsl.util.files import write_atomically

SYMBOLS = {
    "D_G": "the small data set that the server and all workers share: D_tr and D_sc",
    "D_tr": "the training part of D_G: every worker trains on it beside its own data",
    "D_sc": "the scoring part of D_G: every model is scored on it, so scores can be compared and verified",
    "w^g": "the global model",
    "w^p": "a worker's own best model so far",
    "F^g": "the score of w^g, a mean loss: lower is better",
    "U": "the number of workers",
    "genie": "a worker that trains on the data of all of them",
    "EMD": "earth mover's distance between a worker's mix of classes and that of all",
    "Phi_E": "the rate in Theorem 1, which has a meaning only if it is positive",
}
"""Abbreviations; a page explains those that it uses."""

_TAG = re.compile(r"<[^>]*>")
_NUMBER = re.compile(r"([-+]?[\d,]*\d(?:\.\d+)?(?:e[-+]?\d{1,2})?)(?:\s±\s[\d.,]+)?(?:\s(B|kB|MB|GB)\b)?(?![\w.])")
_UNITS = {None: 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Section:
    """A section of a page: a heading and HTML that is already escaped."""

    anchor: str
    link: str  # what the navigation calls it
    title: str
    body: str


def document(title: str, lead: str, sections: Sequence[Section]) -> str:
    """Return a page of sections with links to them; the lead is HTML."""
    links = "".join(f'<a href="#{section.anchor}">{escape(section.link)}</a>' for section in sections)
    body = "".join(
        f'<section id="{section.anchor}"><h2>{escape(section.title)}</h2>{section.body}</section>'
        for section in sections
    )
    script = _file("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_file('page.css')}</style></head><body>"
        f'<header><h1>{escape(title)}</h1><p class="lead">{lead}</p>{_symbols(lead + body)}<nav>{links}</nav></header>'
        f"<main>{body}</main><script>{script}</script></body></html>\n"
    )


def write_page(path: Path, title: str, lead: str, sections: Sequence[Section]) -> Path:
    """Write a page and return its path; see `document`."""
    write_atomically(path, document(title, lead, sections).encode())
    return path


def method_section(command: str, text: str, files: str) -> Section:
    """Return the last section of a page: its command, how the results were made, and the files beside it, as HTML."""
    body = f"<p>Made by <code>{escape(command)}</code>{text}</p><p>Beside this page: {files}</p>"
    return Section("method", "Method", "How this was made", body)


FIGURE_FILES = "<code>figures/</code> (PNG, SVG, PDF, and CSV)"


def capitalise(text: str) -> str:
    """Return a heading with an upper-case first letter."""
    return text[:1].upper() + text[1:]


def keep_together(text: str) -> str:
    """Escape text and keep it on one line."""
    return escape(text.replace(" ", "\u00a0"))


def _symbols(text: str) -> str:
    """Return the symbols that a page uses, in a folded list."""
    words = unescape(_TAG.sub(" ", text))
    there = [name for name in SYMBOLS if re.search(rf"(?<![\w^]){re.escape(name)}(?![\w^])", words)]
    items = "".join(f"<dt><b>{name}</b></dt><dd>{SYMBOLS[name]}</dd>" for name in there)
    summary = f"<summary>What {', '.join(there)} mean{'s' * (len(there) == 1)}</summary>"
    return f'<details class="symbols">{summary}<dl>{items}</dl></details>' if there else ""


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    labels: Sequence[str] | None = None,
    anchors: Iterable[str] | None = None,
    wide: bool = False,
) -> str:
    """Return a table that can be sorted and becomes a list of cards on a narrow screen.

    head: plain text. rows: HTML, one cell per heading. labels: names of the cells on a card, if not the headings.
    anchors: an id for every row. wide: too many columns for cards; the table scrolls sideways instead.
    """
    names = [escape(word) for word in (labels or head)]
    top = "".join(f'<th scope="col">{escape(word)}</th>' for word in head)
    written = [
        "".join(f'<td data-label="{name}"{_sort_key(cell)}>{cell}</td>' for name, cell in zip(names, row, strict=True))
        for row in rows
    ]
    openings = ["<tr>"] * len(written) if anchors is None else [f'<tr id="{escape(anchor)}">' for anchor in anchors]
    body = "".join(f"{opening}{cells}</tr>" for opening, cells in zip(openings, written, strict=True))
    kind = "" if wide else ' class="cards"'
    made = f"<table{kind}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll wide" tabindex="0" role="region" aria-label="Table">{made}</div>' if wide else made


def _sort_key(cell: str) -> str:
    """Return an attribute with the number that a cell begins with, in bytes if it has such a unit."""
    found = _NUMBER.match(unescape(_TAG.sub("", cell)).strip())
    return f' data-sort="{float(found[1].replace(",", "")) * _UNITS[found[2]]:.12g}"' if found else ""


def picture(svg: str, caption: str = "", anchor: str = "", numbers: tuple[str, str] | None = None) -> str:
    """Return a figure, which scrolls sideways on a narrow screen; the caption is HTML.

    numbers: a file name and CSV text, which are part of the page.
    """
    name = f' id="{escape(anchor)}"' if anchor else ""
    words = f"<figcaption>{caption}</figcaption>" if caption else ""
    data = ""
    if numbers is not None:
        code = base64.b64encode(numbers[1].encode()).decode()
        link = f'download="{escape(numbers[0])}" href="data:text/csv;charset=utf-8;base64,{code}"'
        data = f'<a class="numbers" {link}>The numbers of this figure (CSV)</a>'
    return f'<figure{name}>{words}<div class="scroll">{svg}</div>{data}</figure>'


def bullet_list(items: Iterable[str]) -> str:
    """Return a list; the items are HTML."""
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def _file(name: str) -> str:
    return (resources.files("cbdsl.report") / name).read_text(encoding="utf-8")


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure, and its numbers as a table."""

    figure: Figure
    head: tuple[str, ...]
    rows: Sequence[Sequence[object]]

    @property
    def csv(self) -> str:
        """Return the numbers as text."""
        text = io.StringIO(newline="")
        csv.writer(text).writerows([self.head, *self.rows])
        return text.getvalue()


def save_drawing(drawn: Drawing, stem: Path, description: str, caption: str = "", anchor: str = "") -> str:
    """Write a figure as PNG, SVG and PDF and its numbers as CSV; return it as HTML. The caption is HTML."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    save(drawn.figure, stem)
    write_atomically(stem.with_suffix(".csv"), drawn.csv.encode())
    svg = make_themed_svg(drawn.figure, stem.name, description)
    return picture(svg, caption, anchor, (f"{stem.name}.csv", drawn.csv))
