"""Search for good settings with optuna: the space of settings, the particle swarm as a sampler, and the search itself.

A point of the space has one number from 0 to 1 for every searched setting. Each value of a setting that is not a real
number has an equal part of that interval.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from cbdsl import register
from cbdsl.algorithm.particles import Coefficients, Particles, remember, swarm_terms
from cbdsl.arrays import Doubles, Floats
from cbdsl.errors import UserError, missing, shown, unknown
from cbdsl.rng import seed_of, stream
from cbdsl.runs.build import Experiment
from cbdsl.runs.folder import RunFolder
from cbdsl.runs.metrics import Metric, find_metric
from cbdsl.runs.records import finite
from cbdsl.runs.resolve import resolve, resolve_all
from cbdsl.spec import Spec, dotted_keys, parse_setting, setting_values, unknown_setting, words
from cbdsl.studies.compare import Spread, format_metric
from cbdsl.studies.sweep import FinishedRun, OnProgress, Task, read_run, refuse_other_results, run_tasks, write_rows
from cbdsl.studies.trial import TRIAL, Limits, Trial, check_holdout, median_limits, prepare_trial, read_trial
from cbdsl.swarms.ray_swarm import connect_ray
from cbdsl.util.files import write_atomically, write_json
from cbdsl.util.serialize import Bounds, check_value

try:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
except ImportError as error:
    raise missing("optuna", "tune", "it searches for settings") from error

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
        return self._shorten(self._interpolate(share))

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

    def suggest(self, trial: optuna.Trial) -> Any:  # noqa: ANN401 - any value of a spec
        """Return the value that a trial of optuna has, or gets from the sampler."""
        if self.choices:
            chosen = trial.suggest_categorical(self.key, [repr(choice) for choice in self.choices])
            return next(choice for choice in self.choices if repr(choice) == chosen)
        if self.whole:
            return trial.suggest_int(self.key, int(self.low), int(self.high), log=self.log)
        return self._shorten(trial.suggest_float(self.key, self.low, self.high, log=self.log))

    def to_optuna(self, value: Any) -> Any:  # noqa: ANN401 - any value of a spec
        """Return a value as a sampler has to: optuna stores choices as text."""
        return repr(value) if self.choices else value

    def _shorten(self, value: float) -> float:
        return min(max(float(f"{value:.{_DIGITS}g}"), self.low), self.high)

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

    def first_points(self, count: int, seed: int) -> Floats:
        """Return the first points of every search, (N, K): the spec's own, if it is inside, and random ones."""
        points = stream(seed, "search").random((count, len(self.axes)), np.float32)
        known = self.start_point()
        if known is not None:
            points[0] = known
        return points

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
SEARCHES = ("swarm", "random", "tpe")


class SwarmSampler(optuna.samplers.BaseSampler):
    """Particle swarm optimisation of settings: the swarm terms of Eq. (5) and the memory of Eq. (6), without SGD.

    Trials come in generations, one trial per particle. The points of a generation follow from the first points, the
    seed and the scores of earlier generations, so that a resumed search asks for the same points.
    """

    def __init__(self, axes: Sequence[Axis], first: Floats, seed: int) -> None:
        targets = stream(seed, "search", 1).random(first.shape, np.float32)
        velocities = (targets - first) / np.float32(2)  # with velocity 0 the first leader would not move
        self._particles = Particles(first, velocities, first.copy(), np.full(len(first), np.inf))
        self._columns = {axis.key: (axis, column) for column, axis in enumerate(axes)}
        self._generation, self._seed = 0, seed

    def infer_relative_search_space(self, _study: optuna.Study, _trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
        """Return no settings: `sample_independent` draws all of them."""
        return {}

    def sample_relative(
        self, _study: optuna.Study, _trial: optuna.trial.FrozenTrial, _search_space: dict[str, Any]
    ) -> dict[str, Any]:
        """Return no settings: `sample_independent` draws all of them."""
        return {}

    def sample_independent(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial, param_name: str, _distribution: object
    ) -> Any:  # noqa: ANN401 - any value of a spec
        """Return one setting of a trial: that of its particle in its generation."""
        count = len(self._particles.positions)
        generation, row = divmod(trial.number, count)
        while self._generation < generation:
            own = study.get_trials(deepcopy=False)[self._generation * count :][:count]
            self._move(np.array([math.inf if one.value is None else one.value for one in own]))
        axis, column = self._columns[param_name]
        return axis.to_optuna(axis.value(float(self._particles.positions[row, column])))

    def _move(self, scores: Doubles) -> None:
        """Update the personal bests with the scores of a generation (N,), then move to the next one."""
        kept = remember(self._particles, self._particles.positions, self._particles.velocities, scores)
        self._generation += 1
        leader = kept.personal_best[int(np.argmin(kept.personal_score))]  # w^g, (K,)
        draws = stream(self._seed, "search", self._generation + 1)
        cognitive, social = draws.random((2, *kept.positions.shape), np.float32) * np.float32(_PULL)
        velocities = swarm_terms(kept, leader, Coefficients(_INERTIA, cognitive, social))  # (N, K)
        moved = kept.positions + velocities
        inside = np.clip(moved, 0, 1)
        velocities[moved != inside] = 0  # a particle stops at the boundary
        self._particles = replace(kept, positions=inside, velocities=velocities)


_CONFIRM_FROM = 1000  # the first seed of the confirmation, counted from the spec's own
MOST = 10_000  # trials
JOURNAL = "trials.journal"  # of optuna; one study per search
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
        check_value(self.budget, Bounds(1, MOST), "--budget")
        check_value(self.repeats, Bounds(1, MOST), "--repeat")
        check_value(self.seeds, Bounds(1, MOST), "--seeds")
        check_value(self.confirm, Bounds(0, MOST), "--confirm")
        for name in self.by:
            if name not in SEARCHES:
                raise unknown("search", name, SEARCHES)
        if not self.by or len(set(self.by)) < len(self.by):
            raise UserError(
                f"Name searches, each once: {', '.join(SEARCHES)}; given {shown(','.join(self.by))}.", code="conflict"
            )
        check_holdout(self.space.start.data.holdout)
        _check_space(self.space)

    @property
    def generation(self) -> int:
        """Return how many settings are tried at once: about the square root of the budget, at least 4."""
        return min(self.budget, max(4, math.isqrt(self.budget) + 2))

    @property
    def runs(self) -> int:
        """Return the number of runs of all searches and of the confirmation."""
        return self.budget * self.seeds * len(self.by) * self.repeats + 2 * self.confirm

    def digest(self) -> str:
        """Return a hash of what decides which trials a search makes, and how they end."""
        space = self.space
        specs = [space.spec(values, space.start.seed) for axis in space.axes for values in space.vary_one(axis)]
        keys = [resolve(spec).key() for spec in (space.start, *specs)]
        parts = (space.axes, self.generation, self.seeds, self.early, keys)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


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
    classifies: bool = True

    @property
    def error_text(self) -> str:
        """The error in words."""
        return f"{self.error:.2%} wrong" if self.classifies else f"a loss of {self.error:.4g}"


@dataclass(frozen=True, eq=False)
class TuneOutcome:
    """The best settings, and runs with them and with the original spec on other seeds; no runs with --confirm 0."""

    best: TriedSettings
    found: tuple[FinishedRun, ...]
    given: tuple[FinishedRun, ...]

    @property
    def metric_name(self) -> str:
        """The name of the main metric of the runs."""
        return self.found[0].summary.metric if self.found else "accuracy"

    @property
    def metric(self) -> Metric:
        """The main metric of the runs."""
        return find_metric(self.metric_name)

    @property
    def sign(self) -> int:
        """1 if the main metric is better when it is higher, otherwise -1."""
        return 1 if self.metric.better == "higher" else -1

    @property
    def gain(self) -> Spread | None:
        """Return the gain in the main metric, positive if the best settings are better, paired by seed."""
        pairs = zip(self.found, self.given, strict=True)
        gains = [self.sign * (ours.summary.final_value - theirs.summary.final_value) for ours, theirs in pairs]
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
    folder = RunFolder.open_or_create(out)
    try:
        with ExitStack() as connections:
            runner = _Runner(plan, out, jobs, on_progress, on, connections)
            candidates: list[TriedSettings] = []
            for repeat, name in itertools.product(range(plan.repeats), plan.by):
                candidates += _search(plan, name, repeat, runner)
            best = min((one for one in candidates if not one.stopped), key=lambda one: (one.score, one.number))
            tuning = Tuning(plan, tuple(candidates), _confirm(plan, best, runner))
    finally:
        folder.close()
    _write_results(tuning, out)
    return tuning


def _search(plan: SearchPlan, name: str, repeat: int, runner: _Runner) -> list[TriedSettings]:
    """Run one search, a generation at a time, or the rest of it."""
    space, rounds, seed = plan.space, plan.space.start.rounds, plan.space.start.seed + repeat
    study = _open_study(runner.out / JOURNAL, f"{name}-{repeat}-{plan.digest()}")
    swarm = SwarmSampler(space.axes, space.first_points(plan.generation, seed), seed)
    candidates: list[TriedSettings] = []
    known: list[Trial] = []
    for first in range(0, plan.budget, plan.generation):
        trials = []
        for number in range(first, min(first + plan.generation, plan.budget)):
            study.sampler = swarm if first == 0 else _make_sampler(name, swarm, plan, seed_of(seed, "search", number))
            begun = study.get_trials(deepcopy=False)[number:]
            trial = optuna.Trial(study, begun[0]._trial_id) if begun else study.ask()
            trials.append((trial, {axis.key: axis.suggest(trial) for axis in space.axes}))
        limits = median_limits(known, rounds) if plan.early else {}
        results = runner.run_trials([values for _, values in trials], limits)
        for (trial, values), runs in zip(trials, results, strict=True):
            known += runs
            score = float(np.mean([run.score for run in runs]))
            error = float(np.mean([run.errors[-1] for run in runs]))
            stopped = any(run.stopped for run in runs)
            candidates.append(
                TriedSettings(name, repeat, trial.number + 1, values, score, error, stopped, runs[0].classifies)
            )
            _tell(study, trial, score, stopped, max(len(run.errors) for run in runs))
    return candidates


def _open_study(path: Path, name: str) -> optuna.Study:
    """Open the study of one search in the journal of the folder.

    A journal that is damaged is begun again: the results are in trials/, and the search asks for the same points.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)  # of a process that was killed: this one has the folder
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        path.unlink()
    try:
        storage = JournalStorage(JournalFileBackend(str(path)))
    except (ValueError, KeyError, TypeError):
        path.unlink()
        storage = JournalStorage(JournalFileBackend(str(path)))
    return optuna.create_study(storage=storage, study_name=name, load_if_exists=True)


def _make_sampler(name: str, swarm: SwarmSampler, plan: SearchPlan, seed: int) -> optuna.samplers.BaseSampler:
    """Return the sampler of one trial; it has a seed of its own, so that a resumed search asks for the same points."""
    if name == "random":
        return optuna.samplers.RandomSampler(seed % 2**32)
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed % 2**32, n_startup_trials=plan.generation)
    return swarm


def _tell(study: optuna.Study, trial: optuna.Trial, score: float, stopped: bool, rounds: int) -> None:
    """Store the score of a trial, unless it is stored already."""
    stored = study.get_trials(deepcopy=False)[trial.number]
    if stored.state.is_finished():
        return
    if stopped:
        if not stored.intermediate_values:  # a process that was killed may have reported it
            trial.report(score, rounds)
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    else:
        study.tell(trial, score)


def _confirm(plan: SearchPlan, best: TriedSettings, runner: _Runner) -> TuneOutcome:
    """Run the best settings and the original spec on seeds that the search did not use."""
    start = plan.space.start
    seeds = range(start.seed + _CONFIRM_FROM, start.seed + _CONFIRM_FROM + plan.confirm)
    ours = [plan.space.spec(best.values, seed) for seed in seeds]
    theirs = [replace(start, seed=seed) for seed in seeds]
    tasks = [Task(resolve(spec)) for spec in (*ours, *theirs)]
    if tasks:
        runner.run(tasks)
    runs = [read_run(task.folder(runner.out)) for task in tasks]
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
class _Runner:
    """Runs the trials of a search here or on a cluster, with their results in a folder."""

    plan: SearchPlan
    out: Path
    jobs: int | None
    on_progress: OnProgress | None
    on: str | None
    connections: ExitStack
    is_connected: bool = False
    started: int = 0  # tasks, those that were done before among them
    tried: set[Task] = field(default_factory=set)  # by this command; the folder may have others

    def run_trials(self, settings: Sequence[Mapping[str, Any]], limits: Limits) -> Iterator[list[Trial]]:
        """Run the trials of one generation that are not done; return the results of each, by seed."""
        space, seed = self.plan.space, self.plan.space.start.seed
        groups = [
            [Task(resolve(space.spec(values, seed + run)), TRIAL) for run in range(self.plan.seeds)]
            for values in settings
        ]
        tasks = [task for group in groups for task in group]
        for task in tasks:
            if task not in self.tried:  # the first search that tries it sets its limits
                prepare_trial(task, self.out, limits)
        self.tried.update(tasks)
        self.run(tasks)
        return ([read_trial(task, self.out) for task in group] for group in groups)

    def run(self, tasks: Sequence[Task]) -> None:
        """Run the tasks that are not done."""
        rounds, start = self.plan.space.start.rounds, self.started
        self.started += len(tasks)

        def show(_played: int, _total: int, share: float) -> None:
            if self.on_progress is not None:
                done = start + share * len(tasks)
                self.on_progress(round(done * rounds), self.plan.runs * rounds, min(done / self.plan.runs, 1.0))

        if self.on is not None and not self.is_connected and not all(task.is_done(self.out) for task in tasks):
            self.connections.enter_context(connect_ray(self.on))  # once, and not if nothing is left: it takes seconds
            self.is_connected = True
        run_tasks(tasks, self.out, self.jobs, show, self.on)


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
            f"test_{tuning.outcome.metric_name}": {
                "found": [finite(run.summary.final_value) for run in tuning.outcome.found],
                "given": [finite(run.summary.final_value) for run in tuning.outcome.given],
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
    metric, both = outcome.metric, (outcome.found, outcome.given)
    spreads = [Spread.of([run.summary.final_value for run in runs]) for runs in both]
    first, last = outcome.found[0].spec.seed, outcome.found[-1].spec.seed
    seeds = f"seeds {first} to {last}" if last > first else f"seed {first}"
    found, given = (format_metric(one, metric) for one in spreads)
    if not metric.is_share:
        found, title = f"{metric.title} {found}", f"{metric.better} is better"
        return f"{found} with the best settings, {given} with the original spec ({title}, {seeds})"
    difference = f"{100 * gain.mean:+.2f} ± {100 * gain.deviation:.2f}" if gain.deviation else f"{100 * gain.mean:+.2f}"
    return f"{found} with the best settings, {given} with the original spec ({difference} points, {seeds})"
