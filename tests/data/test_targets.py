"""Data sets of a regression and of a reconstruction: scaling, clients, files, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbdsl.arrays import Samples
from cbdsl.data.dataset import Dataset, load
from cbdsl.data.partition import split
from cbdsl.spec import DataSpec
from support.refusals import refused_as

RNG = np.random.default_rng(0)
X, X_TEST = 100 + 5 * RNG.normal(size=(60, 4)), 100 + 5 * RNG.normal(size=(20, 4))
Y, Y_TEST = 1000 + 30 * X[:, 0], 1000 + 30 * X_TEST[:, 0]


def regression(y: Any = Y, y_test: Any = Y_TEST, **given: Any) -> Dataset:  # noqa: ANN401 - bad ones, too
    return Dataset.from_arrays(X, y, X_TEST, y_test, task="regression", **given)


def test_targets_and_features_are_scaled_and_come_back_in_their_unit() -> None:
    data = regression()
    assert (data.task, data.classes, data.outputs, data.train.labels.shape) == ("regression", 0, 1, (60, 1))
    assert data.train.labels.dtype == np.float32
    for values in (data.train.features, data.train.labels):
        assert np.abs(values.mean(0)).max() < 1e-5
        assert values.std(0) == pytest.approx(1, abs=1e-5)
    assert np.allclose(data.in_unit(data.test.labels)[:, 0], Y_TEST, rtol=1e-5)
    two = regression(np.stack([Y, X[:, 1]], 1), np.stack([Y_TEST, X_TEST[:, 1]], 1), target_names=("load", "heat"))
    assert (two.outputs, two.target_names) == (2, ("load", "heat"))
    assert np.array_equal(regression(scale=False).train.features, X.astype(np.float32))


def test_a_channel_that_never_changes_stays_finite() -> None:
    still = np.column_stack([X, np.full(60, 7.0)])
    data = Dataset.from_arrays(still, Y, still[:20], Y[:20], task="regression")
    assert np.abs(data.train.features[:, 4]).max() == 0


def test_a_reconstruction_has_no_targets_and_may_mark_what_is_not_normal() -> None:
    marks = np.arange(20) % 2 == 0
    data = Dataset.from_arrays(X.reshape(60, 2, 2), None, X_TEST.reshape(20, 2, 2), marks, task="reconstruction")
    assert (data.classes, data.outputs, data.train.labels.sum(), data.test.labels.sum()) == (0, 4, 0, 10)
    assert Dataset.from_arrays(X, None, X_TEST, None, task="reconstruction").test.labels.sum() == 0


def test_labels_as_text_are_classes_by_name() -> None:
    data = Dataset.from_arrays(X, np.where(Y > 4000, "high", "low"), X_TEST, np.where(Y_TEST > 4000, "high", "low"))
    assert (data.class_names, data.classes) == (("high", "low"), 2)
    assert np.array_equal(data.train.labels == 0, Y > 4000)


def test_clients_are_scaled_like_the_data() -> None:
    data = regression().with_clients([(X[:5], Y[:5]), Samples(X[5:9].astype(np.float32), Y[5:9].astype(np.float32))])
    assert np.array_equal(data.train.features[60:69], data.train.features[:9])
    assert data.train.labels[60:69] == pytest.approx(data.train.labels[:9], abs=1e-4)
    with refused_as("wrong-shape", "client 0's", "2 targets", "1"):
        regression().with_clients([(X[:5], np.ones((5, 2)))])


@pytest.mark.parametrize(
    ("given", "code", "facts"),
    [
        ({"y": np.where(Y > 0, np.nan, Y)}, "out-of-range", ("training", "60", "row 0")),
        ({"y": np.full(60, 3.5)}, "out-of-range", ("3.5", "all 60", "nothing to learn")),
        ({"y": np.array(["a"] * 60)}, "wrong-type", ("text", "'a'", "task=classification")),
        ({"y": None}, "missing-value", ("task=reconstruction",)),
        ({"y": Y[:7]}, "wrong-shape", ("60", "(7,)")),
        ({"y_test": np.full(20, np.inf)}, "out-of-range", ("test", "row 0")),
        ({"y_test": np.ones((20, 2))}, "wrong-shape", ("1 targets", "2 in the test set")),
        ({"target_names": ("a", "b")}, "wrong-shape", ("2 names",)),
    ],
)
def test_bad_targets_are_refused(given: dict[str, Any], code: str, facts: tuple[str, ...]) -> None:
    with refused_as(code, *facts):
        regression(**given)


def test_other_bad_input_is_refused() -> None:
    with refused_as("out-of-range", "float64", "this is regression: set task"):
        Dataset.from_arrays(X, Y, X_TEST, Y_TEST)
    with refused_as("missing-value", 'task="reconstruction"'):
        Dataset.from_arrays(X, None, X_TEST, None)
    with refused_as("wrong-shape", "Give None"):
        Dataset.from_arrays(X, Y, X_TEST, None, task="reconstruction")
    with refused_as("wrong-type", "0 or 1", "20"):
        Dataset.from_arrays(X, None, X_TEST, Y_TEST, task="reconstruction")
    with refused_as("out-of-range", "NaN"):
        Dataset.from_arrays(np.full((60, 4), np.nan), Y, X_TEST, Y_TEST, task="regression")
    with refused_as("wrong-shape", "(4,)", "(3,)"):
        Dataset.from_arrays(X, Y, X_TEST[:, :3], Y_TEST, task="regression")
    with refused_as("conflict", "has no classes", "regression"):
        regression().as_task("classification")
    with refused_as("conflict", "has no targets"):
        Dataset.from_arrays(X, None, X_TEST, None, task="reconstruction").as_task("regression")


def test_a_file_is_read_for_the_task_that_is_asked_for(tmp_path: Path) -> None:
    path = str(tmp_path / "points.npz")
    np.savez(path, train_features=X, train_labels=Y, test_features=X_TEST, test_labels=Y_TEST)
    with refused_as("out-of-range", "data.task=regression"):
        load(path)
    data = load(path, task="regression")
    assert np.array_equal(data.train.features, regression().train.features)
    np.savez(path, train_features=X, test_features=X_TEST, test_labels=np.arange(20) % 2)
    assert load(path, task="reconstruction").test.labels.sum() == 10
    np.savez(
        path, train_features=X, train_labels=Y, test_features=X_TEST, test_labels=Y_TEST,
        feature_mean=np.full(4, 90.0), feature_deviation=np.full(4, 10.0),
    )  # fmt: skip
    data = load(path, task="regression")
    assert data.scaling is not None
    assert data.scaling.mean == (90.0,) * 4
    assert load("mnist", task="reconstruction").outputs == 784


def test_partitions_deal_without_classes_or_say_why_not() -> None:
    data = regression()
    spec = DataSpec(samples_per_worker=6, shared_training=4, shared_scoring=5, holdout=5, shards_per_worker=1)
    parts = split(data.train.labels, DataSpec(**{**vars(spec), "partition": "quantile"}), 5, 0, task="regression")
    targets = data.train.labels[:, 0]
    spans = sorted((targets[rows].min(), targets[rows].max()) for rows in parts.workers)
    assert all(one[1] <= other[0] for one, other in pairwise(spans))
    for name in ("shards", "dirichlet", "similarity"):
        chosen = DataSpec(**{**vars(spec), "partition": name})
        with refused_as("conflict", name, "no classes", "quantile"):
            split(data.train.labels, chosen, 5, 0, task="regression")
    with refused_as("conflict", "quantile", "iid"):
        split(data.train.labels[:, 0], DataSpec(**{**vars(spec), "partition": "quantile"}), 5, 0, task="reconstruction")


def test_a_table_is_a_regression_by_the_names_of_its_targets(tmp_path: Path) -> None:
    path = tmp_path / "sensors.csv"
    np.savetxt(path, np.column_stack([X, Y]), delimiter=",", header="a,b,c,d,load", comments="")
    data = load(str(path), targets=("load",))
    assert (data.task, data.target_names, len(data.train), len(data.test)) == ("regression", ("load",), 48, 12)
    assert data.in_unit(data.test.labels)[0, 0] == pytest.approx(Y[4], rel=1e-5)
    assert load(str(path), task="reconstruction").shape == (5,)
    with refused_as("conflict", "data.target"):
        load(str(path))
    with refused_as("unknown-name", "laod", "'load'"):
        load(str(path), targets=("laod",))
    with refused_as("no-effect", "load"):
        load("mnist", targets=("load",))


def test_a_task_is_one_of_three() -> None:
    with refused_as("unknown-name", "clustering", "reconstruction"):
        Dataset.from_arrays(np.eye(4), None, np.eye(4), None, task="clustering")  # type: ignore[arg-type]
