"""Tables of sensor values with named columns, .csv or .parquet files, of which some columns are targets."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbdsl.arrays import Doubles
from cbdsl.errors import UserError, close_to, missing, shown
from cbdsl.util.memory import require_memory

TABLES = (".csv", ".parquet")


@dataclass(frozen=True, eq=False)
class Table:
    """A table of numbers in named columns. A text column holds the indices of its values in `texts`."""

    columns: tuple[str, ...]
    values: Doubles  # (N, columns)
    source: str
    texts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # the distinct values of each text column
    first: str = "Line 2"  # name of the first line in errors

    def divide(self, targets: Sequence[str]) -> tuple[Doubles, Doubles]:
        """Return the other columns (N, F), and the target columns (N, T) in the order of their names."""
        places = [self._place(name) for name in targets]
        others = [place for place in range(len(self.columns)) if place not in places]
        if not others:
            raise UserError(f"{self.source} has no column beside the targets; there is nothing to predict from.",
                            code="wrong-shape")  # fmt: skip
        for name in (self.columns[place] for place in others):
            if name in self.texts:
                raise self._text_error(name, "Give numbers, or leave the column out.")
        return self.values[:, others], self.values[:, places]

    def require_numbers(self, targets: Sequence[str]) -> None:
        """Raise UserError if a target is text."""
        for name in targets:
            if name in self.texts:
                hint = "A regression needs numbers; to learn the values as classes, set data.task=classification."
                raise self._text_error(name, hint)

    def labels(self, target: str) -> NDArray[Any]:
        """Return the classes in a column, (N,), as text or whole numbers."""
        values = self.values[:, self._place(target)]
        if target in self.texts:
            return np.array(self.texts[target])[values.astype(np.int64)]
        if (values != np.floor(values)).any():
            raise UserError(
                f"The column {shown(target)} of {self.source} has numbers such as {values[values % 1 != 0][0]:g}; "
                "classes are text or whole numbers from 0. For real numbers this is regression: set "
                "data.task=regression.",
                code="wrong-type",
            )
        return values.astype(np.int64)

    def _place(self, name: str) -> int:
        if name not in self.columns:
            meant = next(iter(close_to(name, self.columns)), "")
            raise UserError(
                f"{self.source} has no column {shown(name)}{f'; did you mean {meant!r}?' if meant else '.'} It "
                f"has: {', '.join(self.columns[:20])}.",
                code="unknown-name",
            )
        return self.columns.index(name)

    def _text_error(self, name: str, hint: str) -> UserError:
        value = self.texts[name][int(self.values[0, self.columns.index(name)])]
        return UserError(
            f"{self.first} of {self.source} is {shown(value)}, not a number, in the column '{name}'. {hint}",
            code="wrong-type",
        )


def read_table(path: Path) -> Table:
    """Read a .csv file (a line of names, then lines with a value in every column) or a .parquet file."""
    return _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)


def _read_csv(path: Path) -> Table:
    try:
        require_memory(20 * path.stat().st_size, f"{path} takes", "Give a smaller one.")
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [line for line in csv.reader(file) if line]
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(
            f"The table {path} cannot be read ({error}). Give a .csv or .parquet file.", code="unreadable-file"
        ) from error
    names = [name.strip() for name in lines[0]] if lines else []
    _check_names(path, names, len(lines) - 1)
    for number, line in enumerate(lines):
        if len(line) != len(names):
            raise UserError(
                f"Line {number + 1:,} of {path} has {len(line)} values for {len(names)} columns.",
                code="wrong-shape",
            )
    columns = ([value.strip() for value in column] for column in zip(*lines[1:], strict=True))
    return _table(path, names, columns, "Line", 2)


def _read_parquet(path: Path) -> Table:
    try:
        import pyarrow as arrow  # noqa: PLC0415 - an extra
        from pyarrow import parquet  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise missing("pyarrow", "parquet", f"{path} is a Parquet file") from error
    try:
        path.stat()  # its error is shorter
        with parquet.ParquetFile(path) as file:
            told = file.metadata
            require_memory(24 * told.num_rows * told.num_columns, f"{path} takes", "Give a smaller one.")
            table = file.read()
    except (OSError, ValueError, arrow.ArrowException) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"The table {path} cannot be read ({error}). Give a .csv or .parquet file.", code="unreadable-file"
        ) from error
    _check_names(path, table.column_names, table.num_rows)
    columns: list[Sequence[str] | Doubles] = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind, types = column.type, arrow.types
        if types.is_dictionary(kind):
            column, kind = column.cast(kind.value_type), kind.value_type  # noqa: PLW2901 - categories as their values
        if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)
                or types.is_string(kind) or types.is_large_string(kind)):  # fmt: skip
            raise UserError(
                f"The column {shown(name)} of {path} has the type {kind}; give numbers, or text for classes. Leave it "
                "out, or convert it.",
                code="wrong-type",
            )
        text = types.is_string(kind) or types.is_large_string(kind)
        columns.append(column.fill_null("").to_pylist() if text else column.cast(arrow.float64()).to_numpy())
    return _table(path, table.column_names, columns, "Row", 1)


def _check_names(path: Path, names: Sequence[str], count: int) -> None:
    if count < 1 or len(set(names)) < len(names) or not all(name.isprintable() and name for name in names):
        raise UserError(
            f"{path} must begin with a line of names, each another one, and have a line of numbers for every sample; "
            f"given {count + 1:,} lines, the first is {shown(','.join(names))}.",
            code="unreadable-file",
        )


def _table(
    path: Path, names: Sequence[str], columns: Iterable[Sequence[str] | Doubles], word: str, first: int
) -> Table:
    """Build a table from columns (N,), text or numbers; refuse gaps. word, first: how errors number the lines."""
    values, texts = [], {}
    for name, column in zip(names, columns, strict=True):
        parsed = column if isinstance(column, np.ndarray) else np.array([_parse(value) for value in column])
        wrong = ~np.isfinite(parsed)
        if wrong.all() and not isinstance(column, np.ndarray) and all(map(_is_word, column)):
            texts[name], places = np.unique(column, return_inverse=True)
            parsed = places.astype(np.float64)
        elif wrong.any():
            row = int(wrong.argmax())
            given = str(column[row]).strip()
            what = f"is {shown(given)}, not a number," if given and given != "nan" else "has a gap"
            raise UserError(
                f"{word} {row + first:,} of {path} {what} in the column '{name}'. Fill it, or leave the line out.",
                code="wrong-type",
            )
        values.append(parsed)
    kinds = {name: tuple(map(str, found)) for name, found in texts.items()}
    return Table(tuple(names), np.stack(values, 1), str(path), kinds, f"{word} {first}")


def _parse(text: str) -> float:
    """Return the number in a text, or NaN."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _is_word(text: str) -> bool:
    return bool(text.strip()) and text.strip().lower() not in {"nan", "inf", "-inf"}
