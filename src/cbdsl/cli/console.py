"""The terminal, for text that users wrote: names and paths are shown as they are, brackets and colons are no markup."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_WIDE = 160  # columns of a table that goes into a file or a pipe


def plain_console(stderr: bool = False, soft_wrap: bool = False) -> Console:
    """A console that takes text for text; style goes in `rich.text.Text`."""
    narrow = (sys.stderr if stderr else sys.stdout).isatty() or "COLUMNS" in os.environ
    width = None if narrow else _WIDE
    return Console(stderr=stderr, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False, width=width)
