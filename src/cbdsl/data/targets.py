"""Checks targets and labels that users give: real targets, marks of what is not normal, classes as text."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cbdsl.arrays import Indices
from cbdsl.errors import UserError, shown, unknown

_LARGEST = 1e30


def make_targets(targets: ArrayLike | None, count: int, part: str) -> NDArray[np.float64]:
    """Return the targets of `count` samples, (N, T); refuse what is not a finite number each. part: their name."""
    if targets is None:
        raise UserError(
            f"The {part} samples have no targets. Give a number for each, or task=reconstruction to learn the samples "
            "themselves.",
            code="missing-value",
        )
    raw = np.asarray(targets)
    if raw.dtype.kind in "USO":
        raise UserError(
            f"The targets of the {part} samples are text, such as {shown(str(raw.flat[0]) if raw.size else '')}; a "
            "regression needs numbers. For classes set task=classification.",
            code="wrong-type",
        )
    if raw.dtype.kind not in "fiub":
        raise UserError(f"The targets of the {part} samples are {raw.dtype}; give numbers.", code="wrong-type")
    values = raw.astype(np.float64)
    values = values[:, None] if values.ndim == 1 else values
    if values.ndim != 2 or len(values) != count or not values.size:
        raise UserError(
            f"The {part} samples need targets (N,) or (N, T), N = {count:,}; given {raw.shape}.", code="wrong-shape"
        )
    wrong = np.flatnonzero(~(np.abs(values) <= _LARGEST).all(1))  # NaN is not
    if len(wrong):
        raise UserError(
            f"The targets of the {part} samples have {len(wrong):,} that are NaN or infinite, the first in row "
            f"{wrong[0]:,}. Leave those samples out, or fill the gaps.",
            code="out-of-range",
        )
    return values


def check_targets(
    train: ArrayLike | None, train_count: int, test: ArrayLike | None, test_count: int, names: tuple[str, ...]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the targets of training and test samples; refuse a target that is the same in all training samples."""
    known, unseen = make_targets(train, train_count, "training"), make_targets(test, test_count, "test")
    if known.shape[1] != unseen.shape[1] or (names and len(names) != known.shape[1]):
        raise UserError(
            f"There are {known.shape[1]} targets in the training set, {unseen.shape[1]} in the test set and "
            f"{len(names)} names; give as many of each.",
            code="wrong-shape",
        )
    constant = np.flatnonzero((known == known[0]).all(0))
    if len(constant):
        name = names[constant[0]] if names else f"number {constant[0] + 1}"
        raise UserError(
            f"The target {name} is {known[0, constant[0]]:g} in all {train_count:,} training samples: there is nothing "
            "to learn. Leave it out, or give samples in which it varies.",
            code="out-of-range",
        )
    return known, unseen


def check_anomalies(marks: ArrayLike | None, count: int) -> Indices:
    """Return 1 for each test sample that is not normal, (N,); all are normal without marks."""
    if marks is None:
        return np.zeros(count, np.int32)
    raw = np.asarray(marks)
    if raw.shape != (count,) or raw.dtype.kind not in "iub" or not np.isin(raw, (0, 1)).all():
        raise UserError(
            "The labels of the test set of a reconstruction say which samples are not normal: 0 or 1 for each of "
            f"{count:,}; given {raw.dtype} {raw.shape}. Give None if that is not known.",
            code="wrong-type",
        )
    return raw.astype(np.int32)


def name_classes(train: ArrayLike | None, test: ArrayLike | None) -> tuple[tuple[str, ...], Any, Any]:
    """Return the names of classes that are given as text, and the labels as numbers; other labels as they are."""
    if train is None or test is None:
        raise UserError(
            "A classification needs the labels of training and test samples; one of them is None. Without labels set "
            'task="reconstruction".',
            code="missing-value",
        )
    known, unseen = np.asarray(train), np.asarray(test)
    text = [each.dtype.kind in "USO" for each in (known, unseen)]
    if text[0] != text[1]:
        raise UserError(
            f"The labels of the training samples are {known.dtype}, those of the test samples {unseen.dtype}. Give "
            "both as text, or both as whole numbers.",
            code="wrong-type",
        )
    if not text[0] or known.ndim != 1 or unseen.ndim != 1:
        return (), train, test
    names, numbers = np.unique(np.concatenate([known, unseen]).astype(str), return_inverse=True)
    return tuple(names.tolist()), numbers[: len(known)], numbers[len(known) :]


def number_classes(labels: NDArray[Any], names: tuple[str, ...]) -> NDArray[Any]:
    """Return labels as class numbers: names are looked up, whole numbers stay."""
    if labels.dtype.kind != "U" or labels.ndim != 1:
        return labels
    for name in np.unique(labels).tolist():
        if name not in names:
            raise unknown("class", name, names)
    return np.array([names.index(name) for name in labels.tolist()])
