"""Per-worker results: the global model and workers' own models on the samples that each worker held back.

Attackers are left out. In a large swarm a random sample of workers is measured, the same one for the same seed.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbdsl.algorithm.alone import LocalOnly
from cbdsl.algorithm.messages import ServerState, Swarm
from cbdsl.arrays import Floats, Indices
from cbdsl.errors import UserError
from cbdsl.models.personal_models import PersonalModels
from cbdsl.rng import stream
from cbdsl.runs.build import CALIBRATING, Experiment, honest_workers
from cbdsl.runs.metrics import Evaluation, Spread
from cbdsl.runs.records import LocalTest
from cbdsl.swarms.local import SwarmWithAttackers, workers_at_once
from cbdsl.util.files import read_text

MOST_WORKERS = 2000  # that are measured
MOST_BYTES = 2**29  # of workers' own models, if they are to be kept
_OWN, _COUNTS = "personal_", ("worker", "samples")
Values = dict[str, "float | None"]


@dataclass(frozen=True, eq=False)
class WorkerResults:
    """A table of metrics by worker."""

    columns: dict[str, NDArray[Any]]  # worker, samples, metrics of the global model, personal_METRIC of their own
    summary: LocalTest
    models: PersonalModels | None = None

    def to_csv(self) -> bytes:
        """Return the columns as the content of a CSV file; undefined values are empty."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        for row in zip(*(column.tolist() for column in self.columns.values()), strict=True):
            writer.writerow("" if isinstance(each, float) and math.isnan(each) else each for each in row)
        return text.getvalue().encode()


def read_columns(path: Path) -> dict[str, NDArray[Any]]:
    """Read the columns of a CSV file that `WorkerResults.to_csv` made; none if there is no such file."""
    if not path.is_file():
        return {}
    try:
        head, *rows = csv.reader(read_text(path).splitlines())
        columns = zip(*rows, strict=True)
        return {
            name: np.array([float(each or "nan") for each in column], np.int64 if name in _COUNTS else np.float64)
            for name, column in zip(head, columns, strict=True)
        }
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is damaged ({error}). Write it again from the rest: cbdsl resume {path.parent}",
            code="damaged-file",
        ) from error


def choose_workers(experiment: Experiment) -> Indices:
    """Return the workers that are measured, sorted: all honest ones, or `MOST_WORKERS` of them drawn at random."""
    honest = honest_workers(experiment)
    if len(honest) <= MOST_WORKERS:
        return honest
    drawn = stream(experiment.spec.seed, "local-test", round_number=1).permutation(len(honest))[:MOST_WORKERS]
    return np.sort(honest[drawn])


def measure_workers(
    experiment: Experiment, state: ServerState, swarm: Swarm | None, keep: bool = False
) -> WorkerResults | None:
    """Measure the models after a round; None if workers held back no samples here.

    swarm: has the workers' own models if it is in this process or on a cluster. keep: also return those models.
    """
    if not experiment.split.tests:
        return None
    workers = choose_workers(experiment)
    common = None if isinstance(experiment.server.method, LocalOnly) else experiment.server.models(state)[0]
    shared: list[Values] = [] if common is None else [_measure(experiment, common, one) for one in workers]
    found: dict[int, Values] = {}
    kept = _Keeper(experiment, keep)
    for worker, weights in _own_models(experiment, state, swarm, workers):
        found[worker] = _measure(experiment, weights, worker, own=True)
        kept.add(worker, weights)
    own = [found.get(worker, {}) for worker in workers.tolist()]
    samples = np.array([len(experiment.split.tests[worker]) for worker in workers], np.int64)
    columns: dict[str, NDArray[Any]] = {"worker": workers, "samples": samples}
    for rows, prefix in ((shared, ""), (own, _OWN)):
        for name in _spreads(experiment, rows):  # NaN where a metric is not defined
            columns[prefix + name] = np.array([row.get(name) for row in rows], np.float64)
    models = kept.models()
    summary = LocalTest(
        len(workers), int(samples.sum()), _spreads(experiment, shared), _spreads(experiment, own),
        len(models or ()), kept.bytes,
    )  # fmt: skip
    return WorkerResults(columns, summary, models)


def _own_models(
    experiment: Experiment, state: ServerState, swarm: Swarm | None, workers: Indices
) -> Iterator[tuple[int, Floats]]:
    """Yield workers and their own models, (D,); nothing if workers keep none or are elsewhere."""
    if isinstance(experiment.server.method, LocalOnly):
        models = experiment.server.models(state)
        yield from ((int(worker), models[worker]) for worker in workers)
    elif isinstance(swarm, SwarmWithAttackers):
        block = workers_at_once(experiment.engine.size)
        for start in range(0, len(workers), block):
            for worker, weights in swarm.personal(workers[start : start + block].tolist()).items():
                own = experiment.server.own  # all others are the server's
                yield worker, weights if own is None else np.where(own, weights, state.global_best)


def _measure(experiment: Experiment, weights: Floats, worker: int, own: bool = False) -> Values:
    """Measure a model (D,) on what a worker held back. own: with the worker's statistics of BatchNorm."""
    train, tests = experiment.dataset.train, experiment.split.tests[worker]
    engine = experiment.engine
    if own and experiment.network.keeps_statistics:
        engine = engine.with_statistics_of(_calibrating(experiment, worker))  # type: ignore[attr-defined]  # of torch
    data = replace(experiment.dataset, test=train.taken(tests))
    seen = Evaluation(engine, weights, data, train, experiment.unseen)
    return {name: metric.measure(seen) for name, metric in experiment.metrics.items()}


def _calibrating(experiment: Experiment, worker: int) -> Floats:
    """Return the features for the statistics with which a worker's own model is scored."""
    return experiment.dataset.train.features[experiment.split.workers[worker][:CALIBRATING]]


def _spreads(experiment: Experiment, rows: Sequence[Values]) -> dict[str, Spread]:
    """Return the spread of each metric that is defined for a worker."""
    found = {name: Spread.of([row.get(name) for row in rows], one.better) for name, one in experiment.metrics.items()}
    return {name: spread for name, spread in found.items() if spread is not None}


class _Keeper:
    """Collects workers' own models, unless they are too large."""

    def __init__(self, experiment: Experiment, keep: bool) -> None:
        self._experiment, self._network, self._keep = experiment, experiment.network, keep
        self.bytes = 0  # that they take
        self._rows: dict[int, Floats] = {}
        self._buffers: dict[str, list[NDArray[Any]]] = {}

    def add(self, worker: int, weights: Floats) -> None:
        """Add the next worker's model."""
        self.bytes += 4 * self._network.whole_size * self._keep
        if not self._keep or self.bytes > MOST_BYTES:
            self._rows.clear()
            return
        self._rows[worker] = self._network.whole(weights).copy()
        if self._network.keeps_statistics:
            own = replace(self._network, calibration=_calibrating(self._experiment, worker))
            parameters = {name for name, _ in own.tensor_shapes()}
            for name, each in own.tensors(weights).items():
                if name not in parameters:
                    self._buffers.setdefault(name, []).append(each)

    def models(self) -> PersonalModels | None:
        """Return the models; None if there are none, or if they are too large or not requested."""
        if not self._rows:
            return None
        workers, weights = np.array([*self._rows], np.int32), np.stack([*self._rows.values()])
        return PersonalModels(workers, weights, {name: np.stack(rows) for name, rows in self._buffers.items()})
