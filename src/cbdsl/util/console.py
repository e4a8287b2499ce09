"""Output for people: plain consoles, and one line of progress for terminals, notebooks and logs."""

from __future__ import annotations

import io
import os
import sys
import time
from importlib import import_module
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress_bar import ProgressBar
from rich.text import Text

from cbdsl.util.formatting import format_duration

_WIDE = 160  # columns of text that goes into a file or a pipe
_LOG_SECONDS = 10.0
_MOST_LOG_SECONDS = 600.0
_DRAW_SECONDS = 0.1  # between pictures in a notebook


def plain_console(stderr: bool = False, soft_wrap: bool = False) -> Console:
    """Return a console that does not interpret markup; styled text is a `rich.text.Text`."""
    narrow = (sys.stderr if stderr else sys.stdout).isatty() or "COLUMNS" in os.environ
    width = None if narrow else _WIDE
    return Console(stderr=stderr, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False, width=width)


class ProgressLine:
    """A progress bar with the time left in a terminal; elsewhere lines at increasing intervals."""

    def __init__(self, unit: str, log_seconds: float | None = _LOG_SECONDS) -> None:
        """unit: what is counted. log_seconds: time before the first line if there is no terminal; None: print none.

        The time between lines doubles up to ten minutes, so that the log of a long study stays short.
        """
        self._console = plain_console(stderr=True)
        self._bar = Progress(
            TextColumn(unit),
            MofNCompleteColumn(),
            BarColumn(bar_width=16),
            TextColumn("{task.description}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)
        self._unit, self._log_seconds, self._logged = unit, log_seconds, time.monotonic()
        self._first: tuple[float, float] | None = None
        self._ended = False  # whether the last state was the end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def print(self, line: str | Text, style: str = "") -> None:
        """Print a line above the bar."""
        self._console.print(line, style=style, highlight=False, soft_wrap=True)

    def show(self, done: int, total: int, state: str = "", share: float | None = None) -> None:
        """Show the progress. share: of all work, for the time left, if it is not that of what is counted."""
        now, share = time.monotonic(), done / max(1, total) if share is None else share
        if self._first is None:
            self._first = now, share
        started, before = self._first
        left = f"  {format_duration((1 - share) * (now - started) / (share - before))} left" if share > before else ""
        self._draw(done, total, f"{state}{left}")

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._bar.stop()

    def _draw(self, done: int, total: int, state: str) -> None:
        now = time.monotonic()
        if self._console.is_terminal:
            self._bar.start()
            self._bar.update(self._task, completed=done, total=total, description=state)
        elif self._log_seconds is not None:
            ended, self._ended = done == total and not self._ended, done == total
            if ended or (not self._ended and now - self._logged > self._log_seconds):
                self._logged, self._log_seconds = now, min(2 * self._log_seconds, _MOST_LOG_SECONDS)
                self.print(f"{self._unit} {done}/{total}  {state}")


class NotebookProgress(ProgressLine):
    """Two lines in the output of a notebook's cell, drawn by rich and replaced each time; no widgets needed."""

    def __init__(self, unit: str) -> None:
        super().__init__(unit)
        self._display = import_module("IPython.display")
        self._handle: Any = None

    def _draw(self, done: int, total: int, state: str) -> None:
        now = time.monotonic()
        if self._handle is not None and done < total and now - self._logged < _DRAW_SECONDS:
            return
        self._logged = now
        content = self._display.HTML(progress_html(done, total, state, self._unit))
        if self._handle is None:
            self._handle = self._display.display(content, display_id=True)
        else:
            self._handle.update(content)


def progress_html(done: int, rounds: int, words: str, unit: str = "round") -> str:
    """Return a progress bar as HTML."""
    console = Console(file=io.StringIO(), record=True, width=100, force_jupyter=False, color_system="truecolor")
    console.print(Group(Text(f"{unit} {done}/{rounds}  {words}"), ProgressBar(total=rounds, completed=done, width=60)))
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
