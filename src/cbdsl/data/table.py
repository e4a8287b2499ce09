"""Tables of sensor values: .csv files with a line of column names, of which some are targets."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cbdsl.arrays import Doubles
from cbdsl.errors import UserError, close_to, shown
from cbdsl.util.memory import require_memory


@dataclass(frozen=True, eq=False)
class Table:
    """Numbers in named columns."""

    columns: tuple[str, ...]
    values: Doubles  # (N, columns)
    source: str

    def divide(self, targets: Sequence[str]) -> tuple[Doubles, Doubles]:
        """Return the other columns (N, F), and the target columns (N, T) in the order of their names."""
        for name in targets:
            if name not in self.columns:
                meant = next(iter(close_to(name, self.columns)), "")
                raise UserError(
                    f"{self.source} has no column {shown(name)}{f'; did you mean {meant!r}?' if meant else '.'} It "
                    f"has: {', '.join(self.columns[:20])}.",
                    code="unknown-name",
                )
        places = [self.columns.index(name) for name in targets]
        others = [place for place in range(len(self.columns)) if place not in places]
        if not others:
            raise UserError(f"{self.source} has no column beside the targets; there is nothing to predict from.",
                            code="wrong-shape")  # fmt: skip
        return self.values[:, others], self.values[:, places]


def read_table(path: Path) -> Table:
    """Read a .csv file: a line of names, then a number in every column of every line."""
    try:
        require_memory(20 * path.stat().st_size, f"{path} takes", "Give a smaller one.")
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [line for line in csv.reader(file) if line]
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(
            f"The table {path} cannot be read ({error}). Give a .csv file.", code="unreadable-file"
        ) from error
    names = [name.strip() for name in lines[0]] if lines else []
    if len(lines) < 2 or len(set(names)) < len(names) or not all(name.isprintable() and name for name in names):
        raise UserError(
            f"{path} must begin with a line of names, each another one, and have a line of numbers for every sample; "
            f"given {len(lines):,} lines, the first is {shown(','.join(names))}.",
            code="unreadable-file",
        )
    values = np.empty((len(lines) - 1, len(names)))
    for number, line in enumerate(lines[1:]):
        values[number] = _numbers(path, number + 2, line, names)
    return Table(tuple(names), values, str(path))


def _numbers(path: Path, number: int, line: list[str], names: list[str]) -> list[float]:
    """Return the numbers of a line; refuse a gap or text. number: of the line in the file."""
    if len(line) != len(names):
        raise UserError(
            f"Line {number:,} of {path} has {len(line)} values; there are {len(names)} columns.", code="wrong-shape"
        )
    found = []
    for name, text in zip(names, line, strict=True):
        try:
            found.append(float(text))
        except ValueError:
            what = f"is {shown(text)}, not a number" if text.strip() else "has a gap"
            raise UserError(
                f"Line {number:,} of {path} {what} in the column '{name}'. Fill it, or leave the line out.",
                code="wrong-type",
            ) from None
    return found
