"""Formats byte counts and durations; strips control characters from untrusted text."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

from cbdsl.errors import UserError

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}


def format_bytes(count: float) -> str:
    """Format a number of bytes: 177.7 kB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def parse_bytes(text: str, name: str) -> int:
    """Parse a size such as 256M or 2G, with the units of `format_bytes`."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,3})?) ?([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if found is None or float(found[1]) == 0:
        raise UserError(f"{name} takes a size such as 256M or 2G; given '{text}'.", code="wrong-type")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def format_duration(seconds: float) -> str:
    """Format seconds: 3:07."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def single_line(text: str, longest: int = 300) -> str:
    """Return text on one line without control characters, which could rewrite a terminal or forge a log line."""
    shown = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text[: longest + 1])
    return shown if len(text) <= longest else f"{shown[:longest]}..."


def html_table(rows: Iterable[tuple[str, str]]) -> str:
    """Return rows of a name and a text as an HTML table, for notebooks."""
    cells = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in rows)
    return f'<table style="text-align: left">{cells}</table>'
