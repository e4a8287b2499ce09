"""Studies as functions for Python and notebooks: comparisons, sweeps and the arena."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cbdsl.errors import UserError, unknown
from cbdsl.presets import preset
from cbdsl.runs.callbacks import open_progress
from cbdsl.runs.result import Result
from cbdsl.spec import Spec, full_key, words
from cbdsl.studies.arena import Arena, ArenaPlan, run_arena
from cbdsl.studies.compare import Comparison, block_rows, group_blocks, group_labelled, read_folders, sort_sweep
from cbdsl.studies.comparison_text import FORMATS, format_blocks
from cbdsl.studies.sweep import (
    OTHER_STUDIES,
    FinishedRun,
    Task,
    plan_sweep,
    read_sweep,
    refuse_other_results,
    run_tasks,
    write_table,
)

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
    within: str | Sequence[str] = (),
) -> Any:  # noqa: ANN401 - a data frame, a list or text
    """Compare finished runs: one row per group with means, deviations and paired tests of every measure.

    runs: folders or results, grouped if they differ only in their seed; or groups by label, for parts that specs do
        not name.
    labels, order (given, best or label), against: as in `cbdsl compare`. measures: columns of Markdown and LaTeX.
    to: a pandas "frame", a list of "rows" (without pandas), or text: "md", "tex" or "csv".
    within: settings, such as "attack"; groups are tested only against groups with the same values of these.

    >>> from cbdsl import Spec, run
    >>> spec = Spec(workers=2, rounds=1, model="softmax").with_settings({"data.samples_per_worker": 20})
    >>> ways = {name: [run(spec.with_settings({"method": name, "seed": seed})) for seed in (0, 1)]
    ...         for name in ("fedavg", "cb-dsl")}
    >>> [(row["label"], row["seeds"]) for row in compare(ways, to="rows")]
    [('fedavg', (0, 1)), ('cb-dsl', (0, 1))]
    """
    if to not in {"frame", "rows", *FORMATS}:
        raise unknown("output", to, ("frame", "rows", *FORMATS))
    blocks = _group(runs, words(within) if isinstance(within, str) else within)
    blocks = {title: one.arranged(labels, order, against) for title, one in blocks.items()}
    if to in FORMATS:
        return format_blocks(blocks, to, measures)
    rows = block_rows(blocks)
    if to == "rows":
        return rows
    try:
        import pandas as pd  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError as error:
        raise UserError(
            'A data frame needs pandas. Install it (pip install pandas), or ask for a list: to="rows".',
            code="missing-package",
        ) from error
    return pd.DataFrame(rows).set_index(["within", "label"] if within else "label")


def sweep(
    spec: Spec | str,
    over: Mapping[str, Iterable[Any]],
    *,
    out: Path | str = "sweep",
    jobs: int | None = None,
    on: str | None = None,
) -> list[FinishedRun]:
    """Run a grid of experiments in parallel and return the finished runs, with progress in terminals and notebooks.

    spec: the settings of every run, or a preset's name. over: values by setting, such as {"seed": range(3)}. Your own
    parts come from `plugins`. out: a folder; runs in it are not repeated, and its tables contain all of them.
    jobs: processes at a time; one per core if None. on: a Ray cluster, see `cbdsl.run`.

    >>> from tempfile import TemporaryDirectory
    >>> spec = Spec(workers=2, rounds=1, model="softmax").with_settings({"data.samples_per_worker": 20})
    >>> with TemporaryDirectory() as folder:
    ...     runs = sweep(spec, {"method": ["cb-dsl", "fedavg"], "seed": range(2)}, out=folder, jobs=1)
    >>> [(run.spec.method, run.spec.seed) for run in runs]
    [('cb-dsl', 0), ('cb-dsl', 1), ('fedavg', 0), ('fedavg', 1)]
    """
    start = preset(spec) if isinstance(spec, str) else spec
    plan = plan_sweep(start, [(full_key(key), list(values)) for key, values in over.items()])
    if plan.note:
        logging.getLogger("cbdsl").warning(plan.note)
    folder, tasks = Path(out), [Task(one) for one in plan.specs]
    refuse_other_results(folder, "groups.csv", OTHER_STUDIES)
    with open_progress("rounds") as line:
        run_tasks(tasks, folder, jobs, lambda done, total, share: line.show(done, total, "", share), on)
    results = read_sweep(folder, plan.specs)
    write_table(*sort_sweep(results, plan.axes, len(tasks)), folder)
    return results[: len(tasks)]


def arena(
    attacks: Sequence[str] | None = None,
    defences: Sequence[str] | None = None,
    *,
    out: Path | str = "arena",
    jobs: int | None = None,
    on: str | None = None,
    **plan: Any,  # noqa: ANN401 - fields of `ArenaPlan`
) -> Arena:
    """Run attacks against defences, all of them if None, with progress in terminals and notebooks.

    plan: more fields of `cbdsl.studies.arena.ArenaPlan`: byzantine, seeds, presets, settings, plugins.
    The result's `matches` make a table: pandas.DataFrame(result.matches).

    >>> arena(["liar"], ["fedavg", "cb-dsl"], byzantine=(5,), seeds=(0,))  # doctest: +SKIP
    """
    names = {"attacks": attacks, "defences": defences}
    chosen = ArenaPlan(**plan, **{name: tuple(each) for name, each in names.items() if each is not None})  # type: ignore[arg-type]
    with open_progress("rounds") as line:
        return run_arena(chosen, Path(out), jobs, lambda done, total, share: line.show(done, total, "", share), on)


def _group(runs: Runs | Mapping[str, Runs], within: Sequence[str]) -> Mapping[str, Comparison]:
    if isinstance(runs, Mapping):
        if within:
            raise UserError("Groups that are given by label have no blocks. Leave out within.", code="conflict")
        return {"": group_labelled({label: _finished(own) for label, own in runs.items()})}
    return group_blocks(_finished(runs), within)


def _finished(runs: Runs) -> list[FinishedRun]:
    """Return each run once: a run that counts twice would pass for two seeds."""
    given = [runs] if isinstance(runs, (Path, str, Result, FinishedRun)) else list(runs)
    for one in given:
        if not isinstance(one, (Path, str, Result, FinishedRun)):
            raise UserError(
                f"A run to compare is a folder, or what cbdsl.run or cbdsl.sweep returned; given {one!r}.",
                code="wrong-type",
            )
    folders = list(dict.fromkeys(Path(one) for one in given if isinstance(one, (Path, str))))
    read = dict(zip(folders, read_folders(folders), strict=True))
    found: dict[tuple[Path, Spec], FinishedRun] = {}
    for one in {id(one): one for one in given}.values():
        if isinstance(one, (Path, str)):
            run = read[Path(one)]
        else:
            run = FinishedRun(one.spec, one.summary, tuple(one.rounds), one.folder or Path(f"unsaved-{len(found)}"))
        found.setdefault((run.folder.resolve(), run.spec), run)
    return list(found.values())
