"""Loads finished runs from their folders and models from their files, both able to predict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from cbdsl.engines.choose import choose_engine
from cbdsl.engines.engine import Engine
from cbdsl.engines.loss import Loss
from cbdsl.engines.native_engine import default_threads
from cbdsl.models import saved_model
from cbdsl.models.architecture import Architecture
from cbdsl.models.network import Network
from cbdsl.models.personal_models import PersonalModels
from cbdsl.models.saved_model import ModelMetadata, SavedModel
from cbdsl.register import CUSTOM
from cbdsl.runs.folder import RunFolder, read_result
from cbdsl.runs.result import Predictor, Result
from cbdsl.runs.worker_results import read_columns


class LoadedModel(Predictor, SavedModel):
    """A trained model from a file."""

    card: ModelMetadata

    @cached_property
    def network(self) -> Network:  # type: ignore[override]
        """The network; raises UserError if the file does not describe it."""
        return Network(self.graph.shape, self.graph.classes, self.graph)

    @cached_property
    def engine(self) -> Engine:  # type: ignore[override]
        """The engine for predictions: native if it is installed, otherwise torch."""
        card = self.card
        loss = Loss("mse" if card.loss == CUSTOM else card.loss, card.loss_setting, card.task == "reconstruction")
        return choose_engine("auto", self.graph, self.graph.shape, default_threads(), "cpu", loss).engine


@dataclass(frozen=True, eq=False, repr=False)
class LoadedRun(Result):
    """A finished run from its folder; `weights` are all of the model's, frozen ones included."""

    @property
    def saved(self) -> LoadedModel:
        """The model with its metadata."""
        assert self.card is not None
        return LoadedModel(self.card, self.weights, str(self.folder))

    @property
    def graph(self) -> Architecture:
        """The network as data; raises UserError with the reason if there is none."""
        return self.saved.graph

    @property
    def source(self) -> str:
        """The folder."""
        return self.saved.source

    def class_name(self, label: int) -> str:
        """Return the name of a class, or its number if it has none."""
        return self.saved.class_name(label)


class _Later:
    """A proxy for an object that is built on first use, so that results can be read where models cannot run."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of what is built
        return getattr(self._build(), name)


def load(source: Path | str) -> Any:  # noqa: ANN401 - a LoadedRun or a LoadedModel
    """Load a finished run from its folder as a `Result`, or a trained model from a .safetensors file.

    Both have `predict`, `model` (a torch module), `weights` and `card`; a run also has `spec`, `summary`, `rounds` and
    `to_frame`.

    >>> from tempfile import TemporaryDirectory
    >>> from cbdsl import Spec, run
    >>> spec = Spec(workers=2, rounds=1, model="softmax").with_settings({"data.samples_per_worker": 20})
    >>> with TemporaryDirectory() as folder:
    ...     result = run(spec, out=folder, threads=1)
    ...     again = load(folder)
    >>> again.summary == result.summary, (again.weights == result.weights).all()
    (True, np.True_)
    """
    saved = saved_model.load(source)
    model = LoadedModel(saved.card, saved.weights, saved.source)
    folder = Path(source)
    if not (folder / "summary.json").is_file():
        return model
    spec, summary, rounds = read_result(folder)
    network, engine = cast("Network", _Later(lambda: model.network)), cast("Engine", _Later(lambda: model.engine))
    return LoadedRun(
        spec, summary, tuple(rounds), model.weights, folder, network, engine, model.card,
        read_columns(folder / "local_test.csv"), PersonalModels.read(folder), RunFolder(folder).claims(),
    )  # fmt: skip
