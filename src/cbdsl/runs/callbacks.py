"""Callbacks: progress bars and loggers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbdsl.errors import UserError, unknown
from cbdsl.runs.metrics import find_metric
from cbdsl.runs.records import RoundRecord, RunTotals
from cbdsl.spec import Spec
from cbdsl.util.formatting import format_bytes

if TYPE_CHECKING:
    from cbdsl.runs.result import Result
    from cbdsl.util.console import ProgressLine


@dataclass(frozen=True)
class RunStart:
    """A run that is about to start."""

    spec: Spec  # resolved: every value written out
    folder: Path | None
    note: str  # why the native engine is not used; empty if it is
    played: int  # number of rounds that an earlier process played
    before: tuple[RoundRecord, ...] = ()  # their records


class Callback:
    """Called at the start of a run, after every round and at the end. Override what you need.

    >>> class PrintAccuracy(Callback):
    ...     def round(self, record):
    ...         print(f"round {record.round} is over")
    >>> from cbdsl import run
    >>> small = Spec(workers=2, rounds=2, model="softmax").with_settings({"data.samples_per_worker": 20})
    >>> result = run(small, callbacks=[PrintAccuracy()])
    round 1 is over
    round 2 is over
    """

    def start(self, run: RunStart) -> None:
        """Called before the first round; everything that the spec names is built."""

    def round(self, record: RoundRecord) -> None:
        """Called after a round, which is in the run's folder already."""

    def finish(self, result: Result) -> None:
        """Called at the end; the model and the summary are in the run's folder."""

    def close(self) -> None:
        """Release files and screens; called last, whether the run was finished or stopped."""


class CallbackList(Callback):
    """Several callbacks as one, in their order. All are called; then the first error is raised."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)

    def start(self, run: RunStart) -> None:
        """See `Callback.start`."""
        self._tell(lambda each: each.start(run))

    def round(self, record: RoundRecord) -> None:
        """See `Callback.round`."""
        self._tell(lambda each: each.round(record))

    def finish(self, result: Result) -> None:
        """See `Callback.finish`."""
        self._tell(lambda each: each.finish(result))

    def close(self) -> None:
        """See `Callback.close`."""
        self._tell(lambda each: each.close())

    def _tell(self, tell: Callable[[Callback], None]) -> None:
        errors = []
        for each in self._callbacks:
            try:
                tell(each)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


class _Metrics(Callback):
    """Metrics of a round by name; bytes and uploads are counted from the first round on, also in a resumed run."""

    def __init__(self) -> None:
        self._totals = RunTotals()

    def start(self, run: RunStart) -> None:
        """Count the rounds that an earlier process played."""
        self._totals = RunTotals.of(run.before)

    def _values(self, record: RoundRecord) -> dict[str, float]:
        self._totals.add(record)
        measured = {name: value for name, value in record.metrics.items() if value is not None}
        score = {} if record.global_score is None else {"global_score": record.global_score}
        return {
            **(measured if record.metrics else {"accuracy": record.test_accuracy}),
            **score,
            "uploads": self._totals.uploads,
            "uplink_bytes": self._totals.uplink_bytes,
            "downlink_bytes": self._totals.downlink_bytes,
            "bans": len(record.banned),
            "seconds": record.seconds,
        }


class TensorBoard(_Metrics):
    """Writes a run to a TensorBoard folder: scalars by round, and the spec as text and as hyperparameters."""

    def __init__(self, logdir: Path | str) -> None:
        super().__init__()
        self._logdir = str(logdir)
        _library("tensorboard", "TensorBoard", "tensorboard")
        self._events = import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = import_module("tensorboard.compat.proto.summary_pb2")
        self._text = import_module("tensorboard.plugins.text.summary_v2").text_pb
        self._hyperparameters = import_module("tensorboard.plugins.hparams.summary_v2").hparams_pb
        self._open = import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter
        self._writer: Any = None

    def start(self, run: RunStart) -> None:
        """See `Callback.start`."""
        super().start(run)
        self._writer = self._open(self._logdir, flush_secs=5)
        fresh = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(run.played + 1, session_log=fresh)  # later rounds that an earlier process wrote are void
        lines = "\n".join(f"    {line}" for line in run.spec.to_toml().splitlines())  # a block of code in Markdown
        self._add(0, summary=self._text("spec", lines))
        self._add(0, summary=self._hyperparameters(flat(run.spec)))

    def round(self, record: RoundRecord) -> None:
        """See `Callback.round`."""
        kind = self._summaries.Summary
        values = [kind.Value(tag=name, simple_value=value) for name, value in self._values(record).items()]
        self._add(record.round, summary=kind(value=values))

    def close(self) -> None:
        """See `Callback.close`."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, step: int, **content: object) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))


class WandB(_Metrics):
    """Logs a run to Weights & Biases. settings: whatever `wandb.init` takes, such as entity, name or mode."""

    def __init__(self, project: str, **settings: Any) -> None:  # noqa: ANN401 - wandb's own
        super().__init__()
        self._wandb = _library("wandb", "Weights & Biases", "wandb")
        self._project, self._settings = project, settings
        self._run: Any = None
        self._finished = False

    def start(self, run: RunStart) -> None:
        """See `Callback.start`."""
        super().start(run)
        self._finished = False
        self._run = self._wandb.init(project=self._project, config=run.spec.to_tree(), **self._settings)

    def round(self, record: RoundRecord) -> None:
        """See `Callback.round`."""
        self._run.log(self._values(record), step=record.round)

    def finish(self, result: Result) -> None:
        """See `Callback.finish`."""
        self._run.summary.update(_ending(result))
        self._finished = True

    def close(self) -> None:
        """See `Callback.close`."""
        if self._run is not None:
            self._run.finish(exit_code=0 if self._finished else 1)
            self._run = None


class MLflow(_Metrics):
    """Logs a run to MLflow. settings: whatever `mlflow.start_run` takes, such as run_name or tags."""

    def __init__(self, experiment: str, **settings: Any) -> None:  # noqa: ANN401 - mlflow's own
        super().__init__()
        self._mlflow = _library("mlflow", "MLflow", "mlflow")
        self._experiment, self._settings = experiment, settings
        self._running = self._finished = False

    def start(self, run: RunStart) -> None:
        """See `Callback.start`."""
        super().start(run)
        self._mlflow.set_experiment(self._experiment)
        self._mlflow.start_run(**self._settings)
        self._running, self._finished = True, False
        self._mlflow.log_params(flat(run.spec))

    def round(self, record: RoundRecord) -> None:
        """See `Callback.round`."""
        self._mlflow.log_metrics(self._values(record), step=record.round)

    def finish(self, result: Result) -> None:
        """See `Callback.finish`."""
        self._mlflow.log_metrics(_ending(result))
        self._finished = True

    def close(self) -> None:
        """See `Callback.close`."""
        if self._running:
            self._mlflow.end_run("FINISHED" if self._finished else "FAILED")
            self._running = False


LOGGERS: dict[str, Callable[[str], Callback]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def open_loggers(texts: Sequence[str] | None, folder: Path) -> list[Callback]:
    """Return the loggers that a command line names: tensorboard[=DIR], wandb[=PROJECT], mlflow[=EXPERIMENT].

    folder: the run's; TensorBoard writes into its `tensorboard` if no other place is given.
    """
    found = []
    for text in texts or ():
        name, _, where = text.partition("=")
        if name not in LOGGERS:
            raise unknown("logger", name, LOGGERS)
        place = str(folder / "tensorboard") if name == "tensorboard" else "cbdsl"
        found.append(LOGGERS[name](where or place))
    return found


class Bar(_Metrics):
    """A progress bar, in a terminal and in a notebook."""

    def __init__(self) -> None:
        super().__init__()
        self._line: ProgressLine | None = None

    def start(self, run: RunStart) -> None:
        """See `Callback.start`."""
        super().start(run)
        self._rounds, self._line = run.spec.rounds, self._open_line()
        self._line.show(run.played, self._rounds, run.note or "first round")

    def round(self, record: RoundRecord) -> None:
        """See `Callback.round`."""
        if self._line is not None:
            self._line.show(record.round, self._rounds, self._describe(record))

    def close(self) -> None:
        """See `Callback.close`."""
        if self._line is not None:
            self._line.close()
            self._line = None

    def _open_line(self) -> ProgressLine:
        return open_progress("round")

    def _describe(self, record: RoundRecord) -> str:
        values = self._values(record)
        score = "" if record.global_score is None else f"  F^g {record.global_score:.4f}"
        metric = find_metric(record.metric)
        result = f"{metric.title} {metric.text(record.value):>6}"
        return (
            f"{result}{score}  uploads {values['uploads']:,}  bans {values['bans']}  "
            f"uplink {format_bytes(values['uplink_bytes'])}"
        )


def open_progress(unit: str) -> ProgressLine:
    """Return a progress display for notebooks and terminals; elsewhere it shows nothing. unit: what is counted."""
    from cbdsl.util.console import NotebookProgress, ProgressLine  # noqa: PLC0415 - rich is slow to import

    return NotebookProgress(unit) if in_notebook() else ProgressLine(unit, log_seconds=None)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def default_callbacks() -> list[Callback]:
    """Return the callbacks of a run without any: a progress bar in a notebook, elsewhere none."""
    return [Bar()] if in_notebook() else []


def flat(spec: Spec) -> dict[str, str | int | float | bool]:
    """Return a spec's settings by their dotted names."""
    found: dict[str, str | int | float | bool] = {}

    def walk(tree: Mapping[str, Any], prefix: str) -> None:
        for key, value in tree.items():
            if isinstance(value, Mapping):
                walk(value, f"{prefix}{key}.")
            else:
                found[prefix + key] = ", ".join(map(str, value)) if isinstance(value, list) else value

    walk(spec.to_tree(), "")
    return found


def _ending(result: Result) -> dict[str, float]:
    summary = result.summary
    name = summary.metric.replace("-", "_")
    return {f"final_{name}": summary.final_value, f"best_{name}": summary.best_value}


def _library(module: str, name: str, package: str) -> Any:  # noqa: ANN401 - a module
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f"{name} is not installed. Install it: pip install {package}", code="missing-package"
        ) from error
