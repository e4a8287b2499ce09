"""The result of a run in Python: its summary, its rounds and its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from cbdsl.arrays import Doubles, Floats, Indices, Samples
from cbdsl.engines.engine import Engine
from cbdsl.errors import UserError
from cbdsl.models.network import Network
from cbdsl.runs.records import RoundRecord, Summary, summary_rows
from cbdsl.spec import Spec

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]
    from torch import nn


def log_probabilities(engine: Engine, weights: Floats, features: Floats, classes: int) -> Doubles:
    """Return the logarithms of class probabilities, (N, classes).

    An engine computes losses; the loss of a sample under a label is the negative logarithm of that label's probability.
    """
    everything = np.arange(len(features), dtype=np.int32)
    columns = [
        -engine.sample_losses(weights, Samples(features, np.full(len(features), label, np.int32)), everything)
        for label in range(classes)
    ]
    return np.stack(columns, axis=1)


@dataclass(frozen=True, eq=False)
class Result:
    """A finished run.

    >>> from cbdsl import Spec, run
    >>> result = run(Spec(workers=2, rounds=1, model="softmax").with_settings({"data.samples_per_worker": 20}))
    >>> result.summary.rounds, result.predict([[[[0.0] * 28] * 28]]).shape
    (1, (1,))
    """

    spec: Spec
    summary: Summary
    rounds: tuple[RoundRecord, ...]
    weights: Floats  # the final global model, flat: (D,)
    folder: Path | None
    network: Network
    engine: Engine

    @cached_property
    def model(self) -> nn.Module:
        """The final global model as a torch module, in evaluation mode."""
        return self.network.module(self.weights)

    def predict(self, features: ArrayLike) -> Indices:
        """Return the class of each sample, (N, *shape) -> (N,)."""
        values = np.ascontiguousarray(features, np.float32)
        if values.shape[1:] != self.network.shape:
            raise UserError(
                f"The model takes samples (N, *{self.network.shape}); given {values.shape}.", code="wrong-shape"
            )
        logits = log_probabilities(self.engine, self.weights, values, self.network.classes)
        return np.asarray(np.argmax(logits, axis=1), np.int32)

    def to_frame(self) -> pd.DataFrame:
        """Return a pandas DataFrame with one row per round."""
        try:
            import pandas as pd  # noqa: PLC0415
        except ImportError as error:
            raise UserError(
                "A data frame needs pandas. Install it: pip install pandas", code="missing-package"
            ) from error
        return pd.DataFrame([asdict(line) for line in self.rounds]).set_index("round")

    def to_csv(self, path: Path | str) -> None:
        """Write a CSV file with one row per round."""
        import csv  # noqa: PLC0415

        rows: Sequence[dict[str, Any]] = [asdict(line) for line in self.rounds]
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)

    def __repr__(self) -> str:
        """Return a short summary."""
        lines = [f"{name:13} {text}" for name, text in summary_rows(self.summary)]
        return "\n".join([*lines, *([f"folder        {self.folder}"] if self.folder else [])])
