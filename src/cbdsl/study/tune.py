"""Search for settings: candidates are tried on the server's hold-out, generation by generation, on the sweep machinery.

The test set is looked at once, at the end and on other seeds: for the settings that were found, and for those of the
spec. How it looks is `report.tune_page`'s affair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from cbdsl.arrays import Floats
from cbdsl.errors import UserError, shown
from cbdsl.files import write_atomically, write_json
from cbdsl.runs.folder import RunFolder
from cbdsl.runs.resolve import resolve, resolve_all
from cbdsl.runs.stage import Stage
from cbdsl.study.compare import Spread, percent_words
from cbdsl.study.searches import SEARCHES, demand, first_points
from cbdsl.study.space import Space
from cbdsl.study.sweep import Finished, OnProgress, Task, perform, refuse_others, run_all, write_rows
from cbdsl.study.trials import LEAST_HOLDOUT, TRIAL, Stop, Trial, prepare, read_trial, stop_after
from cbdsl.swarms.ray_cluster import connected

_HELD_OUT = 1000  # the first seed of the confirmation, counted from the spec's own
MOST = 10_000  # tries
_BUILT = ("data.", "options.", "workers", "model", "init")  # what a run is made of, beside numbers


@dataclass(frozen=True)
class Plan:
    """What to search, how, and for how long."""

    space: Space
    budget: int = 60  # tries of one search
    by: tuple[str, ...] = ("swarm",)
    repeats: int = 1  # searches of each kind, each with a seed of its own
    seeds: int = 1  # runs of one candidate; their mean counts
    confirm: int = 3  # seeds on which what was found meets the spec as it is, on the test set
    early: bool = True  # give hopeless tries up

    def __post_init__(self) -> None:
        for name, value, least in (
            ("--budget", self.budget, 1), ("--repeat", self.repeats, 1), ("--seeds", self.seeds, 1),
            ("--confirm", self.confirm, 0),
        ):  # fmt: skip
            if not least <= value <= MOST:
                raise UserError(f"{name} takes a whole number from {least} to {MOST:,}; given {value}.")
        for name in self.by:
            demand(name)
        if not self.by or len(set(self.by)) < len(self.by):
            raise UserError(f"Name searches, each once: {', '.join(SEARCHES)}; given {shown(','.join(self.by))}.")
        if self.space.start.data.holdout < LEAST_HOLDOUT:
            raise UserError(
                f"Settings are judged on the server's hold-out, {LEAST_HOLDOUT} samples or more; data.holdout is "
                f"{self.space.start.data.holdout}."
            )
        _check(self.space)

    @property
    def generation(self) -> int:
        """How many candidates are tried before the search learns of them: about the root of the budget, from 4."""
        return min(self.budget, max(4, math.isqrt(self.budget) + 2))


@dataclass(frozen=True, eq=False)
class Candidate:
    """Settings that were tried."""

    search: str
    repeat: int
    number: int  # from 1, in the order of the search
    values: Mapping[str, Any]
    score: float
    error: float  # on the hold-out, mean over seeds
    stopped: bool


@dataclass(frozen=True, eq=False)
class Found:
    """The best settings, and how they and the spec do on other seeds; both empty where nothing was confirmed."""

    best: Candidate
    found: tuple[Finished, ...]
    given: tuple[Finished, ...]

    @property
    def gain(self) -> Spread | None:
        """In test accuracy, seed by seed."""
        pairs = zip(self.found, self.given, strict=True)
        gains = [ours.summary.final_accuracy - theirs.summary.final_accuracy for ours, theirs in pairs]
        return Spread.of(gains) if gains else None


@dataclass(frozen=True, eq=False)
class Tuning:
    """What a search leaves."""

    plan: Plan
    candidates: tuple[Candidate, ...]
    outcome: Found

    def curve(self, search: str, repeat: int) -> list[float]:
        """The lowest error on the hold-out so far, after every try."""
        own = [one for one in self.candidates if (one.search, one.repeat) == (search, repeat)]
        finished = [one.error if not one.stopped else math.inf for one in own]
        return list(np.minimum.accumulate(finished)) if finished else []

    def ends(self, search: str) -> Spread:
        """The lowest error of each repeat."""
        return Spread.of([self.curve(search, repeat)[-1] for repeat in range(self.plan.repeats)])


def hold(
    plan: Plan, out: Path, jobs: int | None = None, on_progress: OnProgress | None = None, on: str | None = None
) -> Tuning:
    """Search, or go on with a search in its folder; then confirm what was found. on: a Ray cluster, if any."""
    refuse_others(out, "trials", ("results.csv", "spec.toml"))
    folder = RunFolder.take(out)
    try:
        with ExitStack() as connections:
            return _held(plan, _Pool(out, jobs, on, connections), on_progress)
    finally:
        folder.close()


def _held(plan: Plan, pool: _Pool, on_progress: OnProgress | None) -> Tuning:
    candidates: list[Candidate] = []
    rounds, tries = plan.space.start.rounds, plan.budget * plan.seeds * len(plan.by) * plan.repeats
    total = rounds * (tries + 2 * plan.confirm)
    progress = _Progress(on_progress, total)
    for repeat in range(plan.repeats):
        for name in plan.by:
            candidates += _search(plan, name, repeat, pool, progress)
    best = min((one for one in candidates if not one.stopped), key=lambda one: (one.score, one.number))
    outcome = _confirm(plan, best, pool, progress)
    tuning = Tuning(plan, tuple(candidates), outcome)
    _write(tuning, pool.out)
    return tuning


def _search(plan: Plan, name: str, repeat: int, pool: _Pool, progress: _Progress) -> list[Candidate]:
    """One search, whole."""
    space, seed = plan.space, plan.space.start.seed + repeat
    first = first_points(plan.generation, len(space.axes), seed, space.own_point())
    search = SEARCHES[name](first, seed)
    tried: list[Candidate] = []
    known: list[Trial] = []
    while len(tried) < plan.budget:
        points = search.ask()
        wanted = points[: plan.budget - len(tried)]
        stop = stop_after(known, space.start.rounds) if plan.early else Stop()
        tasks = [[_task(space, point, space.start.seed + run) for run in range(plan.seeds)] for point in wanted]
        flat = [task for group in tasks for task in group]
        for task in flat:
            if task not in pool.tried:  # who tries it first says when it is given up
                prepare(task, pool.out, stop)
        pool.tried.update(flat)
        progress.part(space.start.rounds * len(flat))
        pool.connect(flat)
        perform(flat, pool.out, pool.jobs, progress.show, pool.on)
        progress.done()
        scores = np.full(len(points), np.inf)
        for place, (point, group) in enumerate(zip(wanted, tasks, strict=True)):
            trials = [read_trial(task, pool.out) for task in group]
            known += trials
            scores[place] = float(np.mean([trial.score for trial in trials]))
            error = float(np.mean([trial.errors[-1] for trial in trials]))
            stopped = any(trial.stopped for trial in trials)
            values = space.values(point)
            tried.append(Candidate(name, repeat, len(tried) + 1, values, scores[place], error, stopped))
        search.tell(scores)
    return tried


def _task(space: Space, point: Floats, seed: int) -> Task:
    return Task(resolve(space.spec(space.values(point), seed)), TRIAL)


def _confirm(plan: Plan, best: Candidate, pool: _Pool, progress: _Progress) -> Found:
    """What was found and the spec as it is, on seeds that the search never saw, on the test set."""
    start = plan.space.start
    seeds = range(start.seed + _HELD_OUT, start.seed + _HELD_OUT + plan.confirm)
    ours = [plan.space.spec(best.values, seed) for seed in seeds]
    theirs = [replace(start, seed=seed) for seed in seeds]
    progress.part(start.rounds * 2 * plan.confirm)
    pool.connect([Task(resolve(spec)) for spec in (*ours, *theirs)])
    done = run_all([*ours, *theirs], pool.out, pool.jobs, progress.show, pool.on) if plan.confirm else []
    return Found(best, tuple(done[: plan.confirm]), tuple(done[plan.confirm :]))


def _check(space: Space) -> None:
    """Refuse a space of which some settings cannot be tried, or change nothing, before any is."""
    points = [space.spec(values, space.start.seed) for values in space.checks()]
    resolve_all(points, [*(axis.key for axis in space.axes), *space.given])
    try:
        resolve(space.start)
    except UserError as error:
        raise UserError(
            "What is found is compared with the spec itself, which cannot be run. Give one that can (--spec FILE). "
            f"{error}"
        ) from error


def rehearse(plan: Plan) -> None:
    """Build what the spec and the searched settings of data and models name, so that what does not fit is found now."""
    space = plan.space
    values = [each for axis in space.axes if axis.key.startswith(_BUILT) for each in space.along(axis)]
    points = [space.start, *(space.spec(each, space.start.seed) for each in values)]
    for point in points:
        Stage.prepare(resolve(point), threads=1)


@dataclass
class _Pool:
    """Who does the tries, and where their folders are."""

    out: Path
    jobs: int | None
    on: str | None
    connections: ExitStack
    is_connected: bool = False
    tried: set[Task] = field(default_factory=set)  # in this search, whatever the folder has of others

    def connect(self, tasks: Sequence[Task]) -> None:
        """Connect to the cluster, if any, when there is something to do: once, because it takes seconds."""
        if self.on is not None and not self.is_connected and not all(task.is_done(self.out) for task in tasks):
            self.connections.enter_context(connected(self.on))
            self.is_connected = True


class _Progress:
    """Rounds of one generation after the other, told as rounds of the whole."""

    def __init__(self, tell: OnProgress | None, total: int) -> None:
        self._tell, self._total, self._before, self._part = tell, total, 0, 0

    def part(self, rounds: int) -> None:
        """So many rounds come now."""
        self._part = rounds

    def show(self, _played: int, _total: int, share: float) -> None:
        """See `OnProgress`."""
        if self._tell is not None:
            played = self._before + share * self._part
            self._tell(round(played), self._total, min(played / self._total, 1.0))

    def done(self) -> None:
        """They are over, played or given up."""
        self._before += self._part


def _write(tuning: Tuning, out: Path) -> None:
    """results.csv and .jsonl with a row for every candidate, best.toml, and tuning.json."""
    rows = [
        {"search": one.search, "repeat": one.repeat, "number": one.number, **one.values,
         "validation_error": one.error, "score": one.score, "given_up": one.stopped}
        for one in tuning.candidates
    ]  # fmt: skip
    write_rows(rows, out)
    plan, best = tuning.plan, tuning.outcome.best
    spec = resolve(plan.space.spec(best.values, plan.space.start.seed))
    write_atomically(out / "best.toml", spec.to_toml().encode())
    gain = tuning.outcome.gain
    write_json(
        out / "tuning.json",
        {
            "budget": plan.budget, "by": plan.by, "repeats": plan.repeats, "seeds": plan.seeds,
            "axes": [vars(axis) for axis in plan.space.axes],
            "best": {**best.values, "validation_error": best.error, "search": best.search},
            "lowest_errors": {name: [tuning.curve(name, r)[-1] for r in range(plan.repeats)] for name in plan.by},
            "test_accuracy": {
                "found": [run.summary.final_accuracy for run in tuning.outcome.found],
                "given": [run.summary.final_accuracy for run in tuning.outcome.given],
                "seeds": [run.spec.seed for run in tuning.outcome.found],
            },
            "gain": None if gain is None else gain.mean,
        },
    )  # fmt: skip


def verdict(tuning: Tuning) -> str:
    """What was found against the spec as it is, in a sentence that claims no more than the seeds do."""
    outcome, gain = tuning.outcome, tuning.outcome.gain
    if gain is None:
        return "not looked at (--confirm 0)"
    accuracy = [Spread.of([run.summary.final_accuracy for run in runs]) for runs in (outcome.found, outcome.given)]
    first, last = outcome.found[0].spec.seed, outcome.found[-1].spec.seed
    seeds = f"seeds {first} to {last}" if last > first else f"seed {first}"
    found, given = (percent_words(one) for one in accuracy)
    difference = f"{100 * gain.mean:+.2f} ± {100 * gain.deviation:.2f}" if gain.deviation else f"{100 * gain.mean:+.2f}"
    return f"{found} with what was found, {given} with the spec as it is ({difference} points, {seeds})"
