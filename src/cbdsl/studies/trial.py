"""One trial of a search for settings: a run that is judged on the server's hold-out and may be stopped early.

Processes of a search import this module and not `tune`, which loads optuna.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np

from cbdsl.arrays import Floats
from cbdsl.errors import UserError
from cbdsl.runs.build import Experiment
from cbdsl.runs.loop import play_rounds
from cbdsl.runs.records import RunTotals
from cbdsl.spec import Spec
from cbdsl.studies.sweep import Task, TaskKind
from cbdsl.util.files import read_json, write_atomically, write_json
from cbdsl.util.serialize import Bounds, from_plain, to_plain

LEAST_HOLDOUT = 100  # samples on which settings are compared
_LARGEST = 1e9  # stands for a loss that is not finite
_LOSS_WEIGHT = 1e-6  # of the loss in a score: it orders trials with the same error

TRIAL = TaskKind("trial", f"{__name__}:run_trial", "trial.json", "trials")

Limits = Mapping[int, float]
"""By round: the largest error on the hold-out with which a trial goes on."""


@dataclass(frozen=True)
class Trial:
    """The result of one run of some settings."""

    errors: Annotated[tuple[float, ...], Bounds(1)]  # of w^g on the hold-out after every round; see `measure_error`
    loss: float  # at the end; infinite if it is not finite
    stopped: bool  # before its last round
    uplink_bytes: int
    classifies: bool = True  # errors are shares; otherwise losses

    @property
    def score(self) -> float:
        """Return the score; lower is better."""
        return self.errors[-1] + _LOSS_WEIGHT * min(self.loss, 1e3)

    def fits(self, limits: Limits) -> bool:
        """Return whether the trial ended as it would have with these limits."""
        stops = [error > limits.get(number, math.inf) for number, error in enumerate(self.errors, 1)]
        return not any(stops[:-1]) and stops[-1] == self.stopped


def median_limits(known: Sequence[Trial], total: int) -> Limits:
    """Return the limits of the median rule (Golovin et al., 2017), after a third and two thirds of all rounds."""
    limits = {}
    for at in {total // 3, 2 * total // 3} - {0, total}:
        seen = [trial.errors[at - 1] for trial in known if len(trial.errors) >= at]
        if seen:
            limits[at] = float(np.median(seen))
    return limits


def prepare_trial(task: Task, out: Path, limits: Limits) -> None:
    """Write a trial's limits into its folder; keep the result of another search if it would be the same."""
    folder = task.folder(out)
    if task.is_done(out):
        if read_trial(task, out).fits(limits):
            return
        (folder / TRIAL.done_file).unlink()
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "spec.toml", task.spec.to_toml().encode())
    write_json(folder / "stop.json", limits)


def run_trial(spec: Spec, folder: Path, threads: int, report: Callable[[object], None]) -> None:
    """Run a trial; see `pool.TaskFunction`."""
    stop = json.loads((folder / "stop.json").read_text(encoding="utf-8"))
    limits = {int(at): limit for at, limit in stop.items()}
    experiment = Experiment.prepare(spec, threads=threads)
    own, train = experiment.split.holdout, experiment.dataset.train
    check_holdout(len(own))
    errors: list[float] = []
    totals, stopped, state = RunTotals(), False, experiment.first_state()
    for played in play_rounds(experiment, state, measured=False):
        state = played.state
        totals.add(played.record)
        errors.append(measure_error(experiment, state.global_best))
        report(played.record)
        if errors[-1] > limits.get(played.record.round, math.inf):
            stopped = played.record.round < spec.rounds
            break
    loss = float(experiment.engine.losses(state.global_best[None], train, own)[0])
    classifies = experiment.dataset.task == "classification"
    trial = Trial(tuple(errors), loss, stopped, totals.uplink_bytes, classifies)
    write_json(folder / TRIAL.done_file, to_plain(trial))


def measure_error(experiment: Experiment, weights: Floats) -> float:
    """Return the share of the hold-out that a classifier gets wrong; of another model its loss there."""
    own, train, engine = experiment.split.holdout, experiment.dataset.train, experiment.engine
    if experiment.dataset.task == "classification":
        return 1.0 - float(engine.accuracies(weights[None], train, own)[0])
    loss = float(engine.losses(weights[None], train, own)[0])
    return loss if loss < _LARGEST else _LARGEST  # or NaN


def check_holdout(count: int) -> None:
    """Raise if the hold-out is too small to compare settings."""
    if count < LEAST_HOLDOUT:
        raise UserError(
            f"Settings are judged on the server's hold-out, {LEAST_HOLDOUT} samples or more; data.holdout is {count}.",
            code="out-of-range",
        )


def read_trial(task: Task, out: Path) -> Trial:
    """Read the result of a finished trial."""
    path = task.folder(out) / TRIAL.done_file
    try:
        trial = from_plain(Trial, read_json(path.read_text(encoding="utf-8")), defaults=True, nan=True)
        return replace(trial, loss=math.inf) if math.isnan(trial.loss) else trial
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is damaged ({error}). Remove its folder and start again; the trial is repeated.",
            code="damaged-file",
        ) from error
