"""Comparisons as Markdown and as LaTeX, ready to paste."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from cbdsl.errors import unknown
from cbdsl.studies.compare import (
    Comparison,
    Measure,
    RunGroup,
    describe_spread,
    describe_tests,
    format_csv_blocks,
    format_p,
)

FORMATS = ("md", "tex", "csv")
_SPECIAL = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": "$<$",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}  # fmt: skip


def format_comparison(comparison: Comparison, kind: str, measures: Sequence[str] = ("final",)) -> str:
    """Return a comparison as text of a kind: md, tex or csv (which has every measure).

    measures: names of measures, as in `Comparison.measures`.
    """
    return format_blocks({"": comparison}, kind, measures)


def format_blocks(blocks: Mapping[str, Comparison], kind: str, measures: Sequence[str] = ("final",)) -> str:
    """Return comparisons by title, such as those of `group_within`, as one table with a block for each."""
    if kind not in FORMATS:
        raise unknown("format", kind, FORMATS)
    if kind == "csv":
        return format_csv_blocks(blocks)
    tables: list[Block] = []
    titles: dict[str, list[str]] = {}  # of the blocks that have a note
    for title, comparison in blocks.items():
        known = comparison.measures
        for name in measures:
            if name not in known:
                raise unknown("measure", name, known)
        tables.append((title, *_cells(comparison, [known[name] for name in measures])))
        for note in filter(None, (describe_spread(comparison), describe_tests(comparison), *comparison.notes)):
            titles.setdefault(note, []).append(title)
    notes = [
        note if "" in found else f"in {'each block' if len(found) == len(blocks) else ' and '.join(found)}: {note}"
        for note, found in titles.items()
    ]
    return (_markdown if kind == "md" else _latex)(tables, notes)


Rows = list[list[str]]
Block = tuple[str, list[str], Rows, list[set[int]]]  # title, heads, rows, columns to set in bold


def _cells(comparison: Comparison, measures: Sequence[Measure]) -> tuple[list[str], Rows, list[set[int]]]:
    """Return the heads, the rows, and the columns of each row that hold the best value."""
    heads, columns, best = ["group"], [[group.label for group in comparison.groups]], []
    for measure in measures:
        heads.append(measure.title)
        columns.append([measure.text(measure.spread(group)) for group in comparison.groups])
        best.append((len(columns) - 1, _find_best(comparison.groups, measure)))
        tests = comparison.tests(measure)
        if any(tests):
            heads += ["difference [95 %]", "p (t)", "p (exact)"]
            columns.append([measure.interval(test) if test else "" for test in tests])
            columns.append([format_p(test.p) if test else "" for test in tests])
            columns.append([format_p(test.exact_p) if test else "" for test in tests])
    bold = [{column for column, place in best if place == row} for row in range(len(comparison.groups))]
    return heads, [list(row) for row in zip(*columns, strict=True)], bold


def _find_best(groups: Sequence[RunGroup], measure: Measure) -> int | None:
    """Return the index of the group with the best mean; None for bytes and counts, and for a single group."""
    metric = measure.metric
    if metric is None or len(groups) < 2:
        return None
    best = 0
    for place, group in enumerate(groups):
        if metric.is_better(measure.spread(group).mean, measure.spread(groups[best]).mean):
            best = place
    return best


def _markdown(blocks: Sequence[Block], notes: list[str]) -> str:
    heads = _widest_heads(blocks)
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for title, own, rows, bold in blocks:
        if title:
            lines.append([f"*{title}*".replace("|", r"\|"), *[""] * (len(heads) - 1)])
        for row, best in zip(rows, bold, strict=True):
            cells = [cell.replace("|", r"\|") for cell in row]
            marked = [f"**{cell}**" if column in best else cell for column, cell in enumerate(cells)]
            lines.append(_place(marked, own, heads))
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return table + "".join(f"\n{note}\n" for note in notes)


def _latex(blocks: Sequence[Block], notes: list[str]) -> str:
    heads = _widest_heads(blocks)
    lines = ["% needs \\usepackage{booktabs}", f"\\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}", r"\toprule"]
    lines.append(" & ".join(map(_escape, heads)) + r" \\")
    for title, own, rows, bold in blocks:
        lines.append(r"\midrule")
        if title:
            lines.append(f"\\multicolumn{{{len(heads)}}}{{l}}{{\\emph{{{_escape(title)}}}}} \\\\")
        for row, best in zip(rows, bold, strict=True):
            cells = [_escape(cell) for cell in row]
            marked = [f"\\textbf{{{cell}}}" if column in best else cell for column, cell in enumerate(cells)]
            lines.append(" & ".join(_place(marked, own, heads)) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def _widest_heads(blocks: Sequence[Block]) -> list[str]:
    """Return the heads of the block that has most: one whose seeds differ has no tests."""
    return max((heads for _, heads, _, _ in blocks), key=len)


def _place(cells: Sequence[str], own: Sequence[str], heads: Sequence[str]) -> list[str]:
    """Return the cells of a row below the heads of the whole table; empty where its block has no such column."""
    left = list(zip(own, cells, strict=True))
    return [left.pop(0)[1] if left and left[0][0] == head else "" for head in heads]


def _escape(text: str) -> str:
    """Return text for LaTeX; a minus before a number becomes a minus sign."""
    escaped = "".join(_SPECIAL.get(sign, sign) for sign in text)
    return re.sub(r"(?<![\w.])([-+])(?=\d)", r"$\1$", escaped)
