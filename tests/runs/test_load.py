"""What `cbdsl.load` returns, and how public objects show themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cbdsl
from cbdsl.data.dataset import load as load_data
from support.helpers import blobs, perceptron, small_spec
from support.refusals import refused_as


def test_a_runs_folder_becomes_its_result(tmp_path: Path) -> None:
    data = blobs()
    result = cbdsl.run(small_spec(rounds=2), model=perceptron, data=data, out=tmp_path / "run")
    again = cbdsl.load(tmp_path / "run")
    assert isinstance(again, cbdsl.Result)
    assert (again.spec, again.summary, again.rounds) == (result.spec, result.summary, result.rounds)
    assert again.folder == tmp_path / "run"
    assert np.array_equal(again.predict(data.test.features), result.predict(data.test.features))
    assert repr(again).splitlines()[:-1] == repr(result).splitlines()[:-1]


def test_a_models_file_predicts(tmp_path: Path) -> None:
    data = blobs()
    result = cbdsl.run(small_spec(rounds=2), model=perceptron, data=data, out=tmp_path / "run")
    model = cbdsl.load(tmp_path / "run" / "model.safetensors")
    assert not isinstance(model, cbdsl.Result)
    assert np.array_equal(model.predict(data.test.features), result.predict(data.test.features))
    with refused_as("wrong-shape"):
        model.predict([[0.0]])


def test_a_run_of_a_model_that_is_not_described_can_still_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = cbdsl.run(small_spec(rounds=1), model=perceptron, data=blobs(), out=tmp_path / "run")
    from cbdsl.models import saved_model  # noqa: PLC0415

    monkeypatch.setattr(saved_model, "_graph", lambda _: None)
    again = cbdsl.load(tmp_path / "run")
    assert again.summary == result.summary
    with refused_as("not-supported"):
        again.predict(blobs().test.features)


def test_the_package_lists_its_public_names() -> None:
    names = dir(cbdsl)
    assert set(cbdsl.__all__) <= set(names)
    assert {"run", "preset", "Spec", "compare", "load"} <= set(names)
    assert len(names) == len(set(names))


def test_objects_show_themselves_in_few_words() -> None:
    spec = cbdsl.Spec(rounds=5).with_settings({"local.epochs": 3, "data.source": "<b>"})
    assert repr(spec) == "Spec(rounds=5, data.source='<b>', local.epochs=3)"
    assert "&lt;b&gt;" in spec._repr_html_()
    assert repr(load_data("mnist")).startswith("Dataset(name: mnist, training samples: 60,000, test samples: 10,000,")
    assert "10 classes" in load_data("mnist")._repr_html_()
    result = cbdsl.run(small_spec(rounds=1), model=perceptron, data=blobs())
    assert "<th>accuracy</th>" in result._repr_html_()
