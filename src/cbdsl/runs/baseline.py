"""What the server reaches alone: the line that says whether a run was worth its messages. It is not in the paper."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from cbdsl.algorithm.alone import ServerOnly
from cbdsl.algorithm.messages import commitment_of
from cbdsl.arrays import Floats
from cbdsl.engines.engine import Sgd
from cbdsl.runs.build import Experiment, build_alone_training, draw_initial
from cbdsl.runs.metrics import measure_all
from cbdsl.runs.records import ServerAlone
from cbdsl.spec import INIT_SERVER
from cbdsl.util.files import read_json, read_text, write_json
from cbdsl.util.serialize import from_plain, to_plain


def measure_server_alone(experiment: Experiment, kept: Path | None = None) -> ServerAlone:
    """Train a model on D_tr and D_sc alone, as long as it gets better on the hold-out, and test it.

    It starts where the run starts, and has the run's model, engine and optimiser. kept: a folder of such measurements,
    for runs with the same data, model and seed.
    """
    path = kept / f"{_key(experiment)}.json" if kept is not None else None
    if path is not None and path.exists():
        return from_plain(ServerAlone, read_json(read_text(path)), defaults=True, nan=True)
    found = _measure(experiment)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f"{os.getpid()}-{path.name}")  # other processes may write the same
        write_json(own, to_plain(asdict(found)))
        own.replace(path)
    return found


def _measure(experiment: Experiment) -> ServerAlone:
    data, engine = experiment.dataset, experiment.engine
    alone = build_alone_training(experiment.spec, ServerOnly(), engine, data.train, experiment.split)
    weights, epochs = alone.train(_start(experiment))
    metrics = measure_all(experiment.metrics, [experiment.evaluate(weights)])
    accuracy = metrics.pop("accuracy", None)
    count = len(alone.assigned.samples[0])
    return ServerAlone(math.nan, count, epochs, metrics) if accuracy is None else ServerAlone(accuracy, count, epochs)


def _start(experiment: Experiment) -> Floats:
    """Return the model, (D,), that the run starts from, before the server has trained it."""
    spec = experiment.spec
    initial = draw_initial(spec, experiment.network) if spec.init == INIT_SERVER else experiment.initial
    return np.asarray(initial[0])


def _key(experiment: Experiment) -> str:
    """Return a hash of all that decides the measurement."""
    spec = experiment.spec
    local = asdict(replace(spec.local, epochs=1, steps=0, decay=1.0, schedule=Sgd.of(spec.local, 1.0).schedule))
    del (
        local["batchnorm"],
        local["schedule_over"],
    )  # over a run: constant here
    data = {name: value for name, value in asdict(spec.data).items() if not name.startswith("local_test")}
    named = (spec.model, spec.data.source, spec.data.partition, *filter(None, (spec.loss, spec.local.augment)))
    options = [dict(spec.options.of(part)) for part in named]
    start = commitment_of(_start(experiment)).hex()
    if experiment.network.frozen is not None:
        start += experiment.network.frozen.digest
    parts = [
        {**data, "loss": spec.loss},
        local,
        spec.model,
        options,
        spec.seed,
        experiment.engine.name,
        start,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
