"""What a search looks through: settings and their ranges, seen as points of a cube. Runs nothing.

A point has one number from 0 to 1 for every setting that is searched; a whole number or a word owns an equal part of
that span.
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
from cbdsl.errors import UserError, shown, unknown
from cbdsl.rng import seed_of, stream
from cbdsl.runs.build import Experiment
from cbdsl.runs.folder import RunFolder
from cbdsl.runs.loop import play_rounds
from cbdsl.runs.records import RunTotals
from cbdsl.runs.resolve import resolve, resolve_all
from cbdsl.spec import Spec, dotted_keys, parse_setting, setting_values, unknown_setting, words
from cbdsl.studies.compare import Spread, percent_words
from cbdsl.studies.sweep import FinishedRun, OnProgress, Task, TaskKind, perform, refuse_others, run_all, write_rows
from cbdsl.swarms.ray_swarm import connected
from cbdsl.util.files import write_atomically, write_json

_HOW = (
    "Write --over swarm.inertia=0.1..1, --over local.learning_rate=1e-3..1e-1:log, or --over local.batch_size=5,10,20."
)
_NEVER = ("seed", "rounds", "preset", "data.source", "data.holdout")
_LOOKED_AT = (0.0, 0.382, 1.0)  # places of a range: a number of workers may be right at both ends, and not between
_MOST_CHECKED = 1000  # combinations; a second
_DIGITS = 4  # of a number that is tried: more would only make a spec hard to read


@dataclass(frozen=True)
class Axis:
    """One setting: a range of numbers, or values to choose from."""

    key: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    whole: bool = False
    choices: tuple[Any, ...] = ()

    def value(self, place: float) -> Any:  # noqa: ANN401 - any value of a spec
        """The value at a place from 0 to 1."""
        share = min(max(place, 0.0), 1.0)
        if self.choices:
            return self.choices[min(int(share * len(self.choices)), len(self.choices) - 1)]
        if self.whole:
            low, high = int(self.low), int(self.high)
            if self.log:
                return min(max(round(math.exp(self._between(math.log(low), math.log(high), share))), low), high)
            return min(low + int(share * (high - low + 1)), high)
        if self.log:
            found = math.exp(self._between(math.log(self.low), math.log(self.high), share))
        else:
            found = self._between(self.low, self.high, share)
        return min(max(float(f"{found:.{_DIGITS}g}"), self.low), self.high)

    def place(self, value: Any) -> float | None:  # noqa: ANN401 - any value of a spec
        """Where a value lies, from 0 to 1; none if the range does not have it."""
        if self.choices:
            return (self.choices.index(value) + 0.5) / len(self.choices) if value in self.choices else None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not self.low <= value <= self.high:
            return None
        if self.whole and not self.log:
            return (value - self.low + 0.5) / (self.high - self.low + 1)
        low, high, at = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return (at - low) / (high - low)

    @staticmethod
    def _between(low: float, high: float, share: float) -> float:
        return low + (high - low) * share


@dataclass(frozen=True)
class Space:
    """All settings that are searched, around a spec that has the others."""

    start: Spec
    axes: tuple[Axis, ...]
    given: Mapping[str, Any] = field(default_factory=dict)  # settings of the start that no axis resets

    def __post_init__(self) -> None:
        keys = [axis.key for axis in self.axes]
        if not keys:
            raise UserError(f"There is nothing to tune. {_HOW}")
        if len(set(keys)) != len(keys):
            raise UserError(f"A setting can be searched once; given {', '.join(keys)}.")

    def values(self, point: Floats) -> dict[str, Any]:
        """The settings at a point (K,)."""
        return {axis.key: axis.value(float(place)) for axis, place in zip(self.axes, point, strict=True)}

    def spec(self, values: Mapping[str, Any], seed: int) -> Spec:
        """The run with these settings and a seed, to be resolved."""
        return self.start.with_settings({**self.given, **values, "seed": seed})

    def checks(self) -> Iterator[dict[str, Any]]:
        """Settings that show whether a search can be held: every choice, and the ends of ranges, alone and together."""
        for axis in self.axes:
            yield from self.along(axis)
        ends = [axis.choices or (axis.value(0.0), axis.value(1.0)) for axis in self.axes]
        for together in itertools.islice(itertools.product(*ends), _MOST_CHECKED):
            yield {axis.key: value for axis, value in zip(self.axes, together, strict=True)}

    def along(self, axis: Axis) -> list[dict[str, Any]]:
        """Settings that differ in one of them alone: every choice, or some places of the range."""
        usual = {one.key: one.value(0.0) for one in self.axes}
        values = axis.choices or [axis.value(place) for place in _LOOKED_AT]
        return [{**usual, axis.key: value} for value in values]

    def own_point(self) -> Floats | None:
        """Where the spec itself lies, (K,); none if it is outside."""
        values = setting_values(resolve(self.start), [axis.key for axis in self.axes])
        places = [axis.place(_single(values[axis.key])) for axis in self.axes]
        return None if None in places else np.array(places, np.float32)


def parse_range(text: str, start: Spec) -> Axis:
    """Parse `key=0.1..1`, `key=1e-3..1e-1:log` or `key=a,b,c` of the command line."""
    key, _ = parse_setting(text)
    if not key.startswith("options.") and key not in dotted_keys():
        raise unknown_setting(key)
    if key in _NEVER:
        raise UserError(f"{key} is nothing to tune: results would not be comparable. {_HOW}")
    span = text.partition("=")[2].strip()
    if ".." not in span or "," in span:
        return _choices(key, span, text)
    span, _, scale = span.partition(":")
    if scale not in {"", "log", "linear"}:
        raise UserError(f"{shown(text)} asks for the scale {shown(scale)}; there are log and linear.")
    present = _present(start, key)
    if isinstance(present, str | bool):
        values = "true,false" if isinstance(present, bool) else "a,b"
        raise UserError(f"{key} is no number, and has no range; given {shown(span)}. Write --over {key}={values}.")
    try:
        low, high = (float(end) for end in span.split(".."))
    except ValueError:
        raise UserError(f"{shown(text)} is not a range of numbers. {_HOW}") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserError(f"{shown(text)} is an empty range: it must begin below its end, both finite. {_HOW}")
    if scale == "log" and low <= 0:
        raise UserError(f"{shown(text)}: a logarithmic range begins above 0; given {low:g}.")
    whole = isinstance(present, int) or (present is None and all(map(_is_whole, span.split(".."))))
    if whole and not (low.is_integer() and high.is_integer()):
        raise UserError(f"{key} takes whole numbers; given {shown(span)}.")
    axis = Axis(key, low, high, scale == "log", whole)
    for end in (0.0, 1.0):
        start.with_settings({key: axis.value(end)})  # says what is wrong with it
    return axis


def _choices(key: str, span: str, text: str) -> Axis:
    found = parse_setting(f"{key}=[{span}]")[1]
    values = tuple(found if isinstance(found, list) else [parse_setting(f"{key}={word}")[1] for word in words(span)])
    if all(value == values[0] for value in values):
        raise UserError(f"{shown(text)} leaves no choice. {_HOW}")
    return Axis(key, choices=values)


def _present(start: Spec, key: str) -> Any:  # noqa: ANN401 - any value of a spec
    """The value that a setting has, or its part's default; none if neither is known."""
    value = _single(setting_values(start, [key])[key])
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


def _single(value: Any) -> Any:  # noqa: ANN401 - any value of a spec
    """A pair of equal numbers is one number: swarm.inertia may be given as one."""
    pair = isinstance(value, tuple) and len(value) == 2 and value[0] == value[1]
    return value[0] if pair else value


_INERTIA = 0.7298  # c0, and below delta_1 = delta_2 with c1, c2 ~ U(0, delta): a swarm with these settles down
_PULL = 1.49618  # (Clerc and Kennedy, 2002)


class Search(Protocol):
    """Proposes points of the cube [0, 1]^K."""

    def ask(self) -> Floats:
        """The points of the next generation, (N, K)."""
        ...

    def tell(self, scores: Doubles) -> None:
        """How they did, (N,): the lower the better; what failed is infinite."""
        ...


def first_points(count: int, size: int, seed: int, known: Floats | None) -> Floats:
    """Where every search begins, (N, K): a point that is known, if any, and others at random."""
    points = stream(seed, "search").random((count, size), np.float32)
    if known is not None:
        points[0] = known
    return points


class SwarmSearch:
    """Particle swarm optimisation of settings: the swarm terms of Eq. (5) and the memory of Eq. (6), without SGD."""

    def __init__(self, first: Floats, seed: int) -> None:
        targets = stream(seed, "search", 1).random(first.shape, np.float32)
        velocities = (targets - first) / np.float32(2)  # at rest, the first to lead would stay where it is
        self._particles = Particles(first, velocities, first.copy(), np.full(len(first), np.inf))
        self._generation, self._seed = 1, seed

    def ask(self) -> Floats:
        """See `Search.ask`."""
        return self._particles.positions

    def tell(self, scores: Doubles) -> None:
        """See `Search.tell`: remember, then move."""
        kept = remember(self._particles, self._particles.positions, self._particles.velocities, scores)
        self._generation += 1
        leader = kept.personal_best[int(np.argmin(kept.personal_score))]  # w^g, (K,)
        draws = stream(self._seed, "search", self._generation)
        cognitive, social = draws.random((2, *kept.positions.shape), np.float32) * np.float32(_PULL)
        velocities = swarm_terms(kept, leader, Coefficients(_INERTIA, cognitive, social))  # (N, K)
        moved = kept.positions + velocities
        inside = np.clip(moved, 0, 1)
        velocities[moved != inside] = 0  # at a wall a particle stops
        self._particles = replace(kept, positions=inside, velocities=velocities)


class RandomSearch:
    """Points at random: what every search has to beat (Bergstra and Bengio, 2012)."""

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
        demand("tpe")
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
"""By name; made of the first points and a seed."""


def demand(name: str) -> None:
    """Refuse a search that is not known, or not installed."""
    if name not in SEARCHES:
        raise unknown("search", name, SEARCHES)
    if name == "tpe" and find_spec("optuna") is None:
        raise UserError("The search 'tpe' is optuna's, which is not installed. Run: pip install 'cbdsl[tune]'")


LEAST_HOLDOUT = 100  # samples on which settings are compared
_OF_LOSS = 1e-6  # how much of the loss is in a score: it parts those that have equally many right

TRIAL = TaskKind("trial", f"{__name__}:perform_trial", "trial.json", "trials")


@dataclass(frozen=True)
class Trial:
    """What came of a try."""

    errors: tuple[float, ...]  # share of the hold-out that w^g gets wrong, after every round that was played
    loss: float  # at the end; infinite if it is no number
    stopped: bool  # given up before its last round
    uplink_bytes: int

    @property
    def score(self) -> float:
        """The lower the better."""
        return self.errors[-1] + _OF_LOSS * min(self.loss, 1e3)


@dataclass(frozen=True)
class EarlyStopping:
    """When a try is given up: after which rounds it is looked at, and how many errors are too many by then."""

    rounds: tuple[int, ...] = ()
    errors: tuple[float, ...] = ()

    def gives_up(self, round_number: int, error: float) -> bool:
        """Whether a try with such an error after such a round is hopeless."""
        return any(at == round_number and error > limit for at, limit in zip(self.rounds, self.errors, strict=True))

    def fits(self, trial: Trial) -> bool:
        """Whether a try ended as it would have with this rule, whatever rule it was played with."""
        given_up = [self.gives_up(number, error) for number, error in enumerate(trial.errors, 1)]
        return not any(given_up[:-1]) and given_up[-1] == trial.stopped


def stop_after(known: Sequence[Trial], total: int) -> EarlyStopping:
    """The median rule (Golovin et al., 2017): at a third and at two thirds, as good as half of those before."""
    looks = tuple(sorted({total // 3, 2 * total // 3} - {0, total}))
    limits = []
    for at in looks:
        seen = [trial.errors[at - 1] for trial in known if len(trial.errors) >= at]
        limits.append(float(np.median(seen)) if seen else 1.0)
    return EarlyStopping(looks, tuple(limits))


def prepare(task: Task, out: Path, stop: EarlyStopping) -> None:
    """Say in a try's folder when it is given up; what another search left there stays if it would end the same."""
    folder = task.folder(out)
    if task.is_done(out):
        if stop.fits(read_trial(task, out)):
            return
        (folder / TRIAL.shows).unlink()
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "spec.toml", task.spec.to_toml().encode())
    write_json(folder / "stop.json", asdict(stop))


def perform_trial(spec: Spec, folder: Path, threads: int, report: Callable[[object], None]) -> None:
    """Play a try; see `sweep.Performer`."""
    words = json.loads((folder / "stop.json").read_text(encoding="utf-8"))
    stop = EarlyStopping(tuple(words["rounds"]), tuple(words["errors"]))
    stage = Experiment.prepare(spec, threads=threads)
    own, train = stage.split.holdout, stage.dataset.train
    if len(own) < LEAST_HOLDOUT:
        raise UserError(f"Settings are judged on {LEAST_HOLDOUT} samples or more; data.holdout is {len(own)}.")
    errors: list[float] = []
    totals, stopped, state = RunTotals(), False, stage.first_state()
    for played in play_rounds(stage, state, measured=False):
        state = played.state
        totals.add(played.record)
        errors.append(1.0 - float(stage.engine.accuracies(state.global_best[None], train, own)[0]))
        report(played.record)
        if stop.gives_up(played.record.round, errors[-1]):
            stopped = played.record.round < spec.rounds
            break
    loss = float(stage.engine.losses(state.global_best[None], train, own)[0])
    loss = loss if math.isfinite(loss) else math.inf
    write_json(
        folder / TRIAL.shows,
        {
            "errors": errors,
            "loss": None if math.isinf(loss) else loss,
            "stopped": stopped,
            "uplink_bytes": totals.uplink_bytes,
        },
    )


def read_trial(task: Task, out: Path) -> Trial:
    """What came of a try that is done."""
    path = task.folder(out) / TRIAL.shows
    try:
        words = json.loads(path.read_text(encoding="utf-8"))
        if not words["errors"]:
            raise ValueError("it has no rounds")
        loss = math.inf if words["loss"] is None else float(words["loss"])
        return Trial(tuple(map(float, words["errors"])), loss, bool(words["stopped"]), int(words["uplink_bytes"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is damaged ({error}). Remove its folder, and start again: it is tried anew."
        ) from error


_HELD_OUT = 1000  # the first seed of the confirmation, counted from the spec's own
MOST = 10_000  # tries
_BUILT = ("data.", "options.", "workers", "model", "init")  # what a run is made of, beside numbers


@dataclass(frozen=True)
class SearchPlan:
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
class TriedSettings:
    """Settings that were tried."""

    search: str
    repeat: int
    number: int  # from 1, in the order of the search
    values: Mapping[str, Any]
    score: float
    error: float  # on the hold-out, mean over seeds
    stopped: bool


@dataclass(frozen=True, eq=False)
class TuneOutcome:
    """The best settings, and how they and the spec do on other seeds; both empty where nothing was confirmed."""

    best: TriedSettings
    found: tuple[FinishedRun, ...]
    given: tuple[FinishedRun, ...]

    @property
    def gain(self) -> Spread | None:
        """In test accuracy, seed by seed."""
        pairs = zip(self.found, self.given, strict=True)
        gains = [ours.summary.final_accuracy - theirs.summary.final_accuracy for ours, theirs in pairs]
        return Spread.of(gains) if gains else None


@dataclass(frozen=True, eq=False)
class Tuning:
    """What a search leaves."""

    plan: SearchPlan
    candidates: tuple[TriedSettings, ...]
    outcome: TuneOutcome

    def curve(self, search: str, repeat: int) -> list[float]:
        """The lowest error on the hold-out so far, after every try."""
        own = [one for one in self.candidates if (one.search, one.repeat) == (search, repeat)]
        finished = [one.error if not one.stopped else math.inf for one in own]
        return list(np.minimum.accumulate(finished)) if finished else []

    def ends(self, search: str) -> Spread:
        """The lowest error of each repeat."""
        return Spread.of([self.curve(search, repeat)[-1] for repeat in range(self.plan.repeats)])


def run_search(
    plan: SearchPlan, out: Path, jobs: int | None = None, on_progress: OnProgress | None = None, on: str | None = None
) -> Tuning:
    """Search, or go on with a search in its folder; then confirm what was found. on: a Ray cluster, if any."""
    refuse_others(out, "trials", ("results.csv", "spec.toml"))
    folder = RunFolder.take(out)
    try:
        with ExitStack() as connections:
            return _held(plan, _TrialPool(out, jobs, on, connections), on_progress)
    finally:
        folder.close()


def _held(plan: SearchPlan, pool: _TrialPool, on_progress: OnProgress | None) -> Tuning:
    candidates: list[TriedSettings] = []
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


def _search(plan: SearchPlan, name: str, repeat: int, pool: _TrialPool, progress: _Progress) -> list[TriedSettings]:
    """One search, whole."""
    space, seed = plan.space, plan.space.start.seed + repeat
    first = first_points(plan.generation, len(space.axes), seed, space.own_point())
    search = SEARCHES[name](first, seed)
    tried: list[TriedSettings] = []
    known: list[Trial] = []
    while len(tried) < plan.budget:
        points = search.ask()
        wanted = points[: plan.budget - len(tried)]
        stop = stop_after(known, space.start.rounds) if plan.early else EarlyStopping()
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
            tried.append(TriedSettings(name, repeat, len(tried) + 1, values, scores[place], error, stopped))
        search.tell(scores)
    return tried


def _task(space: Space, point: Floats, seed: int) -> Task:
    return Task(resolve(space.spec(space.values(point), seed)), TRIAL)


def _confirm(plan: SearchPlan, best: TriedSettings, pool: _TrialPool, progress: _Progress) -> TuneOutcome:
    """What was found and the spec as it is, on seeds that the search never saw, on the test set."""
    start = plan.space.start
    seeds = range(start.seed + _HELD_OUT, start.seed + _HELD_OUT + plan.confirm)
    ours = [plan.space.spec(best.values, seed) for seed in seeds]
    theirs = [replace(start, seed=seed) for seed in seeds]
    progress.part(start.rounds * 2 * plan.confirm)
    pool.connect([Task(resolve(spec)) for spec in (*ours, *theirs)])
    done = run_all([*ours, *theirs], pool.out, pool.jobs, progress.show, pool.on) if plan.confirm else []
    return TuneOutcome(best, tuple(done[: plan.confirm]), tuple(done[plan.confirm :]))


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


def rehearse(plan: SearchPlan) -> None:
    """Build what the spec and the searched settings of data and models name, so that what does not fit is found now."""
    space = plan.space
    values = [each for axis in space.axes if axis.key.startswith(_BUILT) for each in space.along(axis)]
    points = [space.start, *(space.spec(each, space.start.seed) for each in values)]
    for point in points:
        Experiment.prepare(resolve(point), threads=1)


@dataclass
class _TrialPool:
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
