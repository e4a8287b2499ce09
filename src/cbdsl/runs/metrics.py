"""Metrics: what is measured of a model on the test set, by task; each knows which direction is better.

The first metric of a task that has a value is its main one: tables, figures and comparisons are about it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, get_args

import numpy as np

from cbdsl import register
from cbdsl.arrays import Doubles, Floats, Indices, Samples
from cbdsl.data.dataset import Dataset
from cbdsl.engines.engine import Engine
from cbdsl.errors import UserError
from cbdsl.spec import Spec, Task
from cbdsl.util.serialize import Bounds, check_value

Better = Literal["higher", "lower"]
ALL_TASKS: tuple[Task, ...] = get_args(Task)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One model on the test set. What a metric does not ask for is not computed.

    >>> from cbdsl.data.dataset import Dataset
    >>> from cbdsl.engines.choose import choose_engine
    >>> from cbdsl.engines.loss import Loss
    >>> from cbdsl.models.zoo import softmax
    >>> data = Dataset.from_arrays([[0.0], [1.0]], [5, 7], [[1.0]], [7], task="regression", scale=False)
    >>> engine = choose_engine("auto", softmax((1,), 1), (1,), 1, loss=Loss("mse")).engine
    >>> seen = Evaluation(engine, np.zeros(2, np.float32), data, data.train, np.arange(2, dtype=np.int32))
    >>> seen.outputs.tolist(), seen.targets.tolist(), seen.losses.tolist()
    ([[6.0]], [[7.0]], [1.0])
    """

    engine: Engine
    weights: Floats  # (D,)
    dataset: Dataset
    train: Samples  # the pool of `unseen`
    unseen: Indices  # normal samples that no model is trained on: the hold-out, or D_sc without one

    @cached_property
    def outputs(self) -> Floats:
        """What the model makes of the test set, (N, C): logits, or predictions in the targets' unit."""
        made = self.engine.outputs(self.weights, self.dataset.test, _everything(self.dataset.test))
        return self.dataset.in_unit(made)

    @property
    def labels(self) -> Indices:
        """The classes of the test set, (N,); of a reconstruction 0, or 1 for what is not normal."""
        return self.dataset.test.labels

    @cached_property
    def targets(self) -> Floats:
        """The targets of the test set in their unit, (N, T)."""
        return self.dataset.in_unit(self.dataset.test.labels)

    @cached_property
    def losses(self) -> Doubles:
        """The loss on every sample of the test set, (N,). Of a reconstruction they are the anomaly scores."""
        return self.engine.sample_losses(self.weights, self.dataset.test, _everything(self.dataset.test))

    @property
    def normal_losses(self) -> Doubles:
        """The losses without the samples that are not normal."""
        return self.losses[self.labels == 0] if self.dataset.task == "reconstruction" else self.losses

    def threshold(self, false_alarm: float) -> float:
        """Return the anomaly score that a share `false_alarm` of the unseen normal samples exceeds."""
        known = self.engine.sample_losses(self.weights, self.train, self.unseen)
        return float(np.quantile(known, 1 - false_alarm))


def _everything(samples: Samples) -> Indices:
    return np.arange(len(samples), dtype=np.int32)


class Metric:
    """A number that says how good a model is.

    >>> class LargestError(Metric):
    ...     tasks, title, better = ("regression",), "largest error", "lower"
    ...     def measure(self, seen): return float(np.abs(seen.outputs - seen.targets).max())
    >>> LargestError().text(2.0)
    '2'
    """

    tasks: ClassVar[tuple[Task, ...]] = ALL_TASKS
    title: ClassVar[str] = ""
    better: ClassVar[Better] = "higher"
    is_share: ClassVar[bool] = False  # shown in percent

    def measure(self, seen: Evaluation) -> float | None:
        """Return the value, or None where it is not defined."""
        raise NotImplementedError

    def text(self, value: float | None, digits: int = 2) -> str:
        """Format a value. digits: behind the point of percentages."""
        if value is None or math.isnan(value):
            return "none"
        return f"{value:.{digits}%}" if self.is_share else f"{value:.4g}"

    def is_better(self, one: float, other: float) -> bool:
        """Return whether one value is better than another; a number is better than NaN."""
        if math.isnan(one) or math.isnan(other):
            return math.isnan(other) and not math.isnan(one)
        return one > other if self.better == "higher" else one < other


@register.metric("accuracy")
class Accuracy(Metric):
    """The share of samples whose class is found."""

    tasks, title, is_share = ("classification",), "accuracy", True

    def measure(self, seen: Evaluation) -> float:
        """Return the share of correct answers, as the engine counts them."""
        test = seen.dataset.test
        return float(seen.engine.accuracies(seen.weights[None], test, _everything(test))[0])


@register.metric("macro-f1")
class MacroF1(Metric):
    """The mean over the classes in the test set of F1, 2 TP / (2 TP + FP + FN)."""

    tasks, title, is_share = ("classification",), "macro-F1", True

    def measure(self, seen: Evaluation) -> float:
        """Return the mean of F1."""
        found, truth = seen.outputs.argmax(1), seen.labels
        scores = [
            2 * np.sum((found == one) & (truth == one)) / (np.sum(found == one) + np.sum(truth == one))
            for one in np.unique(truth)
        ]
        return float(np.mean(scores))


@register.metric("rmse")
class Rmse(Metric):
    """The root of the mean squared error, in the targets' unit."""

    tasks, title, better = ("regression",), "RMSE", "lower"

    def measure(self, seen: Evaluation) -> float:
        """Return the root mean squared error over samples and targets."""
        return math.sqrt(np.mean(np.square(seen.outputs - seen.targets, dtype=np.float64)))


@register.metric("mae")
class Mae(Metric):
    """The mean absolute error, in the targets' unit."""

    tasks, title, better = ("regression",), "MAE", "lower"

    def measure(self, seen: Evaluation) -> float:
        """Return the mean absolute error over samples and targets."""
        return float(np.mean(np.abs(seen.outputs - seen.targets), dtype=np.float64))


@register.metric("r2")
class R2(Metric):
    """The share of the targets' variance that is explained, a mean over targets; 0 for predicting their mean."""

    tasks, title = ("regression",), "R2"

    def measure(self, seen: Evaluation) -> float | None:
        """Return 1 - squared error / variance; None if a target is the same in all test samples."""
        variance = np.var(seen.targets, axis=0, dtype=np.float64)
        errors = np.mean(np.square(seen.outputs - seen.targets, dtype=np.float64), axis=0)
        return float(np.mean(1 - errors / variance)) if (variance > 0).all() else None


@register.metric("auroc")
class Auroc(Metric):
    """The chance that a sample that is not normal has a higher anomaly score than a normal one."""

    tasks, title = ("reconstruction",), "AUROC"

    def measure(self, seen: Evaluation) -> float | None:
        """Return the area under the ROC curve; None if the test set does not have both kinds."""
        normal, other = seen.losses[seen.labels == 0], seen.losses[seen.labels != 0]
        if not len(normal) or not len(other) or np.isnan(seen.losses).any():
            return None
        ordered = np.sort(normal)
        below, up_to = (np.searchsorted(ordered, other, side) for side in ("left", "right"))
        return float(np.mean(below + up_to) / 2 / len(normal))


@register.metric("detection")
@dataclass(frozen=True)
class Detection(Metric):
    """The share of samples that are not normal whose anomaly score is above the threshold.

    The threshold is the score that a share `false_alarm` of the hold-out exceeds. It is saved with the model.
    """

    false_alarm: float = 0.01

    tasks, title, is_share = ("reconstruction",), "detected", True

    def __post_init__(self) -> None:
        check_value(self.false_alarm, Bounds(0.0, 0.5, above=True), "options.detection.false_alarm")

    def measure(self, seen: Evaluation) -> float | None:
        """Return the share that is detected; None if the test set has normal samples alone."""
        other = seen.losses[seen.labels != 0]
        return float(np.mean(other > seen.threshold(self.false_alarm))) if len(other) else None


@register.metric("loss")
class TestLoss(Metric):
    """The mean loss on the test set; of a reconstruction, on its normal samples."""

    title, better = "test loss", "lower"

    def measure(self, seen: Evaluation) -> float:
        """Return the mean loss."""
        return float(np.mean(seen.normal_losses))


@dataclass(frozen=True)
class _Unknown(Metric):
    """A metric of a plugin that is not loaded here."""

    title: str = ""  # type: ignore[misc]


@dataclass(frozen=True)
class Spread:
    """Statistics of a metric over many workers.

    >>> Spread.of([0.5, 0.9, None, 0.7], "higher")
    Spread(mean=0.7, worst_tenth=0.5, best=0.9, deviation=0.16329931618554522, workers=3, better='higher')
    """

    mean: float | None  # None, as the others, if it is not finite
    worst_tenth: float | None  # the mean over the worst tenth of workers, at least one
    best: float | None
    deviation: float | None  # the standard deviation over workers
    workers: int  # those for which the metric is defined
    better: Better

    @staticmethod
    def of(values: Sequence[float | None], better: Better) -> Spread | None:
        """Return the spread of values: None is left out as not defined, and NaN counts as the worst value."""
        sign = 1.0 if better == "higher" else -1.0
        found = sign * np.array([value for value in values if value is not None], np.float64)
        if not len(found):
            return None
        ordered = np.sort(np.where(np.isnan(found), -np.inf, found))
        lowest = ordered[: -(-len(ordered) // 10)]
        sound = bool(np.isfinite(ordered).all())
        mean, worst, best = (_finite(sign * float(each)) for each in (ordered.mean(), lowest.mean(), ordered[-1]))
        return Spread(mean, worst, best, float(ordered.std()) if sound else None, len(ordered), better)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def build_metrics(spec: Spec, task: Task) -> dict[str, Metric]:
    """Return the metrics of a task by name, with the spec's settings, the main one first."""
    found: dict[str, Metric] = {}
    for name in register.metric.names():
        made = register.metric.make(name, spec.options.of(name))
        if not isinstance(made, Metric):
            raise UserError(
                f"The metric '{name}' is a {type(made).__name__}; register a class that extends "
                "cbdsl.runs.metrics.Metric.",
                code="invalid-part",
            )
        if task in made.tasks:
            found[name] = made
    return found


def find_metric(name: str) -> Metric:
    """Return a metric by its name, with its default settings; one whose plugin is not loaded is shown by its name."""
    if name not in register.metric:
        return _Unknown(name)
    made: Metric = register.metric.make(name, {})
    return made


def measure_all(metrics: Mapping[str, Metric], models: list[Evaluation]) -> dict[str, float | None]:
    """Return the mean over models of every metric that has a value, the main one first."""
    found: dict[str, float | None] = {}
    for name, metric in metrics.items():
        values = [metric.measure(one) for one in models]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            mean = float(np.mean(known))
            found[name] = mean if math.isfinite(mean) else None
    return found
