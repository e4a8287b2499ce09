"""Laws of a partition, a model and a data set."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cbdsl import register
from cbdsl.arrays import Indices, Labels, Samples
from cbdsl.data.dataset import Dataset
from cbdsl.data.partition import Altering, Partition, Pool, find_sampler, sample_workers
from cbdsl.engines.augmentations import Augmentation
from cbdsl.engines.choose import choose_engine
from cbdsl.engines.engine import Sgd
from cbdsl.models.architecture import Architecture
from cbdsl.models.network import Network, network_of
from cbdsl.spec import DataSpec, Spec
from cbdsl.testing.laws import Laws, is_floats, is_identical, make_part, small_data


def check_partition(partition: Partition | str) -> None:
    """Fail unless a partition gives every worker some samples of the pool, the same for the same generator.

    >>> check_partition("dirichlet")
    """
    deal, laws = make_part(register.partition, partition)
    data = small_data()
    spec = DataSpec(samples_per_worker=20, shard_size=10, shared_training=0, shared_scoring=1, holdout=0)
    for workers in (1, 2, 6):
        found = []
        for _ in range(2):
            indices = np.flatnonzero(np.arange(300) % 7 > 0).astype(np.int32)
            assert data.clients is not None
            given = data.train.features.copy()
            pool = Pool(indices.copy(), data.train.labels.copy(), data.clients.copy(), features=given)
            with laws.expect_no_error(f"with {workers} workers"):
                rows = deal(pool, spec, workers, np.random.default_rng(workers))
                found.append([np.asarray(row) for row in rows])
            laws.require_unchanged(
                {
                    "the pool": indices,
                    "the labels": data.train.labels,
                    "the clients": data.clients,
                    "the features": data.train.features,
                },
                {
                    "the pool": pool.indices,
                    "the labels": pool.labels,
                    "the clients": pool.clients,
                    "the features": given,
                },
            )
        first, second = found
        laws.require(
            len(first) == workers, "there are as many lists as workers", f"{workers} workers got {len(first)} lists."
        )
        for worker, row in enumerate(first):
            laws.require(len(row) > 0, "no worker goes without samples", f"Worker {worker} of {workers} has none.")
            whole = row.ndim == 1 and row.dtype.kind in "iu"
            strangers = np.setdiff1d(row, indices) if whole else row
            laws.require(
                whole and not len(strangers),
                "a list holds whole numbers from pool.indices",
                f"Worker {worker} of {workers} has {strangers[:5]}, which are not in it.",
            )
        equal = all(is_identical(one, other) for one, other in zip(first, second, strict=True))
        laws.require(
            equal, "the same generator deals the same samples", f"With {workers} workers it does not. Draw from rng."
        )
        if isinstance(deal, Altering):
            _check_altered(deal, data, first, laws)
    if find_sampler(deal) is not None:
        _check_sampler(deal, pool, spec, laws)


def _check_sampler(deal: Partition, pool: Pool, spec: DataSpec, laws: Laws) -> None:
    with laws.expect_no_error("when it draws one worker's samples"):
        parts = sample_workers(deal, pool, spec, 10, seed=3)
        found = [[parts[worker] for worker in order] for order in (range(10), reversed(range(10)))]
    laws.require(
        all(is_identical(one, other) for one, other in zip(found[0], found[1][::-1], strict=True)),
        "a worker draws the same samples in any order of workers",
        "In another order the samples differ. Draw from the given generator, and keep no state.",
    )
    twice = [worker for worker, own in enumerate(found[0]) if len(np.unique(own)) < len(own)]
    laws.require(not twice, "a worker's samples are all different", f"Worker {twice[:1]} of 10 has some twice.")


def _check_altered(deal: Altering, data: Dataset, rows: list[Indices], laws: Laws) -> None:
    held = np.concatenate(rows)
    laws.require(
        len(np.unique(held)) == len(held),
        "a partition that alters samples deals each of them once",
        f"With {len(rows)} workers some are dealt twice.",
    )
    for worker, row in enumerate(rows):
        given = data.train.features[row]
        found = []
        for _ in range(2):
            features = given.copy()
            with laws.expect_no_error(f"for worker {worker} of {len(rows)}"):
                found.append(np.asarray(deal.altered(features, worker, len(rows), np.random.default_rng(worker))))
            laws.require_unchanged({"the features": given}, {"the features": features})
        laws.require(
            found[0].shape == given.shape and is_floats(found[0]) and np.isfinite(found[0]).all(),
            "altered features are finite numbers of the same shape",
            f"Of {given.shape} it makes {found[0].dtype} {found[0].shape}.",
        )
        laws.require(
            is_identical(*found), "the same generator alters samples in the same way", "It does not. Draw from rng."
        )


def check_augmentation(augmentation: Augmentation | str, shape: tuple[int, ...] = (1, 8, 8)) -> None:
    """Fail unless an augmentation makes finite batches of the shape it is given, the same from the same seed of torch.

    >>> check_augmentation("noise")
    """
    import torch  # noqa: PLC0415 - only this check needs it

    change, laws = make_part(register.augmentation, augmentation)
    for count in (1, 2, 7):
        batch = torch.linspace(0, 1, count * math.prod(shape)).reshape(count, *shape)
        found = []
        for _ in range(2):
            with torch.random.fork_rng(devices=[]), laws.expect_no_error(f"with {count} samples of shape {shape}"):
                torch.manual_seed(count)
                found.append(change(batch.clone()))
        first = found[0]
        good = isinstance(first, torch.Tensor) and first.shape == batch.shape and first.dtype == torch.float32
        made = f"{first.dtype} {tuple(first.shape)}" if isinstance(first, torch.Tensor) else type(first).__name__
        laws.require(good, "a batch stays a float32 tensor of its shape", f"Of {tuple(batch.shape)} it makes {made}.")
        laws.require(bool(first.isfinite().all()), "a changed batch is finite", f"One of {count} samples is not.")
        laws.require(
            torch.equal(*found),
            "the same seed of torch changes a batch in the same way",
            "It does not. Draw from torch.",
        )


def check_model(model: Callable[..., Any] | str, shape: tuple[int, ...] = (1, 28, 28), classes: int = 10) -> None:
    """Fail unless a model takes samples of a shape one by one and trains to the same numbers every time.

    model: a name, or a function of no arguments, or of shape and classes, that returns a module or an Architecture.

    >>> check_model("softmax")
    """
    part, laws = _find_model(model)
    with laws.expect_no_error(f"with samples of shape {shape} and {classes} classes"):
        networks = [_build_network(part, shape, classes) for _ in range(2)]
    network = networks[0]
    if network.builder is not None:
        one, other = network.build(), network.build()
        laws.require(one is not other, "every call builds a fresh module", "Two calls gave the same object.")
    with laws.expect_no_error("when its weights are drawn"):
        starts = [each.initial_weights(11) for each in networks]
    laws.require(
        is_identical(*starts) and np.isfinite(starts[0]).all(),
        "one seed draws the same finite weights",
        "Two calls with one seed differ, or some weights are not finite.",
    )
    rng = np.random.default_rng(3)
    features = rng.normal(size=(12, *shape)).astype(np.float32)
    samples = Samples(features, (np.arange(12) % classes).astype(np.int32))
    everything, weights = np.arange(12, dtype=np.int32), starts[0]
    with laws.expect_no_error(f"with samples of shape {shape} and {classes} classes"):
        engine = choose_engine("auto", network.subject, shape, 1).engine
        losses = engine.sample_losses(weights, samples, everything)
        turned = engine.sample_losses(weights, samples, everything[::-1].copy())[::-1]
        sgd, batches = Sgd(0.01), everything.reshape(1, 3, 4)
        seeds = np.array([5], np.uint64)
        trained = [engine.train(weights[None], samples, batches, sgd, seeds) for _ in range(2)]
    laws.require(
        np.isfinite(losses).all(),
        "every sample has a finite loss",
        f"Sample {int(np.argmin(np.isfinite(losses)))} not.",
    )
    laws.require(
        np.allclose(losses, turned, rtol=1e-4, atol=1e-5),
        "a sample's outputs do not depend on the samples beside it",
        "In another order, losses change. Normalise by group or layer, not by batch.",
    )
    laws.require(
        is_identical(*trained) and np.isfinite(trained[0]).all(),
        "the same training gives the same finite weights",
        "Two equal trainings differ, or some weights are not finite.",
    )


def _find_model(model: Callable[..., Any] | str) -> tuple[Callable[..., Any], Laws]:
    if isinstance(model, str):
        return register.model.make(model, {}), Laws("model", f"'{model}'")
    return model, Laws("model", getattr(model, "__qualname__", repr(model)))


def _build_network(model: Callable[..., Any], shape: tuple[int, ...], classes: int) -> Network:
    wanted = [
        each
        for each in inspect.signature(model).parameters.values()
        if each.default is each.empty and each.kind in {each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD}
    ]
    if not wanted:
        return network_of(Spec(), shape, classes, model)
    network = model(shape, classes)
    if not isinstance(network, Architecture):
        return network_of(Spec(), shape, classes, lambda: model(shape, classes))
    if network.classes < classes:
        raise ValueError(f"it has {network.classes} outputs for {classes} classes")
    return Network(shape, classes, network)


def check_dataset(load: Callable[[], Dataset] | str) -> None:
    """Fail unless a data set is valid: finite samples of one shape, labels of its classes, the same at every call.

    >>> check_dataset(small_data)
    """
    function, laws = make_part(register.dataset, load)
    with laws.expect_no_error("when it is loaded"):
        data, again = function(), function()
    laws.require(isinstance(data, Dataset), "it gives a cbdsl.Dataset", f"It gives a {type(data).__name__}.")
    for name, part, second in (("training", data.train, again.train), ("test", data.test, again.test)):
        features, labels = part.features, part.labels
        count = len(labels)
        laws.require(
            features.dtype == np.float32 and features.ndim >= 2 and len(features) == count and count > 0,
            "features are float32 (N, ...), one row for each label",
            f"Of the {name} set they are {features.dtype} {features.shape}, for {count} labels.",
        )
        laws.require(np.isfinite(features).all(), "features are finite", f"Those of the {name} set are not.")
        _check_labels(laws, data, name, labels)
        laws.require(
            is_identical(features, second.features) and is_identical(labels, second.labels),
            "every call gives the same data",
            f"Two calls gave two {name} sets. Draw from a generator with a seed.",
        )
    shapes = data.train.features.shape[1:], data.test.features.shape[1:]
    laws.require(
        shapes[0] == shapes[1], "training and test samples have one shape", f"They have {shapes[0]} and {shapes[1]}."
    )
    if data.task == "classification":
        laws.require(data.classes >= 2, "there are at least two classes", f"There are {data.classes}.")
    else:
        laws.require(data.classes == 0, "without classification there are no classes", f"There are {data.classes}.")
    if data.clients is not None:
        owners = data.clients
        laws.require(
            owners.shape == (len(data.train),) and owners.dtype.kind in "iu" and owners.min() >= -1,
            "clients are whole numbers from 0 (-1: no client), one for each training sample",
            f"They are {owners.dtype} {owners.shape}.",
        )


def _check_labels(laws: Laws, data: Dataset, name: str, labels: Labels) -> None:
    """Require labels of the data's classes, or finite targets, or marks of what is not normal."""
    if data.task == "regression":
        laws.require(
            labels.dtype == np.float32 and labels.ndim == 2 and bool(np.isfinite(labels).all()),
            "targets are finite float32 (N, T)",
            f"Those of the {name} set are {labels.dtype} {labels.shape}.",
        )
        return
    most = data.classes if data.task == "classification" else 2
    laws.require(
        labels.dtype == np.int32 and labels.min() >= 0 and labels.max() < most,
        f"labels are int32 from 0 to {'classes - 1' if data.task == 'classification' else 1}",
        f"Those of the {name} set are {labels.dtype} from {labels.min()} to {labels.max()}, with {data.classes} "
        "classes.",
    )
