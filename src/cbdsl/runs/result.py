"""The result of a run in Python: its summary, its rounds and its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cbdsl.arrays import Doubles, Floats, Samples
from cbdsl.engines.engine import Engine
from cbdsl.errors import UserError
from cbdsl.models.network import Network
from cbdsl.models.personal_models import PersonalModels
from cbdsl.models.saved_model import ModelMetadata
from cbdsl.runs.records import NO_CLAIMS, Claims, RoundRecord, Summary, summary_rows
from cbdsl.spec import Spec
from cbdsl.util.formatting import html_table

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


def predict_numbers(engine: Engine, weights: Floats, features: Floats, card: ModelMetadata) -> Floats:
    """Return predictions (N, T), or reconstructions (N, *shape), in the unit of the data. features: scaled."""
    everything = np.arange(len(features), dtype=np.int32)
    made = engine.outputs(weights, Samples(features, np.zeros(len(features), np.int32)), everything)
    if card.task == "reconstruction":
        made = made.reshape(len(features), *card.shape)
    scaling = card.target_scaling if card.task == "regression" else card.scaling
    return made if scaling is None else scaling.invert(made)


def _row(line: RoundRecord) -> dict[str, Any]:
    """Return a round as one flat row with a column per metric; with local tests also their means and worst tenths."""
    row = asdict(line)
    found = row.pop("local_test") or {"metrics": {}, "personal": {}}
    local = {
        f"{prefix}_{name}_{part}": spread[part]
        for prefix, spreads in (("local", found["metrics"]), ("personal", found["personal"]))
        for name, spread in spreads.items()
        for part in ("mean", "worst_tenth")
    }
    return {**row, **row.pop("metrics"), **local}


class Predictor:
    """A trained model that predicts."""

    weights: Floats  # flat: (D,)
    network: Network
    engine: Engine
    card: ModelMetadata | None  # how features and targets were scaled, and the threshold of a detector

    @cached_property
    def model(self) -> nn.Module:
        """The final global model as a torch module, in evaluation mode."""
        return self.network.module(self.weights)

    def predict(self, features: ArrayLike) -> Any:  # noqa: ANN401 - an array, of integers or floats
        """Return what the model makes of samples (N, *shape): classes (N,), or by task as follows.

        Of a regression (N, T), or (N,) with one target, in the targets' unit; of a reconstruction (N, *shape). There
        features are in the unit in which the data set was given; a classifier takes them as its data set has them.
        """
        if self.card is not None and self.card.task != "classification":
            made = predict_numbers(self.engine, self.weights, self._scaled(features), self.card)
            return made[:, 0] if self.card.task == "regression" and made.shape[1:] == (1,) else made
        values = np.ascontiguousarray(features, np.float32)
        if values.shape[1:] != self.network.shape:
            raise UserError(
                f"The model takes samples (N, *{self.network.shape}); given {values.shape}.", code="wrong-shape"
            )
        logits = log_probabilities(self.engine, self.weights, values, self.network.classes)
        return np.asarray(np.argmax(logits, axis=1), np.int32)

    def anomaly_scores(self, features: ArrayLike) -> Doubles:
        """Return the reconstruction's loss of each sample, (N,); what is above `card.threshold` is not normal."""
        if self.card is None or self.card.task != "reconstruction":
            raise UserError(
                "Anomaly scores are those of a reconstruction; this model has another task. Use predict.",
                code="not-supported",
            )
        values = self._scaled(features)
        rows = np.arange(len(values), dtype=np.int32)
        return self.engine.sample_losses(self.weights, Samples(values, np.zeros(len(values), np.int32)), rows)

    def _scaled(self, features: ArrayLike) -> Floats:
        """Return features as the network takes them."""
        values = np.asarray(features)
        if values.shape[1:] != self.network.shape:
            raise UserError(
                f"The model takes samples (N, *{self.network.shape}); given {values.shape}.", code="wrong-shape"
            )
        scaling = self.card.scaling if self.card else None
        return np.ascontiguousarray(scaling.apply(values) if scaling else values, np.float32)


@dataclass(frozen=True, eq=False)
class Result(Predictor):
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
    card: ModelMetadata | None = None  # how features and targets were scaled, and the threshold of a detector
    per_worker: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # columns of local_test.csv, (m,) each
    personal_models: PersonalModels | None = None  # of workers that have a model of their own, with data.local_test
    claims: Claims = field(default_factory=lambda: NO_CLAIMS)  # of all rounds: an array of round, worker and score

    def personal_model(self, worker: int) -> nn.Module:
        """Return a worker's own model as a torch module in evaluation mode."""
        if self.personal_models is None or worker not in self.personal_models:
            raise UserError(
                f"This run has no own model of worker {worker}. Set data.local_test=0.2, and use a method in which "
                "workers keep a model, such as cb-dsl or local-only. Attackers have none, and of more than 2,000 "
                "workers a sample is kept.",
                code="not-supported",
            )
        module = self.network.module(self.network.trained(self.personal_models[worker]))
        named = dict(module.named_buffers())
        for name, values in self.personal_models.buffers_of(worker).items():
            named[name].copy_(named[name].new_tensor(values))
        return module

    def to_frame(self) -> pd.DataFrame:
        """Return a pandas DataFrame with one row per round."""
        try:
            import pandas as pd  # noqa: PLC0415
        except ImportError as error:
            raise UserError(
                "A data frame needs pandas. Install it: pip install pandas", code="missing-package"
            ) from error
        return pd.DataFrame([_row(line) for line in self.rounds]).set_index("round")

    def to_csv(self, path: Path | str) -> None:
        """Write a CSV file with one row per round."""
        import csv  # noqa: PLC0415

        rows: Sequence[dict[str, Any]] = [_row(line) for line in self.rounds]
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(name for row in rows for name in row)))
            writer.writeheader()
            writer.writerows(rows)

    def __repr__(self) -> str:
        """Return a short summary."""
        return "\n".join(f"{name:13} {text}" for name, text in self._rows())

    def _repr_html_(self) -> str:
        return html_table(self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        return [*summary_rows(self.summary), *([("folder", str(self.folder))] if self.folder else [])]
