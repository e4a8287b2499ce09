"""Studies as functions for Python and notebooks: comparisons as tables, sweeps and the arena with their progress."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cbdsl.errors import UserError, unknown
from cbdsl.runs.result import Result
from cbdsl.studies.compare import Comparison, group_labelled, group_results, read_folders, table_rows
from cbdsl.studies.comparison_text import FORMATS, format_comparison
from cbdsl.studies.sweep import FinishedRun

Run = Path | str | Result | FinishedRun
"""A finished run: its folder, or what `cbdsl.run` or `cbdsl.sweep` returned."""
Runs = Run | Iterable[Run]


def compare(
    runs: Runs | Mapping[str, Runs],
    *,
    labels: Mapping[str, str] | None = None,
    order: str = "given",
    against: str = "",
    measures: Sequence[str] = ("final",),
    to: str = "frame",
) -> Any:  # noqa: ANN401 - a data frame, a list or text
    """Compare finished runs: one row per group with means, deviations and paired tests of every measure.

    runs: those that differ only in their seed are a group; or groups by label, for parts that specs do not name.
    labels, order (given, best or label), against: as in `cbdsl compare`. measures: of Markdown and LaTeX.
    to: a pandas "frame", a list of "rows" (without pandas), or text: "md", "tex" or "csv".

    >>> from cbdsl import Spec, run
    >>> spec = Spec(workers=2, rounds=1, model="softmax").with_settings({"data.samples_per_worker": 20})
    >>> ways = {name: [run(spec.with_settings({"method": name, "seed": seed})) for seed in (0, 1)]
    ...         for name in ("fedavg", "cb-dsl")}
    >>> [(row["label"], row["seeds"]) for row in compare(ways, to="rows")]
    [('fedavg', (0, 1)), ('cb-dsl', (0, 1))]
    """
    if to not in {"frame", "rows", *FORMATS}:
        raise unknown("output", to, ("frame", "rows", *FORMATS))
    found = _group(runs).arranged(labels, order, against)
    if to in FORMATS:
        return format_comparison(found, to, measures)
    rows = table_rows(found)
    if to == "rows":
        return rows
    try:
        import pandas as pd  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError as error:
        raise UserError(
            'A data frame needs pandas. Install it (pip install pandas), or ask for a list: to="rows".',
            code="missing-package",
        ) from error
    return pd.DataFrame(rows).set_index("label")


def _group(runs: Runs | Mapping[str, Runs]) -> Comparison:
    if isinstance(runs, Mapping):
        return group_labelled({label: _finished(own) for label, own in runs.items()})
    return group_results(_finished(runs))


def _finished(runs: Runs) -> list[FinishedRun]:
    given = [runs] if isinstance(runs, (Path, str, Result, FinishedRun)) else list(runs)
    read = iter(read_folders([Path(one) for one in given if isinstance(one, (Path, str))]))
    return [
        next(read)
        if isinstance(one, (Path, str))
        else FinishedRun(one.spec, one.summary, tuple(one.rounds), one.folder or Path(f"unsaved-{place}"))
        for place, one in enumerate(given)
    ]
