"""One try of a search: play a spec's rounds and judge w^g on the server's hold-out after each. Never sees the test set.

A try that falls behind what others had by the same round is given up; how far behind is in its folder, in `stop.json`,
before it begins. A try that was interrupted is played again from its first round, to the same numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from cbdsl.errors import UserError
from cbdsl.files import write_atomically, write_json
from cbdsl.runs.play import rounds
from cbdsl.runs.stage import Stage
from cbdsl.spec import Spec
from cbdsl.study.sweep import Kind, Task

LEAST_HOLDOUT = 100  # samples on which settings are compared
_OF_LOSS = 1e-6  # how much of the loss is in a score: it parts those that have equally many right

TRIAL = Kind("trial", f"{__name__}:perform_trial", "trial.json", "trials")


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
class Stop:
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


def stop_after(known: Sequence[Trial], total: int) -> Stop:
    """The median rule (Golovin et al., 2017): at a third and at two thirds, as good as half of those before."""
    looks = tuple(sorted({total // 3, 2 * total // 3} - {0, total}))
    limits = []
    for at in looks:
        seen = [trial.errors[at - 1] for trial in known if len(trial.errors) >= at]
        limits.append(float(np.median(seen)) if seen else 1.0)
    return Stop(looks, tuple(limits))


def prepare(task: Task, out: Path, stop: Stop) -> None:
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
    stop = Stop(tuple(words["rounds"]), tuple(words["errors"]))
    stage = Stage.prepare(spec, threads=threads)
    own, train = stage.split.holdout, stage.dataset.train
    if len(own) < LEAST_HOLDOUT:
        raise UserError(f"Settings are judged on {LEAST_HOLDOUT} samples or more; data.holdout is {len(own)}.")
    errors: list[float] = []
    uplink, stopped, state = 0, False, stage.first_state()
    for played in rounds(stage, state, measured=False):
        state = played.state
        uplink += played.record.uplink_bytes
        errors.append(1.0 - float(stage.engine.accuracies(state.global_best[None], train, own)[0]))
        report(played.record)
        if stop.gives_up(played.record.round, errors[-1]):
            stopped = played.record.round < spec.rounds
            break
    loss = float(stage.engine.losses(state.global_best[None], train, own)[0])
    loss = loss if math.isfinite(loss) else math.inf
    trial = {"errors": errors, "loss": None if math.isinf(loss) else loss, "stopped": stopped, "uplink_bytes": uplink}
    write_json(folder / TRIAL.shows, trial)


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
