"""Losses: what a network is trained for, and what a claim is about. None of them is ever negative."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbdsl.arrays import Floats, Samples
from cbdsl.errors import UserError, unknown
from cbdsl.register import CUSTOM
from cbdsl.spec import LOSSES, LOSSES_OF_TASKS, Spec, Task
from cbdsl.util.serialize import Bounds, check_value

LossFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Loss:
    """A loss. That of a sample is the mean over its outputs.

    >>> Loss("mse").reads_labels, CROSS_ENTROPY.reads_labels
    (False, True)
    """

    name: str = "cross-entropy"
    setting: float = 0.0  # of cross-entropy: label smoothing; of huber: the error where it becomes linear
    reconstructs: bool = False  # the targets of a sample are its features
    function: LossFunction | None = None  # of the user's own
    classes: bool = False  # the function compares outputs with classes

    def __post_init__(self) -> None:
        if (self.name not in LOSSES and self.function is None) or (self.name == "huber" and not self.setting > 0):
            raise ValueError(f"the loss is {self}; its name must be one of {LOSSES}, and the setting of huber above 0")

    @property
    def reads_labels(self) -> bool:
        """Whether it compares outputs with a class instead of numbers."""
        return self.name == "cross-entropy" or self.classes

    @property
    def code(self) -> int:
        """Its number in the native library."""
        return LOSSES.index(self.name)


CROSS_ENTROPY = Loss()
_SETTINGS: Mapping[str, tuple[str, float, Bounds]] = {
    "cross-entropy": ("smoothing", 0.0, Bounds(0.0, 0.99)),
    "huber": ("delta", 1.0, Bounds(0.0, 1e6, above=True)),
}


def make_loss(spec: Spec, task: Task = "classification", given: LossFunction | None = None) -> Loss:
    """Return the loss of a run: the spec's, or the task's own if the spec names none.

    given: a function of the user's own, of outputs (B, C) and labels (B,) or targets (B, C), as torch tensors, to the
    loss of each sample, (B,), none of them negative.
    """
    if given is not None:
        return Loss(CUSTOM, 0.0, task == "reconstruction", given, task == "classification")
    if spec.loss == CUSTOM:
        raise UserError("The loss of this run was given in Python; give it again with loss=...", code="missing-part")
    allowed = LOSSES_OF_TASKS[task]
    name = spec.loss or allowed[0]
    if name not in LOSSES:
        raise unknown("loss", name, LOSSES)
    if name not in allowed:
        cause = "the targets are numbers" if task == "regression" else "the targets are the samples themselves"
        cause = "the labels are classes" if task == "classification" else cause
        raise UserError(
            f"The loss is '{name}', but the data's task is {task}: {cause}. Use {' or '.join(allowed)}, or set "
            "data.task to the task that you mean.",
            code="conflict",
        )
    options = dict(spec.options.of(name))
    key, value, bounds = _SETTINGS.get(name, ("", 0.0, Bounds()))
    if key in options:
        value = options.pop(key)
        check_value(value, bounds, f"options.{name}.{key}")
    if options:
        raise UserError(
            f"The loss '{name}' has no setting '{next(iter(options))}'. It has: {key or 'none'}.",
            code="unknown-setting",
        )
    return Loss(name, float(value), task == "reconstruction")


def targets_of(samples: Samples, loss: Loss, outputs: int = 0) -> Floats:
    """Return what a loss compares outputs with, (N, outputs); refuse others. outputs: how many there are, if known."""
    count = len(samples.features)
    found: NDArray[Any] = samples.features.reshape(count, -1) if loss.reconstructs else samples.labels
    if (
        found.dtype.kind != "f"
        or found.ndim != 2
        or len(found) != count
        or found.shape[1] != (outputs or found.shape[1])
    ):
        raise ValueError(
            f"targets are {found.dtype} {found.shape}; give float32 ({count}, {outputs or 'outputs'}), a number for "
            "each output"
        )
    return np.require(found, np.float32, ["C", "A"])
