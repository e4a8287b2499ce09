"""Comparisons as Markdown and as LaTeX, ready to paste."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cbdsl.errors import unknown
from cbdsl.studies.compare import (
    Comparison,
    Measure,
    RunGroup,
    describe_spread,
    describe_tests,
    format_csv,
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
    if kind not in FORMATS:
        raise unknown("format", kind, FORMATS)
    known = comparison.measures
    for name in measures:
        if name not in known:
            raise unknown("measure", name, known)
    if kind == "csv":
        return format_csv(comparison)
    chosen = [known[name] for name in measures]
    notes = [describe_spread(comparison), describe_tests(comparison), *comparison.notes]
    write = _markdown if kind == "md" else _latex
    return write(*_cells(comparison, chosen), list(filter(None, notes)))


Rows = list[list[str]]


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


def _markdown(heads: list[str], rows: Rows, bold: list[set[int]], notes: list[str]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for row, best in zip(rows, bold, strict=True):
        cells = [cell.replace("|", r"\|") for cell in row]
        lines.append([f"**{cell}**" if column in best else cell for column, cell in enumerate(cells)])
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return table + "".join(f"\n{note}\n" for note in notes)


def _latex(heads: list[str], rows: Rows, bold: list[set[int]], notes: list[str]) -> str:
    lines = ["% needs \\usepackage{booktabs}", f"\\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}", r"\toprule"]
    lines.append(" & ".join(map(_escape, heads)) + r" \\")
    lines.append(r"\midrule")
    for row, best in zip(rows, bold, strict=True):
        cells = [_escape(cell) for cell in row]
        lines.append(" & ".join(f"\\textbf{{{c}}}" if n in best else c for n, c in enumerate(cells)) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    """Return text for LaTeX; a minus before a number becomes a minus sign."""
    escaped = "".join(_SPECIAL.get(sign, sign) for sign in text)
    return re.sub(r"(?<![\w.])([-+])(?=\d)", r"$\1$", escaped)
