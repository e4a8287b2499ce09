"""Compares finished runs: the settings in which they differ, and their results over the seeds of each group.

Runs whose specs differ only in the seed are one group.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from cbdsl.errors import UserError
from cbdsl.runs.metrics import Metric, find_metric
from cbdsl.runs.records import Summary
from cbdsl.spec import Spec, dotted_keys, option_keys, setting_values
from cbdsl.studies.sweep import FinishedRun, read_run
from cbdsl.util.formatting import format_bytes

PAIRED = "points from the best"  # the head of a column, for shares; for other metrics:
APART = "from the best"
_UNITS = {"B": 1e0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
_FOLLOWS = ("defence.declared",)  # set from other settings; named only if nothing else tells groups apart


@dataclass(frozen=True)
class Spread:
    """Mean and deviation of one number over several runs."""

    mean: float
    deviation: float | None  # sample standard deviation; None for a single run

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return Spread(fmean(values), stdev(values) if len(values) > 1 else None)


MEASURES: dict[str, Callable[[Summary], float]] = {
    "final": lambda summary: summary.final_value,
    "best": lambda summary: summary.best_value,
    "uplink_bytes": lambda summary: summary.uplink_bytes,
    "downlink_bytes": lambda summary: summary.downlink_bytes,
    "uploads": lambda summary: summary.uploads,
    "bans": lambda summary: len(summary.banned),
}


@dataclass(frozen=True)
class ComparisonRow:
    """The results of one group."""

    settings: dict[str, Any]  # those that differ, without the seed
    runs: int
    seeds: tuple[int, ...]
    final: Spread  # of the main metric
    best: Spread
    uplink_bytes: Spread
    downlink_bytes: Spread
    uploads: Spread
    bans: Spread


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Runs that differ only in their seed."""

    label: str  # short, for a figure
    settings: Mapping[str, Any]
    runs: tuple[FinishedRun, ...]

    @property
    def row(self) -> ComparisonRow:
        """Return the group's results."""
        spreads = {name: Spread.of([measure(run.summary) for run in self.runs]) for name, measure in MEASURES.items()}
        seeds = tuple(run.spec.seed for run in self.runs)
        return ComparisonRow(settings=dict(self.settings), runs=len(self.runs), seeds=seeds, **spreads)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Groups of runs, and notes about what limits the comparison."""

    keys: tuple[str, ...]  # the settings that differ, or that were swept; dotted, without the seed
    distinguishing: tuple[str, ...]  # as few of them as distinguish the groups
    groups: tuple[RunGroup, ...]
    common: dict[str, Any]  # the settings that all runs share
    notes: tuple[str, ...]

    @property
    def rows(self) -> tuple[ComparisonRow, ...]:
        """Return the results of every group."""
        return tuple(group.row for group in self.groups)

    @property
    def metric_name(self) -> str:
        """The name of the main metric, the same in all runs."""
        return self.groups[0].runs[0].summary.metric

    @property
    def metric(self) -> Metric:
        """The main metric."""
        return find_metric(self.metric_name)

    @property
    def ranked(self) -> list[RunGroup]:
        """Return the groups by the mean of the main metric at the end, the best one first."""
        sign = -1 if self.metric.better == "higher" else 1
        return sorted(self.groups, key=lambda group: _last_if_nan(sign * group.row.final.mean))

    @property
    def paired_head(self) -> str:
        """The head of the column of differences from the best group."""
        return PAIRED if self.metric.is_share else APART

    @property
    def gaps(self) -> tuple[Spread | None, ...]:
        """Return the differences of the main metric at the end from the best group, paired by seed.

        None for the best group itself, and where the seeds differ or are fewer than two.
        """
        best = self.ranked[0]
        return tuple(None if group is best else _gap(group, best) for group in self.groups)

    @property
    def runs(self) -> tuple[FinishedRun, ...]:
        """Return all runs, group by group."""
        return tuple(run for group in self.groups for run in group.runs)


def compare(folders: Sequence[Path]) -> Comparison:
    """Read the folders of finished runs and group them."""
    found, damaged = [], []
    for folder in folders:
        try:
            found.append(_read_folder(folder))
        except UserError as error:
            damaged.append(str(error))
    if damaged:
        more = f" And {len(damaged) - 10:,} more." if len(damaged) > 10 else ""
        raise UserError(" ".join(damaged[:10]) + more, code="unreadable-file")
    return group_results(found)


def group_results(results: Sequence[FinishedRun], axes: Sequence[str] | None = None) -> Comparison:
    """Group runs that differ only in their seed, in the order in which they come.

    axes: the swept settings, which then describe the groups; all that differ if not given.
    """
    if not results:
        raise UserError(
            "There is nothing to compare. Give the folders of one or more finished runs.", code="missing-file"
        )
    metrics = sorted({result.summary.metric for result in results})
    if len(metrics) > 1:
        raise UserError(
            f"The runs have different main metrics ({', '.join(metrics)}), so no one is better than another. Compare "
            "runs of one task.",
            code="conflict",
        )
    distinct, notes = _drop_repeated(results)
    by_spec: dict[Spec, list[FinishedRun]] = {}
    for result in distinct:
        by_spec.setdefault(replace(result.spec, seed=0), []).append(result)
    every = [key for key in (*dotted_keys(), *option_keys(by_spec)) if key not in {"seed", "options"}]
    values = [setting_values(spec, every) for spec in by_spec]
    differing = [key for key in every if any(one[key] != values[0][key] for one in values)]
    keys = differing if axes is None else [key for key in axes if key != "seed"]
    keys += ["shared"] * ("shared" in differing and "shared" not in keys)  # methods bring their own: say so
    if not _distinguish(keys, values):  # something differs that was not swept
        keys += [key for key in differing if key not in keys]
    distinguishing = _find_distinguishing(keys, values)
    groups = tuple(
        RunGroup(
            ", ".join(describe_setting(key, one[key]) for key in distinguishing) or spec.method,
            {key: one[key] for key in keys},
            tuple(sorted(runs, key=lambda run: run.spec.seed)),
        )
        for (spec, runs), one in zip(by_spec.items(), values, strict=True)
    )
    common = {key: values[0][key] for key in every if key not in differing}
    cautions = _find_cautions(groups, differing, values)
    return Comparison(tuple(keys), tuple(distinguishing), groups, common, (*notes, *cautions))


def comparison_rows(comparison: Comparison) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the headings and the cells of a table, one row per group."""
    title = comparison.metric.title
    heads = (*comparison.keys, "runs", f"final {title}", f"best {title}", "uplink", "downlink", "uploads", "bans")
    rows = [_cells(row, comparison.keys, comparison.metric) for row in comparison.rows]
    gaps = comparison.gaps
    if any(gaps):
        heads = (*heads, comparison.paired_head)
        points = [format_difference(gap, comparison.metric) if gap else "" for gap in gaps]
        rows = [(*row, one) for row, one in zip(rows, points, strict=True)]
    return heads, rows


def format_csv(comparison: Comparison) -> str:
    """Return one line per group: its settings, runs and seeds, then mean and deviation of every measure."""
    text = io.StringIO(newline="")
    metric = comparison.metric_name.replace("-", "_")
    names = [f"{name}_{metric}" if name in {"final", "best"} else name for name in MEASURES]
    measured = [column for name in names for column in (f"{name}_mean", f"{name}_deviation")]
    writer = csv.writer(text)
    gap_heads = ("gap_to_best_mean", "gap_to_best_deviation")  # of the main metric at the end, seed by seed
    writer.writerow([*comparison.keys, "runs", "seeds", *measured, *gap_heads])
    for row, gap in zip(comparison.rows, comparison.gaps, strict=True):
        spreads = [getattr(row, measure) for measure in MEASURES]
        numbers = [number for spread in spreads for number in (spread.mean, spread.deviation)]
        settings = [format_value(row.settings[key]) for key in comparison.keys]
        behind = (gap.mean, gap.deviation) if gap else ("", "")
        writer.writerow([*settings, row.runs, " ".join(map(str, row.seeds)), *numbers, *behind])
    return text.getvalue()


def describe_run(run: FinishedRun, keys: Sequence[str]) -> str:
    """Describe what distinguishes a run: `swarm.inertia 0.5, seed 3`."""
    values = setting_values(run.spec, [*(key for key in keys if key != "seed"), "seed"])
    return ", ".join(f"{key} {format_value(value)}" for key, value in values.items())


def format_value(value: object) -> str:
    """Format the value of a setting."""
    if isinstance(value, (tuple, list)):
        words = [format_value(item) for item in value]
        return words[0] if len(set(words)) == 1 else " to ".join(words)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def describe_setting(key: str, value: object) -> str:
    """Describe a setting in a label: a word alone, a number with its name."""
    name = key.rpartition(".")[2]
    if isinstance(value, bool):
        return name if value else f"no {name}"
    if isinstance(value, str) and key != "shared":
        return Path(value).name or f"no {name}"
    return f"{name.replace('_', ' ')} {format_value(value)}"


def _gap(group: RunGroup, best: RunGroup) -> Spread | None:
    seeds, others = ([run.spec.seed for run in one.runs] for one in (group, best))
    if seeds != others or len(seeds) < 2:
        return None
    pairs = zip(group.runs, best.runs, strict=True)
    return Spread.of([one.summary.final_value - other.summary.final_value for one, other in pairs])


def _last_if_nan(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _read_folder(folder: Path) -> FinishedRun:
    if not (folder / "summary.json").exists():
        for many in (folder, folder / "runs"):
            if next(many.glob("*/spec.toml"), None) is not None:
                raise UserError(
                    f"{folder} is not the folder of a run but of many. Give some of them, or all: {many}/*",
                    code="wrong-run",
                )
    return read_run(folder)


def _drop_repeated(results: Sequence[FinishedRun]) -> tuple[list[FinishedRun], list[str]]:
    """Return every run once: a repeated run would pass for another seed."""
    kept: dict[tuple[object, ...], FinishedRun] = {}
    twice = False
    for result in results:
        identity = (result.spec, tuple((repr(line.value), line.uplink_bytes) for line in result.rounds))
        twice |= kept.setdefault(identity, result).folder.resolve() != result.folder.resolve()
    notes = ["Some folders hold the same run, spec, seed and numbers alike; it counts once."] if twice else []
    if len({result.spec for result in kept.values()}) < len(kept):
        notes.append("Some runs have the same spec and seed and yet other numbers; each of them counts.")
    return list(kept.values()), notes


def _find_distinguishing(keys: Sequence[str], values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return as few keys as distinguish all groups; words rather than numbers, first rather than last."""
    chosen = list(keys)
    last_first = keys[::-1]
    for key in sorted(last_first, key=lambda key: (key not in _FOLLOWS, isinstance(values[0][key], (str, bool)))):
        fewer = [other for other in chosen if other != key]
        if _distinguish(fewer, values):
            chosen = fewer
    return chosen


def _distinguish(keys: Sequence[str], values: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether some settings distinguish all groups."""
    return len({tuple(one[key] for key in keys) for one in values}) == len(values)


def _find_cautions(
    groups: Sequence[RunGroup], differing: Sequence[str], values: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return notes on what makes the comparison unfair."""
    summaries = [run.summary for group in groups for run in group.runs]
    notes = ["One run alone: there is nothing to compare it with."] if len(summaries) == 1 else []
    held = [key for key in differing if key.startswith("data.") and key != "data.source"]
    if "data.source" in differing:
        notes.append(f"The data differ ({_list_values(values, 'data.source')}): results are not of the same test set.")
    if held:
        notes.append(f"The samples of workers or server differ ({', '.join(held)}).")
    sizes = sorted({summary.parameters for summary in summaries})
    if "model" in differing or len(sizes) > 1:
        words = " and ".join(f"{count:,}" for count in sizes)
        notes.append(f"The models differ ({_list_values(values, 'model')}; {words} parameters).")
    custom = [what for what, key in (("model", "model"), ("data", "data.source")) if _given_in_python(values, key)]
    if len(summaries) > 1 and custom:
        notes.append(
            f"The {' and the '.join(custom)} came from Python: the specs do not tell whether all runs had the same."
        )
    if "rounds" in differing:
        notes.append(f"Some runs are longer than others ({_list_values(values, 'rounds')} rounds).")
    for what in ("engine", "version"):
        found = sorted({getattr(summary, what) for summary in summaries})
        if len(found) > 1:
            notes.append(f"The runs differ in their {what}: {', '.join(found)}.")
    if len({tuple(run.spec.seed for run in group.runs) for group in groups}) > 1:
        notes.append("The groups do not have the same seeds, so their differences are not paired.")
    return notes


def _list_values(values: Sequence[Mapping[str, Any]], key: str) -> str:
    return ", ".join(dict.fromkeys(format_value(one[key]) for one in values))


def _given_in_python(values: Sequence[Mapping[str, Any]], key: str) -> bool:
    return any(one[key] == "custom" for one in values)


def _cells(row: ComparisonRow, keys: Sequence[str], metric: Metric) -> tuple[str, ...]:
    return (
        *(format_value(row.settings[key]) for key in keys),
        _format_runs(row),
        *(format_metric(spread, metric) for spread in (row.final, row.best)),
        *(_format_bytes(spread) for spread in (row.uplink_bytes, row.downlink_bytes)),
        *(_format_count(spread) for spread in (row.uploads, row.bans)),
    )


def _format_runs(row: ComparisonRow) -> str:
    seeds = ", ".join(map(str, row.seeds[:10])) + (", ..." if row.runs > 10 else "")
    return f"{row.runs} (seed{'s' if row.runs > 1 else ''} {seeds})"


def format_metric(spread: Spread, metric: Metric) -> str:
    """Format a metric: `93.6 ± 0.6 %`, or `1.194 ± 0.021`."""
    if metric.is_share:
        return format_percent(spread)
    return metric.text(spread.mean) + (f" ± {spread.deviation:.2g}" if spread.deviation is not None else "")


def format_difference(spread: Spread, metric: Metric) -> str:
    """Format a difference of metrics: `-3.2 ± 0.4` in points, or `+0.12 ± 0.02`."""
    if metric.is_share:
        return format_points(spread)
    return f"{spread.mean:+.3g}" + (f" ± {spread.deviation:.2g}" if spread.deviation is not None else "")


def format_percent(spread: Spread) -> str:
    """Format a share: `93.6 ± 0.6 %`."""
    return f"{100 * spread.mean:.1f}{_plus_minus(spread, 0.01)} %"


def format_points(spread: Spread) -> str:
    """Format a difference of shares: `-3.2 ± 0.4`."""
    return f"{100 * spread.mean:+.1f}{_plus_minus(spread, 0.01)}"


def _format_bytes(spread: Spread) -> str:
    number, unit = format_bytes(spread.mean).split()
    return f"{number}{_plus_minus(spread, _UNITS[unit])} {unit}"


def _format_count(spread: Spread) -> str:
    return f"{spread.mean:,.{1 if spread.deviation else 0}f}{_plus_minus(spread, 1)}"


def _plus_minus(spread: Spread, unit: float) -> str:
    if spread.deviation is None:
        return ""
    return f" ± {spread.deviation / unit:,.1f}" if spread.deviation else " ± 0"
