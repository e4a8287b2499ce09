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

from cbdsl.errors import UserError, unknown
from cbdsl.runs.metrics import Metric, find_metric
from cbdsl.runs.records import Summary
from cbdsl.spec import Spec, dotted_keys, full_key, option_keys, setting_values, unknown_setting
from cbdsl.studies.sweep import FinishedRun, read_run
from cbdsl.util.formatting import format_bytes
from cbdsl.util.paired_test import PairedTest, least_exact_p

PAIRED = "points from the best [95 %]"  # the head of a column, for shares; for other metrics:
APART = "from the best [95 %]"
_UNITS = {"B": 1e0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
ORDERS = ("given", "best", "label")
_SAME_SAMPLES = ("data.source", "data.local_test_every")  # settings of data beside those that deal samples
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
_WHERE_MEASURED: dict[str, Callable[[Summary], float | None]] = {
    "attack_success": lambda summary: summary.attack_success,
    "aimed_accuracy": lambda summary: summary.aimed_accuracy,
    "worst_tenth": lambda summary: summary.worst_tenth,
    "server_alone": lambda summary: summary.server_alone.value if summary.server_alone else None,
    "epsilon": lambda summary: summary.epsilon,
    "local_mean": lambda summary: _local(summary, "metrics", "mean"),
    "local_worst_tenth": lambda summary: _local(summary, "metrics", "worst_tenth"),
    "personal_mean": lambda summary: _local(summary, "personal", "mean"),
    "personal_worst_tenth": lambda summary: _local(summary, "personal", "worst_tenth"),
}


def _local(summary: Summary, models: str, statistic: str) -> float | None:
    """Return a statistic of the main metric on what workers held back, of `metrics` or `personal` models."""
    found = getattr(summary.local_test, models, {}).get(summary.metric)
    return None if found is None else getattr(found, statistic)


class _AttackSuccess(Metric):
    title, better, is_share = "attack success", "lower", True


class _Epsilon(Metric):
    title, better = "epsilon", "lower"


_OWN_METRICS: Mapping[str, Callable[[], Metric]] = {"attack_success": _AttackSuccess, "epsilon": _Epsilon}


_TITLES = {"uplink_bytes": "uplink", "downlink_bytes": "downlink"}


@dataclass(frozen=True, eq=False)
class Measure:
    """A number of a run that groups are compared by."""

    name: str  # of columns for programs
    title: str  # of columns for people
    of: Callable[[Summary], float]
    metric: Metric | None = None  # None: bytes or counts

    def spread(self, group: RunGroup) -> Spread:
        """Return mean and deviation over the runs of a group."""
        return Spread.of([self.of(run.summary) for run in group.runs])

    def text(self, spread: Spread) -> str:
        """Format mean and deviation."""
        if self.metric is not None:
            return format_metric(spread, self.metric)
        return _format_bytes(spread) if self.name.endswith("bytes") else _format_count(spread)

    def difference(self, value: float) -> str:
        """Format a difference with its sign; one of shares in points."""
        if self.metric is not None:
            return f"{100 * value:+.1f}" if self.metric.is_share else f"{value:+.3g}"
        size = format_bytes(abs(value)) if self.name.endswith("bytes") else f"{abs(value):,.1f}"
        return f"{'-' if value < 0 else '+'}{size}"

    def interval(self, test: PairedTest) -> str:
        """Format a mean difference and its confidence interval: `-3.2 [-5.0, -1.4]`."""
        return f"{self.difference(test.mean)} [{self.difference(test.low)}, {self.difference(test.high)}]"


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
    against: str = ""  # the label of the group that the others are tested against; empty: the best one
    labelled: bool = False  # whether a user gave labels, so that they get a column

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
    def reference(self) -> RunGroup:
        """The group that the others are tested against."""
        return next((group for group in self.groups if self.against and group.label == self.against), self.ranked[0])

    @property
    def paired_head(self) -> str:
        """The head of the column of differences from the reference."""
        head = PAIRED if self.metric.is_share else APART
        return head.replace("the best", self.against) if self.against else head

    @property
    def gaps(self) -> tuple[Spread | None, ...]:
        """Return the differences of the main metric at the end from the reference, paired by seed.

        None for the reference itself, and where the seeds differ or are fewer than two.
        """
        tests = self.tests(self.measures["final"])
        return tuple(Spread(test.mean, test.deviation) if test else None for test in tests)

    @property
    def measures(self) -> dict[str, Measure]:
        """The measures by which groups can be compared; the main metric at the end comes first."""
        summaries = [run.summary for run in self.runs]
        main, metrics = self.metric_name.replace("-", "_"), {"final": self.metric, "best": self.metric}
        found = {
            name: Measure(
                f"{name}_{main}" if name in metrics else name,
                f"{name} {self.metric.title}" if name in metrics else _TITLES.get(name, name),
                of,
                metrics.get(name),
            )
            for name, of in MEASURES.items()
        }
        for name in summaries[0].metrics:
            if name != self.metric_name and all(one.metrics.get(name) is not None for one in summaries):
                metric = find_metric(name)
                found[name] = Measure(name.replace("-", "_"), metric.title or name, _metric_of(name), metric)
        for name, of_some in _WHERE_MEASURED.items():
            if all(of_some(one) is not None for one in summaries):
                metric = _OWN_METRICS.get(name, lambda: self.metric)()
                found[name] = Measure(name, name.replace("_", " "), _number_of(of_some), metric)
        return found

    def tests(self, measure: Measure) -> tuple[PairedTest | None, ...]:
        """Test every group against the reference, paired by seed; None where `gaps` has none."""
        return tuple(
            None if group is self.reference else _test(group, self.reference, measure) for group in self.groups
        )

    def arranged(self, labels: Mapping[str, str] | None = None, order: str = "given", against: str = "") -> Comparison:
        """Return the comparison with other labels, another order of groups, or another reference.

        labels: new labels by the old ones. order: given, best (first) or label. against: the reference's label.
        """
        known = {group.label: group for group in self.groups}
        for label in labels or {}:
            if label not in known:
                raise unknown("group", label, known)
        if order not in ORDERS:
            raise unknown("order", order, ORDERS)
        renamed = {old: (labels or {}).get(old, old) for old in known}
        if len(set(renamed.values())) < len(renamed):
            raise UserError(
                f"Two groups have the same label ({', '.join(renamed.values())}). Give each another one.",
                code="conflict",
            )
        if against and against not in {*renamed, *renamed.values()}:
            raise unknown("group", against, renamed.values())
        found = replace(
            self,
            groups=tuple(replace(group, label=renamed[group.label]) for group in self.groups),
            against=renamed.get(against, against),
            labelled=self.labelled or bool(labels),
        )
        orders = {"given": found.groups, "best": found.ranked, "label": sorted(found.groups, key=lambda g: g.label)}
        return replace(found, groups=tuple(orders[order]))

    @property
    def runs(self) -> tuple[FinishedRun, ...]:
        """Return all runs, group by group."""
        return tuple(run for group in self.groups for run in group.runs)


def compare(folders: Sequence[Path]) -> Comparison:
    """Read the folders of finished runs and group them."""
    return group_results(read_folders(folders))


def read_folders(folders: Sequence[Path]) -> list[FinishedRun]:
    """Read the folders of finished runs; one error names all that cannot be read."""
    found, damaged = [], []
    for folder in folders:
        try:
            found.append(_read_folder(folder))
        except UserError as error:
            damaged.append(str(error))
    if damaged:
        more = f" And {len(damaged) - 10:,} more." if len(damaged) > 10 else ""
        raise UserError(" ".join(damaged[:10]) + more, code="unreadable-file")
    return found


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
            ", ".join(
                describe_setting(key, _name_method(spec, key, one[key]))
                for key in distinguishing
                if one[key] is not None  # an option of a part that this group does not have
            )
            or _name_method(spec, "method", spec.method),
            {key: one[key] for key in keys},
            tuple(sorted(runs, key=lambda run: run.spec.seed)),
        )
        for (spec, runs), one in zip(by_spec.items(), values, strict=True)
    )
    common = {key: values[0][key] for key in every if key not in differing}
    cautions = _find_cautions(groups, differing, values)
    return Comparison(tuple(keys), tuple(distinguishing), groups, common, (*notes, *cautions))


def sort_sweep(results: Sequence[FinishedRun], axes: Sequence[str], own: int) -> tuple[list[FinishedRun], list[str]]:
    """Return the runs of a sweep's folder in the order of their settings, and the settings in which they differ.

    axes: the settings that were swept last. own: how many of the results, the first ones, belong to that sweep; if all
    do, their order stays.
    """
    keys = list(axes)
    if own == len(results):
        return list(results), keys
    values = [setting_values(run.spec, keys) for run in results]
    if not _distinguish(keys, values):
        every = [key for key in (*dotted_keys(), *option_keys(run.spec for run in results)) if key != "options"]
        values = [setting_values(run.spec, every) for run in results]
        keys += [key for key in every if key not in keys and any(one[key] != values[0][key] for one in values)]
    ranks = {key: _rank([one[key] for one in values]) for key in keys}
    order = sorted(range(len(results)), key=lambda place: [ranks[key][values[place][key]] for key in keys])
    return [results[place] for place in order], keys


def _rank(values: Sequence[Any]) -> dict[Any, int]:
    """Return the rank of each value: numbers by size, others by first occurrence."""
    distinct = list(dict.fromkeys(values))
    if all(isinstance(value, (int, float)) for value in distinct):
        distinct.sort()
    return {value: rank for rank, value in enumerate(distinct)}


def group_blocks(results: Sequence[FinishedRun], within: Sequence[str] = ()) -> dict[str, Comparison]:
    """Group the runs of each combination of some settings' values by themselves, by a title: `alie, byzantine 3`.

    A group is then tested only against groups with the same values. Numbers come by size, words by the alphabet.
    Without such settings all runs are one block without a title.
    """
    if not within:
        return {"": group_results(results)}
    keys = [full_key(key) for key in within]
    known = [*dotted_keys(), *option_keys(result.spec for result in results)]
    for key in keys:
        if key not in known:
            raise unknown_setting(key)
    found: dict[tuple[Any, ...], list[FinishedRun]] = {}
    for result in results:
        found.setdefault(tuple(setting_values(result.spec, keys).values()), []).append(result)
    if len(found) < 2:
        raise UserError(
            f"All runs have the same {' and '.join(keys)}. Name settings in which they differ.",
            code="no-effect",
        )
    columns = [_rank(sorted(set(column), key=_sort_key)) for column in zip(*found, strict=True)]
    order = sorted(found, key=lambda values: [ranks[value] for ranks, value in zip(columns, values, strict=True)])
    return {", ".join(map(describe_setting, keys, values)): group_results(found[values]) for values in order}


def _sort_key(value: object) -> tuple[bool, str]:
    return isinstance(value, str), str(value)


def group_labelled(groups: Mapping[str, Sequence[FinishedRun]]) -> Comparison:
    """Group runs by the given labels, whatever their specs are."""
    empty = [label for label, runs in groups.items() if not runs]
    if empty:
        raise UserError(f"The group {empty[0]} has no runs. Leave it out, or give finished runs.", code="missing-file")
    whole = group_results([run for runs in groups.values() for run in runs])
    made = tuple(
        RunGroup(label, {}, tuple(sorted(runs, key=lambda run: run.spec.seed))) for label, runs in groups.items()
    )
    return replace(whole, keys=(), distinguishing=(), groups=made, labelled=True)


def comparison_rows(comparison: Comparison) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the headings and the cells of a table, one row per group."""
    title = comparison.metric.title
    heads = (*comparison.keys, "runs", f"final {title}", f"best {title}", "uplink", "downlink", "uploads", "bans")
    rows = [_cells(row, comparison.keys, comparison.metric) for row in comparison.rows]
    measure = comparison.measures["final"]
    tests = comparison.tests(measure)
    if any(tests):
        heads = (*heads, comparison.paired_head, "p (t)", "p (exact)")
        rows = [(*row, *_test_cells(measure, test)) for row, test in zip(rows, tests, strict=True)]
    return heads, rows


def describe_spread(comparison: Comparison) -> str:
    """Return a sentence that explains ±."""
    seeds = {row.seeds for row in comparison.rows}
    if max(map(len, seeds)) == 1:
        return ""
    over = f"seeds {', '.join(map(str, next(iter(seeds))))}" if len(seeds) == 1 else "the seeds of each group"
    return f"±: sample standard deviation over {over}."


def describe_tests(comparison: Comparison) -> str:
    """Return a note on the paired tests of a comparison and the limits of few seeds; "" without tests."""
    tests = [test for test in comparison.tests(comparison.measures["final"]) if test]
    if not tests:
        return ""
    count, reference = tests[0].count, comparison.reference.label
    chosen = "" if comparison.against else ", which was chosen by the same numbers"
    several = f" p-values are not corrected for {len(tests)} comparisons." if len(tests) > 1 else ""
    return (
        f"Differences from {reference}{chosen}, paired over {count} seeds, with the 95 % interval and the two-sided p "
        f"of a paired t-test. p (exact): sign-flip permutation test; with {count} seeds it cannot be below "
        f"{format_p(least_exact_p(count))}.{several}"
    )


def format_p(p: float | None) -> str:
    """Format a p-value."""
    return "" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def format_csv(comparison: Comparison) -> str:
    """Return one line per group; see `table_rows`."""
    return format_csv_blocks({"": comparison})


def format_csv_blocks(blocks: Mapping[str, Comparison]) -> str:
    """Return one line per group; see `block_rows`."""
    text = io.StringIO(newline="")
    rows = block_rows(blocks)
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    settings = {key for comparison in blocks.values() for key in comparison.keys}
    for row in rows:
        plain = {name: format_value(value) if name in settings else value for name, value in row.items()}
        writer.writerow({**plain, "seeds": " ".join(map(str, row["seeds"]))})
    return text.getvalue()


def block_rows(blocks: Mapping[str, Comparison]) -> list[dict[str, Any]]:
    """Return the rows of comparisons by title; the column `within` is the title, if there is one."""
    return [
        {**({"within": title} if title else {}), **row}
        for title, comparison in blocks.items()
        for row in table_rows(comparison)
    ]


def table_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Return one row per group: settings, runs, seeds, mean and deviation of every measure, label and paired tests."""
    measures = comparison.measures
    tests = {name: comparison.tests(measure) for name, measure in measures.items()}
    rows = []
    for place, group in enumerate(comparison.groups):
        row: dict[str, Any] = {key: group.settings[key] for key in comparison.keys}
        row |= {"runs": len(group.runs), "seeds": tuple(run.spec.seed for run in group.runs)}
        for measure in measures.values():
            spread = measure.spread(group)
            row |= {f"{measure.name}_mean": spread.mean, f"{measure.name}_deviation": spread.deviation}
        gap = tests["final"][place]
        row |= {"gap_to_best_mean": gap and gap.mean, "gap_to_best_deviation": gap and gap.deviation}
        row["label"] = group.label
        for name, measure in measures.items():
            test = tests[name][place]
            for column in ("mean", "low", "high", "p", "exact_p"):
                head = "difference" if column == "mean" else column
                row[f"{measure.name}_{head}"] = getattr(test, column, None)
        rows.append(row)
    return rows


def describe_run(run: FinishedRun, keys: Sequence[str]) -> str:
    """Describe what distinguishes a run: `swarm.inertia 0.5, seed 3`."""
    values = setting_values(run.spec, [*(key for key in keys if key != "seed"), "seed"])
    found = [f"{key} {format_value(value)}" for key, value in values.items() if value is not None]
    return ", ".join([run.spec.method, *found] if len(found) == 1 < len(values) else found)


def format_value(value: object) -> str:
    """Format the value of a setting; nothing for None, which an option has where its part is not in use."""
    if value is None:
        return ""
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


def _name_method(spec: Spec, key: str, value: Any) -> Any:  # noqa: ANN401 - any value of a spec
    """Return a setting's value for a label: the method `restart` with rotation is called rotation."""
    rotates = key == "method" and value == "restart" and spec.selection.name == "rotation"
    return "rotation" if rotates else value


def _metric_of(name: str) -> Callable[[Summary], float]:
    return _number_of(lambda summary: summary.metrics[name])


def _number_of(value: Callable[[Summary], float | None]) -> Callable[[Summary], float]:
    def of(summary: Summary) -> float:
        found = value(summary)
        return math.nan if found is None else found

    return of


def _test(group: RunGroup, reference: RunGroup, measure: Measure) -> PairedTest | None:
    seeds, others = ([run.spec.seed for run in one.runs] for one in (group, reference))
    if seeds != others or len(seeds) < 2:
        return None
    pairs = zip(group.runs, reference.runs, strict=True)
    differences = [measure.of(one.summary) - measure.of(other.summary) for one, other in pairs]
    return PairedTest.of(differences) if all(map(math.isfinite, differences)) else None


def _test_cells(measure: Measure, test: PairedTest | None) -> tuple[str, ...]:
    return (measure.interval(test), format_p(test.p), format_p(test.exact_p)) if test else ("",) * 3


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
    held = [key for key in differing if key.startswith("data.") and key not in _SAME_SAMPLES]
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
