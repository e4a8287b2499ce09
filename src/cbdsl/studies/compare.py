"""Finished runs side by side: what differs between their specs, and what came out, over the seeds of each group.

Runs whose specs differ by the seed alone are one group. Nothing here runs anything; how a comparison looks is
`report.comparison`'s affair.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from cbdsl.errors import UserError
from cbdsl.runs.folder import read_result
from cbdsl.runs.records import Summary
from cbdsl.spec import Spec, dotted_keys, option_keys, setting_values
from cbdsl.studies.sweep import FinishedRun
from cbdsl.util.formatting import format_bytes

PAIRED = "points from the best"  # the head of a column
_UNITS = {"B": 1e0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
_FOLLOWS = ("defence.declared",)  # set from other settings; named only if nothing else tells groups apart


@dataclass(frozen=True)
class Spread:
    """One number of several runs."""

    mean: float
    deviation: float | None  # sample standard deviation; none for a single run

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return Spread(fmean(values), stdev(values) if len(values) > 1 else None)


MEASURES: dict[str, Callable[[Summary], float]] = {
    "final_accuracy": lambda summary: summary.final_accuracy,
    "best_accuracy": lambda summary: summary.best_accuracy,
    "uplink_bytes": lambda summary: summary.uplink_bytes,
    "downlink_bytes": lambda summary: summary.downlink_bytes,
    "uploads": lambda summary: summary.uploads,
    "bans": lambda summary: len(summary.banned),
}


@dataclass(frozen=True)
class ComparisonRow:
    """A group in numbers."""

    settings: dict[str, Any]  # those that differ, without the seed
    runs: int
    seeds: tuple[int, ...]
    final_accuracy: Spread
    best_accuracy: Spread
    uplink_bytes: Spread
    downlink_bytes: Spread
    uploads: Spread
    bans: Spread


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Runs that differ by their seed alone."""

    label: str  # a few words, for a figure
    settings: Mapping[str, Any]
    runs: tuple[FinishedRun, ...]

    @property
    def row(self) -> ComparisonRow:
        """The group in numbers."""
        spreads = {name: Spread.of([measure(run.summary) for run in self.runs]) for name, measure in MEASURES.items()}
        seeds = tuple(run.spec.seed for run in self.runs)
        return ComparisonRow(settings=dict(self.settings), runs=len(self.runs), seeds=seeds, **spreads)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Groups of runs, and what there is to know before one believes their differences."""

    keys: tuple[str, ...]  # the settings that differ, or that were swept; dotted, without the seed
    telling: tuple[str, ...]  # as few of them as tell the groups apart
    groups: tuple[RunGroup, ...]
    common: dict[str, Any]  # the settings that all runs share
    notes: tuple[str, ...]

    @property
    def rows(self) -> tuple[ComparisonRow, ...]:
        """Every group in numbers."""
        return tuple(group.row for group in self.groups)

    @property
    def gaps(self) -> tuple[Spread | None, ...]:
        """How far each group's final accuracy is from that of the best one, seed by seed.

        None for the best one itself, and where seeds are others or fewer than two.
        """
        best = max(self.groups, key=lambda group: group.row.final_accuracy.mean)
        return tuple(None if group is best else _gap(group, best) for group in self.groups)

    @property
    def runs(self) -> tuple[FinishedRun, ...]:
        """All runs, group by group."""
        return tuple(run for group in self.groups for run in group.runs)


def compare(folders: Sequence[Path]) -> Comparison:
    """Read the folders of finished runs and group them."""
    found, damaged = [], []
    for folder in folders:
        try:
            found.append(_finished(folder))
        except UserError as error:
            damaged.append(str(error))
    if damaged:
        more = f" And {len(damaged) - 10:,} more." if len(damaged) > 10 else ""
        raise UserError(" ".join(damaged[:10]) + more)
    return group_results(found)


def group_results(results: Sequence[FinishedRun], axes: Sequence[str] | None = None) -> Comparison:
    """Group runs that differ by their seed alone, in the order in which they come.

    axes: the settings that were swept, which then describe the groups; all that differ if not given.
    """
    if not results:
        raise UserError("There is nothing to compare. Give the folders of one or more finished runs.")
    distinct, notes = _distinct(results)
    by_spec: dict[Spec, list[FinishedRun]] = {}
    for result in distinct:
        by_spec.setdefault(replace(result.spec, seed=0), []).append(result)
    every = [key for key in (*dotted_keys(), *option_keys(by_spec)) if key not in {"seed", "options"}]
    values = [setting_values(spec, every) for spec in by_spec]
    differing = [key for key in every if any(one[key] != values[0][key] for one in values)]
    keys = differing if axes is None else [key for key in axes if key != "seed"]
    keys += ["shared"] * ("shared" in differing and "shared" not in keys)  # methods bring their own: say so
    if not _apart(keys, values):  # something differs that was not swept
        keys += [key for key in differing if key not in keys]
    telling = _telling(keys, values)
    groups = tuple(
        RunGroup(
            ", ".join(short_words(key, one[key]) for key in telling) or spec.method,
            {key: one[key] for key in keys},
            tuple(sorted(runs, key=lambda run: run.spec.seed)),
        )
        for (spec, runs), one in zip(by_spec.items(), values, strict=True)
    )
    common = {key: values[0][key] for key in every if key not in differing}
    cautions = _cautions(groups, differing, values)
    return Comparison(tuple(keys), tuple(telling), groups, common, (*notes, *cautions))


def comparison_rows(comparison: Comparison) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The headings and the cells of a table for people, one row a group."""
    heads = (*comparison.keys, "runs", "final accuracy", "best accuracy", "uplink", "downlink", "uploads", "bans")
    rows = [_cells(row, comparison.keys) for row in comparison.rows]
    gaps = comparison.gaps
    if any(gaps):
        heads = (*heads, PAIRED)
        rows = [(*row, points_words(gap) if gap else "") for row, gap in zip(rows, gaps, strict=True)]
    return heads, rows


def csv_text(comparison: Comparison) -> str:
    """One line a group: its settings, its runs and seeds, then mean and standard deviation of every measure."""
    text = io.StringIO(newline="")
    measured = [name for measure in MEASURES for name in (f"{measure}_mean", f"{measure}_deviation")]
    writer = csv.writer(text)
    gap_heads = ("gap_to_best_mean", "gap_to_best_deviation")  # of the final accuracy, seed by seed
    writer.writerow([*comparison.keys, "runs", "seeds", *measured, *gap_heads])
    for row, gap in zip(comparison.rows, comparison.gaps, strict=True):
        spreads = [getattr(row, measure) for measure in MEASURES]
        numbers = [number for spread in spreads for number in (spread.mean, spread.deviation)]
        settings = [value_words(row.settings[key]) for key in comparison.keys]
        behind = (gap.mean, gap.deviation) if gap else ("", "")
        writer.writerow([*settings, row.runs, " ".join(map(str, row.seeds)), *numbers, *behind])
    return text.getvalue()


def run_words(run: FinishedRun, keys: Sequence[str]) -> str:
    """What tells a run from the others: `swarm.inertia 0.5, seed 3`."""
    values = setting_values(run.spec, [*(key for key in keys if key != "seed"), "seed"])
    return ", ".join(f"{key} {value_words(value)}" for key, value in values.items())


def value_words(value: object) -> str:
    """A setting's value as people read it."""
    if isinstance(value, (tuple, list)):
        words = [value_words(item) for item in value]
        return words[0] if len(set(words)) == 1 else " to ".join(words)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def short_words(key: str, value: object) -> str:
    """A setting in a label: a word stands for itself, a number comes with its name."""
    name = key.rpartition(".")[2]
    if isinstance(value, bool):
        return name if value else f"no {name}"
    if isinstance(value, str) and key != "shared":
        return Path(value).name or f"no {name}"
    return f"{name.replace('_', ' ')} {value_words(value)}"


def _gap(group: RunGroup, best: RunGroup) -> Spread | None:
    seeds, others = ([run.spec.seed for run in one.runs] for one in (group, best))
    if seeds != others or len(seeds) < 2:
        return None
    pairs = zip(group.runs, best.runs, strict=True)
    return Spread.of([one.summary.final_accuracy - other.summary.final_accuracy for one, other in pairs])


def _finished(folder: Path) -> FinishedRun:
    if not (folder / "summary.json").exists():
        for many in (folder, folder / "runs"):
            if next(many.glob("*/spec.toml"), None) is not None:
                raise UserError(f"{folder} is not the folder of a run but of many. Give some of them, or all: {many}/*")
    spec, summary, rounds = read_result(folder)
    return FinishedRun(spec, summary, tuple(rounds), folder)


def _distinct(results: Sequence[FinishedRun]) -> tuple[list[FinishedRun], list[str]]:
    """Every run once: the same run again would pass for another seed."""
    kept: dict[tuple[object, ...], FinishedRun] = {}
    twice = False
    for result in results:
        identity = (result.spec, tuple((line.test_accuracy, line.uplink_bytes) for line in result.rounds))
        twice |= kept.setdefault(identity, result).folder.resolve() != result.folder.resolve()
    notes = ["Some folders hold the same run, spec, seed and numbers alike; it counts once."] if twice else []
    if len({result.spec for result in kept.values()}) < len(kept):
        notes.append("Some runs have the same spec and seed and yet other numbers; each of them counts.")
    return list(kept.values()), notes


def _telling(keys: Sequence[str], values: Sequence[Mapping[str, Any]]) -> list[str]:
    """As few of the keys as tell all groups apart; words stay rather than numbers, the first rather than the last."""
    chosen = list(keys)
    last_first = keys[::-1]
    for key in sorted(last_first, key=lambda key: (key not in _FOLLOWS, isinstance(values[0][key], (str, bool)))):
        fewer = [other for other in chosen if other != key]
        if _apart(fewer, values):
            chosen = fewer
    return chosen


def _apart(keys: Sequence[str], values: Sequence[Mapping[str, Any]]) -> bool:
    """Whether some settings tell all groups apart."""
    return len({tuple(one[key] for key in keys) for one in values}) == len(values)


def _cautions(groups: Sequence[RunGroup], differing: Sequence[str], values: Sequence[Mapping[str, Any]]) -> list[str]:
    """What makes a comparison less than like with like."""
    summaries = [run.summary for group in groups for run in group.runs]
    notes = ["One run alone: there is nothing to compare it with."] if len(summaries) == 1 else []
    held = [key for key in differing if key.startswith("data.") and key != "data.source"]
    if "data.source" in differing:
        notes.append(f"The data differ ({_either(values, 'data.source')}): accuracies are not of the same test set.")
    if held:
        notes.append(f"What workers and server hold differs ({', '.join(held)}).")
    sizes = sorted({summary.parameters for summary in summaries})
    if "model" in differing or len(sizes) > 1:
        words = " and ".join(f"{count:,}" for count in sizes)
        notes.append(f"The models differ ({_either(values, 'model')}; {words} parameters).")
    custom = [what for what, key in (("model", "model"), ("data", "data.source")) if _given_in_python(values, key)]
    if len(summaries) > 1 and custom:
        notes.append(f"The {' and the '.join(custom)} came from Python: whether all runs had the same, no spec says.")
    if "rounds" in differing:
        notes.append(f"Some runs are longer than others ({_either(values, 'rounds')} rounds).")
    for what in ("engine", "version"):
        found = sorted({getattr(summary, what) for summary in summaries})
        if len(found) > 1:
            notes.append(f"Not the same {what} played all runs: {', '.join(found)}.")
    if len({tuple(run.spec.seed for run in group.runs) for group in groups}) > 1:
        notes.append("The groups do not have the same seeds, so their differences are not paired.")
    return notes


def _either(values: Sequence[Mapping[str, Any]], key: str) -> str:
    return ", ".join(dict.fromkeys(value_words(one[key]) for one in values))


def _given_in_python(values: Sequence[Mapping[str, Any]], key: str) -> bool:
    return any(one[key] == "custom" for one in values)


def _cells(row: ComparisonRow, keys: Sequence[str]) -> tuple[str, ...]:
    return (
        *(value_words(row.settings[key]) for key in keys),
        _runs(row),
        *(percent_words(spread) for spread in (row.final_accuracy, row.best_accuracy)),
        *(_bytes(spread) for spread in (row.uplink_bytes, row.downlink_bytes)),
        *(_count(spread) for spread in (row.uploads, row.bans)),
    )


def _runs(row: ComparisonRow) -> str:
    seeds = ", ".join(map(str, row.seeds[:10])) + (", ..." if row.runs > 10 else "")
    return f"{row.runs} (seed{'s' if row.runs > 1 else ''} {seeds})"


def percent_words(spread: Spread) -> str:
    """A share as people read it: `93.6 ± 0.6 %`."""
    return f"{100 * spread.mean:.1f}{_plus_minus(spread, 0.01)} %"


def points_words(spread: Spread) -> str:
    """A difference of shares as people read it: `-3.2 ± 0.4`."""
    return f"{100 * spread.mean:+.1f}{_plus_minus(spread, 0.01)}"


def _bytes(spread: Spread) -> str:
    number, unit = format_bytes(spread.mean).split()
    return f"{number}{_plus_minus(spread, _UNITS[unit])} {unit}"


def _count(spread: Spread) -> str:
    return f"{spread.mean:,.{1 if spread.deviation else 0}f}{_plus_minus(spread, 1)}"


def _plus_minus(spread: Spread, unit: float) -> str:
    if spread.deviation is None:
        return ""
    return f" ± {spread.deviation / unit:,.1f}" if spread.deviation else " ± 0"
