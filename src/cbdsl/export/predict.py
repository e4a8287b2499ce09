"""Predicts the classes of samples in an .npz file with a saved model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbdsl.arrays import Doubles, Floats, Indices
from cbdsl.engines.choose import choose_engine
from cbdsl.engines.native_engine import NativeEngine, default_threads
from cbdsl.errors import UserError
from cbdsl.models.saved_model import SavedModel
from cbdsl.runs.result import log_probabilities
from cbdsl.util.memory import require_memory
from cbdsl.util.npz import load_arrays

_NAMES = (("features", "labels"), ("test_features", "test_labels"))  # a file of its own; one that `run` takes, too


@dataclass(frozen=True, eq=False)
class Unseen:
    """Samples to predict, and their labels where these are known."""

    features: Floats  # (N, *shape of the graph)
    labels: Indices | None  # (N,)


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predicted classes and their probabilities."""

    labels: Indices  # (N,)
    probabilities: Doubles  # (N,), of these
    accuracy: float | None


def predict(model: SavedModel, unseen: Unseen, threads: int | None = None) -> Predictions:
    """Return the likeliest class of every sample, by the native engine if there is one, otherwise by torch."""
    graph = model.graph
    if not np.isfinite(model.weights).all():
        raise UserError(
            f"The model {model.source} has weights that are not finite: its training failed. Give another.",
            code="damaged-file",
        )
    engine = choose_engine("auto", graph, graph.shape, threads or default_threads(), "cpu").engine
    if isinstance(engine, NativeEngine):
        require_memory(engine.workspace * engine.threads, f"The network of {model.source} takes", "Use fewer threads.")
    logs = log_probabilities(engine, model.weights, unseen.features, graph.classes)
    labels = np.asarray(np.argmax(logs, axis=1), np.int32)
    chances: Doubles = np.exp(logs[np.arange(len(labels)), labels])
    accuracy = None if unseen.labels is None else float(np.mean(labels == unseen.labels))
    return Predictions(labels, chances, accuracy)


def read_unseen(path: Path, model: SavedModel, raw: bool = False) -> Unseen:
    """Read the samples of an .npz file, scaled like the model's training data; raw: without scaling."""
    wanted = (
        f"Give an .npz file with the array features, numbers (N, {', '.join(map(str, model.card.shape))}), and labels "
        "(N,) if they are known; or one that `cbdsl run --data` takes, whose test set is used."
    )
    try:
        features, labels = _arrays(path)
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
    return Unseen(values, None if labels is None else _checked(labels, len(features), path))


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


def _checked(labels: NDArray[Any], count: int, path: Path) -> Indices:
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise UserError(
            f"The labels in {path} are {labels.dtype} {labels.shape}; give a whole number for each of {count:,} "
            "samples.",
            code="wrong-shape",
        )
    known = (labels >= 0) & (labels < 2**31)  # other numbers are never predicted
    return np.where(known, labels, -1).astype(np.int32)
