"""Tables, .csv and .parquet: the same samples at a server and on a device, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbdsl.data.dataset import Dataset, load
from cbdsl.data.table import read_table
from cbdsl.network.device_worker import parse_announcement
from cbdsl.network.samples import fit_samples, read_samples
from cbdsl.network.session import announce
from cbdsl.runs.build import Experiment
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec
from support.refusals import refused_as

RNG = np.random.default_rng(3)
NUMBERS = {name: np.round(RNG.normal(size=50), 3) for name in ("heat", "wind", "load")}
KINDS = np.where(NUMBERS["heat"] > 0, "warm", "cold")
FORMS = ("csv", "parquet")


def written(path: Path, columns: dict[str, Any]) -> Path:
    if path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), path)
        return path
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("form", FORMS)
def test_a_table_has_targets_by_name(form: str, tmp_path: Path) -> None:
    path = written(tmp_path / f"sensors.{form}", NUMBERS)
    data = load(str(path), targets=("load",))
    assert (data.task, data.target_names, len(data.train), len(data.test)) == ("regression", ("load",), 40, 10)
    assert data.in_unit(data.test.labels)[:, 0] == pytest.approx(NUMBERS["load"][4::5], abs=1e-5)
    assert load(str(path), task="reconstruction").shape == (3,)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("labels", [KINDS, (KINDS == "warm").astype(int)], ids=["text", "numbers"])
def test_a_column_of_classes_is_learned_and_devices_have_the_same(form: str, labels: Any, tmp_path: Path) -> None:  # noqa: ANN401
    path = written(tmp_path / f"sensors.{form}", {**NUMBERS, "kind": labels})
    settings = {
        "data.source": str(path), "data.task": "classification", "data.target": "kind", "model": "softmax",
        "workers": 2, "data.samples_per_worker": 5, "data.shared_training": 5, "data.shared_scoring": 10,
        "data.holdout": 5,
    }  # fmt: skip
    experiment = Experiment.prepare(resolve(Spec().with_settings(settings)), None, 1)
    data = experiment.dataset
    assert (data.classes, data.class_names) == (2, ("cold", "warm") if labels is KINDS else ())
    told = parse_announcement(announce(experiment, b"run-0001", b"")).data
    own = fit_samples(read_samples(path), told)
    kept = np.arange(50) % 5 != 4
    np.testing.assert_array_equal(own.labels[kept], data.train.labels)
    np.testing.assert_allclose(own.features[kept], data.train.features, rtol=1e-6)
    hot = written(tmp_path / f"other.{form}", {**NUMBERS, "kind": np.array(["hot"] * 50)})
    with refused_as("unknown-name", "hot") if labels is KINDS else refused_as("unknown-name", "class"):
        fit_samples(read_samples(hot), told)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("columns", "task", "code", "facts"),
    [
        ({"a": [1.0, 2.0], "lod": [3.0, 4.0]}, "auto", "unknown-name", ("'load'", "'lod'")),
        ({"a": [1.0, float("nan")], "load": [3.0, 4.0]}, "auto", "wrong-type", ("gap", "'a'")),
        ({"a": ["x", "y"], "load": [3.0, 4.0]}, "auto", "wrong-type", ("'x'", "'a'", "leave the column out")),
        ({"a": [1.0, 2.0], "load": ["x", "y"]}, "auto", "wrong-type", ("'x'", "'load'", "data.task=classification")),
        ({"a": [1.0, 2.0], "load": [3.5, 4.0]}, "classification", "wrong-type", ("3.5", "data.task=regression")),
        ({"load": [3.0, 4.0]}, "auto", "wrong-shape", ("nothing to predict from",)),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    form: str, columns: dict[str, Any], task: str, code: str, facts: tuple[str, ...], tmp_path: Path
) -> None:
    path = written(tmp_path / f"bad.{form}", columns)
    with refused_as(code, f"bad.{form}", *facts):
        load(str(path), task=task, targets=("load",))


def test_gaps_and_other_types_in_a_parquet_file_are_named(tmp_path: Path) -> None:
    for columns, facts in (
        ({"a": [1, None, 3]}, ("Row 2", "gap", "'a'")),
        ({"a": ["x", None, "z"]}, ("Row 1", "'x'", "'a'")),
        ({"a": [[1], [2], [3]]}, ("list", "'a'")),
    ):
        with refused_as("wrong-type", *facts):
            read_table(written(tmp_path / "bad.parquet", columns))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    with refused_as("unreadable-file", "bad.parquet"):
        read_table(tmp_path / "bad.parquet")
    with refused_as("unreadable-file", "missing.parquet"):
        read_table(tmp_path / "missing.parquet")


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "x.parquet", NUMBERS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refused_as("missing-package", "cbdsl[parquet]"):
        read_table(path)


def test_a_device_with_a_table_needs_to_know_the_column(tmp_path: Path) -> None:
    own = read_samples(written(tmp_path / "x.csv", NUMBERS))
    x = np.zeros((4, 2))
    x[0] = 1
    told = Dataset.from_arrays(x, x[:, 0], x, x[:, 0], task="regression")
    with refused_as("missing-value", "does not name its targets", "target_names"):
        fit_samples(own, told)
