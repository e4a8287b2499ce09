"""What a run leaves in Python: its summary, its rounds, its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from cbdsl.arrays import Floats, Indices
from cbdsl.engines.base import Engine
from cbdsl.errors import UserError
from cbdsl.models.network import Network
from cbdsl.models.predictions import log_probabilities
from cbdsl.runs.records import RoundRecord, Summary, summary_rows
from cbdsl.spec import Spec

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]
    from torch import nn


@dataclass(frozen=True, eq=False)
class Result:
    """A finished run."""

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
        """The class of each sample, (N, *shape) -> (N,)."""
        values = np.ascontiguousarray(features, np.float32)
        if values.shape[1:] != self.network.shape:
            raise UserError(f"The model takes samples (N, *{self.network.shape}); given {values.shape}.")
        logits = log_probabilities(self.engine, self.weights, values, self.network.classes)
        return np.asarray(np.argmax(logits, axis=1), np.int32)

    def to_frame(self) -> pd.DataFrame:
        """One row a round as a pandas DataFrame."""
        try:
            import pandas as pd  # noqa: PLC0415
        except ImportError as error:
            raise UserError("A data frame needs pandas. Install it: pip install pandas") from error
        return pd.DataFrame([asdict(line) for line in self.rounds]).set_index("round")

    def to_csv(self, path: Path | str) -> None:
        """One row a round as a CSV file."""
        import csv  # noqa: PLC0415

        rows: Sequence[dict[str, Any]] = [asdict(line) for line in self.rounds]
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)

    def __repr__(self) -> str:
        """A short summary."""
        lines = [f"{name:13} {text}" for name, text in summary_rows(self.summary)]
        return "\n".join([*lines, *([f"folder        {self.folder}"] if self.folder else [])])
