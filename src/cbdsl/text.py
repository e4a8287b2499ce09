"""Numbers as people read them."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes for people: 177.7 kB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def clock(seconds: float) -> str:
    """Seconds for people: 3:07."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
