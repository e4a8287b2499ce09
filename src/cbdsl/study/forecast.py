"""How long many runs will take, reckoned from short ones that are played here and now."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cbdsl.runs import play
from cbdsl.spec import Spec
from cbdsl.study.pools import sharing
from cbdsl.study.sweep import Task

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
    result = play.run(spec, threads=threads, callbacks=[])
    whole, rounds = time.perf_counter() - started, sum(line.seconds for line in result.rounds)
    return max(0.0, whole - rounds), rounds / len(result.rounds)
