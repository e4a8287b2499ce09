"""Predicts with a saved model, for the samples in an .npz file: classes, numbers, or anomaly scores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbdsl.arrays import Bools, Doubles, Floats, Indices, Labels, Samples
from cbdsl.data.dataset import Dataset
from cbdsl.data.table import TABLES, read_table
from cbdsl.data.targets import check_anomalies, make_targets, number_classes
from cbdsl.engines.choose import choose_engine
from cbdsl.engines.engine import Engine
from cbdsl.engines.loss import Loss
from cbdsl.engines.native_engine import NativeEngine, default_threads
from cbdsl.errors import UserError
from cbdsl.models.saved_model import ModelMetadata, SavedModel
from cbdsl.register import CUSTOM
from cbdsl.runs.metrics import Evaluation, build_metrics, measure_all
from cbdsl.runs.result import log_probabilities, predict_numbers
from cbdsl.spec import Spec
from cbdsl.util.memory import require_memory
from cbdsl.util.npz import load_arrays

_NAMES = (("features", "labels"), ("test_features", "test_labels"))  # a file of its own; one that `run` takes, too


@dataclass(frozen=True, eq=False)
class Unseen:
    """Samples to predict, and their labels or targets where these are known."""

    features: Floats  # (N, *shape of the graph), scaled
    labels: Labels | None  # (N,), or targets (N, T) in their unit


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predicted classes and their probabilities."""

    labels: Indices  # (N,)
    probabilities: Doubles  # (N,), of these
    accuracy: float | None


@dataclass(frozen=True, eq=False)
class Values:
    """What a model that is not a classifier makes of samples."""

    outputs: Floats  # (N, T) predictions in the targets' unit; anomaly scores (N, 1)
    anomalies: Bools | None  # (N,) of a detector: above the threshold
    metrics: dict[str, float | None]  # by name, the main one first; empty if the truth is not known


def predict(model: SavedModel, unseen: Unseen, threads: int | None = None) -> Predictions:
    """Return the likeliest class of every sample, by the native engine if there is one, otherwise by torch."""
    if model.card.task != "classification":
        raise UserError(
            f"{model.source} is a model for {model.card.task} and has no classes. Use predict_values.",
            code="not-supported",
        )
    graph, engine = model.graph, _engine(model, threads)
    logs = log_probabilities(engine, model.weights, unseen.features, graph.classes)
    labels = np.asarray(np.argmax(logs, axis=1), np.int32)
    chances: Doubles = np.exp(logs[np.arange(len(labels)), labels])
    accuracy = None if unseen.labels is None else float(np.mean(labels == unseen.labels))
    return Predictions(labels, chances, accuracy)


def predict_values(model: SavedModel, unseen: Unseen, threads: int | None = None) -> Values:
    """Return predictions of a regression, or anomaly scores of a reconstruction, and metrics if the truth is known."""
    card, engine, count = model.card, _engine(model, threads), len(unseen.features)
    if card.task == "regression":
        assert card.target_scaling is not None
        outputs = predict_numbers(engine, model.weights, unseen.features, card)
        if unseen.labels is None:
            return Values(outputs, None, {})
        seen = _evaluation(engine, model, Samples(unseen.features, card.target_scaling.apply(unseen.labels)))
        return Values(outputs, None, measure_all(build_metrics(Spec(), card.task), [seen]))
    marks = np.zeros(count, np.int32) if unseen.labels is None else unseen.labels
    seen = _evaluation(engine, model, Samples(unseen.features, marks))
    scores = seen.losses
    anomalies = None if card.threshold is None else scores > card.threshold
    metrics: dict[str, float | None] = {}
    if unseen.labels is not None:
        known = build_metrics(Spec(), card.task)
        del known["detection"]  # its threshold is the model's own, not one of these samples
        metrics = measure_all(known, [seen])
        if anomalies is not None and (marks != 0).any():
            metrics["detection"] = float(np.mean(anomalies[marks != 0]))
    return Values(scores[:, None].astype(np.float32), anomalies, metrics)


def _evaluation(engine: Engine, model: SavedModel, samples: Samples) -> Evaluation:
    card, none = model.card, np.empty(0, np.int32)
    data = Dataset(samples, samples, 0, model.source, task=card.task, target_scaling=card.target_scaling)
    return Evaluation(engine, model.weights, data, samples, none)


def _engine(model: SavedModel, threads: int | None) -> Engine:
    graph, card = model.graph, model.card
    if not np.isfinite(model.weights).all():
        raise UserError(
            f"The model {model.source} has weights that are not finite: its training failed. Give another.",
            code="damaged-file",
        )
    if card.loss == CUSTOM and card.task == "reconstruction":
        raise UserError(
            f"The anomaly scores of {model.source} are those of a loss that was given in Python. Use "
            "Result.anomaly_scores in that program.",
            code="not-supported",
        )
    name = "mse" if card.loss == CUSTOM else card.loss  # a regression's numbers do not depend on it
    loss = Loss(name, card.loss_setting, card.task == "reconstruction")
    engine = choose_engine("auto", graph, graph.shape, threads or default_threads(), "cpu", loss).engine
    if isinstance(engine, NativeEngine):
        require_memory(engine.workspace * engine.threads, f"The network of {model.source} takes", "Use fewer threads.")
    return engine


def read_unseen(path: Path, model: SavedModel, raw: bool = False) -> Unseen:
    """Read the samples of an .npz file or a table, scaled like the model's training data; raw: without scaling."""
    wanted = (
        f"Give an .npz file with the array features, numbers (N, {', '.join(map(str, model.card.shape))}), and labels "
        "(N,) if they are known; or one that `cbdsl run --data` takes, whose test set is used; or a table of them."
    )
    try:
        features, labels = _table(path, model.card) if path.suffix in TABLES else _arrays(path)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"The samples in {path} cannot be read ({error}). {wanted}", code="unreadable-file") from error
    shape = model.card.shape
    if features.shape[1:] == shape[1:] and shape[0] == 1 and len(shape) > 1:
        features = features[:, None]  # images of one channel, which few programs give an axis of its own
    if features.dtype.kind not in "fiub" or features.shape[1:] != shape or not len(features):
        raise UserError(f"The samples in {path} are {features.dtype} {features.shape}. {wanted}", code="wrong-shape")
    require_memory(4 * features.size, f"The samples in {path} take", "Give fewer.")
    scaling = None if raw else model.card.scaling
    if scaling is not None and scaling.shades and features.dtype != np.uint8 and features.max() > 1:
        raise UserError(
            f"The model was trained on bytes, 0 to 255, and the samples in {path} are {features.dtype} up to "
            f"{features.max()}. Give bytes (uint8), the same divided by 255, or with --raw what is scaled already.",
            code="out-of-range",
        )
    with np.errstate(over="ignore"):  # what is too large for a float32 is infinite, and refused
        values = features if scaling is None else scaling.apply(features)
        values = np.ascontiguousarray(values, np.float32).reshape(len(features), *model.graph.shape)
    if not np.isfinite(values).all():
        raise UserError(f"The samples in {path} hold NaN or infinite values; clean them first.", code="out-of-range")
    return Unseen(values, None if labels is None else _checked(labels, len(features), path, model.card))


def _table(path: Path, card: ModelMetadata) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Read the features of a table, and the targets or classes if their columns are in it, too."""
    table = read_table(path)
    if not card.target_names or not set(card.target_names) <= set(table.columns):
        return table.divide(())[0], None
    features, targets = table.divide(card.target_names)
    if card.task == "regression":
        table.require_numbers(card.target_names)
        return features, targets
    return features, table.labels(card.target_names[0])


def _arrays(path: Path) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Read features and labels under the first pair of names in the file."""
    problem: ValueError | None = None
    for features, labels in _NAMES:
        try:
            found = load_arrays(path, (features,), (labels,))
        except ValueError as error:
            problem = problem or error
        else:
            return found[features], found.get(labels)
    assert problem is not None
    raise problem


def _checked(labels: NDArray[Any], count: int, path: Path, card: ModelMetadata) -> Labels:
    if card.task == "regression":
        targets = make_targets(labels, count, str(path))
        if card.target_scaling is not None and targets.shape[1] != len(card.target_scaling.mean):
            raise UserError(
                f"The labels in {path} have {targets.shape[1]} targets; the model predicts "
                f"{len(card.target_scaling.mean)}.",
                code="wrong-shape",
            )
        return targets
    if card.task == "reconstruction":
        return check_anomalies(labels, count)
    labels = number_classes(labels, card.class_names)
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise UserError(
            f"The labels in {path} are {labels.dtype} {labels.shape}, and the model is a classifier; give a whole "
            f"number for each of {count:,} samples.",
            code="wrong-shape",
        )
    known = (labels >= 0) & (labels < 2**31)  # other numbers are never predicted
    return np.where(known, labels, -1).astype(np.int32)
