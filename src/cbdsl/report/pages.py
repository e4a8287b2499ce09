"""Fills in the templates of HTML pages. A page is one file with its style, script and figures; it loads nothing."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import unescape
from importlib import resources
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from cbdsl import register
from cbdsl.errors import missing
from cbdsl.report.figures import save, theme_svg
from cbdsl.spec import LocalSpec
from cbdsl.util.files import write_atomically
from cbdsl.util.formatting import format_bytes

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined, Template
    from markupsafe import Markup
except ModuleNotFoundError as error:
    raise missing("jinja2", "study", "it fills in the pages") from error

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
class Cell:
    """A cell of a table that is more than plain text."""

    text: str
    note: str = ""  # below it, in small letters
    tone: str = ""  # a class of page.css: yes, no or open
    href: str = ""
    strong: bool = False


Row = Sequence[str | Cell]


@dataclass(frozen=True, eq=False)
class Table:
    """A table that can be sorted. On a narrow screen it becomes a list of cards or, if it is wide, scrolls sideways."""

    head: Sequence[str]
    rows: Sequence[Row]
    wide: bool = True
    labels: Sequence[str] = ()  # names of the cells on a card, if not the headings
    anchors: Sequence[str] = ()  # an id for every row

    def __post_init__(self) -> None:
        if any(len(row) != len(self.head) for row in self.rows) or len(self.anchors) not in {0, len(self.rows)}:
            raise ValueError("A table needs a cell for every heading, and an anchor for every row or none.")


@dataclass(frozen=True)
class PageFigure:
    """A figure on a page: its SVG and, if there are numbers, their file name and content."""

    svg: Markup
    anchor: str = ""
    file: str = ""
    numbers: str = ""

    @property
    def encoded_numbers(self) -> str:
        """The numbers as they are in a link."""
        return base64.b64encode(self.numbers.encode()).decode()


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure, and its numbers as a table."""

    figure: Figure
    head: tuple[str, ...]
    rows: Sequence[Sequence[object]]

    @property
    def csv(self) -> str:
        """The numbers as text."""
        text = io.StringIO(newline="")
        csv.writer(text).writerows([self.head, *self.rows])
        return text.getvalue()


def save_drawing(drawn: Drawing, stem: Path, description: str, anchor: str = "") -> PageFigure:
    """Write a figure as PNG, SVG and PDF and its numbers as CSV; return it for a page."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    save(drawn.figure, stem)
    write_atomically(stem.with_suffix(".csv"), drawn.csv.encode())
    svg = theme_svg(stem.with_suffix(".svg").read_text("utf-8"), drawn.figure, stem.name, description)
    return PageFigure(Markup(svg), anchor, f"{stem.name}.csv", drawn.csv)  # matplotlib escapes its text


def write_page(path: Path, template: str, **content: Any) -> Path:  # noqa: ANN401 - whatever the template uses
    """Fill in a template, write the page and return its path."""
    write_atomically(path, render_page(template, **content).encode())
    return path


def render_page(template: str | Template, **content: Any) -> str:  # noqa: ANN401
    """Fill in a template of the package, or one made by `ENVIRONMENT.from_string`, and return the page."""
    style, script = ((resources.files("cbdsl.report") / name).read_text("utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    shared = {"style": Markup(style), "script": Markup(script), "script_digest": digest, "links": []}
    return ENVIRONMENT.get_template(template).render(shared, **content)


def find_symbols(text: str) -> dict[str, str]:
    """Return the symbols in a page, with their meanings."""
    words = unescape(_TAG.sub(" ", text))
    return {
        name: meaning for name, meaning in SYMBOLS.items() if re.search(rf"(?<![\w^]){re.escape(name)}(?![\w^])", words)
    }


def find_sort_key(cell: str | Cell) -> str:
    """Return the number that a cell begins with, in bytes if it has such a unit, or ""."""
    found = _NUMBER.match(cell if isinstance(cell, str) else cell.text)
    return f"{float(found[1].replace(',', '')) * _UNITS[found[2]]:.12g}" if found else ""


# Phrases that several pages use.


def join_words(values: Iterable[object]) -> str:
    """Return `1, 5 and 10`."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def join_span(values: Iterable[int]) -> str:
    """Return `3`, or `3 to 9`."""
    found = sorted(set(values))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def capitalise(text: str) -> str:
    """Return a heading with an upper-case first letter; a symbol, as in `p (t)`, stays as it is."""
    return text if text[1:2] == " " else text[:1].upper() + text[1:]


def keep_together(text: str) -> str:
    """Keep text on one line."""
    return text.replace(" ", "\u00a0")


def describe_seeds(seeds: Sequence[int]) -> str:
    """Return `seeds 0, 1 and 2`, or `one seed (0)`."""
    return f"seeds {join_words(seeds)}" if len(seeds) > 1 else f"one seed ({seeds[0]})"


def describe_rounds(rounds: Sequence[tuple[int, int]]) -> str:
    """Return `9 of 30 rounds`, or `30 rounds`; rounds: pairs of those here and those of the preset."""
    here, whole = (join_span(column) for column in zip(*rounds, strict=True))
    return f"{here} rounds" if here == whole else f"{here} of {whole} rounds"


def describe_training(local: LocalSpec) -> str:
    """Return `one epoch of plain SGD per round`, or the epochs and the options of the optimiser."""
    count, noun = (local.steps, "batch") if local.steps else (local.epochs, "epoch")
    plural = "" if count == 1 else "es" if noun == "batch" else "s"
    amount = f"{'one' if count == 1 else count} {noun}{plural}"
    besides = [{"adam": "Adam", "adamw": "AdamW"}[local.optimiser]] if local.optimiser != "sgd" else []
    besides += [f"momentum {local.momentum:g}"] * bool(local.momentum and local.optimiser == "sgd")
    besides += [f"weight decay {local.weight_decay:g}"] * bool(local.weight_decay)
    besides += [f"gradients of a norm up to {local.clip:g}"] * bool(local.clip)
    span = "within a round" if local.schedule_over == "round" else "over the run"
    besides += [f"{local.schedule} of the learning rate {span}"] * (local.schedule != "constant")
    besides += [f"batches changed by the augmentation {local.augment}"] * bool(local.augment)
    if local.decay != 1:
        change = "halved" if local.decay == 0.5 else f"times {local.decay:g}"
        besides.append(f"learning rate {change} every round")
    return ", ".join([amount, *besides]) if besides else f"{amount} of plain SGD per round"


def describe_attack(name: str) -> str:
    """Return the description of an attack."""
    return " ".join((register.attack.get(name).__doc__ or "").split())


_FILTERS: dict[str, Callable[..., object]] = {
    "bytes": format_bytes,
    "capitalised": capitalise,
    "describe_attack": describe_attack,
    "join_words": join_words,
    "number": format,
    "sort_key": find_sort_key,
    "symbols": find_symbols,
}


def _make_environment() -> Environment:
    made = Environment(
        loader=PackageLoader("cbdsl.report"), extensions=["jinja2.ext.do"], autoescape=True,
        undefined=StrictUndefined, lstrip_blocks=True,
    )  # fmt: skip
    made.filters.update(_FILTERS)
    return made


ENVIRONMENT = _make_environment()
