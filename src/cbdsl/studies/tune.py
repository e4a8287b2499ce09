"""Search for good settings: the space of settings, the searches, and their trials.

A point of the space has one number from 0 to 1 for every searched setting. Each value of a setting that is not a real
number has an equal part of that interval.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cbdsl import register
from cbdsl.algorithm.particles import Coefficients, Particles, remember, swarm_terms
from cbdsl.arrays import Doubles, Floats
from cbdsl.errors import UserError, missing, shown, unknown
from cbdsl.rng import seed_of, stream
from cbdsl.runs.build import Experiment
from cbdsl.runs.folder import RunFolder
from cbdsl.runs.loop import play_rounds
from cbdsl.runs.records import RunTotals
from cbdsl.runs.resolve import resolve, resolve_all
from cbdsl.spec import Spec, at_least, dotted_keys, parse_setting, setting_values, unknown_setting, words
from cbdsl.studies.compare import Spread, format_percent
from cbdsl.studies.sweep import (
    FinishedRun,
    OnProgress,
    Task,
    TaskKind,
    refuse_other_results,
    run_all,
    run_tasks,
    write_rows,
)
from cbdsl.swarms.ray_swarm import connect_ray
from cbdsl.util.files import write_atomically, write_json

_EXAMPLES = (
    "Write --over swarm.inertia=0.1..1, --over local.learning_rate=1e-3..1e-1:log, or --over local.batch_size=5,10,20."
)
_NOT_SEARCHED = ("seed", "rounds", "preset", "data.source", "data.holdout")
_CHECKED_PLACES = (0.0, 0.382, 1.0)  # in a range: a number of workers may fit at both ends, and not between
_MOST_CHECKED = 1000  # combinations, which take a second
_DIGITS = 4  # of a number that is tried; more would make a spec hard to read


@dataclass(frozen=True)
class Axis:
    """One searched setting: a range of numbers, or choices."""

    key: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    whole: bool = False
    choices: tuple[Any, ...] = ()

    def value(self, place: float) -> Any:  # noqa: ANN401 - any value of a spec
        """Return the value at a place from 0 to 1."""
        share = min(max(place, 0.0), 1.0)
        if self.choices:
            return self.choices[min(int(share * len(self.choices)), len(self.choices) - 1)]
        if self.whole:
            low, high = int(self.low), int(self.high)
            if self.log:
                return min(max(round(self._interpolate(share)), low), high)
            return min(low + int(share * (high - low + 1)), high)
        return min(max(float(f"{self._interpolate(share):.{_DIGITS}g}"), self.low), self.high)

    def place(self, value: Any) -> float | None:  # noqa: ANN401 - any value of a spec
        """Return where a value lies, from 0 to 1, or None if it is outside."""
        if self.choices:
            return (self.choices.index(value) + 0.5) / len(self.choices) if value in self.choices else None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not self.low <= value <= self.high:
            return None
        if self.whole and not self.log:
            return (value - self.low + 0.5) / (self.high - self.low + 1)
        low, high, at = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return (at - low) / (high - low)

    def _interpolate(self, share: float) -> float:
        low, high = (math.log(end) if self.log else end for end in (self.low, self.high))
        value = low + (high - low) * share
        return math.exp(value) if self.log else value


@dataclass(frozen=True)
class Space:
    """The searched settings, and a spec with the others."""

    start: Spec
    axes: tuple[Axis, ...]
    given: Mapping[str, Any] = field(default_factory=dict)  # settings of the start that no axis resets

    def __post_init__(self) -> None:
        keys = [axis.key for axis in self.axes]
        if not keys:
            raise UserError(f"There is nothing to tune. {_EXAMPLES}", code="out-of-range")
        if len(set(keys)) != len(keys):
            raise UserError(f"A setting can be searched once; given {', '.join(keys)}.", code="conflict")

    def values(self, point: Floats) -> dict[str, Any]:
        """Return the settings at a point (K,)."""
        return {axis.key: axis.value(float(place)) for axis, place in zip(self.axes, point, strict=True)}

    def spec(self, values: Mapping[str, Any], seed: int) -> Spec:
        """Return the spec with these settings and a seed, not yet resolved."""
        return self.start.with_settings({**self.given, **values, "seed": seed})

    def settings_to_check(self) -> Iterator[dict[str, Any]]:
        """Yield settings that show whether the search can run: choices and ends of ranges, alone and together."""
        for axis in self.axes:
            yield from self.vary_one(axis)
        ends = [axis.choices or (axis.value(0.0), axis.value(1.0)) for axis in self.axes]
        for together in itertools.islice(itertools.product(*ends), _MOST_CHECKED):
            yield {axis.key: value for axis, value in zip(self.axes, together, strict=True)}

    def vary_one(self, axis: Axis) -> list[dict[str, Any]]:
        """Return settings that differ in one of them: every choice, or some places of the range."""
        usual = {one.key: one.value(0.0) for one in self.axes}
        values = axis.choices or [axis.value(place) for place in _CHECKED_PLACES]
        return [{**usual, axis.key: value} for value in values]

    def start_point(self) -> Floats | None:
        """Return the point of the spec itself, (K,), or None if it is outside."""
        values = setting_values(resolve(self.start), [axis.key for axis in self.axes])
        places = [axis.place(_collapse_pair(values[axis.key])) for axis in self.axes]
        return None if None in places else np.array(places, np.float32)


def parse_range(text: str, start: Spec) -> Axis:
    """Parse `key=0.1..1`, `key=1e-3..1e-1:log` or `key=a,b,c` of the command line."""
    key, _ = parse_setting(text)
    if not key.startswith("options.") and key not in dotted_keys():
        raise unknown_setting(key)
    if key in _NOT_SEARCHED:
        raise UserError(f"{key} cannot be tuned: results would not be comparable. {_EXAMPLES}", code="not-supported")
    span = text.partition("=")[2].strip()
    if ".." not in span or "," in span:
        return _parse_choices(key, span, text)
    span, _, scale = span.partition(":")
    if scale not in {"", "log", "linear"}:
        raise unknown("scale", scale, ("log", "linear"))
    present = _find_present_value(start, key)
    if isinstance(present, str | bool):
        values = "true,false" if isinstance(present, bool) else "a,b"
        raise UserError(
            f"{key} is not a number and has no range; given {shown(span)}. Write --over {key}={values}.",
            code="wrong-type",
        )
    try:
        low, high = (float(end) for end in span.split(".."))
    except ValueError:
        raise UserError(f"{shown(text)} is not a range of numbers. {_EXAMPLES}", code="wrong-type") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserError(
            f"{shown(text)} is an empty range: it must begin below its end, both finite. {_EXAMPLES}",
            code="out-of-range",
        )
    if scale == "log" and low <= 0:
        raise UserError(f"{shown(text)}: a logarithmic range begins above 0; given {low:g}.", code="out-of-range")
    whole = isinstance(present, int) or (present is None and all(map(_is_whole, span.split(".."))))
    if whole and not (low.is_integer() and high.is_integer()):
        raise UserError(f"{key} takes whole numbers; given {shown(span)}.", code="wrong-type")
    axis = Axis(key, low, high, scale == "log", whole)
    for end in (0.0, 1.0):
        start.with_settings({key: axis.value(end)})  # raises if it does not fit
    return axis


def _parse_choices(key: str, span: str, text: str) -> Axis:
    found = parse_setting(f"{key}=[{span}]")[1]
    values = tuple(found if isinstance(found, list) else [parse_setting(f"{key}={word}")[1] for word in words(span)])
    if all(value == values[0] for value in values):
        raise UserError(f"{shown(text)} has no two values. {_EXAMPLES}", code="out-of-range")
    return Axis(key, choices=values)


def _find_present_value(start: Spec, key: str) -> Any:  # noqa: ANN401 - any value of a spec
    """Return the value of a setting, or its component's default, or None if neither is known."""
    value = _collapse_pair(setting_values(start, [key])[key])
    if value is None:
        part, _, name = key.removeprefix("options.").partition(".")
        defaults = [kind.settings(part).get(name) for kind in register.ALL.values() if part in kind]
        value = next((one for one in defaults if one is not None and one is not inspect.Parameter.empty), None)
    return value


def _is_whole(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def _collapse_pair(value: Any) -> Any:  # noqa: ANN401 - any value of a spec
    """Return one number for a pair of equal ones: swarm.inertia may be given as one."""
    pair = isinstance(value, tuple) and len(value) == 2 and value[0] == value[1]
    return value[0] if pair else value


_INERTIA = 0.7298  # c0; with _PULL = delta_1 = delta_2 and c1, c2 ~ U(0, delta) the swarm converges
_PULL = 1.49618  # (Clerc and Kennedy, 2002)


class Search(Protocol):
    """An optimiser that proposes points of the cube [0, 1]^K."""

    def ask(self) -> Floats:
        """Return the points of the next generation, (N, K)."""
        ...

    def tell(self, scores: Doubles) -> None:
        """Take the scores of these points, (N,): lower is better, infinite for points that were not tried."""
        ...


def first_points(count: int, size: int, seed: int, known: Floats | None) -> Floats:
    """Return the points with which every search begins, (N, K): the known one, if any, and random ones."""
    points = stream(seed, "search").random((count, size), np.float32)
    if known is not None:
        points[0] = known
    return points


class SwarmSearch:
    """Particle swarm optimisation of settings: the swarm terms of Eq. (5) and the memory of Eq. (6), without SGD."""

    def __init__(self, first: Floats, seed: int) -> None:
        targets = stream(seed, "search", 1).random(first.shape, np.float32)
        velocities = (targets - first) / np.float32(2)  # with velocity 0 the first leader would not move
        self._particles = Particles(first, velocities, first.copy(), np.full(len(first), np.inf))
        self._generation, self._seed = 1, seed

    def ask(self) -> Floats:
        """See `Search.ask`."""
        return self._particles.positions

    def tell(self, scores: Doubles) -> None:
        """See `Search.tell`; update the personal bests, then move."""
        kept = remember(self._particles, self._particles.positions, self._particles.velocities, scores)
        self._generation += 1
        leader = kept.personal_best[int(np.argmin(kept.personal_score))]  # w^g, (K,)
        draws = stream(self._seed, "search", self._generation)
        cognitive, social = draws.random((2, *kept.positions.shape), np.float32) * np.float32(_PULL)
        velocities = swarm_terms(kept, leader, Coefficients(_INERTIA, cognitive, social))  # (N, K)
        moved = kept.positions + velocities
        inside = np.clip(moved, 0, 1)
        velocities[moved != inside] = 0  # a particle stops at the boundary
        self._particles = replace(kept, positions=inside, velocities=velocities)


class RandomSearch:
    """Random points: the baseline of every search (Bergstra and Bengio, 2012)."""

    def __init__(self, first: Floats, seed: int) -> None:
        self._points, self._seed, self._generation = first, seed, 1

    def ask(self) -> Floats:
        """See `Search.ask`."""
        return self._points

    def tell(self, _scores: Doubles) -> None:
        """See `Search.tell`."""
        self._generation += 1
        self._points = stream(self._seed, "search", self._generation).random(self._points.shape, np.float32)


class TpeSearch:
    """The tree-structured Parzen estimator of optuna (Bergstra et al., 2011)."""

    def __init__(self, first: Floats, seed: int) -> None:
        require_search("tpe")
        optuna: Any = import_module("optuna")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._names = [str(number) for number in range(first.shape[1])]
        self._ranges = dict.fromkeys(self._names, optuna.distributions.FloatDistribution(0, 1))
        sampler = optuna.samplers.TPESampler(seed=seed_of(seed, "search") % 2**32, n_startup_trials=len(first))
        self._study = optuna.create_study(sampler=sampler)
        for point in first:
            self._study.enqueue_trial(dict(zip(self._names, map(float, point), strict=True)))
        self._count, self._asked = len(first), []  # type: tuple[int, list[Any]]

    def ask(self) -> Floats:
        """See `Search.ask`."""
        self._asked = [self._study.ask(self._ranges) for _ in range(self._count)]
        return np.array([[trial.params[name] for name in self._names] for trial in self._asked], np.float32)

    def tell(self, scores: Doubles) -> None:
        """See `Search.tell`."""
        for trial, score in zip(self._asked, scores, strict=True):
            self._study.tell(trial, float(score) if np.isfinite(score) else 1e9)


SEARCHES: dict[str, Callable[[Floats, int], Search]] = {
    "swarm": SwarmSearch,
    "random": RandomSearch,
    "tpe": TpeSearch,
}
"""Searches by name; each takes the first points and a seed."""


def require_search(name: str) -> None:
    """Raise if a search is unknown or not installed."""
    if name not in SEARCHES:
        raise unknown("search", name, SEARCHES)
    if name == "tpe" and find_spec("optuna") is None:
        raise missing("optuna", "tune", "it has the search 'tpe'")


LEAST_HOLDOUT = 100  # samples on which settings are compared
_LOSS_WEIGHT = 1e-6  # of the loss in a score: it orders trials with the same error

TRIAL = TaskKind("trial", f"{__name__}:run_trial", "trial.json", "trials")


@dataclass(frozen=True)
class Trial:
    """The result of one run of some settings."""

    errors: tuple[float, ...]  # share of the hold-out that w^g gets wrong, after every round
    loss: float  # at the end; infinite if it is not finite
    stopped: bool  # before its last round
    uplink_bytes: int

    @property
    def score(self) -> float:
        """Return the score; lower is better."""
        return self.errors[-1] + _LOSS_WEIGHT * min(self.loss, 1e3)


@dataclass(frozen=True)
class EarlyStopping:
    """The rounds after which a trial may be stopped, and the largest error that continues."""

    rounds: tuple[int, ...] = ()
    errors: tuple[float, ...] = ()

    def stops(self, round_number: int, error: float) -> bool:
        """Return whether a trial with this error after this round is stopped."""
        return any(at == round_number and error > limit for at, limit in zip(self.rounds, self.errors, strict=True))

    def matches(self, trial: Trial) -> bool:
        """Return whether a trial ended as it would have with this rule."""
        stops = [self.stops(number, error) for number, error in enumerate(trial.errors, 1)]
        return not any(stops[:-1]) and stops[-1] == trial.stopped


def median_rule(known: Sequence[Trial], total: int) -> EarlyStopping:
    """Return the median rule (Golovin et al., 2017), after a third and two thirds of all rounds."""
    rounds = tuple(sorted({total // 3, 2 * total // 3} - {0, total}))
    limits = []
    for at in rounds:
        seen = [trial.errors[at - 1] for trial in known if len(trial.errors) >= at]
        limits.append(float(np.median(seen)) if seen else 1.0)
    return EarlyStopping(rounds, tuple(limits))


def prepare_trial(task: Task, out: Path, stop: EarlyStopping) -> None:
    """Write a trial's stopping rule into its folder; keep the result of another search if it would be the same."""
    folder = task.folder(out)
    if task.is_done(out):
        if stop.matches(read_trial(task, out)):
            return
        (folder / TRIAL.done_file).unlink()
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "spec.toml", task.spec.to_toml().encode())
    write_json(folder / "stop.json", asdict(stop))


def _small_holdout(count: int) -> UserError:
    return UserError(
        f"Settings are judged on the server's hold-out, {LEAST_HOLDOUT} samples or more; data.holdout is {count}.",
        code="out-of-range",
    )


def run_trial(spec: Spec, folder: Path, threads: int, report: Callable[[object], None]) -> None:
    """Run a trial; see `pool.TaskFunction`."""
    rule = json.loads((folder / "stop.json").read_text(encoding="utf-8"))
    stop = EarlyStopping(tuple(rule["rounds"]), tuple(rule["errors"]))
    experiment = Experiment.prepare(spec, threads=threads)
    own, train = experiment.split.holdout, experiment.dataset.train
    if len(own) < LEAST_HOLDOUT:
        raise _small_holdout(len(own))
    errors: list[float] = []
    totals, stopped, state = RunTotals(), False, experiment.first_state()
    for played in play_rounds(experiment, state, measured=False):
        state = played.state
        totals.add(played.record)
        errors.append(1.0 - float(experiment.engine.accuracies(state.global_best[None], train, own)[0]))
        report(played.record)
        if stop.stops(played.record.round, errors[-1]):
            stopped = played.record.round < spec.rounds
            break
    loss = float(experiment.engine.losses(state.global_best[None], train, own)[0])
    loss = loss if math.isfinite(loss) else math.inf
    trial = {"errors": errors, "loss": None if math.isinf(loss) else loss, "stopped": stopped}
    write_json(folder / TRIAL.done_file, {**trial, "uplink_bytes": totals.uplink_bytes})


def read_trial(task: Task, out: Path) -> Trial:
    """Read the result of a finished trial."""
    path = task.folder(out) / TRIAL.done_file
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not values["errors"]:
            raise ValueError("it has no rounds")
        loss = math.inf if values["loss"] is None else float(values["loss"])
        return Trial(tuple(map(float, values["errors"])), loss, bool(values["stopped"]), int(values["uplink_bytes"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is damaged ({error}). Remove its folder and start again; the trial is repeated.",
            code="damaged-file",
        ) from error


_CONFIRM_FROM = 1000  # the first seed of the confirmation, counted from the spec's own
MOST = 10_000  # trials
_BUILT = ("data.", "options.", "workers", "model", "init")  # settings of parts that are built before a run


@dataclass(frozen=True)
class SearchPlan:
    """The space of a search, its kind, and its length."""

    space: Space
    budget: int = 60  # settings per search
    by: tuple[str, ...] = ("swarm",)
    repeats: int = 1  # searches of each kind, each with its own seed
    seeds: int = 1  # runs per settings; their mean counts
    confirm: int = 3  # seeds on which the best settings are compared with the original spec, on the test set
    early: bool = True  # stop unpromising trials

    def __post_init__(self) -> None:
        at_least(1, "--budget", self.budget, MOST)
        at_least(1, "--repeat", self.repeats, MOST)
        at_least(1, "--seeds", self.seeds, MOST)
        at_least(0, "--confirm", self.confirm, MOST)
        for name in self.by:
            require_search(name)
        if not self.by or len(set(self.by)) < len(self.by):
            raise UserError(
                f"Name searches, each once: {', '.join(SEARCHES)}; given {shown(','.join(self.by))}.", code="conflict"
            )
        if self.space.start.data.holdout < LEAST_HOLDOUT:
            raise _small_holdout(self.space.start.data.holdout)
        _check_space(self.space)

    @property
    def generation(self) -> int:
        """Return how many settings are tried at once: about the square root of the budget, at least 4."""
        return min(self.budget, max(4, math.isqrt(self.budget) + 2))


@dataclass(frozen=True, eq=False)
class TriedSettings:
    """Some settings and their result."""

    search: str
    repeat: int
    number: int  # from 1, in the order of the search
    values: Mapping[str, Any]
    score: float
    error: float  # on the hold-out, mean over seeds
    stopped: bool


@dataclass(frozen=True, eq=False)
class TuneOutcome:
    """The best settings, and runs with them and with the original spec on other seeds; no runs with --confirm 0."""

    best: TriedSettings
    found: tuple[FinishedRun, ...]
    given: tuple[FinishedRun, ...]

    @property
    def gain(self) -> Spread | None:
        """Return the gain in test accuracy, paired by seed."""
        pairs = zip(self.found, self.given, strict=True)
        gains = [ours.summary.final_accuracy - theirs.summary.final_accuracy for ours, theirs in pairs]
        return Spread.of(gains) if gains else None


@dataclass(frozen=True, eq=False)
class Tuning:
    """The results of one or more searches."""

    plan: SearchPlan
    candidates: tuple[TriedSettings, ...]
    outcome: TuneOutcome

    def curve(self, search: str, repeat: int) -> list[float]:
        """Return the lowest error on the hold-out so far, after every trial."""
        own = [one for one in self.candidates if (one.search, one.repeat) == (search, repeat)]
        finished = [one.error if not one.stopped else math.inf for one in own]
        return list(np.minimum.accumulate(finished)) if finished else []

    def lowest_errors(self, search: str) -> Spread:
        """Return the lowest error over the repeats of a search."""
        return Spread.of([self.curve(search, repeat)[-1] for repeat in range(self.plan.repeats)])


def run_search(
    plan: SearchPlan, out: Path, jobs: int | None = None, on_progress: OnProgress | None = None, on: str | None = None
) -> Tuning:
    """Search, or continue a search in its folder, and confirm the best settings. on: a Ray cluster, if any."""
    refuse_other_results(out, "trials", ("results.csv", "spec.toml"))
    folder = RunFolder.take(out)
    try:
        with ExitStack() as connections:
            return _run_searches(plan, _TrialPool(out, jobs, on, connections), on_progress)
    finally:
        folder.close()


def _run_searches(plan: SearchPlan, pool: _TrialPool, on_progress: OnProgress | None) -> Tuning:
    candidates: list[TriedSettings] = []
    rounds, trials = plan.space.start.rounds, plan.budget * plan.seeds * len(plan.by) * plan.repeats
    total = rounds * (trials + 2 * plan.confirm)
    progress = _Progress(on_progress, total)
    for repeat in range(plan.repeats):
        for name in plan.by:
            candidates += _run_search(plan, name, repeat, pool, progress)
    best = min((one for one in candidates if not one.stopped), key=lambda one: (one.score, one.number))
    outcome = _confirm(plan, best, pool, progress)
    tuning = Tuning(plan, tuple(candidates), outcome)
    _write_results(tuning, pool.out)
    return tuning


def _run_search(plan: SearchPlan, name: str, repeat: int, pool: _TrialPool, progress: _Progress) -> list[TriedSettings]:
    space, seed = plan.space, plan.space.start.seed + repeat
    first = first_points(plan.generation, len(space.axes), seed, space.start_point())
    search = SEARCHES[name](first, seed)
    tried: list[TriedSettings] = []
    known: list[Trial] = []
    while len(tried) < plan.budget:
        points = search.ask()
        wanted = points[: plan.budget - len(tried)]
        stop = median_rule(known, space.start.rounds) if plan.early else EarlyStopping()
        tasks = [[_task(space, point, space.start.seed + run) for run in range(plan.seeds)] for point in wanted]
        flat = [task for group in tasks for task in group]
        for task in flat:
            if task not in pool.tried:  # the first search that tries it sets its stopping rule
                prepare_trial(task, pool.out, stop)
        pool.tried.update(flat)
        pool.connect(flat)
        run_tasks(flat, pool.out, pool.jobs, progress.start(space.start.rounds * len(flat)), pool.on)
        scores = np.full(len(points), np.inf)
        for place, (point, group) in enumerate(zip(wanted, tasks, strict=True)):
            trials = [read_trial(task, pool.out) for task in group]
            known += trials
            scores[place] = float(np.mean([trial.score for trial in trials]))
            error = float(np.mean([trial.errors[-1] for trial in trials]))
            stopped = any(trial.stopped for trial in trials)
            values = space.values(point)
            tried.append(TriedSettings(name, repeat, len(tried) + 1, values, scores[place], error, stopped))
        search.tell(scores)
    return tried


def _task(space: Space, point: Floats, seed: int) -> Task:
    return Task(resolve(space.spec(space.values(point), seed)), TRIAL)


def _confirm(plan: SearchPlan, best: TriedSettings, pool: _TrialPool, progress: _Progress) -> TuneOutcome:
    """Run the best settings and the original spec on seeds that the search did not use."""
    start = plan.space.start
    seeds = range(start.seed + _CONFIRM_FROM, start.seed + _CONFIRM_FROM + plan.confirm)
    ours = [plan.space.spec(best.values, seed) for seed in seeds]
    theirs = [replace(start, seed=seed) for seed in seeds]
    if not plan.confirm:
        return TuneOutcome(best, (), ())
    pool.connect([Task(resolve(spec)) for spec in (*ours, *theirs)])
    show = progress.start(start.rounds * 2 * plan.confirm)
    runs = run_all([*ours, *theirs], pool.out, pool.jobs, show, pool.on)
    return TuneOutcome(best, tuple(runs[: plan.confirm]), tuple(runs[plan.confirm :]))


def _check_space(space: Space) -> None:
    """Raise if some settings of the space cannot be run or have no effect."""
    points = [space.spec(values, space.start.seed) for values in space.settings_to_check()]
    resolve_all(points, [*(axis.key for axis in space.axes), *space.given])
    try:
        resolve(space.start)
    except UserError as error:
        raise UserError(
            "The best settings are compared with the spec itself, which cannot be run. Give one that can "
            f"(--spec FILE). {error}",
            code=error.code,
        ) from error


def build_searched_parts(plan: SearchPlan) -> None:
    """Build the data and models of the searched settings once, so that errors are found before the search."""
    space = plan.space
    values = [each for axis in space.axes if axis.key.startswith(_BUILT) for each in space.vary_one(axis)]
    points = [space.start, *(space.spec(each, space.start.seed) for each in values)]
    for point in points:
        Experiment.prepare(resolve(point), threads=1)


@dataclass
class _TrialPool:
    """Where trials run, and the folder of their results."""

    out: Path
    jobs: int | None
    on: str | None
    connections: ExitStack
    is_connected: bool = False
    tried: set[Task] = field(default_factory=set)  # by this command; the folder may have others

    def connect(self, tasks: Sequence[Task]) -> None:
        """Connect to the cluster, if any, once there is something to run: it takes seconds."""
        if self.on is not None and not self.is_connected and not all(task.is_done(self.out) for task in tasks):
            self.connections.enter_context(connect_ray(self.on))
            self.is_connected = True


class _Progress:
    """Converts the progress of one generation after the other into that of the whole command."""

    def __init__(self, report: OnProgress | None, total: int) -> None:
        self._report, self._total, self._started = report, total, 0

    def start(self, rounds: int) -> OnProgress:
        """Begin a part of this many rounds; return the function for its progress."""
        before = self._started
        self._started += rounds

        def show(_played: int, _total: int, share: float) -> None:
            if self._report is not None:
                played = before + share * rounds
                self._report(round(played), self._total, min(played / self._total, 1.0))

        return show


def _write_results(tuning: Tuning, out: Path) -> None:
    """Write results.csv and .jsonl with a row for all settings, best.toml, and tuning.json."""
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


def describe_gain(tuning: Tuning) -> str:
    """Compare the best settings with the original spec in words."""
    outcome, gain = tuning.outcome, tuning.outcome.gain
    if gain is None:
        return "not used (--confirm 0)"
    accuracy = [Spread.of([run.summary.final_accuracy for run in runs]) for runs in (outcome.found, outcome.given)]
    first, last = outcome.found[0].spec.seed, outcome.found[-1].spec.seed
    seeds = f"seeds {first} to {last}" if last > first else f"seed {first}"
    found, given = (format_percent(one) for one in accuracy)
    difference = f"{100 * gain.mean:+.2f} ± {100 * gain.deviation:.2f}" if gain.deviation else f"{100 * gain.mean:+.2f}"
    return f"{found} with the best settings, {given} with the original spec ({difference} points, {seeds})"
