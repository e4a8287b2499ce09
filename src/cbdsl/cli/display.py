"""The progress of a run in the terminal, and its summary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from cbdsl.runs.build import build_method
from cbdsl.runs.callbacks import Bar, RunStart
from cbdsl.runs.records import describe, summary_rows
from cbdsl.runs.result import Result
from cbdsl.spec import Spec
from cbdsl.util.console import ProgressLine, plain_console


class Display(Bar):
    """A run's description, then its progress, round by round; without a terminal a line from time to time."""

    def __init__(self) -> None:
        super().__init__()
        self.line = ProgressLine("round")

    def announce(self, spec: Spec, folder: Path | None, note: str = "") -> None:
        """Print what is about to be run."""
        self.line.print(headline(spec))
        if folder is not None:
            self.line.print(f"folder: {folder}")
        if note:
            self.line.print(note, "yellow")

    def start(self, run: RunStart) -> None:
        """See `Callback.start`."""
        self.announce(run.spec, run.folder, run.note)
        super().start(replace(run, note=""))

    def _open_line(self) -> ProgressLine:
        return self.line


def headline(spec: Spec) -> Text:
    """Return one line that describes a run."""
    shared = {"none": "no shared data", "score": "D_sc shared", "train": "D_tr shared", "both": "D_sc and D_tr shared"}
    attack = f", {spec.attack.byzantine} Byzantine ({spec.attack.name})" if spec.attack.byzantine else ""
    defence = f" with {describe(spec)}" if describe(spec) else ""
    method = build_method(spec)
    who = f"{defence}, {shared[spec.shared]}: {spec.workers} workers{attack}, "
    return Text.assemble(
        (method.title, "bold"),
        ": " if method.conversation == "alone" else who,
        f"{spec.data.source} {spec.data.partition}, model {spec.model}, seed {spec.seed}",
    )


def print_summary(result: Result) -> None:
    """Print the summary of a run."""
    console, table = plain_console(), new_list()
    for name, text in summary_rows(result.summary):
        table.add_row(name, text)
    if result.folder is not None:
        table.add_row("folder", str(result.folder))
        if result.per_worker:
            table.add_row("per worker", f"{result.folder / 'local_test.csv'}, and local_test.png as a figure")
    console.print()
    console.print(table, highlight=False, soft_wrap=True)


def new_table(*headings: str, **more: Any) -> Table:  # noqa: ANN401 - options of Table
    """Return a table without lines."""
    return Table(*headings, box=None, pad_edge=False, padding=(0, 2, 0, 0), **more)


def new_list() -> Table:
    """Return a table of two columns without headings: names in bold, and values."""
    table = new_table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    return table
