"""Many runs: a grid of specs, played side by side (`pools`), each run in a folder named by the hash of its whole spec.

Finished runs are recognised by that hash and never played twice; stopped ones go on. How a run is played is
`experiment`'s affair, what the results mean is `paper`'s or the reader's.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cbdsl.errors import UserError, shown
from cbdsl.runs import loop
from cbdsl.runs.build import build_method
from cbdsl.runs.callbacks import Callback
from cbdsl.runs.folder import read_result
from cbdsl.runs.loop import Watch
from cbdsl.runs.records import RoundRecord, Summary
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec, parse_setting, setting_values, words
from cbdsl.studies.pool import do_all, sharing
from cbdsl.util.files import write_atomically

OnProgress = Callable[[int, int, float], None]  # rounds played here or earlier, rounds in all, share of the work done

_MOST_POINTS = 100_000  # runs of one grid


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """A run that is done."""

    spec: Spec
    summary: Summary
    rounds: tuple[RoundRecord, ...]
    folder: Path


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """Parse `key=0..4` or `key=a,b,c` of the command line: a setting and the values it takes."""
    key, _ = parse_setting(text)
    values = text.partition("=")[2].strip()
    first, dots, last = values.partition("..")
    span: list[Any]
    if dots and _is_number(first) and _is_number(last):
        span = list(range(int(first), min(int(last) + 1, int(first) + _MOST_POINTS + 1)))
    else:
        whole = parse_setting(f"{key}=[{values}]")[1]  # numbers, pairs and quoted words, as TOML
        span = whole if isinstance(whole, list) else list(words(values))
    if not span:
        why = f"the range {values} is empty" if dots else "names no values"
        raise UserError(f"{shown(text)}: {why}. Write --over seed=0..4 or --over swarm.inertia=0.5,0.9.")
    if dots and isinstance(span[0], str):
        raise UserError(
            f"{shown(text)}: a range is of whole numbers here, first..last. List others, as in --over "
            "swarm.inertia=0.1,0.5,0.9."
        )
    return key, span


def grid(start: Spec, axes: Sequence[tuple[str, Sequence[Any]]], given: Mapping[str, Any] | None = None) -> list[Spec]:
    """Return a spec for every combination of the axes' values. given: settings of every spec; no axis resets them."""
    keys = [key for key, _ in axes]
    if len(set(keys)) != len(keys):
        raise UserError(f"A setting can be swept once; given {', '.join(keys)}.")
    if math.prod(len(values) for _, values in axes) > _MOST_POINTS:
        raise UserError(f"A grid of more than {_MOST_POINTS:,} runs is too large. Sweep over fewer values.")
    points = itertools.product(*(values for _, values in axes))
    return [start.with_settings({**(given or {}), **dict(zip(keys, point, strict=True))}) for point in points]


def _is_number(text: str) -> bool:
    return text.strip().isdecimal() and len(text) < 100


@dataclass(frozen=True)
class TaskKind:
    """Something to do with a spec: where the function is that does it, and the file that shows that it is done."""

    name: str
    performer: str  # module:function; see `Performer`
    shows: str
    room: str  # the folder beside `runs` that its results go to
    factor: float = 1.0  # how much longer it takes than a run
    with_run: bool = False  # whether the run itself comes with it


RUN = TaskKind("run", f"{__name__}:perform_run", "summary.json", "runs")


@dataclass(frozen=True)
class Task:
    """One thing to do with one spec."""

    spec: Spec
    kind: TaskKind = RUN

    def folder(self, out: Path) -> Path:
        """Where its results are: known by the hash of the whole spec."""
        return out / self.kind.room / self.spec.key()

    def is_done(self, out: Path) -> bool:
        """Whether its result is there."""
        there = (self.folder(out) / self.kind.shows).exists()
        return there and (not self.kind.with_run or Task(self.spec).is_done(out))

    @property
    def work(self) -> float:
        """Roughly how long it takes, in no unit: to put long tasks first and to say how much is left."""
        return self.spec.rounds * self.round_work

    @property
    def round_work(self) -> float:
        """The same for one of its rounds."""
        spec, data = self.spec, self.spec.data
        own = data.shard_size * data.shards_per_worker if data.partition == "shards" else data.samples_per_worker
        training = 3 * spec.local.epochs * (own + data.shared_training * spec.shares_training)
        scoring = data.shared_scoring if spec.shares_scoring else own
        claims = build_method(spec).conversation == "swarm"
        return self.kind.factor * spec.participants * (training + (scoring if claims else 0))


def run_all(
    specs: Sequence[Spec],
    out: Path,
    jobs: int | None = None,
    on_progress: OnProgress | None = None,
    on: str | None = None,
) -> list[FinishedRun]:
    """Play every spec that is not finished in `out`/runs; the results in the order of the specs.

    jobs: processes at a time; as many as there are cores if not given. Together they use as many threads as cores.
    on: a Ray cluster that does it, see `cbdsl.run`.
    """
    tasks = [Task(resolve(spec)) for spec in specs]
    perform(tasks, out, jobs, on_progress, on)
    return [finished(task.folder(out)) for task in tasks]


def perform(
    tasks: Sequence[Task],
    out: Path,
    jobs: int | None = None,
    on_progress: OnProgress | None = None,
    on: str | None = None,
) -> None:
    """Do every task that is not done, each once, in the order given; here, or on a cluster."""
    distinct = dict.fromkeys(tasks)
    total, work = sum(task.spec.rounds for task in distinct), sum(task.work for task in distinct) or 1.0
    missing = [task for task in distinct if not task.is_done(out)]
    before = {task: _rounds_of(task, out) if task in missing else task.spec.rounds for task in distinct}
    played, worked = sum(before.values()), sum(count * task.round_work for task, count in before.items())
    if on_progress is not None:
        on_progress(played, total, worked / work)
    if not missing:
        return
    failed: list[str] = []
    with closing(do_all(missing, out, jobs, on)) as everything:  # closed while there is still a cluster
        for news in everything:
            failed += news.failed
            played, worked = played + len(news.rounds), worked + sum(news.rounds)
            if on_progress is not None:
                on_progress(min(played, total), total, min(worked / work, 1.0))
    if failed:
        raise UserError(
            f"{len(failed)} of {len(missing)} could not be done: {' '.join(failed[:10])} The others are in {out}: mend "
            "this or leave it out, and start again; what is finished is not done twice."
        )
    if on_progress is not None:
        on_progress(total, total, 1.0)


def refuse_others(out: Path, own: str, others: Sequence[str]) -> None:
    """Refuse the folder of another study: its results would be written over.

    own: the file by which a folder of the same kind is known. others: those of other kinds.
    """
    found = [name for name in others if (out / name).exists()]
    if found and not (out / own).exists():
        raise UserError(
            f"{out} has the results of another command ({found[0]}); nothing was changed. Give another --out."
        )


def write_table(results: Sequence[FinishedRun], axes: Sequence[str], out: Path) -> None:
    """One row a run: the swept settings, then the summary. As CSV and as JSONL."""
    rows = [{**setting_values(result.spec, axes), **asdict(result.summary)} for result in results]
    write_rows(rows, out)


def write_rows(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Rows with the same keys as results.csv and results.jsonl."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    write_atomically(out / "results.csv", text.getvalue().encode())
    write_atomically(out / "results.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())


class _Reporter(Callback):
    """Calls a function after every round."""

    def __init__(self, report: Callable[[object], None]) -> None:
        self._report = report

    def round(self, record: RoundRecord) -> None:
        """See `Callback.round`."""
        self._report(record)


def perform_run(
    spec: Spec, folder: Path, threads: int, report: Callable[[object], None], watch: Watch | None = None
) -> None:
    """Play a run, or go on with it."""
    if (folder / "spec.toml").exists():
        loop.resume(folder, threads=threads, callbacks=[_Reporter(report)])
    else:
        loop.run_resolved(spec, out=folder, threads=threads, callbacks=[_Reporter(report)], watch=watch)


def finished(path: Path) -> FinishedRun:
    """Read the folder of a finished run."""
    spec, summary, rounds = read_result(path)
    return FinishedRun(spec, summary, tuple(rounds), path)


def _rounds_of(task: Task, out: Path) -> int:
    path = task.folder(out) / "rounds.jsonl"
    return path.read_bytes().count(b"\n") if task.kind is RUN and path.exists() else 0


def _cell(value: object) -> object:
    """A value for CSV; a pair of equal numbers, such as a constant inertia, is one number."""
    if isinstance(value, tuple) and len(set(value)) == 1:
        return value[0]
    return json.dumps(value) if isinstance(value, (list, dict, tuple)) else value


_ROUNDS = 2


@dataclass(frozen=True)
class Forecast:
    """How much there is to do."""

    runs: int
    missing: int  # not finished yet
    processes: int
    seconds: float
    methods: tuple[str, ...]  # those that were timed

    def words(self) -> str:
        """In a sentence or two."""
        done = self.runs - self.missing
        start = f"{self.runs} runs" + (f", {done} of them done" if done else "")
        if not self.missing:
            return f"{start}."
        minutes = self.seconds / 60
        long = f"{minutes / 60:.1f} hours" if minutes >= 90 else f"{minutes:.0f} min" if minutes >= 1 else "a minute"
        crowd = f"{self.processes} processes" if self.processes > 1 else "one process"
        return (
            f"{start}: about {long} with {crowd}, by {_ROUNDS} rounds of {' and '.join(self.methods)} that were timed "
            "just now. Costly attacks and rules take longer; so does a machine that has other things to do."
        )


def forecast(tasks: Sequence[Task], out: Path, jobs: int | None = None) -> Forecast:
    """Time a short run of every method, and scale it by the work that is missing."""
    distinct = dict.fromkeys(tasks)
    missing = [task for task in distinct if not task.is_done(out)]
    processes, threads = sharing(len(missing), jobs)
    timed: dict[str, tuple[float, float]] = {}  # seconds before the first round, and for a unit of work
    for task in missing:
        if task.spec.method not in timed:
            if not timed:
                _timed(replace(task.spec, rounds=1), threads)  # a process reads the data once, for all of its runs
            before, a_round = _timed(replace(task.spec, rounds=min(_ROUNDS, task.spec.rounds)), threads)
            timed[task.spec.method] = before, a_round / (task.round_work or 1.0)
    seconds = sum(timed[task.spec.method][0] + timed[task.spec.method][1] * task.work for task in missing)
    return Forecast(len(distinct), len(missing), processes, seconds / processes, tuple(timed))


def _timed(spec: Spec, threads: int) -> tuple[float, float]:
    """Seconds that a run takes before and after its rounds, and for one of them."""
    started = time.perf_counter()
    result = loop.run_resolved(spec, threads=threads, callbacks=[])
    whole, rounds = time.perf_counter() - started, sum(line.seconds for line in result.rounds)
    return max(0.0, whole - rounds), rounds / len(result.rounds)
