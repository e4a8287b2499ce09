"""Grids of specs, and tasks that run them in parallel, each in a folder named by the hash of its whole spec.

A finished run is recognised by that hash and not run again; a stopped run continues. All studies are built on this.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cbdsl.errors import UserError, shown
from cbdsl.runs import loop
from cbdsl.runs.build import build_method
from cbdsl.runs.callbacks import Callback
from cbdsl.runs.folder import read_result
from cbdsl.runs.loop import Watch
from cbdsl.runs.metrics import find_metric
from cbdsl.runs.records import RoundRecord, Summary
from cbdsl.runs.resolve import explain_no_effect, refuse_idle, resolve
from cbdsl.spec import Spec, parse_setting, setting_values, words, write_out
from cbdsl.studies.pool import divide_cores, run_pool
from cbdsl.util.files import write_atomically

OnProgress = Callable[[int, int, float], None]
"""Called with the finished rounds, all rounds, and the finished share of the work."""

OTHER_STUDIES = ("tuning.json", "contest.json", "plan.json", "study.json", "spec.toml")
"""Files by which the folders of other commands are known."""

_MOST_POINTS = 100_000  # runs of one grid


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """A finished run, as read from its folder."""

    spec: Spec
    summary: Summary
    rounds: tuple[RoundRecord, ...]
    folder: Path

    def __repr__(self) -> str:
        """Return the spec, the main result and the folder in one line."""
        metric = find_metric(self.summary.metric)
        return f"<{self.spec!r}: {metric.title} {metric.text(self.summary.final_value)}, in {self.folder}>"


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """Parse `key=0..4` or `key=a,b,c` of the command line; return the setting and its values."""
    key, _ = parse_setting(text)
    values = text.partition("=")[2].strip()
    first, dots, last = values.partition("..")
    span: list[Any]
    if dots and _is_number(first) and _is_number(last):
        span = list(range(int(first), min(int(last) + 1, int(first) + _MOST_POINTS + 1)))
    else:
        whole = parse_setting(f"{key}=[{values}]")[1]  # numbers, pairs and quoted words, in TOML
        span = whole if isinstance(whole, list) else list(words(values))
    if not span:
        reason = f"the range {values} is empty" if dots else "there are no values"
        raise UserError(
            f"{shown(text)}: {reason}. Write --over seed=0..4 or --over swarm.inertia=0.5,0.9.", code="out-of-range"
        )
    if dots and isinstance(span[0], str):
        raise UserError(
            f"{shown(text)}: a range consists of whole numbers, first..last. List other values, as in --over "
            "swarm.inertia=0.1,0.5,0.9.",
            code="wrong-type",
        )
    return key, span


def grid(start: Spec, axes: Sequence[tuple[str, Sequence[Any]]], given: Mapping[str, Any] | None = None) -> list[Spec]:
    """Return a spec for every combination of the axes' values. given: settings of every spec; no axis resets them."""
    keys = [key for key, _ in axes]
    if len(set(keys)) != len(keys):
        raise UserError(f"A setting can be swept once; given {', '.join(keys)}.", code="conflict")
    if math.prod(len(values) for _, values in axes) > _MOST_POINTS:
        raise UserError(f"A grid of more than {_MOST_POINTS:,} runs is too large. Use fewer values.", code="too-large")
    points = itertools.product(*(values for _, values in axes))
    return [start.with_settings({**(given or {}), **dict(zip(keys, point, strict=True))}) for point in points]


@dataclass(frozen=True)
class SweepPlan:
    """The runs of a sweep."""

    specs: tuple[Spec, ...]  # resolved, each once
    axes: tuple[str, ...]  # the settings that vary
    note: str = ""  # which combinations are the same run


def plan_sweep(
    start: Spec,
    axes: Sequence[tuple[str, Sequence[Any]]],
    given: Mapping[str, Any] | None = None,
    also: Sequence[str] = (),
) -> SweepPlan:
    """Return every combination of the axes' values, resolved, so that errors are found before the first run.

    Combinations that differ only in settings without effect are one run, with those settings as in the starting spec.
    given: settings of every spec; no axis resets them. also: further settings from the user; see `refuse_idle`.
    """
    keys = tuple(key for key, _ in axes)
    points = [write_out(point) for point in grid(start, axes, given)]
    idle = [{key: why for key in keys if (why := explain_no_effect(key, point))} for point in points]
    for key in keys:
        if all(key in found for found in idle):
            raise UserError(idle[0][key], code="no-effect")
    base = setting_values(start, keys)
    first = {key: values[0] for key, values in axes}
    specs = []
    for point, found in zip(grid(start, axes, given), idle, strict=True):
        same = {key: first[key] if base[key] is None else base[key] for key in found}
        specs.append(resolve(point.with_settings({key: _as_plain(value) for key, value in same.items()})))
    refuse_idle(specs, also)
    distinct = tuple(dict.fromkeys(specs))
    repeated = len(specs) - len(distinct)
    note = ""
    if repeated and any(idle):
        why = next(why for found in idle for why in found.values())
        note = f"{repeated} of {len(specs)} combinations are the same run as another one, and run once. {why}"
    return SweepPlan(distinct, keys, note)


def _as_plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _is_number(text: str) -> bool:
    return text.strip().isdecimal() and len(text) < 100


@dataclass(frozen=True)
class TaskKind:
    """A kind of work on a spec: a run, a trial of a search, a measurement of the theory."""

    name: str
    function: str  # module:function; see `pool.TaskFunction`
    done_file: str  # exists in the folder of a finished task
    parent: str  # the folder in `out` with the folders of these tasks
    factor: float = 1.0  # how much longer it takes than a run
    with_run: bool = False  # whether it also makes the run itself


RUN = TaskKind("run", f"{__name__}:run_or_resume", "summary.json", "runs")


@dataclass(frozen=True)
class Task:
    """One kind of work on one spec."""

    spec: Spec
    kind: TaskKind = RUN

    def folder(self, out: Path) -> Path:
        """Return the folder of its results, named by the hash of the whole spec."""
        return out / self.kind.parent / self.spec.key()

    def is_done(self, out: Path) -> bool:
        """Return whether its result exists."""
        exists = (self.folder(out) / self.kind.done_file).exists()
        return exists and (not self.kind.with_run or Task(self.spec).is_done(out))

    @property
    def work(self) -> float:
        """Return roughly how long it takes, without a unit, for the order of tasks and the time that is left."""
        return self.spec.rounds * self.round_work

    @property
    def round_work(self) -> float:
        """Return the work of one round: samples that go forward through the network; training counts three times."""
        spec, data, method = self.spec, self.spec.data, build_method(self.spec)
        own = data.shard_size * data.shards_per_worker if data.partition == "shards" else data.samples_per_worker
        training = 0
        if method.gradients:
            per_epoch = own + data.shared_training * spec.shares_training
            training = 3 * (spec.local.steps * spec.local.batch_size or spec.local.epochs * per_epoch)
        scoring = 0
        if method.conversation == "swarm":
            scoring = data.shared_scoring if spec.shares_scoring else own
        return self.kind.factor * spec.participants * (training + scoring)


def run_all(
    specs: Sequence[Spec],
    out: Path,
    jobs: int | None = None,
    on_progress: OnProgress | None = None,
    on: str | None = None,
) -> list[FinishedRun]:
    """Run every spec that is not finished in `out`/runs; return the results in the order of the specs.

    jobs: processes at a time; one per core if not given. Together they use as many threads as there are cores.
    on: a Ray cluster to run on, see `cbdsl.run`.
    """
    tasks = [Task(resolve(spec)) for spec in specs]
    run_tasks(tasks, out, jobs, on_progress, on)
    return [read_run(task.folder(out)) for task in tasks]


def run_tasks(
    tasks: Sequence[Task],
    out: Path,
    jobs: int | None = None,
    on_progress: OnProgress | None = None,
    on: str | None = None,
) -> None:
    """Run every unfinished task once, in the order given, here or on a cluster; raise UserError if any failed."""
    failed = try_tasks(tasks, out, jobs, on_progress, on)
    if failed:
        raise explain_failures(failed, len(set(tasks)), out)


def explain_failures(failed: Sequence[str], tasks: int, out: Path) -> UserError:
    """Return the error for tasks that failed while the others were finished. tasks: the number of all."""
    return UserError(
        f"{len(failed)} of {tasks} runs failed: {' '.join(failed[:10])} The others are in {out}. Correct this or leave "
        "it out, and repeat the command; finished runs are not repeated.",
        code="task-failed",
    )


def try_tasks(
    tasks: Sequence[Task],
    out: Path,
    jobs: int | None = None,
    on_progress: OnProgress | None = None,
    on: str | None = None,
) -> list[str]:
    """Run tasks as `run_tasks` does, and return the messages of those that failed."""
    distinct = dict.fromkeys(tasks)
    total, work = sum(task.spec.rounds for task in distinct), sum(task.work for task in distinct) or 1.0
    missing = [task for task in distinct if not task.is_done(out)]
    before = {task: _count_rounds(task, out) if task in missing else task.spec.rounds for task in distinct}
    played, worked = sum(before.values()), sum(count * task.round_work for task, count in before.items())
    report = on_progress or (lambda _played, _total, _share: None)
    report(played, total, worked / work)
    failed: list[str] = []
    if not missing:
        return failed
    with closing(run_pool(missing, out, jobs, on)) as pool:  # closed while there is still a cluster
        for progress in pool:
            failed += progress.failed
            played, worked = played + len(progress.rounds), worked + sum(progress.rounds)
            report(min(played, total), total, min(worked / work, 1.0))
    if not failed:
        report(total, total, 1.0)
    return failed


def refuse_other_results(out: Path, own: str, others: Sequence[str]) -> None:
    """Refuse the folder of another study: its results would be overwritten.

    own: a file of a folder of the same kind. others: files of folders of other kinds.
    """
    found = [name for name in others if (out / name).exists()]
    if found and not (out / own).exists():
        raise UserError(
            f"{out} has the results of another command ({found[0]}); nothing was changed. Give another --out.",
            code="exists-already",
        )


def read_sweep(out: Path, first: Sequence[Spec]) -> list[FinishedRun]:
    """Read all finished runs in the folder of a sweep, the `first` ones in their order before the others."""
    own = [Task(spec).folder(out) for spec in first]
    others = sorted(path.parent for path in (out / RUN.parent).glob(f"*/{RUN.done_file}"))
    found = [read_run(folder) for folder in own]
    for folder in others:
        if folder not in own:
            with suppress(UserError):  # of a run that this command did not ask for
                found.append(read_run(folder))
    metrics = {run.summary.metric for run in found[: len(own)]}
    return [run for run in found if run.summary.metric in metrics]


def write_table(results: Sequence[FinishedRun], axes: Sequence[str], out: Path) -> None:
    """Write results.csv and results.jsonl with one row per run: the swept settings, then the summary."""
    rows = [{**setting_values(result.spec, axes), **result.summary.to_json()} for result in results]
    write_rows(rows, out)


def write_rows(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Write rows with the same keys as results.csv and results.jsonl."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows({key: _format_cell(value) for key, value in row.items()} for row in rows)
    write_atomically(out / "results.csv", text.getvalue().encode())
    write_atomically(out / "results.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())


class _RoundReporter(Callback):
    """Calls a function after every round."""

    def __init__(self, report: Callable[[object], None]) -> None:
        self._report = report

    def round(self, record: RoundRecord) -> None:
        self._report(record)


def run_or_resume(
    spec: Spec, folder: Path, threads: int, report: Callable[[object], None], watch: Watch | None = None
) -> None:
    """Run a spec in a folder, or resume its run there."""
    callbacks = [_RoundReporter(report)]
    baseline = folder.parent.parent / "server_alone" if spec.shared == "both" else False
    if (folder / "spec.toml").exists():
        loop.resume(folder, threads=threads, baseline=baseline, callbacks=callbacks)
    else:
        loop.run_resolved(spec, out=folder, threads=threads, baseline=baseline, callbacks=callbacks, watch=watch)


def read_run(path: Path) -> FinishedRun:
    """Read the folder of a finished run."""
    spec, summary, rounds = read_result(path)
    return FinishedRun(spec, summary, tuple(rounds), path)


def _count_rounds(task: Task, out: Path) -> int:
    path = task.folder(out) / "rounds.jsonl"
    return path.read_bytes().count(b"\n") if task.kind is RUN and path.exists() else 0


def _format_cell(value: object) -> object:
    """Return a value for CSV; a pair of equal numbers, such as a constant inertia, is one number."""
    if isinstance(value, tuple) and len(set(value)) == 1:
        return value[0]
    return json.dumps(value) if isinstance(value, (list, dict, tuple)) else value


_TIMED_ROUNDS = 2


@dataclass(frozen=True)
class Forecast:
    """An estimate of how long some tasks take."""

    runs: int
    missing: int  # not finished yet
    processes: int
    seconds: float
    methods: tuple[str, ...]  # those that were timed

    def describe(self) -> str:
        """Return the estimate in a sentence or two."""
        done = self.runs - self.missing
        start = f"{self.runs} runs" + (f", {done} of them done" if done else "")
        if not self.missing:
            return f"{start}."
        minutes = self.seconds / 60
        long = f"{minutes / 60:.1f} hours" if minutes >= 90 else f"{minutes:.0f} min" if minutes >= 1 else "a minute"
        processes = f"{self.processes} processes" if self.processes > 1 else "one process"
        return (
            f"{start}: about {long} with {processes}, estimated from {_TIMED_ROUNDS} rounds of "
            f"{' and '.join(self.methods)}. Costly attacks and aggregators take longer, as does a busy machine."
        )


def forecast(tasks: Sequence[Task], out: Path, jobs: int | None = None) -> Forecast:
    """Time a short run of every method and scale it by the work that is left."""
    distinct = dict.fromkeys(tasks)
    missing = [task for task in distinct if not task.is_done(out)]
    processes, threads = divide_cores(len(missing), jobs)
    timed: dict[str, tuple[float, float]] = {}  # seconds before the first round, and per unit of work
    for task in missing:
        if task.spec.method not in timed:
            if not timed:
                _time_run(replace(task.spec, rounds=1), threads)  # a process reads the data once, for all of its runs
            before, per_round = _time_run(replace(task.spec, rounds=min(_TIMED_ROUNDS, task.spec.rounds)), threads)
            timed[task.spec.method] = before, per_round / (task.round_work or 1.0)
    seconds = sum(timed[task.spec.method][0] + timed[task.spec.method][1] * task.work for task in missing)
    return Forecast(len(distinct), len(missing), processes, seconds / processes, tuple(timed))


def _time_run(spec: Spec, threads: int) -> tuple[float, float]:
    """Return the seconds that a run takes outside of its rounds, and per round."""
    started = time.perf_counter()
    result = loop.run_resolved(spec, threads=threads, callbacks=[])
    whole, rounds = time.perf_counter() - started, sum(line.seconds for line in result.rounds)
    return max(0.0, whole - rounds), rounds / len(result.rounds)
