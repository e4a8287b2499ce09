"""What hears of a run while it is played: progress bars, TensorBoard, Weights & Biases, MLflow, or one of your own.

A callback never changes a number. Adapters import their library when they are made, and not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cbdsl.runs.records import RoundRecord
from cbdsl.spec import Spec

if TYPE_CHECKING:
    from cbdsl.runs.result import Result


@dataclass(frozen=True)
class Start:
    """A run that is about to be played."""

    spec: Spec  # resolved: every value written out
    folder: Path | None
    note: str  # why the model could not have the native engine; empty if it has
    played: int  # rounds that an earlier process played


class Callback:
    """Hears of a run. Override what you need."""

    def start(self, run: Start) -> None:
        """Everything that the spec names was found; the first round comes next."""

    def round(self, record: RoundRecord) -> None:
        """A round was played."""

    def finish(self, result: Result) -> None:
        """The run is over."""


class Many(Callback):
    """Several callbacks as one, in their order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)

    def start(self, run: Start) -> None:
        """See `Callback.start`."""
        for each in self._callbacks:
            each.start(run)

    def round(self, record: RoundRecord) -> None:
        """See `Callback.round`."""
        for each in self._callbacks:
            each.round(record)

    def finish(self, result: Result) -> None:
        """See `Callback.finish`."""
        for each in self._callbacks:
            each.finish(result)


def default_callbacks() -> list[Callback]:
    """What hears of a run if nothing is said: a progress bar in a notebook, elsewhere nothing."""
    return []
