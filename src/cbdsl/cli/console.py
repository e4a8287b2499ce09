"""The terminal, for text that users wrote: names and paths are shown as they are, brackets and colons are no markup."""

from __future__ import annotations

from rich.console import Console


def plain_console(stderr: bool = False, soft_wrap: bool = False) -> Console:
    """A console that takes text for text; style goes in `rich.text.Text`."""
    return Console(stderr=stderr, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False)
